"""Reads power, energy, memory and load of AMD GPUs through amdsmi, without root.

Power is the current power where the GPU has it (MI300 and newer), else the average; the device's
facts say which. Energy is the hardware accumulator, in steps of its stated resolution (15.3 uJ).

The amdsmi binding prints to stdout and raises a KeyError where it finds no library. So it is
imported only where the kernel driver is present, with its output captured. Each call asks the
firmware: power is read every time, the rest once a second.

An MI250X has two dies and one sensor, on the first die. So a process on the second die counts as
another program on the board, even where the program can see only the first die.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.probes.usage import UsageWatch
from ergmeter.records import Device, Mark, Sample
from ergmeter.units import HZ_PER_MHZ, J_PER_UJ

# -- one GPU ---------------------------------------------------------------------------------------
# A field that a GPU lacks reads "N/A", 65535 or the largest integer of its width. The second die of
# an MI250X reads 0 W, because the first reports the power of both. All of these become None here. A
# 32-bit energy accumulator wraps, every 94 s at 700 W.

_WRAP = 1 << 32  # of a 32-bit accumulator
_LEAST_APART_S = 0.1
_MOST_W = 5000.0  # no GPU draws more: a fall that implies more is a reset, not a wrap
# How a field without a value reads, by its width.
_NONE = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)

_UNSUPPORTED = (2, 3)  # of amdsmi_status_t: not supported, not yet implemented

# Counters that grow while the GPU is throttled, with the reason's bit. The bits are NVML's
# clocks-event reasons, for every vendor.
_RESIDENCIES = {
    "ppt_residency_acc": 0x4,  # the power cap
    "prochot_residency_acc": 0x8,  # the board's own brake
    "socket_thm_residency_acc": 0x20,
    "vr_thm_residency_acc": 0x20,
    "hbm_thm_residency_acc": 0x20,
}


class AmdGpu:
    """One GPU: its handle, its energy counter, and the queries it does not answer."""

    def __init__(self, smi: Any, handle: Any, device: Device) -> None:  # noqa: ANN401  no types
        self._smi, self._handle = smi, handle
        self.device = device
        self.silent = 0
        self.error: str = ""
        self.beside: AmdGpu | None = None  # a second die that this one's sensors include
        self._unsupported: set[str] = set()
        self._counter = _Counter()
        self._held_back: dict[str, int] = {}
        self._field = self._power_field()
        device.facts["power_field"] = {"current": "instant", "average": "draw"}.get(self._field)
        device.facts["has_energy_counter"] = self._energy_j() is not None

    def samples(self, *, slow: bool) -> list[Sample]:
        """Read power; if `slow`, also the other gauges, then the energy counter."""
        self.error = ""
        t_ns = time.monotonic_ns()
        power_w = self._power_w(self._field)
        gauges: dict[str, Any] = {}
        if slow:
            gauges = {
                "memory_bytes": self._ask("memory"),
                "busy_frac": _percent(self._ask("activity")),
                "clock_hz": scaled(self._ask("clock"), HZ_PER_MHZ),
                "temperature_c": self._ask("temperature"),
                "throttled": self._throttled(),
            }
        sample = Sample(t_ns, self.device.id, power_w=power_w, **gauges)
        before_ns = time.monotonic_ns()
        energy_j = self._energy_j() if slow else None
        samples = [sample] if sample != Sample(t_ns, self.device.id) else []
        if energy_j is not None:
            counter_ns = (before_ns + time.monotonic_ns()) // 2
            samples.append(Sample(counter_ns, self.device.id, energy_j=energy_j))
        self.silent = self.silent + 1 if self.error and not samples else 0
        return samples

    def processes(self) -> list[int]:
        """Processes with a queue or memory on this GPU, or on a die that its sensors include."""
        own = [int(process["pid"]) for process in self._ask("processes") or ()]
        return own if self.beside is None else [*own, *self.beside.processes()]

    def _power_field(self) -> str:
        names = ("current", "average")
        return next((name for name in names if self._power_w(name) is not None), "")

    def _power_w(self, name: str) -> float | None:
        power = (self._ask("power") or {}) if name else {}
        return number(power.get(f"{name}_socket_power")) or None  # nothing that is on draws 0 W

    def _energy_j(self) -> float | None:
        counted = self._ask("energy") or {}
        steps = number(counted.get("energy_accumulator"))
        resolution_uj = number(counted.get("counter_resolution"))
        if not steps or not resolution_uj:
            return None
        return self._counter.joules(int(steps), resolution_uj * J_PER_UJ)

    def _throttled(self) -> int | None:
        """Throttle reasons since the last reading, as bits; None where they are not counted."""
        metrics = self._ask("metrics") or {}
        now = {key: n for key in _RESIDENCIES if (n := number(metrics.get(key))) is not None}
        before, self._held_back = self._held_back, {key: int(n) for key, n in now.items()}
        if not before or not now:
            return None
        bits = 0
        for key, count in now.items():
            bits |= _RESIDENCIES[key] if count > before.get(key, count) else 0
        return bits

    def _ask(self, name: str) -> Any:  # noqa: ANN401  as the binding answers
        """amdsmi's answer to a query, or None. Unsupported queries are not made again."""
        if name in self._unsupported:
            return None
        try:
            answer = _QUERIES[name](self._smi, self._handle)
        except self._smi.AmdSmiLibraryException as error:
            if error.get_error_code() in _UNSUPPORTED:
                self._unsupported.add(name)
            else:
                self.error = error_text(error)
            return None
        return None if isinstance(answer, int) and number(answer) is None else answer


class _Counter:
    """Makes an energy accumulator that may wrap at 32 bits into one that only grows."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._wrapped = 0

    def joules(self, steps: int, step_j: float) -> float:
        """Joules so far. If the counter was reset, not wrapped, the value falls."""
        now_s = time.monotonic()
        if self._last is not None and steps < self._last[0] < _WRAP:
            grown_j = (steps + _WRAP - self._last[0]) * step_j
            if grown_j <= _MOST_W * max(now_s - self._last[1], _LEAST_APART_S):
                self._wrapped += _WRAP
        self._last = (steps, now_s)
        return (self._wrapped + steps) * step_j


_QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    "power": lambda smi, gpu: smi.amdsmi_get_power_info(gpu),
    "energy": lambda smi, gpu: smi.amdsmi_get_energy_count(gpu),
    "memory": lambda smi, gpu: smi.amdsmi_get_gpu_memory_usage(gpu, smi.AmdSmiMemoryType.VRAM),
    "activity": lambda smi, gpu: smi.amdsmi_get_gpu_activity(gpu)["gfx_activity"],
    "clock": lambda smi, gpu: smi.amdsmi_get_clock_info(gpu, smi.AmdSmiClkType.GFX)["clk"],
    "temperature": lambda smi, gpu: smi.amdsmi_get_temp_metric(
        gpu, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
    ),
    # Not amdsmi_get_violation_status: that one sleeps for a tenth of a second.
    "metrics": lambda smi, gpu: smi.amdsmi_get_gpu_metrics_info(gpu),
    "processes": lambda smi, gpu: smi.amdsmi_get_gpu_process_list(gpu),
}


def error_text(error: Any) -> str:  # noqa: ANN401  an exception of the binding's
    """An amdsmi error in one line."""
    return error.get_error_info() if hasattr(error, "get_error_info") else str(error)


def number(value: object) -> float | None:
    """The value if it is a number, not "N/A" and not a code for "no value"; else None."""
    return value if isinstance(value, int | float) and value not in _NONE else None


def scaled(value: object, factor: float) -> float | None:
    """The value times `factor`, in a base unit; None if it is not a number."""
    unscaled = number(value)
    return None if unscaled is None else unscaled * factor


def _percent(value: object) -> float | None:
    share = scaled(value, 0.01)
    return share if share is not None and share <= 1 else None


# -- visible GPUs ----------------------------------------------------------------------------------
# ROCR_VISIBLE_DEVICES selects from all GPUs, by index or UUID. HIP_VISIBLE_DEVICES, or
# CUDA_VISIBLE_DEVICES, then counts from 0 in what the first one left. amdsmi ignores both, and its
# order is HIP's only where it says so.


def visible(environment: Mapping[str, str], gpus: Sequence[dict[str, Any]]) -> list[int]:
    """The amdsmi indices of the GPUs that HIP shows to a process, from each GPU's facts.

    As in the ROCm runtimes, a list ends at its first entry that names no GPU.
    """
    if not gpus:
        raise NotMeasurable("the AMD driver shows no GPU: see `amd-smi list`")
    indices = sorted(range(len(gpus)), key=lambda index: gpus[index].get("hip_index", index))
    if any("hip_index" not in gpu for gpu in gpus) and len(gpus) > 1:
        for gpu in gpus:
            gpu["order_is_assumed"] = True
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        variable = next((name for name in names if environment.get(name) is not None), None)
        if variable is not None:
            indices = _choose_listed(variable, environment[variable], indices, gpus)
    return indices


def _choose_listed(
    variable: str, value: str, indices: Sequence[int], gpus: Sequence[Mapping[str, Any]]
) -> list[int]:
    chosen: list[int] = []
    for entry in value.split(","):
        index = _gpu_of_entry(entry.strip(), indices, gpus)
        if index is None or index in chosen:
            break
        chosen.append(index)
    if not chosen:
        raise NotMeasurable(
            f'{variable}="{value}" hides every AMD GPU: unset it, or name one of 0 to'
            f" {len(indices) - 1}"
        )
    return chosen


def _gpu_of_entry(
    entry: str, indices: Sequence[int], gpus: Sequence[Mapping[str, Any]]
) -> int | None:
    if entry.upper().startswith("GPU-"):
        wanted = entry[4:].lower()
        matches = [i for i in indices if str(gpus[i].get("serial", "")).lower() == f"0x{wanted}"]
        return matches[0] if len(matches) == 1 else None
    return indices[int(entry)] if entry.isdecimal() and int(entry) < len(indices) else None


# -- the probe -------------------------------------------------------------------------------------

KFD = "/dev/kfd"  # the compute driver's device: without it no program computes on an AMD GPU
SLOW_PERIOD_S = 1.0
SILENT_READINGS = 5  # in a row that gave nothing: the GPU is lost

_W_PER_UW = 1e-6  # a power cap is in microwatts
_PERMISSION, _NOT_LOADED = 10, 34  # of amdsmi_status_t


class AmdProbe(DeclaredProbe):
    """Reads every AMD GPU that the measured process can see."""

    name = "amd"
    kinds = ("gpu",)
    has_interval = True
    usual_period_s = 0.1

    def __init__(self, request: ProbeRequest) -> None:
        super().__init__(request)
        self._slow_due_s = 0.0
        self._usage = UsageWatch(request.pid, request.environment)
        self._smi = _binding(Path(request.options.get("kfd", KFD)))
        try:
            self._smi.amdsmi_init()
            with self.closed_on_error():
                self._gpus = _open_gpus(self._smi, request.environment)
        except self._smi.AmdSmiException as error:
            raise NotMeasurable(_refusal(error)) from error
        self.devices: Sequence[Device] = [gpu.device for gpu in self._gpus]

    def read(self) -> Sequence[Sample | Mark]:
        """Read the power of every GPU; once a second also its energy counter and other gauges.

        A lost GPU gives one Mark. Raises NotMeasurable once there is none left.
        """
        return list(self._reading(slow=time.monotonic() >= self._slow_due_s))

    def read_last(self) -> Sequence[Sample | Mark]:
        """Read everything once more, with a mark if it is unknown who used the GPUs."""
        records = list(self._reading(slow=True))
        if not self._usage.has_recognised:
            why = "amdsmi listed no process of the run on any GPU"
            t_ns = time.monotonic_ns()
            records += [Mark(t_ns, "device_unknown", f"{g.device.id} {why}") for g in self._gpus]
        return records

    def close(self) -> None:
        """Shut amdsmi down."""
        with contextlib.suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()

    def processes(self) -> dict[str, list[int]]:
        """The ids of the processes on each GPU now, by device."""
        return {gpu.device.id: gpu.processes() for gpu in self._gpus}

    def _reading(self, *, slow: bool) -> Iterator[Sample | Mark]:
        if not self._gpus:
            raise NotMeasurable("no AMD GPU is left to read: see `amd-smi list`")
        if slow:
            self._slow_due_s = time.monotonic() + SLOW_PERIOD_S - self.period_s / 2
        for gpu in self._gpus:
            yield from gpu.samples(slow=slow)
        lost = [gpu for gpu in self._gpus if gpu.silent >= SILENT_READINGS]
        self._gpus = [gpu for gpu in self._gpus if gpu not in lost]
        t_ns = time.monotonic_ns()
        for gpu in lost:
            detail = f"{gpu.device.id} ({gpu.device.name}): amdsmi says {gpu.error}"
            yield Mark(t_ns, "device_lost", detail)
        used, shared = self._usage.changes([(g.device.id, g.processes) for g in self._gpus])
        yield from (Mark(t_ns, "device_used", device) for device in used)
        yield from (Mark(t_ns, "device_shared", f"{gpu} {who}") for gpu, who in shared.items())


# What does not change during a run.
_FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "pci_bus_id": lambda smi, gpu: smi.amdsmi_get_gpu_device_bdf(gpu),
    "driver": lambda smi, gpu: smi.amdsmi_get_gpu_driver_info(gpu)["driver_version"],
    "power_limit_w": lambda smi, gpu: scaled(
        smi.amdsmi_get_power_cap_info(gpu)["power_cap"], _W_PER_UW
    ),
    "memory_total_bytes": lambda smi, gpu: number(
        smi.amdsmi_get_gpu_memory_total(gpu, smi.AmdSmiMemoryType.VRAM)
    ),
    "serial": lambda smi, gpu: smi.amdsmi_get_gpu_asic_info(gpu)["asic_serial"],
    "partition": lambda smi, gpu: smi.amdsmi_get_gpu_compute_partition(gpu),
    "hip_index": lambda smi, gpu: smi.amdsmi_get_gpu_enumeration_info(gpu)["hip_id"],
}


def _binding(kfd: Path) -> Any:  # noqa: ANN401  the binding has no types
    """Import amdsmi if the kernel driver is present; else raise NotMeasurable."""
    if not kfd.exists():
        raise NotMeasurable(f"no AMD GPU to compute on here: {kfd} does not exist")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi")
    except ModuleNotFoundError:
        raise NotMeasurable(
            "an AMD GPU is read through AMD's Python package amdsmi, which is not installed:"
            " `pip install /opt/rocm/share/amd_smi`, or `pip install 'ergmeter[amd]'`"
        ) from None
    except (OSError, KeyError, AttributeError) as error:
        raise NotMeasurable(
            f"the Python package amdsmi does not fit ROCm's library libamd_smi.so ({error}):"
            " install the one that came with ROCm, `pip install /opt/rocm/share/amd_smi`"
        ) from error


def _open_gpus(smi: Any, environment: Mapping[str, str]) -> list[AmdGpu]:  # noqa: ANN401
    handles = smi.amdsmi_get_processor_handles()
    facts = [_facts(smi, handle) for handle in handles]
    indices = visible(environment, facts)
    for index in indices:
        mode = facts[index].get("partition")
        if mode not in (None, "SPX"):
            raise NotMeasurable(
                f"the AMD GPU at {facts[index].get('pci_bus_id')} is split into partitions ({mode})"
                " and its energy can't be attributed to one of them: measure on a whole one"
                " (`sudo amd-smi set --compute-partition SPX`)"
            )

    def gpu(index: int) -> AmdGpu:
        handle = handles[index]
        return AmdGpu(smi, handle, _device(smi, handle, index, facts[index]))

    gpus = {index: gpu(index) for index in indices}
    two_dies = any("MI250" in gpu_.device.name for gpu_ in gpus.values())
    unseen = [index for index in range(len(handles)) if two_dies and index not in gpus]
    _note_second_dies(gpus, {index: gpu(index) for index in unseen})
    return list(gpus.values())


def _device(smi: Any, handle: Any, index: int, facts: Mapping[str, Any]) -> Device:  # noqa: ANN401
    name = smi.amdsmi_get_gpu_asic_info(handle)["market_name"]
    uuid = smi.amdsmi_get_gpu_device_uuid(handle)
    return Device(uuid, "gpu", name, AmdProbe.name, {**facts, "index": index})


def _facts(smi: Any, handle: Any) -> dict[str, Any]:  # noqa: ANN401
    answers = {}
    for fact, query in _FACTS.items():
        # An older binding lacks a function, an older library a query.
        with contextlib.suppress(smi.AmdSmiException, AttributeError, KeyError, TypeError):
            answers[fact] = query(smi, handle)
    return {fact: value for fact, value in answers.items() if value not in (None, "", "N/A")}


def _note_second_dies(gpus: Mapping[int, AmdGpu], unseen: Mapping[int, AmdGpu]) -> None:
    """Add facts to second dies without a sensor: the board's first die reports the power of both.

    The two dies of a board have neighbouring indices. `unseen`: dies hidden from the program.
    """
    every = {**gpus, **unseen}
    for index in sorted(every):
        first, second = every[index], every.get(index + 1)
        if second is None or not _is_one_board(first, second):
            continue
        own, other = first.device.facts, second.device.facts
        other["energy_counted_in"] = first.device.id
        why = f"its power is in the readings of {first.device.id}, the board's first die"
        if index in unseen:
            why += ", which is not shown to this program"
        other["absent"] = {why: ["power_w", "energy_j"]}
        if index in gpus and index + 1 in unseen:
            own["scope"] = (
                f"the whole board, with its second die {second.device.id}, which is not shown to"
                " this program"
            )
            first.beside = second


def _is_one_board(first: AmdGpu, second: AmdGpu) -> bool:
    other = second.device.facts
    is_silent = not other["has_energy_counter"] and other["power_field"] is None
    has_sensor = first.device.facts["power_field"] is not None
    return "MI250" in second.device.name and is_silent and has_sensor


def _refusal(error: Any) -> str:  # noqa: ANN401  an exception of the binding's
    code = error.get_error_code() if hasattr(error, "get_error_code") else None
    if code == _PERMISSION:
        return (
            "no permission to use the AMD driver: add this user to the groups render and video"
            " (`sudo usermod -a -G render,video $USER`), and log in again"
        )
    if code == _NOT_LOADED:
        return (
            "the AMD driver is not loaded: run `sudo modprobe amdgpu`; if that fails, see `dmesg`"
        )
    return f"amdsmi says {error_text(error)}: run `amd-smi list`, and fix what that reports"
