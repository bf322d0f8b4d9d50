"""The remarks beside the numbers: said when there is cause, and only then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ergmeter.metrics.evidence import Evidence
from ergmeter.metrics.notes import _above_one, _contradicted, _short
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Mark, Missing, Reading, Result, Window
from ergmeter.runlog.reader import Run
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


def test_a_share_above_one_is_an_error_unless_it_is_a_share_of_one_core() -> None:
    high = Reading(1.5, "frac", "measured")
    (said,) = _above_one({"utilization.busy_frac": high, "overhead.cpu_frac": high})
    assert said.startswith("utilization.busy_frac is 1.5, more than all there is")


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
    found = summarize(run_of(tmp_path / "run", steps=steps))
    median = found.readings["time.step_median_s"]
    assert isinstance(median, Reading)
    (said,) = [note for note in found.notes if "times the median" in note]
    assert f"took 5.1 s, {5.1 / median.value:.0f} times" in said


@pytest.mark.parametrize(
    ("mfu", "pipes", "said"),
    [(0.398, 0.427, 0), (0.60, 0.427, 1), (0.45, 0.427, 0), (0.30, 0.01, 0)],
    ids=["as on an H200", "more than was done", "by the edges of readings", "not on those pipes"],
)
def test_an_mfu_above_what_the_tensor_pipes_did_is_an_error(
    mfu: float, pipes: float, said: int
) -> None:
    readings: dict[str, Result] = {
        "utilization.mfu_frac": Reading(mfu, "frac", "derived"),
        "activity.tensor_frac": Reading(pipes, "frac", "measured"),
    }
    assert len(_contradicted(readings)) == said
    assert _contradicted({**readings, "activity.tensor_frac": Missing("no counters")}) == []
