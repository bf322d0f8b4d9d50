"""A comparison of runs as terminal text, JSON, CSV and Markdown (`erg compare`).

The table shows each value with its interval; the verdicts follow below it. Groups that are not
comparable have values and no verdict, so that a reader does not pick a winner from the table.
"""

from __future__ import annotations

import csv
import io
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group as Lines
from rich.table import Table as Grid
from rich.text import Text

from ergmeter.compare.comparison import Comparison, Front, GroupPair, impossible_entry
from ergmeter.compare.grouping import Group, differing_facts
from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import in_view
from ergmeter.records import Missing, Reading
from ergmeter.units import ratio_text, significant
from ergmeter.views import documents
from ergmeter.views.blocks import escaped, markdown_table
from ergmeter.views.charts.chart import Table
from ergmeter.views.run.card import HangingText, column_text, interval, value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from ergmeter.compare.entry import Entry
    from ergmeter.compare.verdicts import Measure, Verdict
    from ergmeter.stats.ratio import Contrast, Mean

# Sign, style on a terminal, and words of each state of a verdict.
_STATES = {
    "better": ("+", "green", "better"),
    "worse": ("-", "red", "worse"),
    "differs": ("*", "yellow", "differs"),
    "not shown": ("=", "", "no difference shown"),
    "no interval": ("?", "yellow", "no interval"),
    "absent": (" ", "dim", "absent"),
}
SIGNS = {state: f"{sign} {words}".strip() for state, (sign, _, words) in _STATES.items()}
_ACROSS = 6  # figures beside one another in 80 columns
_MANY = 5


def page(comparison: Comparison) -> RenderableType:
    """Render for the terminal: table, verdicts by pair, Pareto front, notes."""
    parts: list[RenderableType] = []
    for start in range(0, len(comparison.measures), _ACROSS):
        parts += [_metric_table(comparison, comparison.measures[start : start + _ACROSS]), Text()]
    before = before_verdicts(comparison)
    if before:
        parts += [*(HangingText("", "yellow", line) for line in before), Text()]
    for pair in comparison.pairs:
        parts += [*_pair(pair), Text()]
    if comparison.front:
        parts += [HangingText("", "", front_in_words(comparison.front)), Text()]
    parts += [HangingText("", "dim", f"note: {note}") for note in footnotes(comparison)]
    return Lines(*parts)


def head(measured: Measure) -> str:
    """Return the short title of a column."""
    return _label(measured.key) or measured.title


def _label(key: str) -> str:
    """The declared label of a metric in a comparison; empty if there is none."""
    at = {**in_view("compare"), **in_view("compare target")}.get(key)
    return at.label if at else ""


def cell(comparison: Comparison, group: Group, measured: Measure) -> tuple[str, str]:
    """Return a group's mean and its spread, or a dash."""
    try:
        mean = comparison.mean(group, measured)
    except NotMeasurable:
        wrong = impossible_entry(group, measured.key)
        return "-" if wrong is None else column_text(wrong.figures[measured.key]), ""
    value_text = column_text(Reading(mean.value, measured.unit, "measured"))
    if is_assumed(group, measured):
        return value_text, "assumed"
    return value_text, _spread(mean, measured)


def is_assumed(group: Group, measured: Measure) -> bool:
    """True if a group's value rests on an assumption: its repeats do not show the uncertainty."""
    return any(measured.key in entry.assumed for entry in group.entries)


def before_verdicts(comparison: Comparison) -> list[str]:
    """Return notes on runs left out of the verdicts, and on disturbed runs in them."""
    return [
        *(f"left out: {line}" for line in comparison.left_out),
        *(f"compare with care: {line}" for line in comparison.cautions),
    ]


def footnotes(comparison: Comparison) -> list[str]:
    """Return the notes on the whole comparison."""
    notes = list(comparison.notes)
    sure = [
        v for p in comparison.pairs for v in p.verdicts if v.contrast and v.contrast.low is not None
    ]
    if len(comparison.pairs) > 1:
        notes.append(
            f"a difference is shown only if Holm's method confirms it over the"
            f" {len(comparison.pairs)} comparisons of each metric; intervals are not widened"
        )
    elif len(sure) >= _MANY:
        wrong = (1 - comparison.options.confidence) * 100
        notes.append(
            f"{len(sure)} intervals, each by itself: where nothing differs, {wrong:g} % of such"
            " claim that something does"
        )
    return notes


def front_in_words(front: Front) -> str:
    """Describe the Pareto front; long lists are cut with a count."""
    axes = ", ".join(_label(key) or key for key in front.axes)
    text = f"Pareto front ({axes}): {first_names(front.on) or 'nobody'}"
    if front.beaten:
        who = first_names([f"{name} (by {beaters(by)})" for name, by in front.beaten.items()])
        text += f"; beaten: {who}"
    return text + (f" ({front.remark})" if front.remark else "")


def beaters(names: Sequence[str]) -> str:
    """Return the groups that beat a group, cut with a count."""
    return first_names(names, most=3, joint=" and ")


def first_names(names: Sequence[str], *, most: int = 8, joint: str = ", ") -> str:
    """Return the first names, and the number of others."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return joint.join([*names[:most], *more])


def title(pair: GroupPair) -> str:
    """Return the compared groups and the method."""
    done = next((v.contrast for v in pair.verdicts if v.contrast), None)
    if done is None:
        return f"{pair.other} against {pair.baseline}"
    method = "" if done.low is None else f", {done.method}"  # a single run has no interval
    runs = f"{done.repeats[0]} and {done.repeats[1]} runs"
    return f"{pair.other} against {pair.baseline} ({runs}{method})"


def beside_verdicts(pair: GroupPair) -> Iterable[tuple[str, str]]:
    """Yield style and text of the lines beside a pair's verdicts."""
    fair = pair.fairness
    for refusal in fair.refusals:
        yield "red", f"not comparable: {refusal}"
    if fair.refusals and not pair.is_comparable:
        yield "dim", "--anyway gives the verdicts all the same"
    if fair.explanations:
        so_what = "could explain it" if pair.is_comparable else "differs besides"
        yield "yellow", f"{so_what}: {', '.join(fair.explanations)}"
    for remark in fair.remarks:
        yield "yellow", remark
    if fair.unknown:
        yield "dim", f"not checked, not told by both sides: {', '.join(fair.unknown)}"


def contrast_in_words(contrast: Contrast | None) -> str:
    """Return a ratio or difference with its interval."""
    if contrast is None:
        return "absent"
    ratio_text = _short(contrast.value, contrast)
    if contrast.low is None or contrast.high is None:
        return f"{ratio_text}, {'one run' if min(contrast.repeats) == 1 else 'no interval'}"
    if contrast.is_exact:
        return f"{ratio_text}, in every run"
    return f"{ratio_text} ({_short(contrast.low, contrast)} to {_short(contrast.high, contrast)})"


def _short(number: float, contrast: Contrast) -> str:
    return ratio_text(number) if contrast.scale == "ratio" else significant(number, 3)


def figure_in_words(entry: Entry, measured: Measure) -> str:
    """Return a run's value with interval and basis, or the reason for its absence."""
    result = entry.figures.get(measured.key)
    if not isinstance(result, Reading):
        return f"- ({entry.why_not(measured.key)})"
    between = f" ({interval(result)})" if interval(result) else ""
    return f"{value(result)}{between}, {result.basis}"


# Tables, for Markdown and the HTML page.


def group_table(comparison: Comparison) -> Table:
    """Return the mean and spread of each group."""
    rows = (
        (
            group.name,
            str(len(group.entries)),
            *(" ".join(cell(comparison, group, m)).strip() for m in comparison.measures),
        )
        for group in comparison.groups
    )
    heads = (", ".join(comparison.group_by), "runs", *map(head, comparison.measures))
    return Table(heads, tuple(rows))


def difference_table(comparison: Comparison, what: str) -> Table:
    """Return the facts in which groups differ; `what` is the head of their names."""
    rows = ((fact, *values) for fact, values in differing_facts(comparison.groups))
    return Table((what, *(group.name for group in comparison.groups)), tuple(rows))


def run_table(comparison: Comparison) -> Table:
    """Return the metrics of every run."""
    rows = (
        (group.name, entry.source, *(figure_in_words(entry, m) for m in comparison.measures))
        for group in comparison.groups
        for entry in group.entries
    )
    return Table(("group", "run", *map(head, comparison.measures)), tuple(rows))


def _contrast_table(comparison: Comparison) -> Table:
    rows = []
    for pair in comparison.pairs:
        for verdict in pair.verdicts:
            contrast = verdict.contrast
            cells = ("-", "", verdict.words)
            if contrast is not None:
                runs = f"{contrast.repeats[0]} and {contrast.repeats[1]}"
                how = contrast.method if contrast.low is not None else contrast.why
                cells = (contrast_in_words(contrast), runs, how)
            rows.append((pair.other, verdict.measure.noun, *cells))
    heads = ("group", "figure", f"against {comparison.groups[0].name}", "runs", "how")
    return Table(heads, tuple(rows))


# Terminal.


def _metric_table(comparison: Comparison, measures: tuple[Measure, ...]) -> Grid:
    table = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(", ".join(comparison.group_by), overflow="fold")
    table.add_column("runs", justify="right")
    for measured in measures:
        table.add_column(head(measured), justify="right", no_wrap=True)
    for group in comparison.groups:
        cells = [
            Text.assemble(value, "\n", (spread, "dim"))
            for value, spread in (cell(comparison, group, measured) for measured in measures)
        ]
        table.add_row(Text(group.name, "bold"), str(len(group.entries)), *cells)
    return table


def _spread(mean: Mean, measured: Measure) -> str:
    """Return half the interval of a mean; for a geometric mean the longer half, in percent."""
    if mean.low is None or mean.high is None:
        return ""
    if measured.is_quality:
        return f"±{(mean.high - mean.low) / 2:.2g}"
    if mean.noise == 0:
        return "alike"
    half = (mean.high / mean.value - 1) * 100
    if half > 100:
        return ">100 %"
    return f"±{half:.1f} %" if half < 9.95 else f"±{half:.0f} %"


def _pair(pair: GroupPair) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(title(pair), "bold")]
    for verdict in pair.verdicts:
        sign, style, _ = _STATES[verdict.state]
        lines.append(HangingText(f"{sign} ", style, verdict.words, indent="  "))
    lines += [HangingText("", style, line, indent="  ") for style, line in beside_verdicts(pair)]
    return lines


# JSON, CSV and Markdown.


_OF_CONTRAST = ("scale", "value", "low", "high", "confidence", "method")
_OF_MEASURE = ("key", "title", "unit", "direction", "scale")
_CSV = (
    *("baseline", "group", "metric", "unit", "baseline_mean", "group_mean", *_OF_CONTRAST),
    *("baseline_runs", "group_runs", "state", "verdict"),
)


def document(comparison: Comparison) -> dict[str, Any]:
    """Return everything as JSON: repeats, means, intervals with their method, reasons."""
    body = {
        "group_by": list(comparison.group_by),
        "baseline": comparison.groups[0].name,
        "confidence": comparison.options.confidence,
        "is_comparable": comparison.is_comparable,
        "metrics": [{name: getattr(m, name) for name in _OF_MEASURE} for m in comparison.measures],
        "groups": [_group_json(comparison, group) for group in comparison.groups],
        "pairs": [_pair_json(pair) for pair in comparison.pairs],
        "pareto": asdict(comparison.front) if comparison.front else None,
        "target_loss": comparison.options.target_loss,
        "notes": [*comparison.cautions, *footnotes(comparison)],
        "left_out": list(comparison.left_out),
    }
    return dict(documents.finite(body))


def table(comparison: Comparison) -> str:
    """Return a CSV row for each metric of each pair."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, lineterminator="\n")
    writer.writeheader()
    for pair in comparison.pairs:
        names = {"baseline": pair.baseline, "group": pair.other}
        if not pair.is_comparable:
            why = f"not comparable: {'; '.join(pair.fairness.refusals)}"
            writer.writerow({**names, "state": "refused", "verdict": why})
        writer.writerows(names | _csv_row(comparison, pair, v) for v in pair.verdicts)
    return text.getvalue()


def markdown(comparison: Comparison) -> str:
    """Render as Markdown: omissions, verdicts, Pareto front, tables."""
    lines = [f"- {escaped(line)}" for line in before_verdicts(comparison)]
    lines += [""] if lines else []
    for pair in comparison.pairs:
        lines += [f"**{escaped(title(pair))}**", ""]
        lines += [f"- **{verdict.state}**: {escaped(verdict.words)}" for verdict in pair.verdicts]
        lines += [f"- {escaped(line)}" for _, line in beside_verdicts(pair)]
        lines.append("")
    if comparison.front:
        lines += [escaped(front_in_words(comparison.front)), ""]
    for table in (
        group_table(comparison),
        _contrast_table(comparison),
        difference_table(comparison, "differs in configuration"),
        run_table(comparison),
    ):
        if table.rows:
            lines += [*markdown_table(table.head, table.rows), ""]
    lines += [f"- note: {escaped(note)}" for note in footnotes(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _group_json(comparison: Comparison, group: Group) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for measured in comparison.measures:
        try:
            means[measured.key] = asdict(comparison.mean(group, measured))
        except NotMeasurable as error:
            means[measured.key] = {"missing": str(error)}
    absent = Missing("the source does not hold it")
    runs = [
        {
            "source": entry.source,
            "facts": dict(entry.facts),
            "readings": {
                measured.key: documents.result(entry.figures.get(measured.key, absent))
                for measured in comparison.measures
            },
            "remarks": list(entry.remarks),
        }
        for entry in group.entries
    ]
    return {"name": group.name, "means": means, "runs": runs}


def _pair_json(pair: GroupPair) -> dict[str, Any]:
    return {
        "baseline": pair.baseline,
        "group": pair.other,
        "is_comparable": pair.is_comparable,
        **asdict(pair.fairness),
        "verdicts": [
            {
                "metric": verdict.measure.key,
                "state": verdict.state,
                "words": verdict.words,
                "contrast": _contrast_json(verdict.contrast) if verdict.contrast else None,
                "needed": asdict(verdict.needed) if verdict.needed else None,
            }
            for verdict in pair.verdicts
        ],
    }


def _contrast_json(contrast: Contrast) -> dict[str, Any]:
    names = ("value", "low", "high", "scale", "confidence", "method", "repeats", "noise")
    return {
        **{name: getattr(contrast, name) for name in names},
        "freedom": contrast.dof,
        "error": contrast.error,
        "why": contrast.why,
    }


def _csv_row(comparison: Comparison, pair: GroupPair, verdict: Verdict) -> dict[str, object]:
    measured, contrast = verdict.measure, verdict.contrast
    row: dict[str, object] = {"metric": measured.key, "unit": measured.unit}
    row |= {"state": verdict.state, "verdict": verdict.words}
    groups = {group.name: group for group in comparison.groups}
    for column, name in (("baseline_mean", pair.baseline), ("group_mean", pair.other)):
        with suppress(NotMeasurable):
            row[column] = comparison.mean(groups[name], measured).value
    if contrast is not None:
        row |= {column: getattr(contrast, column) for column in _OF_CONTRAST}
        row["group_runs"], row["baseline_runs"] = contrast.repeats
    return row
