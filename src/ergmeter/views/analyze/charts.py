"""The charts of `erg analyze`: score factors, throughput by step, spread over repeats.

The score's factors are drawn from 1 on a logarithmic axis: 2 is as long as 1/2, and the lengths of
all factors add up to the score. Steps outside the throughput mean, such as compilation, are grey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.neuron.compare import OutputComparison
from ergmeter.neuron.earlier_output import METRICS
from ergmeter.neuron.kernels import LOWER_BOUND, UNCERTAIN
from ergmeter.neuron.throughput import PaceLine, pace_line
from ergmeter.units import significant
from ergmeter.views.charts.chart import (
    Chart,
    Scale,
    Table,
    filled,
    framed,
    layer,
    quantity,
    rounded,
)
from ergmeter.views.charts.interval_chart import Axis, Dot, interval_chart
from ergmeter.views.charts.time_axis import dots, value_axis, value_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.neuron.analysis import Analysis
    from ergmeter.neuron.score import Score


def spread_charts(
    comparison: OutputComparison, names: dict[str, str], heads: tuple[str, ...]
) -> Iterator[Chart]:
    """Yield a chart for each metric that can be compared between outputs."""
    for metric, title in zip(METRICS, heads, strict=True):
        points: list[Dot] = []
        apart = []
        for number, group in enumerate(comparison.groups, start=1):
            for output in group.outputs:
                value, name = output.value(metric, convention=comparison.convention), output.path
                if value is not None:
                    text, label = significant(value, 5), f"{number}: {names[name]}"
                    points.append(Dot(label, value, None, None, text, "bare"))
            spread = group.spreads.get(metric)
            if spread is not None and (deviation := spread.standard_deviation) is not None:
                mean, text = spread.mean, significant(spread.mean, 5)
                ends, label = (mean - deviation, mean + deviation), f"{number}: mean"
                points.append(Dot(label, mean, *ends, text, "plain"))
            if metric in group.not_comparable:
                apart.append(str(number))
        if points:
            yield interval_chart(
                f"spread-{metric}", title, "", points, Axis(title, format=".5~g"),
                words={"bare": "an output", "plain": "mean ± standard deviation"},
                table=Table(("output", title), tuple((d.name, d.value_text) for d in points)),
                note=f"group {', '.join(apart)} is not comparable to the one before it"
                if apart
                else "",
            )  # fmt: skip


_MARKS = {"": "", LOWER_BOUND: "at least ", UNCERTAIN: "about "}


def score_chart(score: Score, table: Table) -> Chart:
    """Return the chart of the score's factors; `table` has their numbers."""
    points = [
        _dot(factor.name, factor.ratio, f"{_MARKS[factor.mark]}x") for factor in score.factors()
    ]
    points.append(_dot("score", score.value, _MARKS[score.mark].strip()))
    return interval_chart(
        "score_factors", "factors of the score", "ratio, log scale", points,
        Axis("ratio, log scale (1 changes nothing)", is_log=True, neutral=1.0, format=".4~g"),
        words={"better": "raises the score", "worse": "lowers it"}, table=table,
    )  # fmt: skip


def _dot(name: str, ratio: float | None, sign: str) -> Dot:
    if ratio is None or ratio <= 0:
        return Dot(name, None, None, None, "not known" if ratio is None else f"{sign} 0", "absent")
    text = f"{sign} {significant(ratio, 5)}".strip()
    return Dot(
        name, ratio, min(1.0, ratio), max(1.0, ratio), text, "better" if ratio >= 1 else "worse"
    )


_POINTS = 1600
_UNIT = "sequences/s"
_LINE = "a line of the log"
_PACE_CHART_LEGEND = ((_LINE, "c1"), ("what is taken", "c2"))


def pace_chart(analysis: Analysis) -> Chart:
    """Return the throughput over the log's steps. Raises NotMeasurable without a pace."""
    details, taken = analysis.details, analysis.pace.seq_per_s
    if details is None or details.log is None:
        raise NotMeasurable("the original keeps no steps: leave out --compat")
    pace = pace_line(details.log, details.job, points=_POINTS)
    line = pace.line
    (low, low_at), (high, high_at) = line.lowest, line.highest
    ends = f"from {significant(low)} to {significant(high)} {_UNIT}"
    bounds = "; lowest and highest of each stretch are drawn" if line.is_bounded else ""
    before = f"before {pace.over} {pace.counted_from:,.0f}"
    grey = f"; grey is not counted, it is {before}" if pace.counted_from > line.t_s[0] else ""
    note = f"{pace.how}{grey}"
    taken_of = "of the counted ones" if analysis.pace.is_from_log else "as given"
    table = Table(
        ("of the log's last run", _UNIT, f"at {pace.over}"),
        (
            ("lowest", significant(low), f"{low_at:,.0f}"),
            ("highest", significant(high), f"{high_at:,.0f}"),
            ("taken", *(("-", "-") if taken is None else (significant(taken), taken_of))),
        ),
    )
    return Chart(
        "pace",
        f"throughput by {pace.over}",
        _UNIT,
        framed(f"throughput by {pace.over}: {ends}", 190, _pace_chart_layers(pace, taken)),
        table,
        note + bounds,
        legend=_PACE_CHART_LEGEND if taken is not None else _PACE_CHART_LEGEND[:1],
    )


def _pace_chart_layers(pace_line: PaceLine, taken: float | None) -> list[dict[str, Any]]:
    line, scale = pace_line.line, Scale(1.0, _UNIT)
    rows = [
        {"t": t, "v": rounded(value, scale)}
        for t, value in zip(line.t_s.tolist(), line.values.tolist(), strict=True)
    ]
    first, counted_from = rows[0]["t"], pace_line.counted_from
    domain = [first, max(rows[-1]["t"], first + 1)]
    ticks = {"expr": "max(3, floor(width / 70))"}
    x = quantity(
        "t", pace_line.over, scale={"domain": domain, "nice": False, "zero": False},
        axis={"grid": False, "format": ",d", "tickMinStep": 1, "tickCount": ticks},
    )  # fmt: skip
    y, words = value_axis(rows, scale, has_zero=True), value_words(scale)
    drawn = {"type": "line", "clip": True, "strokeWidth": 1.5, "color": "var(--c1)"}
    drawn |= {"point": dots(line.readings, 14)}
    encoding = {"x": x, "y": y, "tooltip": [quantity("t", pace_line.over, format=",d"), words]}
    grey = [{"t": first, "e": counted_from}] if counted_from > first else []
    shade = {"type": "rect", "clip": True, "color": "var(--shade)"}
    level = [] if taken is None else [{"v": rounded(taken, scale)}]
    ruled = {"type": "rule", "color": "var(--c2)", "strokeWidth": 1.5}
    return filled(
        [
            layer("uncounted", grey, shade, {"x": x, "x2": {"field": "e"}}),
            layer("points", rows, drawn, encoding),
            layer("taken", level, ruled, {"y": {"field": "v", "type": "quantitative"}}),
        ]
    )
