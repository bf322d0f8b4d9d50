"""The curves of several runs as charts: who has which line, over what, and what is said below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter.compare.entry import Entry, Group
from ergmeter.compare.run_curves import (
    AXES,
    CURVES,
    Axis,
    ComparedCurves,
    Curve,
    RunCurve,
    RunCurves,
)
from ergmeter.records import Missing
from ergmeter.views.charts.chart import Chart, with_colours
from ergmeter.views.charts.compare_curves import CourseCharts, course_charts
from ergmeter.views.charts.plots import converter, vega_lite_version

pytest.importorskip("vl_convert")


def course(*values: float, axes: tuple[Axis, ...] = AXES, note: str = "real tokens") -> RunCurve:
    places = np.arange(1.0, len(values) + 1)
    each = {"step": 1.0, "tokens": 512.0, "time": 0.5}
    x = {axis: places * each[axis] for axis in axes}
    return RunCurve(x, np.array(values), len(values), "measured", note)


def traced(
    group: int, repeat: int, *, lacking: dict[Axis, str] | None = None, **curves: RunCurve
) -> RunCurves:
    whole = {curve: curves.get(curve, Missing(f"no {curve}")) for curve in CURVES}
    return RunCurves(group, repeat, f"/runs/{group}/{repeat}", whole, lacking or {})


def groups(*sizes: int) -> list[Group]:
    return [
        Group(
            f"g{n}",
            tuple(
                Entry(f"/runs/{n}/{run}", "", {}, {}, Path(f"/runs/{n}/{run}"))
                for run in range(size)
            ),
        )
        for n, size in enumerate(sizes)
    ]


def made(
    *runs: RunCurves, sizes: tuple[int, ...], left_out: int = 0, x: Axis | None = None
) -> CourseCharts:
    return course_charts(ComparedCurves(runs, left_out, 0), groups(*sizes), x=x)


def chart(found: CourseCharts, curve: Curve) -> Chart:
    (one,) = [one for one in found.charts if one.id == f"course-{curve}"]
    return one


def layer(one: Chart) -> dict[str, Any]:
    assert one.spec is not None
    first: dict[str, Any] = one.spec["layer"][0]
    return first


def test_a_group_has_a_colour_and_each_repeat_its_dashes() -> None:
    runs = [traced(group, repeat, loss=course(3.0, 2.0)) for group in (0, 2) for repeat in (0, 1)]
    one = chart(made(*runs, sizes=(2, 2, 2)), "loss")
    assert one.legend == (
        ("g0: 0", "c1 dash0"),
        ("g0: 1", "c1 dash1"),
        ("g2: 0", "c2 dash0"),
        ("g2: 1", "c2 dash1"),
    )
    encoding = layer(one)["encoding"]
    assert encoding["color"]["scale"]["range"] == [f"var(--c{n})" for n in (1, 1, 2, 2)]
    assert encoding["strokeDash"]["scale"]["range"] == [[1, 0], [7, 3], [1, 0], [7, 3]]


def test_a_point_has_its_place_on_every_axis_and_a_break_no_value() -> None:
    found = made(traced(0, 0, power_w=course(1500.0, float("nan"), 900.0)), sizes=(1,))
    one = chart(found, "power_w")
    assert one.unit == "kW"
    assert layer(one)["data"]["values"] == [
        {"i": 0, "v": 1.5, "step": 1.0, "tokens": 512, "time": 0.5},
        {"i": 0, "v": None, "step": 2.0, "tokens": 1024, "time": 1.0},
        {"i": 0, "v": 0.9, "step": 3.0, "tokens": 1536, "time": 1.5},
    ]
    assert one.table is not None
    assert one.table.rows == (
        ("g0", "measured", "3", "0.9 kW", "1.5 kW", "0.9 kW", "3", "1,536", "1.5 s", "real tokens"),
    )


def test_losses_are_over_tokens_if_all_have_them_and_the_rest_over_time() -> None:
    whole = traced(0, 0, loss=course(3.0), power_w=course(1.0), tokens_per_s=course(1.0))
    found = made(whole, sizes=(1,))
    own = {one.id: (one.axis, layer(one)["encoding"]["x"]["field"]) for one in found.charts}
    assert own == {
        "course-tokens_per_s": ("time", "time"),
        "course-loss": ("tokens", "tokens"),
        "course-power_w": ("time", "time"),
    }
    assert found.first == "own"
    assert [name for name, _ in found.axes] == ["own", "step", "tokens", "time"]
    silent = traced(1, 0, loss=course(3.0, axes=("step", "time")), lacking={"tokens": "none told"})
    found = made(whole, silent, sizes=(1, 1))
    assert chart(found, "loss").axis == "step"
    assert "tokens" in chart(found, "loss").axes
    assert "Not over tokens: g1 (none told)." in found.notes


def test_the_axis_that_was_asked_for_is_shown_first_where_there_is_one() -> None:
    run = traced(0, 0, loss=course(3.0), power_w=course(1.0, axes=("time",)))
    found = made(run, sizes=(1,), x="step")
    assert found.first == "step"
    assert layer(chart(found, "loss"))["encoding"]["x"]["field"] == "step"
    assert layer(chart(found, "power_w"))["encoding"]["x"]["field"] == "time"
    found = made(traced(0, 0, power_w=course(1.0, axes=("time",))), sizes=(1,), x="tokens")
    assert found.first == "own"
    assert found.notes[-1] == "Not over tokens, as requested: no run has them."


def test_who_lacks_a_curve_is_named_and_a_curve_that_all_lack_too() -> None:
    runs = [traced(0, 0, loss=course(3.0), power_w=course(9.0)), traced(1, 0, loss=course(2.0))]
    found = made(*runs, sizes=(1, 1))
    assert [one.id for one in found.charts] == ["course-loss", "course-power_w"]
    assert chart(found, "power_w").note.endswith("no line of g1: no power_w")
    assert [label for label, _ in chart(found, "power_w").legend] == ["g0"]
    assert "no line" not in chart(found, "loss").note
    assert "Not shown: throughput. Why: no tokens_per_s" in found.notes
    assert not any("loss" in line for line in found.notes)


def test_what_is_left_out_is_counted_with_the_rule() -> None:
    found = made(traced(0, 0, loss=course(3.0)), sizes=(4,), left_out=3)
    assert found.notes[0] == (
        "1 of 4 runs are drawn: the first of each group in turn, at most 8 groups, 6 runs of a"
        " group and 12 lines."
    )
    nobody = course_charts(ComparedCurves((), 0, 3), groups(0))
    assert (nobody.charts, nobody.axes) == ((), ())
    assert nobody.notes == (
        "3 runs are not drawn: a ledger's row has no steps and no samples: name the run's"
        " directory.",
    )


def test_different_tokens_are_told() -> None:
    runs = [
        traced(0, 0, tokens_per_s=course(9.0)),
        traced(1, 0, tokens_per_s=course(9.0, note="tokens as printed")),
    ]
    note = chart(made(*runs, sizes=(1, 1)), "tokens_per_s").note
    assert "not all count the same tokens: the table says which" in note
    assert "not all count" not in chart(made(runs[0], sizes=(1,)), "tokens_per_s").note


def test_a_long_name_is_not_in_every_point() -> None:
    name = "x" * 300
    group = Group(name, (Entry("/runs/0", "", {}, {}, Path("/runs/0")),))
    run = traced(0, 0, loss=course(*np.linspace(3.0, 2.0, 200)))
    found = course_charts(ComparedCurves((run,), 0, 0), [group])
    assert json.dumps(found.charts[0].spec).count(name) == 1


def test_every_spec_is_one_that_vega_can_draw_in_both_lights() -> None:
    runs = [
        traced(0, n, loss=course(3.0, 2.0), power_w=course(1.0, float("nan"), 2.0))
        for n in range(6)
    ]
    found = made(*runs, sizes=(6,))
    for one in found.charts:
        assert one.spec is not None
        assert json.loads(json.dumps(one.spec, allow_nan=False)) == one.spec
        for theme in ("light", "dark"):
            spec = {**with_colours(one.spec, theme), "width": 600}
            drawn = converter().vegalite_to_svg(spec, vl_version=vega_lite_version())
            assert "var(" not in drawn
            assert drawn.count("stroke-dasharray") >= 5
