"""Renders a document as a self-contained HTML page."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ergmeter.version import __version__
from ergmeter.views.document import (
    VERDICTS,
    AxisChoice,
    ChartGrid,
    ChartPart,
    HeadlinePart,
    HeatMap,
    Items,
    Note,
    Section,
    Table,
    title_case,
)
from ergmeter.views.html.page import bullet_list, figure, header, page, rendered, section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.views.document import Document, Part


_LEVEL = 2  # of the headings of sections; a title inside one may begin with a name


def html(document: Document) -> str:
    """Return the page. One without charts holds no chart library."""
    links = {part.id: part.title for part in document.parts if isinstance(part, Section)}
    about = " · ".join(filter(None, (document.about, f"ergmeter {__version__}")))
    return page(
        title=document.title,
        header=header(document.title, about, links),
        sections=[_parts(document.body)],
        charts=document.charts,
    )


def _parts(parts: Sequence[Part], level: int = _LEVEL) -> str:
    """Return the HTML of parts; notes that follow one another are one list.

    `level`: of the headings of sections.
    """
    lines: list[str] = []
    for is_note, group in groupby(parts, lambda part: isinstance(part, Note)):
        members = list(group)
        lines += (
            [rendered("notes", members, VERDICTS)]
            if is_note
            else [_part(part, level) for part in members]
        )
    return "\n".join(filter(None, lines))


def _part(part: Part, level: int) -> str:
    if isinstance(part, Section):
        inner = _parts(part.parts, level + 1)
        title = part.title if level > _LEVEL else title_case(part.title)
        return section(part.id, title, inner, is_folded=part.is_folded, level=level)
    if isinstance(part, ChartPart):
        return figure(part.chart)
    if isinstance(part, ChartGrid):
        return rendered("chart_grid", part.charts)
    if isinstance(part, AxisChoice):
        return rendered("axis_choice", part)
    if isinstance(part, Items):
        return bullet_list(part.texts)
    if isinstance(part, Table):
        return rendered("table_part", part.without("bar"))
    if isinstance(part, HeatMap):
        return rendered("heat_map", part)
    if isinstance(part, HeadlinePart):
        return rendered("headline", part)
    return rendered("paragraph", part)
