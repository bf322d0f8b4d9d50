"""Charts of a run that are not over time.

MFU ladder, waterfall, time and energy by part, step times, roofline. All bars start at 0 and
carry their value. In the waterfall, unattributed loss is one striped bar, and a gain goes up.
The step-time histogram lists its outliers in the data table. In the roofline, point and roof are
of one device and one data type, named in the note.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import catalogue, in_view, refusal
from ergmeter.metrics.explain.waterfall import Explanation, WaterfallLevel, levels
from ergmeter.metrics.roofline import Roofline, roofline
from ergmeter.metrics.time_breakdown import step_time_distribution, time_breakdown
from ergmeter.records import Missing, Reading, Summary
from ergmeter.units import duration, grouped, scaled, significant
from ergmeter.views.charts.chart import (
    Chart,
    Scale,
    Table,
    chart_of,
    framed,
    layer,
    nominal_colours,
    quantity,
    rounded,
    scale_for,
    tooltip,
)
from ergmeter.views.run.card import interval, short_reason, value
from ergmeter.views.run.explain import (
    NOTHING,
    WATERFALL,
    energy_note,
    facts,
    joules,
    share,
    total_joules,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.time_breakdown import StepTimeDistribution
    from ergmeter.runlog.reader import Run

IDS = ("ladder", "waterfall", "time_spent", "energy_spent", "step_times", "roofline")


def figure_charts(evidence: Evidence, summary: Summary, explained: Explanation) -> list[Chart]:
    """Return all charts, drawn or with their reason."""
    return [
        chart_of("ladder", _LADDER_TITLE, "%", lambda: _ladder(evidence.run, summary)),
        chart_of("waterfall", WATERFALL, "%", lambda: waterfall_chart(explained)),
        chart_of("time_spent", "where the time went", "s", lambda: _time_spent(evidence)),
        chart_of("energy_spent", "where the joules went", "J", lambda: _energy_spent(evidence)),
        chart_of("step_times", "step times", "s", lambda: _step_times(evidence)),
        chart_of("roofline", "roofline", "FLOP/s", lambda: _roofline(evidence)),
    ]


# Bars with a line of text above each.


_BAR_TEXT = {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -3}


def _bar_texts(y: dict[str, Any], **mark: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the layer of the texts `said` above the bars of the layer `points`."""
    encoding = {
        "x": {"value": 0},
        "y": y,
        "text": {"field": "said"},
        "color": {"value": "var(--ink)"},
    }
    return layer("points", None, {**_BAR_TEXT, "fontSize": 11, **mark}, encoding)


def _bars(
    description: str, rows: list[dict[str, Any]], *, title: str, is_share: bool = False
) -> dict[str, Any]:
    """Return bars from 0 with their values above them."""
    order = [row["name"] for row in rows]
    most = max((row["v"] for row in rows if row["v"] is not None), default=1.0) or 1.0
    y: dict[str, Any] = {"field": "name", "type": "nominal", "sort": order, "title": None}
    y["axis"] = {"labelLimit": 170}
    x = quantity(
        "v",
        title,
        scale={"domain": [0, 1.0 if is_share and most <= 1 else most], "nice": False},
        axis={"format": ".0%" if is_share else ",.6~r", "tickCount": 4},
    )
    encoding = {
        "x": x,
        "y": y,
        "color": {"value": "var(--c1)"},
        "tooltip": tooltip({"name": "part", "said": "figure"}),
    }
    bar = {"type": "bar", "height": {"band": 0.45}, "yOffset": 6}
    layers = [layer("points", rows, bar, encoding), _bar_texts(y)]
    return framed(description, 30 * len(rows), layers)


# Waterfall.


PEAK, LOST, GAINED, LEFT = "peak", "lost", "gained", "what is left"
ONE_BLOCK = "lost, and not told apart"
_COLOURS = {PEAK: "c8", LOST: "c2", ONE_BLOCK: "c4", GAINED: "c3", LEFT: "c1"}
_STRIPED = "striped"  # its CSS class on the page
_ROW = 36  # pixels: a line of text and a bar below it
_STRIPE_FRAC = 0.01  # from one stripe to the next
# Of a row: the fields that the tooltip and the table show.
_WATERFALL_HEADS = {
    "name": "block",
    "share": "of the peak",
    "joules": "joules",
    "how": "how",
    "why": "is",
}


def waterfall_chart(explanation: Explanation) -> Chart:
    """Return the waterfall. Raises NotMeasurable if nothing is known."""
    if explanation.achieved is None:
        reasons = "; ".join(dict.fromkeys(explanation.missing.values()))
        raise NotMeasurable(f"{NOTHING}{f' ({reasons})' if reasons else ''}")
    rows = _waterfall_rows(explanation)
    kinds = [kind for kind in _COLOURS if any(row["kind"] == kind for row in rows)]
    described = ", ".join(row["said"] for row in rows)
    evidence_texts = ("", *(facts(level.block) for level in levels(explanation)))
    table_rows = (
        (*(row[field] for field in _WATERFALL_HEADS), text)
        for row, text in zip(rows, evidence_texts, strict=True)
    )
    return Chart(
        "waterfall",
        WATERFALL,
        "%",
        framed(f"waterfall: {described}", _ROW * len(rows), _waterfall_layers(rows, kinds)),
        Table((*_WATERFALL_HEADS.values(), "seen"), tuple(table_rows)),
        "; ".join(filter(None, (f"100 % is {explanation.of}", energy_note(explanation)))),
        legend=tuple((kind, _legend_class(kind)) for kind in kinds if kind != PEAK),
    )


def _legend_class(kind: str) -> str:
    return f"{_COLOURS[kind]} {_STRIPED}" if kind == ONE_BLOCK else _COLOURS[kind]


def _waterfall_rows(explanation: Explanation) -> list[dict[str, Any]]:
    peak = {"name": "peak", "v": 1.0, "low": 0.0, "high": 1.0, "kind": PEAK, "share": "100 %"}
    peak |= {"joules": total_joules(explanation) or "-", "how": "", "why": explanation.of}
    rows = [peak, *(_waterfall_row(level, explanation) for level in levels(explanation))]
    for at, row in enumerate(rows):
        drew = f" · {row['joules']}" if row["joules"] != "-" else ""
        row |= {"at": at, "said": f"{row['name']} · {row['share']}{drew}"}
    return rows


def _waterfall_row(level: WaterfallLevel, explanation: Explanation) -> dict[str, Any]:
    block = level.block
    return {
        "name": block.title,
        "v": block.share_frac,
        "low": min(level.from_frac, level.to_frac),
        "high": max(level.from_frac, level.to_frac),
        "kind": _bar_kind(level, explanation),
        "share": share(block),
        "joules": joules(block) or "-",
        "how": block.basis,
        "why": block.why,
    }


def _bar_kind(level: WaterfallLevel, explanation: Explanation) -> str:
    if level.block is explanation.achieved:
        return LEFT
    if level.block.share_frac < 0:
        return GAINED
    return ONE_BLOCK if level.block.is_merged else LOST


def _waterfall_layers(rows: list[dict[str, Any]], kinds: list[str]) -> list[dict[str, Any]]:
    y = {"field": "at", "type": "ordinal", "axis": None}
    x = quantity(
        "low",
        "% of the peak",
        scale={"domain": [0, max(row["high"] for row in rows)], "nice": False},
        axis={"format": ".0%", "tickCount": 4, "grid": False},
    )
    edge = {
        **nominal_colours("kind", {kind: f"var(--{_COLOURS[kind]})" for kind in kinds}),
        "legend": None,
    }
    colour = {**edge, "legend": {"values": [kind for kind in kinds if kind != PEAK]}}
    position = {"x": x, "x2": {"field": "high"}, "y": y}
    encoding = {**position, "color": colour, "stroke": edge, "tooltip": tooltip(_WATERFALL_HEADS)}
    bar = {"type": "bar", "height": {"band": 0.4}, "yOffset": 7}
    return [
        layer("points", rows, {**bar, "strokeWidth": 1}, encoding),  # the smallest is still a line
        layer("stripes", _stripes(rows), {**bar, "color": "var(--bg)", "tooltip": None}, position),
        _bar_texts(y, limit={"expr": "width"}),
    ]


def _stripes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the gaps that stripe a bar of several causes."""
    stripes = []
    for row in rows:
        if row["kind"] == ONE_BLOCK:
            first, last = (math.ceil(row[edge] / _STRIPE_FRAC) for edge in ("low", "high"))
            lows = (max(row["low"], number * _STRIPE_FRAC) for number in range(first, last))
            stripes += [
                {"at": row["at"], "low": low, "high": min(low + _STRIPE_FRAC / 3, row["high"])}
                for low in lows
            ]
    return stripes


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
    return Chart(
        "step_times",
        "step times",
        scale.unit,
        framed(f"distribution of step times: {text}", 190, [_step_time_bars(times, scale), lines]),
        _outliers(times),
        note,
        legend=tuple((line["s"], _LINES[line["s"]]) for line in lines["data"]["values"]),
    )


def _step_time_bars(distribution: StepTimeDistribution, scale: Scale) -> dict[str, Any]:
    edges = [rounded(edge, scale) for edge in distribution.edges_s.tolist()]
    counts = distribution.counts.tolist()
    rows = [
        {"t": low, "e": high, "n": count}
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    ticks = {"expr": "max(3, floor(width / 70))"}
    x = quantity(
        "t",
        f"step time, {scale.unit}",
        bin="binned",
        scale={"zero": False, "nice": False, "domain": [edges[0], edges[-1]]},
        axis={"grid": False, "format": ",.6~r", "tickCount": ticks},
    )
    titles = {"t": f"from, {scale.unit}", "e": f"to, {scale.unit}", "n": "steps"}
    encoding = {
        "x": x,
        "x2": {"field": "e"},
        "y": quantity("n", "steps", axis={"tickCount": 5, "tickMinStep": 1}),
        "tooltip": tooltip(titles, t=".5~g", e=".5~g"),
    }
    return layer("points", rows, {"type": "bar", "color": "var(--c1)", "binSpacing": 1}, encoding)


def _percentile_lines(distribution: StepTimeDistribution, scale: Scale) -> dict[str, Any]:
    at_s = dict(zip(_LINES, (distribution.median_s, distribution.p95_s), strict=True))
    rows = [
        {"v": rounded(line_s, scale), "s": name}
        for name, line_s in at_s.items()
        if line_s <= float(distribution.edges_s[-1])
    ]
    colour = nominal_colours("s", {name: f"var(--{colour})" for name, colour in _LINES.items()})
    encoding = {"x": {"field": "v", "type": "quantitative"}, "color": colour}
    return layer("lines", rows, {"type": "rule", "strokeWidth": 2}, encoding)


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
_NAME = {"type": "text", "color": "var(--ink)", "fontSize": 11}


def _roofline(evidence: Evidence) -> Chart:
    """Return the roofline. Raises NotMeasurable with what is missing."""
    point = roofline(evidence)
    text = f"{significant(point.flops_per_byte)} FLOP/B, {scaled(point.flops_per_s, 'FLOP/s')}"
    described = f"roofline: this run at {text}, under the {point.bound_by} roof"
    spec = framed(described, 230, _roofline_layers(point))
    return Chart("roofline", "roofline", "TFLOP/s", spec, _roofline_table(point), point.note)


def _roofline_layers(roofline: Roofline) -> list[dict[str, Any]]:
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
    axes = {
        "x": _log_axis("x", "FLOP per byte of device memory", left, right, ticks=5, format="~s"),
        "y": _log_axis(
            "y", "TFLOP/s", lowest, max(peak, reached) * _ABOVE, ticks=4, format=",.6~r"
        ),
    }
    titles = {"s": "point", "x": "FLOP/B", "y": "TFLOP/s"}
    encoding = {**axes, "tooltip": tooltip(titles, x=".4~g", y=".4~g")}
    run = [{"x": roofline.flops_per_byte, "y": reached, "s": "this run"}]
    point = {"type": "point", "filled": True, "size": 140, "color": "var(--c2)"}
    # Below and to the right there is no roof, wherever the run stands under it.
    run_name = {**_NAME, "align": "left", "baseline": "top", "dx": 8, "dy": 4}
    # Left of the slope nothing overlaps the bandwidth.
    bandwidth_name = {**_NAME, "align": "right", "baseline": "bottom", "dx": -6, "dy": -3}
    slope = math.sqrt(left * ridge)
    on_slope = [{"x": slope, "y": slope * bandwidth / _TERA}]
    peak_name = {**_NAME, "align": "right", "baseline": "bottom", "dy": -5}
    peak_text = {"value": scaled(roofline.peak.flops_per_s, "FLOP/s")}
    return [
        layer("roof", roof, {"type": "line", "color": "var(--c1)", "strokeWidth": 2}, axes),
        layer("points", run, point, encoding),
        layer("points", None, run_name, {**axes, "text": {"field": "s"}}),
        layer(
            "bandwidth",
            on_slope,
            bandwidth_name,
            {**axes, "text": {"value": scaled(bandwidth, "B/s")}},
        ),
        layer("peak", [{"x": right, "y": peak}], peak_name, {**axes, "text": peak_text}),
    ]


def _log_axis(
    field: str, title: str, low: float, high: float, *, ticks: int, format: str
) -> dict[str, Any]:
    scale = {"type": "log", "nice": False, "domain": [low, high]}
    axis = {"format": format, "tickCount": ticks, "grid": False}
    return quantity(field, title, scale=scale, axis=axis)


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


_LADDER_TITLE = "from GPU util to MFU"


def _ladder(run: Run, summary: Summary) -> Chart:
    """From the most flattering metric to the most meaningful."""
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
            "said": value(result) if isinstance(result, Reading) else "absent",
        }
        for title, result in results.items()
    ]
    table_rows = (
        (title, value(result), interval(result), result.basis)
        if isinstance(result, Reading)
        else (title, "-", "", result.reason)
        for title, result in results.items()
    )
    notes = [
        "each rung says less than the one above it seems to: busy is not computing",
        *(f"no {', '.join(titles)}: {short_reason(why, run)}" for why, titles in missing.items()),
        *(
            f"{title} has no bar: {refusal(reading)}"
            for title, reading in readings.items()
            if reading.impossible
        ),
    ]
    return Chart(
        "ladder",
        _LADDER_TITLE,
        "%",
        _bars(f"ladder: {_described(rows)}", rows, title="%", is_share=True),
        Table(("rung", "value", "interval", "how"), tuple(table_rows)),
        "; ".join(notes),
    )


def _described(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['name']} {row['said']}" for row in rows)


# Time and energy by part.


def _time_spent(evidence: Evidence) -> Chart:
    breakdown = time_breakdown(evidence)
    scale = scale_for("s", breakdown.whole_s)
    parts = (
        (part.title, part.seconds, duration(part.seconds), part.time_frac)
        for part in breakdown.parts
    )
    total = duration(breakdown.whole_s)
    return _breakdown_chart(
        "time_spent", "where the time went", scale, parts, total, breakdown.note
    )


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
        note += f"; {duration(breakdown.unread_s)} of the run's life were not read"
    total = scaled(breakdown.whole_j, "J")
    return _breakdown_chart("energy_spent", "where the joules went", scale, parts, total, note)


def _breakdown_chart(
    id_: str,
    title: str,
    scale: Scale,
    parts: Iterable[tuple[str, float, str, float]],
    total: str,
    note: str,
) -> Chart:
    """Return the bars of parts: title, amount, its text, and its share of the whole."""
    rows: list[dict[str, Any]] = [
        {"name": name, "v": rounded(amount, scale), "said": f"{text} ({_percent(share_frac)})"}
        for name, amount, text, share_frac in parts
    ]
    table_rows = (*((row["name"], row["said"]) for row in rows), ("whole run", total))
    spec = _bars(f"{title}: {_described(rows)}", rows, title=scale.unit)
    table = Table(("part", "amount"), table_rows)
    return Chart(id_, title, scale.unit, spec, table, f"{total} in all; {note}")


def _percent(share_frac: float) -> str:
    return f"{significant(share_frac * 100, 3)} %" if not 0 < share_frac < 0.001 else "< 0.1 %"
