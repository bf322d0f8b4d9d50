"""NEW against REF, cell by cell: for the terminal, as Markdown, CSV, JSON; and the gate's word."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ergmeter.bench.comparing import TOGETHER, amount
from ergmeter.bench.pairing import conditions
from ergmeter.units import scaled, significant
from ergmeter.views import documents
from ergmeter.views.analyze.markdown import escaped
from ergmeter.views.bench.report import markdown_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ergmeter.bench.comparing import BenchComparison, CellChange, Compared
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


def page(found: BenchComparison, *, most: int = _MOST) -> RenderableType:
    """The terminal's: changes with their intervals, then what is odd, missing or failed."""
    table = Table("cell", *found.metrics, box=None, pad_edge=False, header_style="dim")
    for cell in found.cells[:most]:
        table.add_row(*map(Text, changes(cell.pair.name, cell.figures, found.metrics)))
    if found.together:
        row = changes(TOGETHER, found.together, found.metrics)
        table.add_row(*(Text(one, "bold") for one in row))
    parts: list[RenderableType] = [table]
    if len(found.cells) > most:
        parts.append(Text(f"and {len(found.cells) - most} more: --format csv has them", "dim"))
    parts += [Text(line) for line in (*amounts(found)[:most], *remarks(found)[:most])]
    parts += [Text(line, "dim") for line in legend(found)]
    return Group(*parts)


def markdown(found: BenchComparison) -> str:
    """To paste."""
    heads = ("cell", *found.metrics)
    lines = [markdown_row(heads), markdown_row("---" for _ in heads)]
    lines += [
        markdown_row(changes(cell.pair.name, cell.figures, found.metrics)) for cell in found.cells
    ]
    if found.together:
        lines.append(markdown_row(changes(TOGETHER, found.together, found.metrics)))
    told = [*amounts(found), *remarks(found), *legend(found)]
    return "\n".join([*lines, "", *(f"- {escaped(line)}" for line in told)]).rstrip() + "\n"


def csv_text(found: BenchComparison) -> str:
    """A row for each figure of each cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, lineterminator="\n")
    writer.writeheader()
    for cell in found.cells:
        for metric, one in cell.figures.items():
            writer.writerow({"cell": cell.pair.name, "metric": metric, **_flat(one)})
    return text.getvalue()


def document(found: BenchComparison) -> dict[str, Any]:
    """Everything, for programs."""
    whole = {
        "matched_by": list(found.paired.by),
        "confidence": found.options.confidence,
        "cells": [
            {
                "name": cell.pair.name,
                "figures": {metric: asdict(one) for metric, one in cell.figures.items()},
                "paradox": cell.paradox or None,
            }
            for cell in found.cells
        ],
        "together": {metric: asdict(one) for metric, one in found.together.items()},
        "chosen": found.paired.chosen or None,
        "remarks": remarks(found),
    }
    return dict(documents.finite(whole))


def amounts(found: BenchComparison) -> list[str]:
    """What each side came to, with the number of its runs."""
    return [
        f"{cell.pair.name}, REF to NEW: "
        + ", ".join(
            f"{metric} {amount(one, one.ref)} to {amount(one, one.new)}"
            for metric, one in cell.figures.items()
        )
        + f" ({len(cell.pair.ref.ok)} and {len(cell.pair.new.ok)} runs)"
        for cell in found.cells
        if cell.figures
    ]


def legend(found: BenchComparison) -> list[str]:
    """How the table is to be read."""
    chosen = f"; {found.paired.chosen}" if found.paired.chosen else ""
    return [
        f"by how much NEW is above (+) or below (-) REF{chosen}; cells are matched by"
        f" {', '.join(found.paired.by)}",
        "figures are geometric means of the runs that are ok, in brackets is the interval of"
        f" {found.options.confidence * 100:g} % of their ratio",
    ]


def remarks(found: BenchComparison) -> list[str]:
    """What the table can't show: paradoxes, failures, cells without a partner, single runs."""
    lines = conditions(found.paired)
    lines += [f"{cell.pair.name}: {cell.paradox}" for cell in found.cells if cell.paradox]
    lines += [line for cell in found.cells for line in _failures(cell)]
    lines += [f"missing in NEW: {pair.name}" for pair in found.paired.only_ref]
    lines += [f"not in REF: {pair.name}" for pair in found.paired.only_new]
    figures = [one for cell in found.cells for one in cell.figures.values()]
    single = sum(one.low is None for one in figures)
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


def gate_page(found: Gate, *, most: int = _MOST) -> RenderableType:
    """The verdict, what is red, what could not be told, and how many passed."""
    sign = _SIGNS[found.state]
    parts: list[RenderableType] = [Text.assemble(sign, "  ", (gate_title(found), "bold"))]
    told = _gate_lines(found)
    for state, name, words in told[:most]:
        parts.append(Text.assemble("  ", _SIGNS[state], f"  {name}: ", words))
    if len(told) > most:
        parts.append(Text(f"  and {len(told) - most} more: --format json has them", "dim"))
    parts += [Text(f"  {line}", "dim") for line in gate_method(found)]
    return Group(*parts)


def gate_markdown(found: Gate, *, most: int = 100) -> str:
    """For a pull request: the verdict, a table of what is not plainly fine, the rest folded."""
    lines = [f"### {_MARKS[found.state]} {escaped(gate_title(found))}", ""]
    told = _gate_lines(found)
    if told:
        lines += [markdown_row(("", "cell", "what")), markdown_row(("---",) * 3)]
        lines += [markdown_row((_MARKS[s], name, words)) for s, name, words in told[:most]]
        if len(told) > most:
            lines.append(markdown_row(("", f"and {len(told) - most} more", "")))
        lines.append("")
    passed = [one for one in found.judgements if one.state == "pass"]
    if passed:
        lines += [f"<details><summary>{len(passed)} within the rules</summary>", ""]
        lines += [markdown_row(("cell", "rule", "change")), markdown_row(("---",) * 3)]
        lines += [markdown_row((one.name, str(one.rule), one.words)) for one in passed[:most]]
        lines += ["", "</details>", ""]
    return "\n".join([*lines, *(f"- {escaped(line)}" for line in gate_method(found))]) + "\n"


def gate_document(found: Gate) -> dict[str, Any]:
    """Everything, for programs."""
    whole = {
        "state": found.state,
        "exit_code": found.exit_code,
        "rules": [str(rule) for rule in found.rules],
        "confidence": found.options.confidence,
        "matched_by": list(found.paired.by),
        "judgements": [_judgement(one) for one in found.judgements],
        "findings": [asdict(one) for one in found.findings],
        "missing": [pair.name for pair in found.paired.only_ref],
        "unjudged": [str(rule) for rule in found.unjudged],
        "problem": found.why_useless or None,
        "conditions": conditions(found.paired),
    }
    return dict(documents.finite(whole))


def _judgement(one: Judgement) -> dict[str, Any]:
    return {
        "cell": one.name,
        "rule": str(one.rule),
        "state": one.state,
        "words": one.words,
        "figure": asdict(one.figure) if one.figure else None,
    }


def gate_title(found: Gate) -> str:
    """What a gate came to, in one line."""
    states: tuple[State, ...] = ("red", "inconclusive", "pass")
    counts = ", ".join(f"{n} {state}" for state in states if (n := found.count(state)))
    return f"{_TITLES[found.state]} ({counts or 'nothing to judge'})"


def _gate_lines(found: Gate) -> list[tuple[State, str, str]]:
    """What is not plainly fine, the red first."""
    rows: list[tuple[State, str, str]] = [
        (one.state, one.name, f"{one.rule}: {one.words}")
        for one in found.judgements
        if one.state != "pass"
    ]
    rows += [(one.state, one.name, one.words) for one in found.findings]
    order = list(_SIGNS)
    return sorted(rows, key=lambda row: order.index(row[0]))


def gate_method(found: Gate) -> list[str]:
    """The rules, and how it was judged by them."""
    lines = [found.why_useless] if found.why_useless else []
    if found.unjudged and not found.why_useless:
        said = "; ".join(str(rule) for rule in found.unjudged)
        lines.append(f"not judged, since no cell has it on both sides: {said}")
    lines += conditions(found.paired)
    lines.append(f"rules: {'; '.join(str(rule) for rule in found.rules)}")
    alpha = (1.0 - found.options.confidence) * 100
    lines.append(
        "red is beyond the rule and more than chance; where nothing changed, the whole gate goes"
        f" red in at most {significant(alpha, 2)} % of cases"
    )
    if found.unknown:
        lines.append(
            f"{found.unknown} figures are of single runs: "
            + (
                "held to the plain threshold, as their noise is not known"
                if found.is_plain
                else "repeat the cells (--repeats 3), give their --noise, or judge --plain"
            )
        )
    elif found.is_plain:
        lines.append("--plain changed nothing: no figure is of single runs without a known noise")
    return lines


def changes(name: str, figures: Any, metrics: Sequence[str]) -> list[str]:  # noqa: ANN401  a mapping
    """A row of the table: by how much each figure differs."""
    return [name, *(change_in_words(figures[one]) if one in figures else "-" for one in metrics)]


def change_in_words(one: CellChange) -> str:
    """By how much NEW differs from REF, with the interval if there is one."""
    value = _share(one.value, one)
    if one.low is None or one.high is None:
        return value
    if one.low == one.high:
        return f"{value} (exact)"
    return f"{value} ({_share(one.low, one, '')} to {_share(one.high, one, '')})"


def _share(value: float, one: CellChange, percent: str = " %") -> str:
    if one.scale == "difference":
        size = (
            scaled(abs(value), "B") if one.column.endswith("_bytes") else significant(abs(value), 3)
        )
        return f"{'+' if value >= 0 else '-'}{size}"
    return f"{(value - 1.0) * 100:+.1f}{percent}"


def unit_of(column: str) -> str:
    """The unit of a figure, by its column's name; empty where it has none, or a compound one."""
    units = {"_bytes": "B", "_j": "J", "_s": "s", "_frac": ""}
    ends = (unit for end, unit in units.items() if column.endswith(end) and "_per_" not in column)
    return next(ends, "")


def _flat(one: CellChange) -> dict[str, Any]:
    return {
        "column": one.column,
        "ref": one.ref,
        "new": one.new,
        "value": one.value,
        "low": one.low,
        "high": one.high,
        "new_runs": one.repeats[0],
        "ref_runs": one.repeats[1],
        "noise": one.noise,
        "basis": one.basis,
    }
