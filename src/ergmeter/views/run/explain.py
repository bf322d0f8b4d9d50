"""The waterfall of `erg explain`, on the terminal and as JSON. Fits 80 columns, ASCII bars.

`explain_parts` makes the same content for the HTML page and for Markdown.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ergmeter.metrics.explain.waterfall import Change, Explanation, levels
from ergmeter.records import Missing
from ergmeter.units import grouped, scaled, significant
from ergmeter.views.blocks import Items, PagePart, Paragraph, TableBlock
from ergmeter.views.documents import finite, result
from ergmeter.views.run.card import BASIS_STYLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.metrics.explain.time import LossBlock
    from ergmeter.runlog.reader import Run


NOTHING = "nothing can be told apart: no MFU, no readings of a device, no waits between steps"
_LEAST = 0.01  # percent; shares are rounded to it
_OF_JOULES = (
    "each block is what is lost beyond the ones above it; joules of waits and stalls of 0.2 s and"
    " more are as drawn, the others are divided by share"
)
WATERFALL = "from the peak to what was achieved"
_TITLE = WATERFALL.capitalize()
CHANGES = "most worth trying"
NOT_TOLD = "not told apart"
RECORD_NEXT = "to record next time"


def share(block: LossBlock) -> str:
    """Return a block's share of the peak; a gain with a plus sign."""
    value = 100 * abs(block.share_frac)
    sign = "+" if block.share_frac < 0 else ""
    if 0 < value < _LEAST:
        return f"{sign}< {_LEAST} %"
    number = f"{value:.1f}" if value >= 0.05 or not value else significant(value, 1)
    return f"{sign}{number} %"


def joules(block: LossBlock) -> str:
    """Return a block's energy; a gain has none."""
    return "" if block.joules is None or block.share_frac < 0 else scaled(block.joules, "J")


def total_joules(explanation: Explanation) -> str:
    """Return the energy of the window, if known."""
    return "" if isinstance(explanation.energy, Missing) else scaled(explanation.energy.value, "J")


def energy_note(explanation: Explanation) -> str:
    """Return how energy was attributed to blocks, or why it was not."""
    if isinstance(explanation.energy, Missing):
        return f"no joules: {explanation.energy.reason}"
    return _OF_JOULES if explanation.blocks else ""


def gain(change: Change) -> str:
    """Return the upper bound of a change's speedup."""
    most = "less than" if change.is_bound else "up to"
    if change.gain_frac >= 1:
        return f"{most} {1 + change.gain_frac:.1f} times as fast"
    return f"{most} {100 * change.gain_frac:.0f} % faster"


def facts(block: LossBlock) -> str:
    """Return the evidence of a block."""
    return "; ".join(f"{fact.key}: {fact.said}" for fact in block.facts)


def unattributed(explanation: Explanation) -> dict[str, str]:
    """Return unattributed causes by their reason."""
    causes = (
        (why, name.removesuffix("_frac").replace("_", " "))
        for name, why in explanation.missing.items()
    )
    return {why: ", ".join(names) for why, names in grouped(causes).items()}


def change_lines(explanation: Explanation) -> tuple[str, ...]:
    """Return advice with the upper bound of its gain and the evidence."""
    return tuple(
        f"{change.advice}. {gain(change).capitalize()}: {change.why}"
        for change in explanation.changes
    )


def explain_parts(explanation: Explanation) -> Iterator[PagePart]:
    """Yield all document parts, the waterfall table first."""
    if explanation.achieved is None:
        yield PagePart("waterfall-part", _TITLE, (Paragraph(f"{NOTHING}."),))
    else:
        rows = tuple(
            (level.block.title, share(level.block), joules(level.block), level.block.basis)
            for level in levels(explanation)
        )
        peak = ("peak", "100.0 %", total_joules(explanation), "")
        head = ("block", "of the peak", "joules", "how")
        table = TableBlock(WATERFALL, head, (peak, *rows))
        paragraphs = (Paragraph(text) for text in (energy_note(explanation),) if text)
        yield PagePart(
            "waterfall-part", _TITLE, (Paragraph(f"100 % is {explanation.of}."), table, *paragraphs)
        )
    lists = {
        ("remarks", "what to know"): explanation.remarks,
        ("changes", CHANGES): change_lines(explanation),
        ("not-told", NOT_TOLD): tuple(
            f"{names}: {why}" for why, names in unattributed(explanation).items()
        ),
        ("record-next", RECORD_NEXT): explanation.record_next,
    }
    for (id_, title), texts in lists.items():
        if texts:
            yield PagePart(id_, title.capitalize(), (Items(texts),))
    if explanation.achieved is not None:
        blocks = (*explanation.blocks, explanation.achieved)
        evidence_rows = tuple((block.title, block.why, facts(block)) for block in blocks)
        yield PagePart(
            "evidence",
            "Evidence",
            (TableBlock("evidence", ("block", "is", "seen"), evidence_rows),),
        )


_CELLS = 20  # width of a bar at 100 % of the peak
_EXPLAIN_TITLE = 29


def page(run: Run, explanation: Explanation) -> RenderableType:
    """Render the waterfall, notes, advice, and unattributed losses."""
    parts: list[RenderableType] = [
        Text.assemble((run.name, "bold"), (f"  {explanation.window}", "dim")),
    ]
    if explanation.achieved:
        parts += [Text(f"100 % is {explanation.of}\n", "dim"), _waterfall(explanation)]
    else:
        parts.append(Text(NOTHING, "yellow"))
    if energy_note(explanation):
        parts.append(Text(f"\n{energy_note(explanation)}", "dim"))
    parts += [Padding(Text(f"* {remark}"), (1, 0, 0, 0)) for remark in explanation.remarks]
    parts += _changes(explanation)
    parts += _missing(explanation)
    return Group(*parts)


def _waterfall(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(width=_EXPLAIN_TITLE)
    table.add_column(width=_CELLS, no_wrap=True)
    table.add_column(justify="right", no_wrap=True, width=8)
    table.add_column(justify="right", no_wrap=True, width=9)
    table.add_column(no_wrap=True, width=8)
    table.add_row(Text("peak", "bold"), "#" * _CELLS, "100.0 %", total_joules(explanation), "")
    for level in levels(explanation):
        block = level.block
        title = Text(block.title, "bold" if block is explanation.achieved else "")
        bar = _bar(level.to_frac, level.from_frac)
        table.add_row(
            title, bar, share(block), joules(block), Text(block.basis, BASIS_STYLES[block.basis])
        )
    return table


def _bar(low: float, high: float) -> str:
    """Return the segment of a bar at its position; at least one mark."""
    low, high = min(low, high), max(low, high)
    first, last = (
        math.floor(max(0.0, low) * _CELLS + 0.5),
        math.floor(min(1.0, high) * _CELLS + 0.5),
    )
    if last > first:
        return " " * first + "#" * (last - first)
    return " " * min(first, _CELLS - 1) + "|"


def _changes(explanation: Explanation) -> list[RenderableType]:
    if not explanation.changes:
        return []
    lines: list[RenderableType] = [Text(f"\n{CHANGES}", "bold")]
    for number, change in enumerate(explanation.changes, 1):
        lines.append(Text(f"{number}. {change.advice}"))
        lines.append(Padding(Text(f"{gain(change)}: {change.why}", "dim"), (0, 0, 0, 3)))
    return lines


def _missing(explanation: Explanation) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if explanation.missing:
        lines.append(Text(f"\n{NOT_TOLD}", "bold"))
    for why, names in unattributed(explanation).items():
        lines.append(Text.assemble((f"- {names}: ", "dim"), why))
    if explanation.record_next:
        lines.append(Text(f"\n{RECORD_NEXT}", "bold"))
        lines += [Text(f"- {advice}") for advice in explanation.record_next]
    return lines


def evidence(explanation: Explanation) -> RenderableType:
    """Render the evidence block by block."""
    if not explanation.achieved:
        return Group()
    lines: list[RenderableType] = [Text("\nevidence", "bold")]
    for block in (*explanation.blocks, explanation.achieved):
        lines.append(Text.assemble(f"{block.title}: ", (block.why, "dim")))
        if block.facts:
            lines.append(Padding(Text(facts(block), "dim"), (0, 0, 0, 3)))
    return Group(*lines)


def document(run: Run, explanation: Explanation) -> dict[str, Any]:
    """Return JSON. Shares add up to 1, joules to the energy of the window."""
    return {
        "run": str(run.path),
        "window": explanation.window,
        "of": explanation.of,
        "energy": result(explanation.energy),
        "blocks": [finite(asdict(block)) for block in explanation.blocks],
        "achieved": finite(asdict(explanation.achieved)) if explanation.achieved else None,
        "remarks": list(explanation.remarks),
        "changes": [finite(asdict(change)) for change in explanation.changes],
        "missing": explanation.missing,
        "record_next": list(explanation.record_next),
    }
