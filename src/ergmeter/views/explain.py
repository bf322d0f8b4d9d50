"""The waterfall of `erg explain`, on the terminal and as JSON. Fits 80 columns; bars are ASCII."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ergmeter.records import Missing
from ergmeter.units import scaled, significant
from ergmeter.views.documents import finite, result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.metrics.explain import Explanation
    from ergmeter.metrics.explain_blocks import Block
    from ergmeter.runlog.reader import Run

_CELLS = 20  # of a bar: all of the peak
_TITLE = 29
_STYLES = {"measured": "green", "derived": "cyan", "reported": "yellow", "assumed": "magenta"}


def page(run: Run, found: Explanation) -> RenderableType:
    """The waterfall, what to know about it, what to try, and what could not be told apart."""
    parts: list[RenderableType] = [
        Text.assemble((run.name, "bold"), (f"  {found.window}", "dim")),
    ]
    if found.achieved:
        parts += [Text(f"100 % is {found.of}\n", "dim"), _waterfall(found.achieved, found)]
    else:
        parts.append(Text(_NOTHING, "yellow"))
    if isinstance(found.energy, Missing):
        parts.append(Text.assemble("\n", ("no joules: ", "yellow"), found.energy.reason))
    elif found.blocks:
        parts.append(Text("\n" + _OF_JOULES, "dim"))
    parts += [Padding(Text(f"* {said}"), (1, 0, 0, 0)) for said in found.remarks]
    parts += _changes(found)
    parts += _missing(found)
    return Group(*parts)


_NOTHING = "nothing can be told apart: no MFU, no readings of a device, no waits between steps"
_OF_JOULES = (
    "Each block is what is lost beyond the ones above it. Joules of waits and stalls of 0.2 s"
    " and more are as drawn; the others are divided by share."
)


def _waterfall(achieved: Block, found: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(width=_TITLE)
    table.add_column(width=_CELLS, no_wrap=True)
    table.add_column(justify="right", no_wrap=True, width=7)
    table.add_column(justify="right", no_wrap=True, width=9)
    table.add_column(no_wrap=True, width=8)
    energy = "" if isinstance(found.energy, Missing) else scaled(found.energy.value, "J")
    table.add_row(Text("peak", "bold"), "#" * _CELLS, "100.0 %", energy, "")
    begin = 1.0
    for one in found.blocks:
        end = begin - one.share_frac
        table.add_row(Text(one.title), _bar(end, begin), *_cells(one))
        begin = end
    title = Text(achieved.title, "bold")
    table.add_row(title, _bar(0.0, achieved.share_frac), *_cells(achieved))
    return table


def _cells(one: Block) -> tuple[str, str, Text]:
    joules = "" if one.joules is None or one.share_frac < 0 else scaled(one.joules, "J")
    sign = "+" if one.share_frac < 0 else ""
    return f"{sign}{_percent(abs(one.share_frac))}", joules, Text(one.basis, _STYLES[one.basis])


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.1f} %" if value >= 0.05 or not value else f"{significant(value, 1)} %"


def _bar(low: float, high: float) -> str:
    """A piece of the bar in its place; one that is too short for a cell is a mark."""
    low, high = min(low, high), max(low, high)
    first, last = (
        math.floor(max(0.0, low) * _CELLS + 0.5),
        math.floor(min(1.0, high) * _CELLS + 0.5),
    )
    if last > first:
        return " " * first + "#" * (last - first)
    return " " * min(first, _CELLS - 1) + "|"


def _changes(found: Explanation) -> list[RenderableType]:
    if not found.changes:
        return []
    lines: list[RenderableType] = [Text("\nmost worth trying", "bold")]
    for number, one in enumerate(found.changes, 1):
        most = "less than" if one.is_bound else "up to"
        gain = f"{most} {_faster(one.gain_frac)}"
        lines.append(Text(f"{number}. {one.advice}"))
        lines.append(Padding(Text(f"{gain}: {one.why}", "dim"), (0, 0, 0, 3)))
    return lines


def _faster(gain: float) -> str:
    return f"{1 + gain:.1f} times as fast" if gain >= 1 else f"{100 * gain:.0f} % faster"


def _missing(found: Explanation) -> list[RenderableType]:
    lines: list[RenderableType] = []
    by_reason: dict[str, list[str]] = {}
    for name, why in found.missing.items():
        by_reason.setdefault(why, []).append(name.removesuffix("_frac").replace("_", " "))
    if by_reason:
        lines.append(Text("\nnot told apart", "bold"))
    for why, names in by_reason.items():
        lines.append(Text.assemble(("- " + ", ".join(names) + ": ", "dim"), why))
    if found.record_next:
        lines.append(Text("\nto record next time", "bold"))
        lines += [Text(f"- {one}") for one in found.record_next]
    return lines


def evidence(found: Explanation) -> RenderableType:
    """Block by block what it rests on."""
    if not found.achieved:
        return Group()
    lines: list[RenderableType] = [Text("\nevidence", "bold")]
    for one in (*found.blocks, found.achieved):
        facts = "; ".join(f"{fact.key}: {fact.said}" for fact in one.facts)
        lines.append(Text.assemble(f"{one.title}: ", (one.why, "dim")))
        if facts:
            lines.append(Padding(Text(facts, "dim"), (0, 0, 0, 3)))
    return Group(*lines)


def document(run: Run, found: Explanation) -> dict[str, Any]:
    """The same, for programs. Shares add up to 1, joules to the energy of the window."""
    return {
        "run": str(run.path),
        "window": found.window,
        "of": found.of,
        "energy": result(found.energy),
        "blocks": [finite(asdict(one)) for one in found.blocks],
        "achieved": finite(asdict(found.achieved)) if found.achieved else None,
        "remarks": list(found.remarks),
        "changes": [finite(asdict(one)) for one in found.changes],
        "missing": found.missing,
        "record_next": list(found.record_next),
    }
