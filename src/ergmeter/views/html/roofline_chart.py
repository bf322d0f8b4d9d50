"""A run under the roof of its device: work per byte to the right, work per second upwards.

The trap: a point without its roof. Both are of one type and of one device, and named in the note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.metrics.roofline import roofline
from ergmeter.units import scaled, significant
from ergmeter.views.html.charts import Chart, Table, framed

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.metrics.roofline import Roofline

_TERA = 1e12
_REACH = 100.0  # times the ridge, to either side


def roofline_chart(evidence: Evidence) -> Chart:
    """Where the run stands. Raises NotMeasurable with what is missing."""
    found = roofline(evidence)
    said = f"{significant(found.flops_per_byte)} FLOP/B, {scaled(found.flops_per_s, 'FLOP/s')}"
    described = f"roofline: this run at {said}, under the {found.bound_by} roof"
    spec = framed(described, 230, _layers(found))
    return Chart("roofline", "roofline", "FLOP/s", spec, _table(found), found.note)


def _layers(found: Roofline) -> list[dict[str, Any]]:
    left = min(found.ridge_flops_per_byte / _REACH, found.flops_per_byte / 2)
    right = max(found.ridge_flops_per_byte * _REACH, found.flops_per_byte * 2)
    peak = found.peak.flops_per_s / _TERA
    roof = [
        {"x": left, "y": left * found.bandwidth_bytes_per_s / _TERA},
        {"x": found.ridge_flops_per_byte, "y": peak},
        {"x": right, "y": peak},
    ]
    run = [{"x": found.flops_per_byte, "y": found.flops_per_s / _TERA, "s": "this run"}]
    axes = _axes(left, right)
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
            "mark": {"type": "text", "dy": 18, "color": "var(--ink)", "aria": False},
            "encoding": {**axes, "text": {"field": "s"}},
        },
    ]


def _axes(left: float, right: float) -> dict[str, Any]:
    return {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": "FLOP per byte of device memory",
            "scale": {"type": "log", "nice": False, "domain": [left, right]},
            "axis": {"format": "~s", "tickCount": 5, "grid": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": "TFLOP/s",
            "scale": {"type": "log", "nice": True},
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
