"""A bench comparison and the gate's verdict: terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.compare.gate import GATE_STATES, POOLED, amount_text
from ergmeter.compare.pairing import conditions
from ergmeter.metrics.catalog import every_metric
from ergmeter.units import number_of, scaled, significant
from ergmeter.views import documents
from ergmeter.views.blocks import escaped, markdown_table

if TYPE_CHECKING:
    from ergmeter.compare.comparison import Comparison, GroupPair
    from ergmeter.compare.gate import Gate
    from ergmeter.compare.verdicts import State, Verdict
    from ergmeter.stats.ratio import Contrast

METHOD = "Benjamini-Hochberg"
_MOST = 200
_SIGNS: dict[State, tuple[str, str]] = {
    "worse": ("red", "bold red"),
    "inconclusive": ("?", "yellow"),
    "pass": ("ok", "green"),
    "absent": ("-", "dim"),
}
_MARKS: dict[State, str] = {"worse": "❌", "inconclusive": "❔", "pass": "✅", "absent": ""}
_TITLES: dict[State, str] = {
    "worse": "worse than is allowed",
    "inconclusive": "nothing worse was shown; not all could be told",
    "pass": "within what is allowed",
}
_CSV = (
    *("cell", "metric", "column", "ref", "new", "value", "low", "high", "ref_runs", "new_runs"),
    *("noise", "basis"),
)


# States as JSON and counts name them.
_WORDS: dict[State, str] = {"worse": "red"}


def page(comparison: Comparison, *, most: int = _MOST) -> RenderableType:
    """Render for the terminal: changes with intervals, then anomalies and failures."""
    table = Table("cell", *metric_names(comparison), box=None, pad_edge=False, header_style="dim")
    rows = change_rows(comparison)
    for row in rows[: min(most, len(comparison.pairs))]:
        table.add_row(*map(Text, row))
    for row in rows[len(comparison.pairs) :]:
        table.add_row(*(Text(cell, "bold") for cell in row))
    parts: list[RenderableType] = [table]
    if len(comparison.pairs) > most:
        parts.append(Text(f"and {len(comparison.pairs) - most} more: --format csv has them", "dim"))
    parts += [Text(line) for line in (*amounts(comparison)[:most], *remarks(comparison)[:most])]
    parts += [Text(line, "dim") for line in legend(comparison)]
    return Group(*parts)


def metric_names(comparison: Comparison) -> tuple[str, ...]:
    """The names of the compared metrics, as in rules."""
    return tuple(measured.label for measured in comparison.measures)


def markdown(comparison: Comparison) -> str:
    """Render as Markdown."""
    lines = markdown_table(("cell", *metric_names(comparison)), change_rows(comparison))
    notes = [*amounts(comparison), *remarks(comparison), *legend(comparison)]
    return "\n".join([*lines, "", *(f"- {escaped(line)}" for line in notes)]).rstrip() + "\n"


def csv_text(comparison: Comparison) -> str:
    """Return a CSV row for each metric of each cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for pair in comparison.pairs:
        for verdict in pair.verdicts:
            new_runs, ref_runs = verdict.contrast.repeats if verdict.contrast else (0, 0)
            runs = {"new_runs": new_runs, "ref_runs": ref_runs}
            row = {"cell": pair.name, "metric": verdict.measure.label}
            writer.writerow({**row, **_change_json(verdict), **runs})
    return text.getvalue()


def document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON."""
    pairing = comparison.pairing
    assert pairing is not None
    body = {
        "matched_by": list(pairing.by),
        "confidence": comparison.options.confidence,
        "cells": [
            {
                "name": pair.name,
                "figures": {v.measure.label: _change_json(v) for v in pair.verdicts},
                "paradox": pair.padding or None,
            }
            for pair in comparison.pairs
        ],
        "together": {v.measure.label: _change_json(v) for v in comparison.pooled},
        "chosen": pairing.chosen or None,
        "remarks": remarks(comparison),
    }
    return dict(documents.finite(body))


def _change_json(verdict: Verdict) -> dict[str, Any]:
    """Return the change of one metric with its interval, noise and method."""
    change = verdict.contrast
    assert change is not None
    new, ref = change.means
    return {
        "column": _column(verdict.key),
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


def _column(key: str) -> str:
    """The bench column of a metric; for several metrics, theirs."""
    metrics = every_metric()
    return ", ".join(sorted(metrics[part].column or part for part in key.split(", ")))


def amounts(comparison: Comparison) -> list[str]:
    """Return each side's values with the number of its runs."""
    return [
        f"{pair.name}, REF to NEW: "
        + ", ".join(
            f"{v.measure.label} {amount_text(v, v.contrast.means[1])} to"
            f" {amount_text(v, v.contrast.means[0])}"
            for v in pair.verdicts
            if v.contrast
        )
        + f" ({len(pair.groups.ref.ok)} and {len(pair.groups.new.ok)} runs)"
        for pair in comparison.pairs
        if pair.verdicts
    ]


def legend(comparison: Comparison) -> list[str]:
    """Explain how to read the table."""
    pairing = comparison.pairing
    assert pairing is not None
    chosen = f"; {pairing.chosen}" if pairing.chosen else ""
    return [
        f"by how much NEW is above (+) or below (-) REF{chosen}; cells are matched by"
        f" {', '.join(pairing.by)}",
        "figures are geometric means of the runs that are ok, in brackets is the interval of"
        f" {comparison.options.confidence * 100:g} % of their ratio",
    ]


def remarks(comparison: Comparison) -> list[str]:
    """Return the effect of padding, failures, cells on one side only and single runs."""
    pairing = comparison.pairing
    assert pairing is not None
    lines = conditions(pairing)
    lines += [f"{pair.name}: {pair.padding}" for pair in comparison.pairs if pair.padding]
    lines += [line for pair in comparison.pairs for line in _failures(pair)]
    lines += [f"missing in NEW: {pair.name}" for pair in pairing.only_ref]
    lines += [f"not in REF: {pair.name}" for pair in pairing.only_new]
    changes = [v.contrast for pair in comparison.pairs for v in pair.verdicts if v.contrast]
    single = sum(change.low is None for change in changes)
    if single:
        lines.append(
            f"{single} of {len(changes)} figures are of single runs: they have no interval, and a"
            " change in them may be noise (--noise says how much of it there is)"
        )
    return lines


def _failures(pair: GroupPair) -> list[str]:
    sides = (("NEW", pair.groups.new), ("REF", pair.groups.ref))
    return [
        f"{pair.name}: {len(side.failed)} of {len(side.entries)} failed in {name}:"
        f" {side.failed[-1].status}: {side.failed[-1].reason or None}"
        for name, side in sides
        if side.failed
    ]


def gate_page(gate: Gate, *, most: int = _MOST) -> RenderableType:
    """Render the gate's verdict: failures, undecided cells, number of passes."""
    sign = _SIGNS[gate.state]
    parts: list[RenderableType] = [Text.assemble(sign, "  ", (gate_title(gate), "bold"))]
    rows = gate_lines(gate)
    for state, name, words in rows[:most]:
        parts.append(Text.assemble("  ", _SIGNS[state], f"  {name}: ", words))
    if len(rows) > most:
        parts.append(Text(f"  and {len(rows) - most} more: --format json has them", "dim"))
    parts += [Text(f"  {line}", "dim") for line in gate_method(gate)]
    return Group(*parts)


def gate_markdown(gate: Gate, *, most: int = 100) -> str:
    """Render for a pull request: the verdict, a table of non-passes, passes folded."""
    lines = [f"### {_MARKS[gate.state]} {escaped(gate_title(gate))}", ""]
    rows = gate_lines(gate)
    if rows:
        cells = [(_MARKS[state], name, words) for state, name, words in rows[:most]]
        cells += [("", f"and {len(rows) - most} more", "")] if len(rows) > most else []
        lines += [*markdown_table(("", "cell", "what"), cells), ""]
    passed = [verdict for verdict in gate.verdicts if verdict.state == "pass"]
    if passed:
        lines += [f"<details><summary>{len(passed)} within the rules</summary>", ""]
        cells = [(each.name, str(each.rule), each.words) for each in passed[:most]]
        lines += [*markdown_table(("cell", "rule", "change"), cells), "", "</details>", ""]
    return "\n".join([*lines, *(f"- {escaped(line)}" for line in gate_method(gate))]) + "\n"


def gate_document(gate: Gate) -> dict[str, Any]:
    """Return the gate's verdict as JSON."""
    body = {
        "state": _WORDS.get(gate.state, gate.state),
        "exit_code": gate.exit_code,
        "rules": [str(rule) for rule in gate.rules],
        "confidence": gate.options.confidence,
        "matched_by": list(gate.pairing.by),
        "judgements": [_verdict_json(verdict) for verdict in gate.verdicts],
        "findings": [
            {**asdict(remark), "state": _WORDS.get(remark.state, remark.state)}
            for remark in gate.remarks
        ],
        "missing": [pair.name for pair in gate.pairing.only_ref],
        "unjudged": [str(rule) for rule in gate.unjudged],
        "problem": gate.why_useless or None,
        "conditions": conditions(gate.pairing),
        "not_comparable": list(gate.not_comparable),
        "notes": list(gate.notes),
        "correction": {"method": METHOD, "tests": gate.family},
    }
    return dict(documents.finite(body))


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "cell": verdict.name,
        "rule": str(verdict.rule),
        "state": _WORDS.get(verdict.state, verdict.state),
        "words": verdict.words,
        "figure": _change_json(verdict) if verdict.contrast else None,
    }


def gate_title(gate: Gate) -> str:
    """Return the gate's verdict in one line."""
    states: tuple[State, ...] = ("worse", "inconclusive", "pass")
    counted = ((n, _WORDS.get(state, state)) for state in states if (n := gate.count(state)))
    counts = ", ".join(f"{n} {word}" for n, word in counted)
    title = "not comparable" if gate.exit_code == 3 else _TITLES[gate.state]
    return f"{title} ({counts or 'nothing to judge'})"


def gate_lines(gate: Gate) -> list[tuple[State, str, str]]:
    """Return state, configuration and text of everything that is not a pass, failures first."""
    rows: list[tuple[State, str, str]] = [
        (verdict.state, verdict.name, f"{verdict.rule}: {verdict.words}")
        for verdict in gate.verdicts
        if verdict.state != "pass"
    ]
    rows += [(remark.state, remark.name, remark.words) for remark in gate.remarks]
    return sorted(rows, key=lambda row: GATE_STATES.index(row[0]))


def gate_method(gate: Gate) -> list[str]:
    """Return the rules and how they were applied."""
    lines = [gate.why_useless] if gate.why_useless else []
    if gate.unjudged and not gate.why_useless:
        rules = "; ".join(str(rule) for rule in gate.unjudged)
        lines.append(f"not judged, since no cell has it on both sides: {rules}")
    lines += [*conditions(gate.pairing), *gate.notes]
    lines.append(f"rules: {'; '.join(str(rule) for rule in gate.rules)}")
    alpha = (1.0 - gate.options.confidence) * 100
    tests = f" ({METHOD}, {number_of(gate.family, 'test')})" if gate.family else ""
    lines.append(
        "red is beyond the rule and more than chance; where nothing changed, the whole gate goes"
        f" red in at most {significant(alpha, 2)} % of cases{tests}"
    )
    if gate.unknown:
        lines.append(
            f"{gate.unknown} figures are of single runs: "
            + (
                "held to the plain threshold, as their noise is not known"
                if gate.is_plain
                else "repeat the cells (--repeats 3), give their --noise, or judge --plain"
            )
        )
    elif gate.is_plain:
        lines.append("--plain changed nothing: no figure is of single runs without a known noise")
    return lines


def change_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a table row for each cell: the change of each metric; last the row of all cells."""
    rows: list[tuple[str, tuple[Verdict, ...]]] = [
        (pair.name, pair.verdicts) for pair in comparison.pairs
    ]
    rows += [(POOLED, comparison.pooled)] if comparison.pooled else []
    table = []
    for name, verdicts in rows:
        texts = {v.measure.label: change_in_words(v) for v in verdicts}
        table.append((name, *(texts.get(label, "-") for label in metric_names(comparison))))
    return table


def change_in_words(verdict: Verdict) -> str:
    """Return the difference of NEW from REF, with its interval if there is one."""
    change = verdict.contrast
    assert change is not None
    unit = verdict.measure.unit
    value = _share(change.value, change, unit)
    if change.low is None or change.high is None:
        return value
    if change.low == change.high:
        return f"{value} (exact)"
    low, high = (_share(end, change, unit, "") for end in (change.low, change.high))
    return f"{value} ({low} to {high})"


def _share(value: float, change: Contrast, unit: str, percent: str = " %") -> str:
    if change.scale == "difference":
        size = scaled(abs(value), "B") if unit == "B" else significant(abs(value), 3)
        return f"{'+' if value >= 0 else '-'}{size}"
    return f"{(value - 1.0) * 100:+.1f}{percent}"


def axis_unit(unit: str) -> str:
    """Return the unit of a difference on an axis; empty for shares and compound units."""
    return unit if unit in ("B", "J", "s") else ""
