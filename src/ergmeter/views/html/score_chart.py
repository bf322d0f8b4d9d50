"""The score of `erg analyze`, factor by factor, as bars from 1 on a logarithmic axis.

The trap: a product drawn as a stack. On a logarithmic axis a factor of 2 to the right is as long as
one of 1/2 to the left, a factor of 1 has no bar, and the bar of the score is what the others come
to, end to end. On any other axis none of this holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.factors import factors
from ergmeter.units import significant
from ergmeter.views.html.charts import Chart, Table, framed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.neuron.factors import Factor

_TICKS, _FEW_TICKS = 7, 3
_ROW_PIXELS = 34
_LEGEND = (("raises the score", "c1"), ("lowers it", "c2"))
_ROOM = 1.15  # beyond the longest bar


def score_chart(document: Mapping[str, Any]) -> Chart:
    """The factors and their product, of a document with a score or with the reason for none."""
    found = factors(document["training_score_breakdown"])
    score = document["training_score"]
    rows = [_row(one.name, one.ratio, _said(one)) for one in found]
    mark = next((one for one in map(_mark, found) if one), "")
    whole = "not known" if score is None else f"{mark}{significant(score, 5)}"
    rows.append(_row("score", score, whole))
    described = ", ".join(f"{row['name']} {row['said']}" for row in rows)
    table = Table(
        ("factor", "ratio", "log2 of the ratio"),
        (
            *((one.name, _said(one), _added(one.doublings)) for one in found),
            ("score", whole, _added(None if not score else math.log2(score))),
        ),
    )
    return Chart(
        "score_factors",
        "factors of the score",
        "ratio, log scale",
        framed(f"factors of the score: {described}", _ROW_PIXELS * len(rows), _layers(rows)),
        table,
        "bars begin at 1, and twice is as long as half: the score's bar is those of its factors"
        " end to end",
        legend=_LEGEND,
    )


def _row(name: str, ratio: float | None, said: str) -> dict[str, Any]:
    is_drawn = ratio is not None and ratio > 0
    side = "raises the score" if not is_drawn or (ratio or 0) >= 1 else "lowers it"
    return {"name": name, "v": ratio if is_drawn else None, "one": 1, "said": said, "s": side}


def _said(one: Factor) -> str:
    if one.ratio is None:
        return "not known"
    return f"{_mark(one)}x {significant(one.ratio, 5)}"


def _mark(one: Factor) -> str:
    return "at least " if one.is_bound else "about " if one.is_uncertain else ""


def _added(doublings: float | None) -> str:
    return "-" if doublings is None else f"{doublings:+.3f}"


def _layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    drawn = [row["v"] for row in rows if row["v"] is not None]
    low, high = min([1.0, *drawn]) / _ROOM, max([1.0, *drawn]) * _ROOM
    y = {
        "field": "name",
        "type": "nominal",
        "sort": [row["name"] for row in rows],
        "title": None,
    }
    x = {
        "field": "v",
        "type": "quantitative",
        "title": "ratio, log scale (1 changes nothing)",
        "scale": {"type": "log", "base": 2, "domain": [low, high], "nice": False},
        "axis": {"values": _ticks(low, high), "format": ".4~g"},
    }
    colour = {
        "field": "s",
        "type": "nominal",
        "scale": {
            "domain": [label for label, _ in _LEGEND],
            "range": [f"var(--{colour})" for _, colour in _LEGEND],
        },
    }
    tooltip = [{"field": "name", "title": "factor"}, {"field": "said", "title": "ratio"}]
    words = {
        "type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -2, "fontSize": 11,
        "aria": False,
    }  # fmt: skip
    return [
        {
            "data": {"name": "points", "values": rows},
            "mark": {"type": "bar", "height": {"band": 0.4}, "yOffset": 6, "aria": False},
            "encoding": {
                "x": x, "x2": {"field": "one"}, "y": y, "color": colour, "tooltip": tooltip
            },
        },
        {
            "data": {"name": "one", "values": [{"v": 1}]},
            "mark": {"type": "rule", "color": "var(--mark)", "aria": False},
            "encoding": {"x": {"field": "v", "type": "quantitative"}},
        },
        {
            "data": {"name": "points"},
            "mark": words,
            "encoding": {
                "x": {"value": 0}, "y": y, "text": {"field": "said"},
                "color": {"value": "var(--ink)"},
            },
        },
    ]  # fmt: skip


def _ticks(low: float, high: float) -> list[float]:
    """Powers of 2 within the axis, 1 among them; where they are few, one and a half of each too."""
    first, last = math.floor(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / _TICKS))
    between = (1.0, 1.5) if last - first <= _FEW_TICKS else (1.0,)
    powers = range(first - first % step, last + 1, step)
    ticks = [2.0**power * times for power in powers for times in between]
    return [tick for tick in ticks if low <= tick <= high]
