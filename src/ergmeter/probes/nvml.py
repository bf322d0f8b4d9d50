"""Reads power, energy, memory, load, clocks and throttle reasons of NVIDIA GPUs from NVML.

`nvmlDeviceGetPowerUsage` is, on Ampere and newer, an average over about a second. Integrated over a
1 s window it misses 41 % of an H200's joules. So power comes from the instant field where there is
one, and the device's facts say which was read. Energy comes from the hardware counter. Reading that
takes 3 to 16 ms: it has its own sample and timestamp, after every GPU's power has been read.

NVML ignores CUDA_VISIBLE_DEVICES, so the measured process's value is applied here. A query that
fails gives None for that field, never zero.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import pynvml

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.probes import cuda_visible_devices
from ergmeter.probes.cuda_visible_devices import Instance, visible
from ergmeter.probes.usage import NEW_CONTEXT_BYTES, GpuUsage, UsageWatch, UseStates
from ergmeter.records import ACTIVITY, Device, Mark, Sample
from ergmeter.units import HZ_PER_MHZ, J_PER_MJ, W_PER_MW

# -- MIG instances ---------------------------------------------------------------------------------
# A board in MIG mode reports the sum of its instances' memory and no load, and its power can't be
# divided among them. An instance has its own handle, with its memory and processes, and no sensor.

# Why the board's readings are not an instance's.
NOT_ITS_OWN = (
    "a MIG instance has no sensor of its own, and its board's readings can't be divided among its"
    " instances: measure on a GPU with MIG off"
)


def instances_of(index: int) -> list[Instance] | None:
    """The visible MIG instances of a GPU; None if it is not in MIG mode."""
    try:
        board = pynvml.nvmlDeviceGetHandleByIndex(index)
        current, _ = pynvml.nvmlDeviceGetMigMode(board)
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(board)
    except pynvml.NVMLError:  # a GPU without MIG, or a driver without
        return None
    instances = []
    for mig_index in range(count):
        with contextlib.suppress(pynvml.NVMLError):  # an index without an instance, or hidden
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, mig_index)
            instances.append(
                Instance(
                    pynvml.nvmlDeviceGetUUID(handle),
                    gpu=index,
                    mig_index=mig_index,
                    gpu_instance=pynvml.nvmlDeviceGetGpuInstanceId(handle),
                    compute_instance=pynvml.nvmlDeviceGetComputeInstanceId(handle),
                )
            )
    return instances


# -- hardware counters (GPM) -----------------------------------------------------------------------
# Each value is the mean between two readings, and a sample says how long that was. Nothing is lost
# by reading seldom: the mean over a window weighs each value by its time. Hopper and newer have
# GPM; on an H200 a reading takes 0.4 ms and needs no root. NVML reports percent and MiB/s; samples
# have fractions and bytes per second.

# NVIDIA's minimum between two samples: closer ones may have the same counts.
SHORTEST_S = 0.1

_FRAC_PER_PERCENT = 0.01
_BYTES_PER_MIB = float(1 << 20)

_METRICS: dict[int, tuple[str, float]] = {
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: ("graphics_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_SM_UTIL: ("sm_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: ("occupancy_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: ("tensor_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL: ("tensor_half_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL: ("tensor_int_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL: ("tensor_double_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: ("dram_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: ("pcie_sent_bytes_per_s", _BYTES_PER_MIB),
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: ("pcie_received_bytes_per_s", _BYTES_PER_MIB),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: ("nvlink_sent_bytes_per_s", _BYTES_PER_MIB),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: ("nvlink_received_bytes_per_s", _BYTES_PER_MIB),
}

_NO_GPM = "this GPU has no hardware counters that NVML reads (GPM): Hopper and newer have them"
_OLD_DRIVER = "the NVIDIA driver is too old to read hardware counters (GPM): update it"
_NOT_ALLOWED = (
    "no permission to read hardware counters (GPM): run as root, or load the driver with"
    " NVreg_RestrictProfilingToAdminUsers=0"
)


class Counters:
    """The hardware counters (GPM) of one GPU. Raises NotMeasurable where they can't be read.

    They are not read for MIG instances: NVIDIA does not document if their values are the board's.
    """

    def __init__(self, handle: object) -> None:
        self._handle = handle
        self._earlier: Any = None
        self._later: Any = None
        try:
            if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                raise NotMeasurable(_NO_GPM)
            self._earlier = pynvml.nvmlGpmSampleAlloc()
            self._later = pynvml.nvmlGpmSampleAlloc()
            self._since_ns = self._take_sample(self._earlier)
        except pynvml.NVMLError as error:
            self.close()
            raise NotMeasurable(_why(error)) from error
        # Made once: it is 20 kB.
        self._wanted = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION)
        self._wanted.numMetrics = len(_METRICS)
        for index, metric in enumerate(_METRICS):
            self._wanted.metrics[index].metricId = metric

    def read(self, device: str) -> Sample | None:
        """Means since the last successful reading; None if that is too recent.

        Raises NVMLError. The next reading that succeeds then covers this time too.
        """
        if time.monotonic_ns() - self._since_ns < SHORTEST_S * 1e9:
            return None
        t_ns = self._take_sample(self._later)
        self._wanted.sample1, self._wanted.sample2 = self._earlier, self._later
        pynvml.nvmlGpmMetricsGet(self._wanted)
        span_s = (t_ns - self._since_ns) / 1e9
        self._earlier, self._later, self._since_ns = self._later, self._earlier, t_ns
        values: dict[str, Any] = {}
        for index, (field, scale) in enumerate(_METRICS.values()):
            metric = self._wanted.metrics[index]
            # Metrics fail one by one, inside a call that succeeds.
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value):
                values[field] = metric.value * scale
        return Sample(t_ns, device, activity_s=span_s, **values) if values else None

    def close(self) -> None:
        """Free NVML's samples."""
        for sample in (self._earlier, self._later):
            if sample is not None:
                with contextlib.suppress(pynvml.NVMLError):  # of a GPU that was lost
                    pynvml.nvmlGpmSampleFree(sample)
        self._earlier = self._later = None

    def _take_sample(self, into: object) -> int:
        """Take a sample into `into`; return its time in ns."""
        before_ns = time.monotonic_ns()
        pynvml.nvmlGpmSampleGet(self._handle, into)
        return (before_ns + time.monotonic_ns()) // 2


def _why(error: pynvml.NVMLError) -> str:
    if isinstance(error, pynvml.NVMLError_FunctionNotFound):
        return _OLD_DRIVER
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return _NOT_ALLOWED
    if isinstance(error, pynvml.NVMLError_NotSupported):
        return _NO_GPM
    return f"this GPU's hardware counters (GPM) can't be read: NVML says {error}"


# -- one GPU ---------------------------------------------------------------------------------------
# A query that fails gives None for that field in that reading. A query that is not supported is not
# asked again. A MIG instance reports its memory and processes; clock, temperature and throttling
# are its board's, the same for all its instances. The board's power and load are not read for it.

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
    """A power field in watts. Fields fail one by one, inside a call that succeeds."""
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal) * W_PER_MW


# Queries of a handle; "instant" and "average" take an answer to "field" or "fields" instead.
QUERIES: dict[str, Callable[[Any], Any]] = {
    "fields": lambda gpu: pynvml.nvmlDeviceGetFieldValues(gpu, _INSTANT_AND_AVERAGE),
    "field": lambda gpu: pynvml.nvmlDeviceGetFieldValues(gpu, _INSTANT),
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

# Queries made of the board, also for a MIG instance.
_OF_THE_BOARD = ("clock", "temperature", "events", "throttle")

# A part of a board has no power reading of its own: queries not made, and columns left empty.
_POWER_QUERIES = ("fields", "field", "instant", "average", "draw", "energy")
_POWER = ("power_w", "power_average_w", "energy_j")
_VGPU = (
    "a vGPU is a share of a board, and its part of the board's power is unknown: measure on the"
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
    """One GPU or MIG instance: its handle, and the queries it does not support."""

    def __init__(self, which: int | Instance, facts: Mapping[str, Any], *, probe: str) -> None:
        self.index = which if isinstance(which, int) else which.gpu
        self.is_lost = False
        self.error: object | None = None  # NVML's last error in the current reading
        self._silent = 0  # readings in a row that gave errors and nothing else
        self._board = self._handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
        self._unsupported: set[str] = set()
        self._counters: Counters | None = None
        self._failures = 0  # of reading the counters, in a row
        self.absent: dict[str, list[str]] = {}  # columns that stay empty, by the reason
        own: dict[str, Any] = {"index": self.index}
        if isinstance(which, int):
            own |= self._as_a_board()
        else:
            own |= self._as_an_instance(which)
        own["power_field"] = self._power_field = self._settled_power_field()
        own["has_energy_counter"] = any(self._ask("energy") is not None for _ in range(_ATTEMPTS))
        if self.absent:
            own["absent"] = self.absent
        uuid, name = pynvml.nvmlDeviceGetUUID(self._handle), pynvml.nvmlDeviceGetName(self._handle)
        self.device = Device(uuid, "gpu", name, probe, {**facts, **own})

    def _as_a_board(self) -> dict[str, Any]:
        """Open the hardware counters; leave out power on a vGPU, which shares its board."""
        with contextlib.suppress(pynvml.NVMLError):
            mode = pynvml.nvmlDeviceGetVirtualizationMode(self._handle)
            if mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU:
                self._unsupported.update(_POWER_QUERIES)
                self.absent[_VGPU] = list(_POWER)
        try:
            self._counters = Counters(self._handle)
        except NotMeasurable as reason:
            self.absent[str(reason)] = list(ACTIVITY)
        return _answered_facts(_FACTS, self._handle)

    def _as_an_instance(self, which: Instance) -> dict[str, Any]:
        self._handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._board, which.mig_index)
        self._unsupported.update((*_POWER_QUERIES, "busy"))
        self.absent[NOT_ITS_OWN] = [*_POWER, "busy_frac", *ACTIVITY]
        own = _answered_facts(_FACTS_OF_AN_INSTANCE, self._board)
        with contextlib.suppress(pynvml.NVMLError):
            own["memory_total_bytes"] = _FACTS["memory_total_bytes"](self._handle)
            own["board"] = pynvml.nvmlDeviceGetUUID(self._board)
        numbers = {"gpu": which.gpu_instance, "compute": which.compute_instance}
        return {**own, "mig_instance": numbers}

    def gauges(self, *, slow: bool) -> Sample | None:
        """Read power, and if `slow` the other gauges; None if the GPU answered nothing."""
        self.error = self.error if self.is_lost else None
        before_ns = time.monotonic_ns()
        power_w, average_w = self._power(slow=slow)
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
        """Bytes in use by all processes now; None if the driver does not report them."""
        used_bytes: int | None = self._ask("memory")
        return used_bytes

    def counter(self) -> Sample | None:
        """The energy counter, at the middle of the time it took to read."""
        before_ns = time.monotonic_ns()
        energy_j = self._ask("energy")
        t_ns = (before_ns + time.monotonic_ns()) // 2
        return None if energy_j is None else Sample(t_ns, self.device.id, energy_j=energy_j)

    def activity(self) -> Sample | Mark | None:
        """Means of the hardware counters since the last reading; None if there are none now.

        After repeated failures, as when another program uses the counters, reading them ends.
        """
        if self._counters is None or self._silent:  # a silent GPU may be lost
            return None
        try:
            sample = self._counters.read(self.device.id)
        except pynvml.NVMLError as error:
            self._failures += 1
            if self._failures < _ATTEMPTS:
                return None
            self.close()
            detail = f"{self.device.id}: NVML says {error}"
            return Mark(time.monotonic_ns(), "activity_failed", detail)
        self._failures = 0
        return sample

    def close(self) -> None:
        """Free the hardware counters."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def note_answer(self, *, answered: bool) -> None:
        """Count readings without an answer: after SILENT_READINGS in a row the GPU is lost.

        A reading without an answer and without an error asked nothing, so it does not count.
        """
        if answered:
            self._silent = 0
        elif self.error is not None:
            self._silent += 1
        self.is_lost = self.is_lost or self._silent >= SILENT_READINGS

    def processes(self) -> dict[int, int | None] | None:
        """Bytes of each process that computes on the GPU, by NVML's process id; None if NVML does
        not list them."""
        processes = self._ask("processes")
        if processes is None:
            return None
        return {process.pid: process.usedGpuMemory for process in processes}

    def usage(self, computing: Collection[int] | None) -> GpuUsage:
        """The processes and memory on the GPU. `computing`: its compute processes, just read."""
        graphics = self._ask("graphics")
        # MIG instances and vGPUs have no graphics, and not every driver supports the query.
        nobody = () if "graphics" in self._unsupported else None
        drawing = nobody if graphics is None else [process.pid for process in graphics]
        return GpuUsage(computing, drawing, self._ask("held"))

    def _settled_power_field(self) -> Literal["instant", "draw"] | None:
        if any(self._fields("fields")[0] is not None for _ in range(_ATTEMPTS)):
            return "instant"
        return "draw" if any(self._ask("draw") is not None for _ in range(_ATTEMPTS)) else None

    def _power(self, *, slow: bool) -> tuple[float | None, float | None]:
        """Power in watts from the field chosen at the start; if `slow`, also its average."""
        instant_w = average_w = None
        if slow:
            instant_w, average_w = self._fields("fields")
        elif self._power_field == "instant":
            (instant_w,) = self._fields("field")
        # The chosen field, even if the instant one recovers: a column must keep its meaning.
        return self._ask("draw") if self._power_field == "draw" else instant_w, average_w

    def _fields(self, query: str) -> list[float | None]:
        """Watts from the power fields of this query: instant power, then the average."""
        names = ("instant", "average") if query == "fields" else ("instant",)
        values = None if self._unsupported.issuperset(names) else self._ask(query)
        if values is None:
            return [None] * len(names)
        return [self._ask(name, value) for name, value in zip(names, values, strict=True)]

    def _throttled(self) -> int | None:
        reasons: int | None = self._ask("events")
        # The query's name before driver 535.
        return self._ask("throttle") if "events" in self._unsupported else reasons

    def _ask(self, name: str, subject: object = None) -> Any:  # noqa: ANN401  untyped binding
        """NVML's answer to a query, or None. Unsupported queries and lost GPUs are not asked."""
        if self.is_lost or name in self._unsupported:
            return None
        try:
            handle = self._board if name in _OF_THE_BOARD else self._handle
            return QUERIES[name](handle if subject is None else subject)
        except _UNSUPPORTED:
            self._unsupported.add(name)
        except pynvml.NVMLError as error:
            self.error = error
            self.is_lost = isinstance(error, pynvml.NVMLError_GpuIsLost)
        return None


def _answered_facts(facts: Mapping[str, Callable[[Any], Any]], handle: object) -> dict[str, Any]:
    """The facts that NVML can answer for this handle."""
    answers = {}
    for name, query in facts.items():
        with contextlib.suppress(pynvml.NVMLError):
            answers[name] = query(handle)
    return answers


# -- the probe -------------------------------------------------------------------------------------

# The share of one core that reading energy counters may cost. On an H200 a reading takes 4 to 8 ms
# of CPU: ten a second would be 4 to 8 %. A counter read less often loses nothing, and power read
# ten times a second shows how its joules are spread in between.
COUNTER_SHARE = 0.002

# The same for the hardware counters of activity: 0.4 ms a reading on an H200. Their values are
# means since the last reading, so reading them less often misses nothing. Where a reading takes
# longer (2 to 6 ms in a virtual machine) a short run would have none within its window. So two
# readings are at most MOST_APART_FRAC of the run's time so far apart.
ACTIVITY_SHARE = 0.0005
ACTIVITY_PERIOD_S = 1.0
MOST_APART_FRAC = 0.05

# How often to ask for what changes slowly, or is itself an average of the last fraction of a second
# (load): memory, load, clock, temperature, throttling. Power is asked for at every reading.
SLOW_PERIOD_S = 1.0

# NVIDIA's minimum driver for the CUDA 11 releases, by its compatibility table.
OLDEST_DRIVER = "450.80.02"

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


_Read = TypeVar("_Read")


class NvmlProbe(DeclaredProbe):
    """Reads every NVIDIA GPU that the measured process can see."""

    name = "nvml"
    kinds = ("gpu",)
    has_interval = True
    usual_period_s = 0.1  # most GPUs refresh their sensors that often (a V100 every 20 ms)

    def __init__(self, request: ProbeRequest) -> None:
        super().__init__(request)
        self._slow_period_s = float(request.options.get("gauges_every_s", SLOW_PERIOD_S))
        self._counters_due_s = 0.0
        self._slow_due_s = 0.0
        self._activity_due_s = 0.0
        self._opened_s = time.monotonic()
        self._usage = UsageWatch(request.pid, request.environment)
        self._states = UseStates(self._usage)
        self._memory_bytes: dict[str, int] = {}  # in use on each GPU at the last reading
        self._gpus: list[Gpu] = []
        self._gone: list[str] = []  # every lost GPU, with NVML's error
        self._unreported: list[str] = []  # lost GPUs without a Mark so far
        try:
            pynvml.nvmlInit()
            with self.closed_on_error():
                self._gpus = self._open_gpus(request.environment)
        except pynvml.NVMLError as error:
            unknown = f"NVML says {error}: run `nvidia-smi`, and fix what that reports"
            raise NotMeasurable(_REFUSALS.get(error.value, unknown)) from error
        self.devices: Sequence[Device] = [gpu.device for gpu in self._gpus]

    def read_last(self) -> Sequence[Sample | Mark]:
        """Read everything once more, the energy counters included."""
        return self.read(last=True)

    def read(self, *, last: bool = False) -> Sequence[Sample | Mark]:
        """Read every GPU's power and gauges; then energy counters, as often as their cost allows.

        A lost GPU gives one Mark. Raises NotMeasurable once there is none left.
        """
        if not self._gpus:
            raise NotMeasurable(f"no GPU is left to read: {'; '.join(self._gone)}")
        slow = last or time.monotonic() >= self._slow_due_s
        if slow:
            self._slow_due_s = time.monotonic() + self._slow_period_s - self.period_s / 2
        gauges = [gpu.gauges(slow=slow) for gpu in self._gpus]
        counters = self._counters(last=last)
        for gpu, gauge, counter in zip(self._gpus, gauges, counters, strict=True):
            gpu.note_answer(answered=gauge is not None or counter is not None)
            if gpu.is_lost:
                gpu.close()
                self._lose(f"{gpu.device.id} ({gpu.device.name}, index {gpu.index})", gpu.error)
        self._gpus = [gpu for gpu in self._gpus if not gpu.is_lost]
        now_ns = time.monotonic_ns()
        marks = [Mark(now_ns, "device_lost", detail) for detail in self._unreported]
        self._unreported.clear()
        records: list[Sample | Mark] = [
            sample for sample in (*gauges, *counters) if sample is not None
        ]
        records += self._activity(last=last)
        return [*records, *marks, *self._users(now_ns, self._memory_rose(), last=last)]

    def _memory_rose(self) -> dict[str, int]:
        """GPUs whose memory in use has just risen by a CUDA context or more, with their bytes."""
        rose = {}
        for gpu in self._gpus:
            name = gpu.device.id
            in_use = None if self._states.is_used(name) else gpu.memory_in_use()
            if in_use is not None:
                if in_use - self._memory_bytes.get(name, in_use) >= NEW_CONTEXT_BYTES:
                    rose[name] = in_use
                self._memory_bytes[name] = in_use
        return rose

    def _users(self, now_ns: int, rose: dict[str, int], *, last: bool) -> list[Sample | Mark]:
        """Marks of the processes on the GPUs, and samples of the program's memory there.

        GPUs whose memory `rose` are read at once: a process may be gone at the next reading.
        """
        bytes_by_pid: dict[str, dict[int, int | None]] = {}
        looks: dict[str, GpuUsage] = {}

        def asked(gpu: Gpu) -> dict[int, int | None]:
            processes = gpu.processes()
            looks[gpu.device.id] = gpu.usage(processes)
            bytes_by_pid[gpu.device.id] = processes or {}
            return bytes_by_pid[gpu.device.id]

        gpus = [(gpu.device.id, partial(asked, gpu)) for gpu in self._gpus]
        used, shared = self._usage.changes(gpus, now=last or bool(rose))
        own = self._usage.own_bytes(bytes_by_pid)
        return [
            *(Sample(now_ns, gpu, process_bytes=own_bytes) for gpu, own_bytes in own.items()),
            *(Mark(now_ns, "device_used", gpu) for gpu in used),
            *(Mark(now_ns, "device_shared", f"{gpu} {who}") for gpu, who in shared.items()),
            *(
                Mark(now_ns, f"device_{state}", gpu if state == "used" else f"{gpu} {why}")
                for gpu, (state, why) in self._states.changes(looks, used, rose).items()
                if gpu not in used
            ),
        ]

    def _counters(self, *, last: bool) -> list[Sample | None]:
        if time.monotonic() < self._counters_due_s and not last:
            return [None] * len(self._gpus)
        counters, cost_s = self._timed(Gpu.counter)
        self._counters_due_s = time.monotonic() + cost_s / COUNTER_SHARE
        return counters

    def _activity(self, *, last: bool) -> list[Sample | Mark]:
        if time.monotonic() < self._activity_due_s and not last:
            return []
        records, cost_s = self._timed(Gpu.activity)
        now_s = time.monotonic()
        wait_s = min(cost_s / ACTIVITY_SHARE, (now_s - self._opened_s) * MOST_APART_FRAC)
        self._activity_due_s = now_s + max(ACTIVITY_PERIOD_S - self.period_s / 2, wait_s)
        return [record for record in records if record is not None]

    def _timed(self, read: Callable[[Gpu], _Read]) -> tuple[list[_Read], float]:
        """Call `read` for every GPU; return the results, and the CPU seconds that they took."""
        before_s = time.thread_time()
        return [read(gpu) for gpu in self._gpus], time.thread_time() - before_s

    def close(self) -> None:
        """Shut NVML down."""
        for gpu in self._gpus:
            gpu.close()
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _open_gpus(self, environment: Mapping[str, str]) -> list[Gpu]:
        driver = pynvml.nvmlSystemGetDriverVersion()
        if _version(driver) < _version(OLDEST_DRIVER):
            raise NotMeasurable(
                f"NVIDIA driver {driver} is older than {OLDEST_DRIVER}: update the driver"
            )
        facts: dict[str, Any] = {"driver": driver, "nvml": pynvml.nvmlSystemGetNVMLVersion()}
        identities = [_identity(index) for index in range(pynvml.nvmlDeviceGetCount())]
        by_uuid = cuda_visible_devices.with_uuids(environment, identities)
        if by_uuid is None:
            facts["order_is_assumed"] = True
        instances = {index: instances_of(index) for index in range(len(identities))}
        divided = {index: parts for index, parts in instances.items() if parts is not None}
        chosen = visible(by_uuid or environment, [uuid for uuid, _ in identities], divided)
        gpus = [gpu for which in chosen if (gpu := self._gpu(which, facts)) is not None]
        if not gpus:
            raise NotMeasurable(f"no GPU can be read ({'; '.join(self._gone)}): see `nvidia-smi`")
        return gpus

    def _gpu(self, which: int | Instance, facts: Mapping[str, Any]) -> Gpu | None:
        try:
            return Gpu(which, facts, probe=self.name)
        except pynvml.NVMLError as error:
            self._lose(f"index {which}" if isinstance(which, int) else which.uuid, error)
            return None

    def _lose(self, which: str, error: object) -> None:
        self._gone.append(f"{which}: NVML says {error}")
        self._unreported.append(self._gone[-1])


def _identity(index: int) -> tuple[str, str]:
    """UUID and name of a GPU, both empty if NVML can't answer."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return "", ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
