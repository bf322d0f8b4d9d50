"""Devices' columns over the window: the mean of a gauge, of a mean, the rate of a counter.

The trap: a probe that died in the first minute of an hour. A line drawn on from its last reading is
not a measurement, so readings must reach from one end of the window to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence.device_cache import cached_per_device
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device, TimeArray
    from ergmeter.runlog.segments import Series

ACCELERATORS = ("nvml", "amd", "neuron", "apple")  # the probes of some
_PROBES = {
    "gpu": ACCELERATORS,
    "node": ("node",),
    "process": ("process",),
    "allocator": ("allocator",),
}
_WORDS = {
    "gpu": "accelerator",
    "node": "node reading",
    "process": "process reading",
    "allocator": "allocator of a framework",
}
# What a window may stick out over the readings: some of their intervals, or this for a single one.
_INTERVALS = 2.5
_LEAST_S = 3.0


def sampled(evidence: Evidence, kind: str) -> list[Device]:
    """The devices of a kind. Raises NotMeasurable with what its probe said if there is none."""
    devices = evidence.devices(kind)
    if not devices:
        raise NotMeasurable(evidence.why_no_device(_WORDS[kind], *_PROBES[kind]))
    return devices


def readings(evidence: Evidence, column: str, device: Device) -> Series:
    """What a device said. Raises NotMeasurable if it never did."""
    series = evidence.series(column).get(device.id)
    if series is None:
        if device.kind == "process" and not _is_read(evidence, device):
            lasted = duration(evidence.watched.duration_s)
            raise NotMeasurable(f"{device.name} was not read once in a run of {lasted}")
        said = why_absent(device, column) or f"no reading has {column}"
        raise NotMeasurable(f"{device.name} [{device.id}]: {said}")
    return series


def _is_read(evidence: Evidence, device: Device) -> bool:
    """Whether a process was read while it ran. A reading has its CPU time at least."""
    return evidence.series("cpu_s").get(device.id) is not None


@cached_per_device
def highest_of(evidence: Evidence, column: str, device: Device) -> float:
    """The highest reading of a device's column, over the whole run."""
    return float(readings(evidence, column, device).values.max())


def why_absent(device: Device, column: str) -> str:
    """What a probe knew from the start: that a device has nothing to say in a column, and why."""
    absent = device.facts.get("absent") or {}
    return "; ".join(reason for reason, columns in absent.items() if column in columns)


def inside(evidence: Evidence, t_ns: TimeArray) -> Any:  # noqa: ANN401  a mask
    """Which readings lie in the window. Raises NotMeasurable if none does."""
    mask = evidence.span.contains(t_ns)
    if not mask.any():
        raise NotMeasurable("no reading in the window")
    return mask


@cached_per_device
def mean(evidence: Evidence, column: str, device: Device) -> float:
    """Mean over time of a gauge: each reading counts for the time it stands for."""
    series = readings(evidence, column, device)
    _check_reach(evidence, series.t_ns)
    window = evidence.span
    between = series.t_ns[(series.t_ns > window.start_ns) & (series.t_ns < window.end_ns)]
    edges = np.unique(np.concatenate((window.starts_ns, between, window.ends_ns)))
    levels = np.interp(edges, series.t_ns, series.values)
    inside_ns = np.diff(window.elapsed_ns(edges))  # 0 in a cut
    return float(inside_ns @ (levels[1:] + levels[:-1])) / 2 / float(inside_ns.sum())


@cached_per_device
def mean_activity(
    evidence: Evidence, column: str, device: Device, *, most: float
) -> tuple[float, float, float]:
    """Mean over time of what each reading says as a mean over a span: each counts for its span.

    Of a span that is only partly in the window, its mean counts for the part that is. How it was
    spread is not known: all of it may lie in that part, as far as a device can do (`most`), or in
    the rest. So the mean is given with the least and the most that it may be.
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
    """Where each span begins: as its reading says; else where the reading before was."""
    begins_ns = np.concatenate((t_ns[:1], t_ns[:-1]))
    spans = evidence.series("activity_s").get(device.id)
    if spans is not None:
        place = np.minimum(np.searchsorted(spans.t_ns, t_ns), len(spans.t_ns) - 1)
        told = spans.t_ns[place] == t_ns
        lengths_ns = np.round(spans.values[place] * NS_PER_S).astype(np.int64)
        begins_ns = np.where(told, t_ns - lengths_ns, begins_ns)
    return begins_ns


@cached_per_device
def rate(evidence: Evidence, column: str, device: Device) -> float:
    """How fast a counter grew: its growth over the time between the readings nearest the edges."""
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
