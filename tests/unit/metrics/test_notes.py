"""The remarks beside the numbers: said when there is cause, and only then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.summarize import _impossible, _short, summarize
from ergmeter.records import Mark, Reading, Result, Window
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import add_writer, even_steps, make_run, run_of

S = 10**9


@pytest.mark.parametrize(
    ("lasted_ns", "said"),
    [
        (
            S // 2,
            ["just 500 ms long: memory and CPU, read every 2 to 3 s, may be absent"],
        ),
        (3 * S, []),
    ],
)
def test_a_run_of_a_moment_says_why_memory_and_cpu_may_be_absent(
    lasted_ns: int, said: list[str]
) -> None:
    evidence = cast("Evidence", SimpleNamespace(watched=Window(0, lasted_ns)))
    assert _short(evidence) == said


def test_an_impossible_reading_is_noted_once_for_all_that_share_its_reason() -> None:
    high = Reading(1.5, "frac", "measured", impossible="above 100 %: an input is wrong")
    possible = Reading(1.5, "frac", "measured")  # our own cost is a share of one core
    readings: dict[str, Result] = {
        "utilization.mfu_frac": high,
        "utilization.hfu_frac": high,
        "overhead.cpu_frac": possible,
    }
    assert _impossible(readings) == ["MFU, HFU are impossible: above 100 %: an input is wrong"]


def test_steps_that_are_told_twice_are_noticed(tmp_path: Path) -> None:
    once = even_steps(20, tokens_computed=10)
    again = [
        replace(one, start_ns=one.start_ns + S // 10, end_ns=one.end_ns - S // 10) for one in once
    ]
    said = "steps of one process overlap"
    assert not any(said in note for note in summarize(run_of(tmp_path / "once", steps=once)).notes)
    twice = summarize(run_of(tmp_path / "twice", steps=[*once, *again])).notes
    assert any(said in note for note in twice)


def test_what_the_output_lacks_is_no_matter_where_the_steps_are_told(tmp_path: Path) -> None:
    refused = Mark(S, "value_refused", "steps are not counted: lines name no step")
    run = make_run(tmp_path / "run")
    add_writer(run, stream="output", marks=[refused], steps=even_steps(5, seconds=4.0))
    printed = summarize(Run.open(run))
    assert refused.detail in printed.notes
    add_writer(run, steps=even_steps(20, tokens_computed=10))
    assert refused.detail not in summarize(Run.open(run)).notes


def test_a_slow_first_step_is_held_against_the_median_that_is_shown(tmp_path: Path) -> None:
    """Steps of 0.1 s, one every second: the card's median is that of the period."""
    steps = even_steps(20, seconds=0.1, gap_s=0.9, tokens_computed=10)
    steps[0] = replace(steps[0], start_ns=-(5 * S), end_ns=S // 10)
    found = summarize(run_of(tmp_path / "run", steps=steps), Settings(warmup_steps=0))
    median = found.readings["time.step_median_s"]
    assert isinstance(median, Reading)
    (said,) = [note for note in found.notes if "times the median" in note]
    assert f"took 5.1 s, {5.1 / median.value:.0f} times" in said


def test_a_whole_run_has_no_interval_however_many_steps_it_has(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=10))
    assert not any("fewer than ten" in n for n in summarize(run, Settings(window="whole")).notes)


def test_ranks_whose_rows_hold_several_steps_made_as_many(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(20, tokens_computed=10))
    merged = even_steps(2, seconds=10.0, tokens_computed=100, steps=10, rank=1)
    add_writer(run, steps=merged)
    assert not any("ranks made" in note for note in summarize(Run.open(run)).notes)


def test_printed_lines_that_overlap_are_not_recorded_twice(tmp_path: Path) -> None:
    """Lines that give their own step times, each a little longer than the time between lines."""
    steps = [replace(one, end_ns=one.end_ns + S // 10) for one in even_steps(20)]
    notes = summarize(run_of(tmp_path / "run", steps=steps, stream="output")).notes
    assert not any("overlap" in note for note in notes)
