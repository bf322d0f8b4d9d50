"""Charts of a run as SVG or PNG files, without a browser.

Files use the specification of the page, with a theme's colours filled in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.records import Summary
from ergmeter.registry import library
from ergmeter.units import grouped
from ergmeter.views.charts.chart import Chart, config, with_colours
from ergmeter.views.charts.run_charts import IDS as FIGURES
from ergmeter.views.charts.run_charts import figure_charts
from ergmeter.views.charts.time_charts import IDS as ON_TIME
from ergmeter.views.charts.time_charts import time_charts
from ergmeter.views.charts.vega import NEAREST

KINDS = (*ON_TIME, *FIGURES)
# 6.4 shows "undefined" for a word in the tooltip of the nearest point (vega-lite #9707).
_LITES = ("6.1", "5.21", "5.20")
_WIDTH = 720
_PIXELS = 2.0  # of a PNG, for each of the SVG's


def charts(evidence: Evidence, summary: Summary, kinds: Collection[str]) -> list[Chart]:
    """Return charts of these kinds, drawn or with their reason, in page order."""
    charts_ = time_charts(evidence, kinds)
    if not set(kinds).isdisjoint(FIGURES):
        figures = figure_charts(evidence, summary, explain(evidence))
        charts_ += [figure for figure in figures if figure.id in kinds]
    return charts_


def reasons(charts: Iterable[Chart]) -> list[str]:
    """Return the reasons of charts that are not drawn, grouped."""
    titles = grouped((chart.reason, chart.title) for chart in charts if chart.spec is None)
    return [f"no plot of {', '.join(each)}: {why}" for why, each in titles.items()]


def plot(chart: Chart, run: str, *, form: str, theme: str = "light") -> bytes:
    """Return a chart as an SVG or PNG, titled with its run. Raises NotMeasurable if not drawn."""
    if chart.spec is None:
        raise NotMeasurable(f"no plot of {chart.title}: {chart.reason}")
    spec = with_colours(_as_file(chart, run), theme)
    vega = converter()
    style = with_colours({**config(), "background": "var(--bg)"}, theme)
    options = {"vl_version": vega_lite_version(), "config": style}
    if form == "svg":
        return str(vega.vegalite_to_svg(spec, **options)).encode()
    return bytes(vega.vegalite_to_png(spec, **options, scale=_PIXELS))


def _as_file(chart: Chart, run: str) -> dict[str, Any]:
    """Return a specification with its own width and title."""
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
    """Return the specification without pointer layers, which are most of its bytes.

    Files do not zoom, so marks may overlap the frame. A legend of one entry is left out.
    """
    layers = []
    for layer in spec["layer"]:
        if any(param.get("name") == NEAREST for param in layer.get("params", ())):
            continue
        encoding = dict(layer["encoding"])
        if "color" in encoding and not has_legend:
            encoding["color"] = {**encoding["color"], "legend": None}
        layers.append({**layer, "mark": {**layer["mark"], "clip": False}, "encoding": encoding})
    return {**spec, "layer": layers}


def converter() -> Any:  # noqa: ANN401  a module
    """Return the vl-convert module, 30 MB. Raises PluginError if it is not installed."""
    return library("vl_convert", "a chart", "'ergmeter[html]'")


def vega_lite_version() -> str | None:
    """Return the Vega-Lite version to use, or None for vl-convert's default."""
    there = converter().get_vegalite_versions()
    return next((version for version in _LITES if version in there), None)
