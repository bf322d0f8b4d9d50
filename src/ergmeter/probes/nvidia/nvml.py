"""What do this machine's NVIDIA GPUs draw, and what are they doing? From NVML, without root.

The trap: `nvmlDeviceGetPowerUsage`, the call everybody finds first, is on Ampere and newer an
average over about a second; integrated over a 1 s window it misses 41 % of an H200's joules. So
power comes from the instant field where there is one, the device's facts say which was read, and
energy comes from the hardware counter. Reading that counter takes 3 to 16 ms: it has a sample and
a timestamp of its own, and is asked only after every GPU's power has been taken.

Two more: NVML ignores CUDA_VISIBLE_DEVICES, so the measured process's value is applied here; and
a query that fails gives None for that field, never a zero. What a GPU is asked for is in
`nvml_gpu`, its hardware counters in `gpm`, MIG instances in `mig`, who computes on it in `usage`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pynvml

from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes.nvidia import visible as cuda_order
from ergmeter.probes.nvidia.mig import instances_of
from ergmeter.probes.nvidia.nvml_gpu import Gpu
from ergmeter.probes.nvidia.visible import Instance, visible
from ergmeter.probes.usage import NEW_CONTEXT_BYTES, GpuUsage, UsageWatch, UseStates
from ergmeter.records import Device, Mark, Sample

PERIOD_S = 0.1  # most GPUs refresh their sensors that often (a V100 every 20 ms)

# The share of one core that reading energy counters may cost. On an H200 a reading takes 4 to 8 ms
# of CPU: ten a second would be 4 to 8 %. A counter read less often forgets nothing, and power read
# ten times a second says how its joules are spread in between.
COUNTER_SHARE = 0.002

# The same for the hardware counters of activity: 0.4 ms a reading on an H200. What they say is a
# mean since the last reading, so that nothing is missed by reading them less often.
ACTIVITY_SHARE = 0.0005
ACTIVITY_PERIOD_S = 1.0

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


class NvmlProbe:
    """Reads every NVIDIA GPU that the measured process can see."""

    name = "nvml"

    def __init__(self, request: ProbeRequest) -> None:
        self.period_s = float(request.options.get("period_s", PERIOD_S))
        self._slow_period_s = float(request.options.get("gauges_every_s", SLOW_PERIOD_S))
        self._counters_due_s = 0.0
        self._slow_due_s = 0.0
        self._activity_due_s = 0.0
        self._usage = UsageWatch(request.pid, request.environment)
        self._states = UseStates(self._usage)
        self._memory_bytes: dict[str, int] = {}  # in use on each GPU at the last reading
        self._gpus: list[Gpu] = []
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
            self._slow_due_s = time.monotonic() + self._slow_period_s - self.period_s / 2
        gauges = [gpu.gauges(slow=slow) for gpu in self._gpus]
        counters = self._counters(last=last)
        for gpu, gauge, counter in zip(self._gpus, gauges, counters, strict=True):
            gpu.heard(answered=gauge is not None or counter is not None)
            if gpu.is_lost:
                gpu.close()
                self._lose(f"{gpu.device.id} ({gpu.device.name}, index {gpu.index})", gpu.error)
        self._gpus = [gpu for gpu in self._gpus if not gpu.is_lost]
        now_ns = time.monotonic_ns()
        marks = [Mark(now_ns, "device_lost", detail) for detail in self._unreported]
        self._unreported.clear()
        records: list[Sample | Mark] = [one for one in (*gauges, *counters) if one is not None]
        records += self._activity(last=last)
        return [*records, *marks, *self._users(now_ns, self._memory_rose(), last=last)]

    def _memory_rose(self) -> dict[str, int]:
        """GPUs whose memory in use has just risen as by a new context, and to how many bytes."""
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
        """Who computes on the GPUs, and what of their memory is the program's.

        Where memory rose they are asked at once: a process may be gone at the next look.
        """
        held: dict[str, dict[int, int | None]] = {}
        looks: dict[str, GpuUsage] = {}

        def asked(gpu: Gpu) -> dict[int, int | None]:
            found = gpu.processes()
            looks[gpu.device.id] = gpu.look(found)
            held[gpu.device.id] = found or {}
            return held[gpu.device.id]

        gpus = [(gpu.device.id, partial(asked, gpu)) for gpu in self._gpus]
        used, shared = self._usage.changes(gpus, now=last or bool(rose))
        own = self._usage.own_bytes(held)
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
        before_s = time.thread_time()
        counters = [gpu.counter() for gpu in self._gpus]
        cost_s = time.thread_time() - before_s
        self._counters_due_s = time.monotonic() + cost_s / COUNTER_SHARE
        return counters

    def _activity(self, *, last: bool) -> list[Sample | Mark]:
        if time.monotonic() < self._activity_due_s and not last:
            return []
        before_s = time.thread_time()
        found = [gpu.activity() for gpu in self._gpus]
        cost_s = time.thread_time() - before_s
        wait_s = max(ACTIVITY_PERIOD_S - self.period_s / 2, cost_s / ACTIVITY_SHARE)
        self._activity_due_s = time.monotonic() + wait_s
        return [one for one in found if one is not None]

    def close(self) -> None:
        """Let go of NVML."""
        for gpu in self._gpus:
            gpu.close()
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _opened(self, environment: Mapping[str, str]) -> list[Gpu]:
        driver = pynvml.nvmlSystemGetDriverVersion()
        if _version(driver) < _version(OLDEST_DRIVER):
            raise NotMeasurable(
                f"NVIDIA driver {driver} is older than {OLDEST_DRIVER}: update the driver"
            )
        facts: dict[str, Any] = {"driver": driver, "nvml": pynvml.nvmlSystemGetNVMLVersion()}
        found = [_identity(index) for index in range(pynvml.nvmlDeviceGetCount())]
        by_uuid = cuda_order.named(environment, found)
        if by_uuid is None:
            facts["order_is_assumed"] = True
        divided = {
            index: parts
            for index in range(len(found))
            if (parts := instances_of(index)) is not None
        }
        chosen = visible(by_uuid or environment, [uuid for uuid, _ in found], divided)
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
    """UUID and name, both empty if NVML can't say."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return "", ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
