"""Rates against clocks and libraries that are not ours; sensors against a scripted GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.hardware.calibration import FOLDER_VARIABLE, CalibratedRate, save_calibration
from ergmeter.ports import ProbeRequest
from ergmeter.probes import amd
from ergmeter.records import Device
from ergmeter.sampler import open_probes
from ergmeter.workloads import calibration, calibration_trials
from ergmeter.workloads.calibration import CalibrationTarget
from ergmeter.workloads.calibration_trials import (
    RepeatedWork,
    Sensors,
    TrialDurations,
    Watch,
    idle,
    refresh,
    sustained,
)
from tests.amd.library import MI300X, Machine, build
from tests.amd.library import default_uuid as amd_uuid
from tests.nvml.library import Gpu, Library, Script, default_uuid

CPU = torch.device("cpu")
BRIEF = TrialDurations(
    burst_s=0.005, bursts=2, finalists=1, warmup_s=0.02, window_s=0.1, block_s=0.01,
    stream_warmup_s=0.01, stream_window_s=0.05, is_quick=True,
)  # fmt: skip
NODE = CalibrationTarget(CPU, Device("node:here", "node", "here", "node"))


def held(work: Callable[[], object], *, window_s: float = 0.3) -> CalibratedRate:
    pace = TrialDurations(warmup_s=0.05, window_s=window_s, block_s=0.03)
    return sustained(RepeatedWork(work, 10.0, "B/s", "a nap"), CPU, pace, watch=None)


# -- rates -----------------------------------------------------------------------------------------


def test_a_rate_is_the_work_of_its_window_over_its_time() -> None:
    done = 0

    def nap() -> None:
        nonlocal done
        done += 1
        time.sleep(0.005)

    rate = held(nap)
    # A nap is never shorter than asked for, so 10 per 5 ms is a bound that no machine exceeds.
    assert rate.value <= 10 / 0.005
    assert rate.window_s >= 0.3
    assert rate.warmup_s >= 0.05
    assert rate.low <= rate.median <= rate.high <= rate.burst
    per_nap_s = (rate.window_s + rate.warmup_s) / (done - 4)  # four to find out how long it takes
    # Naps that count twice, or not at all, are off by two; a stall in the warm-up is less.
    assert 0.6 < rate.value / (10 / per_nap_s) < 1.7


def test_work_that_slows_down_within_the_window_is_not_steady() -> None:
    """Ten times as slow, so that no stall of the machine's hides it."""
    began_s = time.perf_counter()

    def tiring() -> None:
        time.sleep(0.004 if time.perf_counter() - began_s < 0.25 else 0.04)

    rate = held(tiring, window_s=0.4)
    assert rate.drift_frac < -0.3
    assert not rate.is_steady
    assert rate.burst > 1.5 * rate.low


def numpy_per_s(side: int) -> float:
    a = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32)
    began_s, done = time.perf_counter(), 0
    while time.perf_counter() - began_s < 0.15:
        a @ a.T
        done += 1
    return 2.0 * side**3 * done / (time.perf_counter() - began_s)


def test_fp32_products_are_as_fast_as_numpys_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two libraries, interleaved on one machine; which is the faster one is not ours to say. The
    best of each: other programs take a core from one of them for a while."""
    monkeypatch.setattr(calibration_trials, "_CPU_SHAPES", ((512, 512, 512), (1024, 1024, 1024)))
    ours, theirs = [], []
    for _ in range(4):
        rate, swept = calibration_trials.achievable("fp32", CPU, BRIEF)
        side = int(rate.of.split("x")[0])
        assert rate.of in swept
        ours.append(rate.value)
        theirs.append(numpy_per_s(side))
    assert 0.2 < max(ours) / max(theirs) < 5


def test_copies_are_as_fast_as_numpys_beside_them() -> None:
    size = 64 << 20
    memory = calibration_trials.MemoryStreams(CPU, 2 * size)
    a, b = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
    ours, theirs = [], []
    for _ in range(4):
        ours.append(memory.bandwidth("copy", BRIEF).value)
        for _ in range(4):
            began_s = time.perf_counter()
            np.copyto(b, a)
            theirs.append(2 * size / (time.perf_counter() - began_s))
    assert 0.2 < max(ours) / max(theirs) < 5


# -- what is multiplied and moved ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_a_product_has_the_flops_that_torch_counts_and_the_variance_of_normal_numbers(
    dtype: str,
) -> None:
    """A sum of k products of normal numbers has k times their variance; zeros would have none."""
    shape = (256, 384, 512)
    task = calibration_trials._task(dtype, shape, CPU)
    with FlopCounterMode(display=False) as counter:
        out = task.work()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (256, 384)
    if dtype != "int8":  # which it does not count
        assert counter.get_total_flops() == task.amount
    assert task.amount == 2 * 256 * 384 * 512
    scale = 32**4 if dtype == "int8" else 1
    assert float(out.double().var()) == pytest.approx(512 * scale, rel=0.1)


def test_tf32_is_asked_for_only_for_tf32_and_the_users_choice_is_put_back() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with calibration_trials._precision("high"):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("pattern", "arrays"), [("copy", 2), ("read", 1), ("triad", 3)])
def test_bytes_are_counted_as_stream_counts_them(pattern: str, arrays: int) -> None:
    memory = calibration_trials.MemoryStreams(CPU, 12 << 20)
    before = memory._memory.numpy().copy()
    task = memory.task(pattern)
    out = task.work()
    assert isinstance(out, torch.Tensor)
    parts = before.reshape(arrays, -1)
    assert float(before.std()) == pytest.approx(1.0, rel=0.01)
    assert task.amount == sum(part.nbytes for part in parts)
    expected = {
        "read": lambda: before.sum(dtype=np.float64),
        "copy": lambda: parts[0],
        "triad": lambda: parts[0] + 3 * parts[2],
    }[pattern]()
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-3, atol=1e-5)


def test_the_last_level_caches_of_all_sockets_are_added_up(tmp_path: Path) -> None:
    for cpu in range(4):
        socket = cpu // 2
        for index, (level, size, shared) in enumerate(
            [(1, "48K", f"{cpu}"), (2, "2048K", f"{cpu}"), (3, "32M", f"{2 * socket}-{cpu | 1}")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert calibration_trials.last_level_bytes(tmp_path) == 2 * (32 << 20)
    assert calibration_trials.last_level_bytes(tmp_path / "nowhere") == 0


def test_too_little_memory_is_said_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_trials, "_free_bytes", lambda _: 1 << 20)
    with pytest.raises(NotMeasurable, match=r"1 MiB to spare.* needs 4 MiB"):
        calibration_trials.achievable("fp32", CPU, BRIEF)


def test_a_type_that_ends_the_process_is_tried_in_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\nkill -ILL $$\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    with pytest.raises(NotMeasurable, match="SIGILL"):
        calibration_trials.achievable("bf16", CPU, BRIEF)


# -- the whole -------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time; fp32 alone, as bf16 would be tried in a process of its own."""
    monkeypatch.setattr(calibration_trials, "ON_CPU", ("fp32", "fp32"))
    monkeypatch.setattr(calibration_trials, "_CPU_SHAPES", ((128, 128, 128), (256, 256, 256)))
    monkeypatch.setattr(calibration_trials, "_size_bytes", lambda _: 24 << 20)


@pytest.mark.usefixtures("small")
def test_all_is_measured_in_order_and_told() -> None:
    ticks: list[tuple[float, float, str]] = []
    found = calibration.run(NODE, pace=BRIEF, tell=lambda *tick: ticks.append(tick))
    assert [what for _, _, what in ticks][-3:] == ["memory copy", "memory read", "memory triad"]
    assert [(done, total) for done, total, _ in ticks] == [(i, len(ticks)) for i in range(5)]
    assert set(found.matmul) == {"fp32"}
    assert set(found.bandwidth) == {"copy", "read", "triad"}
    assert found.conditions["threads"] == 1
    assert found.conditions["torch"] == torch.__version__
    assert found.quick
    assert not found.interrupted


@pytest.mark.usefixtures("small")
def test_an_interrupt_keeps_what_was_measured() -> None:
    def tell(_done: float, _total: float, what: str) -> None:
        if what == "memory read":
            raise KeyboardInterrupt

    found = calibration.run(NODE, pace=BRIEF, tell=tell)
    assert found.interrupted
    assert set(found.matmul) == {"fp32"}
    assert set(found.bandwidth) == {"copy"}


@pytest.mark.usefixtures("small")
def test_what_can_not_be_measured_is_absent_with_its_reason_and_the_rest_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> CalibratedRate:
        raise NotMeasurable("no memory to spare")

    monkeypatch.setattr(calibration_trials.MemoryStreams, "bandwidth", refuse)
    found = calibration.run(NODE, pace=BRIEF, tell=lambda *_: None)
    assert found.absent["memory copy"] == "no memory to spare"
    assert found.matmul
    monkeypatch.setattr(calibration_trials, "achievable", refuse)
    with pytest.raises(NotMeasurable, match="matmul fp32: no memory to spare"):
        calibration.run(NODE, pace=BRIEF, tell=lambda *_: None)


def test_a_device_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"cuda:9.*it has cpu"):
        calibration.targets("cuda:9")


def test_torchs_device_is_found_by_uuid_whatever_the_order() -> None:
    listed = [Device(f"GPU-{n}", "gpu", "NVIDIA H200", "nvml") for n in ("a", "b")]
    h200 = SimpleNamespace(name="NVIDIA H200", uuid="b")
    assert calibration._identified(0, h200, listed).id == "GPU-b"
    assert calibration._identified(1, SimpleNamespace(name="NVIDIA H200"), listed).id == "GPU-b"
    unlisted = calibration._identified(0, SimpleNamespace(name="H100", uuid="c"), listed)
    assert (unlisted.id, unlisted.probe) == ("GPU-c", "torch")


class Rocm:
    """A torch built for ROCm, whose GPUs are where their properties say; and AMD's library."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(amd, "KFD", os.devnull)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setenv("SCRIPTED_AMDSMI", str(folder / "gpus.txt"))
        self.machine = Machine(folder / "gpus.txt")
        self._monkeypatch = monkeypatch

    def shows(self, *properties: SimpleNamespace) -> None:
        self._monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        self._monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])


@pytest.fixture(scope="module")
def rocm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("rocm"))


@pytest.fixture
def rocm(rocm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rocm:
    monkeypatch.setenv("ROCM_HOME", str(rocm_folder))
    return Rocm(tmp_path, monkeypatch)


def at(bus: int | None) -> SimpleNamespace:
    """As torch describes an MI300X: its UUID is HIP's, which is not amdsmi's."""
    place = {} if bus is None else {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
    return SimpleNamespace(name="AMD Instinct MI300X", uuid="64656164-6265-6566", **place)


def test_a_gpu_of_amd_has_the_identity_that_a_run_will_know_it_by(
    rocm: Rocm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm.machine.show(
        {**MI300X, "bdf": "0000:05:00.0", "hip": 1},
        {**MI300X, "bdf": "0000:15:00.0", "hip": 0, "pids": 4321},
    )
    rocm.shows(at(0x15), at(0x05))
    first, second = calibration.targets("all")
    assert (first.device.id, second.device.id) == (amd_uuid(1), amd_uuid(0))
    assert (first.others, second.others) == ((4321,), ())
    rocm.shows(at(None), at(None))  # in the order of HIP, which the library knows
    assert [one.device.id for one in calibration.targets("all")] == [amd_uuid(1), amd_uuid(0)]
    kept = calibration._blank(first, calibration.QUICK)
    assert kept.conditions["power_limit_w"] == pytest.approx(750)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "kept"))
    save_calibration(kept)
    request = ProbeRequest(os.getpid(), "/", {"HIP_VISIBLE_DEVICES": "0"})
    (probe,) = open_probes(request, ["amd"]).probes
    assert probe.devices[0].facts["calibration"]["device"] == amd_uuid(1)
    probe.close()


def test_a_gpu_that_no_probe_lists_is_said_to_be_known_to_no_later_run(rocm: Rocm) -> None:
    rocm.machine.show(MI300X, {**MI300X, "bdf": "0000:15:00.0"})  # in an order that is assumed
    rocm.shows(at(None), at(0x77))
    for target in calibration.targets("all"):
        assert target.device.probe == "torch"
        said = calibration._blank(target, calibration.QUICK).absent["later runs"]
        assert said == "no later run can identify this GPU: amd does not list it"
    rocm.machine.show(MI300X, **{"init!": 10})
    (target, _) = calibration.targets("all")
    assert (
        "groups render and video"
        in calibration._blank(target, calibration.QUICK).absent["later runs"]
    )


# -- sensors ---------------------------------------------------------------------------------------


@pytest.fixture
def gpu(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Sensors]]:
    """Play one GPU to this process, on a clock that runs."""
    library.load()
    library.shut_down()

    def play(field: str = "instant", **of: Any) -> Sensors:
        monkeypatch.setenv("SCRIPTED_NVML", str(library.written(Script([Gpu(**of)]))))
        return Sensors(Device(default_uuid(0), "gpu", "H200", "nvml", {"power_field": field}))

    yield play
    library.shut_down()


RISING = [(0.0, 100.0), (60.0, 700.0)]


@pytest.mark.parametrize("period_ms", [20.0, 100.0])
@pytest.mark.parametrize("sensor", ["power_w", "energy_j"])
def test_a_sensors_period_is_found_by_when_its_reading_changes(
    gpu: Callable[..., Sensors], sensor: str, period_ms: float
) -> None:
    sensors = gpu(power_w=RISING, refresh_ms=period_ms, energy_read_ms=3.0)
    tries = []
    for _ in range(10):
        found = refresh(getattr(sensors, sensor), for_s=12 * period_ms / 1000)
        assert found.low_s <= found.period_s <= found.high_s
        tries.append(found.period_s)
        # No better than between two looks; of a machine with no time to look, tried again.
        if found.period_s == pytest.approx(period_ms / 1000, abs=2 * found.resolution_s + 0.005):
            return
    pytest.fail(f"every {period_ms} ms it changes, and this was found: {tries}")


def test_a_reading_that_stands_still_has_no_period(gpu: Callable[..., Sensors]) -> None:
    sensors = gpu(power_w=77.0, frozen_energy=True)
    for query in (sensors.power_w, sensors.energy_j):
        with pytest.raises(NotMeasurable, match="changed 0 times in"):
            refresh(query, for_s=0.3)


def test_idle_watts_are_the_sensors_and_the_counters_own(gpu: Callable[..., Sensors]) -> None:
    # Not a multiple of its period: two looks at no particular time would be off by up to a fifth.
    found = idle(gpu(power_w=121.0), settle_s=0.0, for_s=0.55)
    assert found.power_w == pytest.approx(121.0)
    # From one change of the counter to another; when exactly it changed is known to some ms, and
    # on a busy machine no better than to its period of 100 ms in 500.
    assert found.counter_w == pytest.approx(121.0, rel=0.4)


def test_a_counter_that_stands_still_gives_no_watts(
    gpu: Callable[..., Sensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ergmeter.workloads.calibration_trials._STILL_S", 0.15)
    found = idle(gpu(power_w=121.0, frozen_energy=True), settle_s=0.0, for_s=0.1)
    assert found.counter_w is None
    assert found.power_w == pytest.approx(121.0)


def test_a_gpu_that_does_not_tell_its_power_has_no_idle_watts(gpu: Callable[..., Sensors]) -> None:
    with pytest.raises(NotMeasurable, match="no power sensor"):
        idle(gpu(no_power=True), settle_s=0.0, for_s=0.05)


def test_a_watch_tells_clock_power_heat_and_what_limited_it(gpu: Callable[..., Sensors]) -> None:
    sensors = gpu(power_w=690.0, clock_hz=1_500e6, temperature_c=61.0, throttle=0x4 | 0x1)
    with Watch(sensors) as watch:
        start_ns = time.monotonic_ns()
        seen: dict[str, Any] = {}
        while not seen:  # the test's own time limit ends it
            time.sleep(0.05)
            seen = watch.between(start_ns, time.monotonic_ns())
    assert watch.between(0, 1) == {}
    assert seen["clock_hz"] == seen["clock_low_hz"] == 1_500e6
    assert seen["power_w"] == pytest.approx(690.0)
    assert seen["temperature_c"] == 61.0
    assert seen["limited"] == {"power": 1.0}


def test_whoever_computes_on_the_gpu_is_seen_except_ourselves(
    gpu: Callable[..., Sensors],
) -> None:
    gpu(processes=[(4321, 1 << 30), ("self", 1 << 30)])
    device = Device(default_uuid(0), "gpu", "H200", "nvml")
    assert calibration._others(device) == (4321,)
    assert os.getpid() != 4321
    target = CalibrationTarget(torch.device("cuda", 0), device, (4321,))
    assert "process 4321" in calibration._company(target)[0]
