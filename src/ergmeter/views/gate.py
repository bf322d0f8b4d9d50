"""The gate's verdict (`erg gate`) and the comparison of two benches (`erg bench compare`).

Each is one document; the verdict also has forms for CI systems. JSON and CSV name metrics, columns
and states as earlier versions did.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from ergmeter.compare.comparison import Comparison, GroupPair
from ergmeter.compare.gate import GATE_STATES, POOLED, Gate, GateRule, amount_text, value_text
from ergmeter.compare.pairing import conditions
from ergmeter.compare.verdicts import State, Verdict
from ergmeter.metrics.catalog import every_metric
from ergmeter.units import number_of, printable, significant
from ergmeter.version import __version__
from ergmeter.views.charts.chart import Chart, Scale, scale_for
from ergmeter.views.charts.interval_chart import Dot, contrast_dot, interval_chart
from ergmeter.views.compare import csv_of
from ergmeter.views.document import (
    ChartPart,
    Document,
    HeadlinePart,
    Items,
    Paragraph,
    Part,
    Section,
    Table,
    TableColumn,
)
from ergmeter.views.document import State as Colour

METHOD = "Benjamini-Hochberg"
_MOST = 200  # rows of a table
_MOST_DOTS = 60  # rows of a chart; its table has all
_COLOURS: dict[State, Colour] = {"worse": "bad", "inconclusive": "unsure", "pass": "good"}
_TITLES: dict[State, str] = {
    "worse": "worse than is allowed",
    "inconclusive": "inconclusive: nothing worse was shown, not everything could be judged",
    "pass": "within what is allowed",
}
_JSON_STATES: dict[State, str] = {"worse": "red"}
_LEGEND: dict[State, str] = {
    "worse": "worse than is allowed",
    "inconclusive": "inconclusive",
    "pass": "within the rule",
    "no interval": "single runs: no interval",
}
_CSV = (
    *("cell", "metric", "column", "ref", "new", "value", "low", "high", "ref_runs", "new_runs"),
    *("noise", "basis"),
)


# The gate.


def gate_document(gate: Gate, *, with_charts: bool = False) -> Document:
    """Return the verdict, all rules on all configurations, the worst first, and the method.

    `with_charts`: add charts, which only a page shows.
    """
    rows = gate_rows(gate)
    table = Table(("verdict", "cell", "rule", TableColumn("change", "below")), tuple(rows[:_MOST]))
    parts: list[Part] = [HeadlinePart(text=gate_title(gate), state=_COLOURS[gate.state]), table]
    if len(rows) > _MOST:
        parts.append(Paragraph(f"and {len(rows) - _MOST} more: --json has them", style="dim"))
    if with_charts:
        charts = tuple(ChartPart(_chart(n, rule, gate)) for n, rule in enumerate(gate.rules))
        parts.append(Section("ratios", "NEW over REF", charts, media=("html",)))
    parts.append(Section("method", "how it was judged", (Items(tuple(gate_method(gate))),)))
    return Document("erg gate", tuple(parts), gate_data(gate))


def gate_title(gate: Gate) -> str:
    """The gate's verdict in one line."""
    counts = ", ".join(f"{n} {state}" for state in GATE_STATES[:3] if (n := gate.count(state)))
    return f"{_why_stopped(gate) or _TITLES[gate.state]} ({counts or 'nothing to judge'})"


def _why_stopped(gate: Gate) -> str:
    """The word for a gate that judged nothing; empty if it has a verdict."""
    words = {2: "not judged", 4: "unreadable"} if gate.problem else {}
    return {3: "not comparable", **words}.get(gate.exit_code, "")


def gate_rows(gate: Gate) -> list[tuple[str, str, str, str]]:
    """State, configuration, rule and words of everything that was judged, the worst first."""
    rows = [(v.state, v.name, str(v.rule), v.words) for v in gate.verdicts]
    rows += [(remark.state, remark.name, "", remark.words) for remark in gate.remarks]
    return sorted(rows, key=lambda row: GATE_STATES.index(row[0]))


def gate_method(gate: Gate) -> list[str]:
    """The rules, how they were applied, and what was measured differently."""
    if gate.problem:
        return [gate.problem]
    lines = [gate.why_useless] if gate.why_useless else []
    if gate.unjudged and not gate.why_useless:
        rules = "; ".join(str(rule) for rule in gate.unjudged)
        lines.append(f"not judged, since no cell has it on both sides: {rules}")
    lines += [*conditions(gate.pairing), *gate.notes]
    if gate.rules:
        lines.append(f"rules: {'; '.join(str(rule) for rule in gate.rules)}")
    alpha = significant((1.0 - gate.options.confidence) * 100, 2)
    tests = f" ({METHOD}, {number_of(gate.family, 'test')})" if gate.family else ""
    lines.append(
        "worse is beyond the rule and more than chance; if nothing changed, the whole gate fails"
        f" in at most {alpha} % of cases{tests}"
    )
    if gate.unknown:
        how = "repeat the runs (three or more), give their --noise, or judge --plain"
        if gate.is_plain:
            how = "judged by the plain threshold, as their noise is not known"
        lines.append(f"{number_of(gate.unknown, 'figure')} of single runs: {how}")
    elif gate.is_plain:
        lines.append("--plain changed nothing: no figure is of single runs without a known noise")
    return lines


def gate_data(gate: Gate) -> dict[str, Any]:
    """The gate as JSON."""
    return {
        "state": _why_stopped(gate) or _JSON_STATES.get(gate.state, gate.state),
        "exit_code": gate.exit_code,
        "rules": [str(rule) for rule in gate.rules],
        "confidence": gate.options.confidence,
        "matched_by": list(gate.pairing.by),
        "judgements": [
            {
                "cell": verdict.name,
                "rule": str(verdict.rule),
                "state": _JSON_STATES.get(verdict.state, verdict.state),
                "words": verdict.words,
                "figure": _change_data(verdict) if verdict.contrast else None,
            }
            for verdict in gate.verdicts
        ],
        "findings": [
            {**asdict(remark), "state": _JSON_STATES.get(remark.state, remark.state)}
            for remark in gate.remarks
        ],
        "missing": [pair.name for pair in gate.pairing.only_ref],
        "unjudged": [str(rule) for rule in gate.unjudged],
        "problem": gate.problem or gate.why_useless or next(iter(gate.not_comparable), None),
        "conditions": conditions(gate.pairing),
        "not_comparable": list(gate.not_comparable),
        "notes": list(gate.notes),
        "correction": {"method": METHOD, "tests": gate.family},
    }


# The comparison of two benches.


def cells_document(comparison: Comparison) -> Document:
    """The change of each metric of each cell, then amounts, remarks and how to read them."""
    rows = tuple(change_rows(comparison))
    cells, pooled = rows[: len(comparison.pairs)], rows[len(comparison.pairs) :]
    shown = (*cells[:_MOST], *pooled)
    parts: list[Part] = [
        Table(
            ("cell", *metric_names(comparison)),
            shown,
            strong_rows=frozenset(range(len(shown) - len(pooled), len(shown))),
        )
    ]
    if len(cells) > _MOST:
        more = f"and {len(cells) - _MOST} more: --format csv has them"
        parts.append(Paragraph(more, style="dim"))
    notes = (*list(amounts(comparison))[:_MOST], *remarks(comparison)[:_MOST], *legend(comparison))
    parts.append(Items(notes))
    return Document("erg bench compare", tuple(parts), cells_data(comparison))


def cells_page(comparison: Comparison, gate: Gate, *, new: str, ref: str) -> Document:
    """The page of a bench comparison: the gate's page with all changes."""
    *verdicts, method = gate_document(gate, with_charts=True).parts
    table = Table(("cell", *metric_names(comparison)), tuple(change_rows(comparison)))
    changes = Section("changes", "all changes", (table, Items(tuple(remarks(comparison)))))
    about = (
        f"NEW {new} compared with REF {ref}; cells matched by {', '.join(comparison.group_by)};"
        f" intervals of {comparison.options.confidence * 100:g} %"
    )
    parts = (*verdicts, changes, method)
    return Document(f"{new} against {ref}", parts, cells_data(comparison), about)


def cells_data(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    pairing = comparison.pairing
    return {
        "matched_by": list(pairing.by),
        "confidence": comparison.options.confidence,
        "cells": [
            {
                "name": pair.name,
                "figures": {v.measure.label: _change_data(v) for v in pair.verdicts},
                "paradox": pair.padding or None,
            }
            for pair in comparison.pairs
        ],
        "together": {v.measure.label: _change_data(v) for v in comparison.pooled},
        "chosen": pairing.chosen or None,
        "remarks": remarks(comparison),
    }


def cells_csv(comparison: Comparison) -> str:
    """A CSV row for each metric of each cell."""
    rows = []
    for pair in comparison.pairs:
        for verdict in pair.verdicts:
            row = {"cell": pair.name, "metric": verdict.measure.label, **_change_data(verdict)}
            row["new_runs"], row["ref_runs"] = row["repeats"]
            rows.append(row)
    return csv_of(_CSV, rows)


def metric_names(comparison: Comparison) -> tuple[str, ...]:
    """The names of the compared metrics, as in rules."""
    return tuple(measured.label for measured in comparison.measures)


def change_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """A row for each cell: the change of each metric; last the row of all cells."""
    cells = [(pair.name, pair.verdicts) for pair in comparison.pairs]
    cells += [(POOLED, comparison.pooled)] if comparison.pooled else []
    for name, verdicts in cells:
        texts = {v.measure.label: change_in_words(v) for v in verdicts}
        yield (name, *(texts.get(label, "-") for label in metric_names(comparison)))


def amounts(comparison: Comparison) -> Iterator[str]:
    """Each side's values with the number of its runs."""
    for pair in comparison.pairs:
        changes = [(v, v.contrast.means) for v in pair.verdicts if v.contrast]
        values = ", ".join(
            f"{v.measure.label} {amount_text(v, ref)} to {amount_text(v, new)}"
            for v, (new, ref) in changes
        )
        runs = f"{len(pair.ref.ok)} and {len(pair.new.ok)} runs"
        yield from [f"{pair.name}, REF to NEW: {values} ({runs})"] if changes else []


def legend(comparison: Comparison) -> list[str]:
    """How to read the table."""
    pairing = comparison.pairing
    chosen = f"; {pairing.chosen}" if pairing.chosen else ""
    return [
        f"by how much NEW is above (+) or below (-) REF{chosen}; cells are matched by"
        f" {', '.join(pairing.by)}",
        "figures are geometric means of the runs that are ok, in brackets is the interval of"
        f" {comparison.options.confidence * 100:g} % of their ratio",
    ]


def remarks(comparison: Comparison) -> list[str]:
    """The effect of padding, failures, cells on one side only and single runs."""
    pairing = comparison.pairing
    lines = conditions(pairing)
    lines += [f"{pair.name}: {pair.padding}" for pair in comparison.pairs if pair.padding]
    lines += [line for pair in comparison.pairs for line in _failures(pair)]
    lines += [f"missing in NEW: {pair.name}" for pair in pairing.only_ref]
    lines += [f"not in REF: {pair.name}" for pair in pairing.pairs if not pair.ref.entries]
    changes = [v.contrast for pair in comparison.pairs for v in pair.verdicts if v.contrast]
    single = sum(change.low is None for change in changes)
    if single:
        lines.append(
            f"{single} of {len(changes)} figures are of single runs: they have no interval, and a"
            " change in them may be noise (--noise says how much of it there is)"
        )
    return lines


def _failures(pair: GroupPair) -> list[str]:
    sides = (("NEW", pair.new), ("REF", pair.ref))
    return [
        f"{pair.name}: {len(side.failed)} of {len(side.entries)} failed in {name}:"
        f" {side.failed[-1].status}: {side.failed[-1].reason or None}"
        for name, side in sides
        if side.failed
    ]


# One change.


def change_in_words(verdict: Verdict) -> str:
    """The difference of NEW from REF, with its interval if there is one."""
    change = verdict.contrast
    if change is None:
        return "absent"
    unit = verdict.measure.unit
    value = value_text(change.value, change, unit)
    if change.low is None or change.high is None:
        return value
    if change.is_exact:
        return f"{value} (exact)"
    low, high = (value_text(end, change, unit, "") for end in (change.low, change.high))
    return f"{value} ({low} to {high})"


def _change_data(verdict: Verdict) -> dict[str, Any]:
    """The change of one metric with its interval, noise and method, as JSON."""
    change = verdict.contrast
    assert change is not None
    new, ref = change.means
    metrics = every_metric()
    columns = (metrics[key].column or key for key in verdict.key.split(", "))
    return {
        "column": ", ".join(sorted(columns)),
        "new": new,
        "ref": ref,
        "value": change.value,
        "scale": change.scale,
        "repeats": change.repeats,
        "low": change.low,
        "high": change.high,
        "error": change.error,
        "freedom": change.dof,
        "noise": change.noise,
        "basis": change.why if change.low is None else change.method,
    }


# Charts.


def _chart(number: int, rule: GateRule, gate: Gate) -> Chart:
    """The chart of a rule: every configuration's change with its interval."""
    own = sorted((verdict for verdict in gate.verdicts if verdict.rule == rule), key=_badness)
    id_, title = f"rule-{number}", str(rule)
    if not any(verdict.contrast for verdict in own):
        words = "; ".join(dict.fromkeys(verdict.words for verdict in own))
        return Chart(id_, title, "", None, reason=words or "no cell works on both sides")
    is_ratio = rule.scale == "ratio"
    scale = Scale(1.0, "") if is_ratio else _scale(own)
    less = f"NEW minus REF, {scale.unit}" if scale.unit else "NEW minus REF"
    note = "thick vertical lines are the rule's limits; the thin one marks no change"
    if len(own) > _MOST_DOTS:
        note += f"; the first {_MOST_DOTS} of {len(own)}, the worst first: the table has all"
    return interval_chart(
        id_,
        title,
        [_dot(verdict, rule, scale) for verdict in own[:_MOST_DOTS]],
        "NEW over REF (logarithmic)" if is_ratio else less,
        is_ratio=is_ratio,
        words=_LEGEND,
        table=Table(
            ("cell", "change", "verdict", "why"),
            tuple((v.name, change_in_words(v), v.state, v.words) for v in own),
        ),
        note=note,
    )


def _badness(verdict: Verdict) -> tuple[int, float]:
    """The sort key: verdict first, then the change in the unwanted direction."""
    rank = GATE_STATES.index(verdict.state)
    if verdict.contrast is None:
        return rank, 0.0
    change = verdict.contrast.value - verdict.contrast.neutral
    way = verdict.rule.way if verdict.rule else "change"
    return rank, -abs(change) if way == "change" else change if way == "fall" else -change


def _dot(verdict: Verdict, rule: GateRule, scale: Scale) -> Dot:
    change = verdict.contrast
    has_interval = change is not None and change.low is not None
    state: State = verdict.state if has_interval else "no interval"
    limits = [end for end in (rule.low, rule.high) if end is not None]
    words = change_in_words(verdict)
    return contrast_dot(verdict.name, words, state, change, factor=scale.factor, limits=limits)


def _scale(own: list[Verdict]) -> Scale:
    """The scale of differences: bytes, joules and seconds with an SI prefix."""
    unit = own[0].measure.unit
    changes = [verdict.contrast for verdict in own if verdict.contrast is not None]
    ends = (end for each in changes for end in (each.value, each.low, each.high))
    most = max(abs(end) for end in ends if end is not None)
    return scale_for(unit if unit in ("B", "J", "s") else "", most)


# CI systems: JUnit XML, SARIF and GitHub's annotations. Inconclusive is a verdict of its own:
# skipped in JUnit, a note in SARIF, a warning on GitHub.


_REMARK = "remark"
# By state: the level in SARIF, that on GitHub, and the element of JUnit.
_LEVELS: dict[str, tuple[str, str, str]] = {
    "error": ("error", "error", "error"),
    "worse": ("error", "error", "failure"),
    "inconclusive": ("note", "warning", "skipped"),
    "absent": ("none", "notice", "skipped"),
}


def _ci_rows(gate: Gate) -> list[tuple[str, str, str, str]]:
    """The gate's rows; the reason for an exit code of 2, 3 or 4 comes first."""
    return [*([("error", "erg gate", "", gate.reason)] if gate.reason else []), *gate_rows(gate)]


def ci_text(gate: Gate, form: str, *, new: Path) -> str:
    """Return the form for a CI system: junit, sarif or github; empty for another."""
    if form == "sarif":
        return _sarif(gate, new)
    return _junit(gate) if form == "junit" else _github(gate) if form == "github" else ""


def _junit(gate: Gate) -> str:
    """Return JUnit XML: a test case for each verdict and remark."""
    cases = _ci_rows(gate)
    results = Counter(_LEVELS[state][2] for state, *_ in cases if state in _LEVELS)
    counts = {"tests": len(cases), "failures": results["failure"]}
    counts |= {"skipped": results["skipped"], "errors": results["error"]}
    suite = ElementTree.Element("testsuite", {"name": "erg gate"})
    suite.attrib |= {name: str(count) for name, count in counts.items()}
    for state, name, rule, words in cases:
        named = {"classname": printable(name), "name": printable(rule or _REMARK)}
        case = ElementTree.SubElement(suite, "testcase", named)
        if state in _LEVELS:
            element = _LEVELS[state][2]
            message = f"{state}: {words}" if element == "skipped" else words
            ElementTree.SubElement(case, element, message=printable(message))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _sarif(gate: Gate, new: Path) -> str:
    """Return SARIF 2.1.0: a result for each verdict that is not a pass, located at NEW."""
    names = dict.fromkeys((*map(str, gate.rules), _REMARK))
    rules = [{"id": name, "shortDescription": {"text": name}} for name in names]
    artifact = {"artifactLocation": {"uri": quote(new.as_posix())}, "region": {"startLine": 1}}
    results: list[dict[str, Any]] = [
        {
            "ruleId": rule or _REMARK,
            "level": _LEVELS[state][0],
            "message": {"text": f"{name}: {words}"},
            "locations": [{"physicalLocation": artifact}],
        }
        for state, name, rule, words in _ci_rows(gate)
        if state in _LEVELS
    ]
    driver = {"name": "erg gate", "version": __version__, "rules": rules}
    body = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(body, indent=1) + "\n"


def _github(gate: Gate) -> str:
    """Return workflow commands that GitHub Actions shows as annotations."""
    title = _escaped(gate_title(gate))
    level = "error" if gate.reason else _LEVELS.get(gate.state, _LEVELS["absent"])[1]
    lines = [f"::{level} title=erg gate::{title}"]
    lines += [
        f"::{_LEVELS[state][1]} title=erg gate::{_escaped(': '.join(filter(None, rest)))}"
        for state, *rest in _ci_rows(gate)
        if state in _LEVELS
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
