"""`erg explain` to be looked at: what its `--html` writes, and what a report has of it.

The trap: advice without its evidence. The waterfall comes first, then what to know and to try;
what each block rests on and what could not be told apart stand below, on the same page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.version import __version__
from ergmeter.views.charts.chart import chart_of
from ergmeter.views.charts.waterfall_chart import waterfall_chart
from ergmeter.views.html.analyze_page import part_section
from ergmeter.views.html.page import absent, figure, header, listed, page, section, text
from ergmeter.views.run.explain import CHANGES, WATERFALL, change_lines, explain_parts

if TYPE_CHECKING:
    from ergmeter.metrics.explain.waterfall import Explanation
    from ergmeter.runlog.reader import Run
    from ergmeter.views.charts.chart import Chart

SECTION = "waterfall-section"
_TITLE = "Where the rest of the peak went"
_NO_TIME_S = (0.0, 1.0)


def waterfall_section(run: Run, found: Explanation, chart: Chart) -> str:
    """Of a report: the chart, what to know about it, and what to try."""
    shown = figure(chart) if chart.spec is not None else absent([chart], run)
    tries = listed(change_lines(found))
    if tries:
        tries = f"<h3>{text(CHANGES.capitalize())}</h3>{tries}"
    return section(SECTION, _TITLE, shown, listed(found.remarks), tries)


def explain_page(run: Run, found: Explanation) -> str:
    """The whole page."""
    chart = chart_of("waterfall", WATERFALL, "%", lambda: waterfall_chart(found))
    rest = list(explain_parts(found))[1:]  # the first is the waterfall as a table
    links = {SECTION: "the waterfall", **{part.id: part.title.lower() for part in rest}}
    return page(
        title=f"{run.name}: where the rest of the peak went",
        header=header(run.name, f"{found.window} · erg explain of ergmeter {__version__}", links),
        sections=[section(SECTION, _TITLE, figure(chart)), *map(part_section, rest)],
        charts=[chart],
        whole_s=_NO_TIME_S,
        counted_s=_NO_TIME_S,
    )
