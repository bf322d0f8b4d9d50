"""The charts of a comparison as specs: what is in them, and what keeps its place with a reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ergmeter.compare.comparison import Comparison, compare
from ergmeter.compare.entry import Entry, SourceEntries
from ergmeter.compare.grouping import differing_facts
from ergmeter.compare.pairing import CompareOptions
from ergmeter.errors import NotMeasurable
from ergmeter.records import Missing, Reading, Result
from ergmeter.views.charts.chart import Chart, with_colours
from ergmeter.views.charts.compare_charts import compare_charts
from ergmeter.views.charts.plots import converter, vega_lite_version

pytest.importorskip("vl_convert")

RATE, JOULES, LOSS = "throughput.tokens_per_s", "energy.joules_per_token", "training.loss"
NO_SENSOR = Missing("no sensor")


def run(backend: str, seed: int, rate: float, joules: float | None, **facts: str) -> Entry:
    figures: dict[str, Result] = {
        RATE: Reading(rate, "tokens/s", "measured"),
        JOULES: NO_SENSOR if joules is None else Reading(joules, "J/token", "measured"),
        LOSS: Reading(2.0 + seed / 100, "1", "reported"),
    }
    said = {"backend": backend, "seed": str(seed), **facts}
    return Entry(f"{backend}-{seed}", "ledger.csv", said, figures)


def with_memory(one: Entry, value: float) -> Entry:
    held = Reading(value, "B", "measured")
    return replace(one, figures={**one.figures, "memory.device_peak_bytes": held})


def compared(*entries: Entry, **options: Any) -> Comparison:
    return compare(SourceEntries(entries), replace(CompareOptions(), **options))


def charts(found: Comparison) -> dict[str, Chart]:
    return {one.id: one for one in compare_charts(found)}


def data(chart: Chart, name: str) -> list[dict[str, Any]]:
    assert chart.spec is not None
    layers = chart.spec["layer"]
    own = [one["data"] for one in layers if one["data"]["name"] == name]
    return next((one["values"] for one in own if "values" in one), [])


TWO = (
    *(run("a", seed, 100.0, 2.0) for seed in (0, 1)),
    *(run("b", seed, rate, 1.0) for seed, rate in ((0, 150.0), (1, 220.0))),
)


def test_a_ratio_has_the_interval_of_two_pairs_on_a_logarithmic_axis() -> None:
    chart = charts(compared(*TWO))["ratios"]
    (speed,) = [row for row in data(chart, "spans") if row["name"] == "b: tokens/s"]
    logs = math.log(1.5), math.log(2.2)
    middle = sum(logs) / 2
    # Two pairs: one degree of freedom, t = 12.7062; half their distance is the standard error.
    margin = 12.7062 * (logs[1] - logs[0]) / 2
    assert speed["v"] == pytest.approx(math.exp(middle))
    assert speed["low"] == pytest.approx(math.exp(middle - margin), rel=1e-4)
    assert speed["high"] == pytest.approx(math.exp(middle + margin), rel=1e-4)
    assert speed["shape"] == "square"  # an interval that holds 1: no difference shown
    (energy,) = [row for row in data(chart, "spans") if row["name"] == "b: J/token"]
    assert (energy["v"], energy["shape"]) == (0.5, "triangle-up")  # less of it is better
    assert chart.spec is not None
    scales = [one["encoding"]["x"].get("scale", {}) for one in chart.spec["layer"]]
    assert {one["type"] for one in scales if one} == {"log"}
    assert data(chart, "neutral") == [{"v": 1.0}]  # one line, through all rows


def test_losses_are_differences_around_nothing() -> None:
    chart = charts(compared(*TWO))["differences"]
    (loss,) = data(chart, "points")
    assert (loss["v"], data(chart, "neutral")) == (0.0, [{"v": 0.0}])


def test_what_one_group_lacks_keeps_its_row_and_says_why() -> None:
    found = compared(*TWO[:2], run("b", 0, 200.0, None), run("b", 1, 220.0, None))
    made = charts(found)
    names = [row["name"] for row in data(made["ratios"], "rows")]
    assert "b: J/token" in names
    assert "b: J/token" not in [row["name"] for row in data(made["ratios"], "points")]
    assert made["ratios"].table is not None
    (row,) = [row for row in made["ratios"].table.rows if "absent" in row]
    assert row[3].endswith("b: no sensor")
    assert made["pareto"].spec is None
    lacking = "no J/token to compare in b: no sensor; no memory to compare in a, b: the source"
    assert lacking in made["pareto"].reason


def test_a_single_run_has_a_dot_of_its_own_shape_and_no_span() -> None:
    made = charts(compared(run("a", 0, 100.0, 2.0), run("b", 0, 150.0, 1.0)))
    assert data(made["ratios"], "spans") == []
    assert {row["shape"] for row in data(made["ratios"], "points")} == {"diamond"}
    assert ("◆ no interval: a single run, or too few", "c8") in made["ratios"].legend
    assert data(made["pareto"], "across") == data(made["pareto"], "upright") == []


def test_the_front_is_of_shapes() -> None:
    made = charts(compared(run("a", 0, 100.0, 2.0), run("b", 0, 150.0, 1.0)))
    shapes = {row["name"]: row["shape"] for row in data(made["pareto"], "points")}
    assert shapes == {"a": "circle", "b": "diamond"}


def test_which_way_is_better_is_said_of_each_axis() -> None:
    assert "; higher and further to the left is better" in charts(compared(*TWO))["pareto"].note
    held = [with_memory(one, 1e9) for one in TWO]
    made = charts(compared(*held))["pareto"]
    assert "; higher, further to the left and less memory is better" in made.note
    # Without tokens/s: joules upright, memory across.
    silent = [replace(one, figures={**one.figures, RATE: NO_SENSOR}) for one in held]
    made = charts(compared(*silent))["pareto"]
    assert "; lower and further to the left is better" in made.note


def test_a_rate_of_zero_is_left_out_of_the_front_and_told() -> None:
    stuck = run("c", 0, 0.0, 3.0)
    made = charts(compared(*TWO, stuck))
    assert "no tokens/s to compare in c: a value is 0: a ratio needs values above 0" in (
        made["pareto"].reason
    )
    # With memory there are two figures that all have.
    found = compared(*(with_memory(one, 1e9) for one in (*TWO, stuck)))
    assert found.front is not None
    assert found.front.axes == (JOULES, "memory.device_peak_bytes")


def test_what_may_not_be_compared_does_not_lack_anything() -> None:
    long = [run("c", seed, 100.0, None, seq_len="2048") for seed in (0, 1)]
    short = [replace(one, facts={**one.facts, "seq_len": "1024"}) for one in TWO]
    found = compared(*(replace(e, figures={**e.figures, JOULES: NO_SENSOR}) for e in short), *long)
    assert [pair.is_comparable for pair in found.pairs] == [True, False]
    assert "in a, b: no sensor" in charts(found)["pareto"].reason


def test_of_many_groups_the_first_are_drawn_and_the_table_has_all() -> None:
    made = charts(compared(*(run(f"g{n:03}", 0, 100.0 + n, None) for n in range(70))))
    assert len(data(made["ratios"], "points")) == 60
    assert made["ratios"].table is not None
    assert len(made["ratios"].table.rows) == 69
    assert made["ratios"].note.endswith("the first 60 of 69 rows: the table has all")


def test_of_hundreds_of_groups_the_front_is_drawn_and_the_rest_is_counted() -> None:
    # Two that nobody beats, last of all, and 98 that both of them beat.
    rest = [run(f"g{n:03}", 0, 100.0 + n, 3.0) for n in range(98)]
    made = charts(compared(*rest, run("frugal", 0, 200.0, 1.0), run("fast", 0, 300.0, 2.0)))
    front = made["pareto"]
    names = [row["name"] for row in data(front, "points")]
    assert len(names) == 60
    assert names[:3] == ["frugal", "fast", "g000"]
    assert "; 60 of 100 groups are drawn, those on the front first: the table has all" in front.note
    assert "; point at a dot for its name" in front.note
    assert [row["name"] for row in data(front, "names")] == ["frugal", "fast"]
    assert "g000 (by g001 and g002 and g003 and 96 more)" in front.note
    assert ", 90 more" in front.note
    assert len(front.note) < 1000
    assert front.spec is not None
    assert front.spec["layer"][-1]["mark"]["type"] == "point"  # on top
    assert len(front.spec["description"]) < 1000
    assert front.table is not None
    assert len(front.table.rows) == 100
    few = charts(compared(*rest[:6], *TWO))["pareto"]
    assert len(data(few, "points")) == len(data(few, "names")) == 8
    assert "are drawn" not in few.note
    assert "pointer" not in few.note
    even = charts(compared(*(run(f"e{n}", 0, 100.0 + n, 1.0 + n) for n in range(9))))["pareto"]
    assert "beaten:" not in even.note
    assert (len(data(even, "points")), data(even, "names")) == (9, [])


def test_a_small_ratio_and_one_near_1_keep_their_digits() -> None:
    made = charts(compared(run("a", 0, 1e6, None), run("b", 0, 123.4, None)))
    assert data(made["ratios"], "points")[0]["said"] == "0.000123, one run"
    made = charts(compared(run("a", 0, 100000.0, None), run("b", 0, 100004.0, None)))
    assert data(made["ratios"], "points")[0]["said"] == "1.00004, one run"


def test_an_interval_beyond_all_numbers_is_absent_with_its_reason() -> None:
    # Two pairs at 99.99 %: t of one degree of freedom is 6366, and half of ln 2.2 - ln 1.5 is 0.19.
    found = compared(*TWO, confidence=0.9999)
    (speed,) = [one for one in found.pairs[0].verdicts if one.measure.key == RATE]
    assert speed.contrast is not None
    assert (speed.contrast.low, speed.contrast.high) == (None, None)
    assert speed.words.endswith("it reaches beyond a factor of 1e304")
    made = charts(found)
    said = {row["name"]: row["said"] for row in data(made["ratios"], "points")}
    assert said["b: tokens/s"] == "1.817, no interval"
    assert found.front is not None
    assert "single run" not in found.front.remark


def test_there_is_no_mean_of_those_that_got_there() -> None:
    time = "target.time_s"

    def reached(backend: str, *times: float | None) -> list[Entry]:
        never = Missing("the loss stayed above 2")
        return [
            replace(
                run(backend, seed, 100.0, 2.0),
                figures={time: never if at is None else Reading(at, "s", "derived")},
            )
            for seed, at in enumerate(times)
        ]

    found = compared(
        *reached("a", 10.0, 10.1, 10.2), *reached("b", 5.0, 5.1, None), metrics=(time,)
    )
    why = r"^b: only 2 of 3 runs have it \(the loss stayed above 2\)"
    with pytest.raises(NotMeasurable, match=why):
        found.mean(found.groups[1], found.measures[0])


def test_one_group_has_nothing_to_compare() -> None:
    made = charts(compared(*TWO[:2]))
    assert made["ratios"].reason == "one group: nothing to compare it with"


def test_every_spec_is_one_that_vega_can_draw_in_both_lights() -> None:
    for chart in compare_charts(compared(*TWO)):
        assert chart.spec is not None
        assert json.loads(json.dumps(chart.spec, allow_nan=False)) == chart.spec
        for theme in ("light", "dark"):
            spec = {**with_colours(chart.spec, theme), "width": 600}
            drawn = converter().vegalite_to_svg(spec, vl_version=vega_lite_version())
            assert "var(" not in drawn
            assert drawn.count("<text") > 2


def test_what_differs_is_told_of_every_group_and_what_is_not_said_is_said() -> None:
    found = compared(
        run("a", 0, 1.0, None, optimizer="AdamW", seq_len="1024"),
        run("b", 0, 1.0, None, optimizer="SGD", seq_len="1024", kernels="own"),
    )
    assert tuple(differing_facts(found.groups)) == (
        ("optimizer", ("AdamW", "SGD")),
        ("kernels", ("not said", "own")),
    )


def test_a_name_has_a_line_of_its_own_as_wide_as_the_page() -> None:
    ratios = charts(compared(*TWO))["ratios"]
    assert ratios.spec is not None
    assert ratios.spec["height"] == 58 * len(data(ratios, "rows"))
    names, figures = ratios.spec["layer"][-2:]
    assert names["encoding"]["y"] != figures["encoding"]["y"]
    assert names["mark"]["limit"]["expr"] == figures["mark"]["limit"]["expr"] == "width"
