"""Dots with confidence intervals, one row each, and a line at no difference.

A value without an interval has its own shape and a note. An absent value keeps its row. Names stand
above their dots: on an axis, long names would be cut or take the space of the dots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ergmeter.compare.verdicts import State
from ergmeter.stats.ratio import Contrast
from ergmeter.views.charts import vega
from ergmeter.views.charts.chart import Chart, Table, css

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
# The height of a row, and the positions of name, value and dot within it.
_ROW_PX = 58
_NAME_AT, _VALUE_AT, _DOT_AT = 0.16, 0.44, 0.78


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
    layers = vega.filled(_layers(dots, x, neutral=1.0 if is_ratio else 0.0))
    spec = vega.framed(f"{title}: {described}{more}", _ROW_PX * len(dots), layers)
    return Chart(id_, title, unit, spec, table, note, legend=legend)


def _layers(
    dots: Sequence[Dot], x: Callable[[str], vega.Channel], *, neutral: float
) -> list[vega.Layer]:
    """Return the layers from back to front."""
    row_at = partial(vega.numbered_rows, "i")
    rows = [_row(number, dot) for number, dot in enumerate(dots)]
    present = [row for row in rows if row["v"] is not None]
    spans = [row for row in present if row["low"] is not None]
    limits = [{"i": n, "v": at} for n, dot in enumerate(dots) for at in dot.limits]
    y = row_at(at=_DOT_AT)
    tick: dict[str, Any] = {"orient": "vertical", "size": 20, "thickness": 3, "color": "ink"}
    tick["yOffset"] = (_DOT_AT - 0.5) * _ROW_PX  # ticks ignore the position within a band
    words = vega.tooltip({"name": "of", "said": "is"})
    left, width = vega.constant(0), vega.computed("width")
    text = partial(vega.text, x=left, align="left", limit=width, baseline="middle")
    return [
        # Texts have an outline in the background colour, so that the line does not cross them.
        vega.rule("neutral", [{"v": neutral}], x=x("v"), color="dim"),
        vega.rule("spans", spans, x=x("low"), x2="high", y=y, color=vega.BY_COLOUR, strokeWidth=3),
        vega.signs("points", present, x=x("v"), y=y, tooltip=words, size=95),
        vega.tick("limits", limits, x=x("v"), y=y, **tick),
        text("rows", rows, text="name", y=row_at(at=_NAME_AT), fontSize=12, color="ink"),
        text("rows", None, text="said", y=row_at(at=_VALUE_AT), fontSize=11, color="dim"),
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
