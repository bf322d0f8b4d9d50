"""The spread of step times, and the steps that stand out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.metrics.summarize import evidence_of
from ergmeter.metrics.time_breakdown import step_time_distribution
from ergmeter.records import Step
from tests.runs import even_steps, reading, run_of

S = 10**9


def steps_of(times_s: list[float]) -> list[Step]:
    edges = np.cumsum([0, *(round(t * S) for t in times_s)]).tolist()
    return [Step(a, b, index=100 + i) for i, (a, b) in enumerate(itertools.pairwise(edges))]


def test_bars_hold_every_step_and_what_is_beyond_them_is_named(tmp_path: Path) -> None:
    times_s = [1.0] * 50 + [1.5] * 49 + [40.0]
    found = step_time_distribution(evidence_of(run_of(tmp_path / "run", steps=steps_of(times_s))))
    assert found.counts.sum() + found.beyond == 100
    assert found.beyond == 1
    assert found.counts[0] == 50
    assert found.counts[-1] == 49
    assert found.median_s == pytest.approx(1.25)
    assert found.p95_s == pytest.approx(np.percentile(times_s, 95))
    (one,) = found.outliers
    assert one.index == 199
    assert (one.at_s, one.took_s) == pytest.approx((123.5, 40.0))
    assert one.times == pytest.approx(32.0)


def test_steps_of_one_length_have_a_bar(tmp_path: Path) -> None:
    found = step_time_distribution(evidence_of(run_of(tmp_path / "run", steps=even_steps(10))))
    assert found.counts.sum() == 10
    assert found.stalled == 0


def test_two_steps_are_no_distribution(tmp_path: Path) -> None:
    with pytest.raises(NotMeasurable, match="2 counted steps: too few"):
        step_time_distribution(evidence_of(run_of(tmp_path / "run", steps=even_steps(2))))


@pytest.mark.parametrize(
    ("budget", "done", "left_s"),
    [({"steps": 50}, 10, 80.0), ({"tokens": 10_000}, 1000, 180.0), ({"steps": 8}, 10, 0.0)],
)
def test_what_is_left_takes_as_long_as_the_counted_steps_say(
    tmp_path: Path, budget: dict[str, int], done: int, left_s: float
) -> None:
    steps = even_steps(10, seconds=2.0, tokens_computed=100)
    found = remaining(evidence_of(run_of(tmp_path / "run", steps=steps, header={"budget": budget})))
    assert found.done == done
    assert found.left_s == pytest.approx(left_s)
    assert found.done_frac == pytest.approx(done / next(iter(budget.values())))


def test_start_up_names_the_evaluation_in_it(tmp_path: Path) -> None:
    """As nanoGPT, which evaluates before its first step; compiled, that takes most of it."""
    steps = [
        replace(one, start_ns=one.start_ns + 9 * S, end_ns=one.end_ns + 9 * S)
        for one in even_steps(5)
    ]
    early, late = Step(2 * S, 8 * S, phase="eval"), Step(14 * S, 15 * S, phase="eval")
    key = "time.before_first_step_s"
    plain = reading(run_of(tmp_path / "plain", steps=[*steps, late]), key)
    assert plain.note == "loading and setting up"
    found = reading(run_of(tmp_path / "run", steps=[early, *steps, late]), key)
    assert found.note == "loading and setting up, and 6 s of evaluation"
    assert found.value == plain.value
