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
from ergmeter.metrics.catalog import catalogue, refusal
from ergmeter.metrics.explain.waterfall import levels
from ergmeter.metrics.roofline import roofline
from ergmeter.metrics.time_breakdown import step_time_distribution, time_breakdown
from ergmeter.records import Missing, Reading
from ergmeter.units import duration, scaled, significant
from ergmeter.views.charts.chart import Chart, Scale, Table, chart_of, framed, scale_for
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
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.waterfall import Explanation, WaterfallLevel
    from ergmeter.metrics.roofline import Roofline
    from ergmeter.metrics.time_breakdown import StepTimeDistribution, TimeBreakdown
    from ergmeter.records import Summary
    from ergmeter.runlog.reader import Run

# Waterfall.


PEAK, LOST, GAINED, LEFT = "peak", "lost", "gained", "what is left"
ONE_BLOCK = "lost, and not told apart"
_COLOURS = {PEAK: "c8", LOST: "c2", ONE_BLOCK: "c4", GAINED: "c3", LEFT: "c1"}
_STRIPED = "striped"  # its CSS class on the page
_ROW = 36  # pixels: a line of text and a bar below it
_STRIPE_FRAC = 0.01  # from one stripe to the next


def waterfall_chart(explanation: Explanation) -> Chart:
    """Return the waterfall. Raises NotMeasurable if nothing is known."""
    if explanation.achieved is None:
        reasons = "; ".join(dict.fromkeys(explanation.missing.values()))
        raise NotMeasurable(f"{NOTHING}{f' ({reasons})' if reasons else ''}")
    rows = _waterfall_rows(explanation)
    kinds = [kind for kind in _COLOURS if any(row["kind"] == kind for row in rows)]
    described = ", ".join(row["said"] for row in rows)
    note = "; ".join(
        part for part in (f"100 % is {explanation.of}", energy_note(explanation)) if part
    )
    return Chart(
        "waterfall",
        WATERFALL,
        "%",
        framed(f"waterfall: {described}", _ROW * len(rows), _waterfall_layers(rows, kinds)),
        _waterfall_table(explanation),
        note,
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
    x = {
        "field": "low",
        "type": "quantitative",
        "title": "% of the peak",
        "scale": {"domain": [0, max(row["high"] for row in rows)], "nice": False},
        "axis": {"format": ".0%", "tickCount": 4, "grid": False},
    }
    colour = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": kinds, "range": [f"var(--{_COLOURS[kind]})" for kind in kinds]},
        "legend": {"values": [kind for kind in kinds if kind != PEAK]},
    }
    titles = {
        "name": "block",
        "share": "of the peak",
        "joules": "joules",
        "how": "how",
        "why": "is",
    }
    tooltip = [{"field": field, "title": title} for field, title in titles.items()]
    edge = {**colour, "legend": None}
    position = {"x": x, "x2": {"field": "high"}, "y": y}
    bar = {"type": "bar", "height": {"band": 0.4}, "yOffset": 7, "aria": False}
    text = {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -3}
    return [
        {
            "data": {"name": "points", "values": rows},
            "mark": {**bar, "strokeWidth": 1},  # so that the smallest block is still a line
            "encoding": {**position, "color": colour, "stroke": edge, "tooltip": tooltip},
        },
        {
            "data": {"name": "stripes", "values": _stripes(rows)},
            "mark": {**bar, "color": "var(--bg)", "tooltip": None},
            "encoding": position,
        },
        {
            "data": {"name": "points"},
            "mark": {**text, "fontSize": 11, "limit": {"expr": "width"}, "aria": False},
            "encoding": {
                "x": {"value": 0},
                "y": y,
                "text": {"field": "said"},
                "color": {"value": "var(--ink)"},
            },
        },
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


def _waterfall_table(explanation: Explanation) -> Table:
    rows = (
        (block.title, share(block), joules(block) or "-", block.basis, block.why, facts(block))
        for block in (level.block for level in levels(explanation))
    )
    peak = ("peak", "100 %", total_joules(explanation) or "-", "", explanation.of, "")
    return Table(("block", "of the peak", "joules", "how", "is", "seen"), (peak, *rows))


# Step times.


_LINES = {"median": "c2", "95th percentile": "c4"}


def step_time_chart(evidence: Evidence) -> Chart:
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
        "step_times",
        "step times",
        scale.unit,
        framed(f"distribution of step times: {text}", 190, layers),
        _outliers(times),
        note,
        legend=tuple((line["s"], _LINES[line["s"]]) for line in lines["data"]["values"]),
    )


def _step_time_bars(distribution: StepTimeDistribution, scale: Scale) -> dict[str, Any]:
    edges = [float(f"{edge / scale.factor:.6g}") for edge in distribution.edges_s.tolist()]
    rows = [
        {"t": low, "e": high, "n": count}
        for low, high, count in zip(
            edges[:-1], edges[1:], distribution.counts.tolist(), strict=True
        )
    ]
    x = {
        "field": "t",
        "type": "quantitative",
        "bin": "binned",
        "title": f"step time, {scale.unit}",
        "scale": {"zero": False, "nice": False, "domain": [edges[0], edges[-1]]},
        "axis": {
            "grid": False,
            "format": ",.6~r",
            "tickCount": {"expr": "max(3, floor(width / 70))"},
        },
    }
    y = {
        "field": "n",
        "type": "quantitative",
        "title": "steps",
        "axis": {"tickCount": 5, "tickMinStep": 1},
    }
    tooltip = [
        {"field": "t", "title": f"from, {scale.unit}", "format": ".5~g"},
        {"field": "e", "title": f"to, {scale.unit}", "format": ".5~g"},
        {"field": "n", "title": "steps"},
    ]
    return {
        "data": {"name": "points", "values": rows},
        "mark": {"type": "bar", "aria": False, "color": "var(--c1)", "binSpacing": 1},
        "encoding": {"x": x, "x2": {"field": "e"}, "y": y, "tooltip": tooltip},
    }


def _percentile_lines(distribution: StepTimeDistribution, scale: Scale) -> dict[str, Any]:
    at_s = dict(zip(_LINES, (distribution.median_s, distribution.p95_s), strict=True))
    rows = [
        {"v": float(f"{one_s / scale.factor:.6g}"), "s": name}
        for name, one_s in at_s.items()
        if one_s <= float(distribution.edges_s[-1])
    ]
    colours = [f"var(--{colour})" for colour in _LINES.values()]
    colour = {
        "field": "s",
        "type": "nominal",
        "scale": {"domain": list(_LINES), "range": colours},
    }
    return {
        "data": {"name": "lines", "values": rows},
        "mark": {"type": "rule", "strokeWidth": 2, "aria": False},
        "encoding": {"x": {"field": "v", "type": "quantitative"}, "color": colour},
    }


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


_NAME = {"type": "text", "color": "var(--ink)", "fontSize": 11, "aria": False}


def roofline_chart(evidence: Evidence) -> Chart:
    """Return the roofline. Raises NotMeasurable with what is missing."""
    point = roofline(evidence)
    text = f"{significant(point.flops_per_byte)} FLOP/B, {scaled(point.flops_per_s, 'FLOP/s')}"
    described = f"roofline: this run at {text}, under the {point.bound_by} roof"
    spec = framed(described, 230, _roofline_layers(point))
    return Chart("roofline", "roofline", "TFLOP/s", spec, _roofline_table(point), point.note)


def _roofline_layers(roofline: Roofline) -> list[dict[str, Any]]:
    left = min(roofline.ridge_flops_per_byte / _REACH, roofline.flops_per_byte / 2)
    right = max(roofline.ridge_flops_per_byte * _REACH, roofline.flops_per_byte * _ROOM)
    peak = roofline.peak.flops_per_s / _TERA
    roof = [
        {"x": left, "y": left * roofline.bandwidth_bytes_per_s / _TERA},
        {"x": roofline.ridge_flops_per_byte, "y": peak},
        {"x": right, "y": peak},
    ]
    reached = roofline.flops_per_s / _TERA
    run = [{"x": roofline.flops_per_byte, "y": reached, "s": "this run"}]
    lowest = min(roof[0]["y"], reached) / 2
    axes = _axes((left, right), (lowest, max(peak, reached) * _ABOVE))
    point = {"type": "point", "filled": True, "size": 140, "color": "var(--c2)", "aria": False}
    tooltip = [
        {"field": "s", "title": "point"},
        {"field": "x", "title": "FLOP/B", "format": ".4~g"},
        {"field": "y", "title": "TFLOP/s", "format": ".4~g"},
    ]
    return [
        {
            "data": {"name": "roof", "values": roof},
            "mark": {"type": "line", "color": "var(--c1)", "strokeWidth": 2, "aria": False},
            "encoding": axes,
        },
        {
            "data": {"name": "points", "values": run},
            "mark": point,
            "encoding": {**axes, "tooltip": tooltip},
        },
        {
            "data": {"name": "points"},
            # Below and to the right there is no roof, wherever the run stands under it.
            "mark": {**_NAME, "align": "left", "baseline": "top", "dx": 8, "dy": 4},
            "encoding": {**axes, "text": {"field": "s"}},
        },
        _roof_name(axes, math.sqrt(left * roofline.ridge_flops_per_byte), roofline),
        {
            "data": {"name": "peak", "values": [{"x": right, "y": peak}]},
            "mark": {**_NAME, "align": "right", "baseline": "bottom", "dy": -5},
            "encoding": {**axes, "text": {"value": scaled(roofline.peak.flops_per_s, "FLOP/s")}},
        },
    ]


def _roof_name(axes: dict[str, Any], at: float, roofline: Roofline) -> dict[str, Any]:
    """Return the bandwidth label, left of the slope where nothing overlaps."""
    y = at * roofline.bandwidth_bytes_per_s / _TERA
    return {
        "data": {"name": "bandwidth", "values": [{"x": at, "y": y}]},
        "mark": {**_NAME, "align": "right", "baseline": "bottom", "dx": -6, "dy": -3},
        "encoding": {**axes, "text": {"value": scaled(roofline.bandwidth_bytes_per_s, "B/s")}},
    }


def _axes(across: tuple[float, float], up: tuple[float, float]) -> dict[str, Any]:
    return {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": "FLOP per byte of device memory",
            "scale": {"type": "log", "nice": False, "domain": list(across)},
            "axis": {"format": "~s", "tickCount": 5, "grid": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": "TFLOP/s",
            "scale": {"type": "log", "nice": False, "domain": list(up)},
            "axis": {"format": ",.6~r", "tickCount": 4, "grid": False},
        },
    }


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


# From the most flattering metric to the most meaningful.
LADDER = (
    "utilization.busy_frac",
    "activity.graphics_frac",
    "activity.sm_frac",
    "activity.tensor_frac",
    "utilization.hfu_frac",
    "utilization.mfu_frac",
)
IDS = ("ladder", "waterfall", "time_spent", "energy_spent", "step_times", "roofline")


def figure_charts(evidence: Evidence, summary: Summary, explained: Explanation) -> list[Chart]:
    """Return all charts, drawn or with their reason."""
    return [
        chart_of("ladder", "from GPU util to MFU", "%", lambda: _ladder(evidence.run, summary)),
        chart_of("waterfall", WATERFALL, "%", lambda: waterfall_chart(explained)),
        chart_of(
            "time_spent", "where the time went", "s", lambda: _time_spent(time_breakdown(evidence))
        ),
        chart_of("energy_spent", "where the joules went", "J", lambda: _energy_spent(evidence)),
        chart_of("step_times", "step times", "s", lambda: step_time_chart(evidence)),
        chart_of("roofline", "roofline", "FLOP/s", lambda: roofline_chart(evidence)),
    ]


def _bars(
    description: str, rows: list[dict[str, Any]], *, title: str, is_share: bool = False
) -> dict[str, Any]:
    """Return bars from 0 with their values beside them."""
    order = [row["name"] for row in rows]
    most = max((row["v"] for row in rows if row["v"] is not None), default=1.0) or 1.0
    y = {
        "field": "name",
        "type": "nominal",
        "sort": order,
        "title": None,
        "axis": {"labelLimit": 170},
    }
    x = {
        "field": "v",
        "type": "quantitative",
        "title": title,
        "scale": {"domain": [0, 1.0 if is_share and most <= 1 else most], "nice": False},
        "axis": {"format": ".0%" if is_share else ",.6~r", "tickCount": 4},
    }
    tooltip = [{"field": "name", "title": "part"}, {"field": "said", "title": "figure"}]
    return framed(
        description,
        30 * len(rows),
        [
            {
                "data": {"name": "points", "values": rows},
                "mark": {"type": "bar", "height": {"band": 0.45}, "yOffset": 6, "aria": False},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {"value": "var(--c1)"},
                    "tooltip": tooltip,
                },
            },
            {
                "data": {"name": "points"},
                "mark": {
                    "type": "text",
                    "align": "left",
                    "baseline": "bottom",
                    "dx": 3,
                    "dy": -3,
                    "fontSize": 11,
                    "aria": False,
                },
                "encoding": {
                    "x": {"value": 0},
                    "y": y,
                    "text": {"field": "said"},
                    "color": {"value": "var(--ink)"},
                },
            },
        ],
    )


def _ladder(run: Run, summary: Summary) -> Chart:
    results = {key: summary.readings[key] for key in LADDER}
    if not any(isinstance(result, Reading) for result in results.values()):
        reasons = dict.fromkeys(
            result.reason for result in results.values() if isinstance(result, Missing)
        )
        raise NotMeasurable("; ".join(reasons))
    rows = [
        {
            "name": catalogue()[key].title,
            "v": result.value if isinstance(result, Reading) and not result.impossible else None,
            "said": value(result) if isinstance(result, Reading) else "absent",
        }
        for key, result in results.items()
    ]
    description = ", ".join(f"{row['name']} {row['said']}" for row in rows)
    table = Table(
        ("rung", "value", "interval", "how"),
        tuple(
            (catalogue()[key].title, value(result), interval(result), result.basis)
            if isinstance(result, Reading)
            else (catalogue()[key].title, "-", "", result.reason)
            for key, result in results.items()
        ),
    )
    spec = _bars(f"ladder: {description}", rows, title="%", is_share=True)
    note = "each rung says less than the one above it seems to: busy is not computing"
    by_reason: dict[str, list[str]] = {}
    for key, result in results.items():
        if isinstance(result, Missing):
            by_reason.setdefault(result.reason, []).append(catalogue()[key].title)
    note += "".join(
        f"; no {', '.join(names)}: {short_reason(why, run)}" for why, names in by_reason.items()
    )
    note += "".join(
        f"; {catalogue()[key].title} has no bar: {refusal(result)}"
        for key, result in results.items()
        if isinstance(result, Reading) and result.impossible
    )
    return Chart("ladder", "from GPU util to MFU", "%", spec, table, note)


def _percent(share: float) -> str:
    return f"{significant(share * 100, 3)} %" if not 0 < share < 0.001 else "< 0.1 %"


def _time_spent(breakdown: TimeBreakdown) -> Chart:
    scale = scale_for("s", breakdown.whole_s)
    rows = [
        {
            "name": part.title,
            "v": float(f"{part.seconds / scale.factor:.6g}"),
            "said": f"{duration(part.seconds)} ({_percent(part.time_frac)})",
        }
        for part in breakdown.parts
    ]
    return _spent_chart(
        "time_spent",
        "where the time went",
        scale.unit,
        rows,
        text=duration(breakdown.whole_s),
        note=breakdown.note,
    )


def _energy_spent(evidence: Evidence) -> Chart:
    breakdown = time_breakdown(evidence)
    if breakdown.whole_j is None:
        raise NotMeasurable(breakdown.why_no_joules)
    scale = scale_for("J", breakdown.whole_j)
    rows = [
        {
            "name": part.title,
            "v": float(f"{part.joules / scale.factor:.6g}"),
            "said": f"{scaled(part.joules, 'J')} ({_percent(part.joules_frac)})",
        }
        for part in breakdown.parts
        if part.joules is not None and part.joules_frac is not None
    ]
    note = f"{breakdown.joules_basis}; {breakdown.note}"
    if breakdown.unread_s >= 0.1:
        note += f"; {duration(breakdown.unread_s)} of the run's life were not read"
    return _spent_chart(
        "energy_spent",
        "where the joules went",
        scale.unit,
        rows,
        text=scaled(breakdown.whole_j, "J"),
        note=note,
    )


def _spent_chart(
    id_: str,
    title: str,
    unit: str,
    rows: list[dict[str, Any]],
    *,
    text: str,
    note: str,
) -> Chart:
    described = ", ".join(f"{row['name']} {row['said']}" for row in rows)
    table = Table(
        ("part", "amount"), (*((row["name"], row["said"]) for row in rows), ("whole run", text))
    )
    return Chart(
        id_,
        title,
        unit,
        _bars(f"{title}: {described}", rows, title=unit),
        table,
        f"{text} in all; {note}",
    )
