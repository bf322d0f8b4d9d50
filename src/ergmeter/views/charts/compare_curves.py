"""Curves of compared runs in one chart: throughput, loss, power and memory.

`erg compare --html` and `erg serve` use the same charts. A group has one colour, each repeat its
own dashes. Runs beyond the number of distinguishable lines are named below the chart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.compare.entry import Group
from ergmeter.compare.grouping import short_paths
from ergmeter.compare.run_curves import AXES, CURVES, GROUPS, LINES, NO_DIRECTORY, REPEATS, RunCurve
from ergmeter.records import Missing
from ergmeter.units import duration, grouped
from ergmeter.views.charts import vega
from ergmeter.views.charts.chart import Chart, Scale, Table, css, rounded, scale_for
from ergmeter.views.charts.compare_charts import first_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ergmeter.compare.run_curves import Axis, ComparedCurves, Curve

# Points carry the number of their run, not its name: a name may be as long as a path.


_TITLES: dict[Axis, str] = {
    "step": "steps so far",
    "tokens": "tokens so far",
    "time": "s since the first step began",
}
_DIGITS: dict[Axis, int | None] = {"step": 4, "tokens": None, "time": 6}
_UNITS: dict[Axis, str] = {"step": "steps", "tokens": "tokens", "time": "s"}
# Dashes of a group's first run, second and so on; page.css has the same for the legend.
DASHES = ([1, 0], [7, 3], [2, 2], [10, 3, 2, 3], [14, 4], [5, 2, 1, 2, 1, 2])


@dataclass(frozen=True, slots=True)
class CurveLine:
    """A run's curve with label, colour (1 to 8) and dashes (0 to 5)."""

    label: str
    course: RunCurve
    colour: int
    dash: int


def _x_axes(lines: Sequence[CurveLine]) -> dict[str, vega.Channel]:
    """Return the axes that any line has, from 0 to the longest end."""
    axes: dict[str, vega.Channel] = {}
    for name in AXES:
        ends = [end for line in lines if (end := line.course.end(name)) is not None]
        labels: dict[str, Any] = {"format": ",.6~r"}
        if name == "tokens":  # each label has its own format: a common one would write 0 as 0M
            labels = {"labelExpr": "format(datum.value, '.4~s')"}
        if ends:
            domain = (0, round(max(ends), 6) or 1.0)
            axes[name] = vega.axis(
                name, _TITLES[name], domain=domain, nice=False, grid=False, tick_px=90, **labels
            )
    return axes


def _layers(
    lines: Sequence[CurveLine], scale: Scale, x: vega.Channel, *, has_zero: bool
) -> list[vega.Layer]:
    """Return the lines, and the reading nearest to the pointer."""
    rows = [row for number, line in enumerate(lines) for row in _rows(number, line.course, scale)]
    colours = {number: css(f"c{line.colour}") for number, line in enumerate(lines)}
    dashes = {number: DASHES[line.dash] for number, line in enumerate(lines)}
    return vega.line_layers(
        rows,
        x=x,
        y=vega.value_axis(rows, scale, has_zero=has_zero),
        color=vega.by_value("i", colours, legend=False),
        tooltip=[
            *vega.tooltip({"s": "run"}),
            vega.value_words(scale),
            *(vega.quantity(axis, unit, format=",.6~r") for axis, unit in _UNITS.items()),
        ],
        labels=[line.label for line in lines],
        strokeDash=vega.by_value("i", dashes, legend=False),
        order=vega.axis("time"),
        strokeWidth=1.8,
        point=vega.dots(max(line.course.readings for line in lines), 16),
    )


def _rows(number: int, course: RunCurve, scale: Scale) -> vega.Rows:
    xs = {axis: values.tolist() for axis, values in course.x.items()}
    return [
        {
            "i": number,
            "v": rounded(value, scale),
            **{axis: round(values[index], _DIGITS[axis]) for axis, values in xs.items()},
        }
        for index, value in enumerate(course.values.tolist())
    ]


ID = "course-"
OWN = "own"  # the choice of an axis that suits each chart
ABOUT = (
    "All from the start of each run's first step, warm-up included. A colour is a group; dashes"
    " separate its repeats. Drag to move, shift and the wheel to zoom, double click to see all."
)
# Title, unit, and what the values are of.
_CURVES: dict[Curve, tuple[str, str, str]] = {
    "tokens_per_s": (
        "throughput",
        "tokens/s",
        "of each step, at its end, over the time until the next begins",
    ),
    "step_s": ("step time", "s", "of each step, at its end"),
    "loss": ("loss", "", "as each step reported it"),
    "power_w": ("power", "W", "of all devices whose energy is the run's"),
    "device_bytes": ("memory in use on the device", "B", "of the fullest device"),
    "host_bytes": ("memory of the program on the host", "B", "of the fullest program"),
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
    """The charts, the axes to choose from with the first one, and notes on what is not drawn.

    `axes` are pairs of name and title.
    """

    charts: tuple[Chart, ...]
    axes: tuple[tuple[str, str], ...]
    first: str
    notes: tuple[str, ...]


def course_charts(
    courses: ComparedCurves, groups: Sequence[Group], *, x: Axis | None = None
) -> CourseCharts:
    """Return the curve charts of the runs. `x`: the axis to show first, if available."""
    labels = list(_labels(courses, groups))
    charts = tuple(_chart(courses, curve, labels, x) for curve in courses.curves)
    there = [axis for axis in AXES if any(axis in chart.axes for chart in charts)]
    choices = tuple((name, _WORDS[name]) for name in (OWN, *there)) if charts else ()
    notes = [*_left_out(courses), *_lacking(courses, labels), *_absent(courses)]
    if x is not None and charts and x not in there:
        notes.append(f"Not over {_WORDS[x]}, as requested: no run has them.")
    return CourseCharts(charts, choices, x if x in there else OWN, tuple(notes))


def _labels(courses: ComparedCurves, groups: Sequence[Group]) -> Iterator[str]:
    """Label a run by its group, and in a group of several also by its distinct path."""
    for run in courses.runs:
        group = groups[run.group]
        sources = [entry.source for entry in group.entries if entry.run is not None]
        alone = len(group.entries) == 1
        short = "" if alone else f": {short_paths(sources)[run.repeat]}"
        yield f"{group.name}{short}"


def _left_out(courses: ComparedCurves) -> Iterator[str]:
    if courses.left_out:
        total = len(courses.runs) + courses.left_out
        yield (
            f"{len(courses.runs)} of {total} runs are drawn:"
            " the first of each group in turn, at most"
            f" {GROUPS} groups, {REPEATS} runs of a group and {LINES} lines."
        )
    if courses.without:
        many = "a run is" if courses.without == 1 else f"{courses.without} runs are"
        yield f"{many[0].upper()}{many[1:]} not drawn: {NO_DIRECTORY}."


def _lacking(courses: ComparedCurves, labels: list[str]) -> list[str]:
    """Return notes on runs that lack an axis."""
    labels_by_reason: dict[tuple[str, str], list[str]] = {}
    for run, label in zip(courses.runs, labels, strict=True):
        for axis, why in run.lacking.items():
            labels_by_reason.setdefault((_WORDS[axis], why), []).append(label)
    return [
        f"Not over {axis}: {first_names(names)} ({why})."
        for (axis, why), names in labels_by_reason.items()
    ]


def _absent(courses: ComparedCurves) -> list[str]:
    """Return notes on curves that no run has, grouped by reason."""
    present = {*courses.curves}
    if present & {"device_bytes", "host_bytes"}:  # one of them is drawn
        present |= {"device_bytes", "host_bytes"}
    if "tokens_per_s" in present:
        present.add("step_s")
    titles = grouped(
        ("; ".join(_reasons(courses, curve, [""] * len(courses.runs))), _CURVES[curve][0])
        for curve in CURVES
        if courses.runs and curve not in present
    )
    return [f"Not shown: {', '.join(named)}. Why: {why}" for why, named in titles.items()]


def _reasons(courses: ComparedCurves, curve: Curve, labels: list[str]) -> dict[str, list[str]]:
    """Return labels of runs that lack a curve, by reason."""
    pairs = ((run.curves[curve], label) for run, label in zip(courses.runs, labels, strict=True))
    return grouped((course.reason, label) for course, label in pairs if isinstance(course, Missing))


def _chart(courses: ComparedCurves, curve: Curve, labels: list[str], x: Axis | None) -> Chart:
    # A group has a colour, a repeat its dashes.
    groups = list(dict.fromkeys(run.group for run in courses.runs))
    lines = [
        CurveLine(label, course, groups.index(run.group) + 1, run.repeat)
        for run, label in zip(courses.runs, labels, strict=True)
        if isinstance(course := run.curves[curve], RunCurve)
    ]
    title, unit, _ = _CURVES[curve]
    most = max(line.course.highest for line in lines)
    scale = Scale(1.0, unit) if curve == "tokens_per_s" else scale_for(unit, most)
    axes = _x_axes(lines)
    own = _own_axis(curve, lines, axes)
    description = f"{title} of {len(lines)} runs: " + "; ".join(
        f"{line.label[:80]} from {scale.text(line.course.lowest)}"
        f" to {scale.text(line.course.highest)}"
        for line in lines
    )
    first = axes[own if x is None or x not in axes else x]
    layers = _layers(lines, scale, first, has_zero=curve != "loss")
    return Chart(
        f"{ID}{curve}",
        title,
        scale.unit,
        vega.framed(description, _HEIGHT_PX, layers),
        _table(lines, scale),
        "; ".join(_note(courses, curve, lines, labels)),
        legend=tuple((line.label, f"c{line.colour} dash{line.dash}") for line in lines),
        axes=axes,
        axis=own,
    )


def _own_axis(curve: Curve, lines: Sequence[CurveLine], axes: Mapping[str, Any]) -> Axis:
    """Return a curve's default axis: tokens for losses if all runs have them, else time."""
    if curve != "loss":
        return "time"
    if all("tokens" in line.course.x for line in lines):
        return "tokens"
    return "step" if "step" in axes else "time"


def _note(
    courses: ComparedCurves, curve: Curve, lines: Sequence[CurveLine], labels: list[str]
) -> Iterator[str]:
    yield _CURVES[curve][2]
    if any(line.course.is_bounded for line in lines):
        yield "lowest and highest of each moment are drawn"
    if curve == "tokens_per_s" and len({line.course.note for line in lines}) > 1:
        yield "not all count the same tokens: the table says which"
    yield from (
        f"no line of {first_names(names)}: {why}"
        for why, names in _reasons(courses, curve, labels).items()
    )


def _table(lines: Sequence[CurveLine], scale: Scale) -> Table:
    ends = ("steps", "tokens", "lasted")
    head = ("run", "basis", "readings", "lowest", "highest", "last", *ends, "notes")
    rows = tuple(
        (
            line.label,
            course.basis,
            f"{course.readings:,}",
            *(scale.text(value).strip() for value in (course.lowest, course.highest, course.last)),
            *(_end(course, axis) for axis in AXES),
            course.note,
        )
        for line in lines
        for course in (line.course,)
    )
    return Table(head, rows)


def _end(course: RunCurve, axis: Axis) -> str:
    """Return where a line ends on an axis."""
    end = course.end(axis)
    if end is None:
        return "-"
    return duration(end) if axis == "time" else f"{end:,.1f}".removesuffix(".0")
