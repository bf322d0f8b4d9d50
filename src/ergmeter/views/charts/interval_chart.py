"""Dots with their intervals, a row each, and a line where nothing differs.

The trap: a dot that looks as sure as its neighbour. One whose scatter is not known has no interval,
a shape of its own and the words beside it; what is absent keeps its row and says so. Names stand
above their dots and not on an axis, where a long one would be cut or leave the dots no room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ergmeter.views.charts.chart import Chart, Table, framed

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["better", "worse", "differs", "open", "pass", "plain", "bare", "absent"]
# A colour, a shape, and the sign that stands for the shape in a legend.
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
_FIGURE_PX = 190  # what the words on the right may take of a row
_LONG = 22  # characters of a name, beyond which a narrow window has no room for words beside it


@dataclass(frozen=True, slots=True)
class _Tiers:
    """How high a row is, and where within it its name, its figure and its dot are."""

    px: int
    name: float
    figure: float
    dot: float

    @property
    def is_shared(self) -> bool:
        """Whether name and figure stand in one line."""
        return self.name == self.figure


_TWO = _Tiers(40, 0.22, 0.22, 0.68)
_THREE = _Tiers(58, 0.16, 0.44, 0.78)


@dataclass(frozen=True, slots=True)
class Dot:
    """One row: a value with its interval, if it has one, or nothing, and what is said of it.

    `limits` are what a rule allows, where there is one.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    said: str
    kind: Kind
    limits: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """What the dots are measured along. `neutral` is where nothing differs."""

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
    """The rows in their order. `words` says what each kind of dot stands for."""
    described = "; ".join(f"{one.name} {one.said}" for one in dots[:12])
    more = f"; and {len(dots) - 12} more, in the table" if len(dots) > 12 else ""
    used = dict.fromkeys(one.kind for one in dots)
    legend = tuple(
        (f"{LOOKS[kind][2]} {said}", LOOKS[kind][0]) for kind, said in words.items() if kind in used
    )
    tiers = _THREE if any(len(one.name) > _LONG for one in dots) else _TWO
    layers = _layers(dots, axis, tiers)
    spec = framed(f"{title}: {described}{more}", tiers.px * len(dots), layers)
    return Chart(id_, title, unit, spec, table, note, legend=legend)


def _layers(dots: Sequence[Dot], axis: Axis, tiers: _Tiers) -> list[dict[str, Any]]:
    """From the line behind all to the words; Vega complains of a layer that has nothing in it."""
    rows = [_row(number, one) for number, one in enumerate(dots)]
    drawn = [row for row in rows if row["v"] is not None]
    spans = [row for row in drawn if row["low"] is not None]
    limits = [{"i": n, "v": at} for n, one in enumerate(dots) for at in one.limits]
    line = [] if axis.neutral is None else [{"v": axis.neutral}]
    x, y = _x(axis), _y(tiers.dot)
    across = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": _colour()}
    shape = {"field": "shape", "type": "nominal", "scale": None, "legend": None}
    tooltip = [{"field": "name", "title": "of"}, {"field": "said", "title": "is"}]
    at = {"x": {**x, "field": "v"}, "y": y}
    down_px = (tiers.dot - 0.5) * tiers.px  # a tick heeds no place within its band
    tick = {"type": "tick", "orient": "vertical", "size": 20, "yOffset": down_px}
    dot = {"type": "point", "filled": True, "size": 95, "opacity": 1}
    layers = [
        # Words have a rim of the ground's colour, so that the line does not strike them out.
        _layer("neutral", line, {"type": "rule", "color": "var(--dim)"}, {"x": at["x"]}),
        _layer("spans", spans, {"type": "rule", "strokeWidth": 3}, across),
        _layer(
            "points", drawn, dot, {**at, "color": _colour(), "shape": shape, "tooltip": tooltip}
        ),
        _layer("limits", limits, {**tick, "thickness": 3, "color": "var(--ink)"}, at),
    ]
    return [*(one for one in layers if one["data"]["values"]), *_words(rows, tiers)]


def _layer(
    name: str, values: list[dict[str, Any]], mark: dict[str, Any], encoding: dict[str, Any]
) -> dict[str, Any]:
    return {
        "data": {"name": name, "values": values},
        "mark": {**mark, "aria": False},
        "encoding": encoding,
    }


def _row(number: int, one: Dot) -> dict[str, Any]:
    colour, shape, _ = LOOKS[one.kind]
    ends = (one.low, one.high) if one.low is not None and one.high is not None else (None, None)
    return {
        "i": number,
        "name": one.name,
        "said": one.said,
        "v": one.value,
        "low": ends[0],
        "high": ends[1],
        "shape": shape,
        "colour": f"var(--{colour})",
    }


def _x(axis: Axis) -> dict[str, Any]:
    kind = {"type": "log"} if axis.is_log else {"zero": False}
    return {
        "type": "quantitative",
        "title": axis.title,
        "scale": {**kind, "nice": False, "padding": 14},
        "axis": {
            "format": axis.format,
            "tickCount": {"expr": "max(3, floor(width / 110))"},
            "labelOverlap": "greedy",
        },
    }


def _y(at: float) -> dict[str, Any]:
    """A row's place; its band is the row, and `at` says where within it."""
    scale = {"type": "band", "padding": 0}
    return {"field": "i", "type": "ordinal", "axis": None, "scale": scale, "bandPosition": at}


def _colour() -> dict[str, Any]:
    return {"field": "colour", "type": "nominal", "scale": None, "legend": None}


def _words(rows: list[dict[str, Any]], tiers: _Tiers) -> list[dict[str, Any]]:
    """The name of a row, and its figure on the right of it or below it; cut where the window is too
    narrow for them."""
    mark = {"type": "text", "baseline": "middle", "fontSize": 12, "aria": False}
    wide = {"expr": f"width - {_FIGURE_PX}" if tiers.is_shared else "width"}
    name = {**mark, "align": "left", "limit": wide}
    figure = {**mark, "fontSize": 11, "align": "left", "limit": {"expr": "width"}}
    at = 0 if not tiers.is_shared else "width"
    if tiers.is_shared:
        figure |= {"align": "right", "limit": _FIGURE_PX - 10}
    return [
        {
            "data": {"name": "rows", "values": rows},
            "mark": {**name, "color": "var(--ink)"},
            "encoding": {"x": {"value": 0}, "y": _y(tiers.name), "text": {"field": "name"}},
        },
        {
            "data": {"name": "rows"},
            "mark": {**figure, "color": "var(--dim)"},
            "encoding": {"x": {"value": at}, "y": _y(tiers.figure), "text": {"field": "said"}},
        },
    ]
