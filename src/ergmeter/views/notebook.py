"""What `print` and a notebook show of a run, a summary and a comparison.

The cards or tables of a terminal, as text or as escaped HTML with inline styles; of a run also a
chart, as an image inside the HTML. There are no scripts, no style sheets and no requests.
"""

from __future__ import annotations

from base64 import b64encode
from html import escape
from io import StringIO

from rich.console import Console

from ergmeter.compare.comparison import Comparison
from ergmeter.errors import NotMeasurable, PluginError
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.summarize import summaries
from ergmeter.records import Displayed, Summary
from ergmeter.runlog.reader import Run
from ergmeter.views.charts.plots import charts, plot
from ergmeter.views.compare import comparison_document
from ergmeter.views.document import Document, Paragraph
from ergmeter.views.render.terminal import show
from ergmeter.views.run.card import short_card

_PRE = '<pre style="line-height:normal;font-family:Menlo,Consolas,monospace">{code}</pre>'
_CHARTS = ("waterfall", "time_spent")  # the first that can be drawn


def text(subject: Displayed) -> str:
    """Return the text of a terminal, without colours."""
    return _console(subject, _cards(subject)).export_text().rstrip("\n")


def html(subject: Displayed) -> str:
    """Return the text as HTML, and below the cards of a run a chart of each."""
    cards = _cards(subject)
    page = _console(subject, cards).export_html(code_format=_PRE, inline_styles=True)
    return "\n".join([page, *(_chart(*card) for card in cards if isinstance(subject, Run))])


def _cards(subject: Displayed) -> list[tuple[Evidence, Summary]]:
    if isinstance(subject, Run):
        return summaries(subject)
    if isinstance(subject, Summary) and subject.evidence is not None:
        return [(subject.evidence(), subject)]
    return []  # of a summary that was made by hand


def _console(subject: Displayed, cards: list[tuple[Evidence, Summary]]) -> Console:
    """Return a console on which the subject was printed."""
    console = Console(file=StringIO(), record=True, width=79, force_jupyter=False)
    parts = tuple(short_card(*card) for card in cards) or (Paragraph(repr(subject)),)
    page = comparison_document(subject) if isinstance(subject, Comparison) else Document("", parts)
    show(page, console)
    return console


def _chart(evidence: Evidence, summary: Summary) -> str:
    """Return the chart as an image, or the reason why there is none."""
    candidates = charts(evidence, summary, _CHARTS)
    chart = next((chart for chart in candidates if chart.spec), candidates[0])
    try:
        svg = plot(chart, summary.run, form="svg")
    except (PluginError, NotMeasurable) as error:
        return f"<p>{escape(str(error))}</p>"
    source = f"data:image/svg+xml;base64,{b64encode(svg).decode()}"
    title = escape(f"{summary.run}: {chart.title}")
    return f'<img src="{source}" alt="{title}" style="max-width:100%">'
