"""A run under the roof of its device: work per byte to the right, work per second upwards.

The trap: a point without its roof. Both are of one type and of one device, and named in the note.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.metrics.roofline import roofline
from ergmeter.units import scaled, significant
from ergmeter.views.charts.chart import Chart, Table, framed

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.roofline import Roofline

_TERA = 1e12
_REACH = 100.0  # times the ridge, to either side
_ROOM = 10.0  # times the run's own work per byte, for its name to the right of it
_ABOVE = 2.5  # times the highest roof, for the name on it


_NAME = {"type": "text", "color": "var(--ink)", "fontSize": 11, "aria": False}


def roofline_chart(evidence: Evidence) -> Chart:
    """Where the run stands. Raises NotMeasurable with what is missing."""
    found = roofline(evidence)
    said = f"{significant(found.flops_per_byte)} FLOP/B, {scaled(found.flops_per_s, 'FLOP/s')}"
    described = f"roofline: this run at {said}, under the {found.bound_by} roof"
    spec = framed(described, 230, _layers(found))
    return Chart("roofline", "roofline", "TFLOP/s", spec, _table(found), found.note)


def _layers(found: Roofline) -> list[dict[str, Any]]:
    left = min(found.ridge_flops_per_byte / _REACH, found.flops_per_byte / 2)
    right = max(found.ridge_flops_per_byte * _REACH, found.flops_per_byte * _ROOM)
    peak = found.peak.flops_per_s / _TERA
    roof = [
        {"x": left, "y": left * found.bandwidth_bytes_per_s / _TERA},
        {"x": found.ridge_flops_per_byte, "y": peak},
        {"x": right, "y": peak},
    ]
    reached = found.flops_per_s / _TERA
    run = [{"x": found.flops_per_byte, "y": reached, "s": "this run"}]
    lowest = min(roof[0]["y"], reached) / 2
    axes = _axes((left, right), (lowest, max(peak, reached) * _ABOVE))
    point = {"type": "point", "filled": True, "size": 140, "color": "var(--c2)", "aria": False}
    tooltip = [
        {"field": "s", "title": "point"},
        {"field": "x", "title": "FLOP/B", "format": ".4~g"},
        {"field": "y", "title": "TFLOP/s", "format": ".4~g"},
    ]
    return [
        {
            "data": {"name": "roof", "values": roof},
            "mark": {"type": "line", "color": "var(--c1)", "strokeWidth": 2, "aria": False},
            "encoding": axes,
        },
        {
            "data": {"name": "points", "values": run},
            "mark": point,
            "encoding": {**axes, "tooltip": tooltip},
        },
        {
            "data": {"name": "points"},
            # Below and to the right there is no roof, wherever the run stands under it.
            "mark": {**_NAME, "align": "left", "baseline": "top", "dx": 8, "dy": 4},
            "encoding": {**axes, "text": {"field": "s"}},
        },
        _roof_name(axes, math.sqrt(left * found.ridge_flops_per_byte), found),
        {
            "data": {"name": "peak", "values": [{"x": right, "y": peak}]},
            "mark": {**_NAME, "align": "right", "baseline": "bottom", "dy": -5},
            "encoding": {**axes, "text": {"value": scaled(found.peak.flops_per_s, "FLOP/s")}},
        },
    ]


def _roof_name(axes: dict[str, Any], at: float, found: Roofline) -> dict[str, Any]:
    """The bandwidth, to the left of the slope: over it there is nothing else."""
    y = at * found.bandwidth_bytes_per_s / _TERA
    return {
        "data": {"name": "bandwidth", "values": [{"x": at, "y": y}]},
        "mark": {**_NAME, "align": "right", "baseline": "bottom", "dx": -6, "dy": -3},
        "encoding": {**axes, "text": {"value": scaled(found.bandwidth_bytes_per_s, "B/s")}},
    }


def _axes(across: tuple[float, float], up: tuple[float, float]) -> dict[str, Any]:
    return {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": "FLOP per byte of device memory",
            "scale": {"type": "log", "nice": False, "domain": list(across)},
            "axis": {"format": "~s", "tickCount": 5, "grid": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": "TFLOP/s",
            "scale": {"type": "log", "nice": False, "domain": list(up)},
            "axis": {"format": ",.6~r", "tickCount": 4, "grid": False},
        },
    }


def _table(found: Roofline) -> Table:
    return Table(
        ("figure", "value"),
        (
            ("work per byte", f"{significant(found.flops_per_byte)} FLOP/B"),
            ("reached", scaled(found.flops_per_s, "FLOP/s")),
            ("roof there", f"{scaled(found.roof_flops_per_s, 'FLOP/s')} ({found.bound_by})"),
            ("share of the roof", f"{significant(found.roof_frac * 100, 3)} %"),
            ("ridge", f"{significant(found.ridge_flops_per_byte)} FLOP/B"),
        ),
    )
