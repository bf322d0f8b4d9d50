"""Ranks, restarts and threads: what is counted once, and what is added up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Mark, Missing, Reading, Sample, Step
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run, reading, reason, run_of

S = 10**9


def shifted(steps: list[Step], by_s: float, rank: int = 0) -> list[Step]:
    by_ns = round(by_s * S)
    return [
        Step(s.start_ns + by_ns, s.end_ns + by_ns, tokens_computed=s.tokens_computed, rank=rank)
        for s in steps
    ]


def ranks(path: Path, *lanes: list[Step], **contents: Any) -> Run:
    run = make_run(path)
    for lane in lanes:
        add_writer(run, steps=lane, **contents)
    return Run.open(run)


def agree(run: Run, **settings: Any) -> None:
    """Tokens/s x step time = tokens per step, whatever the ranks did."""
    rate, step_s, each = (
        reading(run, key, **settings).value
        for key in ("throughput.tokens_per_s", "time.step_s", "tokens.per_step")
    )
    assert rate * step_s == pytest.approx(each)


def test_two_meters_one_after_the_other_are_one_rank(tmp_path: Path) -> None:
    first = even_steps(10, tokens_computed=100)
    run = ranks(tmp_path / "run", first, shifted(first, 12))
    assert reading(run, "steps.count").value == 20
    assert reading(run, "tokens.per_step").value == 100
    agree(run)


def test_a_rank_that_ended_early_is_told_and_does_not_halve_the_steps(tmp_path: Path) -> None:
    steps = even_steps(20, tokens_computed=100)
    run = ranks(tmp_path / "run", steps, shifted(steps[:10], 0, rank=1))
    assert reading(run, "steps.count").value == 20
    assert reading(run, "tokens.total").value == 3000
    assert any("ranks made 10 to 20 steps" in note for note in summarize(run).notes)
    agree(run)


def test_ranks_that_began_apart_still_agree_with_themselves(tmp_path: Path) -> None:
    steps = even_steps(20, tokens_computed=100)
    run = ranks(tmp_path / "run", steps, shifted(steps, 2, rank=1))
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(4000 / 22)
    agree(run)


def test_the_warmup_ends_for_all_ranks_at_once(tmp_path: Path) -> None:
    """Rank 1 is slow for three steps of 4 s; rank 0 has made twelve by then."""
    steady = even_steps(60, tokens_computed=100)
    slow = [Step(i * 4 * S, (i + 1) * 4 * S, tokens_computed=100, rank=1) for i in range(3)]
    run = ranks(tmp_path / "run", steady, slow + shifted(steady[:48], 12, rank=1))
    found = reading(run, "throughput.tokens_per_s", warmup="auto")
    assert found.value == pytest.approx(200, rel=0.02)
    agree(run, warmup="auto")


def test_a_rank_that_becomes_slower_has_no_warm_up(tmp_path: Path) -> None:
    steady = even_steps(40, tokens_computed=100)
    ends = np.cumsum(np.linspace(0.5, 3, 40) * S).astype(int)
    growing = [
        Step(int(a), int(b), tokens_computed=100, rank=1)
        for a, b in zip(np.append(0, ends[:-1]), ends, strict=True)
    ]
    run = ranks(tmp_path / "run", steady, growing)
    # All 80 steps, until the slow rank's last: 40 of 0.5 to 3 s are 70 s.
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(8000 / 70)
    assert reading(run, "time.warmup_steps").value == 0


def test_declared_tokens_are_those_of_all_ranks(tmp_path: Path) -> None:
    steps = even_steps(10)
    run = ranks(tmp_path / "run", steps, shifted(steps, 0, rank=1))
    found = reading(run, "throughput.tokens_per_s", tokens_per_step=1000, samples_per_step=8)
    assert found.value == pytest.approx(1000)
    assert reading(run, "throughput.samples_per_s", samples_per_step=8).value == pytest.approx(8)


def test_a_warmup_of_lines_that_cover_several_steps(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run", steps=even_steps(10, steps=10, tokens_computed=5), stream="output"
    )
    assert reading(run, "steps.count", warmup_steps=5).value == 90
    assert reading(run, "time.warmup_steps", warmup_steps=5).value == 10
    assert reading(run, "steps.count", warmup_steps=15).value == 80


def test_a_warmup_declared_by_the_reader_beats_the_mark(tmp_path: Path) -> None:
    marks = [Mark(5 * S, "warmup_end")]
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=1), marks=marks)
    assert reading(run, "steps.count").value == 15
    assert reading(run, "steps.count", warmup_steps=10).value == 10


def test_a_recorders_warmup_takes_the_place_of_a_meters(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    add_writer(path, stream="output", settings={"warmup_steps": 5})
    add_writer(path, steps=even_steps(20, tokens_computed=1), settings={"warmup_s": 3.0})
    assert reading(Run.open(path), "steps.count").value == 15


def test_steps_of_two_threads_at_once_are_not_more_than_all_the_time(tmp_path: Path) -> None:
    steps = even_steps(10, tokens_computed=1)
    run = run_of(
        tmp_path / "run", steps=[s for pair in zip(steps, steps, strict=True) for s in pair]
    )
    assert reading(run, "time.outside_steps_frac").value == pytest.approx(0)


def test_time_in_a_phase_is_that_of_the_longest_rank_not_the_sum(tmp_path: Path) -> None:
    steps = [*even_steps(5, tokens_computed=1), Step(5 * S, 15 * S, phase="eval")]
    other = [*shifted(steps[:5], 0, rank=1), Step(5 * S, 13 * S, phase="eval", rank=1)]
    run = ranks(tmp_path / "run", steps, other)
    assert reading(run, "time.eval_s").value == pytest.approx(10)


def test_generation_in_four_threads_is_four_times_as_fast(tmp_path: Path) -> None:
    spans = [Step(i * S, (i + 1) * S, phase="decode", tokens_computed=10) for i in range(10)]
    run = run_of(tmp_path / "run", steps=[span for span in spans for _ in range(4)])
    assert reading(run, "throughput.generated_tokens_per_s").value == pytest.approx(40)


def power(until_s: float, *, column: str = "power_w", watts: float = 200.0) -> list[Sample]:
    times = range(-10, round(until_s * 10) + 1)
    if column == "power_w":
        return [Sample(t * S // 10, GPU.id, power_w=watts) for t in times]
    return [Sample(t * S // 10, GPU.id, energy_j=watts * t / 10 + 5000) for t in times]


def test_a_run_that_was_killed_keeps_its_energy_up_to_the_last_samples(tmp_path: Path) -> None:
    """Steps were handed over until 20 s, samples until 19.3 s."""
    path = make_run(tmp_path / "run")
    dead = {"pid_started_s": 1.0}
    add_writer(
        path,
        steps=even_steps(40, seconds=0.5, tokens_computed=10),
        closed=False,
        header=dead,
        samples=power(19.3),
        devices=[GPU],
    )
    run = Run.open(path)
    assert run.status == "cut off"
    energy = reading(run, "energy.run_j")
    assert energy.value == pytest.approx(200 * 19, rel=0.01)
    assert reading(run, "steps.count").value == 38
    assert "the last 2 steps not yet sampled" in energy.note
    agree(run)


def test_a_probe_that_died_early_is_not_drawn_on(tmp_path: Path) -> None:
    process = Device("process:h:1", "process", "train.py", "process", {})
    samples = [Sample(t * S, process.id, memory_bytes=10**9, cpu_s=float(t)) for t in range(-1, 11)]
    run = run_of(tmp_path / "run", steps=even_steps(100), samples=samples, devices=[process])
    assert "90.0 s before the window" in reason(run, "utilization.process_cores")
    assert "90.0 s before the window" in reason(run, "memory.process_mean_bytes")
    assert reading(run, "memory.process_peak_bytes").value == 10**9


def test_zero_tokens_are_no_rate_and_no_crash(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run", steps=even_steps(10, tokens_computed=0), samples=power(12), devices=[GPU]
    )
    assert "count 0 computed tokens" in reason(run, "energy.joules_per_token")
    assert reading(run, "energy.run_j").value == pytest.approx(2000, rel=0.01)


def test_real_tokens_known_for_some_steps_fall_back_to_computed_ones(tmp_path: Path) -> None:
    steps = even_steps(9, tokens_computed=100)
    steps.append(Step(9 * S, 10 * S, tokens_computed=100, tokens_real=50))
    found = reading(run_of(tmp_path / "run", steps=steps), "throughput.tokens_per_s")
    assert found.value == pytest.approx(100)
    assert "padding included" in found.note


def test_a_run_of_evaluation_alone_has_its_energy(tmp_path: Path) -> None:
    own = Device("ergmeter", "self", "own", "self")
    now_ns = time.monotonic_ns()  # the writer's own marks are of now
    samples = [Sample(now_ns + s.t_ns, s.device, power_w=s.power_w) for s in power(12)]
    samples.append(Sample(now_ns + 11 * S, "ergmeter", cpu_s=0.1))
    run = run_of(
        tmp_path / "run",
        steps=[Step(now_ns + S, now_ns + 9 * S, phase="eval")],
        samples=samples,
        devices=[GPU, own],
        header={"clock": {"monotonic_ns": now_ns, "wall_ns": 1_800_000_000 * S}},
    )
    assert reading(run, "energy.mean_w").value == pytest.approx(200, rel=0.01)
    assert reason(run, "throughput.tokens_per_s") == "no training steps, only eval"


@pytest.mark.parametrize("column", ["power_w", "energy_j"])
def test_the_interval_holds_the_truth_at_the_ragged_end_of_a_run(
    tmp_path: Path, column: str
) -> None:
    """The last reading comes 0.2 s before the last step's end; 500 W all the time."""
    run = run_of(
        tmp_path / "run",
        steps=[Step(0, S, tokens_computed=1)],
        samples=power(0.8, column=column, watts=500),
        devices=[GPU],
    )
    energy = reading(run, "energy.run_j", warmup_steps=0)
    assert energy.low is not None
    assert energy.high is not None
    assert energy.low <= 500 <= energy.high
    assert energy.value == pytest.approx(500, rel=0.03)


def test_gpus_of_a_host_where_nobody_is_recognised_still_count(tmp_path: Path) -> None:
    other = Device("GPU-1", "gpu", "Other GPU", "nvml", {})
    path = make_run(tmp_path / "run")
    used = [Mark(0, "device_used", GPU.id)]
    add_writer(path, steps=even_steps(10), samples=power(12), devices=[GPU], marks=used)
    elsewhere = [Sample(s.t_ns, other.id, power_w=100.0) for s in power(12)]
    add_writer(path, steps=shifted(even_steps(10), 0, rank=1), samples=elsewhere, devices=[other])
    assert reading(Run.open(path), "energy.run_j").value == pytest.approx(3000, rel=0.01)


def test_a_metric_that_fails_is_missing_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10, tokens_computed=1))
    monkeypatch.setattr(
        "ergmeter.metrics.evidence.evidence.Evidence.why_no_device", lambda *_: 1 / 0
    )
    assert "ZeroDivisionError" in reason(run, "energy.run_j")
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(1)


def own(writer: str, counted: str = "threads") -> Device:
    return Device(f"ergmeter:{writer}", "self", "own", "self", {"counted": counted})


def run_that_cost(path: Path, *costs: tuple[Device, float | None]) -> Run:
    """A run that lives for 20 s, each writer of it with a device and what that cost in the end."""
    now_ns = time.monotonic_ns()  # the writers' own marks are of now
    clock = {"clock": {"monotonic_ns": now_ns, "wall_ns": 1_800_000_000 * S}}
    make_run(path)
    for rank, (device, cpu_s) in enumerate(costs):
        spent = [] if cpu_s is None else [cpu_s / 4, cpu_s]
        samples = [
            Sample(now_ns + (10 + 5 * i) * S, device.id, cpu_s=value)
            for i, value in enumerate(spent)
        ]
        steps = [Step(now_ns, now_ns + 20 * S, rank=rank)]
        add_writer(path, steps=steps, samples=samples, devices=[device], header=clock)
    return Run.open(path)


def test_the_cost_of_several_writers_is_their_sum(tmp_path: Path) -> None:
    first, second = own("a-1-ff"), own("a-2-ff")
    run = run_that_cost(tmp_path / "run", (first, 0.1), (second, 0.3))
    found = reading(run, "overhead.cpu_frac")
    assert found.value == pytest.approx((0.1 + 0.3) / 20)
    assert "2 writers together" in found.note
    by_device = summarize(run).devices
    for device, cpu_s in ((first, 0.1), (second, 0.3)):
        each = by_device[device.id]["overhead.cpu_frac"]
        assert isinstance(each, Reading)
        assert each.value == pytest.approx(cpu_s / 20)


def test_the_cost_of_a_recorder_and_of_a_meter_in_it_add_up(tmp_path: Path) -> None:
    recorder, meter = own("a-1-ff", "processes"), own("a-2-ff")
    found = reading(
        run_that_cost(tmp_path / "run", (recorder, 0.5), (meter, 0.1)), "overhead.cpu_frac"
    )
    assert found.value == pytest.approx(0.6 / 20)
    assert "the recorder and its relay as whole processes" in found.note
    assert "the threads that read and write" in found.note


def test_a_writer_that_told_no_cost_is_not_taken_for_a_free_one(tmp_path: Path) -> None:
    silent = own("a-2-ff")
    run = run_that_cost(tmp_path / "run", (own("a-1-ff"), 0.2), (silent, None))
    found = reading(run, "overhead.cpu_frac")
    assert found.value == pytest.approx(0.2 / 20)
    assert "1 more ended before their cost was recorded" in found.note
    each = summarize(run).devices[silent.id]["overhead.cpu_frac"]
    assert isinstance(each, Missing)
    assert "ended before ergmeter's CPU time was recorded" in each.reason


def test_older_runs_whose_writers_share_a_device_say_that_it_is_one_of_theirs(
    tmp_path: Path,
) -> None:
    shared = Device("ergmeter", "self", "own", "self")
    run = run_that_cost(tmp_path / "run", (shared, 0.1), (shared, 0.3))
    found = reading(run, "overhead.cpu_frac")
    assert found.value == pytest.approx(0.3 / 20)
    assert "only of the most expensive of 2 writers" in found.note
    assert "together" not in found.note


def test_a_window_has_the_steps_that_all_ranks_made_together(tmp_path: Path) -> None:
    lanes = [shifted(even_steps(24, tokens_computed=10), 0.01 * rank, rank) for rank in (0, 1)]
    run = ranks(tmp_path / "run", *lanes)
    assert "over 24 steps of 2 ranks" in reading(run, "throughput.tokens_per_s").note
    assert (
        "after 4 steps of warm-up" in reading(run, "throughput.tokens_per_s", warmup_steps=4).note
    )
