"""Renders a document on a terminal with rich. Fits 80 columns; bars are ASCII.

Texts from runs and files are printed as they are: none of them is read as markup of rich.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich import table as rich_table
from rich.padding import Padding
from rich.text import Text

from ergmeter.views.document import (
    BarCell,
    HeadlinePart,
    Items,
    Note,
    Paragraph,
    Section,
    Table,
    TableColumn,
    without_charts,
)
from ergmeter.views.run.card import BASIS_STYLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from ergmeter.views.document import Document, Part

_STATES = {"good": "green", "bad": "red", "unsure": "yellow", "": ""}
_STYLES = {"dim": "dim", "strong": "bold", "": ""}
_SIGNS = {
    "serious": ("!! ", "red"),
    "minor": ("!  ", "yellow"),
    "remark": ("*  ", ""),
    "ok": ("ok ", "green"),
    "absent": ("-  ", "dim"),
}
_BAR_CELLS = 20
_INDENT = 2
_BELOW = 3


def show(document: Document, console: Console) -> None:
    """Print a document's parts."""
    for renderable, is_to_copy in _lines(document.parts, after=None):
        console.print(renderable, soft_wrap=is_to_copy or None)


def _lines(parts: tuple[Part, ...], *, after: Part | None) -> Iterator[tuple[RenderableType, bool]]:
    """Yield what to print, and whether it must not be wrapped; tables stand apart from text."""
    for part in without_charts(parts):
        if after is not None and _stands_apart(after, part):
            yield Text(), False
        if isinstance(part, Section):
            yield Text(part.title, "bold"), False
            yield from _lines(part.parts, after=HeadlinePart(part.title))
        else:
            is_to_copy = isinstance(part, Paragraph) and part.is_to_copy
            yield from ((line, is_to_copy) for line in _part(part))
        after = part


def _stands_apart(before: Part, part: Part) -> bool:
    if isinstance(before, Section) or isinstance(part, Section) or _is_grid(before):
        return True
    return _is_grid(part) and not isinstance(before, HeadlinePart)


def _is_grid(part: Part) -> bool:
    """Whether a part is a table in columns."""
    return isinstance(part, Table) and "below" not in {column.kind for column in part.layout}


def _part(part: Part) -> Iterator[RenderableType]:
    if isinstance(part, HeadlinePart):
        yield _headline(part)
    elif isinstance(part, Table):
        yield from _grid(part) if _is_grid(part) else _rows(part)
    elif isinstance(part, Note):
        yield from _note(part)
    elif isinstance(part, Items):
        yield from (Text(f"- {text}") for text in part.texts)
    elif isinstance(part, Paragraph):
        yield Text(part.text, _STYLES[part.style])


def _headline(headline: HeadlinePart) -> Text:
    colour = _STATES[headline.state]
    line = Text(headline.name, "bold")
    if headline.text:
        line.append(": " if headline.name else "")
        line.append(headline.text, colour or ("" if headline.name else "bold"))
    if headline.about:
        line.append("  ")
        line.append(headline.about, "dim")
    return line


def _note(note: Note) -> Iterator[RenderableType]:
    sign = _SIGNS[note.weight]
    yield _indented(Text.assemble(sign, note.text), _INDENT)
    for line in note.effect.splitlines():
        yield _indented(Text(line, "dim"), _INDENT + len(sign[0]))


def _indented(text: Text, columns: int) -> Padding:
    return Padding(text, (0, 0, 0, columns), expand=False)


def _grid(table: Table) -> Iterator[RenderableType]:
    """Yield a table in columns, after its caption."""
    if table.caption:
        yield Text(table.caption, "dim")
    has_head = table.has_head and any(table.head)
    grid = rich_table.Table(
        box=box.SIMPLE_HEAD if has_head else None,
        show_header=has_head,
        show_edge=False,
        pad_edge=False,
        collapse_padding=has_head,
    )
    for column in table.layout:
        is_text = column.kind == "text"
        grid.add_column(
            Text(column.title),
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.no_wrap or not is_text,
            overflow="fold",
            style=_STYLES[column.style],
        )
    for number, row in enumerate(table.rows):
        cells = [_cell(column, cell) for column, cell in zip(table.layout, row, strict=True)]
        grid.add_row(*cells, style="bold" if number in table.strong_rows else "")
    yield grid


def _rows(table: Table) -> Iterator[RenderableType]:
    """Yield each row as a line, with its `below` cells under it."""
    if table.caption:
        yield Text(table.caption, "dim")
    for row in table.rows:
        cells = list(zip(table.layout, row, strict=True))
        line = [_cell(column, cell) for column, cell in cells if cell and column.kind != "below"]
        yield Text("  ").join(line)
        for column, cell in cells:
            if cell and column.kind == "below":
                yield _indented(Text(cell, "dim"), _BELOW)


def _cell(column: TableColumn, cell: str) -> Text:
    if isinstance(cell, BarCell):
        return Text(bar(cell.low, cell.high))
    if column.kind == "basis":
        return Text(cell, BASIS_STYLES.get(cell, ""))
    return Text(cell, _STYLES[column.style])


def bar(low: float, high: float) -> str:
    """Return the segment of a bar at its position; at least one mark."""
    first, last = (
        math.floor(max(0.0, low) * _BAR_CELLS + 0.5),
        math.floor(min(1.0, high) * _BAR_CELLS + 0.5),
    )
    if last > first:
        return " " * first + "#" * (last - first)
    return " " * min(first, _BAR_CELLS - 1) + "|"
