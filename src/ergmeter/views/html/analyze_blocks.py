"""Blocks of `erg analyze` as HTML: tables that sort, sentences, figures on cards.

The trap: a table that sorts "9" after "10", or by a text with commas. A cell of a number has its
value beside what is shown, and the page's script goes by that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.views.analyze_blocks import Figure, Grid, Items, words
from ergmeter.views.html.charts import Table
from ergmeter.views.html.page import section, table, td, text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.views.analyze_blocks import Block, Cell, Part
    from ergmeter.views.analyze_figures import Headline


def part_section(part: Part, *before: str) -> str:
    """A part of the page; what only a page has stands before its blocks."""
    return section(part.id, part.title, *before, *map(_block, part.blocks))


def _block(block: Block) -> str:
    if isinstance(block, Grid):
        if block.is_sortable:
            return _sortable(block)
        rows = tuple(tuple(map(words, row)) for row in block.rows)
        return f'<div class="roomy">{table(Table(block.head, rows), caption=block.caption)}</div>'
    if isinstance(block, Items):
        return f"<ul>{''.join(f'<li>{text(one)}</li>' for one in block.texts)}</ul>"
    if block.is_to_copy:
        return f"<p>A sentence that says what is known and how:</p><pre>{text(block.text)}</pre>"
    return f"<p>{text(block.text)}</p>"


def _sortable(grid: Grid) -> str:
    head = "".join(
        f'<th scope="col"><button type="button">{text(one)}</button></th>' for one in grid.head
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in grid.rows)
    return (
        '<div class="scroll roomy" tabindex="0" role="region"'
        f' aria-label="{text(grid.caption)}">'
        f'<table class="sortable"><caption>{text(grid.caption)}; a head sorts</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Figure):
        return td(cell)
    value = "" if cell.value is None else f"{cell.value!r}"
    return f'<td class="number" data-value="{value}">{text(cell.text)}</td>'


def cards(found: Iterable[Headline]) -> str:
    """Figures with their interval and basis; below them those that are absent, with the reason."""
    every = list(found)
    by_reason: dict[str, list[str]] = {}
    for one in every:
        if not one.value:
            by_reason.setdefault(one.reason, []).append(one.title)
    absent = "".join(
        f'<p class="absent">Not shown: {text(", ".join(titles))}. Why: {text(why)}</p>'
        for why, titles in by_reason.items()
    )
    return f'<div class="cards">{"".join(_card(one) for one in every if one.value)}</div>{absent}'


def _card(one: Headline) -> str:
    edges = f'<div class="dim">{text(one.interval)}</div>' if one.interval else ""
    kind, why = "card", ""
    if one.impossible:
        kind, why = "card impossible", f'<div class="why">{text(one.impossible)}</div>'
    return (
        f'<article class="{kind}"><h3>{text(one.title)}</h3>'
        f'<div class="value">{text(one.value)}</div>{why}{edges}'
        f'<span class="badge {text(one.basis)}">{text(one.basis)}</span>'
        f"<details><summary>how: {text(one.title)}</summary><dl>"
        f"<dt>formula</dt><dd>{text(one.formula)}</dd>"
        f"<dt>of this job</dt><dd>{text(one.note)}</dd>"
        f"<dt>key</dt><dd><code>{text(one.key)}</code></dd></dl></details></article>"
    )
