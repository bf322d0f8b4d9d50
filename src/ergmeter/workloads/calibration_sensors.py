"""A GPU's power sensors: idle watts, watts under load, refresh period; and sustained rates.

An H200 refreshes power and energy every 100 ms, so faster polling returns the same value again. The
refresh period is measured from the instants at which a value changes under a varying load. Idle
watts by the energy counter are taken from one change to another. That counter and the power sensor
can disagree at idle by a factor (ml-energy/zeus issue 181), so both are kept.

Nothing here changes a setting of the card.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pynvml
import torch

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.calibration import CalibratedRate, Idle, Refresh
from ergmeter.probes.nvml import QUERIES
from ergmeter.units import NS_PER_S

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


Query: TypeAlias = "Callable[[], float]"


class Sensors:
    """One GPU through NVML, asked as the probe asks it. Close it when done."""

    def __init__(self, device: Device) -> None:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.id)
        ask = {name: partial(query, handle) for name, query in QUERIES.items()}
        self.power_w: Query = ask["draw"]
        if device.facts.get("power_field") == "instant":
            self.power_w = lambda: QUERIES["instant"](ask["fields"]()[0])
        self.energy_j: Query = ask["energy"]
        self.gauges = (ask["clock"], self.power_w, ask["temperature"], ask["throttle"])
        self.clock_hz: Query = ask["clock"]
        self._processes = ask["processes"]

    def close(self) -> None:
        """Shuts NVML down."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def processes(self) -> list[int]:
        """Process ids of compute processes on the GPU, by NVML."""
        return [process.pid for process in self._processes()]


def _asked(query: Query) -> float:
    """NVML's answer, or NaN."""
    try:
        return query()
    except pynvml.NVMLError:
        return float("nan")


class Watch:
    """Reads clock, power, temperature and limits on a thread of its own, while others work."""

    def __init__(self, sensors: Sensors) -> None:
        self._queries = sensors.gauges
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
        """Means over a span, under `Rate`'s names; absent where NVML gave none."""
        rows = [row for row in list(self._rows) if start_ns <= row[0] <= end_ns]
        if not rows:
            return {}
        clock, power, heat, limits = np.array(rows)[:, 1:].T
        averages: dict[str, Any] = {}
        if (clock := clock[np.isfinite(clock)]).size:
            averages["clock_hz"] = float(np.median(clock))
            averages["clock_low_hz"] = float(clock.min())
        if (power := power[np.isfinite(power)]).size:
            averages["power_w"] = float(power.mean())
        if (heat := heat[np.isfinite(heat)]).size:
            averages["temperature_c"] = float(heat[-1])
        if (limits := limits[np.isfinite(limits)]).size:
            bits = limits.astype(np.int64)
            shares = {name: float((bits & mask != 0).mean()) for name, mask in _LIMITS.items()}
            averages["limited"] = {name: share for name, share in shares.items() if share}
        return averages


def idle(sensors: Sensors, *, settle_s: float, for_s: float) -> Idle:
    """Idle power. Raises NotMeasurable without a power sensor."""
    time.sleep(settle_s)
    began = _next_change(sensors)
    start_s = time.monotonic()
    watts = []
    while time.monotonic() - start_s < for_s:
        watts.append(_asked(sensors.power_w))
        time.sleep(0.01)
    ended = _next_change(sensors)
    finite = np.array(watts)[np.isfinite(watts)]
    if not finite.size:
        raise NotMeasurable("the device has no power sensor that answers")
    by_counter = None
    if began and ended:
        by_counter = (ended[1] - began[1]) / ((ended[0] - began[0]) / NS_PER_S)
    clock = _asked(sensors.clock_hz)
    low, high = (float(edge) for edge in np.percentile(finite, [5, 95]))
    return Idle(
        power_w=float(finite.mean()),
        low_w=low,
        high_w=high,
        window_s=time.monotonic() - start_s,
        counter_w=by_counter,
        clock_hz=clock if np.isfinite(clock) else None,
    )


def _next_change(sensors: Sensors) -> tuple[int, float] | None:
    """Time and value of the counter's next change; None if it does not change."""
    first = _asked(sensors.energy_j)
    limit_s = time.monotonic() + _STILL_S
    while time.monotonic() < limit_s:
        now = _asked(sensors.energy_j)
        if now > first:
            return time.monotonic_ns(), now
        time.sleep(_LOOK_S)
    return None


def refresh(query: Query, *, for_s: float) -> Refresh:
    """The refresh period of a sensor, by polling. Raises NotMeasurable if it hardly changes."""
    looks_ns: list[int] = []
    values: list[float] = []
    end_ns = time.monotonic_ns() + round(for_s * NS_PER_S)
    while (before_ns := time.monotonic_ns()) < end_ns:
        values.append(_asked(query))
        looks_ns.append((before_ns + time.monotonic_ns()) // 2)
        time.sleep(_LOOK_S)
    at, readings = np.array(looks_ns), np.array(values)
    if not np.isfinite(readings).all():
        raise NotMeasurable("the sensor does not answer")
    changed = np.flatnonzero(np.diff(readings)) + 1
    if len(changed) < _FEWEST_CHANGES:
        raise NotMeasurable(f"its reading changed {len(changed)} times in {for_s:g} s")
    # A change lies between two looks.
    periods_s = np.diff((at[changed] + at[changed - 1]) / 2) / NS_PER_S
    low, median, high = (float(edge) for edge in np.percentile(periods_s, [5, 50, 95]))
    between_s = float(np.median(np.diff(at))) / NS_PER_S
    return Refresh(median, low, high, len(changed), between_s)


# The rate of repeated work, timed in blocks after a warm-up. A GPU only queues work, so its own
# events are placed between the blocks, and the host waits once, at the end. The first second is too
# fast: the chip is cool and not yet power-limited. So the rate is that of a window after a warm-up.
# The best short block is returned as well, as a burst.


Work: TypeAlias = "Callable[[], object]"


@dataclass(frozen=True, slots=True)
class TrialDurations:
    """Durations of the trials; `window` is that of the reported rate."""

    burst_s: float = 0.02  # a block of the sweep: shorter than a power limit takes to act
    bursts: int = 5
    finalists: int = 2  # of the sweep, which are held for a whole window
    warmup_s: float = 0.8
    window_s: float = 1.2
    block_s: float = 0.05
    stream_warmup_s: float = 0.2
    stream_window_s: float = 1.0
    settle_s: float = 1.0
    idle_s: float = 2.0
    refresh_s: float = 1.2
    is_quick: bool = False


FULL = TrialDurations()
QUICK = TrialDurations(
    bursts=3,
    finalists=1,
    warmup_s=0.2,
    window_s=0.5,
    block_s=0.02,
    stream_warmup_s=0.05,
    stream_window_s=0.15,
    settle_s=0.3,
    idle_s=1.0,
    refresh_s=0.8,
    is_quick=True,
)


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Work to repeat: a task and its amount."""

    work: Work
    amount: float
    unit: str
    of: str


def spans_s(work: Work, device: torch.device, *, repeats: int, blocks: int) -> list[float]:
    """Seconds of each of consecutive blocks."""
    return (_by_events if device.type == "cuda" else _by_clock)(work, repeats, blocks)


def _by_clock(work: Work, repeats: int, blocks: int) -> list[float]:
    edges = [time.perf_counter()]
    for _ in range(blocks):
        for _ in range(repeats):
            work()
        edges.append(time.perf_counter())
    return [float(span) for span in np.diff(edges)]


def _by_events(work: Work, repeats: int, blocks: int) -> list[float]:
    event = partial(torch.cuda.Event, enable_timing=True)
    edges = [event() for _ in range(blocks + 1)]
    edges[0].record()
    for edge in edges[1:]:
        for _ in range(repeats):
            work()
        edge.record()
    edges[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(edges)]


def one_s(work: Work, device: torch.device) -> float:
    """Approximate seconds of one task, after a first call that loads what it needs."""
    work()
    return spans_s(work, device, repeats=1, blocks=1)[0]


def bursts(task: RepeatedWork, device: torch.device, pace: TrialDurations) -> list[float]:
    """Rates of a few short blocks."""
    repeats = max(1, math.ceil(pace.burst_s / one_s(task.work, device)))
    spans = spans_s(task.work, device, repeats=repeats, blocks=pace.bursts)
    return [task.amount * repeats / span for span in spans]


def _blocks_for(
    seconds: float, work: Work, device: torch.device, *, repeats: int, at_least: int
) -> list[float]:
    """The number of blocks that takes at least this long.

    All are queued at once as far as one can tell how many it takes: a GPU that waits for the host
    between them would cool.
    """
    spans = spans_s(work, device, repeats=repeats, blocks=at_least)
    while (left_s := seconds - sum(spans)) > 0:
        more = math.ceil(left_s / min(spans))
        spans += spans_s(work, device, repeats=repeats, blocks=more)
    return spans


def sustained(
    task: RepeatedWork,
    device: torch.device,
    pace: TrialDurations,
    *,
    watch: Watch | None,
) -> CalibratedRate:
    """The rate over a window after a warm-up, without a burst of its own."""
    repeats = max(1, round(pace.block_s / one_s(task.work, device)))
    warm = _blocks_for(pace.warmup_s, task.work, device, repeats=repeats, at_least=1)
    start_ns = time.monotonic_ns()
    spans = np.array(_blocks_for(pace.window_s, task.work, device, repeats=repeats, at_least=4))
    end_ns = time.monotonic_ns()
    blocks = len(spans)
    rates = task.amount * repeats / spans
    half = blocks // 2
    low, median, high = (float(edge) for edge in np.percentile(rates, [5, 50, 95]))
    best = float(rates.max())
    averages = watch.between(start_ns, end_ns) if watch else {}
    return CalibratedRate(
        value=task.amount * repeats * blocks / float(spans.sum()),
        unit=task.unit,
        median=median,
        low=low,
        high=high,
        blocks=blocks,
        window_s=float(spans.sum()),
        warmup_s=float(sum(warm)),
        drift_frac=float(spans[:half].mean() / spans[half:].mean() - 1),
        of=task.of,
        burst=best,
        burst_s=float(spans[rates.argmax()]),
        burst_of=task.of,
        **averages,
    )
