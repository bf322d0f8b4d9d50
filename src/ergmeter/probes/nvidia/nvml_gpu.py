"""What does one GPU say? Its handle, the queries it answers, and what became of them.

The trap: a query that fails is no zero, and a query that is not supported is no failure. The one
gives None for that field in that reading; the other is not asked again.

A MIG instance answers for its memory and its processes; clock, heat and throttling are its board's,
which are the same for all of its instances; what its board draws and does is not asked for at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import pynvml

from ergmeter.errors import NotMeasurable
from ergmeter.probes.nvidia import mig
from ergmeter.probes.nvidia.gpm import Counters
from ergmeter.probes.nvidia.visible import Instance
from ergmeter.probes.usage import GpuUsage
from ergmeter.records import ACTIVITY, Device, Mark, Sample
from ergmeter.units import HZ_PER_MHZ, J_PER_MJ, W_PER_MW

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
    "graphics": lambda gpu: pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(gpu),
    "held": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).used,
    "events": pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    "throttle": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons,
}

# What is asked of the board, also for a MIG instance.
_OF_THE_BOARD = ("clock", "temperature", "events", "throttle")

# What a part of a board does not have of its own: queries not made, and columns left empty.
_POWER_QUERIES = ("fields", "field", "instant", "average", "draw", "energy")
_POWER = ("power_w", "power_average_w", "energy_j")
_VGPU = (
    "a vGPU is a share of a board, and what the board draws for it can't be told: measure on the"
    " host, or on a GPU that is passed through whole"
)

# What does not change during a run.
_FACTS: dict[str, Callable[[Any], Any]] = {
    "pci_bus_id": lambda gpu: pynvml.nvmlDeviceGetPciInfo_v3(gpu).busId,
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) * W_PER_MW,
    "compute_mode": lambda gpu: _COMPUTE_MODES[pynvml.nvmlDeviceGetComputeMode(gpu)],
    "memory_total_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "persistence": lambda gpu: bool(pynvml.nvmlDeviceGetPersistenceMode(gpu)),
}
_FACTS_OF_AN_INSTANCE = {
    name: _FACTS[name] for name in ("pci_bus_id", "compute_mode", "persistence")
}


class Gpu:
    """One GPU or MIG instance: its handle, and which queries it has said it does not support."""

    def __init__(self, which: int | Instance, facts: Mapping[str, Any], *, probe: str) -> None:
        self.index = which if isinstance(which, int) else which.gpu
        self.is_lost = False
        self.error: object | None = None  # NVML's last in the current reading
        self._silent = 0  # readings in a row that gave errors and nothing else
        self._board = self._handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
        self._unsupported: set[str] = set()
        self._counters: Counters | None = None
        self._failures = 0  # of reading them, in a row
        self.absent: dict[str, list[str]] = {}  # columns it has nothing to say in, by the reason
        own: dict[str, Any] = {"index": self.index}
        if isinstance(which, int):
            own |= self._as_a_board()
        else:
            own |= self._as_an_instance(which)
        self._field = pynvml.c_nvmlFieldValue_t(fieldId=_INSTANT[0][0], scopeId=_INSTANT[0][1])
        self._field_at = ctypes.byref(self._field)
        own["power_field"] = self._power_field = self._settled_power_field()
        own["has_energy_counter"] = any(self._ask("energy") is not None for _ in range(_ATTEMPTS))
        if self.absent:
            own["absent"] = self.absent
        uuid, name = pynvml.nvmlDeviceGetUUID(self._handle), pynvml.nvmlDeviceGetName(self._handle)
        self.device = Device(uuid, "gpu", name, probe, {**facts, **own})

    def _as_a_board(self) -> dict[str, Any]:
        """Look for hardware counters; leave the board's power out where others have parts of it."""
        with contextlib.suppress(pynvml.NVMLError):
            mode = pynvml.nvmlDeviceGetVirtualizationMode(self._handle)
            if mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU:
                self._unsupported.update(_POWER_QUERIES)
                self.absent[_VGPU] = list(_POWER)
        try:
            self._counters = Counters(self._handle)
        except NotMeasurable as reason:
            self.absent[str(reason)] = list(ACTIVITY)
        return _answered(_FACTS, self._handle)

    def _as_an_instance(self, which: Instance) -> dict[str, Any]:
        self._handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._board, which.place)
        self._unsupported.update((*_POWER_QUERIES, "busy"))
        self.absent[mig.NOT_ITS_OWN] = [*_POWER, "busy_frac", *ACTIVITY]
        own = _answered(_FACTS_OF_AN_INSTANCE, self._board)
        with contextlib.suppress(pynvml.NVMLError):
            own["memory_total_bytes"] = _FACTS["memory_total_bytes"](self._handle)
            own["board"] = pynvml.nvmlDeviceGetUUID(self._board)
        numbers = {"gpu": which.gpu_instance, "compute": which.compute_instance}
        return {**own, "mig_instance": numbers}

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

    def memory_in_use(self) -> int | None:
        """Bytes in use by anybody, now; None if the driver does not say."""
        found = self._ask("memory")
        return None if found is None else int(found)

    def counter(self) -> Sample | None:
        """The energy counter, at the middle of the time it took to read."""
        before_ns = time.monotonic_ns()
        energy_j = self._ask("energy")
        t_ns = (before_ns + time.monotonic_ns()) // 2
        return None if energy_j is None else Sample(t_ns, self.device.id, energy_j=energy_j)

    def activity(self) -> Sample | Mark | None:
        """What its parts did since the last reading, by its hardware counters.

        Where they fail again and again, as when somebody else has taken them, they are given up.
        """
        if self._counters is None or self._silent:  # one that says nothing at all may be lost
            return None
        try:
            sample = self._counters.read(self.device.id)
        except pynvml.NVMLError as error:
            self._failures += 1
            if self._failures < _ATTEMPTS:
                return None
            self.close()
            said = f"{self.device.id}: NVML says {error}"
            return Mark(time.monotonic_ns(), "activity_failed", said)
        self._failures = 0
        return sample

    def close(self) -> None:
        """Give back what NVML lent."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def heard(self, *, answered: bool) -> None:
        """Take in whether the last reading gave anything: too many that did not, and it is lost.

        A reading that asked for nothing it supports has no error, and says nothing either way.
        """
        if answered:
            self._silent = 0
        elif self.error is not None:
            self._silent += 1
        self.is_lost = self.is_lost or self._silent >= SILENT_READINGS

    def processes(self) -> dict[int, int | None] | None:
        """The processes that compute on it, by the numbers NVML has for them, and their bytes; None
        if it does not list them."""
        found = self._ask("processes")
        return None if found is None else {one.pid: one.usedGpuMemory for one in found}

    def look(self, computing: Collection[int] | None) -> GpuUsage:
        """What tells whether anybody uses it. `computing`: the processes, as just asked."""
        graphics = self._ask("graphics")
        # A part of a board draws nothing on a screen, and is not asked on every driver.
        nobody = () if "graphics" in self._unsupported else None
        drawing = nobody if graphics is None else [one.pid for one in graphics]
        return GpuUsage(computing, drawing, self._ask("held"))

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
            handle = self._board if name in _OF_THE_BOARD else self._handle
            return _QUERIES[name](handle if subject is None else subject)
        except _UNSUPPORTED:
            self._unsupported.add(name)
        except pynvml.NVMLError as error:
            self.error = error
            self.is_lost = isinstance(error, pynvml.NVMLError_GpuIsLost)
        return None


def _answered(facts: Mapping[str, Callable[[Any], Any]], handle: object) -> dict[str, Any]:
    """Those of the facts that NVML tells."""
    found = {}
    for name, query in facts.items():
        with contextlib.suppress(pynvml.NVMLError):
            found[name] = query(handle)
    return found
