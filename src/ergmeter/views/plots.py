"""A chart of a run as a file: SVG or PNG, without a browser.

The trap: a file that looks different from the page. It is made from the same spec, by the same
Vega, with the colours of a theme put in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable, PluginError, UsageError
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.views.charts.palette import config, painted
from ergmeter.views.charts.run_charts import IDS as FIGURES
from ergmeter.views.charts.run_charts import figure_charts
from ergmeter.views.charts.time_axis import NEAREST
from ergmeter.views.charts.time_charts import IDS as ON_TIME
from ergmeter.views.charts.time_charts import time_charts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from types import ModuleType

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Summary
    from ergmeter.views.charts.chart import Chart

KINDS = (*ON_TIME, *FIGURES)
FORMATS = ("svg", "png")
# 6.4 shows "undefined" for a word in the tooltip of the nearest point (vega-lite #9707).
_LITES = ("6.1", "5.21", "5.20")
_WIDTH = 720
_PIXELS = 2.0  # of a PNG, for each of the SVG's


def charts(evidence: Evidence, summary: Summary, kinds: Collection[str]) -> list[Chart]:
    """Charts of these kinds, drawn or with their reason, in the order of the page."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UsageError(f"no kind {unknown[0]!r} of plot; there are {', '.join(KINDS)}")
    found = time_charts(evidence, kinds)
    if not set(kinds).isdisjoint(FIGURES):
        figures = figure_charts(evidence, summary, explain(evidence))
        found += [one for one in figures if one.id in kinds]
    return found


def reasons(found: Iterable[Chart]) -> list[str]:
    """Which charts could not be drawn and why: those that share a reason in one line with it."""
    titles: dict[str, list[str]] = {}
    for one in found:
        if one.spec is None:
            titles.setdefault(one.reason, []).append(one.title)
    return [f"no plot of {', '.join(each)}: {why}" for why, each in titles.items()]


def plot(chart: Chart, run: str, *, form: str, theme: str = "light") -> bytes:
    """A chart as a file, under the name of its run. NotMeasurable where it can't be drawn."""
    if chart.spec is None:
        raise NotMeasurable(f"no plot of {chart.title}: {chart.reason}")
    spec = painted(_as_file(chart, run), theme)
    vega = converter()
    style = painted({**config(), "background": "var(--bg)"}, theme)
    if form == "svg":
        return str(vega.vegalite_to_svg(spec, vl_version=lite(), config=style)).encode()
    return bytes(vega.vegalite_to_png(spec, vl_version=lite(), scale=_PIXELS, config=style))


def _as_file(chart: Chart, run: str) -> dict[str, Any]:
    """With a width and a title of its own: a file stands alone."""
    assert chart.spec is not None
    title = {
        "text": f"{run}: {chart.title}",
        "anchor": "start",
        "color": "var(--ink)",
        "subtitle": chart.note.partition(";")[0],
        "subtitleColor": "var(--dim)",
        "limit": _WIDTH,
    }
    return {
        **_still(chart.spec, has_legend=len(chart.legend) > 1),
        "width": _WIDTH,
        "autosize": {"type": "pad"},
        "title": title,
        "padding": 12,
    }


def _still(spec: dict[str, Any], *, has_legend: bool) -> dict[str, Any]:
    """Without the readings that answer a pointer: nobody sees them in a file, and they are most of
    its bytes. Nothing zooms there either, so a point on the frame is whole."""
    layers = [one for one in spec["layer"] if not _answers_a_pointer(one)]
    return {**spec, "layer": [_unclipped(one, has_legend=has_legend) for one in layers]}


def _unclipped(layer: dict[str, Any], *, has_legend: bool) -> dict[str, Any]:
    """A layer whose marks may stand on the frame; without a legend where that had one entry."""
    encoding = dict(layer["encoding"])
    if "color" in encoding and not has_legend:
        encoding["color"] = {**encoding["color"], "legend": None}
    return {**layer, "mark": {**layer["mark"], "clip": False}, "encoding": encoding}


def _answers_a_pointer(layer: dict[str, Any]) -> bool:
    return any(one.get("name") == NEAREST for one in layer.get("params", ()))


def converter() -> ModuleType:
    """Vega, which comes with its Python package. PluginError where it is not installed."""
    try:
        import vl_convert  # noqa: PLC0415  30 MB that only who draws needs
    except ImportError as error:
        raise PluginError(
            "charts need vl-convert-python, which is not installed: pip install 'ergmeter[html]'"
        ) from error
    return vl_convert


def lite() -> str | None:
    """The Vega-Lite to draw with, for page and file; None for the package's own choice."""
    there = converter().get_vegalite_versions()
    return next((one for one in _LITES if one in there), None)
