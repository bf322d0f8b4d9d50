"""The waterfall of `erg explain`, on the terminal and as JSON. Fits 80 columns; bars are ASCII.

The words are those of `explain_parts`, as the page and the Markdown have them.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ergmeter.metrics.explain import levels
from ergmeter.views.documents import finite, result
from ergmeter.views.explain_parts import (
    CHANGES,
    NOT_TOLD,
    NOTHING,
    RECORD_NEXT,
    facts,
    gain,
    joules,
    not_told,
    said_of_joules,
    share,
    whole_joules,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.metrics.explain import Explanation
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
        parts += [Text(f"100 % is {found.of}\n", "dim"), _waterfall(found)]
    else:
        parts.append(Text(NOTHING, "yellow"))
    if said_of_joules(found):
        parts.append(Text(f"\n{said_of_joules(found)}", "dim"))
    parts += [Padding(Text(f"* {said}"), (1, 0, 0, 0)) for said in found.remarks]
    parts += _changes(found)
    parts += _missing(found)
    return Group(*parts)


def _waterfall(found: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(width=_TITLE)
    table.add_column(width=_CELLS, no_wrap=True)
    table.add_column(justify="right", no_wrap=True, width=8)
    table.add_column(justify="right", no_wrap=True, width=9)
    table.add_column(no_wrap=True, width=8)
    table.add_row(Text("peak", "bold"), "#" * _CELLS, "100.0 %", whole_joules(found), "")
    for level in levels(found):
        one = level.block
        title = Text(one.title, "bold" if one is found.achieved else "")
        bar = _bar(level.to_frac, level.from_frac)
        table.add_row(title, bar, share(one), joules(one), Text(one.basis, _STYLES[one.basis]))
    return table


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
    lines: list[RenderableType] = [Text(f"\n{CHANGES}", "bold")]
    for number, one in enumerate(found.changes, 1):
        lines.append(Text(f"{number}. {one.advice}"))
        lines.append(Padding(Text(f"{gain(one)}: {one.why}", "dim"), (0, 0, 0, 3)))
    return lines


def _missing(found: Explanation) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if found.missing:
        lines.append(Text(f"\n{NOT_TOLD}", "bold"))
    for why, names in not_told(found).items():
        lines.append(Text.assemble((f"- {names}: ", "dim"), why))
    if found.record_next:
        lines.append(Text(f"\n{RECORD_NEXT}", "bold"))
        lines += [Text(f"- {one}") for one in found.record_next]
    return lines


def evidence(found: Explanation) -> RenderableType:
    """Block by block what it rests on."""
    if not found.achieved:
        return Group()
    lines: list[RenderableType] = [Text("\nevidence", "bold")]
    for one in (*found.blocks, found.achieved):
        lines.append(Text.assemble(f"{one.title}: ", (one.why, "dim")))
        if one.facts:
            lines.append(Padding(Text(facts(one), "dim"), (0, 0, 0, 3)))
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
