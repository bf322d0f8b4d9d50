"""What do this machine's NVIDIA GPUs draw, and what are they doing? From NVML, without root.

The trap: `nvmlDeviceGetPowerUsage`, the call everybody finds first, is on Ampere and newer an
average over about a second; integrated over a 1 s window it misses 41 % of an H200's joules. So
power comes from the instant field where there is one, the device's facts say which was read, and
energy comes from the hardware counter. Reading that counter takes 3 to 16 ms: it has a sample and
a timestamp of its own, and is asked only after every GPU's power has been taken.

Two more: NVML ignores CUDA_VISIBLE_DEVICES, so the measured process's value is applied here; and
a query that fails gives None for that field, never a zero.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pynvml

from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes.usage import UsageWatch
from ergmeter.probes.visible import is_order_assumed, visible
from ergmeter.records import Device, Mark, Sample
from ergmeter.units import HZ_PER_MHZ, J_PER_MJ, W_PER_MW

PERIOD_S = 0.1  # most GPUs refresh their sensors that often (a V100 every 20 ms)

# The share of one core that reading energy counters may cost. On an H200 a reading takes 4 to 8 ms
# of CPU: ten a second would be 4 to 8 %. A counter read less often forgets nothing, and power read
# ten times a second says how its joules are spread in between.
COUNTER_SHARE = 0.002

# How often to ask for what changes slowly, or is itself an average of the last fraction of a second
# (load): memory, load, clock, temperature, throttling. Power is asked for at every reading.
SLOW_PERIOD_S = 1.0

# NVIDIA's minimum driver for the CUDA 11 releases, by its compatibility table.
OLDEST_DRIVER = "450.80.02"

# With scope 0, the GPU by itself; on a Grace part scope 1 is the module, CPU included.
_INSTANT = ((pynvml.NVML_FI_DEV_POWER_INSTANT, 0),)
_INSTANT_AND_AVERAGE = (*_INSTANT, (pynvml.NVML_FI_DEV_POWER_AVERAGE, 0))

# A driver older than the binding lacks the symbol: it will not support the query later either.
_UNSUPPORTED = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)

# Which queries a GPU supports is settled at the start; an error that may pass is tried so often.
_ATTEMPTS = 3

# After so many readings in a row that gave errors and nothing else (half a second, at the usual
# period) a GPU is lost, whatever NVML calls it. One such reading may be a hiccup.
SILENT_READINGS = 5

# By NVML's number.
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")

_REFUSALS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVML library (libnvidia-ml.so.1), so no NVIDIA driver "
    "on this machine: install it, or pass the GPUs into the container (docker run --gpus all)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded: "
    "run `sudo modprobe nvidia`, and if that fails see `dmesg`",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to use the NVIDIA driver: give this user read "
    "and write access to /dev/nvidia*, or pass the GPUs into the container",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and the loaded kernel module "
    "differ in version, as after an update: reboot, or reload the nvidia module",
}


def _watts(value: Any) -> float:  # noqa: ANN401  the binding has no types
    """A power field's value. Fields fail one by one, inside a call that succeeds."""
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal) * W_PER_MW


# What is asked of a handle; "instant" and "average" of what "fields" answered.
_QUERIES: dict[str, Callable[[Any], Any]] = {
    "fields": lambda gpu: pynvml.nvmlDeviceGetFieldValues(gpu, _INSTANT_AND_AVERAGE),
    "field": lambda asked: asked(),
    "instant": _watts,
    "average": _watts,
    "draw": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) * W_PER_MW,
    "energy": lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) * J_PER_MJ,
    "memory": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "busy": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "clock": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) * HZ_PER_MHZ,
    "temperature": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    "processes": lambda gpu: pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu),
    "events": pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    "throttle": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons,
}

# What does not change during a run.
_FACTS: dict[str, Callable[[Any], Any]] = {
    "pci_bus_id": lambda gpu: pynvml.nvmlDeviceGetPciInfo_v3(gpu).busId,
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) * W_PER_MW,
    "compute_mode": lambda gpu: _COMPUTE_MODES[pynvml.nvmlDeviceGetComputeMode(gpu)],
    "memory_total_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "persistence": lambda gpu: bool(pynvml.nvmlDeviceGetPersistenceMode(gpu)),
}


class NvmlProbe:
    """Reads every NVIDIA GPU that the measured process can see."""

    name = "nvml"

    def __init__(self, request: ProbeRequest) -> None:
        self.period_s = float(request.options.get("period_s", PERIOD_S))
        self._counters_due_s = 0.0
        self._slow_due_s = 0.0
        self._usage = UsageWatch(request.pid, request.environment)
        self._gone: list[str] = []  # every GPU that was lost, and what NVML said
        self._unreported: list[str] = []  # those of them that have had no Mark yet
        try:
            with contextlib.ExitStack() as undo:
                pynvml.nvmlInit()
                undo.callback(self.close)
                self._gpus = self._opened(request.environment)
                undo.pop_all()
        except pynvml.NVMLError as error:
            unknown = f"NVML says {error}: run `nvidia-smi`; what it needs to work, this needs too"
            raise NotMeasurable(_REFUSALS.get(error.value, unknown)) from error
        self.devices: Sequence[Device] = [gpu.device for gpu in self._gpus]

    def read(self) -> Sequence[Sample | Mark]:
        """Power and gauges of every GPU; then the energy counters, as often as they may cost.

        A lost GPU gives one Mark. Raises NotMeasurable once there is none left.
        """
        return self._reading(last=False)

    def read_last(self) -> Sequence[Sample | Mark]:
        """The same, the energy counters in any case."""
        return self._reading(last=True)

    def _reading(self, *, last: bool) -> Sequence[Sample | Mark]:
        if not self._gpus:
            raise NotMeasurable(f"no GPU is left to read: {'; '.join(self._gone)}")
        slow = last or time.monotonic() >= self._slow_due_s
        if slow:
            self._slow_due_s = time.monotonic() + SLOW_PERIOD_S - self.period_s / 2
        gauges = [gpu.gauges(slow=slow) for gpu in self._gpus]
        counters = self._counters(last=last)
        for gpu, gauge, counter in zip(self._gpus, gauges, counters, strict=True):
            gpu.heard(answered=gauge is not None or counter is not None)
            if gpu.is_lost:
                self._lose(f"{gpu.device.id} ({gpu.device.name}, index {gpu.index})", gpu.error)
        self._gpus = [gpu for gpu in self._gpus if not gpu.is_lost]
        now_ns = time.monotonic_ns()
        marks = [Mark(now_ns, "device_lost", detail) for detail in self._unreported]
        self._unreported.clear()
        used, shared = self._usage.changes([(g.device.id, g.processes) for g in self._gpus])
        marks += [Mark(now_ns, "device_used", device) for device in used]
        marks += [Mark(now_ns, "device_shared", f"{gpu} {who}") for gpu, who in shared.items()]
        return [*(sample for sample in (*gauges, *counters) if sample is not None), *marks]

    def _counters(self, *, last: bool) -> list[Sample | None]:
        if time.monotonic() < self._counters_due_s and not last:
            return [None] * len(self._gpus)
        before_s = time.thread_time()
        counters = [gpu.counter() for gpu in self._gpus]
        cost_s = time.thread_time() - before_s
        self._counters_due_s = time.monotonic() + cost_s / COUNTER_SHARE
        return counters

    def close(self) -> None:
        """Let go of NVML."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _opened(self, environment: Mapping[str, str]) -> list[_Gpu]:
        driver = pynvml.nvmlSystemGetDriverVersion()
        if _version(driver) < _version(OLDEST_DRIVER):
            raise NotMeasurable(
                f"NVIDIA driver {driver} is older than {OLDEST_DRIVER}: update the driver"
            )
        facts: dict[str, Any] = {"driver": driver, "nvml": pynvml.nvmlSystemGetNVMLVersion()}
        found = [_identity(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if is_order_assumed(environment, {name for _, name in found}):
            facts["order_is_assumed"] = True
        chosen = visible(environment, [uuid for uuid, _ in found])
        gpus = [gpu for index in chosen if (gpu := self._gpu(index, facts)) is not None]
        if not gpus:
            raise NotMeasurable(f"no GPU can be read ({'; '.join(self._gone)}): see `nvidia-smi`")
        return gpus

    def _gpu(self, index: int, facts: Mapping[str, Any]) -> _Gpu | None:
        try:
            return _Gpu(index, facts)
        except pynvml.NVMLError as error:
            self._lose(f"index {index}", error)
            return None

    def _lose(self, which: str, error: object) -> None:
        self._gone.append(f"{which}: NVML says {error}")
        self._unreported.append(self._gone[-1])


class _Gpu:
    """One GPU: its handle, and which queries it has said it does not support."""

    def __init__(self, index: int, facts: Mapping[str, Any]) -> None:
        self.index = index
        self.is_lost = False
        self.error: object | None = None  # NVML's last in the current reading
        self._silent = 0  # readings in a row that gave errors and nothing else
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = pynvml.nvmlDeviceGetUUID(self._handle), pynvml.nvmlDeviceGetName(self._handle)
        self._unsupported: set[str] = set()
        self._field = pynvml.c_nvmlFieldValue_t(fieldId=_INSTANT[0][0], scopeId=_INSTANT[0][1])
        self._field_at = ctypes.byref(self._field)
        self._power_field = self._settled_power_field()
        has_counter = any(self._ask("energy") is not None for _ in range(_ATTEMPTS))
        own = {"index": index, "power_field": self._power_field, "has_energy_counter": has_counter}
        for fact, query in _FACTS.items():
            with contextlib.suppress(pynvml.NVMLError):
                own[fact] = query(self._handle)
        self.device = Device(uuid, "gpu", name, NvmlProbe.name, {**facts, **own})

    def gauges(self, *, slow: bool) -> Sample | None:
        """Power, and what changes slowly if asked for; None if the GPU answered nothing."""
        self.error = self.error if self.is_lost else None
        before_ns = time.monotonic_ns()
        power_w, average_w = self._power() if slow else (self._instant(), None)
        t_ns = (before_ns + time.monotonic_ns()) // 2
        if not slow:
            return None if power_w is None else Sample(t_ns, self.device.id, power_w=power_w)
        sample = Sample(
            t_ns,
            self.device.id,
            power_w=power_w,
            power_average_w=average_w,
            memory_bytes=self._ask("memory"),
            busy_frac=self._ask("busy"),
            clock_hz=self._ask("clock"),
            temperature_c=self._ask("temperature"),
            throttled=self._throttled(),
        )
        return None if sample == Sample(t_ns, self.device.id) else sample

    def counter(self) -> Sample | None:
        """The energy counter, at the middle of the time it took to read."""
        before_ns = time.monotonic_ns()
        energy_j = self._ask("energy")
        t_ns = (before_ns + time.monotonic_ns()) // 2
        return None if energy_j is None else Sample(t_ns, self.device.id, energy_j=energy_j)

    def heard(self, *, answered: bool) -> None:
        """Take in whether the last reading gave anything: too many that did not, and it is lost.

        A reading that asked for nothing it supports has no error, and says nothing either way.
        """
        if answered:
            self._silent = 0
        elif self.error is not None:
            self._silent += 1
        self.is_lost = self.is_lost or self._silent >= SILENT_READINGS

    def processes(self) -> list[int]:
        """The processes that compute on it, by the numbers NVML has for them."""
        return [process.pid for process in self._ask("processes") or ()]

    def _settled_power_field(self) -> Literal["instant", "draw"] | None:
        if any(self._fields()[0] is not None for _ in range(_ATTEMPTS)):
            return "instant"
        return "draw" if any(self._ask("draw") is not None for _ in range(_ATTEMPTS)) else None

    def _power(self) -> tuple[float | None, float | None]:
        instant_w, average_w = self._fields()
        # As settled, also if the instant field recovers: a column keeps its meaning all through.
        return self._ask("draw") if self._power_field == "draw" else instant_w, average_w

    def _instant(self) -> float | None:
        """Power alone, as settled."""
        if self._power_field != "instant":
            return self._ask("draw") if self._power_field == "draw" else None
        value = self._ask("field", self._instant_field)
        return None if value is None else self._ask("instant", value)

    def _instant_field(self) -> Any:  # noqa: ANN401  a structure of the binding's
        """The instant power field, in a structure that is made once: asked ten times a second."""
        result = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")(
            self._handle, 1, self._field_at
        )
        if result != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(result)
        return self._field

    def _fields(self) -> tuple[float | None, float | None]:
        if self._unsupported.issuperset(("instant", "average")):
            return None, None
        values = self._ask("fields")
        if values is None:
            return None, None
        return self._ask("instant", values[0]), self._ask("average", values[1])

    def _throttled(self) -> int | None:
        reasons: int | None = self._ask("events")
        # The query's name before driver 535.
        return self._ask("throttle") if "events" in self._unsupported else reasons

    def _ask(self, name: str, subject: object = None) -> Any:  # noqa: ANN401  untyped binding
        """The answer, or None. What is not supported, or of a lost GPU, is not asked again."""
        if self.is_lost or name in self._unsupported:
            return None
        try:
            return _QUERIES[name](self._handle if subject is None else subject)
        except _UNSUPPORTED:
            self._unsupported.add(name)
        except pynvml.NVMLError as error:
            self.error = error
            self.is_lost = isinstance(error, pynvml.NVMLError_GpuIsLost)
        return None


def _identity(index: int) -> tuple[str, str]:
    """UUID and name, both empty if NVML can't say."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return "", ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
