"""Charts of a run that are not over time.

MFU ladder, waterfall, time and energy by part, step times, roofline. All bars start at 0 and
carry their value. In the waterfall, unattributed loss is one striped bar, and a gain goes up.
The step-time histogram lists its outliers in the data table. In the roofline, point and roof are
of one device and one data type, named in the note.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import catalogue, in_view, refusal
from ergmeter.metrics.explain.flops import Roofline, roofline
from ergmeter.metrics.time_breakdown import step_time_distribution, time_breakdown
from ergmeter.records import Missing, Reading, Summary, interval_text, value_text
from ergmeter.units import duration, grouped, scaled, significant
from ergmeter.views.charts import vega
from ergmeter.views.charts.chart import Chart, Scale, Table, chart_of, css, rounded, scale_for
from ergmeter.views.reading_text import short_reason
from ergmeter.views.run.explain import WATERFALL, waterfall_chart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.waterfall import Explanation
    from ergmeter.metrics.time_breakdown import StepTimeDistribution
    from ergmeter.runlog.reader import Run

IDS = ("ladder", "waterfall", "time_spent", "energy_spent", "step_times", "roofline")
_TIME_SPENT, _ENERGY_SPENT = "where the time went", "where the joules went"


def figure_charts(evidence: Evidence, summary: Summary, explained: Explanation) -> list[Chart]:
    """Return all charts, drawn or with their reason."""
    return [
        chart_of("ladder", "from GPU util to MFU", "%", lambda: _ladder(evidence.run, summary)),
        chart_of("waterfall", WATERFALL, "%", lambda: waterfall_chart(explained)),
        chart_of("time_spent", _TIME_SPENT, "s", lambda: _time_spent(evidence)),
        chart_of("energy_spent", _ENERGY_SPENT, "J", lambda: _energy_spent(evidence)),
        chart_of("step_times", "step times", "s", lambda: _step_times(evidence)),
        chart_of("roofline", "roofline", "FLOP/s", lambda: _roofline(evidence)),
    ]


# Bars with a line of text above each.


def _bars(
    description: str, rows: vega.Rows, *, title: str, is_share: bool = False
) -> dict[str, Any]:
    """Return bars from 0 with their values above them."""
    order = [row["name"] for row in rows]
    most = max((row["v"] for row in rows if row["v"] is not None), default=1.0) or 1.0
    y = vega.axis("name", None, kind="nominal", sort=order, labelLimit=170)
    x = vega.axis(
        "v",
        title,
        domain=(0, 1.0 if is_share and most <= 1 else most),
        nice=False,
        format=".0%" if is_share else ",.6~r",
        ticks=4,
    )
    words = vega.tooltip({"name": "part", "said": "figure"})
    bars = partial(vega.bar, "points", rows, band=0.45, yOffset=6, color=vega.constant(css("c1")))
    layers = [bars(x=x, y=y, tooltip=words), vega.bar_texts(y)]
    return vega.framed(description, 30 * len(rows), layers)


# Step times.


_LINES = {"median": "c2", "95th percentile": "c4"}


def _step_times(evidence: Evidence) -> Chart:
    """Return the histogram of step times. Raises NotMeasurable for too few steps."""
    times = step_time_distribution(evidence)
    scale = scale_for("s", float(times.edges_s[-1]))
    text = f"median {duration(times.median_s)}, 95th percentile {duration(times.p95_s)}"
    if times.beyond:
        longest = duration(times.outliers[0].took_s)
        text += f", {times.beyond} longer than the last bar, up to {longest}"
    note = f"{text}; {times.note}"
    if times.stalled > len(times.outliers):
        note += f"; the longest {len(times.outliers)} of {times.stalled} outliers are in the table"
    lines = _percentile_lines(times, scale)
    layers = [_step_time_bars(times, scale), lines]
    return Chart(
        unit=scale.unit,
        spec=vega.framed(f"distribution of step times: {text}", 190, layers),
        table=_outliers(times),
        note=note,
        legend=tuple((line["s"], _LINES[line["s"]]) for line in lines["data"]["values"]),
    )


def _step_time_bars(distribution: StepTimeDistribution, scale: Scale) -> vega.Layer:
    edges = [rounded(edge, scale) for edge in distribution.edges_s.tolist()]
    counts = distribution.counts.tolist()
    rows = [
        {"t": low, "e": high, "n": count}
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    x = vega.axis(
        "t",
        f"step time, {scale.unit}",
        domain=(edges[0], edges[-1]),
        zero=False,
        nice=False,
        is_binned=True,
        grid=False,
        format=",.6~r",
        tick_px=70,
    )
    y = vega.axis("n", "steps", ticks=5, tickMinStep=1)
    titles = {"t": f"from, {scale.unit}", "e": f"to, {scale.unit}", "n": "steps"}
    words = vega.tooltip(titles, t=".5~g", e=".5~g")
    return vega.bar("points", rows, x=x, x2="e", y=y, tooltip=words, color="c1", binSpacing=1)


def _percentile_lines(distribution: StepTimeDistribution, scale: Scale) -> vega.Layer:
    at_s = dict(zip(_LINES, (distribution.median_s, distribution.p95_s), strict=True))
    rows = [
        {"v": rounded(line_s, scale), "s": name}
        for name, line_s in at_s.items()
        if line_s <= float(distribution.edges_s[-1])
    ]
    colours = vega.by_value("s", {name: css(colour) for name, colour in _LINES.items()})
    return vega.rule("lines", rows, x=vega.axis("v"), color=colours, strokeWidth=2)


def _outliers(distribution: StepTimeDistribution) -> Table:
    rows = tuple(
        (
            "-" if outlier.index is None else str(outlier.index),
            duration(outlier.at_s),
            duration(outlier.took_s),
            significant(outlier.times, 3),
        )
        for outlier in distribution.outliers
    )
    none = (("no step took twice the median", "", "", ""),)
    return Table(("step", "at", "took", "times the median"), rows or none)


# Roofline.


_TERA = 1e12
_REACH = 100.0  # times the ridge, to either side
_ROOM = 10.0  # times the run's own work per byte, for its name to the right of it
_ABOVE = 2.5  # times the highest roof, for the name on it


def _roofline(evidence: Evidence) -> Chart:
    """Return the roofline. Raises NotMeasurable with what is missing."""
    point = roofline(evidence)
    text = f"{significant(point.flops_per_byte)} FLOP/B, {scaled(point.flops_per_s, 'FLOP/s')}"
    described = f"roofline: this run at {text}, under the {point.bound_by} roof"
    spec = vega.framed(described, 230, _roofline_layers(point))
    return Chart(unit="TFLOP/s", spec=spec, table=_roofline_table(point), note=point.note)


def _roofline_layers(roofline: Roofline) -> list[vega.Layer]:
    ridge, bandwidth = roofline.ridge_flops_per_byte, roofline.bandwidth_bytes_per_s
    left = min(ridge / _REACH, roofline.flops_per_byte / 2)
    right = max(ridge * _REACH, roofline.flops_per_byte * _ROOM)
    peak = roofline.peak.flops_per_s / _TERA
    reached = roofline.flops_per_s / _TERA
    roof = [
        {"x": left, "y": left * bandwidth / _TERA},
        {"x": ridge, "y": peak},
        {"x": right, "y": peak},
    ]
    lowest = min(roof[0]["y"], reached) / 2
    log = partial(vega.axis, is_log=True, nice=False, grid=False)
    width, height = (left, right), (lowest, max(peak, reached) * _ABOVE)
    x = log("x", "FLOP per byte of device memory", domain=width, ticks=5, format="~s")
    y = log("y", "TFLOP/s", domain=height, ticks=4, format=",.6~r")
    words = vega.tooltip({"s": "point", "x": "FLOP/B", "y": "TFLOP/s"}, x=".4~g", y=".4~g")
    run = [{"x": roofline.flops_per_byte, "y": reached, "s": "this run"}]
    slope = math.sqrt(left * ridge)
    on_slope = [{"x": slope, "y": slope * bandwidth / _TERA}]
    at = partial(vega.mark, x=x, y=y)
    name = partial(at, "text", color="ink", fontSize=11)
    above = partial(name, align="right", baseline="bottom")
    return [
        at("line", "roof", roof, color="c1", strokeWidth=2),
        at("point", "points", run, tooltip=words, filled=True, size=140, color="c2"),
        # Below and to the right there is no roof, wherever the run stands under it.
        name("points", None, text="s", align="left", baseline="top", dx=8, dy=4),
        # Left of the slope nothing overlaps the bandwidth.
        above("bandwidth", on_slope, text=vega.constant(scaled(bandwidth, "B/s")), dx=-6, dy=-3),
        above(
            "peak",
            [{"x": right, "y": peak}],
            text=vega.constant(scaled(roofline.peak.flops_per_s, "FLOP/s")),
            dy=-5,
        ),
    ]


def _roofline_table(roofline: Roofline) -> Table:
    return Table(
        ("figure", "value"),
        (
            ("work per byte", f"{significant(roofline.flops_per_byte)} FLOP/B"),
            ("reached", scaled(roofline.flops_per_s, "FLOP/s")),
            ("roof there", f"{scaled(roofline.roof_flops_per_s, 'FLOP/s')} ({roofline.bound_by})"),
            ("share of the roof", f"{significant(roofline.roof_frac * 100, 3)} %"),
            ("ridge", f"{significant(roofline.ridge_flops_per_byte)} FLOP/B"),
        ),
    )


# Ladder.


def _ladder(run: Run, summary: Summary) -> Chart:
    """Return bars of metrics from the most flattering to the most meaningful."""
    results = {catalogue()[key].title: summary.readings[key] for key in in_view("ladder")}
    missing = grouped(
        (result.reason, title) for title, result in results.items() if isinstance(result, Missing)
    )
    readings = {title: r for title, r in results.items() if isinstance(r, Reading)}
    if not readings:
        raise NotMeasurable("; ".join(missing))
    rows = [
        {
            "name": title,
            "v": result.value if isinstance(result, Reading) and not result.impossible else None,
            "said": value_text(result) if isinstance(result, Reading) else "absent",
        }
        for title, result in results.items()
    ]
    table_rows = (
        (title, value_text(result), interval_text(result), result.basis)
        if isinstance(result, Reading)
        else (title, "-", "", result.reason)
        for title, result in results.items()
    )
    notes = [
        "a busy device may compute little: each row is closer to useful work than that above",
        *(f"no {', '.join(titles)}: {short_reason(why, run)}" for why, titles in missing.items()),
        *(
            f"{title} has no bar: {refusal(reading)}"
            for title, reading in readings.items()
            if reading.impossible
        ),
    ]
    return Chart(
        unit="%",
        spec=_bars(f"ladder: {_described(rows)}", rows, title="%", is_share=True),
        table=Table(("rung", "value", "interval", "how"), tuple(table_rows)),
        note="; ".join(notes),
    )


def _described(rows: vega.Rows) -> str:
    return ", ".join(f"{row['name']} {row['said']}" for row in rows)


# Time and energy by part.


def _time_spent(evidence: Evidence) -> Chart:
    breakdown = time_breakdown(evidence)
    scale = scale_for("s", breakdown.whole_s)
    parts = (
        (part.title, part.seconds, duration(part.seconds), part.time_frac)
        for part in breakdown.parts
    )
    return _breakdown_chart(_TIME_SPENT, scale, parts, duration(breakdown.whole_s), breakdown.note)


def _energy_spent(evidence: Evidence) -> Chart:
    breakdown = time_breakdown(evidence)
    if breakdown.whole_j is None:
        raise NotMeasurable(breakdown.why_no_joules)
    scale = scale_for("J", breakdown.whole_j)
    parts = (
        (part.title, part.joules, scaled(part.joules, "J"), part.joules_frac)
        for part in breakdown.parts
        if part.joules is not None and part.joules_frac is not None
    )
    note = f"{breakdown.joules_basis}; {breakdown.note}"
    if breakdown.unread_s >= 0.1:
        note += f"; {duration(breakdown.unread_s)} of the run have no readings"
    return _breakdown_chart(_ENERGY_SPENT, scale, parts, scaled(breakdown.whole_j, "J"), note)


def _breakdown_chart(
    title: str, scale: Scale, parts: Iterable[tuple[str, float, str, float]], total: str, note: str
) -> Chart:
    """Return the bars of parts: title, amount, its text, and its share of the whole."""
    rows: vega.Rows = [
        {"name": name, "v": rounded(amount, scale), "said": f"{text} ({_percent(share_frac)})"}
        for name, amount, text, share_frac in parts
    ]
    table_rows = (*((row["name"], row["said"]) for row in rows), ("whole run", total))
    spec = _bars(f"{title}: {_described(rows)}", rows, title=scale.unit)
    table = Table(("part", "amount"), table_rows)
    return Chart(unit=scale.unit, spec=spec, table=table, note=f"{total} in all; {note}")


def _percent(share_frac: float) -> str:
    return f"{significant(share_frac * 100, 3)} %" if not 0 < share_frac < 0.001 else "< 0.1 %"
