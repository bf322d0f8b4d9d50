"""Charts of a comparison: ratios, differences, the Pareto front; and their words.

`erg compare --html` and `erg serve` use the same charts. A ratio of 0.75 is better for energy and
worse for speed, so the shape of a dot shows which it is. `pareto` decides who is on the front, with
intervals taken into account; the position of the dots alone does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ergmeter.compare.comparison import Comparison, Front, front_axes
from ergmeter.compare.entry import Group, measure
from ergmeter.compare.verdicts import State, Verdict
from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, in_view
from ergmeter.records import Reading, interval_text, value_text
from ergmeter.stats.ratio import Contrast, Mean
from ergmeter.units import ratio_text, significant
from ergmeter.views.charts import vega
from ergmeter.views.charts.chart import Chart, Scale, Table, chart_of, css, scale_for
from ergmeter.views.charts.interval_chart import contrast_dot, interval_chart

# Words that the charts share with the text of a comparison.


def head(measured: Metric) -> str:
    """Return the short title of a column."""
    return _label(measured.key) or measured.title


def _label(key: str) -> str:
    """The declared label of a metric in a comparison; empty if there is none."""
    at = {**in_view("compare"), **in_view("compare target")}.get(key)
    return at.label if at else ""


def is_assumed(group: Group, measured: Metric) -> bool:
    """True if a group's value rests on an assumption: its repeats do not show the uncertainty."""
    return any(measured.key in entry.assumed for entry in group.entries)


def front_in_words(front: Front) -> str:
    """Describe the Pareto front; long lists are cut with a count."""
    axes = ", ".join(_label(key) or key for key in front.axes)
    text = f"Pareto front ({axes}): {first_names(front.on) or 'no group'}"
    if front.beaten:
        who = first_names([f"{name} (by {beaters(by)})" for name, by in front.beaten.items()])
        text += f"; beaten: {who}"
    return text + (f" ({front.remark})" if front.remark else "")


def beaters(names: Sequence[str]) -> str:
    """Return the groups that beat a group, cut with a count."""
    return first_names(names, most=3, joint=" and ")


def first_names(names: Sequence[str], *, most: int = 8, joint: str = ", ") -> str:
    """Return the first names, and the number of others."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return joint.join([*names[:most], *more])


def contrast_in_words(contrast: Contrast | None) -> str:
    """Return a ratio or difference with its interval."""
    if contrast is None:
        return "absent"
    value_text = _short(contrast.value, contrast)
    if contrast.low is None or contrast.high is None:
        return f"{value_text}, {'one run' if min(contrast.repeats) == 1 else 'no interval'}"
    if contrast.is_exact:
        return f"{value_text}, in every run"
    return f"{value_text} ({_short(contrast.low, contrast)} to {_short(contrast.high, contrast)})"


def _short(number: float, contrast: Contrast) -> str:
    return ratio_text(number) if contrast.scale == "ratio" else significant(number, 3)


# The Pareto front: speed, energy and memory, two at a time.


PARETO = "pareto"
TITLE = "Pareto front"
_ON, _BEATEN = ("c3", "diamond", "◆"), ("c8", "circle", "●")
_HEIGHT_PX = 300
_MOST_PARETO_GROUPS = 60  # dots; the table has all
_NAMED = 8  # dots with their names beside them; more would lie on top of each other
_PREFIXED = ("B", "J", "s")  # units with an SI prefix; kilotokens are not used


def pareto_chart(comparison: Comparison) -> Chart:
    """Return the chart of the Pareto front. Raises NotMeasurable with what is missing."""
    front = comparison.front
    if front is None:
        raise NotMeasurable(_why_no_front(comparison))
    axes = [measure(key) for key in front.axes]
    means = [
        (group, [comparison.mean(group, axis) for axis in axes])
        for group in comparison.groups
        if group.name in {*front.on, *front.beaten}
    ]
    scales = [
        _scale_of(axis, max(own[at].value for _, own in means)) for at, axis in enumerate(axes)
    ]
    rows = [_point(group, axes, own, scales, is_on=group.name in front.on) for group, own in means]
    total = len(rows)
    rows = sorted(rows, key=lambda row: row["name"] in front.beaten)[:_MOST_PARETO_GROUPS]
    legend = ((f"{_ON[2]} not beaten", _ON[0]), (f"{_BEATEN[2]} beaten", _BEATEN[0]))
    cut = _left_out(len(rows), total)
    note = f"{front_in_words(front)}; {_better(axes)} is better{cut}"
    words = first_names(
        [f"{group.name} {_mean_text(axes[0], own[0])}" for group, own in means], most=_NAMED
    )
    layers = vega.filled(_layers(rows, axes, scales))
    return Chart(
        spec=vega.framed(f"{TITLE}: {words}", _HEIGHT_PX, layers),
        table=_table(front, means, axes),
        note=note,
        legend=legend,
    )


def _named(rows: vega.Rows) -> vega.Rows:
    """Return the groups with a label: all if few, else those on the front, if those are few."""
    on = [row for row in rows if row["shape"] == _ON[1]]
    return next((few for few in (rows, on) if len(few) <= _NAMED), [])


def _left_out(count: int, total: int) -> str:
    unnamed = "; point at a dot for its name" if count > _NAMED else ""
    if count < total:
        unnamed += (
            f"; {count} of {total} groups are drawn, those on the front first: the table has all"
        )
    return unnamed


def _scale_of(measured: Metric, most: float) -> Scale:
    """Return the scale of an axis: bytes and joules with an SI prefix."""
    unit = "" if measured.unit == "1" else measured.unit
    return scale_for(unit, most) if unit in (*_PREFIXED, "frac") else Scale(1.0, unit)


def _point(
    group: Group, axes: list[Metric], means: list[Mean], scales: list[Scale], *, is_on: bool
) -> dict[str, Any]:
    colour, shape, _ = _ON if is_on else _BEATEN
    row: dict[str, Any] = {"name": group.name, "shape": shape, "colour": css(colour)}
    for letter, axis, mean, scale in zip("yx", axes[:2], means[:2], scales[:2], strict=True):
        reading = _mean_reading(group, axis, mean)
        ends = {"": reading.value, "low": reading.low, "high": reading.high}
        row |= {
            f"{letter}{end}": None if at is None else at / scale.factor for end, at in ends.items()
        }
    row["third"] = f"{head(axes[2])} {_mean_text(axes[2], means[2])}" if len(axes) > 2 else ""
    return row


def _layers(rows: vega.Rows, axes: list[Metric], scales: list[Scale]) -> list[vega.Layer]:
    titles = [_title(axis, scale) for axis, scale in zip(axes, scales, strict=True)]
    y_of, x_of = (
        partial(
            vega.axis,
            title=title,
            zero=False,
            nice=True,
            padding=24,
            format=".1%" if scale.unit == "frac" else ",.4~r",
            ticks=5,
        )
        for title, scale in zip(titles[:2], scales[:2], strict=True)
    )
    x, y = x_of("x"), y_of("y")
    across, upright = ([row for row in rows if row[end] is not None] for end in ("xlow", "ylow"))
    heads = {"name": "group", "y": titles[0], "x": titles[1]}
    if len(axes) > 2:
        heads["third"] = head(axes[2])
    words = vega.tooltip(heads, y=",.4~r", x=",.4~r")
    is_right = "scale('x', datum.x) > width / 2"
    text = partial(
        vega.text,
        x=x,
        y=y,
        align=vega.computed(f"{is_right} ? 'right' : 'left'"),
        dx=vega.computed(f"{is_right} ? -4 : 4"),
        limit=vega.computed("width / 2"),
    )
    thirds = rows if len(rows) <= _NAMED else []
    rule = partial(vega.rule, color=vega.BY_COLOUR, strokeWidth=1.5, opacity=0.7)
    return [
        rule("across", across, x=x_of("xlow"), x2="xhigh", y=y),
        rule("upright", upright, x=x, y=y_of("ylow"), y2="yhigh"),
        text("names", _named(rows), text="name", color="ink", dy=-11, fontSize=12),
        text("thirds", thirds, text="third", color="dim", dy=15, fontSize=11),
        # Above the texts, which have an outline.
        vega.signs("points", rows, x=x, y=y, tooltip=words, size=130),
    ]


def _better(axes: list[Metric]) -> str:
    """Return the better directions by metric: vertical, horizontal and the third."""
    upright = "higher" if axes[0].direction == "higher" else "lower"
    across = f"further to the {'right' if axes[1].direction == 'higher' else 'left'}"
    if len(axes) < 3:
        return f"{upright} and {across}"
    third = f"{'more' if axes[2].direction == 'higher' else 'less'} {head(axes[2])}"
    return f"{upright}, {across} and {third}"


def _title(axis: Metric, scale: Scale) -> str:
    unit = "%" if scale.unit == "frac" else scale.unit
    return head(axis) if unit in ("", head(axis)) else f"{head(axis)}, {unit}"


def _mean_reading(group: Group, measured: Metric, mean: Mean) -> Reading:
    """Return a mean as a reading, without the interval of repeats if it rests on an assumption."""
    ends = (None, None) if is_assumed(group, measured) else (mean.low, mean.high)
    return Reading(mean.value, measured.unit, "measured", *ends)


def _mean_text(axis: Metric, mean: Mean) -> str:
    return value_text(Reading(mean.value, axis.unit, "measured"))


def _table(front: Front, means: list[tuple[Group, list[Mean]]], axes: list[Metric]) -> Table:
    rows = []
    for group, own in means:
        by = front.beaten.get(group.name)
        standing = f"beaten by {beaters(by)}" if by else "on the front"
        cells = [
            f"{_mean_text(axis, mean)} ({_between(group, axis, mean)})"
            for axis, mean in zip(axes, own, strict=True)
        ]
        rows.append((group.name, *cells, standing))
    return Table(("group", *map(head, axes), "front"), tuple(rows))


def _between(group: Group, axis: Metric, mean: Mean) -> str:
    """Return the interval of a mean, or why there is none."""
    if is_assumed(group, axis):
        return "assumed"
    why = "one run: no interval" if mean.repeats == 1 else "no interval"
    return interval_text(_mean_reading(group, axis, mean)) or why


def _why_no_front(comparison: Comparison) -> str:
    """Return what the front lacks, and in which groups."""
    if len(comparison.to_compare) < 2:
        return "it needs two comparable groups"
    _, lacking = front_axes(comparison)
    reasons = [
        f"no {head(measure(key))} to compare in {first_names(names)}: {why}"
        for (key, why), names in lacking.items()
    ]
    what = "it needs two of tokens/s, J/token and memory in all groups"
    return "; ".join([what, *reasons])


RATIOS, DIFFERENCES = "ratios", "differences"
_VERDICTS: dict[State, str] = {
    "better": "shown to be better",
    "worse": "shown to be worse",
    "differs": "shown to differ",
    "not shown": "no difference shown",
    "no interval": "no interval: a single run, or too few",
}
_MOST = 60  # rows of a chart; the table below it has all


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Return all charts, drawn or with their reason."""
    baseline = comparison.groups[0].name
    contrasts = {RATIOS: f"ratio to {baseline}"}
    if any(entry.kind != "analysis" for group in comparison.groups for entry in group.entries):
        contrasts[DIFFERENCES] = f"loss minus {baseline}'s"
    return [
        *(
            chart_of(id_, title, "", partial(_contrasts, comparison, id_, title))
            for id_, title in contrasts.items()
        ),
        chart_of(PARETO, TITLE, "", lambda: pareto_chart(comparison)),
    ]


def _contrasts(comparison: Comparison, id_: str, title: str) -> Chart:
    is_ratio = id_ == RATIOS
    verdicts = [
        (pair.new.name, verdict)
        for pair in comparison.pairs
        for verdict in pair.verdicts
        if verdict.measure.is_quality != is_ratio
    ]
    if not any(verdict.contrast for _, verdict in verdicts):
        raise NotMeasurable(_why_none(comparison, [verdict for _, verdict in verdicts]))
    # Names are in the title, which wraps: on an axis a long name would be wider than the page.
    ratio_title = "times that of the baseline (logarithmic)"
    rows = tuple(
        (who, verdict.measure.phrase, contrast_in_words(verdict.contrast), verdict.words)
        for who, verdict in verdicts
    )
    dots = [
        contrast_dot(f"{who}: {head(v.measure)}", words, v.state, v.contrast)
        for (who, v), (_, _, words, _) in zip(verdicts, rows, strict=True)
    ]
    sure = f"{comparison.options.confidence * 100:g} % intervals"
    if all(dot.low is None for dot in dots):
        sure = "single runs, no intervals"
    cut = f"; the first {_MOST} of {len(dots)} rows: the table has all" if len(dots) > _MOST else ""
    return interval_chart(
        id_,
        title,
        dots[:_MOST],
        ratio_title if is_ratio else "loss minus the baseline's",
        is_ratio=is_ratio,
        words=_VERDICTS,
        table=Table(("group", "figure", "value and interval", "verdict"), rows),
        note=f"{sure}; the thin vertical line marks no difference{cut}",
    )


def _why_none(comparison: Comparison, verdicts: list[Verdict]) -> str:
    if len(comparison.groups) < 2:
        return "one group: nothing to compare it with"
    refused = [pair.new.name for pair in comparison.pairs if not pair.is_comparable]
    if refused:
        return f"not comparable with {comparison.groups[0].name}: {', '.join(refused)}"
    return "; ".join(dict.fromkeys(verdict.words for verdict in verdicts)) or "no run has a loss"
