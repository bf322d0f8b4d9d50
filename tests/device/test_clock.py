"""Steps by the clock of a real GPU, held against events of the test's own."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from ergmeter import Meter, Run
from ergmeter.meter.clock import Moment, moment

pytestmark = pytest.mark.device

PATTERN = (40, 10, 80, 20)  # products in a step


@pytest.fixture(scope="module")
def torch() -> Any:  # the module, which has no type
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device")
    return module


def test_a_loop_that_never_waits_gets_the_devices_times(tmp_path: Path, torch: Any) -> None:
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    own = []
    with Meter(tmp_path / "run", probes=["nvml"]) as meter:
        began_ns = time.monotonic_ns()
        for number in range(200):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with meter.step(tokens=1):
                start.record()
                for _ in range(PATTERN[number % 4]):
                    torch.mm(matrix, matrix)
                end.record()
            own.append((start, end))
        asked_ns = time.monotonic_ns()
        torch.cuda.synchronize()
        ended_ns = time.monotonic_ns()
    run = Run.open(tmp_path / "run")
    steps = run.steps()
    ours_ms = (steps["end_ns"] - steps["start_ns"]) / 1e6
    theirs_ms = [start.elapsed_time(end) for start, end in own]
    host_ms = (steps["host_end_ns"] - steps["host_start_ns"]) / 1e6
    off_us = sorted(1e3 * abs(a - b) for a, b in zip(ours_ms, theirs_ms, strict=True))
    late_us = (ended_ns - steps["end_ns"][-1]) / 1e3
    said = next(mark.detail for mark in run.marks if mark.name == "step_clock")
    print(
        f"\nstep of 40 products: device {ours_ms[100]:.2f} ms, host {host_ms[100]:.2f} ms;"
        f" off by {statistics.median(off_us):.1f} us (median), {off_us[-1]:.1f} us (worst);"
        f" the last ends {late_us:.0f} us before the host has waited for it; {said};"
        f" asked in {(asked_ns - began_ns) / 1e6:.0f} of {(ended_ns - began_ns) / 1e6:.0f} ms"
    )
    assert len(ours_ms) == 200
    assert off_us[100] < 50
    assert off_us[-1] < 1000
    assert -500 < late_us < 5000
    # Nothing overlaps, and nothing is left between: the device was never idle.
    gaps_us = (steps["start_ns"][1:] - steps["end_ns"][:-1]) / 1e3
    assert gaps_us.min() >= -1
    assert statistics.median(gaps_us) < 100


def test_a_moment_costs_microseconds_and_waits_for_nothing(torch: Any) -> None:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(100):
        torch.mm(matrix, matrix)  # a hundred milliseconds and more of it
    took_ns = []
    for _ in range(300):
        before_ns = time.perf_counter_ns()
        now = moment()
        took_ns.append(time.perf_counter_ns() - before_ns)
    assert isinstance(now, Moment)
    assert not now.event.query()  # the device is still far behind
    torch.cuda.synchronize()
    print(f"\na moment takes {statistics.median(took_ns) / 1e3:.1f} us (median)")
    assert statistics.median(took_ns) < 100_000


def test_a_graph_is_recorded_and_replayed_between_moments(tmp_path: Path, torch: Any) -> None:
    matrix = torch.randn(1024, 1024, device="cuda")
    with Meter(tmp_path / "run", probes=["nvml"]) as meter:
        for _ in range(20):
            with meter.step(tokens=1):
                torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        out = torch.empty_like(matrix)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.mm(matrix, matrix, out=out)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            deadline_s = time.monotonic() + 1.2  # so that a hand-over falls into it
            while time.monotonic() < deadline_s:
                with meter.step(tokens=1):
                    torch.mm(matrix, matrix, out=out)
                    time.sleep(0.05)
        for _ in range(20):
            with meter.step(tokens=1):
                graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, matrix @ matrix)
    run = Run.open(tmp_path / "run")
    assert not [mark for mark in run.marks if "fail" in mark.name]
