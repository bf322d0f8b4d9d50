"""Hosts whose clocks disagree are put right by the steps they made together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Device, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, make_run, reading

S = 10**9
OTHER = Device("GPU-1", "gpu", "Test GPU", "nvml", {"power_field": "instant"})


def host(number: int, *, booted_s: float, set_wrong_s: float, error_s: float | None) -> Any:
    """A host's header: its monotonic clock began with its boot, its time of day is off so much."""
    wall_ns = round((1_800_000_000 + set_wrong_s) * S)
    return {
        "host": f"node-{number}",
        "boot_id": f"boot-{number}",
        "clock": {
            "monotonic_ns": round(booted_s * S), "wall_ns": wall_ns,
            **({} if error_s is None else {"error_s": error_s}),
        },
    }  # fmt: skip


def two_hosts(
    path: Path,
    wrong_s: float,
    *,
    error_s: float | None = None,
    late_s: float = 0.0,
    numbers: tuple[range, range] = (range(30), range(30)),
    headers: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
) -> Run:
    """30 steps of a second; the second GPU draws 100 W up to 10 s, then 300 W.

    `late_s`: by which the second host ends each step later in truth; `numbers` of their steps.
    """
    run = make_run(path)
    for number, booted_s in enumerate((0.0, 500.0)):
        header = host(number, booted_s=booted_s, set_wrong_s=number * wrong_s, error_s=error_s)
        header.update(headers[number])
        began_s = booted_s + number * late_s
        steps = [
            Step(
                round((began_s + i) * S), round((began_s + i + 1) * S), index=index,
                tokens_computed=1, rank=number,
            )
            for i, index in enumerate(numbers[number])
        ]  # fmt: skip
        gpu = (GPU, OTHER)[number]
        samples = [
            Sample(
                round((booted_s + t / 10) * S), gpu.id,
                power_w=300.0 if number and t >= 100 else 100.0,
            )
            for t in range(-50, 360)
        ]  # fmt: skip
        add_writer(run, steps=steps, samples=samples, devices=[gpu], header=header)
    return Run.open(run)


@pytest.mark.parametrize("wrong_s", [3.4, -3.4, 7200.0])
def test_a_clock_that_nobody_sets_is_put_right(tmp_path: Path, wrong_s: float) -> None:
    run = two_hosts(tmp_path / "run", wrong_s)
    assert reading(run, "time.window_s").value == pytest.approx(30, abs=0.01)
    truth_j = 30 * 100 + 10 * 100 + 20 * 300
    assert reading(run, "energy.run_j").value == pytest.approx(truth_j, rel=0.005)
    ahead = "node-1" if wrong_s > 0 else "node-0"  # the run's clock is that of who seems earliest
    assert any(f"the clock of {ahead} is" in n and "ahead of" in n for n in summarize(run).notes)


def test_what_ntp_allows_for_is_left_as_it_is(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run", 0.03, error_s=0.02)
    (clock,) = evidence_of(run).clocks
    assert clock.ahead_s == pytest.approx(0.03, abs=1e-5)
    assert clock.claimed_s == pytest.approx(0.04)
    assert not clock.is_wrong
    assert reading(run, "time.window_s").value == pytest.approx(30.03)


def test_a_host_that_did_not_say_how_good_its_clock_is_is_given_a_tenth_of_a_second(
    tmp_path: Path,
) -> None:
    assert not evidence_of(two_hosts(tmp_path / "a", 0.15, error_s=None)).clocks[0].is_wrong
    assert evidence_of(two_hosts(tmp_path / "b", 0.25, error_s=None)).clocks[0].is_wrong


def staged(stage: int) -> dict[str, Any]:
    return {"world": 2, "layout": {"at": {"pp": [stage, 2]}, "from": "Megatron"}}


def test_stages_of_a_pipeline_need_not_end_their_steps_together(tmp_path: Path) -> None:
    """The clocks are right, which nobody says; the last stage ends 0.3 s after the first."""
    apart = two_hosts(tmp_path / "a", 0.0, late_s=0.3, headers=(staged(0), staged(1)))
    assert evidence_of(apart).clocks == ()
    assert reading(apart, "time.window_s").value == pytest.approx(30.3)
    declared = two_hosts(tmp_path / "b", 0.0, late_s=0.3, headers=({"world": 2}, {"world": 2}))
    assert evidence_of(declared, Settings(layout="pp=2")).clocks == ()
    alike = two_hosts(tmp_path / "c", 0.3, headers=(staged(1), staged(1)))
    assert [clock.is_wrong for clock in evidence_of(alike).clocks] == [True]


def test_a_clock_that_is_right_by_its_hosts_word_is_not_moved_by_steps(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run", 0.0, late_s=0.2, error_s=0.001)
    (clock,) = evidence_of(run).clocks
    assert not clock.is_wrong
    assert reading(run, "time.window_s").value == pytest.approx(30.2)
    (note,) = [note for note in summarize(run).notes if note.startswith("steps on node-")]
    assert "200 ms" in note
    assert "2 ms apart" in note
    same = two_hosts(tmp_path / "same", 0.0, error_s=0.001)
    assert not any("steps on" in note for note in summarize(same).notes)


@pytest.mark.parametrize(
    "numbers",
    [
        (range(30), range(1, 31)),  # from 1
        (range(30), range(100, 130)),  # after a warm-up that one of them counts
        (range(30), range(29)),  # from 0, but one step later
    ],
)
def test_a_host_that_numbers_its_steps_otherwise_is_not_moved(
    tmp_path: Path, numbers: tuple[range, range]
) -> None:
    late_s = 30 - len(numbers[1])
    run = two_hosts(tmp_path / "run", 0.0, late_s=late_s, numbers=numbers)
    assert not any(clock.is_wrong for clock in evidence_of(run).clocks)
    assert reading(run, "time.window_s").value == pytest.approx(30)


def test_one_host_needs_no_steps_to_be_on_one_clock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        add_writer(run, steps=[Step(0, S, index=0, rank=rank)])
    assert evidence_of(Run.open(run)).clocks == ()
