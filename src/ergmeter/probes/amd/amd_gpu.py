"""What does one AMD GPU answer? Its power, its counter as one that only grows, and its gauges.

The trap: what is not there looks like a number. A field that a GPU lacks reads "N/A", 65535 or the
largest integer of its width, and the second die of an MI250X reads 0 W, because the first one shows
what both draw. All of these are absent here. Where the energy accumulator is 32 bits wide it wraps,
every 94 s at 700 W.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ergmeter.records import Device, Sample
from ergmeter.units import HZ_PER_MHZ, J_PER_UJ

_WRAP = 1 << 32  # of a 32-bit accumulator
_LEAST_APART_S = 0.1
_MOST_W = 5000.0  # no GPU draws more: what would need more is no wrap but a reset
# How "there is none" reads, by the width of the field.
_NONE = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)

_UNSUPPORTED = (2, 3)  # of amdsmi_status_t: not supported, not yet implemented

# What is counted while the GPU holds back, by the reason's bit in NVML's clocks-event reasons, in
# which every GPU's reasons are written.
_RESIDENCIES = {
    "ppt_residency_acc": 0x4,  # the power cap
    "prochot_residency_acc": 0x8,  # the board's own brake
    "socket_thm_residency_acc": 0x20,
    "vr_thm_residency_acc": 0x20,
    "hbm_thm_residency_acc": 0x20,
}


class AmdGpu:
    """One GPU: its handle, its counter so far, and which queries it does not answer."""

    def __init__(self, smi: Any, handle: Any, device: Device) -> None:  # noqa: ANN401  no types
        self._smi, self._handle = smi, handle
        self.device = device
        self.silent = 0
        self.error: str = ""
        self.beside: AmdGpu | None = None  # a die that its sensors take in, and nobody else reads
        self._unsupported: set[str] = set()
        self._counter = _Counter()
        self._held_back: dict[str, int] = {}
        self._field = self._power_field()
        device.facts["power_field"] = {"current": "instant", "average": "draw"}.get(self._field)
        device.facts["has_energy_counter"] = self._energy_j() is not None

    def samples(self, *, slow: bool) -> list[Sample]:
        """Power; and what changes slowly, with the counter in a sample of its own."""
        self.error = ""
        t_ns = time.monotonic_ns()
        power_w = self._power_w(self._field)
        found = Sample(t_ns, self.device.id, power_w=power_w)
        if slow:
            found = Sample(
                t_ns,
                self.device.id,
                power_w=power_w,
                memory_bytes=self._ask("memory"),
                busy_frac=_percent(self._ask("activity")),
                clock_hz=scaled(self._ask("clock"), HZ_PER_MHZ),
                temperature_c=self._ask("temperature"),
                throttled=self._throttled(),
            )
        before_ns = time.monotonic_ns()
        energy_j = self._energy_j() if slow else None
        samples = [found] if found != Sample(t_ns, self.device.id) else []
        if energy_j is not None:
            counter_ns = (before_ns + time.monotonic_ns()) // 2
            samples.append(Sample(counter_ns, self.device.id, energy_j=energy_j))
        self.silent = self.silent + 1 if self.error and not samples else 0
        return samples

    def processes(self) -> list[int]:
        """The processes that hold a queue or memory on it, or on what its sensors take in."""
        own = [int(process["pid"]) for process in self._ask("processes") or ()]
        return own if self.beside is None else [*own, *self.beside.processes()]

    def _power_field(self) -> str:
        for name in ("current", "average"):
            if self._power_w(name) is not None:
                return name
        return ""

    def _power_w(self, name: str) -> float | None:
        power = (self._ask("power") or {}) if name else {}
        watts = number(power.get(f"{name}_socket_power"))
        return watts or None  # nothing that is on draws 0 W

    def _energy_j(self) -> float | None:
        counted = self._ask("energy") or {}
        steps = number(counted.get("energy_accumulator"))
        resolution_uj = number(counted.get("counter_resolution"))
        if not steps or not resolution_uj:
            return None
        return self._counter.joules(int(steps), resolution_uj * J_PER_UJ)

    def _throttled(self) -> int | None:
        """Why it held back since the last time, as bits; None where it does not count that."""
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
        """The answer, or None. What is not supported is not asked again."""
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
    """An accumulator that may be 32 bits wide, as one that only grows."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._wrapped = 0

    def joules(self, steps: int, step_j: float) -> float:
        """What it has counted. A fall that no wrap explains is passed on: the counter was reset."""
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
    """What amdsmi says of an error, in one line."""
    return error.get_error_info() if hasattr(error, "get_error_info") else str(error)


def number(value: object) -> float | None:
    """A number that is one: not "N/A", and not the largest of its width."""
    return value if isinstance(value, int | float) and value not in _NONE else None


def scaled(value: object, factor: float) -> float | None:
    """A number in a base unit, if it is one."""
    found = number(value)
    return None if found is None else found * factor


def _percent(value: object) -> float | None:
    share = scaled(value, 0.01)
    return share if share is not None and share <= 1 else None
