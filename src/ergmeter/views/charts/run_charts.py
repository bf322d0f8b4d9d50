"""Charts that are not over time: ladder, waterfall, time and joules by part, step times, roofline.

The trap: bars that begin somewhere. Every bar here begins at 0, and carries its figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import catalogue, refusal
from ergmeter.metrics.time_breakdown import time_breakdown
from ergmeter.records import Missing, Reading
from ergmeter.units import duration, scaled, significant
from ergmeter.views.charts.chart import Chart, Table, chart_of, framed, scale_for
from ergmeter.views.charts.roofline_chart import roofline_chart
from ergmeter.views.charts.step_time_chart import step_time_chart
from ergmeter.views.charts.waterfall_chart import waterfall_chart
from ergmeter.views.run.card import in_short, interval, value
from ergmeter.views.run.explain import WATERFALL

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.waterfall import Explanation
    from ergmeter.metrics.time_breakdown import TimeBreakdown
    from ergmeter.records import Summary
    from ergmeter.runlog.reader import Run

# From what seems to say most to what says most.
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
    """All of them, drawn or with their reason."""
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
    """Bars from 0, each with its figure beside it and room for that."""
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
    found = {key: summary.readings[key] for key in LADDER}
    if not any(isinstance(one, Reading) for one in found.values()):
        reasons = dict.fromkeys(one.reason for one in found.values() if isinstance(one, Missing))
        raise NotMeasurable("; ".join(reasons))
    rows = [
        {
            "name": catalogue()[key].title,
            "v": one.value if isinstance(one, Reading) and not one.impossible else None,
            "said": value(one) if isinstance(one, Reading) else "absent",
        }
        for key, one in found.items()
    ]
    said = ", ".join(f"{row['name']} {row['said']}" for row in rows)
    table = Table(
        ("rung", "value", "interval", "how"),
        tuple(
            (catalogue()[key].title, value(one), interval(one), one.basis)
            if isinstance(one, Reading)
            else (catalogue()[key].title, "-", "", one.reason)
            for key, one in found.items()
        ),
    )
    spec = _bars(f"ladder: {said}", rows, title="%", is_share=True)
    note = "each rung says less than the one above it seems to: busy is not computing"
    by_reason: dict[str, list[str]] = {}
    for key, one in found.items():
        if isinstance(one, Missing):
            by_reason.setdefault(one.reason, []).append(catalogue()[key].title)
    note += "".join(
        f"; no {', '.join(names)}: {in_short(why, run)}" for why, names in by_reason.items()
    )
    note += "".join(
        f"; {catalogue()[key].title} has no bar: {refusal(one)}"
        for key, one in found.items()
        if isinstance(one, Reading) and one.impossible
    )
    return Chart("ladder", "from GPU util to MFU", "%", spec, table, note)


def _percent(share: float) -> str:
    return f"{significant(share * 100, 3)} %" if not 0 < share < 0.001 else "< 0.1 %"


def _time_spent(found: TimeBreakdown) -> Chart:
    scale = scale_for("s", found.whole_s)
    rows = [
        {
            "name": one.title,
            "v": float(f"{one.seconds / scale.factor:.6g}"),
            "said": f"{duration(one.seconds)} ({_percent(one.time_frac)})",
        }
        for one in found.parts
    ]
    return _spent_chart(
        "time_spent",
        "where the time went",
        scale.unit,
        rows,
        whole=duration(found.whole_s),
        note=found.note,
    )


def _energy_spent(evidence: Evidence) -> Chart:
    found = time_breakdown(evidence)
    if found.whole_j is None:
        raise NotMeasurable(found.why_no_joules)
    scale = scale_for("J", found.whole_j)
    rows = [
        {
            "name": one.title,
            "v": float(f"{one.joules / scale.factor:.6g}"),
            "said": f"{scaled(one.joules, 'J')} ({_percent(one.joules_frac)})",
        }
        for one in found.parts
        if one.joules is not None and one.joules_frac is not None
    ]
    note = f"{found.joules_basis}; {found.note}"
    if found.unread_s >= 0.1:
        note += f"; {duration(found.unread_s)} of the run's life were not read"
    return _spent_chart(
        "energy_spent",
        "where the joules went",
        scale.unit,
        rows,
        whole=scaled(found.whole_j, "J"),
        note=note,
    )


def _spent_chart(
    id_: str,
    title: str,
    unit: str,
    rows: list[dict[str, Any]],
    *,
    whole: str,
    note: str,
) -> Chart:
    described = ", ".join(f"{row['name']} {row['said']}" for row in rows)
    table = Table(
        ("part", "amount"), (*((row["name"], row["said"]) for row in rows), ("whole run", whole))
    )
    return Chart(
        id_,
        title,
        unit,
        _bars(f"{title}: {described}", rows, title=unit),
        table,
        f"{whole} in all; {note}",
    )
