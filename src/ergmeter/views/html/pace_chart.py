"""The pace of a Trainium training over the steps of its log, and what was taken as its throughput.

The trap: a compilation of minutes in the first rows, in a mean over all of them. What is not
counted is grey, and the figure that was taken stands as a line among the rows it is made of.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.neuron.pace_line import pace_line
from ergmeter.units import significant
from ergmeter.views.html.charts import Chart, Table, framed

if TYPE_CHECKING:
    from ergmeter.neuron.pace_line import PaceLine
    from ergmeter.neuron.parts import Parts

_POINTS = 1600
_DOTS = 60
_UNIT = "sequences/s"
_LEGEND = (("a line of the log", "c1"), ("what is taken", "c2"))


def pace_chart(parts: Parts | None) -> Chart:
    """The rows of the log. Raises NotMeasurable where they have no pace."""
    if parts is None or parts.log is None:
        raise NotMeasurable("the original keeps no steps: leave out --compat")
    found, taken = pace_line(parts.log, parts.job, points=_POINTS), parts.pace.seq_per_s
    line = found.line
    (low, low_at), (high, high_at) = line.lowest, line.highest
    ends = f"from {significant(low)} to {significant(high)} {_UNIT}"
    drawn = "; lowest and highest of each stretch are drawn" if line.is_bounded else ""
    before = f"before {found.over} {found.counted_from:,.0f}"
    grey = f"; grey is not counted, it is {before}" if found.counted_from > line.t_s[0] else ""
    note = f"{found.how}{grey}"
    taken_of = "of the counted ones" if parts.pace.is_from_log else "as given"
    table = Table(
        ("of the log's last run", _UNIT, f"at {found.over}"),
        (
            ("lowest", significant(low), f"{low_at:,.0f}"),
            ("highest", significant(high), f"{high_at:,.0f}"),
            ("taken", *(("-", "-") if taken is None else (significant(taken), taken_of))),
        ),
    )
    return Chart(
        "pace",
        f"throughput by {found.over}",
        _UNIT,
        framed(f"throughput by {found.over}: {ends}", 190, _layers(found, taken)),
        table,
        note + drawn,
        legend=_LEGEND if taken is not None else _LEGEND[:1],
    )


def _layers(found: PaceLine, taken: float | None) -> list[dict[str, Any]]:
    line = found.line
    rows = [
        {"t": t, "v": None if math.isnan(value) else float(f"{value:.6g}"), "s": _LEGEND[0][0]}
        for t, value in zip(line.t_s.tolist(), line.values.tolist(), strict=True)
    ]
    ends = [rows[0]["t"], max(rows[-1]["t"], rows[0]["t"] + 1)]
    x = {
        "field": "t",
        "type": "quantitative",
        "title": found.over,
        "scale": {"domain": ends, "nice": False, "zero": False},
        "axis": {
            "grid": False, "format": ",d", "tickMinStep": 1,
            "tickCount": {"expr": "max(3, floor(width / 70))"},
        },
    }  # fmt: skip
    y = {
        "field": "v",
        "type": "quantitative",
        "title": _UNIT,
        "scale": {"zero": True, "nice": True},
        "axis": {"tickCount": 5, "format": ",.6~r", "minExtent": 44},
    }
    tooltip = [
        {"field": "t", "title": found.over, "type": "quantitative", "format": ",d"},
        {"field": "v", "title": _UNIT, "type": "quantitative", "format": ".5~g"},
    ]
    few = line.readings <= _DOTS
    layers: list[dict[str, Any]] = []
    if found.counted_from > ends[0]:
        shade = {"type": "rect", "clip": True, "color": "var(--shade)", "aria": False}
        layers.append(
            {
                "data": {"name": "uncounted", "values": [{"t": ends[0], "e": found.counted_from}]},
                "mark": shade,
                "encoding": {"x": x, "x2": {"field": "e"}},
            }
        )
    layers.append(
        {
            "data": {"name": "points", "values": rows},
            "mark": {
                "type": "line", "clip": True, "aria": False, "strokeWidth": 1.5,
                "color": "var(--c1)", "point": {"size": 14, "color": "var(--c1)"} if few else False,
            },
            "encoding": {"x": x, "y": y, "tooltip": tooltip},
        }
    )  # fmt: skip
    if taken is not None:
        layers.append(
            {
                "data": {"name": "taken", "values": [{"v": float(f"{taken:.6g}")}]},
                "mark": {"type": "rule", "color": "var(--c2)", "strokeWidth": 1.5, "aria": False},
                "encoding": {"y": {"field": "v", "type": "quantitative"}},
            }
        )
    return layers
