"""`erg gate`: judges whether NEW is worse than REF by more than a rule allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import (
    BY,
    NOISE,
    SHORT_FLAGS,
    check_writable,
    flag,
    path_option,
    repeated,
    with_default,
    with_format,
    with_page,
)
from ergmeter.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.cli.options import Forms
    from ergmeter.compare.entry import SourceEntries
    from ergmeter.compare.gate import Gate
    from ergmeter.metrics.catalog import Metric

_FOR_CI = ("junit", "sarif", "github")
_INPUT = click.Path(path_type=Path, readable=False)  # what can't be read has its own exit code


@click.command()
@click.argument("new", type=_INPUT)
@click.argument("ref", type=_INPUT)
@repeated(
    "--rule",
    "rules",
    metavar="RULE",
    help="What may change, which way and by how much: 'tokens_per_s -3%' (may fall by 3 %),"
    " 'peak_memory +2%', 'loss +-1%', 'loss +0.01'. Without a sign, the way that is worse is"
    " limited: 'mfu 3%'. May be repeated. Default: the first three.",
)
@NOISE
@flag("--plain", help="Judge single runs by the threshold alone; noise can then fail the gate.")
@BY
@with_default(
    "--confidence",
    type=click.FloatRange(0.5, 0.9999),
    default=0.95,
    help="Where nothing changed, the gate does not fail in at least this share of cases.",
)
@flag("--strict", help="Exit 1 also if the gate is inconclusive.")
@flag(
    "--allow-missing", help="A rule whose metric no cell has on both sides is listed, not an error."
)
@with_format(
    *("text", "md", "json", *_FOR_CI),
    help="junit, sarif and github are for CI systems: test results, code scanning, annotations.",
    flags=SHORT_FLAGS,
)
@with_page
@path_option(
    "--markdown",
    metavar="FILE",
    help="Also add the Markdown for a pull request to this file, such as $GITHUB_STEP_SUMMARY.",
)
def command(
    new: Path,
    ref: Path,
    rules: tuple[str, ...],
    noises: tuple[str, ...],
    plain: bool,
    by: tuple[str, ...],
    confidence: float,
    strict: bool,
    allow_missing: bool,
    forms: Forms,
    markdown: Path | None,
) -> int:
    """Judge the results in NEW by those in REF, rule by rule, with the noise that was measured.

    NEW and REF are runs, folders of runs, a part of a run (RUN:2), energy ledgers, directories or
    single cells of `erg bench run`, tables that `erg bench report` wrote, published FMS files, or
    outputs of `erg analyze`. A metric is worse if its change exceeds the rule and is significant;
    one that is too noisy to judge is inconclusive. So is one run against one run, unless --noise
    gives the scatter between runs. A cell that worked in REF and failed in NEW is worse; missing
    cells are named.

    \b
    Exit codes: 0 pass, or inconclusive without --strict
                1 worse, or inconclusive with --strict
                2 misuse, or a rule has nothing to judge (--allow-missing: no error)
                3 not comparable: other work, or another kind of window
                4 an input could not be read
    """
    from ergmeter.compare.gate import (
        DEFAULT_RULES,
        JOB_RULES,
        gate,
        parse_noise,
        parse_rule,
        unjudged,
    )
    from ergmeter.compare.pairing import CompareOptions

    if markdown:
        check_writable(markdown, option="--markdown")
    try:
        measures = [parse_rule(rule).measure for rule in rules or DEFAULT_RULES]
        new_side, ref_side = _sides(new, ref, measures)
        if not rules and any(e.kind == "job" for e in (*new_side.entries, *ref_side.entries)):
            measures = [parse_rule(rule).measure for rule in JOB_RULES]
            new_side, ref_side = _sides(new, ref, measures)
        noise = parse_noise(noises, measures, judged=ref_side.entries, by=by)
        judged = gate(
            new_side.entries,
            ref_side.entries,
            rules,
            left_out=(*new_side.left_out, *ref_side.left_out),
            options=CompareOptions(confidence=confidence, noise=noise, by=by),
            is_strict=strict,
            is_plain=plain,
            allow_missing=allow_missing,
        )
    except (FormatError, OSError, UsageError) as error:
        judged = unjudged(error)
        if forms.form == "text" and judged.exit_code == 2 and not (markdown or forms.page):
            raise
    _show(judged, forms, new=new, markdown=markdown)
    if judged.reason:
        click.echo(f"erg gate: {judged.reason}", err=True)
    return judged.exit_code


def _sides(new: Path, ref: Path, measures: Sequence[Metric]) -> tuple[SourceEntries, SourceEntries]:
    """Read both sides with these metrics: entries, failed ones too, and what was left out.

    If cells are compared with runs, the cells are read from their own runs.
    """
    from ergmeter.compare.entry import Wanted, read_side
    from ergmeter.compare.gate import check_trainings
    from ergmeter.compare.sources import runs_of_cells

    keys = tuple(key for measured in measures for key in measured.every_key)
    sides = []
    for path in (new, ref):
        source = read_side(path, keys)
        if not source.entries:
            raise FormatError(source.left_out[0] if source.left_out else f"{path} has no run")
        check_trainings(path, source.entries)
        sides.append(source)
    kinds = [{entry.kind for entry in side.entries} for side in sides]
    if {"cell"} in kinds and kinds[0] != kinds[1]:
        wanted = Wanted(keys=keys)
        sides = [replace(side, entries=runs_of_cells(side.entries, wanted)) for side in sides]
    return sides[0], sides[1]


def _show(judged: Gate, forms: Forms, *, new: Path, markdown: Path | None) -> None:
    from ergmeter.views import gate
    from ergmeter.views.render.markdown import markdown as markdown_text

    document = gate.gate_document(judged, with_charts=forms.page is not None)
    if markdown:
        with markdown.open("a", encoding="utf-8") as file:
            file.write(markdown_text(document))
    if forms.form in _FOR_CI or (forms.form == "text" and judged.problem):
        forms.write_page(document)
        click.echo(gate.ci_text(judged, forms.form, new=new), nl=False)
    else:
        forms.show(document)
