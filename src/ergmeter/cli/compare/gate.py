"""`erg gate`: judges whether NEW is worse than REF by more than a rule allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import BY, NOISE, PATH, flag, path_option, repeated, with_default
from ergmeter.cli.run_options import print_json

if TYPE_CHECKING:
    from ergmeter.bench.gate import Gate

_FORMATS = ("text", "md", "json")


@click.command()
@click.argument("new", type=PATH)
@click.argument("ref", type=PATH)
@repeated(
    "--rule",
    "rules",
    metavar="RULE",
    help="What may change, which way and by how much: 'tokens_per_s -3%' (may fall by 3 %),"
    " 'peak_memory +2%', 'loss +-1%', 'loss +0.01'. May be repeated. Default: the first three.",
)
@NOISE
@flag("--plain", help="Hold single runs to the bare threshold; noise can then turn the gate red.")
@BY
@with_default(
    "--confidence",
    type=click.FloatRange(0.5, 0.9999),
    default=0.95,
    help="Where nothing changed, the whole gate is not red in at least this share of cases.",
)
@flag("--strict", help="Exit 1 where it is inconclusive, too.")
@flag(
    "--allow-missing", help="A rule whose figure no cell has on both sides is said, and no error."
)
@with_default("--format", "form", type=click.Choice(_FORMATS), default="text")
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
    form: str,
    markdown: Path | None,
) -> int:
    """Judge the results in NEW by those in REF, rule by rule, with the noise that was measured.

    NEW and REF are directories of `erg bench run`, tables that `erg bench report` wrote, or
    published FMS files. A figure is red if its change is beyond the rule and more than chance;
    a cell that is too noisy to tell is inconclusive. A cell that worked in REF and failed in NEW is
    red; missing cells are named. Exits 1 for red; 2 where a rule that was asked for has nothing to
    judge, unless --allow-missing; 0 otherwise, unless --strict.
    """
    from ergmeter.bench.comparing import BenchCompareOptions, parse_noise
    from ergmeter.bench.gate import gate
    from ergmeter.bench.results import load

    options = BenchCompareOptions(confidence=confidence, noise=parse_noise(noises), by=by)
    judged_gate = gate(
        load(new),
        load(ref),
        rules,
        options=options,
        is_strict=strict,
        is_plain=plain,
        allow_missing=allow_missing,
    )
    _show(judged_gate, form)
    if markdown:
        from ergmeter.views.bench.compare import gate_markdown

        with markdown.open("a", encoding="utf-8") as file:
            file.write(gate_markdown(judged_gate))
    if judged_gate.exit_code == 2:
        click.echo(f"erg gate: {judged_gate.why_useless}", err=True)
    return judged_gate.exit_code


def _show(judged_gate: Gate, form: str) -> None:
    from ergmeter.views.bench import compare as view

    if form == "json":
        print_json(view.gate_document(judged_gate))
    elif form == "md":
        click.echo(view.gate_markdown(judged_gate), nl=False)
    else:
        from rich.console import Console

        Console().print(view.gate_page(judged_gate))
