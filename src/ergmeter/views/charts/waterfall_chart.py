"""From the peak down to what was achieved: each loss a bar that floats where it was lost.

The trap: a drawing that seems to know more than was measured. What the evidence does not tell apart
is one bar, striped, and it is called so; a gain goes up and is told apart from a loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.explain.waterfall import levels
from ergmeter.views.charts.chart import Chart, Table, framed
from ergmeter.views.run.explain import (
    NOTHING,
    WATERFALL,
    facts,
    joules,
    said_of_joules,
    share,
    whole_joules,
)

if TYPE_CHECKING:
    from ergmeter.metrics.explain.waterfall import Explanation, WaterfallLevel

PEAK, LOST, GAINED, LEFT = "peak", "lost", "gained", "what is left"
ONE_BLOCK = "lost, and not told apart"
_COLOURS = {PEAK: "c8", LOST: "c2", ONE_BLOCK: "c4", GAINED: "c3", LEFT: "c1"}
_STRIPED = "striped"  # the page's word for it
_ROW = 36  # pixels: a line of text and a bar below it
_STRIPE_FRAC = 0.01  # from one stripe to the next


def waterfall_chart(found: Explanation) -> Chart:
    """The waterfall. Raises NotMeasurable where nothing is known of it."""
    if found.achieved is None:
        reasons = "; ".join(dict.fromkeys(found.missing.values()))
        raise NotMeasurable(f"{NOTHING}{f' ({reasons})' if reasons else ''}")
    rows = _rows(found)
    kinds = [kind for kind in _COLOURS if any(row["kind"] == kind for row in rows)]
    described = ", ".join(row["said"] for row in rows)
    note = "; ".join(one for one in (f"100 % is {found.of}", said_of_joules(found)) if one)
    return Chart(
        "waterfall",
        WATERFALL,
        "%",
        framed(f"waterfall: {described}", _ROW * len(rows), _layers(rows, kinds)),
        _table(found),
        note,
        legend=tuple((kind, _legend_class(kind)) for kind in kinds if kind != PEAK),
    )


def _legend_class(kind: str) -> str:
    return f"{_COLOURS[kind]} {_STRIPED}" if kind == ONE_BLOCK else _COLOURS[kind]


def _rows(found: Explanation) -> list[dict[str, Any]]:
    peak = {"name": "peak", "v": 1.0, "low": 0.0, "high": 1.0, "kind": PEAK, "share": "100 %"}
    peak |= {"joules": whole_joules(found) or "-", "how": "", "why": found.of}
    rows = [peak, *(_row(level, found) for level in levels(found))]
    for at, row in enumerate(rows):
        drew = f" · {row['joules']}" if row["joules"] != "-" else ""
        row |= {"at": at, "said": f"{row['name']} · {row['share']}{drew}"}
    return rows


def _row(level: WaterfallLevel, found: Explanation) -> dict[str, Any]:
    one = level.block
    return {
        "name": one.title,
        "v": one.share_frac,
        "low": min(level.from_frac, level.to_frac),
        "high": max(level.from_frac, level.to_frac),
        "kind": _kind(level, found),
        "share": share(one),
        "joules": joules(one) or "-",
        "how": one.basis,
        "why": one.why,
    }


def _kind(level: WaterfallLevel, found: Explanation) -> str:
    if level.block is found.achieved:
        return LEFT
    if level.block.share_frac < 0:
        return GAINED
    return ONE_BLOCK if level.block.is_merged else LOST


def _layers(rows: list[dict[str, Any]], kinds: list[str]) -> list[dict[str, Any]]:
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
    place = {"x": x, "x2": {"field": "high"}, "y": y}
    bar = {"type": "bar", "height": {"band": 0.4}, "yOffset": 7, "aria": False}
    text = {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -3}
    return [
        {
            "data": {"name": "points", "values": rows},
            "mark": {**bar, "strokeWidth": 1},  # so that the least block is still a line
            "encoding": {**place, "color": colour, "stroke": edge, "tooltip": tooltip},
        },
        {
            "data": {"name": "stripes", "values": _stripes(rows)},
            "mark": {**bar, "color": "var(--bg)", "tooltip": None},
            "encoding": place,
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
    """What is left out of a bar that is several causes in one."""
    found = []
    for row in rows:
        if row["kind"] == ONE_BLOCK:
            first, last = (math.ceil(row[edge] / _STRIPE_FRAC) for edge in ("low", "high"))
            lows = (max(row["low"], number * _STRIPE_FRAC) for number in range(first, last))
            found += [
                {"at": row["at"], "low": low, "high": min(low + _STRIPE_FRAC / 3, row["high"])}
                for low in lows
            ]
    return found


def _table(found: Explanation) -> Table:
    rows = (
        (one.title, share(one), joules(one) or "-", one.basis, one.why, facts(one))
        for one in (level.block for level in levels(found))
    )
    peak = ("peak", "100 %", whole_joules(found) or "-", "", found.of, "")
    return Table(("block", "of the peak", "joules", "how", "is", "seen"), (peak, *rows))
