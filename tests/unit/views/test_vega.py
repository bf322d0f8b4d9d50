"""The builder of Vega-Lite specifications: what is a channel, and that nobody else writes one."""

from __future__ import annotations

import re
from pathlib import Path

import ergmeter.views
from ergmeter.views.charts import vega

ROWS = [{"t": 0.0, "v": 1.0}]


def test_channels_are_encoded_and_constants_are_of_the_mark() -> None:
    x = vega.axis("t", "s", domain=(0, 1), nice=False, tick_px=70, grid=False)
    layer = vega.rule("marks", ROWS, x=x, x2="e", color="mark", opacity=0.7, band=0.4)
    assert layer["data"] == {"name": "marks", "values": ROWS}
    assert layer["mark"] == {
        "type": "rule",
        "color": "var(--mark)",
        "opacity": 0.7,
        "height": {"band": 0.4},
        "aria": False,
    }
    assert layer["encoding"] == {
        "x": {
            "field": "t",
            "type": "quantitative",
            "title": "s",
            "scale": {"nice": False, "domain": [0, 1]},
            "axis": {"grid": False, "tickCount": {"expr": "max(3, floor(width / 70))"}},
        },
        "x2": {"field": "e"},
    }


def test_a_look_that_depends_on_the_row_is_a_channel() -> None:
    faded = vega.constant(1, when=("datum.odd === 1", 0.65))
    layer = vega.rect("points", None, color=vega.BY_COLOUR, opacity=faded, tooltip=None)
    assert layer["data"] == {"name": "points"}
    assert layer["mark"] == {"type": "rect", "tooltip": None, "aria": False}
    assert layer["encoding"] == {
        "color": {"field": "colour", "type": "nominal", "scale": None, "legend": None},
        "opacity": {"condition": {"test": "datum.odd === 1", "value": 0.65}, "value": 1},
    }


def test_a_channel_by_value_has_looks_or_the_order_of_the_palette() -> None:
    assert vega.by_value("s", ["a", "b"])["scale"] == {"domain": ["a", "b"]}
    colours = vega.by_value("s", {"a": "red"}, legend=False)
    assert colours["scale"] == {"domain": ["a"], "range": ["red"]}
    assert colours["legend"] is None


def test_an_empty_layer_is_left_out_and_one_that_shares_data_is_not() -> None:
    empty, shared = vega.rule("marks", []), vega.text("points", None, text="said")
    assert vega.filled([empty, shared]) == [shared]


def test_only_the_builder_writes_encodings_and_marks() -> None:
    literal = re.compile(r'"(encoding|mark|tickCount|quantitative|nominal|field)":|"type": "')
    views = Path(ergmeter.views.__file__).parent
    modules = [*(views / "charts").glob("*_chart*.py"), views / "charts" / "compare_curves.py"]
    modules += [views / "run" / "explain.py", views / "calculate" / "analyze.py", views / "gate.py"]
    assert len(modules) >= 8
    found = [
        f"{path.name}: {line.strip()}"
        for path in modules
        for line in path.read_text(encoding="utf-8").splitlines()
        if literal.search(line)
    ]
    assert not found
