"""The runs of a comparison in one chart each: throughput, loss, power and memory as they went on.

The same for the page that `erg compare --html` writes and for the one of `erg serve`.

The trap: lines that look alike, and a line that is not there. A group has one colour and each of
its repeats dashes of its own, in the chart as in the legend; as many as can be told apart are
drawn, and what is not drawn is named beneath with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.compare.grouping import short_paths
from ergmeter.compare.run_curves import AXES, CURVES, GROUPS, LINES, NO_DIRECTORY, REPEATS, RunCurve
from ergmeter.records import Missing
from ergmeter.units import duration
from ergmeter.views.charts.chart import Chart, Scale, Table, framed, scale_for
from ergmeter.views.charts.time_axis import nearest, value_axis, value_words, zoom
from ergmeter.views.compare import some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ergmeter.compare.grouping import Group
    from ergmeter.compare.run_curves import Axis, ComparedCurves, Curve

# -- compare lines ---------------------------------------------------------------------------------
# Lines of several runs in one chart, over steps, tokens or time.
#
# The trap: the name of a run in each of its points. A name may be as long as a path, and there are
# thousands of points; they hold a number, and the name stands once.


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
class CurveLine:
    """A run's course, what it is called, its colour (1 to 8) and its dashes (0 to 5)."""

    label: str
    course: RunCurve
    colour: int
    dash: int


def x_axes(lines: Mapping[int, RunCurve]) -> dict[str, dict[str, Any]]:
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
    lines: Sequence[CurveLine], scale: Scale, x: dict[str, Any], *, has_zero: bool
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


def _rows(number: int, one: RunCurve, scale: Scale) -> list[dict[str, Any]]:
    xs = {axis: values.tolist() for axis, values in one.x.items()}
    return [
        {
            "i": number,
            "v": None if math.isnan(value) else float(f"{value / scale.factor:.6g}"),
            **{axis: round(values[place], _DIGITS[axis]) for axis, values in xs.items()},
        }
        for place, value in enumerate(one.values.tolist())
    ]


# -- compare courses -------------------------------------------------------------------------------


ID = "course-"
OWN = "own"  # the choice of an axis that suits each chart
ABOUT = (
    "All from the start of each run's first step, warm-up included. A colour is a group; dashes"
    " tell its repeats apart. Drag to move, shift and the wheel to zoom, double click to see all."
)
_COMPARE_COURSES_TITLES: dict[Curve, tuple[str, str]] = {
    "tokens_per_s": ("throughput", "tokens/s"),
    "step_s": ("step time", "s"),
    "loss": ("loss", ""),
    "power_w": ("power", "W"),
    "device_bytes": ("memory in use on the device", "B"),
    "host_bytes": ("memory of the program on the host", "B"),
}
_NOTES: dict[Curve, str] = {
    "tokens_per_s": "of each step, at its end, over the time until the next begins",
    "step_s": "of each step, at its end",
    "loss": "as each step told it",
    "power_w": "of all devices whose energy is the run's",
    "device_bytes": "of the fullest device",
    "host_bytes": "of the fullest program",
}
_WORDS: dict[str, str] = {
    OWN: "what suits each chart",
    "step": "steps",
    "tokens": "tokens",
    "time": "time",
}
_HEIGHT_PX = 220


@dataclass(frozen=True)
class CourseCharts:
    """The charts, the axes to choose from with the one that is shown first, and what is not drawn.

    `axes` are names with the words for them.
    """

    charts: tuple[Chart, ...]
    axes: tuple[tuple[str, str], ...]
    first: str
    said: tuple[str, ...]


def course_charts(
    found: ComparedCurves, groups: Sequence[Group], *, x: Axis | None = None
) -> CourseCharts:
    """What is drawn of the runs. `x`: the axis to be shown first, where a chart has it."""
    labels = _labels(found, groups)
    charts = tuple(_chart(found, curve, labels, x) for curve in found.curves)
    there = [axis for axis in AXES if any(axis in one.axes for one in charts)]
    choices = tuple((name, _WORDS[name]) for name in (OWN, *there)) if charts else ()
    said = [*_left_out(found), *_lacking(found, labels), *_absent(found)]
    if x is not None and charts and x not in there:
        said.append(f"Not over {_WORDS[x]}, as was asked for: no run can tell them.")
    return CourseCharts(charts, choices, x if x in there else OWN, tuple(said))


def _labels(found: ComparedCurves, groups: Sequence[Group]) -> list[str]:
    """A run by its group; where that has several, also by what of its path tells it apart."""
    labels = []
    for run in found.runs:
        group = groups[run.group]
        known = [entry.source for entry in group.entries if entry.run is not None]
        alone = len(group.entries) == 1
        short = "" if alone else f": {short_paths(known)[run.repeat]}"
        labels.append(f"{group.name}{short}")
    return labels


def _left_out(found: ComparedCurves) -> list[str]:
    said = []
    if found.left_out:
        total = len(found.runs) + found.left_out
        said.append(
            f"{len(found.runs)} of {total} runs are drawn: the first of each group in turn, at most"
            f" {GROUPS} groups, {REPEATS} runs of a group and {LINES} lines."
        )
    if found.without:
        many = "a run is" if found.without == 1 else f"{found.without} runs are"
        said.append(f"{many[0].upper()}{many[1:]} not drawn: {NO_DIRECTORY}.")
    return said


def _lacking(found: ComparedCurves, labels: list[str]) -> list[str]:
    """Who has no place on an axis."""
    told: dict[tuple[str, str], list[str]] = {}
    for run, label in zip(found.runs, labels, strict=True):
        for axis, why in run.lacking.items():
            told.setdefault((_WORDS[axis], why), []).append(label)
    return [f"Not over {axis}: {some(names)} ({why})." for (axis, why), names in told.items()]


def _absent(found: ComparedCurves) -> list[str]:
    """The curves that no run has, each reason once."""
    told: dict[str, list[str]] = {}
    shown = {*found.curves}
    if shown & {"device_bytes", "host_bytes"}:  # one of them is drawn
        shown |= {"device_bytes", "host_bytes"}
    if "tokens_per_s" in shown:
        shown.add("step_s")
    for curve in CURVES:
        if found.runs and curve not in shown:
            why = _reasons(found, curve, [""] * len(found.runs))
            told.setdefault("; ".join(why), []).append(_COMPARE_COURSES_TITLES[curve][0])
    return [f"Not shown: {', '.join(titles)}. Why: {why}" for why, titles in told.items()]


def _reasons(found: ComparedCurves, curve: Curve, labels: list[str]) -> dict[str, list[str]]:
    """Why runs lack a curve, and which they are."""
    told: dict[str, list[str]] = {}
    for run, label in zip(found.runs, labels, strict=True):
        one = run.curves[curve]
        if isinstance(one, Missing):
            told.setdefault(one.reason, []).append(label)
    return told


def _chart(found: ComparedCurves, curve: Curve, labels: list[str], x: Axis | None) -> Chart:
    lines: dict[int, RunCurve] = {}
    for number, run in enumerate(found.runs):
        one = run.curves[curve]
        if isinstance(one, RunCurve):
            lines[number] = one
    title, unit = _COMPARE_COURSES_TITLES[curve]
    most = max(one.highest for one in lines.values())
    scale = Scale(1.0, unit) if curve == "tokens_per_s" else scale_for(unit, most)
    axes = x_axes(lines)
    own = _own_axis(curve, lines, axes)
    description = f"{title} of {len(lines)} runs: " + "; ".join(
        f"{labels[number][:80]} from {scale.text(one.lowest)} to {scale.text(one.highest)}"
        for number, one in lines.items()
    )
    looks = _looks(found)
    drawn = [CurveLine(labels[number], one, *looks[number]) for number, one in lines.items()]
    first = axes[own if x is None or x not in axes else x]
    layers = line_layers(drawn, scale, first, has_zero=curve != "loss")
    return Chart(
        f"{ID}{curve}",
        title,
        scale.unit,
        framed(description, _HEIGHT_PX, layers),
        _table(lines, labels, scale),
        _note(found, curve, lines, labels),
        legend=tuple((one.label, f"c{one.colour} dash{one.dash}") for one in drawn),
        axes=axes,
        axis=own,
    )


def _looks(found: ComparedCurves) -> list[tuple[int, int]]:
    """Of each run the colour of its group and the dashes of its repeat, by number."""
    groups = list(dict.fromkeys(run.group for run in found.runs))
    return [(groups.index(run.group) + 1, run.repeat) for run in found.runs]


def _own_axis(curve: Curve, lines: Mapping[int, RunCurve], axes: Mapping[str, Any]) -> Axis:
    """Losses by what was learned from, which all have to tell; the rest by the clock, where what
    happens at once stands at one place."""
    if curve != "loss":
        return "time"
    if all("tokens" in one.x for one in lines.values()):
        return "tokens"
    return "step" if "step" in axes else "time"


def _note(
    found: ComparedCurves, curve: Curve, lines: Mapping[int, RunCurve], labels: list[str]
) -> str:
    said = [_NOTES[curve]]
    if any(one.is_bounded for one in lines.values()):
        said.append("lowest and highest of each moment are drawn")
    if curve == "tokens_per_s" and len({one.note for one in lines.values()}) > 1:
        said.append("not all count the same tokens: the table says which")
    said += [
        f"no line of {some(names)}: {why}" for why, names in _reasons(found, curve, labels).items()
    ]
    return "; ".join(said)


def _table(lines: Mapping[int, RunCurve], labels: list[str], scale: Scale) -> Table:
    ends = ("steps", "tokens", "lasted")
    head = ("run", "basis", "readings", "lowest", "highest", "last", *ends, "to know")
    rows = tuple(
        (
            labels[number],
            one.basis,
            f"{one.readings:,}",
            *(scale.text(value).strip() for value in (one.lowest, one.highest, one.last)),
            *(_end(one, axis) for axis in AXES),
            one.note,
        )
        for number, one in lines.items()
    )
    return Table(head, rows)


def _end(one: RunCurve, axis: Axis) -> str:
    """How far a line goes."""
    end = one.end(axis)
    if end is None:
        return "-"
    return duration(end) if axis == "time" else f"{end:,.1f}".removesuffix(".0")
