"""Who holds the others up: the one that is slow, or the one that all wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.metrics.checks import fitness
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Step
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, make_run, reading, reason

S = 10**9


def run_of(path: Path, *ranks: tuple[float, float]) -> Run:
    """Ranks that make 20 steps, each beginning and ending so many seconds into every second."""
    run = make_run(path)
    for rank, (begins_s, ends_s) in enumerate(ranks):
        steps = [
            Step(round((i + begins_s) * S), round((i + ends_s) * S), tokens_computed=1, rank=rank)
            for i in range(20)
        ]
        add_writer(run, steps=steps, header={"host": f"node-{rank // 4}"})
    return Run.open(run)


def test_where_ranks_wait_for_each_other_the_one_with_the_shortest_step_is_late(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run", *[(0.02, 1.0)] * 5, (0.22, 1.0), *[(0.02, 1.0)] * 2)
    found = reading(run, "ranks.spread_frac")
    assert found.value == pytest.approx(0.2)
    assert "rank 5 on node-1 comes 200 ms later to each step" in found.note
    assert reading(run, "ranks.fastest_step_s").value == pytest.approx(0.78)


def test_where_they_do_not_wait_the_one_with_the_longest_step_is_slow(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *[(0.0, 0.6)] * 3, (0.0, 0.9))
    found = reading(run, "ranks.spread_frac")
    assert found.value == pytest.approx(0.3)
    assert "rank 3 on node-0 takes 300 ms longer for each step" in found.note
    assert reading(run, "ranks.slowest_step_s").value == pytest.approx(0.9)


def test_a_straggler_is_a_finding_and_ranks_that_keep_pace_are_none(tmp_path: Path) -> None:
    late = run_of(tmp_path / "late", *[(0.02, 1.0)] * 5, (0.22, 1.0))
    (one,) = [f for f in fitness(evidence_of(late)).findings if f.check == "stragglers"]
    assert "rank 5 on node-1 comes 200 ms later" in one.seen
    assert "20.0 %" in one.effect
    even = run_of(tmp_path / "even", *[(0.02, 1.0)] * 5, (0.05, 1.0))
    assert not [f for f in fitness(evidence_of(even)).findings if f.check == "stragglers"]


def test_one_rank_has_nobody_to_keep_pace_with(tmp_path: Path) -> None:
    assert "one rank" in reason(run_of(tmp_path / "run", (0.0, 0.9)), "ranks.spread_frac")
