"""Energy by phase, by hand: an even power in each, spans inside spans, and parts that add up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ergmeter.records import Sample, Step
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, reading, reason, run_of

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


@pytest.mark.parametrize("kept", ["first", "last", "both ends"])
@pytest.mark.parametrize("counter", [True, False])
def test_a_phase_that_readings_do_not_reach_has_no_energy(
    tmp_path: Path, kept: str, counter: bool
) -> None:
    """A GPU lost in the middle, one that was read late, and one with a gap."""
    within = {
        "first": lambda t: t < 5,
        "last": lambda t: t > 5,
        "both ends": lambda t: abs(t - 6) > 2,
    }
    read = [one for one in samples(counter=counter) if within[kept](one.t_ns / S)]
    steps = even_steps(10, seconds=1.0, tokens_computed=10)
    run = run_of(tmp_path / "run", steps=steps, samples=read, devices=[GPU])
    if kept == "both ends" and counter:  # a counter never forgets
        assert reading(run, "energy.train_j").value == pytest.approx(5000, rel=0.02)
    else:
        assert "do not cover" in reason(run, "energy.train_j")


def test_a_first_reading_that_comes_a_little_late_is_drawn_on_to_the_beginning(
    tmp_path: Path,
) -> None:
    for late_s, counter in ((0.2, True), (0.2, False), (0.5, True)):
        read = [one for one in samples(counter=counter) if one.t_ns >= late_s * S]
        steps = even_steps(10, seconds=1.0, tokens_computed=10)
        path = tmp_path / f"{late_s}-{counter}"
        run = run_of(path, steps=steps, samples=read, devices=[GPU])
        if late_s > 0.25:
            assert "readings begin" in reason(run, "energy.run_j")
        else:
            found = reading(run, "energy.run_j")
            assert found.value == pytest.approx(5000, rel=0.02)
            assert found.low is not None
            assert found.high is not None
            assert found.low < 5000 < found.high


def test_idle_spans_and_inference_are_phases_of_their_own(tmp_path: Path) -> None:
    steps = [span("prefill", 0, 2), span("decode", 2, 10), span("idle", 14, 16)]
    run = run_of(tmp_path / "run", steps=steps, samples=samples(), devices=[GPU])
    parts = {
        phase: reading(run, f"energy.{phase}_j").value
        for phase in ("prefill", "decode", "idle", "rest")
    }
    assert parts["prefill"] == pytest.approx(1000, rel=0.05)
    assert parts["decode"] == pytest.approx(4000, rel=0.05)
    assert parts["idle"] == pytest.approx(200, rel=0.1)
    assert sum(parts.values()) == pytest.approx(drawn_j(16.0), rel=0.02)


def test_of_several_ranks_the_spans_are_those_of_the_one_that_told_the_most(tmp_path: Path) -> None:
    """The rank that wrote first is gone after two steps; the other trains for ten seconds."""
    path = tmp_path / "run"
    run_of(
        path,
        steps=even_steps(2, seconds=1.0, tokens_computed=10, rank=1),
        header={"clock": {"monotonic_ns": 0, "wall_ns": 1_799_999_999 * S}},
    )
    steps = [*even_steps(10, seconds=1.0, tokens_computed=10), span("eval", 10.0, 14.0)]
    later = {"clock": {"monotonic_ns": 0, "wall_ns": 1_799_999_999 * S + 1}}
    add_writer(path, steps=steps, samples=samples(), devices=[GPU], header=later)
    run = Run.open(path)
    assert reading(run, "energy.train_j").value == pytest.approx(10 * 500, rel=0.03)
    assert reading(run, "energy.eval_j").value == pytest.approx(4 * 300, rel=0.03)
    assert "most spans of 2" in reading(run, "energy.train_j").note
