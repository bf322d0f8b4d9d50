"""Steps by the device's clock, on a device whose queue is written down: the real one is tested in
tests/device, and this one can be made to lag, to fail and to hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread, get_ident
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ergmeter import Meter
from ergmeter.meter import clock, handover
from ergmeter.meter.clock import Moment, Timeline, moment
from ergmeter.meter.pending_steps import step_values
from ergmeter.records import Mark, Step, StepValues
from ergmeter.runlog.reader import Run

MS = 1_000_000
FAR_NS = 77_000_000_000_000  # the device began to count at another time


class Device:
    """A queue: work of so many milliseconds is done one after the other, from when it is asked."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.in_use = [0]  # devices with a context; work is given to the first
        self.current = 0
        self.is_lost = False
        self.is_recording = False

    def work(self, lasts_ms: float) -> None:
        self.free_ns = max(self.free_ns, time.monotonic_ns()) + round(lasts_ms * MS)

    def lose(self) -> bool:
        self.is_lost = True
        return True

    def module(self) -> ModuleType:
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.device = f"cuda:{device.in_use[0]}"

            def record(self, stream: object) -> None:
                assert not device.is_recording
                if device.is_lost:
                    raise RuntimeError("CUDA error: device-side assert triggered")
                now_ns = time.monotonic_ns()
                self.at_ns = now_ns if stream == "ours" else max(now_ns, device.free_ns)

            def query(self) -> bool:
                if device.is_lost:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return time.monotonic_ns() >= self.at_ns

            def synchronize(self) -> None:
                assert self.query()

            def elapsed_time(self, other: Event) -> float:
                return ((other.at_ns + FAR_NS) - (self.at_ns + FAR_NS)) / MS

        torch = ModuleType("torch")
        torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            Event=Event,
            Stream=lambda _device: "ours",
            current_stream=lambda index: f"queue of {index}",
            device_count=lambda: 4,
            is_initialized=lambda: True,
            is_current_stream_capturing=lambda: device.is_recording,
        )
        torch._C = SimpleNamespace(  # type: ignore[attr-defined]
            _cuda_getDevice=lambda: device.current,
            _cuda_getCurrentStream=lambda index: (index, get_ident()),
            _cuda_hasPrimaryContext=lambda index: index in device.in_use,
        )
        return torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setitem(sys.modules, "torch", made.module())
    monkeypatch.setattr(clock, "_streams", {})
    monkeypatch.setattr(clock, "_in_use", {})
    return made


BUSY_MS = 300.0  # longer than the host may need to ask for some steps, also if it is held up


def recorded(path: Path, device: Device, lasts_ms: list[float]) -> Run:
    """Steps asked for while the device is busy, of which it needs so long each."""
    with Meter(path, probes=()) as meter:
        device.work(BUSY_MS)
        for number, each_ms in enumerate(lasts_ms):
            with meter.step(tokens=number + 1):
                device.work(each_ms)
    return Run.open(path)


def test_a_loop_that_does_not_wait_gets_the_times_of_the_device(
    tmp_path: Path, device: Device
) -> None:
    lasts_ms = [20.0, 40.0, 10.0, 30.0]
    run = recorded(tmp_path / "run", device, lasts_ms)
    steps = run.steps()
    assert (steps["end_ns"] - steps["start_ns"]) / MS == pytest.approx(lasts_ms, abs=2)
    # One after the other, while the host had asked for all of them before the first was done.
    assert (steps["start_ns"][1:] - steps["end_ns"][:-1]) / MS == pytest.approx([0, 0, 0], abs=2)
    assert steps["host_end_ns"][-1] < steps["end_ns"][0]
    assert (steps["host_start_ns"] <= steps["host_end_ns"]).all()
    assert steps["tokens_computed"].tolist() == [1, 2, 3, 4]
    (said,) = [mark.detail for mark in run.marks if mark.name == "step_clock"]
    assert "CUDA events" in said


def test_what_waits_for_data_or_saves_is_timed_by_the_host(tmp_path: Path, device: Device) -> None:
    with Meter(tmp_path / "run", probes=()) as meter:
        with meter.step():
            device.work(BUSY_MS)
        with meter.phase("data"):
            pass
    steps = Run.open(tmp_path / "run").steps()
    assert steps["end_ns"][1] < steps["end_ns"][0]
    assert steps["host_end_ns"][1] != steps["host_end_ns"][1]  # absent


def row(*values: Any, **given: Any) -> StepValues:
    return step_values(Step(*values, **given))


def test_a_step_that_goes_into_a_graph_is_timed_by_the_host(device: Device) -> None:
    device.is_recording = True
    assert type(moment()) is int
    device.is_recording = False
    assert isinstance(moment(), Moment)


def test_steps_come_out_in_order_once_the_device_has_passed_them(device: Device) -> None:
    timeline = Timeline(lambda _mark: None)
    start = moment()
    device.work(10_000)
    end = moment()
    now_ns = time.monotonic_ns()
    assert timeline.passed([row(start, end), row(now_ns, now_ns + 1, phase="data")]) == []
    device.free_ns = time.monotonic_ns()
    end.event.at_ns = device.free_ns  # type: ignore[attr-defined]
    assert [Step(*values).phase for values in timeline.passed([])] == ["train", "data"]


def test_a_device_that_fails_leaves_the_times_of_the_host(tmp_path: Path, device: Device) -> None:
    with Meter(tmp_path / "run", probes=()) as meter:
        for _ in range(3):
            with meter.step(tokens=8):
                device.work(10_000)  # which it does not get done
        device.is_lost = True
        for _ in range(2):
            with meter.step(tokens=8):
                device.work(5)
    run = Run.open(tmp_path / "run")
    assert run.steps()["tokens_computed"].tolist() == [8] * 5
    (said,) = {mark.detail for mark in run.marks if mark.name == "step_clock_failed"}
    assert "illegal memory access" in said
    assert run.status == "finished"


def test_a_device_that_fails_takes_no_step_with_it(device: Device) -> None:
    """Steps that it had passed keep its times, the others get the host's; none is lost."""
    marks: list[Mark] = []
    timeline = Timeline(marks.append)
    rows = []
    for number in range(4):
        start = moment()
        rows.append(row(start, moment(), number))
    bad = Step(*rows[2]).end_ns
    assert isinstance(bad, Moment)
    bad.event.elapsed_time = bad.event.query = fails
    found = [Step(*values) for values in timeline.passed(rows)]
    assert [step.index for step in found] == [0, 1, 2, 3]
    assert [step.host_start_ns is not None for step in found] == [True, True, False, False]
    assert [mark.name for mark in marks] == ["step_clock", "step_clock_failed"]


def fails(*_: object) -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_broken_device_does_not_stand_before_the_programs_own_error(
    tmp_path: Path, device: Device
) -> None:
    with Meter(tmp_path / "run", probes=()) as meter:
        with pytest.raises(ZeroDivisionError), meter.step():
            device.is_lost = bool(1 / (0 if device.lose() else 1))
        with meter.step(tokens=3):
            pass
    assert Run.open(tmp_path / "run").steps()["tokens_computed"].tolist() == [3]


def test_the_device_is_the_one_in_use_and_no_other_is_touched(device: Device) -> None:
    device.in_use = [2]  # all is said to be on "cuda:2", and nobody called set_device
    now = moment()
    assert isinstance(now, Moment)
    assert now.queue[0] == 2
    device.in_use = [0, 2]  # and which of two is meant nobody knows
    clock._in_use.clear()
    assert type(moment()) is int
    device.current = 2  # unless it was chosen
    now = moment()
    assert isinstance(now, Moment)
    assert now.queue[0] == 2


def test_beside_jax_on_a_gpu_torchs_queue_is_not_asked(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.in_use
    jax = ModuleType("jax._src.xla_bridge")
    monkeypatch.setitem(sys.modules, jax.__name__, jax)
    for backends, of in (({"cpu": 0}, Moment), ({"cpu": 0, "cuda": 1}, int)):
        jax._backends = backends  # type: ignore[attr-defined]
        clock._in_use.clear()
        assert type(moment()) is of


def test_jax_keeps_its_devices_where_they_are_looked_for() -> None:
    """In a process of its own: what is imported here stays here."""
    made = "import jax, jax._src.xla_bridge as x; jax.devices(); print(sorted(x._backends))"
    done = subprocess.run(
        [sys.executable, "-c", made],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['cpu']"


def test_steps_of_two_threads_may_overlap(device: Device) -> None:
    timeline = Timeline(lambda _mark: None)
    rows: list[Any] = []

    def one() -> None:
        start = moment()
        time.sleep(0.02)
        rows.append(row(start, moment()))

    threads = [Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start_ns, end_ns, *_ in timeline.passed(rows):
        assert end_ns - start_ns > 15 * MS


def test_a_device_that_hangs_holds_the_end_up_for_a_while_and_no_step_is_lost(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "DEVICE_S", 0.05)
    run = recorded(tmp_path / "run", device, [1e9, 1e9])
    steps = run.steps()
    assert len(steps["end_ns"]) == 2
    assert (steps["end_ns"] - steps["start_ns"] < 1000 * MS).all()
    assert any("not ended 2 steps" in mark.detail for mark in run.marks)


def test_without_a_gpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, ModuleType("torch")):  # not loaded, or half of it
        monkeypatch.setitem(sys.modules, "torch", module)
        assert type(moment()) is int
    clock.catch_up(5)
    marks: list[Mark] = []
    assert Timeline(marks.append).passed([row(1, 2)]) == [row(1, 2)]
    assert not marks
