"""Repeats of a configuration as one figure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ergmeter.bench.overview import (
    memory_sources,
    of_repeats,
    overview,
    report_heads,
    spread,
    view_columns,
)
from ergmeter.bench.tables import as_table
from ergmeter.metrics.catalog import bench_columns
from ergmeter.views import bench as report
from ergmeter.views.render.markdown import markdown
from tests.unit.bench.rows import configuration_lines, row


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
    assert two == (136.0, 243.6)
    three = spread(rows(math.exp(1.0), math.exp(2.0), math.exp(3.0)), "tokens_per_s")
    assert three is not None
    # By hand: in logarithms the mean is 2, the standard deviation 1, t of 2 degrees 4.303.
    assert math.log(three[1]) == pytest.approx(2 + 4.303 / math.sqrt(3), abs=1e-3)
    assert math.log(three[0]) == pytest.approx(2 - 4.303 / math.sqrt(3), abs=1e-3)


def lines(*rows: dict[str, Any]) -> list[tuple[str, ...]]:
    return configuration_lines(as_table(list(rows)))


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


def test_the_catalogue_orders_the_metrics_of_a_report_and_of_its_heat_maps() -> None:
    assert [*report_heads()] == [
        *("tokens/s", "whole run", "/device", "samples/s", "loss", "memory", "time")
    ]
    assert [*memory_sources().values()] == ["hf", "torch", "nvidia", "nvidia mean", "host"]
    shown = view_columns("bench matrix")
    assert [*shown][:4] == [
        *("tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "joules_per_token")
    ]
    assert (shown["joules_per_token"].label, shown["runtime_s"].label) == ("J/token", "time")
    assert shown["whole_run_mfu_frac"].label == "MFU, whole run"  # its title
    assert set(shown) <= set(bench_columns())


def test_of_several_memories_the_first_is_shown_and_named() -> None:
    (both, host) = lines(
        row(index=0, group="a", scenario="a", memory_hf_peak_bytes=2e9, memory_nvidia_peak_bytes=1),
        row(index=1, group="b", scenario="b", memory_process_peak_bytes=3e9, runtime_s=100.0),
    )
    assert (both[7], host[7], host[8]) == ("2 GB hf", "3 GB host", "100 s")


def test_names_are_no_markup_in_a_markdown_report() -> None:
    made = [row(index=i, group=str(i), scenario=f"<img src=x>|{i}") for i in (0, 1)]
    text = markdown(report.report_document(overview(as_table(made)), name="b"))
    assert "<img" not in text
    assert "| &lt;img src=x&gt;\\|0 |" in text
