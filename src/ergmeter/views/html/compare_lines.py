"""Lines of several runs in one chart, over steps, tokens or time.

The trap: the name of a run in each of its points. A name may be as long as a path, and there are
thousands of points; they hold a number, and the name stands once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.metrics.progress import AXES
from ergmeter.views.html.time_axis import nearest, value_axis, value_words, zoom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ergmeter.metrics.courses import Course
    from ergmeter.metrics.progress import Axis
    from ergmeter.views.html.charts import Scale

_TITLES: dict[Axis, str] = {
    "step": "steps so far",
    "tokens": "tokens so far",
    "time": "s since the first step began",
}
# Of tokens each by itself: a format for all of them would write 0 as 0M.
_PLAIN, _SHORT = {"format": ",.6~r"}, {"labelExpr": "format(datum.value, '.4~s')"}
_DIGITS: dict[Axis, int | None] = {"step": 4, "tokens": None, "time": 6}
_UNITS: dict[Axis, str] = {"step": "steps", "tokens": "tokens", "time": "s"}
# Of a group's first run, its second and so on; the style sheet has the same for the legend.
DASHES = ([1, 0], [7, 3], [2, 2], [10, 3, 2, 3], [14, 4], [5, 2, 1, 2, 1, 2])
_DOTS = 60  # readings of a line, up to which each is a dot


@dataclass(frozen=True, slots=True)
class Line:
    """A run's course, what it is called, its colour (1 to 8) and its dashes (0 to 5)."""

    label: str
    course: Course
    colour: int
    dash: int


def x_axes(lines: Mapping[int, Course]) -> dict[str, dict[str, Any]]:
    """The axes that some line has, from 0 to where the longest ends."""
    found: dict[str, dict[str, Any]] = {}
    for axis in AXES:
        ends = [end for end in (one.end(axis) for one in lines.values()) if end is not None]
        if ends:
            found[axis] = {
                "field": axis,
                "type": "quantitative",
                "title": _TITLES[axis],
                "scale": {"domain": [0, round(max(ends), 6) or 1.0], "nice": False},
                "axis": {
                    "grid": False,
                    **(_SHORT if axis == "tokens" else _PLAIN),
                    "tickCount": {"expr": "max(3, floor(width / 90))"},
                },
            }
    return found


def line_layers(
    lines: Sequence[Line], scale: Scale, x: dict[str, Any], *, has_zero: bool
) -> list[dict[str, Any]]:
    """The lines, and the reading that is nearest to the pointer."""
    rows = [row for number, one in enumerate(lines) for row in _rows(number, one.course, scale)]
    numbers = list(range(len(lines)))
    field = {"field": "i", "type": "nominal", "legend": None}
    colours = [f"var(--c{one.colour})" for one in lines]
    dashes = [DASHES[one.dash] for one in lines]
    few = max(one.course.readings for one in lines) <= _DOTS
    mark = {
        "type": "line",
        "clip": True,
        "aria": False,
        "strokeWidth": 1.8,
        "point": {"size": 16, "filled": True, "aria": False} if few else False,
    }
    axes = {
        "x": x,
        "y": value_axis(rows, scale, has_zero=has_zero),
        "color": {**field, "scale": {"domain": numbers, "range": colours}},
    }
    drawn = {
        "data": {"name": "points", "values": rows},
        "mark": mark,
        "params": [zoom()],
        "encoding": {
            **axes,
            "strokeDash": {**field, "scale": {"domain": numbers, "range": dashes}},
            "order": {"field": "time", "type": "quantitative"},
        },
    }
    names = [{"i": number, "s": one.label} for number, one in enumerate(lines)]
    looked_up = {"lookup": "i", "from": {"data": {"values": names}, "key": "i", "fields": ["s"]}}
    words = [{"field": "s", "title": "run"}, value_words(scale), *map(_place_words, _UNITS)]
    return [drawn, nearest(axes, words, looked_up=[looked_up])]


def _place_words(axis: Axis) -> dict[str, Any]:
    return {"field": axis, "title": _UNITS[axis], "type": "quantitative", "format": ",.6~r"}


def _rows(number: int, one: Course, scale: Scale) -> list[dict[str, Any]]:
    xs = {axis: values.tolist() for axis, values in one.x.items()}
    return [
        {
            "i": number,
            "v": None if math.isnan(value) else float(f"{value / scale.factor:.6g}"),
            **{axis: round(values[place], _DIGITS[axis]) for axis, values in xs.items()},
        }
        for place, value in enumerate(one.values.tolist())
    ]
