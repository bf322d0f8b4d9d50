"""What a summary says of runs whose truth is known by construction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import catalogue, find
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Mark, Reading, Reported, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, even_steps, make_run, reading, reason, run_of

S = 10**9


def slow_tenth(rounds: int) -> list[Step]:
    """Nine steps of 60 ms and one of 1.2 s, again and again; 1024 tokens each."""
    steps, now = [], 0
    for number in range(10 * rounds):
        length = 1_200_000_000 if number % 10 == 9 else 60_000_000
        steps.append(Step(now, now + length, index=number, tokens_computed=1024))
        now += length
    return steps


def gpu_samples(
    device: Device, watts: float, seconds: float, *, counter: bool = True, memory: int = 10**9
) -> list[Sample]:
    """Ten readings a second from one second before the run to one after."""
    times = range(-10, round(seconds * 10) + 11)
    return [
        Sample(
            t * S // 10,
            device.id,
            power_w=watts,
            energy_j=1000 + watts * (t + 10) / 10 if counter else None,
            memory_bytes=memory,
            busy_frac=0.5,
        )
        for t in times
    ]


def test_throughput_is_tokens_over_time_and_not_a_mean_of_rates(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=slow_tenth(10))
    seconds = 10 * (9 * 0.06 + 1.2)
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(100 * 1024 / seconds)
    assert reading(run, "time.step_s").value == pytest.approx(seconds / 100)
    assert reading(run, "time.step_median_s").value == pytest.approx(0.06)
    assert reading(run, "time.step_p95_s").value == pytest.approx(1.2)
    assert reading(run, "tokens.per_step").value == 1024


def test_tokens_per_second_times_step_time_is_tokens_per_step_also_with_gaps(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(20, seconds=0.5, gap_s=0.2, tokens_computed=7))
    rate = reading(run, "throughput.tokens_per_s").value
    assert rate * reading(run, "time.step_s").value == pytest.approx(7)
    window_s = 20 * 0.7 - 0.2
    assert rate == pytest.approx(140 / window_s)
    assert reading(run, "time.in_step_s").value == pytest.approx(0.5)
    assert reading(run, "time.outside_steps_frac").value == pytest.approx(19 * 0.2 / window_s)


def test_step_time_is_the_reciprocal_of_steps_per_second_and_so_is_its_interval(
    tmp_path: Path,
) -> None:
    chance = np.random.default_rng(3)
    starts = np.cumsum(chance.integers(S // 2, 2 * S, 60)).tolist()
    steps = [Step(start, start + S // 3, tokens_computed=5) for start in starts]
    run = run_of(tmp_path / "run", steps=steps)
    step_s, per_s = reading(run, "time.step_s"), reading(run, "throughput.steps_per_s")
    assert per_s.low is not None
    assert per_s.high is not None
    assert step_s.value == pytest.approx(1 / per_s.value)
    assert step_s.low == pytest.approx(1 / per_s.high)
    assert step_s.high == pytest.approx(1 / per_s.low)
    assert step_s.note.startswith("window / steps, time between steps included; over 60 steps")


def test_four_steps_are_too_few_for_an_interval(tmp_path: Path) -> None:
    found = reading(run_of(tmp_path / "run", steps=even_steps(4, tokens_computed=5)), "time.step_s")
    assert (found.low, found.high) == (None, None)


def test_warmup_steps_leave_the_window_of_everything(tmp_path: Path) -> None:
    slow = [Step(0, 10 * S, tokens_computed=100)]
    steps = [Step(10 * S + i * S, 11 * S + i * S, tokens_computed=100) for i in range(20)]
    samples = [*gpu_samples(GPU, 200, 30)]
    run = run_of(tmp_path / "run", steps=slow + steps, samples=samples, devices=[GPU])
    assert reading(run, "throughput.tokens_per_s", warmup_steps=0).value == pytest.approx(2100 / 30)
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(100)
    warm = {"warmup_steps": 1}
    assert reading(run, "throughput.tokens_per_s", **warm).value == pytest.approx(100)
    assert reading(run, "energy.run_j", **warm).value == pytest.approx(200 * 20, rel=0.01)
    assert reading(run, "energy.joules_per_token", **warm).value == pytest.approx(2, rel=0.01)
    assert reading(run, "time.warmup_s", **warm).value == pytest.approx(10)
    assert reading(run, "throughput.tokens_per_s", warmup_s=5).value == pytest.approx(100)


def test_a_run_shorter_than_its_warmup_says_so_with_the_numbers(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(5, tokens_computed=9))
    said = reason(run, "throughput.tokens_per_s", warmup_steps=10)
    assert "shorter than its warm-up: 5 steps in 5 s, warm-up 10 steps" in said
    assert "shorter than its warm-up" in reason(run, "time.step_s", warmup_s=60)


def test_a_warmup_mark_has_the_last_word(tmp_path: Path) -> None:
    marks = [Mark(3 * S, "warmup_end")]
    run = run_of(tmp_path / "run", steps=even_steps(10, tokens_computed=1), marks=marks)
    assert reading(run, "steps.count").value == 7


def test_steady_state_is_found_after_a_slow_start(tmp_path: Path) -> None:
    lengths = [5.0, 4.0, 3.0, 2.0] + [1.0, 1.02, 0.98] * 20
    ends = np.cumsum(np.array(lengths) * S).astype(int)
    starts = np.append(0, ends[:-1])
    steps = [Step(int(a), int(b), tokens_computed=10) for a, b in zip(starts, ends, strict=True)]
    run = run_of(tmp_path / "run", steps=steps)
    assert reading(run, "time.warmup_steps", warmup="auto").value == 4
    assert reading(run, "time.step_s", warmup="auto").value == pytest.approx(1.0)


def test_a_run_that_becomes_slower_has_no_warm_up(tmp_path: Path) -> None:
    ends = np.cumsum(np.linspace(1, 9, 40) * S).astype(int)
    starts = np.append(0, ends[:-1])
    steps = [Step(int(a), int(b), tokens_computed=1) for a, b in zip(starts, ends, strict=True)]
    run = run_of(tmp_path / "run", steps=steps)
    assert reading(run, "throughput.tokens_per_s", warmup="auto").value == pytest.approx(40 / 200)


def test_real_tokens_are_preferred_and_padding_is_told(tmp_path: Path) -> None:
    steps = even_steps(10, tokens_computed=100, tokens_real=62, tokens_loss=60)
    run = run_of(tmp_path / "run", steps=steps)
    found = reading(run, "throughput.tokens_per_s")
    assert found.value == pytest.approx(62)
    assert "real tokens" in found.note
    assert reading(run, "throughput.computed_tokens_per_s").value == pytest.approx(100)
    assert reading(run, "throughput.loss_tokens_per_s").value == pytest.approx(60)
    assert reading(run, "tokens.padding_frac").value == pytest.approx(0.38)


def test_two_ranks_add_their_tokens_and_share_the_time(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for rank in (0, 1):
        steps = [
            Step(i * S + rank * 1000, (i + 1) * S, tokens_computed=100, rank=rank)
            for i in range(10)
        ]
        add_writer(path, steps=steps, samples=gpu_samples(GPU, 300, 10), devices=[GPU])
    run = Run.open(path)
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(200)
    assert reading(run, "tokens.per_step").value == 200
    assert reading(run, "time.step_s").value == pytest.approx(1)
    assert reading(run, "throughput.tokens_per_s_per_device").value == pytest.approx(200)
    # Both writers sampled the same board: it is counted once.
    assert reading(run, "energy.run_j").value == pytest.approx(3000, rel=0.01)


def test_two_hosts_are_put_on_one_clock(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    wall_ns = 1_800_000_000 * S
    for host, booted_s in (("a", 0), ("b", 5000)):
        steps = [
            Step((booted_s + i) * S, (booted_s + i + 1) * S, tokens_computed=50) for i in range(10)
        ]
        clock = {"monotonic_ns": booted_s * S, "wall_ns": wall_ns}
        add_writer(path, steps=steps, header={"host": host, "boot_id": host, "clock": clock})
    assert reading(Run.open(path), "throughput.tokens_per_s").value == pytest.approx(100)


def test_two_gpus_add_up_and_are_told_apart(tmp_path: Path) -> None:
    other = Device("GPU-1", "gpu", "Other GPU", "nvml", {})
    samples = gpu_samples(GPU, 100, 10) + gpu_samples(other, 250, 10)
    steps = even_steps(10, tokens_computed=10)
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU, other])
    summary = summarize(run)
    total = summary.readings["energy.run_j"]
    assert isinstance(total, Reading)
    assert total.value == pytest.approx(3500, rel=0.01)
    first, second = (summary.devices[d]["energy.mean_w"] for d in ("GPU-0", "GPU-1"))
    assert isinstance(first, Reading)
    assert isinstance(second, Reading)
    assert first.value == pytest.approx(100, rel=0.01)
    assert second.value == pytest.approx(250, rel=0.01)


def test_a_counter_beside_an_integral_is_never_mixed_without_saying_so(tmp_path: Path) -> None:
    other = Device("GPU-1", "gpu", "Other GPU", "nvml", {})
    samples = gpu_samples(GPU, 100, 10) + gpu_samples(other, 250, 10, counter=False)
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU, other])
    found = reading(run, "energy.run_j")
    assert found.value == pytest.approx(3500, rel=0.01)
    assert found.basis == "derived"
    assert "energy counter and instant power, integrated" in found.note


def test_a_lost_gpu_makes_the_sum_absent_and_names_it(tmp_path: Path) -> None:
    other = Device("GPU-1", "gpu", "Other GPU", "nvml", {})
    lost = [s for s in gpu_samples(other, 250, 10) if s.t_ns < 4 * S]
    run = run_of(
        tmp_path / "run",
        steps=even_steps(10),
        samples=gpu_samples(GPU, 100, 10) + lost,
        devices=[GPU, other],
        marks=[Mark(4 * S, "device_lost", "GPU-1 (Other GPU): NVML says GPU is lost")],
    )
    said = reason(run, "energy.run_j")
    assert "NVML says GPU is lost" in said
    assert "6.10 s before the window" in said
    assert "1 other device drew 1000" in said
    assert any("lost during the run" in note for note in summarize(run).notes)


def test_a_reset_counter_falls_back_to_power_and_says_why(tmp_path: Path) -> None:
    samples = [
        Sample(
            s.t_ns, s.device, power_w=s.power_w, energy_j=(s.energy_j or 0) - 5e3 * (s.t_ns > 5 * S)
        )
        for s in gpu_samples(GPU, 400, 10)
    ]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU])
    found = reading(run, "energy.run_j")
    assert found.value == pytest.approx(4000, rel=0.01)
    assert found.basis == "derived"
    assert "the energy counter was reset" in found.note


def test_a_frozen_counter_and_no_power_is_unavailable_and_not_zero(tmp_path: Path) -> None:
    samples = [Sample(s.t_ns, s.device, energy_j=77.0) for s in gpu_samples(GPU, 400, 10)]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU])
    assert "stood still at 77.0 J" in reason(run, "energy.run_j")


def test_cpu_energy_is_the_runs_where_there_is_no_accelerator(tmp_path: Path) -> None:
    package = Device("rapl:h:package-0", "cpu", "CPU package 0", "rapl", {})
    samples = [
        Sample(t * S // 10, package.id, energy_j=45.0 * (t + 10) / 10) for t in range(-10, 111)
    ]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[package])
    assert reading(run, "energy.run_j").value == pytest.approx(450, rel=0.01)
    assert reading(run, "energy.cpu_j").value == pytest.approx(450, rel=0.01)
    assert "no accelerator" in reason(run, "energy.accelerator_j")


def test_carbon_needs_a_grid_intensity_and_shows_both_factors(tmp_path: Path) -> None:
    samples = gpu_samples(GPU, 360, 10)
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU])
    assert "no grid intensity was given" in reason(run, "carbon.co2e_g")
    found = reading(
        run, "carbon.co2e_g", grid_g_per_kwh=500, grid_source="operator, 2025", pue=1.25
    )
    # 3600 J are 1 Wh: 0.001 kWh x 500 g x 1.25.
    assert found.value == pytest.approx(0.625, rel=0.01)
    assert found.basis == "assumed"
    assert "operator, 2025" in found.note
    assert "PUE 1.25 (source not stated)" in found.note


def test_per_parameter_rates_do_not_grow_with_the_run(tmp_path: Path) -> None:
    for name, count in (("short", 20), ("long", 3000)):
        run = run_of(tmp_path / name, steps=even_steps(count, tokens_computed=1000, samples=4))
        found = reading(run, "throughput.tokens_per_parameter_per_s", parameters=500_000)
        assert found.value == pytest.approx(1000 / 500_000)
        each = reading(run, "throughput.samples_per_parameter_per_s", parameters=500_000)
        assert each.value == pytest.approx(4 / 500_000)


def test_tokens_that_were_only_declared_are_assumed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    found = reading(run, "throughput.tokens_per_s", tokens_per_step=4096)
    assert found.value == pytest.approx(4096)
    assert found.basis == "assumed"


def test_the_programs_own_figure_is_passed_on_as_reported(tmp_path: Path) -> None:
    reported = [Reported(5 * S, "train_samples_per_second", 12.5, "samples/s")]
    run = run_of(tmp_path / "run", steps=even_steps(10), reported=reported)
    found = reading(run, "throughput.samples_per_s")
    assert (found.value, found.basis) == (12.5, "reported")
    assert "train_samples_per_second" in found.note


def test_rates_printed_on_the_way_are_work_over_time(tmp_path: Path) -> None:
    """A thousand sequences at 10 a second and a thousand at 40: 2000 in 125 seconds."""
    reported = [
        Reported(t * S, "throughput", value, "sequences/s")
        for t, value in ((1, 0.1), (2, 10.0), (3, 40.0))
    ]
    run = run_of(tmp_path / "run", steps=even_steps(10), reported=reported)
    found = reading(run, "throughput.samples_per_s", warmup_steps=1)
    assert found.value == pytest.approx(2000 / 125)
    assert (found.unit, found.basis) == ("samples/s", "reported")
    assert "2 'throughput'" in found.note


def test_a_rate_over_all_so_far_is_the_last_one(tmp_path: Path) -> None:
    reported = [
        Reported(t * S, "train_samples_per_second", value, "samples/s")
        for t, value in ((1, 1.0), (2, 5.0), (3, 9.0))
    ]
    run = run_of(tmp_path / "run", steps=even_steps(10), reported=reported)
    assert reading(run, "throughput.samples_per_s").value == 9.0


def test_memory_that_was_printed_is_passed_on_as_reported(tmp_path: Path) -> None:
    reported = [
        Reported(S, "memory", 3e9, "B"), Reported(2 * S, "memory", 5e9, "B"),
        Reported(3 * S, "memory", 4e9, "B"), Reported(4 * S, "amu", 2e9, "B"),
    ]  # fmt: skip
    run = run_of(tmp_path / "run", steps=even_steps(10), reported=reported)
    peak = reading(run, "memory.device_peak_bytes")
    assert (peak.value, peak.basis) == (5e9, "reported")
    mean = reading(run, "memory.device_mean_bytes")
    assert (mean.value, mean.basis) == (2e9, "reported")


def test_steps_of_a_meter_win_over_steps_in_the_output(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(10, tokens_computed=100))
    add_writer(path, steps=even_steps(10, tokens_computed=100), stream="output")
    run = Run.open(path)
    found = reading(run, "throughput.tokens_per_s")
    assert found.value == pytest.approx(100)
    assert found.basis == "measured"


def test_a_log_line_for_ten_steps_stands_for_ten(tmp_path: Path) -> None:
    steps = even_steps(10, seconds=5, steps=10, tokens_computed=1000)
    run = run_of(tmp_path / "run", steps=steps, stream="output")
    assert reading(run, "time.step_s").value == pytest.approx(0.5)
    assert reading(run, "tokens.per_step").value == 100
    assert reading(run, "throughput.steps_per_s").value == pytest.approx(2)


def test_memory_peak_mean_and_growth(tmp_path: Path) -> None:
    process = Device("process:h:1", "process", "train.py", "process", {})
    samples = [
        Sample(t * S, process.id, memory_bytes=10**9 + t * 10**6, cpu_s=t * 1.5)
        for t in range(-1, 102)
    ]
    run = run_of(tmp_path / "run", steps=even_steps(100), samples=samples, devices=[process])
    assert reading(run, "memory.process_peak_bytes").value == 10**9 + 101 * 10**6
    assert reading(run, "memory.process_mean_bytes").value == pytest.approx(1.05e9, rel=1e-3)
    growth = reading(run, "memory.process_growth_bytes_per_h")
    assert growth.value == pytest.approx(3600e6, rel=1e-3)
    assert reading(run, "utilization.process_cores").value == pytest.approx(1.5)


def test_cores_in_use_are_over_the_time_that_was_read(tmp_path: Path) -> None:
    """Readings from 2 to 4 s of a window of 5 s; 0.7 cores all the time."""
    process = Device("process:h:1", "process", "train.py", "process", {})
    samples = [Sample(t * S, process.id, cpu_s=0.7 * t) for t in (2, 3, 4)]
    run = run_of(tmp_path / "run", steps=even_steps(5), samples=samples, devices=[process])
    assert reading(run, "utilization.process_cores").value == pytest.approx(0.7)


def test_generated_tokens_are_over_the_decode_spans_alone(tmp_path: Path) -> None:
    steps = []
    for i in range(10):
        steps.append(Step(i * 4 * S, i * 4 * S + S, phase="prefill", tokens_computed=900))
        steps.append(Step(i * 4 * S + S, i * 4 * S + 3 * S, phase="decode", tokens_computed=100))
    run = run_of(tmp_path / "run", steps=steps)
    assert reading(run, "throughput.generated_tokens_per_s").value == pytest.approx(50)


def test_a_share_above_one_is_shown_and_flagged(tmp_path: Path) -> None:
    samples = [
        Sample(s.t_ns, s.device, power_w=100.0, busy_frac=1.7) for s in gpu_samples(GPU, 100, 10)
    ]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU])
    summary = summarize(run)
    found = summary.readings["utilization.busy_frac"]
    assert isinstance(found, Reading)
    assert found.value == pytest.approx(1.7)
    why = "above 100 %: a reading of the driver or the kernel is wrong"
    assert found.impossible == why
    assert f"accelerator busy is impossible: {why}" in summary.notes
    device = summary.devices[GPU.id]["utilization.busy_frac"]
    assert isinstance(device, Reading)
    assert device.impossible == why


def test_a_slow_first_step_is_pointed_out_with_the_cure(tmp_path: Path) -> None:
    steps = [Step(0, 30 * S), *[Step(30 * S + i * S, 31 * S + i * S) for i in range(20)]]
    run = run_of(tmp_path / "run", steps=steps)
    counted = summarize(run, Settings(warmup_steps=0))
    cure = "it costs 58.0 % of the time: --warmup-steps 1 leaves it out (erg check)"
    assert any(
        "30.0 times as slow as the median" in note and cure in note for note in counted.notes
    )
    assert not any("median" in note for note in summarize(run, Settings(warmup_steps=1)).notes)
    assert not any("median" in note for note in summarize(run).notes)


EFFICIENTLLM = ("AMU", "PCU", "AL", "TT", "ST", "IT", "AEC")
SFT_PLAY = (
    *("wall_s", "warmup_s", "tokens_processed", "tok_per_s", "energy_J", "avg_power_W"),
    *("peak_power_W", "J_per_token", "E10k_J", "vram_peak_MB", "vram_avg_MB"),
)


@pytest.mark.parametrize("alias", [*EFFICIENTLLM, *SFT_PLAY])
def test_the_names_of_the_older_systems_lead_to_a_metric(alias: str) -> None:
    metric, found = find(alias)
    assert found is not None
    assert found.name == alias
    assert metric.key in catalogue()


def test_a_mistyped_metric_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"throughput\.tokens_per_s"):
        find("throughput.token_per_s")


def test_a_metric_is_found_by_the_last_part_of_its_key_where_no_other_has_it() -> None:
    assert find("tokens_per_s")[0].key == "throughput.tokens_per_s"
    assert find("step_s")[0].key == "time.step_s"
    assert find("time.step_s") == find("step_s")
    with pytest.raises(UsageError, match="no metric 'per_s'"):
        find("per_s")
