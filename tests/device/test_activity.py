"""On a real Hopper or newer: hardware counters against loads whose nature is known; and their cost.

Run with `./dev test -m device -s` to see what a reading costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from ergmeter import Meter, Reading, Run
from ergmeter.metrics.summarize import summarize
from ergmeter.probes.nvml import Counters

pytestmark = pytest.mark.device

SECONDS = 4.0


@pytest.fixture(scope="module")
def torch() -> Any:  # the module, which has no type
    module = pytest.importorskip("torch")
    if not module.cuda.is_available() or module.cuda.get_device_capability()[0] < 9:
        pytest.skip("no Hopper or newer GPU")
    return module


def activity(path: Path, work: Callable[[], None]) -> dict[str, float]:
    """What the counters say of a load that goes on for some seconds."""
    with Meter(path, probes=["nvml"]) as meter:
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            with meter.step(tokens=1):
                work()
    found = summarize(Run.open(path)).readings
    known = {key: one.value for key, one in found.items() if isinstance(one, Reading)}
    print("\n", {key: round(one, 4) for key, one in known.items() if key.startswith("activity.")})
    return known


def test_a_large_product_is_the_tensor_pipes_work(torch: Any, tmp_path: Path) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(50):
            torch.mm(a, a)
        torch.cuda.synchronize()

    work()
    found = activity(tmp_path / "run", work)
    # Such a product reaches 80 % of an H200's peak: the pipes can't be at work for less.
    assert found["activity.tensor_frac"] > 0.6
    assert found["activity.tensor_half_frac"] == pytest.approx(
        found["activity.tensor_frac"], rel=0.1
    )
    assert found["activity.sm_frac"] > 0.8
    assert found["activity.dram_frac"] < 0.5


def test_a_copy_is_the_memorys_work(torch: Any, tmp_path: Path) -> None:
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 0

    def work() -> None:
        nonlocal copied
        for _ in range(100):
            target.copy_(source)
        copied += 100
        torch.cuda.synchronize()

    work()
    began_s, copied = time.monotonic(), 0
    found = activity(tmp_path / "run", work)
    rate = copied * 2 * source.numel() / (time.monotonic() - began_s)  # read and written
    print(f"at least {rate / 1e12:.2f} TB/s moved")
    assert found["activity.dram_frac"] > 0.6
    assert found["activity.tensor_frac"] < 0.02


def test_nothing_is_at_work_while_nothing_runs(torch: Any, tmp_path: Path) -> None:
    torch.cuda.synchronize()
    found = activity(tmp_path / "run", lambda: time.sleep(0.1))
    for key in ("sm_frac", "tensor_frac", "dram_frac"):
        assert found[f"activity.{key}"] < 0.02


def test_bytes_to_the_device_are_counted_as_bytes(torch: Any, tmp_path: Path) -> None:
    """A rate in another unit or direction shows here; packets have headers of their own."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    copied = 0

    def work() -> None:
        nonlocal copied
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        copied += 1

    work()
    copied = 0
    path = tmp_path / "run"
    found = activity(path, work)
    steps = Run.open(path).steps()
    span_s = (int(steps["end_ns"][-1]) - int(steps["start_ns"][0])) / 1e9
    rate = copied * host.numel() / span_s
    print(f"{rate / 1e9:.2f} GB/s copied to the device")
    assert found["activity.pcie_received_bytes_per_s"] == pytest.approx(rate, rel=0.25)
    assert found["activity.pcie_sent_bytes_per_s"] < 0.2 * rate


def test_the_cost_of_a_reading_is_told(torch: Any) -> None:
    """Printed, and held only to a bound far above what was seen (0.4 ms on an H200)."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    counters = Counters(handle)
    costs: dict[str, list[float]] = {"counters": [], "counters, CPU": [], "processes": []}
    for _ in range(30):
        time.sleep(0.12)
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        assert counters.read("gpu") is not None
        costs["counters"].append(time.perf_counter() - began_s)
        costs["counters, CPU"].append(time.thread_time() - cpu_s)
        began_s = time.perf_counter()
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        costs["processes"].append(time.perf_counter() - began_s)
    counters.close()
    pynvml.nvmlShutdown()
    for what, seconds in costs.items():
        middle, most = statistics.median(seconds) * 1e3, max(seconds) * 1e3
        print(f"\n{what}: median {middle:.3f} ms, most {most:.3f} ms of {len(seconds)}")
    assert statistics.median(costs["counters"]) < 0.01
