"""The charts of a comparison: ratios with their intervals, means group by group, the front.

The same for the page that `erg compare --html` writes and for the one of `erg serve`.

The trap: a ratio that is read the wrong way round. 0.75 of the energy is better and 0.75 of the
speed is worse, so the shape of a dot says which, and the words beside the chart say it again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ergmeter.compare.comparison import impossible_entry, mean_of
from ergmeter.errors import NotMeasurable
from ergmeter.records import Reading
from ergmeter.stats.ratio import UNBOUNDED
from ergmeter.views.charts import pareto_chart
from ergmeter.views.charts.chart import Chart, Table, chart_of
from ergmeter.views.charts.interval_chart import Axis, Dot, interval_chart
from ergmeter.views.compare import contrast_in_words, head, is_assumed
from ergmeter.views.run.card import bare, interval

if TYPE_CHECKING:
    from ergmeter.compare.comparison import Comparison
    from ergmeter.compare.grouping import Group
    from ergmeter.compare.verdicts import Measure, State, Verdict
    from ergmeter.stats.ratio import Mean
    from ergmeter.views.charts.chart import Scale
    from ergmeter.views.charts.interval_chart import Kind

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


def compare_charts(found: Comparison) -> list[Chart]:
    """All of them, drawn or with their reason."""
    baseline = found.groups[0].name
    sure = f"{found.options.confidence * 100:g} % intervals"
    return [
        chart_of(
            RATIOS,
            f"ratio to {baseline}",
            "",
            lambda: _contrasts(found, RATIOS, f"ratio to {baseline}", sure=sure),
        ),
        chart_of(
            DIFFERENCES,
            f"what was learned, less that of {baseline}",
            "",
            lambda: _contrasts(
                found, DIFFERENCES, f"what was learned, less that of {baseline}", sure=sure
            ),
        ),
        chart_of(pareto_chart.ID, pareto_chart.TITLE, "", lambda: pareto_chart.pareto_chart(found)),
        *(
            chart_of(f"{MEAN}{at}", head(one), "", partial(_means, found, at, one))
            for at, one in enumerate(found.measures)
        ),
    ]


def _contrasts(found: Comparison, id_: str, title: str, *, sure: str) -> Chart:
    is_ratio = id_ == RATIOS
    told = [
        (pair.other, one)
        for pair in found.pairs
        for one in pair.verdicts
        if one.measure.is_quality != is_ratio
    ]
    if not any(one.contrast for _, one in told):
        raise NotMeasurable(_why_none(found, [one for _, one in told]))
    # Whose it is stands in the title, which wraps: a long name makes an axis wider than a page.
    axis = (
        Axis("times that of the baseline (logarithmic)", is_log=True, neutral=1.0)
        if is_ratio
        else Axis("loss less that of the baseline", neutral=0.0)
    )
    rows = tuple(
        (who, one.measure.noun, contrast_in_words(one.contrast), one.words) for who, one in told
    )
    dots = [_contrast_dot(who, one) for who, one in told]
    known = sure if any(one.low is not None for one in dots) else "single runs, no intervals"
    return interval_chart(
        id_,
        title,
        "",
        dots[:_MOST],
        axis,
        words=_VERDICTS,
        table=Table(("group", "figure", "value and interval", "verdict"), rows),
        note=f"{known}; on the thin upright line nothing differs{_cut(len(dots))}",
    )


def _cut(rows: int) -> str:
    return f"; the first {_MOST} of {rows} rows: the table has all" if rows > _MOST else ""


def _why_none(found: Comparison, told: list[Verdict]) -> str:
    if len(found.groups) < 2:
        return "one group: nothing to compare it with"
    refused = [pair.other for pair in found.pairs if not pair.is_comparable]
    if refused:
        return f"not comparable with {found.groups[0].name}: {', '.join(refused)}"
    return "; ".join(dict.fromkeys(one.words for one in told)) or "no run tells a loss"


def _contrast_dot(who: str, one: Verdict) -> Dot:
    kind = _KINDS[one.state]
    name = f"{who}: {head(one.measure)}"
    said = contrast_in_words(one.contrast)
    if one.contrast is None:
        return Dot(name, None, None, None, said, kind)
    return Dot(name, one.contrast.value, one.contrast.low, one.contrast.high, said, kind)


def _means(found: Comparison, at: int, measured: Measure) -> Chart:
    dots, rows = [], []
    scale = pareto_chart.scale_of(measured, _most(found, measured))
    for group in found.groups:
        dot, why = _mean_dot(found, group, measured, scale)
        dots.append(dot)
        rows.append((group.name, str(len(group.entries)), dot.said, why))
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


def _most(found: Comparison, measured: Measure) -> float:
    values = [e.value(measured.key) for group in found.groups for e in group.entries]
    known = [one for one in values if one is not None]
    if not known:
        raise NotMeasurable(found.groups[0].entries[0].why_not(measured.key))
    return max(known)


def _mean_dot(found: Comparison, group: Group, measured: Measure, scale: Scale) -> tuple[Dot, str]:
    """A group's mean, and what to know of it; without one, why there is none."""
    try:
        mean = mean_of(group, measured, confidence=found.options.confidence)
    except NotMeasurable as error:
        wrong = impossible_entry(group, measured.key)
        said = "absent" if wrong is None else bare(wrong.figures[measured.key])
        return Dot(group.name, None, None, None, said, "absent"), str(error)
    low, high = (None, None) if is_assumed(group, measured) else (mean.low, mean.high)
    reading = Reading(mean.value, measured.unit, "measured", low, high)
    said = bare(reading)  # the axis has the unit, and a narrow page no room for it
    between = interval(reading).removesuffix(f" {measured.unit}")
    at, low, high = (None if one is None else one / scale.factor for one in (mean.value, low, high))
    why = _why(group, measured, mean)
    if low is None:
        short = "one run" if mean.repeats == 1 else "no interval"
        short = "assumed" if is_assumed(group, measured) else short
        return Dot(group.name, at, None, None, f"{said}, {short}", "bare"), why
    alike = "in every run" if low == high else f"({between})"
    return Dot(group.name, at, low, high, f"{said} {alike}", "plain"), why


def _why(group: Group, measured: Measure, mean: Mean) -> str:
    lacking = [one for one in group.entries if one.value(measured.key) is None]
    if lacking:
        why = lacking[0].why_not(measured.key)
        return f"{len(lacking)} of {len(group.entries)} runs lack it: {why}"
    if is_assumed(group, measured):
        return "rests on an assumption: the notes say which"
    if mean.repeats == 1:
        return "a single run does not say how runs scatter"
    return UNBOUNDED if mean.low is None else ""
