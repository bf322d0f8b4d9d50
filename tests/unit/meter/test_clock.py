"""Steps by the device's clock, on a device whose queue is written down: the real one is tested in
tests/device, and this one can be made to lag, to fail and to hang."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ergmeter import Meter
from ergmeter.meter import clock, handover
from ergmeter.meter.clock import Moment, Timeline, moment
from ergmeter.records import Mark
from ergmeter.runlog.reader import Run

MS = 1_000_000
FAR_NS = 77_000_000_000_000  # the device began to count at another time


class Device:
    """A queue: work of so many milliseconds is done one after the other, from when it is asked."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.is_lost = False
        self.is_recording = False

    def work(self, lasts_ms: float) -> None:
        self.free_ns = max(self.free_ns, time.monotonic_ns()) + round(lasts_ms * MS)

    def module(self) -> ModuleType:
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.device = "cuda:0"

            def record(self, stream: object = None) -> None:
                assert not device.is_recording
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
            current_stream=lambda: "its",
            is_initialized=lambda: True,
            is_current_stream_capturing=lambda: device.is_recording,
        )
        return torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setitem(sys.modules, "torch", made.module())
    return made


def recorded(path: Path, device: Device, lasts_ms: list[float]) -> Run:
    """Steps asked for at once, of which the device needs so long each."""
    with Meter(path, probes=()) as meter:
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
            device.work(30)
        with meter.phase("data"):
            pass
    steps = Run.open(tmp_path / "run").steps()
    assert steps["end_ns"][1] < steps["end_ns"][0]
    assert steps["host_end_ns"][1] != steps["host_end_ns"][1]  # absent


def test_a_step_that_goes_into_a_graph_is_timed_by_the_host(device: Device) -> None:
    device.is_recording = True
    assert type(moment()) is int
    device.is_recording = False
    assert isinstance(moment(), Moment)


def test_steps_come_out_in_order_once_the_device_has_passed_them(device: Device) -> None:
    timeline = Timeline(lambda _mark: None)
    start = moment()
    device.work(10_000)
    rows = [(start, moment(), "slow"), (time.monotonic_ns(), time.monotonic_ns() + 1, "data")]
    assert timeline.passed(rows) == []
    device.free_ns = time.monotonic_ns()
    rows[0][1].event.at_ns = device.free_ns  # type: ignore[attr-defined]
    assert [row[2] for row in timeline.passed([])] == ["slow", "data"]


def test_a_device_that_fails_leaves_the_times_of_the_host(tmp_path: Path, device: Device) -> None:
    with Meter(tmp_path / "run", probes=()) as meter:
        for _ in range(3):
            with meter.step(tokens=8):
                device.work(5)
        device.is_lost = True
        for _ in range(2):
            with meter.step(tokens=8):
                device.work(5)
    run = Run.open(tmp_path / "run")
    assert run.steps()["tokens_computed"].tolist() == [8] * 5
    (said,) = {mark.detail for mark in run.marks if mark.name == "step_clock_failed"}
    assert "illegal memory access" in said
    assert run.status == "finished"


def test_a_device_that_hangs_holds_the_end_up_for_a_while_and_no_step_is_lost(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "DEVICE_S", 0.05)
    run = recorded(tmp_path / "run", device, [1e9, 1e9])
    steps = run.steps()
    assert len(steps["end_ns"]) == 2
    assert (steps["end_ns"] - steps["start_ns"] < 1000 * MS).all()
    assert any("not passed 2 steps" in mark.detail for mark in run.marks)


def test_without_a_gpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, ModuleType("torch")):  # not loaded, or half of it
        monkeypatch.setitem(sys.modules, "torch", module)
        assert type(moment()) is int
    clock.catch_up(5)
    rows: list[Any] = [(1, 2, "step")]
    marks: list[Mark] = []
    assert Timeline(marks.append).passed(rows) == [(1, 2, "step", None, None)]
    assert not marks
