"""Parts of the pages of `erg analyze`: sections of blocks, and their Markdown.

Other subjects return a `Document` (`views.document`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ergmeter.views.document import Document, Items, Paragraph, Section, SortableCell, Table
from ergmeter.views.render import markdown as rendering
from ergmeter.views.render.markdown import escaped, markdown_table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Items", "Paragraph", "SortableCell", "escaped", "markdown_table"]

Cell: TypeAlias = str | SortableCell


@dataclass(frozen=True)
class TableBlock:
    """A table. Readers can sort it by a column if `is_sortable`."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_sortable: bool = False


Block: TypeAlias = TableBlock | Items | Paragraph


@dataclass(frozen=True)
class PagePart:
    """A section: id to link to, title and blocks."""

    id: str
    title: str
    blocks: tuple[Block, ...]


def words(cell: Cell) -> str:
    """Return the text of a cell."""
    return str(cell)


def markdown(title: str, parts: Sequence[PagePart]) -> str:
    """Render parts as one Markdown text."""
    sections = (
        Section(
            part.id,
            part.title,
            tuple(
                Table(block.head, block.rows) if isinstance(block, TableBlock) else block
                for block in part.blocks
            ),
        )
        for part in parts
    )
    return rendering.markdown(Document(title, tuple(sections)))
