"""`erg bench report --memory`: each cell's memory by everybody who tells it, to the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ergmeter.units import scaled
from ergmeter.views.bench.report import markdown_row

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.bench.memory import MemoryTable

_HEADS = ("cell", "by", "of", "bytes", "", "")
_NOTES = (
    "nvidia's are of all programs on a device, contexts and reserves included; the Trainer's and"
    " the allocator's are what tensors held",
    "the Trainer tells of rank 0 alone; an evaluation within train() is in train's figures",
)


def page(found: MemoryTable) -> RenderableType:
    """A line for each figure of each cell; what is absent with its reason."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in _HEADS:
        is_note = head == "" and len(table.columns) == len(_HEADS) - 1
        table.add_column(head, justify="right" if head == "bytes" else "left", no_wrap=not is_note)
    for line in _lines(found):
        table.add_row(*(Text(cell) for cell in line))
    return Group(table, *(Text(line, "dim") for line in _memory_notes(found)))


def markdown(found: MemoryTable) -> str:
    """The same, to paste."""
    lines = [markdown_row(_HEADS), markdown_row("---" for _ in _HEADS)]
    lines += [markdown_row(line) for line in _lines(found)]
    return "\n".join([*lines, "", *(f"- {line}" for line in _memory_notes(found))]) + "\n"


def _lines(found: MemoryTable) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for name, figures in found.cells:
        shown = name
        for one in figures:
            if one.value_bytes is None:
                told = ("-", "")
            else:
                exact = f"{one.value_bytes:,.0f}".replace(",", " ")
                told = (exact, scaled(one.value_bytes, "B"))
            lines.append((shown, one.by, one.of, *told, one.note))
            shown = ""
    return lines


def _memory_notes(found: MemoryTable) -> list[str]:
    if not found.cells:
        return ["no cell has run yet"]
    more = [f"and {found.more} more cells: --all shows them"] if found.more else []
    return [*more, *_NOTES]
