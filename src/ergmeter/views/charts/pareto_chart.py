"""Speed against energy: which groups does no other beat?

The trap: a front through the means. Who is on the front was decided by what is shown (`pareto`),
not by where the dots lie; so each dot has the intervals of its means, and a group that is not
beaten has another shape as well as another colour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.compare.comparison import front_axes, mean_of
from ergmeter.compare.verdicts import measure
from ergmeter.errors import NotMeasurable
from ergmeter.records import Reading
from ergmeter.views.charts.chart import Chart, Table, framed, scale_for
from ergmeter.views.compare import beaters, front_in_words, head, is_assumed, some
from ergmeter.views.run.card import interval, value

if TYPE_CHECKING:
    from ergmeter.compare.comparison import Comparison
    from ergmeter.compare.grouping import Group
    from ergmeter.compare.verdicts import Measure
    from ergmeter.stats.ratio import Mean
    from ergmeter.views.charts.chart import Scale

ID = "pareto"
TITLE = "Pareto front"
_ON, _BEATEN = ("c3", "diamond", "◆"), ("c8", "circle", "●")
_HEIGHT_PX = 300
_MOST = 60  # dots; the table has all
_NAMED = 8  # dots with their names beside them; more would lie on top of each other
_PREFIXED = ("B", "J", "s")  # units that take one; kilotokens are nobody's


def pareto_chart(found: Comparison) -> Chart:
    """The groups that the front is of. Raises NotMeasurable with what is missing."""
    if found.front is None:
        raise NotMeasurable(_why_none(found))
    axes = [measure(key) for key in found.front.axes]
    named = {*found.front.on, *found.front.beaten}
    groups = [group for group in found.groups if group.name in named]
    means = [
        [mean_of(group, axis, confidence=found.options.confidence) for axis in axes]
        for group in groups
    ]
    scales = [_scale(axis, [row[at] for row in means]) for at, axis in enumerate(axes)]
    rows = [
        _point(group, axes, row, scales, is_on=group.name in found.front.on)
        for group, row in zip(groups, means, strict=True)
    ]
    for row, own in zip(rows, means, strict=True):
        row["third"] = f"{head(axes[2])} {_mean_text(axes[2], own[2])}" if len(axes) > 2 else ""
    beaten = found.front.beaten
    total, rows = len(rows), sorted(rows, key=lambda row: row["name"] in beaten)[:_MOST]
    legend = ((f"{_ON[2]} not beaten", _ON[0]), (f"{_BEATEN[2]} beaten", _BEATEN[0]))
    note = f"{front_in_words(found.front)}; {_better(axes)} is better{_left_out(len(rows), total)}"
    words = some(
        [f"{g.name} {_mean_text(axes[0], m[0])}" for g, m in zip(groups, means, strict=True)],
        most=_NAMED,
    )
    return Chart(
        ID,
        TITLE,
        "",
        framed(f"{TITLE}: {words}", _HEIGHT_PX, _layers(rows, axes, scales)),
        _table(found, groups, means, axes),
        note,
        legend=legend,
    )


def _named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who has a name in the chart: all where they are few, else those that are not beaten, if they
    are."""
    on = [row for row in rows if row["shape"] == _ON[1]]
    return next((few for few in (rows, on) if len(few) <= _NAMED), [])


def _left_out(drawn: int, total: int) -> str:
    said = "; names that are not in it are beside the pointer" if drawn > _NAMED else ""
    if drawn < total:
        said += (
            f"; {drawn} of {total} groups are drawn, those on the front first: the table has all"
        )
    return said


def scale_of(measured: Measure, most: float) -> Scale:
    """How a figure's axis is written: bytes and joules with a prefix, others as they are."""
    unit = "" if measured.unit == "1" else measured.unit
    scale = scale_for(unit if unit in (*_PREFIXED, "frac") else "", most)
    return scale if scale.unit or not unit else type(scale)(1.0, unit)


def _scale(axis: Measure, means: list[Mean]) -> Scale:
    return scale_of(axis, max(one.value for one in means))


def _point(
    group: Group, axes: list[Measure], means: list[Mean], scales: list[Scale], *, is_on: bool
) -> dict[str, Any]:
    colour, shape, _ = _ON if is_on else _BEATEN
    row: dict[str, Any] = {"name": group.name, "shape": shape, "colour": f"var(--{colour})"}
    for letter, axis, mean, scale in zip("yx", axes[:2], means[:2], scales[:2], strict=True):
        ends = {"": mean.value, "low": mean.low, "high": mean.high}
        if is_assumed(group, axis):  # repeats do not say how sure it is
            ends |= {"low": None, "high": None}
        row |= {
            f"{letter}{end}": None if at is None else at / scale.factor for end, at in ends.items()
        }
    return row


def _layers(
    rows: list[dict[str, Any]], axes: list[Measure], scales: list[Scale]
) -> list[dict[str, Any]]:
    x, y = (
        {
            "type": "quantitative",
            "title": _title(axes[at], scales[at]),
            "scale": {"zero": False, "nice": True, "padding": 24},
            "axis": {"format": ".1%" if scales[at].unit == "frac" else ",.4~r", "tickCount": 5},
        }
        for at in (1, 0)
    )
    colour = {"field": "colour", "type": "nominal", "scale": None, "legend": None}
    shape = {"field": "shape", "type": "nominal", "scale": None, "legend": None}
    points = {"x": {**x, "field": "x"}, "y": {**y, "field": "y"}}
    across, upright = ([row for row in rows if row[end] is not None] for end in ("xlow", "ylow"))
    rule = {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7, "aria": False}
    tooltip = [
        {"field": "name", "title": "group"},
        {"field": "y", "title": _title(axes[0], scales[0]), "format": ",.4~r"},
        {"field": "x", "title": _title(axes[1], scales[1]), "format": ",.4~r"},
    ]
    if len(axes) > 2:
        tooltip.append({"field": "third", "title": head(axes[2])})
    is_right = "scale('x', datum.x) > width / 2"
    label = {
        "type": "text",
        "fontSize": 12,
        "dy": -11,
        "align": {"expr": f"{is_right} ? 'right' : 'left'"},
        "dx": {"expr": f"{is_right} ? -4 : 4"},
        "limit": {"expr": "width / 2"},
        "color": "var(--ink)",
        "aria": False,
    }
    layers: list[dict[str, Any]] = [
        {
            "data": {"name": "across", "values": across},
            "mark": rule,
            "encoding": {
                "x": {**x, "field": "xlow"},
                "x2": {"field": "xhigh"},
                "y": {**y, "field": "y"},
                "color": colour,
            },
        },
        {
            "data": {"name": "upright", "values": upright},
            "mark": rule,
            "encoding": {
                "x": {**x, "field": "x"},
                "y": {**y, "field": "ylow"},
                "y2": {"field": "yhigh"},
                "color": colour,
            },
        },
        {
            "data": {"name": "names", "values": _named(rows)},
            "mark": label,
            "encoding": {**points, "text": {"field": "name"}},
        },
        {
            "data": {"name": "thirds", "values": rows if len(rows) <= _NAMED else []},
            "mark": {**label, "dy": 15, "fontSize": 11, "color": "var(--dim)"},
            "encoding": {**points, "text": {"field": "third"}},
        },
        # Above the words, which have a rim.
        {
            "data": {"name": "points", "values": rows},
            "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1, "aria": False},
            "encoding": {**points, "color": colour, "shape": shape, "tooltip": tooltip},
        },
    ]
    # Vega complains of a layer that has nothing in it.
    return [one for one in layers if one["data"]["values"]]


def _better(axes: list[Measure]) -> str:
    """Which way is better, by what each figure says of itself: upright, across, and the third."""
    upright = "higher" if axes[0].direction == "higher" else "lower"
    across = f"further to the {'right' if axes[1].direction == 'higher' else 'left'}"
    if len(axes) < 3:
        return f"{upright} and {across}"
    third = f"{'more' if axes[2].direction == 'higher' else 'less'} {head(axes[2])}"
    return f"{upright}, {across} and {third}"


def _title(axis: Measure, scale: Scale) -> str:
    unit = "%" if scale.unit == "frac" else scale.unit
    return head(axis) if head(axis) == unit else f"{head(axis)}, {unit}"


def _mean_text(axis: Measure, mean: Mean) -> str:
    return value(Reading(mean.value, axis.unit, "measured")).removesuffix(" 1")


def _table(
    found: Comparison, groups: list[Group], means: list[list[Mean]], axes: list[Measure]
) -> Table:
    assert found.front is not None
    rows = []
    for group, own in zip(groups, means, strict=True):
        by = found.front.beaten.get(group.name)
        place = f"beaten by {beaters(by)}" if by else "on the front"
        cells = []
        for axis, mean in zip(axes, own, strict=True):
            said = Reading(mean.value, axis.unit, "measured", mean.low, mean.high)
            why = "one run: no interval" if mean.repeats == 1 else "no interval"
            between = interval(said) or why
            between = "assumed" if is_assumed(group, axis) else between
            cells.append(f"{_mean_text(axis, mean)} ({between})")
        rows.append((group.name, *cells, place))
    return Table(("group", *map(head, axes), "front"), tuple(rows))


def _why_none(found: Comparison) -> str:
    """What the front lacks, and in which groups."""
    if len(found.to_compare) < 2:
        return "it takes two groups that may be compared"
    _, lacking = front_axes(found)
    told = [
        f"no {head(measure(key))} to compare in {some(names)}: {why}"
        for (key, why), names in lacking.items()
    ]
    what = "it takes two of tokens/s, J/token and memory that all groups have"
    return "; ".join([what, *told])
