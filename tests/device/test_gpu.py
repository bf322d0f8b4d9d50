"""On a real NVIDIA GPU: our figures against its own counter, read by other means at the same time.

Run with `./dev test -m device`. What they saw on an H200 is kept in tests/data/h200_run, where the
CPU tests replay it.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from ergmeter import Meter, Reading, Run
from ergmeter.metrics.summarize import summarize

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def torch() -> Any:  # the module, which has no type
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device")
    return module


@pytest.fixture(scope="module")
def counter_j() -> Any:  # a function of no arguments
    """The GPU's energy counter, read at its next refresh: no interpolation needed."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    counted_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption  # a test may hide it from the Meter

    def read() -> tuple[float, int]:
        first = counted_mj(handle)
        while (now := counted_mj(handle)) == first:
            pass
        return now / 1e3, time.monotonic_ns()

    return read


def work(torch: Any, a: Any, repeats: int) -> None:
    for _ in range(repeats):
        torch.mm(a, a)
    torch.cuda.synchronize()


def reading(run: Run, key: str) -> Reading:
    found = summarize(run).readings[key]
    assert isinstance(found, Reading), found
    return found


@pytest.mark.parametrize("hidden", ["nothing", "the counter"])
def test_energy_agrees_with_the_counter_read_beside_it(
    torch: Any, counter_j: Any, tmp_path: Path, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    def refused(_gpu: object) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    if hidden == "the counter":
        monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", refused)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    work(torch, a, 10)
    with Meter(tmp_path / "run", probes=["nvml", "process"]) as meter:
        meter.step_begin()
        start_j, _ = counter_j()
        meter.step_begin()
        for _ in range(20):
            work(torch, a, 150)
            meter.step_end(tokens=1)
        end_j, end_ns = counter_j()
    run = Run.open(tmp_path / "run")
    steps = run.steps()
    late_s = (end_ns - int(steps["end_ns"][-1])) / 1e9
    energy = reading(run, "energy.run_j")
    idle_w = 130.0  # what the wait for the last refresh draws, at most 100 ms of it
    truth_j = end_j - start_j - late_s * idle_w
    print(f"hidden: {hidden}; {energy.value:.1f} J, the counter {truth_j:.1f} J")
    assert energy.value == pytest.approx(truth_j, rel=0.03)
    assert energy.basis == ("measured" if hidden == "nothing" else "derived")


def test_the_allocators_peak_is_torchs_own(torch: Any, tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    with Meter(tmp_path / "run") as meter:
        held = [torch.empty(256 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
        meter.step_end(tokens=1)
        time.sleep(1.2)
        del held
        peak = torch.cuda.max_memory_allocated()
    run = Run.open(tmp_path / "run")
    assert reading(run, "memory.allocator_peak_bytes").value == peak
    assert reading(run, "memory.device_peak_bytes").value > peak


@pytest.mark.filterwarnings("ignore:cuDNN Attention defaults to a non-deterministic")
def test_losses_are_bit_identical_with_and_without_us(torch: Any, tmp_path: Path) -> None:
    from ergmeter.workloads.demo_text import documents
    from ergmeter.workloads.demo_training import SMALL, DemoTraining, batch_of

    batches = [batch_of(documents(200_000)[i : i + 4]) for i in range(0, 80, 4)]

    def losses() -> list[float]:
        training = DemoTraining(SMALL, torch.device("cuda"))
        return [training.step(batch.to(training.device)) for batch in batches]

    torch.use_deterministic_algorithms(True, warn_only=True)
    bare = losses()
    with Meter(tmp_path / "run") as meter:
        training = DemoTraining(SMALL, torch.device("cuda"))
        measured = []
        for batch in batches:
            with meter.step(tokens=1):
                measured.append(training.step(batch.to(training.device)))
    torch.use_deterministic_algorithms(False)
    assert measured == bare


def test_a_step_costs_the_same_with_us(torch: Any, tmp_path: Path) -> None:
    """Interleaved, as a ratio; printed, and held only to a bound far above the noise."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def block(meter: Meter | None) -> float:
        began = time.perf_counter()
        for _ in range(20):
            if meter is None:
                work(torch, a, 50)
            else:
                with meter.step(tokens=1):
                    work(torch, a, 50)
        return (time.perf_counter() - began) / 20

    block(None)
    ratios = []
    for number in range(6):
        bare = block(None)
        with Meter(tmp_path / str(number)) as meter:
            measured = block(meter)
        ratios.append(measured / bare)
    print(f"\nstep with Meter / without: median {statistics.median(ratios):.4f} of {ratios}")
    assert statistics.median(ratios) < 1.05
