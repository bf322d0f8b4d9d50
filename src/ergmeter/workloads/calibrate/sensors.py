"""What do a GPU's sensors say: idle, under load, and how often do they have something new to say?

The trap: a sensor that is asked oftener than it looks. An H200 refreshes power and energy every
100 ms; asked every millisecond it gives a hundred readings of which one is new, and a difference of
two within a refresh is 0 J. So the refresh period is measured, from the instants at which a value
changes under a load that never draws quite the same; and idle watts by the energy counter are taken
from one of its changes to another. That counter and the power sensor can disagree at idle by a
factor (ml-energy/zeus issue 181), so both are kept.

Nothing here changes a setting of the card.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pynvml

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.calibration import Idle, Refresh
from ergmeter.units import HZ_PER_MHZ, J_PER_MJ, NS_PER_S, W_PER_MW

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.records import Device

# Between two looks: a hundredth of the shortest period that was ever seen (20 ms, V100) and more.
_LOOK_S = 0.0005
_WATCH_S = 0.02
_FEWEST_CHANGES = 4
_STILL_S = 1.0  # a counter that has not moved for so long does not count

# NVML's clocks-event reasons, by what holds the clock down; idle and a clock set by an application
# are none.
_LIMITS = {
    "power": 0x4 | 0x80,
    "heat": 0x20 | 0x40,
    "hardware": 0x8,
    "other GPUs": 0x10,
}


class Sensors:
    """One GPU through NVML, asked as often as one likes. Close it when done."""

    def __init__(self, device: Device) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(device.id)
        self._has_instant = device.facts.get("power_field") == "instant"

    def close(self) -> None:
        """Let go of NVML."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def power_w(self) -> float:
        """The nearest to instant power that it has, as the probe reads it."""
        if not self._has_instant:
            return float(pynvml.nvmlDeviceGetPowerUsage(self._handle)) * W_PER_MW
        field = pynvml.nvmlDeviceGetFieldValues(
            self._handle, [(pynvml.NVML_FI_DEV_POWER_INSTANT, 0)]
        )[0]
        if field.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(field.nvmlReturn)
        return int(field.value.uiVal) * W_PER_MW

    def energy_j(self) -> float:
        """The energy counter."""
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * J_PER_MJ

    def clock_hz(self) -> float:
        """The clock of the streaming multiprocessors."""
        clock = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
        return float(clock) * HZ_PER_MHZ

    def temperature_c(self) -> float:
        """The chip's temperature."""
        return float(pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU))

    def limits(self) -> float:
        """The bit mask of what holds the clock down."""
        return float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def processes(self) -> list[int]:
        """Who computes on it, by the numbers that NVML has for them."""
        found = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(self._handle)
        return [process.pid for process in found]


def _asked(query: Callable[[], float]) -> float:
    """An answer, or NaN."""
    try:
        return query()
    except pynvml.NVMLError:
        return float("nan")


class Watch:
    """Reads clock, power, temperature and limits on a thread of its own, while others work."""

    def __init__(self, sensors: Sensors) -> None:
        self._queries = (
            sensors.clock_hz,
            sensors.power_w,
            sensors.temperature_c,
            sensors.limits,
        )
        self._rows: list[tuple[float, ...]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ergmeter-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._done.wait(_WATCH_S):
            self._rows.append((time.monotonic_ns(), *map(_asked, self._queries)))

    def between(self, start_ns: int, end_ns: int) -> dict[str, Any]:
        """What it saw in a span, as `Rate` has it; what nobody answered is absent."""
        rows = [row for row in list(self._rows) if start_ns <= row[0] <= end_ns]
        if not rows:
            return {}
        clock, power, heat, limits = np.array(rows)[:, 1:].T
        seen: dict[str, Any] = {}
        if (clock := clock[np.isfinite(clock)]).size:
            seen["clock_hz"] = float(np.median(clock))
            seen["clock_low_hz"] = float(clock.min())
        if (power := power[np.isfinite(power)]).size:
            seen["power_w"] = float(power.mean())
        if (heat := heat[np.isfinite(heat)]).size:
            seen["temperature_c"] = float(heat[-1])
        if (limits := limits[np.isfinite(limits)]).size:
            bits = limits.astype(np.int64)
            shares = {name: float((bits & mask != 0).mean()) for name, mask in _LIMITS.items()}
            seen["limited"] = {name: share for name, share in shares.items() if share}
        return seen


def idle(sensors: Sensors, *, settle_s: float, for_s: float) -> Idle:
    """What it draws at rest. NotMeasurable where it has no power sensor."""
    time.sleep(settle_s)
    began = _next_change(sensors)
    start_s = time.monotonic()
    watts = []
    while time.monotonic() - start_s < for_s:
        watts.append(_asked(sensors.power_w))
        time.sleep(0.01)
    ended = _next_change(sensors)
    known = np.array(watts)[np.isfinite(watts)]
    if not known.size:
        raise NotMeasurable("the device has no power sensor that answers")
    by_counter = None
    if began and ended:
        by_counter = (ended[1] - began[1]) / ((ended[0] - began[0]) / NS_PER_S)
    clock = _asked(sensors.clock_hz)
    low, high = (float(edge) for edge in np.percentile(known, [5, 95]))
    return Idle(
        power_w=float(known.mean()),
        low_w=low,
        high_w=high,
        window_s=time.monotonic() - start_s,
        counter_w=by_counter,
        clock_hz=clock if np.isfinite(clock) else None,
    )


def _next_change(sensors: Sensors) -> tuple[int, float] | None:
    """When the counter moves next, and to what; None if there is none, or it stands still."""
    first = _asked(sensors.energy_j)
    limit_s = time.monotonic() + _STILL_S
    while time.monotonic() < limit_s:
        now = _asked(sensors.energy_j)
        if now > first:
            return time.monotonic_ns(), now
        time.sleep(_LOOK_S)
    return None


def refresh(query: Callable[[], float], *, for_s: float) -> Refresh:
    """How often a reading changes, by looking much oftener. NotMeasurable if it hardly does."""
    looks_ns: list[int] = []
    values: list[float] = []
    end_ns = time.monotonic_ns() + round(for_s * NS_PER_S)
    while (before_ns := time.monotonic_ns()) < end_ns:
        values.append(_asked(query))
        looks_ns.append((before_ns + time.monotonic_ns()) // 2)
        time.sleep(_LOOK_S)
    at, seen = np.array(looks_ns), np.array(values)
    if not np.isfinite(seen).all():
        raise NotMeasurable("the sensor does not answer")
    changed = np.flatnonzero(np.diff(seen)) + 1
    if len(changed) < _FEWEST_CHANGES:
        raise NotMeasurable(f"its reading changed {len(changed)} times in {for_s:g} s")
    # A change lies between two looks.
    periods_s = np.diff((at[changed] + at[changed - 1]) / 2) / NS_PER_S
    low, median, high = (float(edge) for edge in np.percentile(periods_s, [5, 50, 95]))
    between_s = float(np.median(np.diff(at))) / NS_PER_S
    return Refresh(median, low, high, len(changed), between_s)
