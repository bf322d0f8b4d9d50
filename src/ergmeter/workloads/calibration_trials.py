"""Measures one device: power sensors, matmul FLOP/s by type, memory bandwidth by pattern.

Matrices are normally distributed. Zeros draw less power, so under a power limit they clock higher:
295 TFLOP/s against 257 on an A100 (https://www.thonking.ai/p/strangely-matrix-multiplications).

A rate is the best of a sweep over squares and over the layers of Llama 3 with some thousand tokens,
each as a linear layer multiplies (x times the transpose of its weights). mamf-finder (Stas Bekman,
Machine Learning Engineering) sweeps thousands of shapes for an hour and finds a few percent more.

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
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
import pynvml
import torch

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.calibration import CalibratedRate, Idle, Refresh
from ergmeter.probes.nvml import QUERIES
from ergmeter.records import Device
from ergmeter.units import NS_PER_S

# Between two polls of a sensor; the shortest refresh period ever seen is 20 ms (V100).
_LOOK_S = 0.0005
_WATCH_S = 0.02
_FEWEST_CHANGES = 4
_STILL_S = 1.0  # a counter that has not moved for so long does not count

# NVML's clocks-event reasons by the cause of throttling; idle and application clocks do not count.
_LIMITS = {"power": 0x4 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x8, "other GPUs": 0x10}


Query: TypeAlias = "Callable[[], float]"


class Sensors:
    """One GPU's sensors, read through NVML as the probe reads them. Close it when done."""

    def __init__(self, device: Device) -> None:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.id)
        ask: dict[str, Callable[[], Any]] = {
            name: partial(query, handle) for name, query in QUERIES.items()
        }
        self.power_w: Query = ask["draw"]
        if device.facts.get("power_field") == "instant":
            self.power_w = lambda: QUERIES["instant"](ask["field"]()[0])
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
    """The value that NVML answers, or NaN if the query fails."""
    try:
        return query()
    except pynvml.NVMLError:
        return float("nan")


class Watch:
    """Reads clock, power, temperature and throttle reasons on its own thread, during a trial."""

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
        """Means over a span, by fields of `CalibratedRate`; absent where NVML has no value."""
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
    window_s, clock_hz = time.monotonic() - start_s, clock if np.isfinite(clock) else None
    return Idle(float(finite.mean()), low, high, window_s, by_counter, clock_hz)


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
        raise NotMeasurable(f"the sensor's value changed {len(changed)} times in {for_s:g} s")
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
    """Durations of the parts of a trial; rates are reported over `window_s`."""

    burst_s: float = 0.02  # a block of the sweep: shorter than a power limit takes to act
    bursts: int = 5
    finalists: int = 2  # best shapes of the sweep, which are measured for a whole window
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
    bursts=3, finalists=1, warmup_s=0.2, window_s=0.5, block_s=0.02, stream_warmup_s=0.05,
    stream_window_s=0.15, settle_s=0.3, idle_s=1.0, refresh_s=0.8, is_quick=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Work to repeat: a task and its amount."""

    work: Work
    amount: float
    unit: str
    of: str


def spans_s(work: Work, device: torch.device, *, repeats: int, blocks: int) -> list[float]:
    """Seconds of each of `blocks` consecutive blocks of `repeats` calls."""
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
    """Approximate seconds of one call, after a first call that loads its kernels."""
    work()
    return spans_s(work, device, repeats=1, blocks=1)[0]


def bursts(task: RepeatedWork, device: torch.device, pace: TrialDurations) -> list[float]:
    """Rates of a task over a few short blocks."""
    repeats = max(1, math.ceil(pace.burst_s / one_s(task.work, device)))
    spans = spans_s(task.work, device, repeats=repeats, blocks=pace.bursts)
    return [task.amount * repeats / span for span in spans]


def _blocks_for(
    seconds: float, work: Work, device: torch.device, *, repeats: int, at_least: int
) -> list[float]:
    """Run blocks for at least so many seconds; return the seconds of each block.

    As many as will be needed are queued at once: a GPU that waits for the host would cool.
    """
    spans = spans_s(work, device, repeats=repeats, blocks=at_least)
    while (left_s := seconds - sum(spans)) > 0:
        spans += spans_s(work, device, repeats=repeats, blocks=math.ceil(left_s / min(spans)))
    return spans


def sustained(
    task: RepeatedWork, device: torch.device, pace: TrialDurations, *, watch: Watch | None
) -> CalibratedRate:
    """Measure a task's rate over a window, after a warm-up."""
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
        unit=task.unit, median=median, low=low, high=high, blocks=blocks,
        window_s=float(spans.sum()), warmup_s=float(sum(warm)),
        drift_frac=float(spans[:half].mean() / spans[half:].mean() - 1),
        of=task.of, burst=best, burst_s=float(spans[rates.argmax()]), burst_of=task.of,
        **averages,
    )  # fmt: skip


# Memory bandwidth by copy, read and triad. What fits in a cache is many times as fast, so the data
# is at least four times the last-level caches together. (STREAM asks as much of each array, which
# takes three times the memory.) Bytes are counted as STREAM counts them,
# https://www.cs.virginia.edu/stream/ref.html: those that the program reads and writes. A CPU that
# fetches the line it will write moves more than that.


PATTERNS = ("copy", "read", "triad")
_CACHES = 4
_WANTED_BYTES = {"cpu": 384 << 20, "cuda": 6 << 30}
_LEAST_BYTES = 96 << 20  # below which launching it, and small caches unknown to us, would show
_FREE_SHARE = 4  # a quarter of what is free, so that other processes keep theirs
_FP32_BYTES = 4
_CPU_CACHES = Path("/sys/devices/system/cpu")


class MemoryStreams:
    """Measures memory bandwidth on a block of the device's memory, allocated once."""

    def __init__(self, device: torch.device, size_bytes: int | None = None) -> None:
        self._device = device
        self._size_bytes = size_bytes

    def bandwidth(
        self, pattern: str, pace: TrialDurations, *, watch: Watch | None = None
    ) -> CalibratedRate:
        """Bytes per second of one pattern, sustained for a window."""
        try:
            brief = replace(pace, warmup_s=pace.stream_warmup_s, window_s=pace.stream_window_s)
            return sustained(self.task(pattern), self._device, brief, watch=watch)
        except RuntimeError as error:
            raise NotMeasurable(f"torch refuses: {_first_line(error)}") from error

    def task(self, pattern: str) -> RepeatedWork:
        """One pass of a pattern through the whole block."""
        arrays = {"read": 1, "copy": 2, "triad": 3}[pattern]
        size = len(self._memory) // arrays
        a, b, c = (self._memory[i * size : (i + 1) * size] for i in (0, arrays // 2, arrays - 1))
        works: dict[str, Work] = {
            "read": a.sum,
            "copy": lambda: b.copy_(a),
            "triad": lambda: torch.add(a, c, alpha=3.0, out=b),
        }
        each_bytes = size * _FP32_BYTES
        of = f"{arrays}x{each_bytes / 2**20:.0f} MiB"
        return RepeatedWork(works[pattern], arrays * each_bytes, "B/s", of)

    @cached_property
    def _memory(self) -> torch.Tensor:
        """The block, filled with repeated random numbers: drawing every one takes seconds."""
        size = (self._size_bytes or _size_bytes(self._device)) // _FP32_BYTES
        block = torch.randn(min(size, 1 << 20), device=self._device)
        return block.repeat(size // len(block))


def _size_bytes(device: torch.device) -> int:
    """Bytes to stream. Raises NotMeasurable if too little memory is free to exceed the caches."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    else:
        free, cache = psutil.virtual_memory().available, last_level_bytes(_CPU_CACHES)
    least = max(_LEAST_BYTES, _CACHES * cache)
    size = min(max(_WANTED_BYTES[device.type], least), free // _FREE_SHARE)
    if size < least:
        raise NotMeasurable(
            f"{least / 2**20:.0f} MiB are needed to exceed {cache / 2**20:.0f} MiB of cache, and a"
            f" quarter of the free memory is {free / _FREE_SHARE / 2**20:.0f} MiB"
        )
    return size


def last_level_bytes(cpus: Path) -> int:
    """The last-level caches of all CPUs together, in bytes, from sysfs; 0 if unknown."""
    sizes: dict[tuple[int, str], int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index*"):
        try:
            level = int((cache / "level").read_text())
            shared = (cache / "shared_cpu_list").read_text().strip()
            size = re.fullmatch(r"(\d+)([KM]?)", (cache / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if size:
            sizes[level, shared] = int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


Shape = tuple[int, int, int]  # rows, columns and depth of the product

ON_CPU = ("fp32", "bf16")
ON_GPU = ("bf16", "fp16", "fp8", "int8", "tf32", "fp32")

_8B, _70B = (4096, 14336), (8192, 28672)  # width and hidden width of Llama 3
_GPU_SHAPES: tuple[Shape, ...] = (
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, _8B[1], _8B[0]),
    (8192, _8B[0], _8B[1]),
    (8192, _70B[1], _70B[0]),
    (8192, _70B[0], _70B[1]),
    (16384, 16384, 16384),
)
_CPU_SHAPES: tuple[Shape, ...] = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (1024, 2816, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
)
_LOAD: Shape = (8192, 8192, 8192)
_LOAD_S = 0.03  # queued at a time, well within a sensor's period
# What takes longer than this once would leave no room for a window of blocks.
_LONGEST_S = 0.25
# Bytes per element: of the inputs, of an input while it is made, and of the result.
_BYTES = {
    "fp32": (4, 4, 4), "tf32": (4, 4, 4), "bf16": (2, 2, 2), "fp16": (2, 2, 2),
    "fp8": (1, 2, 2), "int8": (1, 4, 4),
}  # fmt: skip
_FLOATS = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
_TF32_SINCE = (8, 0)  # compute capability


def achievable(
    dtype: str, device: torch.device, pace: TrialDurations, *, watch: Watch | None = None
) -> tuple[CalibratedRate, dict[str, float]]:
    """The best sustained rate in this type, and the burst rate of each shape.

    NotMeasurable, with torch's own reason, where the device does not multiply in this type.
    """
    if device.type == "cpu" and dtype != "fp32":
        _check_survival(dtype)
    if dtype == "tf32" and torch.cuda.get_device_capability(device) < _TF32_SINCE:
        raise NotMeasurable("no tf32 units before compute capability 8.0")
    with _precision("high" if dtype == "tf32" else "highest"):
        try:
            return _achievable(dtype, device, pace, watch)
        except torch.cuda.OutOfMemoryError as error:
            raise NotMeasurable(f"out of memory: {_first_line(error)}") from error
        except RuntimeError as error:
            raise NotMeasurable(f"torch refuses: {_first_line(error)}") from error


def _check_survival(dtype: str) -> None:
    """Try one small product in another process: an instruction that the CPU reports and a virtual
    machine forbids kills the process."""
    kind = str(_FLOATS[dtype])
    code = f"import torch; x = torch.ones(64, 64, dtype={kind}); x @ x"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        raise NotMeasurable(
            f"a product in {dtype} ends the process here ({name}), as a training in {dtype} would:"
            " the CPU reports instructions that it can't run; to leave out AMX, set"
            " ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
        )


@contextmanager
def load(device: torch.device) -> Iterator[None]:
    """Keeps the device busy from a thread."""
    free = _free_bytes(device)
    shape = next((s for s in (_LOAD, *_GPU_SHAPES) if _needed_bytes("fp16", s) < free), None)
    if shape is None:
        raise NotMeasurable(f"{device} has no memory to spare for a load")
    work = _product("fp16", shape, device)
    repeats = max(1, round(_LOAD_S / one_s(work, device)))
    done = threading.Event()

    def feed() -> None:
        with torch.cuda.device(device):
            while not done.is_set():
                spans_s(work, device, repeats=repeats, blocks=1)

    thread = threading.Thread(target=feed, name="ergmeter-load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        torch.cuda.empty_cache()


def _achievable(
    dtype: str, device: torch.device, pace: TrialDurations, watch: Watch | None
) -> tuple[CalibratedRate, dict[str, float]]:
    swept = dict(_swept(dtype, device, pace))
    ranked = sorted(swept, key=lambda shape: -_mean(swept[shape]))
    sustained_rates = []
    for shape in ranked[: pace.finalists]:
        task = _task(dtype, shape, device)
        sustained_rates.append(sustained(task, device, pace, watch=watch))
        torch.cuda.empty_cache()  # does nothing where there is no GPU
    best = max(sustained_rates, key=lambda rate: rate.value)
    briefest = max(swept, key=lambda shape: max(swept[shape]))
    if max(swept[briefest]) > best.burst:
        best = replace(
            best, burst=max(swept[briefest]), burst_s=pace.burst_s, burst_of=_spelled(briefest)
        )
    return best, {_spelled(shape): _mean(rates) for shape, rates in swept.items()}


def _swept(
    dtype: str, device: torch.device, pace: TrialDurations
) -> Iterator[tuple[Shape, list[float]]]:
    shapes = sorted(_CPU_SHAPES if device.type == "cpu" else _GPU_SHAPES, key=_flops)
    free = _free_bytes(device)
    fitting = [shape for shape in shapes if _needed_bytes(dtype, shape) < free]
    if not fitting:
        raise NotMeasurable(
            f"{device} has {free / 2**20:.0f} MiB to spare, and the smallest product in {dtype}"
            f" needs {_needed_bytes(dtype, shapes[0]) / 2**20:.0f} MiB: end what uses it"
        )
    per_s = math.inf
    for shape in fitting:
        if _flops(shape) / per_s > _LONGEST_S:
            return
        task = _task(dtype, shape, device)
        took_s = one_s(task.work, device)
        per_s = task.amount / took_s
        if took_s <= _LONGEST_S or shape == fitting[0]:
            yield shape, bursts(task, device, pace)
        torch.cuda.empty_cache()


def _task(dtype: str, shape: Shape, device: torch.device) -> RepeatedWork:
    unit = "FLOP/s" if dtype != "int8" else "op/s"
    return RepeatedWork(_product(dtype, shape, device), _flops(shape), unit, _spelled(shape))


def _product(dtype: str, shape: Shape, device: torch.device) -> Work:
    """Return a function that multiplies two matrices of normally distributed numbers."""
    rows, columns, depth = shape
    if dtype in _FLOATS:
        kind = _FLOATS[dtype]
        x = torch.randn(rows, depth, dtype=kind, device=device)
        weights = torch.randn(columns, depth, dtype=kind, device=device).t()
        out = torch.empty(rows, columns, dtype=kind, device=device)
        return lambda: torch.mm(x, weights, out=out)
    x, weights = _narrow(dtype, rows, depth, device), _narrow(dtype, columns, depth, device).t()
    if dtype == "int8":
        return lambda: torch._int_mm(x, weights)
    scale = torch.ones((), device=device)
    # Sums kept in the tensor cores' own precision: as forward passes in fp8 run, the faster way.
    return lambda: torch._scaled_mm(
        x, weights, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _narrow(dtype: str, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    if dtype == "fp8":
        wide = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        return wide.to(torch.float8_e4m3fn)
    wide = torch.randn(rows, columns, device=device)
    # Four standard deviations fit into a byte with its sign.
    return wide.mul_(32).round_().clamp_(-127, 127).to(torch.int8)


@contextmanager
def _precision(wanted: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _free_bytes(device: torch.device) -> int:
    """Free memory, less a tenth for others."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    return int(psutil.virtual_memory().available * 0.9)


def _needed_bytes(dtype: str, shape: Shape) -> int:
    rows, columns, depth = shape
    stored, making, out = _BYTES[dtype]
    both = rows * depth + columns * depth
    return both * stored + max(rows, columns) * depth * making + rows * columns * out


def _flops(shape: Shape) -> float:
    return 2.0 * math.prod(shape)


def _mean(rates: list[float]) -> float:
    """The mean rate of blocks of equal work: total work over total time."""
    return len(rates) / sum(1 / rate for rate in rates)


def _spelled(shape: Shape) -> str:
    return "x".join(str(side) for side in shape)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
