"""What a device said over time, in no more points than a chart can show.

The trap: a mean over each pixel. A spike of one reading in ten million, which is what one looks
for, is gone. So a long column is cut into equal spans of time, and of each the lowest and the
highest reading stay, at the times they were taken: every point that is drawn is a reading, and none
beyond the drawn ones was left out. Where nothing was read for a while there is a break, not a line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.energy.device_energy import curve_of
from ergmeter.metrics.energy.energy_curve import merged
from ergmeter.records import PHASES
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import Device, FloatArray, TimeArray, Window

POINTS = 1000
# As `erg check` has it: not read for so long and for so many of its intervals is a gap.
_GAP_S = 1.0
_GAP_INTERVALS = 10


@dataclass(frozen=True)
class BoundedSeries:
    """Readings over time, bounded. A NaN is a break: nothing was read there."""

    t_s: FloatArray  # since the run began
    values: FloatArray
    readings: int  # that there were; more than are kept, where it was bounded
    unbroken: int = 0  # gaps in which nothing was read that have no break, as there are too many
    is_printed: bool = False  # seen in the output, beside steps that do not tell it

    @property
    def is_bounded(self) -> bool:
        """Whether some were left out, none of them beyond those that stayed."""
        return self.readings > int(np.isfinite(self.values).sum())

    @property
    def lowest(self) -> tuple[float, float]:
        """The lowest reading and when it was."""
        place = int(np.nanargmin(self.values))
        return float(self.values[place]), float(self.t_s[place])

    @property
    def highest(self) -> tuple[float, float]:
        """The highest reading and when it was."""
        place = int(np.nanargmax(self.values))
        return float(self.values[place]), float(self.t_s[place])


@dataclass(frozen=True)
class PhaseSpans:
    """Where a phase was on. Spans closer than a point are one; `counts` has how many that are."""

    phase: str
    start_s: FloatArray
    end_s: FloatArray
    counts: TimeArray


def bounded(series: Series, *, zero_ns: int, points: int = POINTS) -> BoundedSeries:
    """A column in at most `points` points: each span's lowest and highest reading, and breaks."""
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
        kept = _extremes(t_ns, values, points - 3 * len(breaks))
        # A break stands between the readings around it, and those stay too.
        kept = np.union1d(kept, np.concatenate([breaks, breaks + 1]))
    else:
        kept = np.arange(total)
    t_s, shown = (t_ns[kept] - zero_ns) / NS_PER_S, values[kept].astype(np.float64)
    if len(breaks):
        places = np.searchsorted(kept, breaks) + 1
        middle_s = ((t_ns[breaks] + t_ns[breaks + 1]) / 2 - zero_ns) / NS_PER_S
        t_s, shown = np.insert(t_s, places, middle_s), np.insert(shown, places, np.nan)
    return BoundedSeries(t_s, shown, total, gaps - len(breaks))


def longest_ns(t_ns: TimeArray) -> float:
    """The longest time between two readings that is no gap."""
    if len(t_ns) < 3:
        return float("inf")
    return max(_GAP_S * NS_PER_S, _GAP_INTERVALS * float(np.median(np.diff(t_ns))))


def _thinned(breaks: TimeArray, most: int) -> TimeArray:
    """So many at most, evenly chosen: a device that is read once an hour is all breaks."""
    if len(breaks) <= most:
        return breaks
    return breaks[np.linspace(0, len(breaks) - 1, most).astype(np.int64)]


def _extremes(t_ns: TimeArray, values: FloatArray, points: int) -> TimeArray:
    """The places of the first, the last, and each span's lowest and highest reading."""
    edges_ns = np.linspace(int(t_ns[0]), int(t_ns[-1]) + 1, max(1, points // 2 - 1) + 1)
    edges = np.searchsorted(t_ns, edges_ns)
    edges[0], edges[-1] = 0, len(t_ns)
    kept = [0, len(t_ns) - 1]
    for start, end in pairwise(edges.tolist()):
        if end > start:
            part = values[start:end]
            kept += [start + int(part.argmin()), start + int(part.argmax())]
    return np.unique(np.array(kept, dtype=np.int64))


def rate(counter: Series) -> Series:
    """What a counter grew by, per second, at the end of each interval. A reset says nothing."""
    between_s = np.diff(counter.t_ns) / NS_PER_S
    grown = np.diff(counter.values)
    told = (between_s > 0) & (grown >= 0)
    return Series(counter.t_ns[1:][told], grown[told] / between_s[told])


def line_of(
    evidence: Evidence,
    device: Device,
    column: str,
    *,
    points: int = POINTS,
    is_counter: bool,
    since: str = "",
) -> BoundedSeries | None:
    """One device's column over the whole run; None if it never said it. `since`: a column that the
    device says from its first reading on, where this one is of the time between two readings."""
    said = evidence.series(column).get(device.id)
    found = rate(said) if said is not None and is_counter else said
    if said is None or found is None or not np.isfinite(found.values).any():
        return None
    begin = said if is_counter else evidence.series(since).get(device.id) if since else None
    line = bounded(found, zero_ns=zero_ns(evidence), points=points - (begin is not None))
    if begin is None:
        return line
    # What holds for the interval that ends with it begins at the reading before; of the first one
    # that is known where the device was read just once before.
    first_s = (int(begin.t_ns[0]) - zero_ns(evidence)) / NS_PER_S
    is_known = is_counter or int((begin.t_ns < found.t_ns[0]).sum()) == 1
    if not is_known:
        return line
    t_s, values = np.append(first_s, line.t_s), np.append(line.values[0], line.values)
    return replace(line, t_s=t_s, values=values)


def power_line(evidence: Evidence, device: Device, *, points: int = POINTS) -> BoundedSeries | None:
    """What a device drew; where it has just a counter, by how that grew."""
    found = line_of(evidence, device, "power_w", points=points, is_counter=False)
    return found or line_of(evidence, device, "energy_j", points=points, is_counter=True)


def energy_line(evidence: Evidence, device: Device, *, points: int = POINTS) -> BoundedSeries:
    """Joules of a device since its first reading. Raises NotMeasurable where there are none."""
    curve, _ = curve_of(evidence, device)
    inside = curve.t_ns >= zero_ns(evidence)
    series = Series(curve.t_ns[inside], curve.joules[inside] - curve.joules[inside][:1])
    return bounded(series, zero_ns=zero_ns(evidence), points=points)


def zero_ns(evidence: Evidence) -> int:
    """Where the time axis begins: with the run."""
    return watched(evidence).start_ns


def watched(evidence: Evidence) -> Window:
    """The life of the run, with its samples: what a time axis shows."""
    return evidence.watched


def seconds(evidence: Evidence, t_ns: int) -> float:
    """An instant on the time axis."""
    return (t_ns - zero_ns(evidence)) / NS_PER_S


def phase_spans(evidence: Evidence, *, points: int = POINTS) -> list[PhaseSpans]:
    """Where each phase was on, of the rank that told the most; empty if nothing was told."""
    lane = evidence.all_steps.longest
    if not len(lane):
        return []
    whole = watched(evidence)
    width_ns = (whole.end_ns - whole.start_ns) // points
    return [
        _spans_of(lane, number, whole.start_ns, width_ns)
        for number in range(len(PHASES))
        if (lane["phase"] == number).any()
    ]


def _spans_of(lane: Steps, number: int, start_ns: int, width_ns: int) -> PhaseSpans:
    own = lane["phase"] == number
    starts, ends = lane["start_ns"][own].astype(np.int64), lane["end_ns"][own].astype(np.int64)
    # Few enough are shown one by one, also where they touch.
    if len(starts) <= POINTS // 4:
        begin, end = starts, ends
    else:
        begin, end = merged(starts, ends + width_ns)
        end = end - width_ns
    counts = np.searchsorted(np.sort(starts), end, side="left") - np.searchsorted(
        np.sort(starts), begin, side="left"
    )
    return PhaseSpans(
        PHASES[number],
        (begin - start_ns) / NS_PER_S,
        (end - start_ns) / NS_PER_S,
        np.maximum(counts, 1),
    )


def step_line(evidence: Evidence, *, points: int = POINTS) -> BoundedSeries:
    """The time of each step, at its end; of the rank that told the most. With the warm-up."""
    line = bounded(step_series(evidence), zero_ns=zero_ns(evidence), points=points)
    whole = np.isfinite(line.values)  # between two steps nothing was missed: no breaks
    return replace(line, t_s=line.t_s[whole], values=line.values[whole])


def step_series(evidence: Evidence) -> Series:
    """The same with nothing left out."""
    lane = evidence.work.longest
    if not evidence.trains:
        raise NotMeasurable("an inference run has requests and no steps: see its latencies")
    steps = np.maximum(np.nan_to_num(lane["steps"], nan=1.0), 1.0)
    return Series(lane["end_ns"].astype(np.int64), evidence.all_periods_s(lane) / steps)


def loss_line(evidence: Evidence, *, points: int = POINTS) -> BoundedSeries:
    """The loss of the steps, of the rank that told the most; where no step told one, as printed.
    Raises NotMeasurable if nobody did."""
    series, is_printed = loss_series(evidence)
    line = bounded(series, zero_ns=zero_ns(evidence), points=points)
    whole = np.isfinite(line.values)
    return replace(line, t_s=line.t_s[whole], values=line.values[whole], is_printed=is_printed)


def loss_series(evidence: Evidence) -> tuple[Series, bool]:
    """The same with nothing left out, and whether it is as printed."""
    lane, is_printed = evidence.work.longest, False
    if not np.isfinite(lane["loss"]).any() and not evidence.from_output:
        lane, is_printed = evidence.printed, True
    told = np.isfinite(lane["loss"])
    t_ns, losses = lane["end_ns"][told].astype(np.int64), lane["loss"][told]
    if is_printed or evidence.from_output:
        beside = evidence.losses_beside_steps
        t_ns = np.append(t_ns, beside.t_ns)
        order = np.argsort(t_ns, kind="stable")
        t_ns, losses = t_ns[order], np.append(losses, beside.values)[order]
    if not len(t_ns):
        raise NotMeasurable("no step has a loss: set step.loss, or print loss=..")
    return Series(t_ns, losses), is_printed
