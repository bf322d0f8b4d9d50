"""`erg compare`: its document and its CSV.

Verdicts come first; charts and tables follow as evidence. Groups that are not comparable have
values and no verdict, so that a reader does not pick a winner from the table.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ergmeter.compare.comparison import Comparison, GroupPair, impossible_entry
from ergmeter.compare.entry import Entry, Group
from ergmeter.compare.grouping import differing_facts
from ergmeter.compare.run_curves import Axis, ComparedCurves
from ergmeter.compare.verdicts import Verdict
from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.records import Missing, Reading, interval_text, or_missing, value_text
from ergmeter.stats.ratio import Contrast, Mean
from ergmeter.units import number_of
from ergmeter.views import documents
from ergmeter.views.charts.compare_charts import (
    DIFFERENCES,
    PARETO,
    RATIOS,
    compare_charts,
    contrast_in_words,
    front_in_words,
    head,
    is_assumed,
)
from ergmeter.views.charts.compare_curves import ABOUT, course_charts
from ergmeter.views.document import (
    EVERYWHERE,
    VERDICTS,
    AxisChoice,
    ChartGrid,
    Document,
    HeadlinePart,
    Items,
    Medium,
    Note,
    Paragraph,
    Part,
    Section,
    Table,
    TableColumn,
    VerdictWeight,
    Weight,
)
from ergmeter.views.reading_text import column_text

_WEIGHTS: dict[str, VerdictWeight] = {
    "absent" if weight == "no verdict" else weight: weight for weight in VERDICTS
}
# Sign and words of each state of a verdict.
SIGNS = {state: " ".join(VERDICTS[weight]).strip() for state, weight in _WEIGHTS.items()}
_MANY = 5
_MOST_NAMES = 8
_MOST_PAIRS = 20  # open on the page; the rest is folded
_FILES: tuple[Medium, ...] = ("markdown", "html")
_PAGES: tuple[Medium, ...] = ("html",)


def comparison_document(
    comparison: Comparison,
    curves: ComparedCurves | None = None,
    *,
    x: Axis | None = None,
    lists_runs: bool = False,
) -> Document:
    """Return verdicts, means of the groups, ratios, every run and notes.

    `curves`: those of the runs, for a page, which gets charts with them. `x`: their first axis.
    `lists_runs`: the terminal lists every run too.
    """
    charts = compare_charts(comparison) if curves else []
    front = tuple(ChartGrid((chart,)) for chart in charts if chart.id == PARETO)
    ratios = (ChartGrid((chart,)) for chart in charts if chart.id in (RATIOS, DIFFERENCES))
    over = _course_parts(curves, comparison, x) if curves else ()
    sections = (
        Section("verdicts", "verdicts", tuple(_verdict_parts(comparison))),
        Section("ratios-section", "ratios", (*ratios, *_contrasts(comparison)), media=_FILES),
        Section("pareto-section", "Pareto front", front, media=_PAGES),
        Section("courses", "over the course of the runs", over, media=_PAGES),
        Section("groups", "groups", (_group_table(comparison),)),
        Section(
            "differences-section",
            "what differs in configuration",
            (_differences(comparison),),
            media=_FILES,
        ),
        Section(
            "runs",
            "every run",
            (_run_table(comparison),),
            media=EVERYWHERE if lists_runs else _FILES,
        ),
        Section("notes", "notes", tuple(_notes(comparison))),
    )
    return Document(
        f"Comparison: {_names(comparison)}",
        tuple(section for section in sections if section.parts),
        comparison_data(comparison),
        _about(comparison),
    )


def _names(comparison: Comparison) -> str:
    """Return the names of the groups, or their number if many."""
    if len(comparison.groups) > _MOST_NAMES:
        return f"{len(comparison.groups)} groups"
    return ", ".join(group.name for group in comparison.groups)


def _about(comparison: Comparison) -> str:
    runs = number_of(sum(len(group.entries) for group in comparison.groups), "run")
    groups = number_of(len(comparison.groups), "group")
    against = f", each compared with {comparison.groups[0].name}" if comparison.pairs else ""
    intervals = f"intervals of {comparison.options.confidence * 100:g} %"
    return f"{runs} in {groups} by {', '.join(comparison.group_by)}{against}; {intervals}"


# Verdicts.


def _verdict_parts(comparison: Comparison) -> Iterator[Part]:
    """Yield runs left out and disturbed, then each pair, then the Pareto front."""
    if not comparison.pairs:
        yield HeadlinePart(text="One group: nothing to compare it with.", state="unsure")
    elif not comparison.is_comparable:
        yield HeadlinePart(text="Not all groups are comparable: reasons below.", state="unsure")
    before = (
        *(f"left out: {line}" for line in comparison.left_out),
        *(f"compare with care: {line}" for line in comparison.cautions),
    )
    if before:
        yield Items(before)
    pairs = [
        Section(f"pair-{number}", title(pair), tuple(_pair_notes(pair)))
        for number, pair in enumerate(comparison.pairs, 1)
    ]
    yield from pairs[:_MOST_PAIRS]
    more = tuple(pairs[_MOST_PAIRS:])
    if more:
        yield Section("more-pairs", f"{len(more)} more groups", more, is_folded=True)
    if comparison.front:
        yield Paragraph(front_in_words(comparison.front))


def title(pair: GroupPair) -> str:
    """Return the compared groups and the method."""
    done = next((v.contrast for v in pair.verdicts if v.contrast), None)
    if done is None:
        return f"{pair.new.name} against {pair.ref.name}"
    method = "" if done.low is None else f", {done.method}"  # a single run has no interval
    runs = f"{done.repeats[0]} and {done.repeats[1]} runs"
    return f"{pair.new.name} against {pair.ref.name} ({runs}{method})"


def _pair_notes(pair: GroupPair) -> Iterator[Note]:
    """Yield the verdicts; a reason that all without an interval share is given once."""
    whys = {v.contrast.why for v in pair.verdicts if v.state == "no interval" and v.contrast}
    shared = whys.pop() if len(whys) == 1 else ""
    for verdict in pair.verdicts:
        yield Note(_WEIGHTS[verdict.state], verdict.words.removesuffix(f"; {shared}"))
    if shared:
        yield Note("remark", shared)
    yield from (Note(weight, line) for weight, line in beside_verdicts(pair))


def beside_verdicts(pair: GroupPair) -> Iterable[tuple[Weight, str]]:
    """Yield weight and text of the lines beside a pair's verdicts."""
    fair = pair.fairness
    for refusal in fair.refusals:
        yield "serious", f"not comparable: {refusal}"
    if fair.explanations:
        so_what = "could explain it" if pair.is_comparable else "differs besides"
        yield "remark", f"{so_what}: {', '.join(fair.explanations)}"
    for remark in fair.remarks:
        yield "remark", remark
    if fair.unknown:
        yield "remark", f"not checked, since a side lacks it: {', '.join(fair.unknown)}"


# Charts and tables.


def _course_parts(
    curves: ComparedCurves, comparison: Comparison, x: Axis | None
) -> tuple[Part, ...]:
    """Return the axis selector, the curves and what is not drawn."""
    over = course_charts(curves, comparison.groups, x=x)
    choice = (AxisChoice(over.axes, over.first), Paragraph(ABOUT, style="dim"))
    return (
        *(choice if over.axes else ()),
        *(ChartGrid((chart,)) for chart in over.charts),
        *(Paragraph(line, style="dim") for line in over.notes),
    )


def _group_table(comparison: Comparison) -> Table:
    """Return a table of groups: the mean of each metric, and its spread on a line below."""
    by = ", ".join(comparison.group_by)
    heads = ("runs", *(head(m).replace(", ", ",\n") for m in comparison.measures))
    rows = (
        (
            group.name,
            str(len(group.entries)),
            *("\n".join(filter(None, cell(comparison, group, m))) for m in comparison.measures),
        )
        for group in comparison.groups
    )
    columns = (TableColumn(by, style="strong"), *(TableColumn(text, "number") for text in heads))
    return Table(columns, tuple(rows), row_titles=2)


def cell(comparison: Comparison, group: Group, measured: Metric) -> tuple[str, str]:
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


def _spread(mean: Mean, measured: Metric) -> str:
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


def _contrasts(comparison: Comparison) -> tuple[Table, ...]:
    """Return the table of ratios and differences with their methods, if there are any."""
    rows = []
    for pair in comparison.pairs:
        for verdict in pair.verdicts:
            contrast = verdict.contrast
            cells = ("-", "", verdict.words)
            if contrast is not None:
                runs = f"{contrast.repeats[0]} and {contrast.repeats[1]}"
                how = contrast.method if contrast.low is not None else contrast.why
                cells = (contrast_in_words(contrast), runs, how)
            rows.append((pair.new.name, verdict.measure.phrase, *cells))
    heads = ("group", "metric", f"against {comparison.groups[0].name}", "runs", "how")
    return (Table(heads, tuple(rows)),) if rows else ()


def _differences(comparison: Comparison) -> Table | Paragraph:
    """Return the facts in which groups differ."""
    rows = tuple((fact, *values) for fact, values in differing_facts(comparison.groups))
    if rows:
        return Table(("what", *(group.name for group in comparison.groups)), rows)
    unknown = dict.fromkeys(fact for pair in comparison.pairs for fact in pair.fairness.unknown)
    untold = f" Not checked, since a side lacks it: {', '.join(unknown)}." if unknown else ""
    return Paragraph(f"No recorded fact differs.{untold}", style="dim")


def _run_table(comparison: Comparison) -> Table:
    rows = (
        (group.name, entry.source, *(_figure_in_words(entry, m) for m in comparison.measures))
        for group in comparison.groups
        for entry in group.entries
    )
    return Table(("group", "run", *map(head, comparison.measures)), tuple(rows))


def _figure_in_words(entry: Entry, measured: Metric) -> str:
    """Return a run's value with interval and basis, or the reason for its absence."""
    result = entry.figures.get(measured.key)
    if not isinstance(result, Reading):
        return f"- ({entry.why_not(measured.key)})"
    between = f" ({interval_text(result)})" if interval_text(result) else ""
    return f"{value_text(result)}{between}, {result.basis}"


def _notes(comparison: Comparison) -> Iterator[Items]:
    notes = _footnotes(comparison)
    is_of_runs = any(e.kind != "analysis" for g in comparison.to_compare for e in g.entries)
    if is_of_runs and any(not pair.is_comparable for pair in comparison.pairs):
        notes.append("option --anyway gives verdicts for these too")
    if notes:
        yield Items(tuple(notes))


def _footnotes(comparison: Comparison) -> list[str]:
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
            f"{len(sure)} intervals, each by itself: if nothing differs, {wrong:g} % of them"
            " still show a difference"
        )
    return notes


# JSON and CSV.


_OF_CONTRAST = ("scale", "value", "low", "high", "confidence", "method")
_OF_MEASURE = ("key", "title", "unit", "direction", "scale")
_CSV = (
    *("baseline", "group", "metric", "unit", "baseline_mean", "group_mean", *_OF_CONTRAST),
    *("baseline_runs", "group_runs", "state", "verdict"),
)


def comparison_data(comparison: Comparison) -> dict[str, Any]:
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
        "notes": [*comparison.cautions, *_footnotes(comparison)],
        "left_out": list(comparison.left_out),
    }
    return dict(documents.finite(body))


def csv_text(comparison: Comparison) -> str:
    """Return a CSV row for each metric of each pair."""
    rows: list[dict[str, object]] = []
    for pair in comparison.pairs:
        names = {"baseline": pair.ref.name, "group": pair.new.name}
        if not pair.is_comparable:
            why = f"not comparable: {'; '.join(pair.fairness.refusals)}"
            rows.append({**names, "state": "refused", "verdict": why})
        rows += [names | _csv_row(comparison, pair, v) for v in pair.verdicts]
    return csv_of(_CSV, rows)


def csv_of(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Return rows as CSV with these columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _group_json(comparison: Comparison, group: Group) -> dict[str, Any]:
    results = {m.key: or_missing(comparison.mean, group, m) for m in comparison.measures}
    means = {
        key: {"missing": mean.reason} if isinstance(mean, Missing) else asdict(mean)
        for key, mean in results.items()
    }
    absent = Missing("the source does not have it")
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
        "baseline": pair.ref.name,
        "group": pair.new.name,
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
    for column, group in (("baseline_mean", pair.ref), ("group_mean", pair.new)):
        with suppress(NotMeasurable):
            row[column] = comparison.mean(group, measured).value
    if contrast is not None:
        row |= {column: getattr(contrast, column) for column in _OF_CONTRAST}
        row["group_runs"], row["baseline_runs"] = contrast.repeats
    return row
