"""Charts of a comparison: ratios, differences, group means and the Pareto front.

`erg compare --html` and `erg serve` use the same charts. A ratio of 0.75 is better for energy and
worse for speed, so the shape of a dot shows which it is. `pareto` decides who is on the front, with
intervals taken into account; the position of the dots alone does not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ergmeter.compare.comparison import front_axes, impossible_entry, mean_of
from ergmeter.compare.verdicts import measure
from ergmeter.errors import NotMeasurable
from ergmeter.records import Reading
from ergmeter.stats.ratio import UNBOUNDED
from ergmeter.views.charts.chart import Chart, Table, chart_of, framed, scale_for
from ergmeter.views.charts.interval_chart import Axis, Dot, interval_chart
from ergmeter.views.compare import (
    beaters,
    contrast_in_words,
    first_names,
    front_in_words,
    head,
    is_assumed,
)
from ergmeter.views.run.card import column_text, interval, value

if TYPE_CHECKING:
    from ergmeter.compare.comparison import Comparison
    from ergmeter.compare.grouping import Group
    from ergmeter.compare.verdicts import Measure, State, Verdict
    from ergmeter.stats.ratio import Mean
    from ergmeter.views.charts.chart import Scale
    from ergmeter.views.charts.interval_chart import Kind

# The Pareto front: speed, energy and memory, two at a time.


ID = "pareto"
TITLE = "Pareto front"
_ON, _BEATEN = ("c3", "diamond", "◆"), ("c8", "circle", "●")
_HEIGHT_PX = 300
_MOST_PARETO_GROUPS = 60  # dots; the table has all
_NAMED = 8  # dots with their names beside them; more would lie on top of each other
_PREFIXED = ("B", "J", "s")  # units with an SI prefix; kilotokens are not used


def pareto_chart(comparison: Comparison) -> Chart:
    """Return the chart of the Pareto front. Raises NotMeasurable with what is missing."""
    if comparison.front is None:
        raise NotMeasurable(_why_no_front(comparison))
    axes = [measure(key) for key in comparison.front.axes]
    named = {*comparison.front.on, *comparison.front.beaten}
    groups = [group for group in comparison.groups if group.name in named]
    means = [
        [mean_of(group, axis, confidence=comparison.options.confidence) for axis in axes]
        for group in groups
    ]
    scales = [_scale(axis, [row[at] for row in means]) for at, axis in enumerate(axes)]
    rows = [
        _point(group, axes, row, scales, is_on=group.name in comparison.front.on)
        for group, row in zip(groups, means, strict=True)
    ]
    for row, own in zip(rows, means, strict=True):
        row["third"] = f"{head(axes[2])} {_mean_text(axes[2], own[2])}" if len(axes) > 2 else ""
    beaten = comparison.front.beaten
    total, rows = (
        len(rows),
        sorted(rows, key=lambda row: row["name"] in beaten)[:_MOST_PARETO_GROUPS],
    )
    legend = ((f"{_ON[2]} not beaten", _ON[0]), (f"{_BEATEN[2]} beaten", _BEATEN[0]))
    cut = _left_out(len(rows), total)
    note = f"{front_in_words(comparison.front)}; {_better(axes)} is better{cut}"
    words = first_names(
        [f"{g.name} {_mean_text(axes[0], m[0])}" for g, m in zip(groups, means, strict=True)],
        most=_NAMED,
    )
    return Chart(
        ID,
        TITLE,
        "",
        framed(f"{TITLE}: {words}", _HEIGHT_PX, _layers(rows, axes, scales)),
        _table(comparison, groups, means, axes),
        note,
        legend=legend,
    )


def _named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with a label: all if few, else those on the front, if those are few."""
    on = [row for row in rows if row["shape"] == _ON[1]]
    return next((few for few in (rows, on) if len(few) <= _NAMED), [])


def _left_out(count: int, total: int) -> str:
    unnamed = "; names that are not in it are beside the pointer" if count > _NAMED else ""
    if count < total:
        unnamed += (
            f"; {count} of {total} groups are drawn, those on the front first: the table has all"
        )
    return unnamed


def scale_of(measured: Measure, most: float) -> Scale:
    """Return the scale of an axis: bytes and joules with an SI prefix."""
    unit = "" if measured.unit == "1" else measured.unit
    scale = scale_for(unit if unit in (*_PREFIXED, "frac") else "", most)
    return scale if scale.unit or not unit else type(scale)(1.0, unit)


def _scale(axis: Measure, means: list[Mean]) -> Scale:
    return scale_of(axis, max(mean.value for mean in means))


def _point(
    group: Group, axes: list[Measure], means: list[Mean], scales: list[Scale], *, is_on: bool
) -> dict[str, Any]:
    colour, shape, _ = _ON if is_on else _BEATEN
    row: dict[str, Any] = {"name": group.name, "shape": shape, "colour": f"var(--{colour})"}
    for letter, axis, mean, scale in zip("yx", axes[:2], means[:2], scales[:2], strict=True):
        ends = {"": mean.value, "low": mean.low, "high": mean.high}
        if is_assumed(group, axis):  # repeats do not show the uncertainty
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
        # Above the texts, which have an outline.
        {
            "data": {"name": "points", "values": rows},
            "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1, "aria": False},
            "encoding": {**points, "color": colour, "shape": shape, "tooltip": tooltip},
        },
    ]
    # Vega warns about empty layers.
    return [layer for layer in layers if layer["data"]["values"]]


def _better(axes: list[Measure]) -> str:
    """Return the better directions by metric: vertical, horizontal and the third."""
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
    comparison: Comparison, groups: list[Group], means: list[list[Mean]], axes: list[Measure]
) -> Table:
    assert comparison.front is not None
    rows = []
    for group, own in zip(groups, means, strict=True):
        by = comparison.front.beaten.get(group.name)
        standing = f"beaten by {beaters(by)}" if by else "on the front"
        cells = []
        for axis, mean in zip(axes, own, strict=True):
            reading = Reading(mean.value, axis.unit, "measured", mean.low, mean.high)
            why = "one run: no interval" if mean.repeats == 1 else "no interval"
            between = interval(reading) or why
            between = "assumed" if is_assumed(group, axis) else between
            cells.append(f"{_mean_text(axis, mean)} ({between})")
        rows.append((group.name, *cells, standing))
    return Table(("group", *map(head, axes), "front"), tuple(rows))


def _why_no_front(comparison: Comparison) -> str:
    """Return what the front lacks, and in which groups."""
    if len(comparison.to_compare) < 2:
        return "it takes two groups that may be compared"
    _, lacking = front_axes(comparison)
    reasons = [
        f"no {head(measure(key))} to compare in {first_names(names)}: {why}"
        for (key, why), names in lacking.items()
    ]
    what = "it takes two of tokens/s, J/token and memory that all groups have"
    return "; ".join([what, *reasons])


RATIOS, DIFFERENCES, MEAN = "ratios", "differences", "mean-"
_KINDS: dict[State, Kind] = {
    "better": "better",
    "worse": "worse",
    "differs": "differs",
    "not shown": "open",
    "no interval": "bare",
    "absent": "absent",
}
_VERDICTS: dict[Kind, str] = {
    "better": "shown to be better",
    "worse": "shown to be worse",
    "differs": "shown to differ",
    "open": "no difference shown",
    "bare": "no interval: a single run, or too few",
}
_MEANS: dict[Kind, str] = {
    "plain": "mean of the runs, with its interval",
    "bare": "no interval: a single run, too few, or assumed",
}
_MOST = 60  # rows of a chart; the table below it has all


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Return all charts, drawn or with their reason."""
    baseline = comparison.groups[0].name
    sure = f"{comparison.options.confidence * 100:g} % intervals"
    return [
        chart_of(
            RATIOS,
            f"ratio to {baseline}",
            "",
            lambda: _contrasts(comparison, RATIOS, f"ratio to {baseline}", sure=sure),
        ),
        chart_of(
            DIFFERENCES,
            f"what was learned, less that of {baseline}",
            "",
            lambda: _contrasts(
                comparison, DIFFERENCES, f"what was learned, less that of {baseline}", sure=sure
            ),
        ),
        chart_of(ID, TITLE, "", lambda: pareto_chart(comparison)),
        *(
            chart_of(f"{MEAN}{at}", head(measure), "", partial(_means, comparison, at, measure))
            for at, measure in enumerate(comparison.measures)
        ),
    ]


def _contrasts(comparison: Comparison, id_: str, title: str, *, sure: str) -> Chart:
    is_ratio = id_ == RATIOS
    verdicts = [
        (pair.other, verdict)
        for pair in comparison.pairs
        for verdict in pair.verdicts
        if verdict.measure.is_quality != is_ratio
    ]
    if not any(verdict.contrast for _, verdict in verdicts):
        raise NotMeasurable(_why_none(comparison, [verdict for _, verdict in verdicts]))
    # Names are in the title, which wraps: on an axis a long name would be wider than the page.
    axis = (
        Axis("times that of the baseline (logarithmic)", is_log=True, neutral=1.0)
        if is_ratio
        else Axis("loss less that of the baseline", neutral=0.0)
    )
    rows = tuple(
        (who, verdict.measure.noun, contrast_in_words(verdict.contrast), verdict.words)
        for who, verdict in verdicts
    )
    dots = [_contrast_dot(who, verdict) for who, verdict in verdicts]
    sureness = sure if any(dot.low is not None for dot in dots) else "single runs, no intervals"
    return interval_chart(
        id_,
        title,
        "",
        dots[:_MOST],
        axis,
        words=_VERDICTS,
        table=Table(("group", "figure", "value and interval", "verdict"), rows),
        note=f"{sureness}; on the thin upright line nothing differs{_cut(len(dots))}",
    )


def _cut(rows: int) -> str:
    return f"; the first {_MOST} of {rows} rows: the table has all" if rows > _MOST else ""


def _why_none(comparison: Comparison, verdicts: list[Verdict]) -> str:
    if len(comparison.groups) < 2:
        return "one group: nothing to compare it with"
    refused = [pair.other for pair in comparison.pairs if not pair.is_comparable]
    if refused:
        return f"not comparable with {comparison.groups[0].name}: {', '.join(refused)}"
    return "; ".join(dict.fromkeys(verdict.words for verdict in verdicts)) or "no run tells a loss"


def _contrast_dot(who: str, verdict: Verdict) -> Dot:
    kind = _KINDS[verdict.state]
    name = f"{who}: {head(verdict.measure)}"
    ratio_text = contrast_in_words(verdict.contrast)
    if verdict.contrast is None:
        return Dot(name, None, None, None, ratio_text, kind)
    return Dot(
        name, verdict.contrast.value, verdict.contrast.low, verdict.contrast.high, ratio_text, kind
    )


def _means(comparison: Comparison, at: int, measured: Measure) -> Chart:
    dots, rows = [], []
    scale = scale_of(measured, _most(comparison, measured))
    for group in comparison.groups:
        dot, why = _mean_dot(comparison, group, measured, scale)
        dots.append(dot)
        rows.append((group.name, str(len(group.entries)), dot.value_text, why))
    unit = "%" if scale.unit == "frac" else scale.unit
    title = head(measured)
    axis = Axis(
        title if title == unit or not unit else f"{title}, {unit}",
        format=".2~%" if scale.unit == "frac" else ",.4~r",
    )
    return interval_chart(
        f"{MEAN}{at}",
        title,
        unit if title != unit else "",
        dots[:_MOST],
        axis,
        words=_MEANS,
        table=Table(("group", "runs", "mean and interval", "to know"), tuple(rows)),
        note=f"{measured.title}; {_way(measured)}{_cut(len(dots))}",
    )


def _way(measured: Measure) -> str:
    better = {"higher": "higher is better", "lower": "lower is better"}
    return better.get(measured.direction, "neither way is better")


def _most(comparison: Comparison, measured: Measure) -> float:
    values = [e.value(measured.key) for group in comparison.groups for e in group.entries]
    present = [value for value in values if value is not None]
    if not present:
        raise NotMeasurable(comparison.groups[0].entries[0].why_not(measured.key))
    return max(present)


def _mean_dot(
    comparison: Comparison, group: Group, measured: Measure, scale: Scale
) -> tuple[Dot, str]:
    """Return a group's mean as a dot and a note, or the reason for its absence."""
    try:
        mean = mean_of(group, measured, confidence=comparison.options.confidence)
    except NotMeasurable as error:
        wrong = impossible_entry(group, measured.key)
        text = "absent" if wrong is None else column_text(wrong.figures[measured.key])
        return Dot(group.name, None, None, None, text, "absent"), str(error)
    low, high = (None, None) if is_assumed(group, measured) else (mean.low, mean.high)
    reading = Reading(mean.value, measured.unit, "measured", low, high)
    text = column_text(reading)  # the axis has the unit, and a narrow page no room for it
    between = interval(reading).removesuffix(f" {measured.unit}")
    at, low, high = (
        None if value is None else value / scale.factor for value in (mean.value, low, high)
    )
    why = _why(group, measured, mean)
    if low is None:
        short = "one run" if mean.repeats == 1 else "no interval"
        short = "assumed" if is_assumed(group, measured) else short
        return Dot(group.name, at, None, None, f"{text}, {short}", "bare"), why
    alike = "in every run" if low == high else f"({between})"
    return Dot(group.name, at, low, high, f"{text} {alike}", "plain"), why


def _why(group: Group, measured: Measure, mean: Mean) -> str:
    lacking = [entry for entry in group.entries if entry.value(measured.key) is None]
    if lacking:
        why = lacking[0].why_not(measured.key)
        return f"{len(lacking)} of {len(group.entries)} runs lack it: {why}"
    if is_assumed(group, measured):
        return "rests on an assumption: the notes say which"
    if mean.repeats == 1:
        return "a single run does not say how runs scatter"
    return UNBOUNDED if mean.low is None else ""
