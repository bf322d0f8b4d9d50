"""Devices' columns over the window: the mean of a gauge, the rate of a counter.

The trap: a probe that died in the first minute of an hour. A line drawn on from its last reading is
not a measurement, so readings must reach from one end of the window to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.records import Device, TimeArray
    from ergmeter.runlog.reader import Series

_PROBES = {"gpu": "nvml", "node": "node", "process": "process", "allocator": "allocator"}
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
        raise NotMeasurable(evidence.why_no_device(_WORDS[kind], _PROBES[kind]))
    return devices


def readings(evidence: Evidence, column: str, device: Device) -> Series:
    """What a device said. Raises NotMeasurable if it never did."""
    series = evidence.series(column).get(device.id)
    if series is None:
        if device.kind == "process":  # of which every reading says all
            lasted = duration(evidence.watched.duration_s)
            raise NotMeasurable(f"{device.name} was not read once in a run of {lasted}")
        raise NotMeasurable(f"no reading of {device.name} [{device.id}] says it")
    return series


def inside(evidence: Evidence, t_ns: TimeArray) -> Any:  # noqa: ANN401  a mask
    """Which readings lie in the window. Raises NotMeasurable if none does."""
    mask = (t_ns >= evidence.span.start_ns) & (t_ns <= evidence.span.end_ns)
    if not mask.any():
        raise NotMeasurable("no reading in the window")
    return mask


def mean(evidence: Evidence, column: str, device: Device) -> float:
    """Mean over time of a gauge: each reading counts for the time it stands for."""
    series = readings(evidence, column, device)
    _check_reach(evidence, series.t_ns)
    window = evidence.span
    between = (series.t_ns > window.start_ns) & (series.t_ns < window.end_ns)
    edges = np.concatenate(([window.start_ns], series.t_ns[between], [window.end_ns]))
    levels = np.interp(edges, series.t_ns, series.values)
    return float(np.trapezoid(levels, edges)) / (window.end_ns - window.start_ns)


def rate(evidence: Evidence, column: str, device: Device) -> float:
    """How fast a counter grew: its growth over the time between the readings nearest the edges."""
    series = readings(evidence, column, device)
    _check_reach(evidence, series.t_ns)
    start_ns = max(evidence.span.start_ns, int(series.t_ns[0]))
    end_ns = min(evidence.span.end_ns, int(series.t_ns[-1]))
    if end_ns <= start_ns:
        raise NotMeasurable(
            f"too few readings of {device.name} [{device.id}] in a window of"
            f" {duration(evidence.span.duration_s)}: let the run last some seconds"
        )
    start, end = np.interp((start_ns, end_ns), series.t_ns, series.values)
    return float(end - start) / ((end_ns - start_ns) / NS_PER_S)


def _check_reach(evidence: Evidence, t_ns: TimeArray) -> None:
    interval_ns = float(np.median(np.diff(t_ns))) if len(t_ns) > 1 else 0.0
    slack_ns = max(_INTERVALS * interval_ns, _LEAST_S * NS_PER_S)
    late_s = (int(t_ns[0]) - evidence.span.start_ns) / NS_PER_S
    early_s = (evidence.span.end_ns - int(t_ns[-1])) / NS_PER_S
    if late_s * NS_PER_S > slack_ns:
        raise NotMeasurable(f"readings begin {late_s:.1f} s after the window does")
    if early_s * NS_PER_S > slack_ns:
        raise NotMeasurable(f"readings end {early_s:.1f} s before the window does")
