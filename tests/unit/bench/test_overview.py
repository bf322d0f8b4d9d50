"""Repeats of a configuration as one figure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ergmeter.bench.overview import of_repeats, overview, spread
from ergmeter.bench.tables import as_table
from ergmeter.views.bench import report
from tests.unit.bench.rows import row


def test_repeats_are_their_mean_memory_its_highest_and_nothing_is_nothing() -> None:
    rows: list[dict[str, Any]] = [
        {"loss": 1.0, "memory_hf_peak_bytes": 5, "runtime_s": None},
        {"loss": 4.0, "memory_hf_peak_bytes": 9, "runtime_s": None},
        {"loss": None, "memory_hf_peak_bytes": None, "runtime_s": None},
    ]
    assert of_repeats(rows, "loss") == pytest.approx(2.0)  # as the comparison: of 1 and 4
    assert of_repeats(rows, "memory_hf_peak_bytes") == 9
    assert of_repeats(rows, "runtime_s") is None


def test_the_spread_is_the_comparisons_interval_and_of_two_both() -> None:
    def rows(*values: float) -> list[dict[str, Any]]:
        return [{"tokens_per_s": value} for value in values]

    assert spread(rows(5.0), "tokens_per_s") is None
    two = spread(rows(136.0, 243.6), "tokens_per_s")
    assert two is not None
    assert (two.low, two.high, two.is_interval) == (136.0, 243.6, False)
    three = spread(rows(math.exp(1.0), math.exp(2.0), math.exp(3.0)), "tokens_per_s")
    assert three is not None
    # By hand: in logarithms the mean is 2, the standard deviation 1, t of 2 degrees 4.303.
    assert three.is_interval
    assert math.log(three.high) == pytest.approx(2 + 4.303 / math.sqrt(3), abs=1e-3)
    assert math.log(three.low) == pytest.approx(2 - 4.303 / math.sqrt(3), abs=1e-3)


def lines(*rows: dict[str, Any]) -> list[tuple[str, ...]]:
    return report.lines(overview(as_table(list(rows))))


def test_two_scenarios_with_one_command_are_two_rows() -> None:
    made = [
        row(index=i, group="g", scenario=name, repeat=n, tokens_per_s=speed)
        for i, (name, n, speed) in enumerate(
            [("one", 1, 100.0), ("two", 1, 10.0), ("one", 2, 400.0), ("two", 2, 10.0)]
        )
    ]
    shown = lines(*made)
    assert [line[:3] for line in shown] == [
        ("one", "2 ok", "200 (100 to 400)"),
        ("two", "2 ok", "10 (10 to 10)"),
    ]


def test_figures_of_runs_that_did_not_end_well_are_marked() -> None:
    (cut, ok) = lines(
        row(index=0, group="a", scenario="a", status="cancelled", tokens_per_s=5.0, loss=2.0),
        row(index=1, group="b", scenario="b", tokens_per_s=7.0),
    )
    assert (cut[2], cut[6], ok[2]) == ("5!", "2!", "7")
    notes = report.notes(overview(as_table([row(status="cancelled", tokens_per_s=5.0, group="a")])))
    assert "figures marked ! are of runs that did not end well" in notes


def test_names_are_no_markup_in_a_markdown_report() -> None:
    made = [row(index=i, group=str(i), scenario=f"<img src=x>|{i}") for i in (0, 1)]
    text = report.markdown(overview(as_table(made)))
    assert "<img" not in text
    assert "| &lt;img src=x&gt;\\|0 |" in text
