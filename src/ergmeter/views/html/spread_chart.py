"""Outputs of `erg analyze` side by side: each as a point, each group's mean and spread behind it.

The trap: a mean without its repeats. Two means differ always; whether that says anything is seen
from how far the repeats lie apart, so every output is drawn, and a group of one has no spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.neuron.compare import METRICS
from ergmeter.units import significant
from ergmeter.views.analyze_compare import heads, names_of
from ergmeter.views.html.charts import Chart, Table, framed

if TYPE_CHECKING:
    from ergmeter.neuron.compare import Comparison

_ROW_PIXELS = 30
_LEGEND = (("an output", "c1"), ("mean ± standard deviation", "c2"))
_WITHIN_FRAC = 0.08  # of the axis, kept free at both ends


def spread_charts(found: Comparison) -> list[Chart]:
    """One for each metric that an output has, and that can be compared."""
    return [_chart(found, name) for name in METRICS if _values(found, name)]


def _values(found: Comparison, name: str) -> list[dict[str, Any]]:
    """Each output's own, under its group."""
    called, labels = names_of(found), _groups(found)
    return [
        {"g": label, "v": value, "said": significant(value, 5), "name": called[output.path]}
        for label, group in zip(labels, found.groups, strict=True)
        for output in group.outputs
        if (value := output.value(name, convention=found.convention)) is not None
    ]


def _groups(found: Comparison) -> list[str]:
    """The groups by number and by their first output."""
    called = names_of(found)
    return [
        f"{number}: {called[group.outputs[0].path]}"
        + (f" + {len(group.outputs) - 1}" if len(group.outputs) > 1 else "")
        for number, group in enumerate(found.groups, start=1)
    ]


def _chart(found: Comparison, name: str) -> Chart:
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
