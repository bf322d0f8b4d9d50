"""Renders a document on a terminal with rich. Fits 80 columns; bars are ASCII.

Texts from runs and files are printed as they are: none of them is read as markup of rich.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from textwrap import TextWrapper

from rich import box
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from ergmeter.views.document import (
    VERDICTS,
    BarCell,
    Document,
    Frame,
    HeadlinePart,
    Items,
    Note,
    Paragraph,
    Part,
    Section,
    Table,
    TableColumn,
    Weight,
    parts_for,
    printable_lines,
)

BASIS_STYLES = {"measured": "green", "derived": "cyan", "reported": "yellow", "assumed": "magenta"}
_STATUS_STYLES = {"ok": "green", "running": "cyan", "pending": "dim", "skipped": "dim"}
_STATES = {"good": "green", "bad": "red", "unsure": "yellow", "": ""}
_STYLES = {"dim": "dim", "strong": "bold", "": ""}
_COLOURS = {"better": "green", "worse": "red", "differs": "yellow", "no interval": "yellow"}
_SIGNS: dict[Weight, tuple[str, str]] = {
    "serious": ("!! ", "red"),
    "minor": ("!  ", "yellow"),
    "remark": ("*  ", ""),
    "ok": ("ok ", "green"),
    "absent": ("-  ", "dim"),
    **{weight: (f"{sign:<3}", _COLOURS.get(weight, "")) for weight, (sign, _) in VERDICTS.items()},
}
_BAR_CELLS = 20
_INDENT = 2
_GAP = 2
_FRAME_COLUMNS, _DENSE_COLUMNS = 100, 79  # at most
_FRAME_EDGES = 4  # columns: a line and a blank on each side


def show(document: Document, console: Console) -> None:
    """Print a document's parts."""
    _show(document.parts, console, after=None)


def _show(parts: tuple[Part, ...], console: Console, *, after: Part | None) -> None:
    """Print parts; sections, tables and headlines stand apart from what is before them."""
    for part in parts_for(parts, "terminal"):
        if after is not None and _stands_apart(after, part):
            console.print()
        if isinstance(part, Section):
            if part.title:
                console.print(_text(part.title, "bold"))
            _show(part.parts, console, after=None)
        else:
            _print(part, console)
        after = part


def _stands_apart(before: Part, part: Part) -> bool:
    if isinstance(before, Frame) or isinstance(part, Frame):
        return False
    if isinstance(before, Section) or isinstance(part, Section) or _is_grid(before):
        return True
    return not isinstance(before, HeadlinePart) and (
        _is_grid(part) or isinstance(part, HeadlinePart)
    )


def _is_grid(part: Part) -> bool:
    """True if a part is printed as a table in columns."""
    return isinstance(part, Table) and not _has_below(part) and not _is_field_list(part)


def _has_below(table: Table) -> bool:
    return "below" in {column.kind for column in table.layout}


def _is_field_list(table: Table) -> bool:
    """True if a table is a list of fields: names and texts without a header."""
    return not table.has_head and [column.kind for column in table.layout] == ["text", "text"]


def _print(part: Part, console: Console) -> None:
    if isinstance(part, HeadlinePart):
        console.print(_headline(part))
    elif isinstance(part, Frame):
        console.print(_frame(part, console.width))
    elif isinstance(part, Table):
        _print_table(part, console)
    elif isinstance(part, Note):
        sign = Text.assemble(" " * _INDENT, _SIGNS[part.weight])
        _print_hanging(console, sign, part.text)
        for line in part.effect.splitlines():
            _print_hanging(console, " " * len(sign), line, "dim")
    elif isinstance(part, Items):
        for text in part.texts:
            _print_hanging(console, "- ", text)
    elif isinstance(part, Paragraph):
        console.print(_paragraph(part), soft_wrap=part.is_to_copy or None)


def _text(text: str, style: str = "", *, is_one_line: bool = False) -> Text:
    """Return a text without control characters, which a terminal would act on."""
    printed = Text(printable_lines(text), style, no_wrap=is_one_line or None)
    printed.overflow = "ellipsis" if is_one_line else "fold"
    return printed


def _paragraph(paragraph: Paragraph) -> Text:
    return _text(paragraph.text, _STYLES[paragraph.style], is_one_line=paragraph.is_one_line)


def _headline(headline: HeadlinePart) -> Text:
    colour = _STATES[headline.state]
    line = _text(headline.name, "bold")
    if headline.text:
        style = colour or ("" if headline.name else "bold")
        line = Text.assemble(line, ": " if headline.name else "", _text(headline.text, style))
    if headline.about:
        line = Text.assemble(line, "  ", _text(headline.about, "dim"))
    return line


def _frame(frame: Frame, columns: int) -> Panel:
    """Return a frame; blank lines precede tables, absences and each new kind of note."""
    most = _DENSE_COLUMNS if frame.is_dense else _FRAME_COLUMNS
    width = min(most, columns) - _FRAME_EDGES
    body: list[RenderableType] = []
    weight = ""  # of the note before
    for part in frame.parts:
        before, weight = weight, part.weight if isinstance(part, Note) else ""
        is_apart = isinstance(part, Table) or (weight and (weight == "absent" or weight != before))
        if is_apart and not frame.is_dense:
            body.append(Text())
        body.append(_framed(part, width))
    status = _text(frame.status, _STATES[frame.state])
    if frame.is_dense:
        name, about = _text(frame.name, "bold"), _text(frame.about)
        left = width - _FRAME_EDGES - len(" · ") - status.cell_len - about.cell_len
        name.truncate(left, overflow="ellipsis")
        line = f" {'─' * (left - name.cell_len)} " if about else ""
        title = Text.assemble(name, " · ", status, line, about)
    else:
        title = Text.assemble(" ", _text(frame.name, "bold"), "  ", status, " ")
    return Panel(
        Group(*body),
        title=title,
        title_align="left",
        subtitle=_text(frame.below) or None,
        subtitle_align="right",
        width=most,
        padding=(0, 1),
    )


def _framed(part: Table | Paragraph | Note, width: int) -> RenderableType:
    if isinstance(part, Table):
        return grid(part, width)
    if isinstance(part, Paragraph):
        return _paragraph(part)
    if part.weight == "absent":
        return Text.assemble(_text(f"{part.text}: ", "yellow"), _text(part.effect))
    sign, style = _SIGNS[part.weight]
    lines = rich_table.Table.grid(padding=(0, 1, 0, 0))
    lines.add_row(Text(sign.strip(), style), _text(part.text))
    return lines


def _print_hanging(console: Console, start: str | Text, text: str, style: str = "") -> None:
    """Print a text after `start`, with a hanging indent.

    A word that is longer than a line is not broken: it may be a path or an address.
    """
    plain, indent = _text(text).plain, " " * len(start)
    wrapper = TextWrapper(
        max(console.width - len(start), 1), break_long_words=False, break_on_hyphens=False
    )
    lines = [plain] if console.soft_wrap else wrapper.wrap(plain) or [""]
    for number, line in enumerate(lines):
        console.print(Text.assemble(indent if number else start, (line, style)), soft_wrap=True)


def _print_table(table: Table, console: Console) -> None:
    """Print a table after its caption. One in columns that is too wide continues below."""
    if table.caption:
        console.print(_text(table.caption, "dim"))
    if _is_field_list(table):
        width = max((len(name) for name, _ in table.rows), default=0)
        for name, text in table.rows:
            _print_hanging(console, f"{' ' * _INDENT}{_text(name).plain:<{width}}  ", text)
    elif _has_below(table):
        _print_rows(table, console)
    else:
        for number, piece in enumerate(_pieces(table, console.width)):
            if number:
                console.print()
            console.print(grid(piece, console.width))


def _pieces(table: Table, width: int) -> Iterator[Table]:
    """Yield a table in pieces that fit, each with the columns that name the rows."""
    titles, widths = list(range(table.row_titles)), _widths(table)
    if not titles or sum(widths) + len(widths) - 1 <= width:  # with a gap of one
        yield table
        return
    title_width = min(sum(widths[n] + _GAP for n in titles), width // 2)
    piece: list[int] = []
    for number in range(len(titles), len(widths)):
        columns = [*piece, number]
        taken = title_width + sum(widths[n] + _GAP for n in columns) - _GAP
        if piece and taken > width:
            yield table.only(titles + piece)
            columns = [number]
        piece = columns
    yield table.only(titles + piece)


def grid(table: Table, width: int) -> rich_table.Table:
    """Return a table in columns that fits into a width."""
    has_head = table.has_head and any(table.head)
    has_box = has_head and table.has_rule
    rows = rich_table.Table(
        box=box.SIMPLE_HEAD if has_box else None,
        show_header=has_head,
        show_edge=False,
        pad_edge=False,
        padding=(0, _gap(table, width, has_box=has_box), 0, 0),
    )
    head_lines = max((title.count("\n") for title in table.head), default=0)
    for column in table.layout:
        is_text = column.kind == "text"
        above = "\n" * (head_lines - column.title.count("\n"))
        rows.add_column(
            _text(f"{above}{column.title}"),
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.no_wrap or not is_text,
            style=_STYLES[column.style],
            max_width=column.most_characters or None,
        )
    for number, row in enumerate(table.rows):
        if table.is_grouped and number and row[0]:
            rows.add_row()
        cells = [_cell(column, cell) for column, cell in zip(table.layout, row, strict=True)]
        rows.add_row(*cells, style="bold" if number in table.strong_rows else "")
    return rows


def _gap(table: Table, width: int, *, has_box: bool) -> int:
    """Return the padding of a cell: columns are two apart, or one if they fit only then."""
    widths = _widths(table)
    gap = _GAP if sum(widths) + _GAP * (len(widths) - 1) <= width else 1
    return gap - has_box  # a box has a blank of its own between columns


def _widths(table: Table) -> list[int]:
    """Return the least widths of the columns."""
    rows = (table.head if table.has_head else [""] * len(table.head), *table.rows)
    columns = zip(table.layout, zip(*rows, strict=True), strict=True)
    return [max(_width(column, cell) for cell in cells) for column, cells in columns]


def _width(column: TableColumn, cell: str) -> int:
    """Return the least width of a cell: its longest line, or its longest word if it may wrap."""
    if isinstance(cell, BarCell):
        return _BAR_CELLS
    can_wrap = column.kind == "text" and not column.no_wrap
    return max(map(cell_len, cell.split() if can_wrap else cell.splitlines()), default=0)


def _print_rows(table: Table, console: Console) -> None:
    """Print each row as a line, with its `below` cells under it."""
    for row in table.rows:
        cells = list(zip(table.layout, row, strict=True))
        line = [_cell(column, cell) for column, cell in cells if cell and column.kind != "below"]
        console.print(Text("  ").join(line))
        for column, cell in cells:
            if cell and column.kind == "below":
                _print_hanging(console, " " * column.indent, cell, "dim")


def _cell(column: TableColumn, cell: str) -> Text:
    if isinstance(cell, BarCell):
        return Text(bar(cell.low, cell.high))
    if column.kind == "basis":
        return _text(cell, BASIS_STYLES.get(cell, ""))
    if column.kind == "status":
        return _text(cell, _STATUS_STYLES.get(cell, "red"))
    return _text(cell, _STYLES[column.style], is_one_line=column.is_one_line)


def bar(low: float, high: float) -> str:
    """Return the segment of a bar at its position; at least one mark."""
    first = math.floor(max(0.0, low) * _BAR_CELLS + 0.5)
    last = math.floor(min(1.0, high) * _BAR_CELLS + 0.5)
    if last > first:
        return " " * first + "#" * (last - first)
    return " " * min(first, _BAR_CELLS - 1) + "|"
