"""Dots with confidence intervals, one row each, and a line at no difference.

A value without an interval has its own shape and a note. An absent value keeps its row. Names stand
above their dots: on an axis, long names would be cut or take the space of the dots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ergmeter.views.charts import vega
from ergmeter.views.charts.chart import Chart, Table, css

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.compare.verdicts import State
    from ergmeter.stats.ratio import Contrast

# Colour, shape, and the shape's sign in a legend.
LOOKS: dict[State, tuple[str, str, str]] = {
    "better": ("c3", "triangle-up", "▲"),
    "worse": ("c2", "triangle-down", "▼"),
    "differs": ("c7", "cross", "✚"),
    "not shown": ("c1", "square", "■"),
    "inconclusive": ("c1", "square", "■"),
    "pass": ("c3", "circle", "●"),
    "no interval": ("c8", "diamond", "◆"),
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
    """One row: its text, and a value with its interval, both optional.

    `limits` are the values that a rule allows, if there is one.
    """

    name: str
    value_text: str
    state: State
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limits: tuple[float, ...] = ()


def contrast_dot(
    name: str,
    text: str,
    state: State,
    change: Contrast | None,
    *,
    factor: float = 1.0,
    limits: Sequence[float] = (),
) -> Dot:
    """Return the row of a change with its interval and limits, divided by the factor of a scale."""
    if change is None:
        return Dot(name, text, "absent")
    ends = (change.value, change.low, change.high)
    value, low, high = (None if end is None else end / factor for end in ends)
    return Dot(name, text, state, value, low, high, tuple(end / factor for end in limits))


def interval_chart(
    id_: str,
    title: str,
    dots: Sequence[Dot],
    axis_title: str,
    *,
    is_ratio: bool,
    words: dict[State, str],
    table: Table,
    note: str = "",
    unit: str = "",
    number_format: str = ",.4~r",
) -> Chart:
    """Return the chart, rows in order. `words` explains the dot of each state.

    `is_ratio`: on a logarithmic axis, with 1 as no difference instead of 0.
    """
    described = "; ".join(f"{dot.name} {dot.value_text}" for dot in dots[:12])
    more = f"; and {len(dots) - 12} more, in the table" if len(dots) > 12 else ""
    used = {dot.state for dot in dots}
    legend = tuple(
        (f"{LOOKS[state][2]} {word}", LOOKS[state][0])
        for state, word in words.items()
        if state in used
    )
    tiers = _THREE if any(len(dot.name) > _LONG for dot in dots) else _TWO
    x = partial(
        vega.axis,
        title=axis_title,
        is_log=is_ratio,
        zero=None if is_ratio else False,
        nice=False,
        padding=14,
        format=number_format,
        tick_px=110,
        labelOverlap="greedy",
    )
    layers = vega.filled(_layers(dots, x, tiers, neutral=1.0 if is_ratio else 0.0))
    spec = vega.framed(f"{title}: {described}{more}", tiers.px * len(dots), layers)
    return Chart(id_, title, unit, spec, table, note, legend=legend)


def _layers(
    dots: Sequence[Dot], x: Callable[[str], vega.Channel], tiers: _Tiers, *, neutral: float
) -> list[vega.Layer]:
    """Return the layers from back to front."""
    rows = [_row(number, dot) for number, dot in enumerate(dots)]
    present = [row for row in rows if row["v"] is not None]
    spans = [row for row in present if row["low"] is not None]
    limits = [{"i": n, "v": at} for n, dot in enumerate(dots) for at in dot.limits]
    y = vega.numbered_rows("i", at=tiers.dot)
    tick: dict[str, Any] = {"orient": "vertical", "size": 20, "thickness": 3, "color": "ink"}
    tick["yOffset"] = (tiers.dot - 0.5) * tiers.px  # ticks ignore the position within a band
    words = vega.tooltip({"name": "of", "said": "is"})
    return [
        # Texts have an outline in the background colour, so that the line does not cross them.
        vega.rule("neutral", [{"v": neutral}], x=x("v"), color="dim"),
        vega.rule("spans", spans, x=x("low"), x2="high", y=y, color=vega.BY_COLOUR, strokeWidth=3),
        vega.signs("points", present, x=x("v"), y=y, tooltip=words, size=95),
        vega.tick("limits", limits, x=x("v"), y=y, **tick),
        *_words(rows, tiers),
    ]


def _row(number: int, dot: Dot) -> dict[str, Any]:
    colour, shape, _ = LOOKS[dot.state]
    return {
        "i": number,
        "name": dot.name,
        "said": dot.value_text,
        "v": dot.value,
        "low": dot.low,
        "high": dot.high,
        "shape": shape,
        "colour": css(colour),
    }


def _words(rows: vega.Rows, tiers: _Tiers) -> list[vega.Layer]:
    """Return the texts of a row: name and value, cut to the width."""
    name_px, left = vega.computed("width"), vega.constant(0)
    value: dict[str, Any] = {"x": left, "align": "left", "limit": name_px}
    if tiers.is_shared:
        name_px = vega.computed(f"width - {_FIGURE_PX}")
        value = {"x": vega.constant("width"), "align": "right", "limit": _FIGURE_PX - 10}
    at_name, at_value = (vega.numbered_rows("i", at=at) for at in (tiers.name, tiers.figure))
    name = partial(vega.text, "rows", rows, text="name", fontSize=12, color="ink")
    figure = partial(vega.text, "rows", None, text="said", fontSize=11, color="dim")
    return [
        name(x=left, y=at_name, align="left", limit=name_px, baseline="middle"),
        figure(y=at_value, baseline="middle", **value),
    ]
