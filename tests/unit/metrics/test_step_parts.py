"""AL's two parts without a profile: of one rank on one GPU, whose kernels are no collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ergmeter.records import Device, Sample
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run, reading, reason

S = 10**9
OTHER = Device("GPU-1", "gpu", "Test GPU", "nvml", {"power_field": "instant"})


def run_of(path: Path, *gpus: Device, world: int = 1, gap_s: float = 0.0) -> Run:
    """20 steps of 0.5 s in which the GPU has a kernel for 80 % of the time."""
    run = make_run(path)
    add_writer(
        run,
        steps=even_steps(20, seconds=0.5, gap_s=gap_s),
        samples=[Sample(t * S, gpu.id, busy_frac=0.8) for gpu in gpus for t in range(21)],
        devices=gpus,
        header={"world": world, "rank": 0},
    )
    return Run.open(run)


def test_the_time_with_a_kernel_is_computation_and_nothing_communicates(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", GPU)
    computation = reading(run, "profile.computation_s", window="unbroken")
    communication = reading(run, "profile.communication_s", window="unbroken")
    assert computation.value == pytest.approx(0.8 * 0.5)
    assert communication.value == 0.0
    for part in (computation, communication):
        assert part.basis == "derived"
        assert "one rank on one GPU does not communicate" in part.note
    # What a profile alone can tell is still absent.
    assert "no steps were profiled" in reason(run, "profile.compute_frac", window="unbroken")


@pytest.mark.parametrize(
    "made",
    [
        {"gpus": (GPU, OTHER)},  # which copy to each other
        {"gpus": (GPU,), "world": 2},  # whose collectives are kernels too
        {"gpus": (GPU,), "gap_s": 0.1},  # a sixth of the time is in no step, with kernels or not
        {"gpus": ()},
    ],
)
def test_elsewhere_a_profile_is_needed(tmp_path: Path, made: dict[str, Any]) -> None:
    gpus = made.pop("gpus")
    run = run_of(tmp_path / "run", *gpus, **made)
    for key in ("profile.computation_s", "profile.communication_s"):
        assert "no steps were profiled" in reason(run, key, window="unbroken")
