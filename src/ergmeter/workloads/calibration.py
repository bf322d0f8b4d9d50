"""Measures what a machine reaches in a minute: matmul rates, memory, idle power, sensor refresh.

Other processes on the device change every number, so they are looked for first and reported. Idle
power is measured before any load, with a context open, as a training has one. Results measured
before Ctrl-C are kept.

A device has the identity that a run's probe will give it: NVML's, or amdsmi's where torch is built
for ROCm. A device that no probe lists can be measured, with a note that no run will match it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pynvml
import torch

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.hardware.calibration import Calibration
from ergmeter.ports import ProbeRequest
from ergmeter.probes.amd import AmdProbe
from ergmeter.records import Device
from ergmeter.sampler import open_probes
from ergmeter.version import __version__
from ergmeter.workloads import calibration_trials
from ergmeter.workloads.calibration_trials import FULL, QUICK, Sensors, TrialDurations, Watch

Stage: TypeAlias = tuple[str, Callable[[], None]]

__all__ = ["FULL", "QUICK", "CalibrationTarget", "run", "targets"]

BUSY_FRAC = 0.1  # of all cores; above it, other processes on a CPU are reported
# Facts of a device that its rates depend on.
_CONDITIONS = (
    *("driver", "power_limit_w", "power_field"),
    *("cpu_model", "cores", "cpu_peak_flops_per_s", "cpu_peak_source"),
)


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """A device to measure: torch's device, the probe's identity, and other processes on it."""

    where: torch.device
    device: Device
    others: tuple[int, ...] = ()  # processes


def targets(named: str) -> list[CalibrationTarget]:
    """The devices that a name selects: auto, cpu, cuda, cuda:1, or all for every GPU."""
    gpus = list(_gpus()) if named != "cpu" else []
    if named == "cpu" or (named == "auto" and not gpus):
        return [CalibrationTarget(torch.device("cpu"), _cpu())]
    if named == "all" and gpus:
        return gpus
    wanted = "cuda:0" if named in ("auto", "cuda") else named
    matching = [gpu for gpu in gpus if str(gpu.where) == wanted]
    if not matching:
        there = ", ".join(["cpu", *(str(gpu.where) for gpu in gpus)])
        raise UsageError(f"torch {torch.__version__} has no device {named!r} here; it has {there}")
    return matching


def _cpu() -> Device:
    opened = open_probes(_request(), ["node"])
    if not opened.probes:
        raise NotMeasurable(opened.unavailable["node"])
    return opened.probes[0].devices[0]


def _gpus() -> Iterator[CalibrationTarget]:
    """Yield every GPU of torch, with the device identity that a run's probe gives it."""
    if not torch.cuda.is_available():
        return
    name = "amd" if torch.version.hip else "nvml"
    opened = open_probes(_request(), [name])
    listed = [device for probe in opened.probes for device in probe.devices]
    others: dict[str, tuple[int, ...]] = {}  # asked before torch opens a context
    for probe in opened.probes:
        on_amd = probe.processes() if isinstance(probe, AmdProbe) else {}
        others |= {device.id: _others(device, on_amd.get(device.id)) for device in probe.devices}
        probe.close()
    identified = _identified_by_bus if torch.version.hip else _identified
    for index in range(torch.cuda.device_count()):
        device = identified(index, torch.cuda.get_device_properties(index), listed)
        if device.probe == "torch":
            device.facts["no_probe"] = opened.unavailable.get(name, f"{name} does not list it")
        yield CalibrationTarget(torch.device("cuda", index), device, others.get(device.id, ()))


def _identified(index: int, properties: Any, listed: list[Device]) -> Device:  # noqa: ANN401
    """NVML's device for a torch device; one without sensors if NVML does not list it."""
    uuid = str(getattr(properties, "uuid", ""))
    for device in listed:
        if uuid and device.id == f"GPU-{uuid}":
            return device
    if not uuid and index < len(listed):
        return listed[index]
    return Device(f"GPU-{uuid}" if uuid else f"cuda:{index}", "gpu", properties.name, "torch")


def _identified_by_bus(index: int, properties: Any, listed: list[Device]) -> Device:  # noqa: ANN401
    """amdsmi's device for a torch device, by PCI bus: HIP has other UUIDs.

    An older torch has no bus address. Then GPUs are matched by order, if that is known to be HIP's.
    """
    fields = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    address = [getattr(properties, field, None) for field in fields]
    if None not in address:
        domain, bus, slot = (int(part or 0) for part in address)
        start = f"{domain:04x}:{bus:02x}:{slot:02x}."
        same = [
            device for device in listed if str(device.facts.get("pci_bus_id", "")).startswith(start)
        ]
    else:
        is_known = not any(device.facts.get("order_is_assumed") for device in listed)
        same = listed[index : index + 1] if is_known else []
    return same[0] if len(same) == 1 else Device(f"cuda:{index}", "gpu", properties.name, "torch")


def _others(device: Device, processes: list[int] | None = None) -> tuple[int, ...]:
    """Other processes on the device, from NVML if not known yet."""
    if processes is not None:
        return tuple(pid for pid in processes if pid != os.getpid())
    with suppress(pynvml.NVMLError), closing(Sensors(device)) as sensors:
        return tuple(pid for pid in sensors.processes() if pid != os.getpid())
    return ()


def _request() -> ProbeRequest:
    return ProbeRequest(os.getpid(), str(Path.cwd()), dict(os.environ))


def run(
    target: CalibrationTarget,
    *,
    pace: TrialDurations = FULL,
    tell: Callable[[float, float, str], None],
) -> Calibration:
    """Measures one device. An interrupt ends it early, with the results so far.

    `tell` gets the number of stages done, their total number, and the next stage's name.
    """
    began_s = time.monotonic()
    result = _blank(target, pace)
    with ExitStack() as stack:
        try:
            stages = _stages(target, pace, result, stack)
            for number, (what, stage) in enumerate(stages):
                tell(number, len(stages), what)
                try:
                    stage()
                except NotMeasurable as error:
                    result.absent[what] = str(error)
        except KeyboardInterrupt:
            result.interrupted = True
    result.took_s = time.monotonic() - began_s
    if not result.matmul and not result.interrupted:
        reasons = "; ".join(f"{what}: {why}" for what, why in result.absent.items())
        raise NotMeasurable(f"no rate could be measured on {target.where} ({reasons})")
    return result


def _blank(target: CalibrationTarget, pace: TrialDurations) -> Calibration:
    device, facts = target.device, target.device.facts
    conditions: dict[str, object] = {"ergmeter": __version__, "torch": str(torch.__version__)}
    if target.where.type == "cuda":
        conditions["cuda"] = torch.version.cuda or torch.version.hip
    else:
        conditions["threads"] = torch.get_num_threads()
    result = Calibration(
        device.id, device.kind, str(facts.get("cpu_model") or device.name),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        {**conditions, **{name: facts[name] for name in _CONDITIONS if name in facts}},
        remarks=_company(target), quick=pace.is_quick,
    )  # fmt: skip
    if "no_probe" in facts:
        result.absent["later runs"] = f"no later run can identify this GPU: {facts['no_probe']}"
    return result


def _company(target: CalibrationTarget) -> list[str]:
    """A note if other processes use the device."""
    if target.others:
        which = ", ".join(str(pid) for pid in target.others)
        return [f"not alone: process {which} was on the device"]
    if target.where.type == "cpu":
        busy_frac = psutil.cpu_percent(interval=0.3) / 100
        if busy_frac > BUSY_FRAC:
            return [f"not alone: others kept the cores {100 * busy_frac:.0f} % busy"]
    return []


def _stages(
    target: CalibrationTarget, pace: TrialDurations, result: Calibration, stack: ExitStack
) -> list[Stage]:
    """The stages in order; opens the sensors and memory they need."""
    where, watch = target.where, None
    stages: list[Stage] = []
    if where.type == "cuda":
        _open_context(where, stack)
        if target.device.probe == "nvml":
            sensors = Sensors(target.device)
            stack.callback(sensors.close)
            stages += _sensor_stages(sensors, where, pace, result)
            watch = stack.enter_context(Watch(sensors))
        else:
            result.absent["sensors"] = (
                "those of AMD GPUs are not measured yet"
                if target.device.probe == "amd"
                else "no probe lists this device"
            )

    def matmul(dtype: str) -> None:
        result.matmul[dtype], result.sweep[dtype] = calibration_trials.achievable(
            dtype, where, pace, watch=watch
        )

    def stream(pattern: str) -> None:
        result.bandwidth[pattern] = memory.bandwidth(pattern, pace, watch=watch)

    types = calibration_trials.ON_GPU if where.type == "cuda" else calibration_trials.ON_CPU
    stages += [(f"matmul {dtype}", partial(matmul, dtype)) for dtype in types]
    memory = calibration_trials.MemoryStreams(where)
    return stages + [
        (f"memory {pattern}", partial(stream, pattern)) for pattern in calibration_trials.PATTERNS
    ]


def _sensor_stages(
    sensors: Sensors, where: torch.device, pace: TrialDurations, result: Calibration
) -> list[Stage]:
    def idle_power() -> None:
        result.idle = calibration_trials.idle(sensors, settle_s=pace.settle_s, for_s=pace.idle_s)

    def period(name: str, query: Callable[[], float]) -> None:
        with calibration_trials.load(where):
            result.refresh[name] = calibration_trials.refresh(query, for_s=pace.refresh_s)

    queries = {"power": sensors.power_w, "energy": sensors.energy_j}
    return [
        ("idle power", idle_power),
        *((f"{name} sensor", partial(period, name, query)) for name, query in queries.items()),
    ]


def _open_context(where: torch.device, stack: ExitStack) -> None:
    try:
        stack.enter_context(torch.cuda.device(where))
        torch.zeros(1, device=where)
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise NotMeasurable(f"{where} can't be used now: {reason}") from error
