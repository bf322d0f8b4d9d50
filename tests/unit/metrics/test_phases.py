"""Energy by phase, by hand: an even power in each, spans inside spans, and parts that add up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ergmeter.records import Sample, Step
from ergmeter.runlog.reader import Run
from tests.runs import GPU, even_steps, reading, reason, run_of

S = 10**9
# Seconds and watts: ten of training, four of evaluation, two of nothing.
CURVE = [(0.0, 500.0), (10.0, 300.0), (14.0, 100.0), (16.0, 100.0)]


def drawn_j(t_s: float) -> float:
    total = 0.0
    for (start_s, watts), (end_s, _) in pairwise(CURVE):
        total += watts * max(0.0, min(t_s, end_s) - start_s)
    return total


def samples(*, counter: bool = True) -> list[Sample]:
    found = []
    for t_s in np.arange(0.0, 16.001, 0.1):
        watts = [w for start_s, w in CURVE if start_s <= t_s + 1e-9][-1]
        energy = 1e5 + drawn_j(float(t_s)) if counter else None
        found.append(Sample(round(t_s * S), GPU.id, power_w=watts, energy_j=energy))
    return found


def span(phase: str, start_s: float, end_s: float) -> Step:
    return Step(round(start_s * S), round(end_s * S), phase=phase)


def measured(path: Path, **options: bool) -> Run:
    steps = [
        *even_steps(10, seconds=1.0, tokens_computed=10),
        span("data", 2.0, 2.5),  # within a step
        span("eval", 10.0, 14.0),
        span("checkpoint", 12.0, 13.0),  # within the evaluation
    ]
    return run_of(path, steps=steps, samples=samples(**options), devices=[GPU])


@pytest.mark.parametrize(
    ("phase", "joules"),
    [("train", 9.5 * 500), ("data", 0.5 * 500), ("eval", 3 * 300), ("checkpoint", 1 * 300)],
)
@pytest.mark.parametrize("counter", [True, False])
def test_each_instant_belongs_to_one_phase(
    tmp_path: Path, phase: str, joules: float, counter: bool
) -> None:
    found = reading(measured(tmp_path / "run", counter=counter), f"energy.{phase}_j")
    assert found.value == pytest.approx(joules, rel=0.03)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= joules <= found.high
    assert found.basis == ("measured" if counter else "derived")


def test_the_parts_and_the_rest_are_the_whole(tmp_path: Path) -> None:
    run = measured(tmp_path / "run")
    phases = ("train", "data", "eval", "checkpoint", "rest")
    parts = {phase: reading(run, f"energy.{phase}_j").value for phase in phases}
    assert sum(parts.values()) == pytest.approx(drawn_j(16.0), rel=0.01)
    assert parts["rest"] == pytest.approx(2 * 100, rel=0.15)


def test_a_phase_that_never_was_is_absent(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples(), devices=[GPU])
    assert reason(run, "energy.eval_j") == "no eval span was recorded"
