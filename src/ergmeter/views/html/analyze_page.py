"""`erg analyze` to be looked at: what `--html` writes, of one analysis or of several outputs.

The trap: a page that says more than the console, or less. Both are made from one document; the page
adds what only a page can have: the factors and the pace drawn, and tables that sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.version import __version__
from ergmeter.views import analyze_compare_parts
from ergmeter.views.analyze_blocks import Part
from ergmeter.views.analyze_compare_parts import comparison_parts
from ergmeter.views.analyze_figures import headlines, title
from ergmeter.views.analyze_parts import analysis_parts
from ergmeter.views.html.analyze_blocks import cards, part_section
from ergmeter.views.html.charts import drawn
from ergmeter.views.html.pace_chart import pace_chart
from ergmeter.views.html.page import figure, header, page, section
from ergmeter.views.html.score_chart import score_chart
from ergmeter.views.html.spread_chart import spread_charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ergmeter.neuron.compare import Comparison
    from ergmeter.neuron.parts import Analysis
    from ergmeter.views.html.charts import Chart

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
    kept = Part(figures.id, figures.title, figures.blocks[1:])  # the cards say the table
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
        charts["log"] = drawn(id_, name, "", lambda: pace_chart(found.parts))
    return charts


def comparison_page(found: Comparison) -> str:
    """The page of several outputs."""
    charts, parts = spread_charts(found), comparison_parts(found)
    pictures = "".join(map(figure, charts))
    sections = [part_section(parts[0]), section("spreads", "Side by side", _pair(pictures))]
    sections += [part_section(part) for part in parts[1:]]
    links = {parts[0].id: parts[0].title, "spreads": "Side by side"}
    links |= {part.id: part.title for part in parts[1:]}
    name = analyze_compare_parts.title(found)
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
