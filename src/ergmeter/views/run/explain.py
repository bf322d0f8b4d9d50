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

from ergmeter.metrics.explain.waterfall import levels
from ergmeter.records import Missing
from ergmeter.units import scaled, significant
from ergmeter.views.analyze.blocks import Items, PagePart, Paragraph, TableBlock
from ergmeter.views.documents import finite, result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ergmeter.metrics.explain.block import LossBlock
    from ergmeter.metrics.explain.waterfall import Change, Explanation
    from ergmeter.runlog.reader import Run

# -- explain parts ---------------------------------------------------------------------------------
# `erg explain` in words: what its terminal, its Markdown and its page say alike.
#
# The trap: three texts of one waterfall that drift apart. Each figure and each sentence is made
# here; the page adds the drawing.


NOTHING = "nothing can be told apart: no MFU, no readings of a device, no waits between steps"
_LEAST = 0.01  # percent, that a share is given to
_OF_JOULES = (
    "each block is what is lost beyond the ones above it; joules of waits and stalls of 0.2 s and"
    " more are as drawn, the others are divided by share"
)
WATERFALL = "from the peak to what was achieved"
_TITLE = WATERFALL.capitalize()
CHANGES = "most worth trying"
NOT_TOLD = "not told apart"
RECORD_NEXT = "to record next time"


def share(one: LossBlock) -> str:
    """The share of the peak that a block takes; with a plus what it gives."""
    value = 100 * abs(one.share_frac)
    sign = "+" if one.share_frac < 0 else ""
    if 0 < value < _LEAST:
        return f"{sign}< {_LEAST} %"
    said = f"{value:.1f}" if value >= 0.05 or not value else significant(value, 1)
    return f"{sign}{said} %"


def joules(one: LossBlock) -> str:
    """What a block drew; a gain has drawn nothing."""
    return "" if one.joules is None or one.share_frac < 0 else scaled(one.joules, "J")


def whole_joules(found: Explanation) -> str:
    """What the window drew, where that is known."""
    return "" if isinstance(found.energy, Missing) else scaled(found.energy.value, "J")


def said_of_joules(found: Explanation) -> str:
    """How blocks came to their joules, or why they have none."""
    if isinstance(found.energy, Missing):
        return f"no joules: {found.energy.reason}"
    return _OF_JOULES if found.blocks else ""


def gain(one: Change) -> str:
    """How much faster a change would make the run, at the most."""
    most = "less than" if one.is_bound else "up to"
    if one.gain_frac >= 1:
        return f"{most} {1 + one.gain_frac:.1f} times as fast"
    return f"{most} {100 * one.gain_frac:.0f} % faster"


def facts(one: LossBlock) -> str:
    """The evidence of a block."""
    return "; ".join(f"{fact.key}: {fact.said}" for fact in one.facts)


def not_told(found: Explanation) -> dict[str, str]:
    """What is not told apart, by the reason that it shares."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.missing.items():
        by_reason.setdefault(why, []).append(name.removesuffix("_frac").replace("_", " "))
    return {why: ", ".join(names) for why, names in by_reason.items()}


def change_lines(found: Explanation) -> tuple[str, ...]:
    """What to try, what it would bring at the most, and what says so."""
    return tuple(f"{one.advice}. {gain(one).capitalize()}: {one.why}" for one in found.changes)


def explain_parts(found: Explanation) -> Iterator[PagePart]:
    """Everything, the waterfall as a table first."""
    if found.achieved is None:
        yield PagePart("waterfall-part", _TITLE, (Paragraph(f"{NOTHING}."),))
    else:
        rows = tuple(
            (level.block.title, share(level.block), joules(level.block), level.block.basis)
            for level in levels(found)
        )
        peak = ("peak", "100.0 %", whole_joules(found), "")
        head = ("block", "of the peak", "joules", "how")
        table = TableBlock(WATERFALL, head, (peak, *rows))
        said = (Paragraph(one) for one in (said_of_joules(found),) if one)
        yield PagePart("waterfall-part", _TITLE, (Paragraph(f"100 % is {found.of}."), table, *said))
    lists = {
        ("remarks", "what to know"): found.remarks,
        ("changes", CHANGES): change_lines(found),
        ("not-told", NOT_TOLD): tuple(f"{names}: {why}" for why, names in not_told(found).items()),
        ("record-next", RECORD_NEXT): found.record_next,
    }
    for (id_, title), texts in lists.items():
        if texts:
            yield PagePart(id_, title.capitalize(), (Items(texts),))
    if found.achieved is not None:
        whole = (*found.blocks, found.achieved)
        seen = tuple((one.title, one.why, facts(one)) for one in whole)
        yield PagePart(
            "evidence", "Evidence", (TableBlock("evidence", ("block", "is", "seen"), seen),)
        )


# -- explain ---------------------------------------------------------------------------------------


_CELLS = 20  # of a bar: all of the peak
_EXPLAIN_TITLE = 29
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
    table.add_column(width=_EXPLAIN_TITLE)
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
