"""`erg analyze` to be looked at: what `--html` writes, of one analysis or of several outputs.

The trap: a page that says more than the console, or less. Both are made from one document; the page
adds what only a page can have: the factors and the pace drawn, and tables that sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.version import __version__
from ergmeter.views.analyze import compare
from ergmeter.views.analyze.blocks import Items, PagePart, SortableCell, TableBlock, words
from ergmeter.views.analyze.compare import comparison_parts
from ergmeter.views.analyze.headline import headlines, title
from ergmeter.views.analyze.parts import analysis_parts
from ergmeter.views.charts.analyze_charts import pace_chart, score_chart, spread_charts
from ergmeter.views.charts.chart import Table, chart_of
from ergmeter.views.html.page import figure, header, page, section, table, td, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ergmeter.neuron.analysis_types import Analysis
    from ergmeter.neuron.compare import OutputComparison
    from ergmeter.views.analyze.blocks import Block, Cell
    from ergmeter.views.analyze.headline import Headline
    from ergmeter.views.charts.chart import Chart

# -- analyze blocks --------------------------------------------------------------------------------
# Blocks of `erg analyze` as HTML: tables that sort, sentences, figures on cards.
#
# The trap: a table that sorts "9" after "10", or by a text with commas. A cell of a number has its
# value beside what is shown, and the page's script goes by that.


def part_section(part: PagePart, *before: str) -> str:
    """A part of the page; what only a page has stands before its blocks."""
    return section(part.id, part.title, *before, *map(_block, part.blocks))


def _block(block: Block) -> str:
    if isinstance(block, TableBlock):
        if block.is_sortable:
            return _sortable(block)
        rows = tuple(tuple(map(words, row)) for row in block.rows)
        return f'<div class="roomy">{table(Table(block.head, rows), caption=block.caption)}</div>'
    if isinstance(block, Items):
        return f"<ul>{''.join(f'<li>{text(one)}</li>' for one in block.texts)}</ul>"
    if block.is_to_copy:
        return f"<p>A sentence that says what is known and how:</p><pre>{text(block.text)}</pre>"
    return f"<p>{text(block.text)}</p>"


def _sortable(grid: TableBlock) -> str:
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
    if not isinstance(cell, SortableCell):
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


# -- analyze page ----------------------------------------------------------------------------------


_MOST_GRAPHS = 200
_NO_TIME_S = (0.0, 1.0)  # no chart of these pages is over time


def analysis_page(found: Analysis) -> str:
    """The page of one job."""
    document = found.document
    parts = {
        part.id: part for part in analysis_parts(document, found.files, most_graphs=_MOST_GRAPHS)
    }
    charts = _charts(found)
    figures = parts.pop("figures")
    kept = PagePart(figures.id, figures.title, figures.blocks[1:])  # the cards say the table
    sections = [part_section(kept, cards(headlines(document)))]
    for part in parts.values():
        chart = charts.get(part.id)
        sections.append(part_section(part, *([figure(chart)] if chart is not None else ())))
    links = {figures.id: figures.title, **{part.id: part.title for part in parts.values()}}
    return _page(title(document), _of(document), links, sections, list(charts.values()))


def _charts(found: Analysis) -> dict[str, Chart]:
    """By the part they belong to, where there is something to draw; or with the reason."""
    charts = {}
    if "training_score_breakdown" in found.document:
        charts["score"] = score_chart(found.document)
    if "log_metrics" in found.document:
        id_, name = "pace", "throughput by step"
        charts["log"] = chart_of(id_, name, "", lambda: pace_chart(found.parts))
    return charts


def comparison_page(found: OutputComparison) -> str:
    """The page of several outputs."""
    charts, parts = spread_charts(found), comparison_parts(found)
    pictures = "".join(map(figure, charts))
    sections = [part_section(parts[0]), section("spreads", "Side by side", _pair(pictures))]
    sections += [part_section(part) for part in parts[1:]]
    links = {parts[0].id: parts[0].title, "spreads": "Side by side"}
    links |= {part.id: part.title for part in parts[1:]}
    name = compare.title(found)
    return _page(name, "earlier outputs side by side", links, sections, charts)


def _pair(pictures: str) -> str:
    if not pictures:
        return '<p class="absent">- no metric is in any of the outputs</p>'
    return f'<div class="pair">{pictures}</div>'


def _of(document: dict[str, object]) -> str:
    batch, length = document["batch_size"], document["sequence_length"]
    return f"{batch} sequences of {length} tokens a step"


def _page(
    name: str, below: str, links: dict[str, str], sections: Sequence[str], charts: Iterable[Chart]
) -> str:
    about = f"{below} · erg analyze of ergmeter {__version__}"
    return page(
        title=name,
        header=header(name, about, {id_: word.lower() for id_, word in links.items()}),
        sections=sections,
        charts=charts,
        whole_s=_NO_TIME_S,
        counted_s=_NO_TIME_S,
    )
