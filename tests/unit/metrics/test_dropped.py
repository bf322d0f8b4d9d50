"""Rates over a window in which steps were dropped are absent; rows of several steps are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Mark, Missing, Step
from ergmeter.runlog.format import DroppedSteps, dropped_steps
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import add_writer, even_steps, make_run, reading, reason, run_of

if TYPE_CHECKING:
    from pathlib import Path

S = 10**9
RATES = (
    "throughput.tokens_per_s",
    "throughput.computed_tokens_per_s",
    "throughput.steps_per_s",
    "tokens.total",
    "steps.count",
    "time.step_s",
    "time.in_step_s",
    "time.outside_steps_frac",
)


def lossy(path: Path, start_s: int, end_s: int) -> Run:
    """Ten steps of a second, and three more that are missing."""
    dropped = DroppedSteps(3, 21, 0, start_s * S, end_s * S, "the disk refused: full")
    return run_of(path, steps=even_steps(10, tokens_computed=7), marks=[dropped.mark])


def test_a_mark_holds_what_was_dropped(tmp_path: Path) -> None:
    dropped = DroppedSteps(3, 21, 2, 1 * S, 4 * S, "the disk refused: full")
    assert dropped.mark == Mark(
        4 * S,
        "steps_dropped",
        "3 steps (21 tokens) and 2 other spans in 3.000 s were not recorded:"
        " the disk refused: full",
    )
    unknown = DroppedSteps(1, None, 0, 5 * S, 6 * S, "later")
    both = dropped + unknown
    assert (both.steps, both.tokens, both.spans) == (4, None, 2)
    run = run_of(tmp_path / "run", steps=even_steps(1), marks=[dropped.mark, both.mark])
    assert list(dropped_steps(run)) == [both]  # the last mark has all


def test_rows_are_counted_by_their_steps() -> None:
    columns: dict[str, list[Any]] = {
        "phase": ["train", "data", "train"],
        "steps": [10, 1, None],
        "tokens_real": [None, None, 5],
        "tokens_computed": [70, None, 8],
        "start_ns": [2, 1, 3],
        "end_ns": [5, 9, 4],
    }
    assert DroppedSteps.of(columns, "why") == DroppedSteps(11, 75, 1, 1, 9, "why")


def test_a_window_with_dropped_steps_has_no_rates(tmp_path: Path) -> None:
    run = lossy(tmp_path / "run", 4, 7)
    said = "3 steps (21 tokens) in 3.000 s were not recorded: the disk refused: full"
    for key in RATES:
        assert said in reason(run, key)
    assert reading(run, "steps.dropped").value == 3
    assert f"part of the record is missing: {said}" in summarize(run).notes


def test_steps_dropped_in_the_warm_up_are_not_in_the_window(tmp_path: Path) -> None:
    run = lossy(tmp_path / "run", 0, 2)
    settings = Settings(warmup_steps=4)
    readings = summarize(run, settings).readings
    assert readings["tokens.total"].value == 6 * 7  # type: ignore[union-attr]
    assert readings["steps.dropped"].value == 3  # type: ignore[union-attr]
    assert isinstance(summarize(run, Settings(warmup_steps=1)).readings["tokens.total"], Missing)


def test_a_run_that_lost_nothing_says_so(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10, tokens_computed=7))
    found = reading(run, "steps.dropped")
    assert (found.value, found.note) == (0, "every step that was made is in the record")


def test_what_each_rank_dropped_is_added_up(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for rank in range(2):
        dropped = DroppedSteps(3 + rank, 21, 0, 4 * S, 7 * S, "full")
        steps = even_steps(10, tokens_computed=7, rank=rank)
        add_writer(path, steps=steps, marks=[dropped.mark])
    assert reading(Run.open(path), "steps.dropped").value == 7


def test_rows_of_several_steps_give_the_same_rates(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", steps=even_steps(40, tokens_computed=7))
    merged = [Step(4 * i * S, 4 * (i + 1) * S, steps=4, tokens_computed=28) for i in range(10)]
    several = run_of(tmp_path / "several", steps=merged)
    for key in (*RATES, "time.step_median_s", "time.step_p95_s"):
        assert reading(several, key).value == pytest.approx(reading(one, key).value)
    assert "over 40 steps (10 rows)" in reading(several, "tokens.total").note
    assert "rows cover up to 4 steps" in reading(several, "time.step_median_s").note
