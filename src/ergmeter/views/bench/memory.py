"""The memory table of a bench, by each source that reports it (`erg bench report --memory`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.units import scaled
from ergmeter.views.blocks import markdown_table

if TYPE_CHECKING:
    from ergmeter.bench.memory import MemoryTable

_HEADS = ("cell", "by", "of", "bytes", "", "")
_NOTES = (
    "nvidia's are of all programs on a device, contexts and reserves included; the Trainer's and"
    " the allocator's are what tensors held",
    "the Trainer tells of rank 0 alone; an evaluation within train() is in train's figures",
)


def page(memory: MemoryTable) -> RenderableType:
    """Render a line for each memory metric of each cell; absent ones with their reason."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in _HEADS:
        is_note = head == "" and len(table.columns) == len(_HEADS) - 1
        table.add_column(head, justify="right" if head == "bytes" else "left", no_wrap=not is_note)
    for line in _lines(memory):
        table.add_row(*(Text(cell) for cell in line))
    return Group(table, *(Text(line, "dim") for line in _memory_notes(memory)))


def markdown(table: MemoryTable) -> str:
    """Render the same table as Markdown."""
    lines = markdown_table(_HEADS, _lines(table))
    return "\n".join([*lines, "", *(f"- {line}" for line in _memory_notes(table))]) + "\n"


def _lines(table: MemoryTable) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for name, figures in table.cells:
        label = name
        for figure in figures:
            if figure.value_bytes is None:
                sums = ("-", "")
            else:
                exact = f"{figure.value_bytes:,.0f}".replace(",", " ")
                sums = (exact, scaled(figure.value_bytes, "B"))
            lines.append((label, figure.by, figure.of, *sums, figure.note))
            label = ""
    return lines


def _memory_notes(table: MemoryTable) -> list[str]:
    if not table.cells:
        return ["no cell has run yet"]
    more = [f"and {table.more} more cells: --all shows them"] if table.more else []
    return [*more, *_NOTES]
