"""What `erg compare` found, for programs and papers: JSON with everything, CSV, Markdown."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ergmeter.compare.comparison import mean_of
from ergmeter.compare.grouping import differing_facts
from ergmeter.errors import NotMeasurable
from ergmeter.records import Missing
from ergmeter.views import documents
from ergmeter.views.analyze.markdown import escaped
from ergmeter.views.compare import (
    around,
    before_verdicts,
    cell,
    contrast_in_words,
    figure_in_words,
    footnotes,
    front_in_words,
    head,
    title,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.compare.comparison import Comparison, GroupPair
    from ergmeter.compare.entry import Entry
    from ergmeter.compare.grouping import Group
    from ergmeter.compare.verdicts import Measure, Verdict

_CSV = (
    *("baseline", "group", "metric", "unit", "baseline_mean", "group_mean", "scale", "value"),
    *("low", "high", "confidence", "method", "baseline_runs", "group_runs", "state", "verdict"),
)


def document(found: Comparison) -> dict[str, Any]:
    """Everything: values of each repeat, means, intervals with their method, reasons."""
    whole = {
        "group_by": list(found.group_by),
        "baseline": found.groups[0].name,
        "confidence": found.options.confidence,
        "is_comparable": found.is_comparable,
        "metrics": [asdict(measured) for measured in found.measures],
        "groups": [_group(found, group) for group in found.groups],
        "pairs": [_pair(pair) for pair in found.pairs],
        "pareto": asdict(found.front) if found.front else None,
        "target_loss": found.options.target_loss,
        "notes": [*found.cautions, *footnotes(found)],
        "left_out": list(found.left_out),
    }
    return dict(documents.finite(whole))


def table(found: Comparison) -> str:
    """A row for each figure of each pair, as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, lineterminator="\n")
    writer.writeheader()
    groups = {group.name: group for group in found.groups}
    for pair in found.pairs:
        if not pair.is_comparable:
            why = f"not comparable: {'; '.join(pair.fairness.refusals)}"
            writer.writerow(
                {"baseline": pair.baseline, "group": pair.other, "state": "refused", "verdict": why}
            )
        for one in pair.verdicts:
            ours, theirs = groups[pair.other], groups[pair.baseline]
            means = {
                "baseline_mean": _mean(found, theirs, one.measure),
                "group_mean": _mean(found, ours, one.measure),
            }
            writer.writerow({"baseline": pair.baseline, "group": pair.other, **means, **_row(one)})
    return text.getvalue()


def markdown(found: Comparison) -> str:
    """The whole of it, to paste: what was left out, verdicts, the front, the tables below them."""
    lines = [f"- {escaped(line)}" for line in before_verdicts(found)]
    lines += [""] if lines else []
    for pair in found.pairs:
        lines += [f"**{escaped(title(pair))}**", ""]
        lines += [f"- **{one.state}**: {escaped(one.words)}" for one in pair.verdicts]
        lines += [f"- {escaped(line)}" for _, line in around(pair)]
        lines.append("")
    if found.front:
        lines += [escaped(front_in_words(found.front)), ""]
    for heads, rows in (_groups(found), _contrasts(found), _differing(found), _runs(found)):
        if rows:
            lines += [_line(heads), _line("---" for _ in heads), *map(_line, rows), ""]
    lines += [f"- note: {escaped(note)}" for note in footnotes(found)]
    return "\n".join(lines).rstrip() + "\n"


_Rows = tuple[list[str], list[list[str]]]


def _groups(found: Comparison) -> _Rows:
    heads = [", ".join(found.group_by), "runs", *map(head, found.measures)]
    rows = []
    for group in found.groups:
        cells = [" ".join(cell(found, group, one)).strip() for one in found.measures]
        rows.append([group.name, str(len(group.entries)), *cells])
    return heads, rows


def _contrasts(found: Comparison) -> _Rows:
    heads = ["group", "figure", f"against {found.groups[0].name}", "runs", "how"]
    rows = []
    for pair in found.pairs:
        for one in pair.verdicts:
            if one.contrast is None:
                rows.append([pair.other, one.measure.noun, "-", "", one.words])
                continue
            runs = f"{one.contrast.repeats[0]} and {one.contrast.repeats[1]}"
            how = one.contrast.method if one.contrast.low is not None else one.contrast.why
            rows.append([pair.other, one.measure.noun, contrast_in_words(one.contrast), runs, how])
    return heads, rows


def _differing(found: Comparison) -> _Rows:
    heads = ["differs in configuration", *(group.name for group in found.groups)]
    return heads, [[what, *said] for what, said in differing_facts(found.groups)]


def _runs(found: Comparison) -> _Rows:
    heads = ["group", "run", *map(head, found.measures)]
    rows = [
        [group.name, entry.source, *(figure_in_words(entry, one) for one in found.measures)]
        for group in found.groups
        for entry in group.entries
    ]
    return heads, rows


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


def _mean(found: Comparison, group: Group, measured: Measure) -> float | None:
    try:
        return mean_of(group, measured, confidence=found.options.confidence).value
    except NotMeasurable:
        return None


def _group(found: Comparison, group: Group) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for measured in found.measures:
        try:
            mean = mean_of(group, measured, confidence=found.options.confidence)
            means[measured.key] = asdict(mean)
        except NotMeasurable as error:
            means[measured.key] = {"missing": str(error)}
    runs = [_entry(entry, found) for entry in group.entries]
    return {"name": group.name, "means": means, "runs": runs}


def _entry(entry: Entry, found: Comparison) -> dict[str, Any]:
    absent = Missing("the source does not hold it")
    return {
        "source": entry.source,
        "facts": dict(entry.facts),
        "readings": {
            one.key: documents.result(entry.figures.get(one.key, absent)) for one in found.measures
        },
        "remarks": list(entry.remarks),
    }


def _pair(pair: GroupPair) -> dict[str, Any]:
    return {
        "baseline": pair.baseline,
        "group": pair.other,
        "is_comparable": pair.is_comparable,
        **asdict(pair.fairness),
        "verdicts": [
            {
                "metric": one.measure.key,
                "state": one.state,
                "words": one.words,
                "contrast": asdict(one.contrast) if one.contrast else None,
                "needed": asdict(one.needed) if one.needed else None,
            }
            for one in pair.verdicts
        ],
    }


def _row(one: Verdict) -> dict[str, object]:
    found = one.contrast
    said: dict[str, object] = {
        "metric": one.measure.key,
        "unit": one.measure.unit,
        "state": one.state,
        "verdict": one.words,
    }
    if found is None:
        return said
    return said | {
        "scale": found.scale,
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "confidence": found.confidence,
        "method": found.method,
        "baseline_runs": found.repeats[1],
        "group_runs": found.repeats[0],
    }
