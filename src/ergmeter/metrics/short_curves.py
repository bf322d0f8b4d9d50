"""Curves of a run in few values, for a terminal: losses, device memory and phases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.metrics.evidence.steps import read_steps
from ergmeter.records import PHASES
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.records import Device, FloatArray
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.segments import Series

_OTHER_LOSS = re.compile("eval|val|test|load_balancing|aux|z_")


def levels(values: Sequence[float], parts: int) -> list[float]:
    """The means of at most so many equal parts: 0 is the lowest of them, 1 the highest."""
    numbers = np.asarray(values)
    edges = np.linspace(0, len(numbers), min(parts, len(numbers)) + 1).astype(int)
    means = np.array([numbers[a:b].mean() for a, b in pairwise(edges)])
    low, high = float(means.min()), float(means.max())
    scaled = (means - low) / (high - low) if high > low else np.zeros(len(means))
    return [float(level) for level in scaled]


def losses(run: Run) -> tuple[list[float], bool]:
    """The training losses in order, of the first rank that has them; True if as printed."""
    steps, is_log = read_steps(run), "imported" in run.header
    is_printed = False
    # Without losses in the steps, use printed ones.
    if not any(np.isfinite(lane["loss"]).any() for lane in steps.lanes):
        is_printed = bool(len(steps))
        steps, is_log = read_steps(run, "output"), True
    train = steps.where_each(lambda lane: lane["phase"] == PHASES.index("train"))
    start_ns = train.lowest("start_ns") if len(train) else None
    first = _before_steps(run, start_ns) if is_log else []
    recorded = train.where_each(lambda lane: np.isfinite(lane["loss"]))
    if len(recorded):
        rank = min(lane["rank"].min() for lane in recorded.lanes)
        recorded = recorded.where_each(lambda lane: lane["rank"] == rank)
    values = np.concatenate([first, recorded["loss"][np.argsort(recorded["start_ns"])]])
    return [float(loss) for loss in values[np.isfinite(values)]], is_printed


def _before_steps(run: Run, start_ns: int | None) -> list[float]:
    """The loss printed at the start of the first step.

    In a log without times: all losses under the first loss name.
    """
    if start_ns is None and "imported" not in run.header:
        return []
    reported = [
        figure
        for figure in run.reported()
        if figure.name.endswith("loss") and not figure.unit and not _OTHER_LOSS.match(figure.name)
    ]
    if start_ns is not None:
        return [figure.value for figure in reported if figure.t_ns == start_ns][:1]
    return [figure.value for figure in reported if figure.name == reported[0].name]


# Device memory. Columns of each kind of device, in order, with their owner.
_ROWS = {
    "gpu": {"memory_bytes": "in use by all", "process_bytes": "the program's"},
    "allocator": {"reserved_bytes": "reserved", "allocated_bytes": "in tensors"},
    "process": {"memory_bytes": "resident"},
}
# Readings may miss a peak between them. Where a high-water mark exists, it is the card's peak.
_MARKS = {
    ("process", "memory_bytes"): "memory_peak_bytes",
    ("allocator", "allocated_bytes"): "allocated_peak_bytes",
}
# The phases of an interval, the most important first.
INTERVAL_PHASES = ("checkpoint", "eval", "train", "prefill", "decode")


@dataclass(frozen=True)
class MemoryCurve:
    """A memory column of a device: the highest reading of each interval, None without one."""

    device: Device
    owner: str
    highest_bytes: list[float | None]
    peak_bytes: float
    mark_bytes: float  # the high-water mark, 0 without one
    capacity_bytes: float | None


@dataclass(frozen=True)
class MemoryCurves:
    """Memory over a run in equal intervals, with the most important phase of each."""

    span_s: float
    curves: list[MemoryCurve]
    phases: list[str]


def memory_curves(run: Run, *, fewest: int, most: int) -> MemoryCurves | None:
    """Device memory over a run, in no more intervals than readings; None without readings."""
    columns = {column: run.series(column) for own in _ROWS.values() for column in own}
    devices = [device for device in run.devices.values() if device.kind in _ROWS]
    order = list(_ROWS)
    rows = [
        (device, column, owner, columns[column][device.id])
        for device in sorted(devices, key=lambda device: order.index(device.kind))
        for column, owner in _ROWS[device.kind].items()
        if device.id in columns[column]
    ]
    if not rows:
        return None
    cells = max(fewest, min(most, *(len(series.t_ns) for *_, series in rows)))
    start_ns = min(int(series.t_ns[0]) for *_, series in rows)
    end_ns = max(int(series.t_ns[-1]) for *_, series in rows) + 1
    edges_ns = np.linspace(start_ns, end_ns, cells + 1)
    curves = [
        MemoryCurve(
            device,
            owner,
            _highest(series, edges_ns),
            float(series.values.max()),
            _mark_bytes(run, device, column),
            _capacity_bytes(run, device),
        )
        for device, column, owner, series in rows
    ]
    return MemoryCurves((end_ns - start_ns) / NS_PER_S, curves, _phases(run, edges_ns))


def _mark_bytes(run: Run, device: Device, column: str) -> float:
    mark = _MARKS.get((device.kind, column))
    series = run.series(mark).get(device.id) if mark else None
    return 0.0 if series is None else float(series.values.max())


def _capacity_bytes(run: Run, device: Device) -> float | None:
    """The device's own capacity, or that of an allocator's device."""
    under = run.devices.get(str(device.facts.get("uuid")), device)
    total = under.facts.get("memory_total_bytes")
    return float(total) if total else None


def _highest(series: Series, edges_ns: FloatArray) -> list[float | None]:
    cells = len(edges_ns) - 1
    places = np.clip(np.searchsorted(edges_ns, series.t_ns, side="right") - 1, 0, cells - 1)
    highest = np.full(cells, -1.0)
    np.maximum.at(highest, places, series.values)
    return [None if peak < 0 else float(peak) for peak in highest]


def _phases(run: Run, edges_ns: FloatArray) -> list[str]:
    steps = read_steps(run).longest
    phases = [""] * (len(edges_ns) - 1)
    if not len(steps):
        return phases
    for phase in reversed(INTERVAL_PHASES):
        own = steps["phase"] == PHASES.index(phase)
        starts, ends = np.sort(steps["start_ns"][own]), np.sort(steps["end_ns"][own])
        # More phases began before a cell's end than ended before its start: one is active in it.
        begun = np.searchsorted(starts, edges_ns[1:], side="left")
        over = np.searchsorted(ends, edges_ns[:-1], side="right")
        for cell in np.flatnonzero(begun > over):
            phases[cell] = phase
    return phases
