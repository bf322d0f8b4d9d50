"""Shared parts of charts over time: axis, zoom, marks, and the shade over uncounted time.

The plain mouse wheel scrolls the page; Shift and the wheel zooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.views.charts.chart import Scale, filled, layer, quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Mark

# All charts over time have the same left margin, so that their time axes align.
LEFT = {"minExtent": 64, "maxExtent": 64}
NO_TITLE = " "  # takes the room of one
_TICKS = 5
_DOTS = 60  # readings of a line, up to which each is a dot
_MARKS = 200
NEAREST = "near"  # the selection that follows the pointer
_FIRST = (
    *("alert", "alert_over", "alert_failed", "alarm_failed"),
    *("stop_asked", "stop_failed"),
)
# Marks that are not shown.
PLAIN_MARKS = frozenset(
    {"opened", "closed", "ended", "ticks_missed", "alert_unjudged"}
    | {"device_used", "device_unused", "device_unknown"}
)


def time_axis(evidence: Evidence) -> dict[str, Any]:
    """Return the time axis, from the run's start to its end."""
    whole_s = evidence.watched.duration_s
    return quantity(
        "t",
        "s since the run began",
        scale={"domain": [0, round(whole_s, 6)], "nice": False},
        axis={"grid": False, "tickCount": {"expr": "max(3, floor(width / 70))"}},
    )


def line_layers(
    rows: list[dict[str, Any]],
    mark: dict[str, Any],
    axes: dict[str, Any],
    tooltip: list[dict[str, Any]],
    *,
    more_encoding: Mapping[str, Any] | None = None,
    transforms: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return lines through readings, and the reading nearest to the pointer with its tooltip.

    `more_encoding` is of the lines alone, `transforms` are of the nearest reading.
    """
    line = {**mark, "type": "line", "clip": True}
    select = {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout"}
    nearest = {
        **axes,
        "opacity": {"condition": {"param": NEAREST, "empty": False, "value": 1}, "value": 0},
        "tooltip": tooltip,
    }
    return [
        layer("points", rows, line, {**axes, **(more_encoding or {})}, params=[zoom()]),
        layer(
            "points",
            None,
            {"type": "point", "clip": True, "filled": True, "size": 55},
            nearest,
            transform=[{"filter": "datum.v !== null"}, *transforms],
            params=[{"name": NEAREST, "select": select}],
        ),
    ]


def dots(readings: int, size: int) -> dict[str, Any] | bool:
    """Return the dots of a line of few readings, False for many."""
    return {"size": size, "filled": True, "aria": False} if readings <= _DOTS else False


def value_words(scale: Scale) -> dict[str, Any]:
    """Return the value's part of a tooltip."""
    is_share = scale.unit == "frac"
    title = "%" if is_share else scale.unit or "value"
    return quantity("v", title, format=".1%" if is_share else ".5~g")


def value_axis(rows: list[dict[str, Any]], scale: Scale, *, has_zero: bool) -> dict[str, Any]:
    """Return the axis of the values."""
    is_share = scale.unit == "frac"
    return quantity(
        "v",
        "%" if is_share else scale.unit or NO_TITLE,
        scale=_value_scale(rows, has_zero=has_zero, is_share=is_share),
        axis={"tickCount": _TICKS, "format": ".0%" if is_share else ",.6~r", **LEFT},
    )


def _value_scale(rows: list[dict[str, Any]], *, has_zero: bool, is_share: bool) -> dict[str, Any]:
    """Return the scale: from 0 if `has_zero`, a share up to 1. All-zero values still get an axis.

    A share above 1 is wrong, and is shown.
    """
    most = max((row["v"] for row in rows if row["v"] is not None), default=0.0)
    if is_share:
        return {"domain": [0, max(1.0, most)]}
    # The first and the last tick are the ends of the axis, and no line runs beyond them.
    return {"domain": [0, 1]} if has_zero and not most else {"zero": has_zero, "nice": _TICKS}


def zoom() -> dict[str, Any]:
    """Return the shared zoom: Shift and the wheel, or dragging."""
    return {
        "name": "zoom",
        "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
        "bind": "scales",
    }


def ground(evidence: Evidence) -> list[dict[str, Any]]:
    """Return the background: shade over uncounted time, and marks."""
    whole_s = evidence.watched.duration_s
    x = time_axis(evidence)
    try:
        span = evidence.span
        edges = (timeline.seconds(evidence, span.start_ns), timeline.seconds(evidence, span.end_ns))
    except NotMeasurable:  # all of it is warm-up
        edges = (whole_s, whole_s)
    shades = [{"t": 0.0, "e": edges[0]}, {"t": edges[1], "e": whole_s}]
    shades = [shade for shade in shades if shade["e"] > shade["t"]]
    shade = {"type": "rect", "clip": True, "color": "var(--shade)"}
    rule = {"type": "rule", "clip": True, "color": "var(--mark)", "strokeDash": [3, 3]}
    layers = [
        layer("uncounted", shades, shade, {"x": x, "x2": {"field": "e"}}),
        layer("marks", marks_of(evidence), rule, {"x": x}),
    ]
    return filled(layers)


def marks_of(evidence: Evidence) -> list[dict[str, Any]]:
    """Return the marks to show, alerts preferred, in order of time."""
    marks = _worth_showing(evidence)
    first = sorted(marks, key=lambda mark: mark.name not in _FIRST)[:_MARKS]
    return [
        {
            "t": round(timeline.seconds(evidence, mark.t_ns), 6),
            "name": mark.name,
            "detail": mark.detail[:200],
        }
        for mark in sorted(first, key=lambda mark: mark.t_ns)
    ]


def marks_left_out(evidence: Evidence) -> str:
    """Return a note on the number of marks not shown, empty if none."""
    more = len(_worth_showing(evidence)) - _MARKS
    return f"{more} more marks are not shown" if more > 0 else ""


def _worth_showing(evidence: Evidence) -> list[Mark]:
    return [mark for mark in evidence.run.marks if mark.name not in PLAIN_MARKS]
