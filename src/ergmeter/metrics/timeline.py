"""Readings over time in a bounded number of points, for charts and for the terminal.

A long series is cut into equal spans of time, and the lowest and highest reading of each are kept.
Every point is a reading, and no spike is lost, as it would be in a mean over each pixel. A gap in
the readings is a break in the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.device_energy import curve_of
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.steps import read_steps
from ergmeter.metrics.phases import Spans, merged, spans_of
from ergmeter.records import PHASES, Device, FloatArray, TimeArray, or_none
from ergmeter.runlog.reader import Run
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S

POINTS = 1000
# As in `erg check`: a gap is longer than both limits.
_GAP_S = 1.0
_GAP_INTERVALS = 10
_OTHER_LOSS = re.compile("eval|val|test|load_balancing|aux|z_")
_NO_SERIES = Series(np.empty(0, dtype=np.int64), np.empty(0))


@dataclass(frozen=True)
class BoundedSeries:
    """Readings over time in a bounded number of points. A NaN is a break in the line."""

    t_s: FloatArray  # since the run began
    values: FloatArray
    readings: int  # before bounding
    unbroken: int = 0  # gaps drawn without a break, as there are too many
    is_printed: bool = False  # from the program's output, as no step has it

    @property
    def is_bounded(self) -> bool:
        """True if some readings were left out."""
        return self.readings > int(np.isfinite(self.values).sum())

    @property
    def lowest(self) -> tuple[float, float]:
        """The lowest reading and its time in seconds."""
        index = int(np.nanargmin(self.values))
        return float(self.values[index]), float(self.t_s[index])

    @property
    def highest(self) -> tuple[float, float]:
        """The highest reading and its time in seconds."""
        index = int(np.nanargmax(self.values))
        return float(self.values[index]), float(self.t_s[index])

    def within(self, start_s: float, end_s: float) -> BoundedSeries:
        """The points with times from `start_s` to `end_s`."""
        inside = (self.t_s >= start_s) & (self.t_s <= end_s)
        return replace(self, t_s=self.t_s[inside], values=self.values[inside])


@dataclass(frozen=True)
class PhaseSpans:
    """The spans of a phase. Spans closer than a point are merged: `counts` into each."""

    phase: str
    start_s: FloatArray
    end_s: FloatArray
    counts: TimeArray

    @property
    def total(self) -> int:
        """The number of spans before merging."""
        return int(self.counts.sum())

    @property
    def first_s(self) -> float:
        """The start of the first span."""
        return float(self.start_s.min())

    @property
    def last_s(self) -> float:
        """The end of the last span."""
        return float(self.end_s.max())


def bounded_series(series: Series, *, zero_ns: int, points: int = POINTS) -> BoundedSeries:
    """Return a series in at most `points` points: extremes of equal spans of time, and breaks."""
    t_ns, values = series.t_ns, series.values
    finite = np.isfinite(values)
    if not finite.all():
        t_ns, values = t_ns[finite], values[finite]
    total = len(t_ns)
    gap_ns = longest_ns(t_ns)
    breaks = np.flatnonzero(np.diff(t_ns) > gap_ns) if total > 1 else np.array([], dtype=np.int64)
    gaps = len(breaks)
    if total > points:
        breaks = _thinned(breaks, points // 8)
        indices = _extremes(t_ns, values, points - 3 * len(breaks))
        # The readings around a break are kept too.
        indices = np.union1d(indices, np.concatenate([breaks, breaks + 1]))
    else:
        indices = np.arange(total)
    t_s, points_y = (t_ns[indices] - zero_ns) / NS_PER_S, values[indices].astype(np.float64)
    if len(breaks):
        places = np.searchsorted(indices, breaks) + 1
        middle_s = ((t_ns[breaks] + t_ns[breaks + 1]) / 2 - zero_ns) / NS_PER_S
        t_s, points_y = np.insert(t_s, places, middle_s), np.insert(points_y, places, np.nan)
    return BoundedSeries(t_s, points_y, total, gaps - len(breaks))


def longest_ns(t_ns: TimeArray) -> float:
    """The longest time between two readings that is not a gap."""
    if len(t_ns) < 3:
        return float("inf")
    return max(_GAP_S * NS_PER_S, _GAP_INTERVALS * float(np.median(np.diff(t_ns))))


def _thinned(breaks: TimeArray, most: int) -> TimeArray:
    """At most `most` breaks, evenly chosen: a device read once an hour has only breaks."""
    if len(breaks) <= most:
        return breaks
    return breaks[np.linspace(0, len(breaks) - 1, most).astype(np.int64)]


def _extremes(t_ns: TimeArray, values: FloatArray, points: int) -> TimeArray:
    """Indices of the first, the last, and each span's lowest and highest reading."""
    edges_ns = np.linspace(int(t_ns[0]), int(t_ns[-1]) + 1, max(1, points // 2 - 1) + 1)
    edges = np.searchsorted(t_ns, edges_ns)
    edges[0], edges[-1] = 0, len(t_ns)
    indices = [0, len(t_ns) - 1]
    for start, end in pairwise(edges.tolist()):
        if end > start:
            part = values[start:end]
            indices += [start + int(part.argmin()), start + int(part.argmax())]
    return np.unique(np.array(indices, dtype=np.int64))


def rate(counter: Series) -> Series:
    """A counter's growth per second at the end of each interval; resets are left out."""
    between_s = np.diff(counter.t_ns) / NS_PER_S
    grown = np.diff(counter.values)
    is_growth = (between_s > 0) & (grown >= 0)
    return Series(counter.t_ns[1:][is_growth], grown[is_growth] / between_s[is_growth])


def line_of(
    evidence: Evidence,
    device: Device,
    column: str,
    *,
    points: int = POINTS,
    is_counter: bool,
    since: str = "",
) -> BoundedSeries | None:
    """One device's column over the whole run; None if it has no readings.

    `since`: for a column of means since the previous reading, another column of the same device
    whose first reading gives the start of the first mean.
    """
    column_series = evidence.series(column).get(device.id)
    series = rate(column_series) if column_series is not None and is_counter else column_series
    if column_series is None or series is None or not np.isfinite(series.values).any():
        return None
    start = evidence.series(since).get(device.id) if since else None
    begin = column_series if is_counter else start
    line = bounded_series(series, zero_ns=zero_ns(evidence), points=points - (begin is not None))
    if begin is None:
        return line
    # A value over an interval starts at the previous reading. For the first value that is known
    # only if the device was read exactly once before.
    first_s = (int(begin.t_ns[0]) - zero_ns(evidence)) / NS_PER_S
    is_known = is_counter or int((begin.t_ns < series.t_ns[0]).sum()) == 1
    if not is_known:
        return line
    t_s, values = np.append(first_s, line.t_s), np.append(line.values[0], line.values)
    return replace(line, t_s=t_s, values=values)


def part_of_line(
    evidence: Evidence,
    device: Device,
    column: str,
    *,
    span_s: tuple[float, float],
    points: int,
    is_counter: bool,
) -> BoundedSeries:
    """One device's column between two times, bounded within them; a counter's growth per second."""
    series = evidence.series(column)[device.id]
    series = rate(series) if is_counter else series
    start_ns = zero_ns(evidence)
    first, last = series.t_ns.searchsorted([start_ns + end_s * NS_PER_S for end_s in span_s])
    part = Series(series.t_ns[first:last], series.values[first:last])
    return bounded_series(part, zero_ns=start_ns, points=points)


def power_line(evidence: Evidence, device: Device, *, points: int = POINTS) -> BoundedSeries | None:
    """A device's power; from its energy counter if it has no power readings."""
    line = line_of(evidence, device, "power_w", points=points, is_counter=False)
    return line or line_of(evidence, device, "energy_j", points=points, is_counter=True)


def energy_line(evidence: Evidence, device: Device, *, points: int = POINTS) -> BoundedSeries:
    """Joules of a device since its first reading. NotMeasurable if there are none."""
    curve, _ = curve_of(evidence, device)
    inside = curve.t_ns >= zero_ns(evidence)
    series = Series(curve.t_ns[inside], curve.joules[inside] - curve.joules[inside][:1])
    return bounded_series(series, zero_ns=zero_ns(evidence), points=points)


def zero_ns(evidence: Evidence) -> int:
    """The zero of the time axis: the start of the run."""
    return evidence.watched.start_ns


def seconds(evidence: Evidence, t_ns: int) -> float:
    """A time in seconds on the time axis."""
    return (t_ns - zero_ns(evidence)) / NS_PER_S


def counted_s(evidence: Evidence) -> tuple[float, float]:
    """Start and end of the counted window on the time axis."""
    span = evidence.span
    return seconds(evidence, span.start_ns), seconds(evidence, span.end_ns)


def uncounted_s(evidence: Evidence) -> list[tuple[float, float]]:
    """The times before and after the counted window, each as (start, end) on the time axis."""
    whole_s = evidence.watched.duration_s
    start_s, end_s = or_none(counted_s, evidence) or (whole_s, whole_s)  # all of it is warm-up
    return [
        (low_s, high_s) for low_s, high_s in ((0.0, start_s), (end_s, whole_s)) if high_s > low_s
    ]


def phase_spans(evidence: Evidence) -> list[PhaseSpans]:
    """The spans of each phase, taken from the rank with the most; empty if there are none."""
    if not len(evidence.all_steps):
        return []
    life = evidence.watched
    width_ns = (life.end_ns - life.start_ns) // POINTS
    return [
        _shown_spans(phase, spans_of(evidence, phase), life.start_ns, width_ns)
        for phase in PHASES
        if len(spans_of(evidence, phase)[0])
    ]


def _shown_spans(phase: str, spans: Spans, start_ns: int, width_ns: int) -> PhaseSpans:
    starts, ends = spans
    # A small number of spans is not merged, even where they touch.
    begin, end = starts, ends
    if len(starts) > POINTS // 4:
        begin, end = merged(starts, ends + width_ns)
        end = end - width_ns
    counts = np.maximum(np.diff(np.searchsorted(np.sort(starts), (begin, end)), axis=0)[0], 1)
    begin_s, end_s = ((edge - start_ns) / NS_PER_S for edge in (begin, end))
    return PhaseSpans(phase, begin_s, end_s, counts)


def step_line(evidence: Evidence, *, points: int = POINTS) -> BoundedSeries:
    """Step times of the rank with the most steps, warm-up included, at the end of each step."""
    return _unbroken(evidence, step_series(evidence), points)


def _unbroken(evidence: Evidence, series: Series, points: int) -> BoundedSeries:
    """A bounded series drawn without breaks, as time between steps is not a gap in readings."""
    line = bounded_series(series, zero_ns=zero_ns(evidence), points=points)
    is_reading = np.isfinite(line.values)
    return replace(line, t_s=line.t_s[is_reading], values=line.values[is_reading])


def step_series(evidence: Evidence) -> Series:
    """All step times of the rank with the most steps, at the end of each step."""
    lane = evidence.work.longest
    if not evidence.trains:
        raise NotMeasurable("an inference run has requests and no steps: see its latencies")
    steps = np.maximum(lane.step_counts, 1.0)
    return Series(lane["end_ns"].astype(np.int64), evidence.all_periods_s(lane) / steps)


def loss_line(evidence: Evidence, *, points: int = POINTS) -> BoundedSeries:
    """Losses of the rank with the most steps, or as printed if no step has one.

    NotMeasurable if there is none.
    """
    series, is_printed = loss_series(evidence)
    return replace(_unbroken(evidence, series, points), is_printed=is_printed)


def loss_series(evidence: Evidence) -> tuple[Series, bool]:
    """Return all losses, and True if they were read from the program's output."""
    # With pipeline parallelism only the last stage has a loss.
    lanes = (evidence.work.longest, *evidence.work.lanes)
    lane = next((lane for lane in lanes if np.isfinite(lane["loss"]).any()), lanes[0])
    is_printed = False
    if not np.isfinite(lane["loss"]).any() and not evidence.from_output:
        lane, is_printed = evidence.printed, True
    has_loss = np.isfinite(lane["loss"])
    t_ns, losses = lane["end_ns"][has_loss].astype(np.int64), lane["loss"][has_loss]
    if is_printed or evidence.from_output:
        beside = evidence.losses_beside_steps
        t_ns = np.append(t_ns, beside.t_ns)
        order = np.argsort(t_ns, kind="stable")
        t_ns, losses = t_ns[order], np.append(losses, beside.values)[order]
    if not len(t_ns):
        raise NotMeasurable("no step has a loss: set step.loss, or print loss=..")
    return Series(t_ns, losses), is_printed


def losses(evidence: Evidence) -> tuple[list[float], bool]:
    """Return all losses in order, and True if they were read from the program's output.

    The losses of a log without steps count too.
    """
    if evidence.has_work:
        series, is_printed = or_none(loss_series, evidence) or (_NO_SERIES, False)
        return series.values.tolist(), is_printed
    printed = [
        reported
        for reported in evidence.run.reported()
        if reported.name.endswith("loss") and not reported.unit
        if evidence.is_imported and not _OTHER_LOSS.match(reported.name)
    ]
    return [loss.value for loss in printed if loss.name == printed[0].name], False


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
    """A device's memory over time: the highest reading of each interval, None without a reading."""

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
    """Memory over a run, in `fewest` to `most` intervals; None without readings."""
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
    """The memory size of a device; for an allocator, of the GPU it runs on."""
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
