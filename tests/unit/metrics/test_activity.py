"""The ladder: means of what is already a mean, weighted with their time; and the H200's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.probes.replay import recorded_device, recorded_samples, recorded_steps
from ergmeter.records import Device, Mark, Reading, Sample
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run, reading, reason, run_of

S = 10**9
H200 = Path(__file__).parents[2] / "data" / "h200"


def run_with(path: Path, *told: tuple[float, float, float | None], seconds: int = 10) -> Run:
    """Ten steps of a second, and readings of the tensor cores: (when, share, over how long)."""
    samples = [
        Sample(round(t_s * S), GPU.id, tensor_frac=share, activity_s=span_s)
        for t_s, share, span_s in told
    ]
    return run_of(path, steps=even_steps(seconds), samples=samples, devices=[GPU])


def test_each_reading_counts_for_its_span(tmp_path: Path) -> None:
    """8 s at 10 % and 2 s at 60 %: 20 %, not the 35 % between the two readings."""
    run = run_with(tmp_path / "run", (8, 0.1, 8.0), (10, 0.6, 2.0))
    found = reading(run, "activity.tensor_frac")
    assert (found.low, found.value, found.high) == pytest.approx((0.2, 0.2, 0.2))
    assert (found.unit, found.basis) == ("frac", "measured")


def test_of_a_span_at_the_edge_only_what_is_in_the_window_counts(tmp_path: Path) -> None:
    """A mean of 50 % over 4 s, of which 1 s is after the start; then 9 s at 10 %; then idle."""
    run = run_with(tmp_path / "run", (1, 0.5, 4.0), (10, 0.1, 9.0), (40, 0.0, 30.0))
    found = reading(run, "activity.tensor_frac")
    assert found.value == pytest.approx((1 * 0.5 + 9 * 0.1) / 10)
    # Of the 2 s at work in the first span, all may be in its last second, or none.
    assert found.low == pytest.approx(9 * 0.1 / 10)
    assert found.high == pytest.approx((1 + 9 * 0.1) / 10)


def test_what_a_span_can_not_hold_elsewhere_must_be_in_the_window(tmp_path: Path) -> None:
    """90 % of 4 s are 3.6 s at work: at least 0.6 s of them in the one second that is ours."""
    run = run_with(tmp_path / "run", (1, 0.9, 4.0), (10, 0.0, 9.0))
    found = reading(run, "activity.tensor_frac")
    assert (found.low, found.value, found.high) == pytest.approx((0.06, 0.09, 0.10))


def test_a_reading_without_its_span_is_of_the_time_since_the_one_before(tmp_path: Path) -> None:
    """As in recordings from before spans were written."""
    run = run_with(tmp_path / "run", (0, 0.9, None), (8, 0.1, None), (10, 0.6, None))
    assert reading(run, "activity.tensor_frac").value == pytest.approx(0.2)


def test_a_gap_between_spans_is_not_filled_with_either(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", (4, 0.2, 4.0), (10, 0.6, 4.0))  # nothing from 4 s to 6 s
    assert reading(run, "activity.tensor_frac").value == pytest.approx(0.4)


def test_counters_that_stopped_leave_no_figure_and_say_what_happened(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, sm_frac=0.5, activity_s=1.0) for t in (1, 2, 3)]
    lost = Mark(4 * S, "activity_failed", f"{GPU.id}: NVML says In use by another client")
    run = run_of(
        tmp_path / "run", steps=even_steps(20), samples=samples, devices=[GPU], marks=[lost]
    )
    said = reason(run, "activity.sm_frac")
    assert "readings end 17.0 s before the window does" in said
    assert "In use by another client" in said
    notes = summarize(run).notes
    assert any("hardware counters" in note and "In use by another" in note for note in notes)


def test_a_gpu_that_has_no_counters_gives_its_own_reason(tmp_path: Path) -> None:
    why = "this GPU has no hardware counters that NVML reads (GPM): Hopper and newer have them"
    gpu = Device("GPU-a", "gpu", "NVIDIA A10", "nvml", {"absent": {why: ["sm_frac", "dram_frac"]}})
    samples = [Sample(t * S, gpu.id, busy_frac=1.0) for t in range(11)]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[gpu])
    assert reason(run, "activity.sm_frac") == f"NVIDIA A10 [GPU-a]: {why}"
    assert reading(run, "utilization.busy_frac").value == 1.0


def test_a_mean_is_over_the_devices_and_each_has_its_own(tmp_path: Path) -> None:
    other = Device("GPU-1", "gpu", "Test GPU", "nvml")
    samples = [Sample(10 * S, GPU.id, pcie_sent_bytes_per_s=3e9, activity_s=10.0)]
    samples += [Sample(10 * S, other.id, pcie_sent_bytes_per_s=1e9, activity_s=10.0)]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU, other])
    assert reading(run, "activity.pcie_sent_bytes_per_s").value == pytest.approx(2e9)
    own = summarize(run).devices["GPU-1"]["activity.pcie_sent_bytes_per_s"]
    assert isinstance(own, Reading)
    assert own.value == pytest.approx(1e9)


def test_the_ladder_of_the_recorded_h200_is_what_was_seen_there(tmp_path: Path) -> None:
    """As noted when it was recorded: 100 % any kernel, 93.8 % multiprocessors, 42.7 % tensor."""
    run_path = make_run(tmp_path / "run")
    steps = [step for name, step in recorded_steps(H200) if name == "full_bf16_1b"]
    samples = recorded_samples(H200)
    add_writer(run_path, steps=steps, samples=samples, devices=[recorded_device(H200)])
    run = Run.open(run_path)
    rungs = [
        reading(run, key, warmup_steps=3).value
        for key in ("utilization.busy_frac", "activity.sm_frac", "activity.tensor_frac")
    ]
    assert rungs == sorted(rungs, reverse=True)
    assert rungs[0] == pytest.approx(1.0, abs=0.01)
    assert rungs[1] == pytest.approx(0.938, abs=0.01)
    assert rungs[2] == pytest.approx(0.427, abs=0.01)
