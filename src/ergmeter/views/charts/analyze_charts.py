"""The pace of a Trainium training over the steps of its log, and what was taken as its throughput.

The trap: a compilation of minutes in the first rows, in a mean over all of them. What is not
counted is grey, and the figure that was taken stands as a line among the rows it is made of.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.neuron.compare import METRICS
from ergmeter.neuron.score import factors
from ergmeter.neuron.throughput import pace_line
from ergmeter.units import significant
from ergmeter.views.analyze.compare import heads, names_of
from ergmeter.views.charts.chart import Chart, Table, framed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.neuron.analysis_types import Parts
    from ergmeter.neuron.compare import OutputComparison
    from ergmeter.neuron.score import Factor
    from ergmeter.neuron.throughput import PaceLine

# -- spread chart ----------------------------------------------------------------------------------
# Outputs of `erg analyze` side by side: each as a point, each group's mean and spread behind it.
#
# The trap: a mean without its repeats. Two means differ always; whether that says anything is seen
# from how far the repeats lie apart, so every output is drawn, and a group of one has no spread.


_ROW_PIXELS = 30
_LEGEND = (("an output", "c1"), ("mean ± standard deviation", "c2"))
_WITHIN_FRAC = 0.08  # of the axis, kept free at both ends


def spread_charts(found: OutputComparison) -> list[Chart]:
    """One for each metric that an output has, and that can be compared."""
    return [_chart(found, name) for name in METRICS if _values(found, name)]


def _values(found: OutputComparison, name: str) -> list[dict[str, Any]]:
    """Each output's own, under its group."""
    called, labels = names_of(found), _groups(found)
    return [
        {"g": label, "v": value, "said": significant(value, 5), "name": called[output.path]}
        for label, group in zip(labels, found.groups, strict=True)
        for output in group.outputs
        if (value := output.value(name, convention=found.convention)) is not None
    ]


def _groups(found: OutputComparison) -> list[str]:
    """The groups by number and by their first output."""
    called = names_of(found)
    return [
        f"{number}: {called[group.outputs[0].path]}"
        + (f" + {len(group.outputs) - 1}" if len(group.outputs) > 1 else "")
        for number, group in enumerate(found.groups, start=1)
    ]


def _chart(found: OutputComparison, name: str) -> Chart:
    title = dict(zip(METRICS, heads(found)[1:], strict=True))[name]
    points, means = _values(found, name), []
    for label, group in zip(_groups(found), found.groups, strict=True):
        spread = group.spreads.get(name)
        if spread is not None and spread.deviation is not None:
            ends = {"e": spread.mean + spread.deviation, "b": spread.mean - spread.deviation}
            means.append({"g": label, "v": spread.mean, **ends})
    rows = tuple((point["name"], point["g"], point["said"]) for point in points)
    described = ", ".join(f"{output} {value}" for output, _, value in rows)
    apart = [
        str(number)
        for number, group in enumerate(found.groups, start=1)
        if name in group.not_comparable
    ]
    note = f"group {', '.join(apart)} is not comparable to the one before it" if apart else ""
    return Chart(
        f"spread-{name}",
        title,
        "",
        framed(
            f"{title}: {described}",
            _ROW_PIXELS * len(found.groups) + 10,
            _layers(points, means, title=title, groups=_groups(found)),
        ),
        Table(("output", "group", title), rows),
        note,
        legend=_LEGEND if means else _LEGEND[:1],
    )


def _layers(
    points: list[dict[str, Any]], means: list[dict[str, Any]], *, title: str, groups: list[str]
) -> list[dict[str, Any]]:
    every = [row["v"] for row in points]
    every += [end for row in means for end in (row["b"], row["e"])]
    low, high = min(every), max(every)
    room = (high - low) * _WITHIN_FRAC or abs(high) * _WITHIN_FRAC or 1.0
    x = {
        "field": "v",
        "type": "quantitative",
        "title": title,
        "scale": {"domain": [low - room, high + room], "nice": False, "zero": False},
        "axis": {"format": ".5~g", "tickCount": {"expr": "max(3, floor(width / 90))"}},
    }
    y = {
        "field": "g",
        "type": "nominal",
        "sort": groups,
        "scale": {"domain": groups},
        "title": None,
        "axis": {"labelLimit": 130},
    }
    tooltip = [{"field": "name", "title": "output"}, {"field": "said", "title": title}]
    layers: list[dict[str, Any]] = []
    if means:
        ruled = {"type": "rule", "color": "var(--c2)", "strokeWidth": 3, "aria": False}
        ticked = {"type": "tick", "color": "var(--c2)", "thickness": 3, "size": 18, "aria": False}
        layers += [
            {
                "data": {"name": "means", "values": means},
                "mark": ruled,
                "encoding": {"x": {**x, "field": "b"}, "x2": {"field": "e"}, "y": y},
            },
            {"data": {"name": "means"}, "mark": ticked, "encoding": {"x": x, "y": y}},
        ]
    layers.append(
        {
            "data": {"name": "points", "values": points},
            "mark": {
                "type": "point", "filled": True, "size": 60, "opacity": 0.9, "color": "var(--c1)",
                "aria": False,
            },
            "encoding": {"x": x, "y": y, "tooltip": tooltip},
        }
    )  # fmt: skip
    return layers


# -- score chart -----------------------------------------------------------------------------------
# The score of `erg analyze`, factor by factor, as bars from 1 on a logarithmic axis.
#
# The trap: a product drawn as a stack. On a logarithmic axis a factor of 2 to the right is as long
# as one of 1/2 to the left, a factor of 1 has no bar, and the bar of the score is what the others
# come to, end to end. On any other axis none of this holds.


_TICKS, _FEW_TICKS = 7, 3
_SCORE_CHART_ROW_PIXELS = 34
_SCORE_CHART_LEGEND = (("raises the score", "c1"), ("lowers it", "c2"))
_ROOM = 1.15  # beyond the longest bar


def score_chart(document: Mapping[str, Any]) -> Chart:
    """The factors and their product, of a document with a score or with the reason for none."""
    found = factors(document["training_score_breakdown"])
    score = document["training_score"]
    rows = [_row(one.name, one.ratio, _factor_text(one)) for one in found]
    mark = next((one for one in map(_mark, found) if one), "")
    whole = "not known" if score is None else f"{mark}{significant(score, 5)}"
    rows.append(_row("score", score, whole))
    described = ", ".join(f"{row['name']} {row['said']}" for row in rows)
    table = Table(
        ("factor", "ratio", "log2 of the ratio"),
        (
            *((one.name, _factor_text(one), _added(one.doublings)) for one in found),
            ("score", whole, _added(None if not score else math.log2(score))),
        ),
    )
    return Chart(
        "score_factors",
        "factors of the score",
        "ratio, log scale",
        framed(
            f"factors of the score: {described}",
            _SCORE_CHART_ROW_PIXELS * len(rows),
            _score_chart_layers(rows),
        ),
        table,
        "bars begin at 1, and twice is as long as half: the score's bar is those of its factors"
        " end to end",
        legend=_SCORE_CHART_LEGEND,
    )


def _row(name: str, ratio: float | None, said: str) -> dict[str, Any]:
    is_drawn = ratio is not None and ratio > 0
    side = "raises the score" if not is_drawn or (ratio or 0) >= 1 else "lowers it"
    return {"name": name, "v": ratio if is_drawn else None, "one": 1, "said": said, "s": side}


def _factor_text(one: Factor) -> str:
    if one.ratio is None:
        return "not known"
    return f"{_mark(one)}x {significant(one.ratio, 5)}"


def _mark(one: Factor) -> str:
    return "at least " if one.is_bound else "about " if one.is_uncertain else ""


def _added(doublings: float | None) -> str:
    return "-" if doublings is None else f"{doublings:+.3f}"


def _score_chart_layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
            "domain": [label for label, _ in _SCORE_CHART_LEGEND],
            "range": [f"var(--{colour})" for _, colour in _SCORE_CHART_LEGEND],
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


# -- pace chart ------------------------------------------------------------------------------------


_POINTS = 1600
_DOTS = 60
_UNIT = "sequences/s"
_PACE_CHART_LEGEND = (("a line of the log", "c1"), ("what is taken", "c2"))


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
        framed(f"throughput by {found.over}: {ends}", 190, _pace_chart_layers(found, taken)),
        table,
        note + drawn,
        legend=_PACE_CHART_LEGEND if taken is not None else _PACE_CHART_LEGEND[:1],
    )


def _pace_chart_layers(found: PaceLine, taken: float | None) -> list[dict[str, Any]]:
    line = found.line
    rows = [
        {
            "t": t,
            "v": None if math.isnan(value) else float(f"{value:.6g}"),
            "s": _PACE_CHART_LEGEND[0][0],
        }
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
