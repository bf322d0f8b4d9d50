"""How long steps took: bars of how many, lines where the median and the 95th percentile are.

The trap: the slowest steps are what one looks for, and the fewest. Those beyond the last bar are in
the table by their number, and the note says how many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.metrics.time_breakdown import step_time_distribution
from ergmeter.units import duration, significant
from ergmeter.views.charts.chart import Chart, Scale, Table, framed, scale_for

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.time_breakdown import StepTimeDistribution

_LINES = {"median": "c2", "95th percentile": "c4"}


def step_time_chart(evidence: Evidence) -> Chart:
    """The distribution of the counted steps. Raises NotMeasurable where they are too few."""
    found = step_time_distribution(evidence)
    scale = scale_for("s", float(found.edges_s[-1]))
    said = f"median {duration(found.median_s)}, 95th percentile {duration(found.p95_s)}"
    if found.beyond:
        longest = duration(found.outliers[0].took_s)
        said += f", {found.beyond} longer than the last bar, up to {longest}"
    note = f"{said}; {found.note}"
    if found.stalled > len(found.outliers):
        note += f"; the longest {len(found.outliers)} of {found.stalled} outliers are in the table"
    lines = _lines(found, scale)
    layers = [_bars(found, scale), lines]
    return Chart(
        "step_times",
        "step times",
        scale.unit,
        framed(f"distribution of step times: {said}", 190, layers),
        _outliers(found),
        note,
        legend=tuple((one["s"], _LINES[one["s"]]) for one in lines["data"]["values"]),
    )


def _bars(found: StepTimeDistribution, scale: Scale) -> dict[str, Any]:
    edges = [float(f"{edge / scale.factor:.6g}") for edge in found.edges_s.tolist()]
    rows = [
        {"t": low, "e": high, "n": count}
        for low, high, count in zip(edges[:-1], edges[1:], found.counts.tolist(), strict=True)
    ]
    x = {
        "field": "t",
        "type": "quantitative",
        "bin": "binned",
        "title": f"step time, {scale.unit}",
        "scale": {"zero": False, "nice": False, "domain": [edges[0], edges[-1]]},
        "axis": {
            "grid": False,
            "format": ",.6~r",
            "tickCount": {"expr": "max(3, floor(width / 70))"},
        },
    }
    y = {
        "field": "n",
        "type": "quantitative",
        "title": "steps",
        "axis": {"tickCount": 5, "tickMinStep": 1},
    }
    tooltip = [
        {"field": "t", "title": f"from, {scale.unit}", "format": ".5~g"},
        {"field": "e", "title": f"to, {scale.unit}", "format": ".5~g"},
        {"field": "n", "title": "steps"},
    ]
    return {
        "data": {"name": "points", "values": rows},
        "mark": {"type": "bar", "aria": False, "color": "var(--c1)", "binSpacing": 1},
        "encoding": {"x": x, "x2": {"field": "e"}, "y": y, "tooltip": tooltip},
    }


def _lines(found: StepTimeDistribution, scale: Scale) -> dict[str, Any]:
    at_s = dict(zip(_LINES, (found.median_s, found.p95_s), strict=True))
    rows = [
        {"v": float(f"{one_s / scale.factor:.6g}"), "s": name}
        for name, one_s in at_s.items()
        if one_s <= float(found.edges_s[-1])
    ]
    colours = [f"var(--{colour})" for colour in _LINES.values()]
    colour = {
        "field": "s",
        "type": "nominal",
        "scale": {"domain": list(_LINES), "range": colours},
    }
    return {
        "data": {"name": "lines", "values": rows},
        "mark": {"type": "rule", "strokeWidth": 2, "aria": False},
        "encoding": {"x": {"field": "v", "type": "quantitative"}, "color": colour},
    }


def _outliers(found: StepTimeDistribution) -> Table:
    rows = tuple(
        (
            "-" if one.index is None else str(one.index),
            duration(one.at_s),
            duration(one.took_s),
            significant(one.times, 3),
        )
        for one in found.outliers
    )
    none = (("no step took twice the median", "", "", ""),)
    return Table(("step", "at", "took", "times the median"), rows or none)
