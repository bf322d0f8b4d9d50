"""Parts of a document (paragraphs, lists, tables) and their Markdown.

Each part is made once and rendered as HTML and as Markdown, so that the two cannot differ.
Charts exist only on the HTML page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ergmeter.units import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class SortableCell:
    """A table cell that sorts by its value; None sorts last."""

    text: str
    value: float | None


Cell: TypeAlias = str | SortableCell


@dataclass(frozen=True)
class TableBlock:
    """A table. Readers can sort it by a column if `is_sortable`."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_sortable: bool = False


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, or lines to be copied verbatim."""

    text: str
    is_to_copy: bool = False


Block: TypeAlias = TableBlock | Items | Paragraph


@dataclass(frozen=True)
class PagePart:
    """A section: id to link to, title and blocks."""

    id: str
    title: str
    blocks: tuple[Block, ...]


def words(cell: Cell) -> str:
    """Return the text of a cell."""
    return cell.text if isinstance(cell, SortableCell) else cell


# Markdown. Text from runs and files is escaped: a kernel may be called `<img ...>` or `a|b`.


_SPECIAL = re.compile(r"[\\`*\[\]|~]")
# Between letters or digits an underscore is literal; elsewhere it may start emphasis.
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# Text that becomes a link or a mention without markup. Backslashes are removed before links are
# looked for, so an HTML comment splits the text instead.
_LINKED = re.compile(r"(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=@)(?=\w)", re.IGNORECASE)
_COMMENT = "<!-- -->"
# A heading, or an item of a list.
_START = re.compile(r"(#{1,6}(?=\s|$)|[-+](?=\s)|\d+(?=[.)](\s|$)))")


def markdown(title: str, parts: Sequence[PagePart]) -> str:
    """Render parts as one Markdown text."""
    lines = [f"## {escaped(title)}"]
    for part in parts:
        lines += ["", f"### {escaped(part.title)}"]
        for block in part.blocks:
            lines += ["", *_block(block)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return text on one line with all markup escaped."""
    flat = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = _EMPHASIS.sub(r"\\_", _SPECIAL.sub(r"\\\g<0>", flat)).replace("!\\[", "\\!\\[")
    flat = _LINKED.sub(_COMMENT, flat)
    start = _START.match(flat)
    if start is None:
        return flat
    at = start.end() if start[0].isdigit() else 0  # 1\. and not \1.
    return f"{flat[:at]}\\{flat[at:]}"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, TableBlock):
        yield from markdown_table(block.head, (map(words, row) for row in block.rows))
    elif isinstance(block, Items):
        for text in block.texts:
            yield f"- {escaped(text)}"
    elif block.is_to_copy:
        yield from ("```text", printable(block.text).replace("`", "'"), "```")
    else:
        yield escaped(block.text)


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [markdown_row(head), markdown_row(["---"] * len(head)), *map(markdown_row, rows)]
