"""Samples of devices: loaded as needed, reduced to means and rates, results cached per device.

A thousand GPUs read ten times a second give 600 MB an hour for one column. So samples are loaded
writer by writer and freed when too many are in memory. Each metric reads them through a function of
one device, whose result is cached. A report visits the devices one by one and calls all of these
functions while the device's samples are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, cast

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.records import (
    Answer,
    Asked,
    Device,
    FloatArray,
    Missing,
    TimeArray,
    or_missing,
    present,
)
from ergmeter.runlog.segments import Series, joined
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.runlog.reader import Run


# Cached results.


def cached_result(
    compute: Callable[Concatenate[Evidence, Asked], Answer],
) -> Callable[Concatenate[Evidence, Asked], Answer]:
    """Decorator: cache a function's result, or its NotMeasurable, per evidence and arguments."""

    @wraps(compute)
    def cached(evidence: Evidence, /, *about: Asked.args, **further: Asked.kwargs) -> Answer:
        key = (compute, *map(_named, about), *further.items())
        if key not in evidence.results:  # the reason, as an error keeps its readings in memory
            evidence.results[key] = or_missing(compute, evidence, *about, **further)
        return present(cast("Answer | Missing", evidence.results[key]))

    return cached


BOUNDARY = "boundary"  # the devices whose energy counts as the run's, whatever their kind
device_questions: dict[str, list[Callable[[Evidence, Device], object]]] = {}


def cached_for_kinds(
    *kinds: str,
) -> Callable[[Callable[[Evidence, Device], Answer]], Callable[[Evidence, Device], Answer]]:
    """Decorator: cache a function of a device; `visit` calls it for devices of these kinds."""

    def registered(
        compute: Callable[[Evidence, Device], Answer],
    ) -> Callable[[Evidence, Device], Answer]:
        cached = cached_result(compute)
        for kind in kinds:
            device_questions.setdefault(kind, []).append(cached)
        return cached

    return registered


def prefetch(
    compute: Callable[[Evidence, str, Device], object], *columns: str, of: tuple[str, ...]
) -> None:
    """Register a cached function of a column: `visit` calls it for devices of kinds `of`."""
    for kind in of:
        device_questions.setdefault(kind, []).extend(_about(compute, column) for column in columns)


def _about(
    compute: Callable[[Evidence, str, Device], object], column: str
) -> Callable[[Evidence, Device], object]:
    return lambda evidence, device: compute(evidence, column, device)


def visit(evidence: Evidence, device: Device, *, is_in_boundary: bool) -> None:
    """Call all functions registered for a device, while its samples are in memory."""
    for kind in (device.kind, BOUNDARY) if is_in_boundary else (device.kind,):
        for ask in device_questions.get(kind, ()):
            with suppress(Exception):  # a plugin may fail; the metric that calls it says why
                ask(evidence, device)


def _named(argument: object) -> object:
    return argument.id if isinstance(argument, Device) else argument


# Columns of a device over the window. Readings must span the window: those of a probe that failed
# in the first minute do not cover the next hour.

ACCELERATORS = ("nvml", "amd", "neuron", "apple")  # probes that read accelerators
CPUS = ("rapl", "grace", "apple")
# For each kind of device: its name in messages, and the probes that read it.
_SAMPLED = {
    "gpu": ("accelerator", ACCELERATORS),
    "cpu": ("CPU energy counter", CPUS),
    "dram": ("DRAM energy counter", ("rapl", "apple")),
    "module": ("meter of a module or a machine", ("grace", "apple")),
    "node": ("node reading", ("node",)),
    "process": ("process reading", ("process",)),
    "allocator": ("allocator of a framework", ("allocator",)),
}
# The window may begin before the first reading, and end after the last, by this many reading
# intervals or this many seconds, whichever is more.
_INTERVALS = 2.5
_LEAST_S = 3.0


def sampled(evidence: Evidence, kind: str) -> list[Device]:
    """The devices of a kind. Raises NotMeasurable with the probe's reason if there is none."""
    devices = evidence.devices(kind)
    if not devices:
        what, probes = _SAMPLED[kind]
        raise NotMeasurable(evidence.why_no_device(what, *probes))
    return devices


def readings(evidence: Evidence, column: str, device: Device) -> Series:
    """The readings of a device's column. Raises NotMeasurable if there are none."""
    series = evidence.series(column).get(device.id)
    if series is None:
        # Every process that was read has CPU time.
        if device.kind == "process" and evidence.series("cpu_s").get(device.id) is None:
            lasted = duration(evidence.watched.duration_s)
            raise NotMeasurable(f"{device.name} was not read once in a run of {lasted}")
        reason = why_absent(device, column) or f"no reading has {column}"
        raise NotMeasurable(f"{device.name} [{device.id}]: {reason}")
    return series


@cached_result
def highest_of(evidence: Evidence, column: str, device: Device) -> float:
    """The highest reading of a column of a device in the whole run."""
    return float(readings(evidence, column, device).values.max())


def why_absent(device: Device, column: str) -> str:
    """Why a device does not report a column, as its probe recorded; "" if unknown."""
    absent = device.facts.get("absent") or {}
    return "; ".join(reason for reason, columns in absent.items() if column in columns)


def inside(evidence: Evidence, t_ns: TimeArray) -> Any:  # noqa: ANN401  a mask
    """A mask of the readings in the window. Raises NotMeasurable if there are none."""
    mask = evidence.span.contains(t_ns)
    if not mask.any():
        raise NotMeasurable("no reading in the window")
    return mask


def window_values(evidence: Evidence, column: str, device: Device) -> FloatArray:
    """The values of a device's column in the window. Raises NotMeasurable if there are none."""
    series = readings(evidence, column, device)
    values: FloatArray = series.values[inside(evidence, series.t_ns)]
    return values


def mean_over(values: Sequence[float]) -> tuple[float, str]:
    """Return the mean over devices, and "mean over N devices; " for a note if there are several."""
    each = f"mean over {len(values)} devices; " if len(values) > 1 else ""
    return sum(values) / len(values), each


def throttled_share(evidence: Evidence, device: Device, mask: int) -> float:
    """The share of a device's readings in which it was throttled for a reason in `mask`."""
    bits = window_values(evidence, "throttled", device).astype(np.int64)
    return float(((bits & mask) != 0).mean())


@cached_result
def mean(evidence: Evidence, column: str, device: Device) -> float:
    """Time-weighted mean of a gauge over the window, with straight lines between readings."""
    series = readings(evidence, column, device)
    _check_reach(evidence, series.t_ns)
    window = evidence.span
    between = series.t_ns[(series.t_ns > window.start_ns) & (series.t_ns < window.end_ns)]
    edges = np.unique(np.concatenate((window.starts_ns, between, window.ends_ns)))
    levels = np.interp(edges, series.t_ns, series.values)
    inside_ns = np.diff(window.elapsed_ns(edges))  # 0 in a cut
    return float((inside_ns * (levels[1:] + levels[:-1])).sum()) / 2 / float(inside_ns.sum())


@cached_result
def mean_activity(
    evidence: Evidence, column: str, device: Device, *, most: float
) -> tuple[float, float, float]:
    """Return the mean of readings that are themselves means over a span, and its bounds.

    Readings are weighted by their span. If a span is only partly in the window, its mean counts for
    the part inside. All of its activity, up to the maximum `most`, may lie inside or outside, which
    gives the lower and the upper bound.
    """
    series = readings(evidence, column, device)
    begins_ns = begins_ns_of(evidence, device, series.t_ns)
    _check_reach(evidence, np.append(begins_ns[:1], series.t_ns))
    window = evidence.span
    inside_ns = window.elapsed_ns(series.t_ns) - window.elapsed_ns(begins_ns)
    own = inside_ns > 0
    if not own.any():
        raise NotMeasurable("no reading in the window")
    values, inside = series.values[own], inside_ns[own].astype(np.float64)
    outside = (series.t_ns - begins_ns)[own] - inside
    likely, least, highest = values * inside, values * inside, values * inside
    edge = outside > 0
    done = (values * (inside + outside))[edge]
    least[edge] = np.maximum(0.0, done - most * outside[edge])
    highest[edge] = np.minimum(most * inside[edge], done)
    value, low, high = (float(part.sum() / inside.sum()) for part in (likely, least, highest))
    return value, min(low, value), max(high, value)


def begins_ns_of(evidence: Evidence, device: Device, t_ns: TimeArray) -> TimeArray:
    """The start of the span that each reading is a mean of: as recorded, else the last reading."""
    begins_ns = np.concatenate((t_ns[:1], t_ns[:-1]))
    spans = evidence.series("activity_s").get(device.id)
    if spans is not None:
        nearest = np.minimum(np.searchsorted(spans.t_ns, t_ns), len(spans.t_ns) - 1)
        has_span = spans.t_ns[nearest] == t_ns
        lengths_ns = np.round(spans.values[nearest] * NS_PER_S).astype(np.int64)
        begins_ns = np.where(has_span, t_ns - lengths_ns, begins_ns)
    return begins_ns


@cached_result
def rate(evidence: Evidence, column: str, device: Device) -> float:
    """A counter's growth per second of the window, interpolated at the window's edges."""
    series = readings(evidence, column, device)
    _check_reach(evidence, series.t_ns)
    starts, ends = (
        np.clip(edge, series.t_ns[0], series.t_ns[-1])
        for edge in (evidence.span.starts_ns, evidence.span.ends_ns)
    )
    if not (ends > starts).any():
        raise NotMeasurable(
            f"too few readings of {device.name} [{device.id}] in a window of"
            f" {duration(evidence.span.duration_s)}: let the run last some seconds"
        )
    before, after = (np.interp(edge, series.t_ns, series.values) for edge in (starts, ends))
    return float((after - before).sum()) / (float((ends - starts).sum()) / NS_PER_S)


def _check_reach(evidence: Evidence, t_ns: TimeArray) -> None:
    interval_ns = float(np.median(np.diff(t_ns))) if len(t_ns) > 1 else 0.0
    slack_ns = max(_INTERVALS * interval_ns, _LEAST_S * NS_PER_S)
    late_s = (int(t_ns[0]) - evidence.span.start_ns) / NS_PER_S
    early_s = (evidence.span.end_ns - int(t_ns[-1])) / NS_PER_S
    if late_s * NS_PER_S > slack_ns:
        raise NotMeasurable(f"readings begin {late_s:.1f} s after the window does")
    if early_s * NS_PER_S > slack_ns:
        raise NotMeasurable(f"readings end {early_s:.1f} s before the window does")


# Loading and freeing of samples.

# Readings in memory, of 16 bytes each: a run of one node and some hours fits as a whole.
MAX_READINGS = 4_000_000


class SampleColumns:
    """Loads the columns of a run's writers, and frees the largest when there are too many."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loaded_columns: dict[tuple[int, str], dict[str, Series]] = {}
        self._readings = 0  # in memory
        self._loaded: set[tuple[int, str]] = set()  # ever loaded, also if freed since
        self._names: dict[int, set[str]] = {}  # the columns that each writer has
        self._writers: dict[str, list[int]] = {}
        for number, writer in enumerate(run.writers):
            for device in writer.devices:
                if number not in self._writers.setdefault(device.id, []):
                    self._writers[device.id].append(number)

    def devices(self) -> Iterator[str]:
        """All device ids; those of one writer are adjacent."""
        return iter(self._writers)

    def of(self, device: str, column: str) -> Series | None:
        """A device's column, joined over its writers; None if there is none."""
        streams = (self._said_by(number, column) for number in self._writers.get(device, ()))
        parts = [by_device[device] for by_device in streams if device in by_device]
        if len(parts) == 1:
            return parts[0]
        return joined(parts) if parts else None

    def _said_by(self, number: int, column: str) -> dict[str, Series]:
        if (number, column) in self._loaded_columns:
            return self._loaded_columns[number, column]
        if number not in self._names:
            self._names[number] = self._run.has_said(number)
        if column not in self._names[number]:
            return {}
        # First with all columns of the same files; a column that was freed is then loaded alone.
        by_column = self._run.said_by(number, column, alone=(number, column) in self._loaded)
        for name, by_device in by_column.items():
            if (number, name) not in self._loaded_columns:
                self._loaded_columns[number, name] = by_device
                self._readings += _size(by_device)
                self._loaded.add((number, name))
        self._let_go(but=number)
        return by_column[column]

    def _let_go(self, *, but: int) -> None:
        """Frees the largest columns if there are too many, except those of the writer in use."""
        if self._readings <= MAX_READINGS:
            return
        others = [key for key in self._loaded_columns if key[0] != but]
        for key in sorted(others, key=lambda key: -_size(self._loaded_columns[key])):
            if self._readings > MAX_READINGS // 2:  # not at the limit: sorting takes its time
                self._readings -= _size(self._loaded_columns.pop(key))


class Column(Mapping[str, Series]):
    """One column as a mapping from device id to series; devices without readings are left out."""

    def __init__(self, columns: SampleColumns, name: str) -> None:
        self._columns = columns
        self._name = name

    def __getitem__(self, device: str) -> Series:
        series = self._columns.of(device, self._name)
        if series is None:
            raise KeyError(device)
        return series

    def __iter__(self) -> Iterator[str]:
        devices = self._columns.devices()
        return (device for device in devices if self._columns.of(device, self._name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _size(by_device: dict[str, Series]) -> int:
    """The number of readings in a column of one writer, plus 1."""
    return 1 + sum(len(series.t_ns) for series in by_device.values())
