"""The builder of Vega-Lite specifications from chart parts.

A specification is a frame around marks, from back to front. A mark has axes, colours and a tooltip:

    x, y = vega.axis("t", "s", ticks=5), vega.axis("v", "W", zero=False)
    vega.framed(
        "power over time",
        170,
        [
            vega.rule("marks", marks, x=x, color="mark", strokeDash=[3, 3]),
            vega.line("points", rows, x=x, y=y, color="c1", strokeWidth=1.5),
        ],
    )

Options that a part does not name are those of Vega-Lite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from ergmeter.views.charts.chart import Scale, css

Rows: TypeAlias = "list[dict[str, Any]]"
Channel: TypeAlias = "dict[str, Any]"  # how a field of the rows, or a constant, is drawn
Layer: TypeAlias = "dict[str, Any]"

NO_TITLE = " "  # takes the room of one
# All charts over time have the same left margin, so that their time axes align.
LEFT: dict[str, Any] = {"minExtent": 64, "maxExtent": 64}
NEAREST = "near"  # the selection that follows the pointer
# For files: the page has legends that wrap.
WRAPPED_LEGEND = {"columns": {"expr": "max(1, floor(width / 170))"}}
_TICKS = 5
_DOTS = 60  # readings of a line, up to which each is a dot
# The colour and shape that each row names itself.
BY_COLOUR: Channel = {"field": "colour", "type": "nominal", "scale": None, "legend": None}
BY_SHAPE: Channel = {**BY_COLOUR, "field": "shape"}
_CHANNELS = ("x", "y", "color", "stroke", "shape", "strokeDash", "opacity", "order")


def framed(description: str, height: int, layers: list[Layer]) -> dict[str, Any]:
    """Return a specification of these layers, as wide as its container."""
    return {
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
    }


def filled(layers: list[Layer]) -> list[Layer]:
    """Return the layers that have data: Vega warns about empty ones."""
    return [layer for layer in layers if layer["data"].get("values", True)]


def mark(
    kind: str,
    name: str,
    rows: Rows | None,
    *,
    color: str | Channel = "",
    band: float = 0,
    x2: str = "",
    y2: str = "",
    text: str | Channel = "",
    tooltip: Iterable[Channel] | None = (),
    params: Sequence[dict[str, Any]] = (),
    transform: Sequence[dict[str, Any]] = (),
    **look: Any,  # noqa: ANN401  channels, and the mark's own options
) -> Layer:
    """Return the layer of a mark over the rows of the data `name`.

    Without rows, the data is that of an earlier layer. A colour is a channel, or one of the
    palette. `band` is the height as a share of the row's. `x2`, `y2` and `text` are fields. `look`
    has the other channels, and constants.
    """
    if band:
        look["height"] = {"band": band}
    if color:
        look["color"] = css(color) if isinstance(color, str) else color
    if tooltip is None:
        look["tooltip"] = None
    encoding = {key: look.pop(key) for key in _CHANNELS if isinstance(look.get(key), dict)}
    fields = {"x2": x2, "y2": y2, "text": text}
    encoding |= {
        key: {"field": field} if isinstance(field, str) else field
        for key, field in fields.items()
        if field
    }
    if tooltip:
        encoding["tooltip"] = list(tooltip)
    data = {"name": name} if rows is None else {"name": name, "values": rows}
    layer = {"data": data, "mark": {"type": kind, **look, "aria": False}, "encoding": encoding}
    more = {"params": list(params), "transform": list(transform)}
    return layer | {key: value for key, value in more.items() if value}


bar, line, point, rect, rule, text, tick = (
    partial(mark, kind) for kind in ("bar", "line", "point", "rect", "rule", "text", "tick")
)


def axis(
    field: str,
    title: str | None = "",
    *,
    kind: Literal["quantitative", "nominal"] = "quantitative",
    domain: Sequence[object] = (),
    ticks: int | None = None,
    tick_px: int = 0,
    is_log: bool = False,
    zero: bool | None = None,
    is_binned: bool = False,
    sort: Sequence[str] = (),
    **options: Any,  # noqa: ANN401  of the scale or the axis
) -> Channel:
    """Return a position on an axis: a field with its scale, title and labels.

    `ticks` is their number; with `tick_px` it follows from the width.
    """
    scale: dict[str, Any] = {"type": "log"} if is_log else {}
    scale |= {} if zero is None else {"zero": zero}
    scale |= {key: options.pop(key) for key in ("nice", "padding") if key in options}
    scale |= {"domain": list(domain)} if domain else {}
    if ticks or tick_px:
        options["tickCount"] = ticks or computed(f"max(3, floor(width / {tick_px}))")
    parts = {"sort": list(sort), "scale": scale, "axis": options, "bin": "binned" * is_binned}
    titled = {} if title == "" else {"title": title}
    return {"field": field, "type": kind, **titled} | {k: v for k, v in parts.items() if v}


def numbered_rows(field: str, *, at: float | None = None) -> Channel:
    """Return the vertical position of rows without an axis; `at` is the one within their band."""
    rows = {"field": field, "type": "ordinal", "axis": None}
    band = {"scale": {"type": "band", "padding": 0}, "bandPosition": at}
    return rows if at is None else rows | band


def constant(value: object, *, when: tuple[str, object] | None = None) -> Channel:
    """Return a channel that is the same in all rows, except `when` a test of a row passes."""
    if when is None:
        return {"value": value}
    return {"condition": {"test": when[0], "value": when[1]}, "value": value}


def computed(expression: str) -> dict[str, str]:
    """Return an option that the page computes, such as from its `width`."""
    return {"expr": expression}


def by_value(
    field: str, looks: Mapping[Any, Any] | Sequence[str], *, legend: dict[str, Any] | bool = True
) -> Channel:
    """Return a channel by the values of a field: looks by value, or values in the palette's order.

    `legend`: whether there is one in image files, or its options.
    """
    scale: dict[str, Any] = {"domain": list(looks)}
    if isinstance(looks, Mapping):
        scale["range"] = list(looks.values())
    chosen = {} if legend is True else {"legend": legend or None}
    return {"field": field, "type": "nominal", "scale": scale, **chosen}


def quantity(field: str, title: str, **more: str) -> Channel:
    """Return a line of a tooltip for a quantity, with its d3 format."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def tooltip(titles: Mapping[str, str], **formats: str) -> list[Channel]:
    """Return a tooltip: titles by field, and d3 formats of some fields."""
    return [
        {"field": field, "title": title, **({"format": formats[field]} if field in formats else {})}
        for field, title in titles.items()
    ]


def bar_texts(y: Channel, **look: Any) -> Layer:  # noqa: ANN401
    """Return the layer of the texts `said` above the bars of the layer `points`."""
    place = partial(
        text, "points", None, x=constant(0), y=y, text="said", align="left", dx=3, dy=-3
    )
    return place(baseline="bottom", fontSize=11, color=constant(css("ink")), **look)


def signs(name: str, rows: Rows, **look: Any) -> Layer:  # noqa: ANN401
    """Return points in the colour and shape that each row names."""
    return point(name, rows, color=BY_COLOUR, shape=BY_SHAPE, filled=True, opacity=1, **look)


# Lines of readings.


def line_layers(
    rows: Rows,
    *,
    x: Channel,
    y: Channel,
    color: Channel,
    tooltip: Iterable[Channel],
    labels: Sequence[str] | None = None,
    **look: Any,  # noqa: ANN401  of the lines alone
) -> list[Layer]:
    """Return lines through readings, and the reading nearest to the pointer with its tooltip.

    `labels` are the texts `s` of the tooltip; the field `i` of a row is a number in them.
    """
    axes: dict[str, Any] = {"x": x, "y": y, "color": color}
    select = {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout"}
    is_near = {"condition": {"param": NEAREST, "empty": False, "value": 1}, "value": 0}
    transform: list[dict[str, Any]] = [{"filter": "datum.v !== null"}]
    if labels is not None:
        names = [{"i": number, "s": label} for number, label in enumerate(labels)]
        source = {"data": {"values": names}, "key": "i", "fields": ["s"]}
        transform.append({"lookup": "i", "from": source})
    return [
        line("points", rows, **axes, params=[zoom()], clip=True, **look),
        point(
            "points",
            None,
            **axes,
            opacity=is_near,
            tooltip=tooltip,
            transform=transform,
            params=[{"name": NEAREST, "select": select}],
            clip=True,
            filled=True,
            size=55,
        ),
    ]


def dots(readings: int, size: int) -> dict[str, Any] | bool:
    """Return the dots of a line of few readings, False for many."""
    return {"size": size, "filled": True, "aria": False} if readings <= _DOTS else False


def zoom() -> dict[str, Any]:
    """Return the shared zoom: Shift and the wheel, or dragging. The wheel alone scrolls."""
    return {
        "name": "zoom",
        "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
        "bind": "scales",
    }


def value_words(scale: Scale) -> Channel:
    """Return the value's part of a tooltip."""
    is_share = scale.unit == "frac"
    title = "%" if is_share else scale.unit or "value"
    return quantity("v", title, format=".1%" if is_share else ".5~g")


def value_axis(rows: Rows, scale: Scale, *, has_zero: bool) -> Channel:
    """Return the axis of the values `v`: from 0 if `has_zero`, a share up to 1.

    A share above 1 is wrong, and is shown. All-zero values still get an axis.
    """
    most = max((row["v"] for row in rows if row["v"] is not None), default=0.0)
    if scale.unit == "frac":
        domain = (0, max(1.0, most))
        return axis("v", "%", domain=domain, ticks=_TICKS, format=".0%", **LEFT)
    # The first and the last tick are the ends of the axis, and no line runs beyond them.
    ends: dict[str, Any]
    ends = {"domain": (0, 1)} if has_zero and not most else {"zero": has_zero, "nice": _TICKS}
    return axis("v", scale.unit or NO_TITLE, ticks=_TICKS, format=",.6~r", **LEFT, **ends)
