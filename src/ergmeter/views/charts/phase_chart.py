"""The strip above the charts over time: steps, phases and marks.

The trap: ten thousand steps in a thousand pixels. Those that are closer than a pixel are one span,
and it says how many they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.units import significant
from ergmeter.views.charts.chart import Chart, Table, framed
from ergmeter.views.charts.palette import SERIES
from ergmeter.views.charts.time_axis import (
    LEFT,
    NO_TITLE,
    ground,
    marks_left_out,
    marks_of,
    time_axis,
    zoom,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.metrics.evidence.evidence import Evidence

_PHASES = {
    "train": "steps",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
    "data": "data wait",
    "prefill": "prompts",
    "decode": "answers",
    "idle": "idle",
}


def phase_chart(evidence: Evidence) -> Chart:
    """Spans by phase and marks. Raises NotMeasurable where no span was told."""
    spans = timeline.phase_spans(evidence)
    marks = marks_of(evidence)
    if not spans:
        evidence.work  # noqa: B018  says why there are no steps
        raise NotMeasurable("no span was recorded")
    order = [*(_PHASES[one.phase] for one in spans), *(["marks"] if marks else [])]
    y = {
        "field": "phase",
        "type": "nominal",
        "title": NO_TITLE,
        "sort": order,
        "scale": {"domain": order},
        "axis": LEFT,
    }
    x = time_axis(evidence)
    layers = [*ground(evidence), _span_layer(spans, x, y), *_mark_points(marks, x, y)]
    described = ", ".join(f"{int(one.counts.sum())} {_PHASES[one.phase]}" for one in spans)
    spec = framed(f"phases over time: {described}", 26 * len(order), layers)
    ranks = len(evidence.all_steps.lanes)
    whose = f"of the rank that told the most of {ranks}" if ranks > 1 else ""
    note = "; ".join(one for one in (whose, marks_left_out(evidence)) if one)
    table = _table(spans, marks)
    return Chart("phases", "steps, phases and marks", "s", spec, table, note, on_time=True)


def _span_layer(
    spans: Sequence[timeline.PhaseSpans], x: dict[str, Any], y: dict[str, Any]
) -> dict[str, Any]:
    names = [_PHASES[one.phase] for one in spans]
    places = list(_PHASES.values())
    colour = {
        "field": "phase",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": names, "range": [SERIES[places.index(name)] for name in names]},
    }
    seconds = {"type": "quantitative", "format": ".6~g"}
    return {
        "data": {"name": "points", "values": _rows(spans)},
        "mark": {
            "type": "rect",
            "clip": True,
            "height": {"band": 0.7},
            "aria": False,
            "strokeWidth": 0.5,
        },
        "params": [zoom()],
        "encoding": {
            "x": x,
            "x2": {"field": "e"},
            "y": y,
            "color": colour,
            "stroke": colour,
            # Steps that touch are told apart by their shade: a line between would hide them.
            "opacity": {"condition": {"test": "datum.odd === 1", "value": 0.65}, "value": 1},
            "tooltip": [
                {"field": "phase", "title": "phase"},
                {"field": "t", "title": "from, s", **seconds},
                {"field": "e", "title": "to, s", **seconds},
                {"field": "spans", "title": "spans", "type": "quantitative"},
            ],
        },
    }


def _rows(spans: Sequence[timeline.PhaseSpans]) -> list[dict[str, Any]]:
    return [
        {
            "t": round(start, 6),
            "e": round(end, 6),
            "phase": _PHASES[one.phase],
            "spans": count,
            "odd": number % 2,
        }
        for one in spans
        for number, (start, end, count) in enumerate(
            zip(one.start_s.tolist(), one.end_s.tolist(), one.counts.tolist(), strict=True)
        )
    ]


def _table(spans: Sequence[timeline.PhaseSpans], marks: Sequence[dict[str, Any]]) -> Table:
    phases = (
        (
            _PHASES[one.phase],
            str(int(one.counts.sum())),
            f"{significant(float(one.start_s.min()))} s",
            f"{significant(float(one.end_s.max()))} s",
        )
        for one in spans
    )
    named = (
        (f"mark {one['name']}", "", f"{significant(one['t'])} s", one["detail"]) for one in marks
    )
    return Table(("phase", "spans", "first from", "last to"), (*phases, *named))


def _mark_points(
    marks: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any]
) -> list[dict[str, Any]]:
    if not marks:
        return []
    return [
        {
            "data": {"name": "named_marks", "values": [{**one, "phase": "marks"} for one in marks]},
            "mark": {
                "type": "point",
                "shape": "triangle-down",
                "filled": True,
                "size": 70,
                "color": "var(--mark)",
                "clip": True,
                "aria": False,
            },
            "encoding": {
                "x": x,
                "y": y,
                "tooltip": [
                    {"field": "name", "title": "mark"},
                    {"field": "detail", "title": "detail"},
                    {"field": "t", "title": "s", "type": "quantitative", "format": ".6~g"},
                ],
            },
        }
    ]
