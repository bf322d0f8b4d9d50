"""Dots with confidence intervals, one row each, and a line at no difference.

A value without an interval has its own shape and a note. An absent value keeps its row. Names stand
above their dots: on an axis, long names would be cut or take the space of the dots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ergmeter.views.charts.chart import (
    BY_COLOUR,
    BY_SHAPE,
    Chart,
    Table,
    filled,
    framed,
    layer,
    tooltip,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["better", "worse", "differs", "open", "pass", "plain", "bare", "absent"]
# Colour, shape, and the shape's sign in a legend.
LOOKS: dict[Kind, tuple[str, str, str]] = {
    "better": ("c3", "triangle-up", "▲"),
    "worse": ("c2", "triangle-down", "▼"),
    "differs": ("c7", "cross", "✚"),
    "open": ("c1", "square", "■"),
    "pass": ("c3", "circle", "●"),
    "plain": ("c1", "circle", "●"),
    "bare": ("c8", "diamond", "◆"),
    "absent": ("c8", "circle", ""),
}
_FIGURE_PX = 190  # of a row, for the text on the right
_LONG = 22  # characters; longer names leave no room for text beside them in a narrow window


@dataclass(frozen=True, slots=True)
class _Tiers:
    """The height of a row, and the positions of name, value and dot within it."""

    px: int
    name: float
    figure: float
    dot: float

    @property
    def is_shared(self) -> bool:
        """True if name and value share a line."""
        return self.name == self.figure


_TWO = _Tiers(40, 0.22, 0.22, 0.68)
_THREE = _Tiers(58, 0.16, 0.44, 0.78)


@dataclass(frozen=True, slots=True)
class Dot:
    """One row: a value with its interval, both optional, and its text.

    `limits` are the values that a rule allows, if there is one.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    value_text: str
    kind: Kind
    limits: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of the dots. `neutral` is the value of no difference."""

    title: str
    is_log: bool = False
    neutral: float | None = None
    format: str = ",.4~r"


def interval_chart(
    id_: str,
    title: str,
    unit: str,
    dots: Sequence[Dot],
    axis: Axis,
    *,
    words: dict[Kind, str],
    table: Table,
    note: str = "",
) -> Chart:
    """Return the chart, rows in order. `words` explains each kind of dot."""
    described = "; ".join(f"{dot.name} {dot.value_text}" for dot in dots[:12])
    more = f"; and {len(dots) - 12} more, in the table" if len(dots) > 12 else ""
    used = dict.fromkeys(dot.kind for dot in dots)
    legend = tuple(
        (f"{LOOKS[kind][2]} {word}", LOOKS[kind][0]) for kind, word in words.items() if kind in used
    )
    tiers = _THREE if any(len(dot.name) > _LONG for dot in dots) else _TWO
    layers = filled(_layers(dots, axis, tiers))
    spec = framed(f"{title}: {described}{more}", tiers.px * len(dots), layers)
    return Chart(id_, title, unit, spec, table, note, legend=legend)


def _layers(dots: Sequence[Dot], axis: Axis, tiers: _Tiers) -> list[dict[str, Any]]:
    """Return the layers from back to front."""
    rows = [_row(number, dot) for number, dot in enumerate(dots)]
    present = [row for row in rows if row["v"] is not None]
    spans = [row for row in present if row["low"] is not None]
    limits = [{"i": n, "v": at} for n, dot in enumerate(dots) for at in dot.limits]
    line = [] if axis.neutral is None else [{"v": axis.neutral}]
    x, y = _x(axis), _y(tiers.dot)
    across = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": BY_COLOUR}
    at = {"x": {**x, "field": "v"}, "y": y}
    look = {"color": BY_COLOUR, "shape": BY_SHAPE, "tooltip": tooltip({"name": "of", "said": "is"})}
    down_px = (tiers.dot - 0.5) * tiers.px  # ticks ignore the position within a band
    tick = {"type": "tick", "orient": "vertical", "size": 20, "yOffset": down_px}
    dot = {"type": "point", "filled": True, "size": 95, "opacity": 1}
    return [
        # Texts have an outline in the background colour, so that the line does not cross them.
        layer("neutral", line, {"type": "rule", "color": "var(--dim)"}, {"x": at["x"]}),
        layer("spans", spans, {"type": "rule", "strokeWidth": 3}, across),
        layer("points", present, dot, {**at, **look}),
        layer("limits", limits, {**tick, "thickness": 3, "color": "var(--ink)"}, at),
        *_words(rows, tiers),
    ]


def _row(number: int, dot: Dot) -> dict[str, Any]:
    colour, shape, _ = LOOKS[dot.kind]
    ends = (dot.low, dot.high) if dot.low is not None and dot.high is not None else (None, None)
    return {
        "i": number,
        "name": dot.name,
        "said": dot.value_text,
        "v": dot.value,
        "low": ends[0],
        "high": ends[1],
        "shape": shape,
        "colour": f"var(--{colour})",
    }


def _x(axis: Axis) -> dict[str, Any]:
    kind = {"type": "log"} if axis.is_log else {"zero": False}
    ticks = {"expr": "max(3, floor(width / 110))"}
    return {
        "type": "quantitative",
        "title": axis.title,
        "scale": {**kind, "nice": False, "padding": 14},
        "axis": {"format": axis.format, "tickCount": ticks, "labelOverlap": "greedy"},
    }


def _y(at: float) -> dict[str, Any]:
    """Return the vertical encoding of a row; `at` is the position within its band."""
    scale = {"type": "band", "padding": 0}
    return {"field": "i", "type": "ordinal", "axis": None, "scale": scale, "bandPosition": at}


def _words(rows: list[dict[str, Any]], tiers: _Tiers) -> list[dict[str, Any]]:
    """Return the texts of a row: name and value, cut to the width."""
    mark = {"type": "text", "baseline": "middle", "align": "left", "limit": {"expr": "width"}}
    name = {**mark, "fontSize": 12, "color": "var(--ink)"}
    figure = {**mark, "fontSize": 11, "color": "var(--dim)"}
    if tiers.is_shared:
        name["limit"] = {"expr": f"width - {_FIGURE_PX}"}
        figure |= {"align": "right", "limit": _FIGURE_PX - 10}
    at = {"value": "width" if tiers.is_shared else 0}
    return [
        layer(
            "rows",
            rows,
            name,
            {"x": {"value": 0}, "y": _y(tiers.name), "text": {"field": "name"}},
        ),
        layer("rows", None, figure, {"x": at, "y": _y(tiers.figure), "text": {"field": "said"}}),
    ]
