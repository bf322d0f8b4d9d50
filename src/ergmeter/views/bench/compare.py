"""A bench comparison and the gate's verdict: terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.bench.comparing import TOGETHER, BenchComparison, CellChange, Compared, amount
from ergmeter.bench.pairing import conditions
from ergmeter.units import scaled, significant
from ergmeter.views import documents
from ergmeter.views.blocks import escaped, markdown_table

if TYPE_CHECKING:
    from ergmeter.bench.gate import Gate, Judgement, State

_MOST = 200
_SIGNS: dict[State, tuple[str, str]] = {
    "red": ("red", "bold red"),
    "inconclusive": ("?", "yellow"),
    "pass": ("ok", "green"),
    "absent": ("-", "dim"),
}
_MARKS: dict[State, str] = {"red": "❌", "inconclusive": "❔", "pass": "✅", "absent": ""}
_TITLES = {
    "red": "worse than is allowed",
    "inconclusive": "nothing worse was shown; not all could be told",
    "pass": "within what is allowed",
}
_CSV = (
    *("cell", "metric", "column", "ref", "new", "value", "low", "high", "ref_runs", "new_runs"),
    *("noise", "basis"),
)


def page(comparison: BenchComparison, *, most: int = _MOST) -> RenderableType:
    """Render for the terminal: changes with intervals, then anomalies and failures."""
    table = Table("cell", *comparison.metrics, box=None, pad_edge=False, header_style="dim")
    rows = change_rows(comparison)
    for row in rows[: min(most, len(comparison.cells))]:
        table.add_row(*map(Text, row))
    for row in rows[len(comparison.cells) :]:
        table.add_row(*(Text(cell, "bold") for cell in row))
    parts: list[RenderableType] = [table]
    if len(comparison.cells) > most:
        parts.append(Text(f"and {len(comparison.cells) - most} more: --format csv has them", "dim"))
    parts += [Text(line) for line in (*amounts(comparison)[:most], *remarks(comparison)[:most])]
    parts += [Text(line, "dim") for line in legend(comparison)]
    return Group(*parts)


def markdown(comparison: BenchComparison) -> str:
    """Render as Markdown."""
    lines = markdown_table(("cell", *comparison.metrics), change_rows(comparison))
    notes = [*amounts(comparison), *remarks(comparison), *legend(comparison)]
    return "\n".join([*lines, "", *(f"- {escaped(line)}" for line in notes)]).rstrip() + "\n"


def csv_text(comparison: BenchComparison) -> str:
    """Return a CSV row for each metric of each cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for cell in comparison.cells:
        for metric, figure in cell.figures.items():
            writer.writerow({"cell": cell.pair.name, "metric": metric, **_flat(figure)})
    return text.getvalue()


def document(comparison: BenchComparison) -> dict[str, Any]:
    """Return the comparison as JSON."""
    body = {
        "matched_by": list(comparison.paired.by),
        "confidence": comparison.options.confidence,
        "cells": [
            {
                "name": cell.pair.name,
                "figures": {metric: asdict(figure) for metric, figure in cell.figures.items()},
                "paradox": cell.paradox or None,
            }
            for cell in comparison.cells
        ],
        "together": {metric: asdict(change) for metric, change in comparison.together.items()},
        "chosen": comparison.paired.chosen or None,
        "remarks": remarks(comparison),
    }
    return dict(documents.finite(body))


def amounts(comparison: BenchComparison) -> list[str]:
    """Return each side's values with the number of its runs."""
    return [
        f"{cell.pair.name}, REF to NEW: "
        + ", ".join(
            f"{metric} {amount(figure, figure.ref)} to {amount(figure, figure.new)}"
            for metric, figure in cell.figures.items()
        )
        + f" ({len(cell.pair.ref.ok)} and {len(cell.pair.new.ok)} runs)"
        for cell in comparison.cells
        if cell.figures
    ]


def legend(comparison: BenchComparison) -> list[str]:
    """Explain how to read the table."""
    chosen = f"; {comparison.paired.chosen}" if comparison.paired.chosen else ""
    return [
        f"by how much NEW is above (+) or below (-) REF{chosen}; cells are matched by"
        f" {', '.join(comparison.paired.by)}",
        "figures are geometric means of the runs that are ok, in brackets is the interval of"
        f" {comparison.options.confidence * 100:g} % of their ratio",
    ]


def remarks(comparison: BenchComparison) -> list[str]:
    """Return paradoxes, failures, cells on one side only and single runs."""
    lines = conditions(comparison.paired)
    lines += [f"{cell.pair.name}: {cell.paradox}" for cell in comparison.cells if cell.paradox]
    lines += [line for cell in comparison.cells for line in _failures(cell)]
    lines += [f"missing in NEW: {pair.name}" for pair in comparison.paired.only_ref]
    lines += [f"not in REF: {pair.name}" for pair in comparison.paired.only_new]
    figures = [figure for cell in comparison.cells for figure in cell.figures.values()]
    single = sum(figure.low is None for figure in figures)
    if single:
        lines.append(
            f"{single} of {len(figures)} figures are of single runs: they have no interval, and a"
            " change in them may be noise (--noise says how much of it there is)"
        )
    return lines


def _failures(cell: Compared) -> list[str]:
    sides = (("NEW", cell.pair.new), ("REF", cell.pair.ref))
    return [
        f"{cell.pair.name}: {len(side.failed)} of {len(side.rows)} failed in {name}:"
        f" {side.failed[-1]['status']}: {side.failed[-1]['reason']}"
        for name, side in sides
        if side.failed
    ]


def gate_page(gate: Gate, *, most: int = _MOST) -> RenderableType:
    """Render the gate's verdict: failures, undecided cells, number of passes."""
    sign = _SIGNS[gate.state]
    parts: list[RenderableType] = [Text.assemble(sign, "  ", (gate_title(gate), "bold"))]
    rows = _gate_lines(gate)
    for state, name, words in rows[:most]:
        parts.append(Text.assemble("  ", _SIGNS[state], f"  {name}: ", words))
    if len(rows) > most:
        parts.append(Text(f"  and {len(rows) - most} more: --format json has them", "dim"))
    parts += [Text(f"  {line}", "dim") for line in gate_method(gate)]
    return Group(*parts)


def gate_markdown(gate: Gate, *, most: int = 100) -> str:
    """Render for a pull request: the verdict, a table of non-passes, passes folded."""
    lines = [f"### {_MARKS[gate.state]} {escaped(gate_title(gate))}", ""]
    rows = _gate_lines(gate)
    if rows:
        cells = [(_MARKS[state], name, words) for state, name, words in rows[:most]]
        cells += [("", f"and {len(rows) - most} more", "")] if len(rows) > most else []
        lines += [*markdown_table(("", "cell", "what"), cells), ""]
    passed = [judgement for judgement in gate.judgements if judgement.state == "pass"]
    if passed:
        lines += [f"<details><summary>{len(passed)} within the rules</summary>", ""]
        cells = [(each.name, str(each.rule), each.words) for each in passed[:most]]
        lines += [*markdown_table(("cell", "rule", "change"), cells), "", "</details>", ""]
    return "\n".join([*lines, *(f"- {escaped(line)}" for line in gate_method(gate))]) + "\n"


def gate_document(gate: Gate) -> dict[str, Any]:
    """Return the gate's verdict as JSON."""
    body = {
        "state": gate.state,
        "exit_code": gate.exit_code,
        "rules": [str(rule) for rule in gate.rules],
        "confidence": gate.options.confidence,
        "matched_by": list(gate.paired.by),
        "judgements": [_judgement(judgement) for judgement in gate.judgements],
        "findings": [asdict(finding) for finding in gate.findings],
        "missing": [pair.name for pair in gate.paired.only_ref],
        "unjudged": [str(rule) for rule in gate.unjudged],
        "problem": gate.why_useless or None,
        "conditions": conditions(gate.paired),
    }
    return dict(documents.finite(body))


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return {
        "cell": judgement.name,
        "rule": str(judgement.rule),
        "state": judgement.state,
        "words": judgement.words,
        "figure": asdict(judgement.figure) if judgement.figure else None,
    }


def gate_title(gate: Gate) -> str:
    """Return the gate's verdict in one line."""
    states: tuple[State, ...] = ("red", "inconclusive", "pass")
    counts = ", ".join(f"{n} {state}" for state in states if (n := gate.count(state)))
    return f"{_TITLES[gate.state]} ({counts or 'nothing to judge'})"


def _gate_lines(gate: Gate) -> list[tuple[State, str, str]]:
    """Return the judgements that are not a pass, failures first."""
    rows: list[tuple[State, str, str]] = [
        (judgement.state, judgement.name, f"{judgement.rule}: {judgement.words}")
        for judgement in gate.judgements
        if judgement.state != "pass"
    ]
    rows += [(finding.state, finding.name, finding.words) for finding in gate.findings]
    order = list(_SIGNS)
    return sorted(rows, key=lambda row: order.index(row[0]))


def gate_method(gate: Gate) -> list[str]:
    """Return the rules and how they were applied."""
    lines = [gate.why_useless] if gate.why_useless else []
    if gate.unjudged and not gate.why_useless:
        rules = "; ".join(str(rule) for rule in gate.unjudged)
        lines.append(f"not judged, since no cell has it on both sides: {rules}")
    lines += conditions(gate.paired)
    lines.append(f"rules: {'; '.join(str(rule) for rule in gate.rules)}")
    alpha = (1.0 - gate.options.confidence) * 100
    lines.append(
        "red is beyond the rule and more than chance; where nothing changed, the whole gate goes"
        f" red in at most {significant(alpha, 2)} % of cases"
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


def change_rows(comparison: BenchComparison) -> list[tuple[str, ...]]:
    """Return a table row for each cell: the change of each metric; last the row of all cells."""
    figures_by_name: list[tuple[str, Any]] = [
        (cell.pair.name, cell.figures) for cell in comparison.cells
    ]
    figures_by_name += [(TOGETHER, comparison.together)] if comparison.together else []
    return [
        (
            name,
            *(change_in_words(figures[m]) if m in figures else "-" for m in comparison.metrics),
        )
        for name, figures in figures_by_name
    ]


def change_in_words(change: CellChange) -> str:
    """Return the difference of NEW from REF, with its interval if there is one."""
    value = _share(change.value, change)
    if change.low is None or change.high is None:
        return value
    if change.low == change.high:
        return f"{value} (exact)"
    return f"{value} ({_share(change.low, change, '')} to {_share(change.high, change, '')})"


def _share(value: float, change: CellChange, percent: str = " %") -> str:
    if change.scale == "difference":
        size = (
            scaled(abs(value), "B")
            if change.column.endswith("_bytes")
            else significant(abs(value), 3)
        )
        return f"{'+' if value >= 0 else '-'}{size}"
    return f"{(value - 1.0) * 100:+.1f}{percent}"


def unit_of(column: str) -> str:
    """Return a metric's unit by its column name; empty if none or compound."""
    units = {"_bytes": "B", "_j": "J", "_s": "s", "_frac": ""}
    ends = (unit for end, unit in units.items() if column.endswith(end) and "_per_" not in column)
    return next(ends, "")


def _flat(change: CellChange) -> dict[str, Any]:
    new_runs, ref_runs = change.repeats
    return {**asdict(change), "new_runs": new_runs, "ref_runs": ref_runs}
