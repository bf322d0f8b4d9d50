"""What a page and a Markdown text of `erg analyze` are made of: parts, each of a few blocks.

The trap: two texts of the same figures that drift apart. Each part is made once; the page and the
Markdown differ in how a block looks, and in what only a page can have, which is charts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class SortableCell:
    """A cell that sorts by its value; None sorts last."""

    text: str
    value: float | None


Cell: TypeAlias = str | SortableCell


@dataclass(frozen=True)
class TableBlock:
    """Rows under a head. A sortable one is put in another order by its heads."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_sortable: bool = False


@dataclass(frozen=True)
class Items:
    """Sentences, one below the other."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; or lines to be copied as they are."""

    text: str
    is_to_copy: bool = False


Block: TypeAlias = TableBlock | Items | Paragraph


@dataclass(frozen=True)
class PagePart:
    """A section: an id to link to, a title, and what is in it."""

    id: str
    title: str
    blocks: tuple[Block, ...]


def words(cell: Cell) -> str:
    """What stands in a cell."""
    return cell.text if isinstance(cell, SortableCell) else cell
