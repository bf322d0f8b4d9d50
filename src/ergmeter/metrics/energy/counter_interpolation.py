"""Between two readings of an energy counter: when were the joules drawn?

A counter is read every second or two, so what lies between is spread by something else. Instant
power does it well for a steady load. The trap: bursts. A sensor that looks at a part of each 100 ms
sees a burst of 30 ms now and then and half of one of 150 ms (on an H200 a quarter and three
quarters of the energy went to the pauses). But when the bursts were is known to the microsecond,
from the steps themselves; and what a device draws between them the sensor does see, at rest.

So where a device was seen at rest around or between the steps, and lower than under load, the
joules go to the steps but for that floor. A step long enough to be seen has a level of its own; of
steps without a pause the sensor says it, but for the edges; short ones share what is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.metrics.energy.energy_curve import REFRESH_S, EnergyCurve, merged
from ergmeter.records import PHASES
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import FloatArray, TimeArray

# A reading speaks of up to a refresh before it, and of the 20 ms the sensor looks for (measured on
# an H200: power lags the load by 70 ms on average, the counter by less than 10).
SEEN_AFTER_S = 0.2
_SPEAKS_OF_S = 0.12  # a reading: from so long ago to where the next one does
_LEAST_READINGS = 5
_LEAST_AT_REST = 3
_AT_REST_FRAC = 0.1  # between the 10th and the 90th percentile of a floor (1 % on an H200)
_MOST_ABOVE = 1.5  # that a step may draw of the highest reading
_NO_PAUSES_FRAC = 0.02  # of the time in steps
_LEAST_CONTRAST = 1.5  # of load to floor, or the spans say nothing that the sensor does not
# The counter itself follows the load this closely.
SPAN_SLACK_S = 0.02
_LOADS = tuple(PHASES.index(phase) for phase in ("train", "eval", "prefill", "decode"))


def span_shape(evidence: Evidence, power: Series, counter: Series) -> EnergyCurve | None:
    """A curve that rises with the steps; None where they tell less than the sensor."""
    spans = _loads(evidence)
    if spans is None:
        return None
    starts, ends, are_steps = spans
    first_ns, last_ns = int(counter.t_ns[0]), int(counter.t_ns[-1])
    inside = (starts >= first_ns) & (ends <= last_ns)
    starts, ends = starts[inside], ends[inside]
    if not len(starts):
        return None
    busy_s = (ends - starts) / NS_PER_S
    floor_w = _floor(power, starts, ends, float(busy_s.sum()))
    if floor_w is None:
        return None
    drawn_j = float(counter.values[-1] - counter.values[0])
    over_j = drawn_j - floor_w * ((last_ns - first_ns) / NS_PER_S - float(busy_s.sum()))
    levels_w = _levels(power, starts, ends)
    unseen = np.isnan(levels_w)
    if unseen.any():
        rest_j = over_j - float((levels_w * busy_s)[~unseen].sum())
        levels_w[unseen] = rest_j / float(busy_s[unseen].sum())
    if over_j / float(busy_s.sum()) < _LEAST_CONTRAST * floor_w or levels_w.min() <= floor_w:
        return None
    if levels_w.max() > _MOST_ABOVE * power.values.max():
        return None  # the device works on in what look like pauses: these are the host's times
    spread = ~unseen & (not are_steps)  # how it is spread over one step nobody asks
    seen = _power_between(power, starts[spread], ends[spread])
    t_ns, watts = _stairs(starts, ends, levels_w, floor_w, seen)
    t_ns = np.concatenate([[first_ns - NS_PER_S], t_ns, [max(last_ns, int(t_ns[-1])) + NS_PER_S]])
    rises = np.diff(t_ns) / NS_PER_S * np.append(floor_w, watts)
    return EnergyCurve(
        t_ns.astype(np.int64),
        np.append(0.0, np.cumsum(rises)),
        refresh_s=SPAN_SLACK_S if are_steps else REFRESH_S,
        max_gap_s=float("inf"),
        seen_until_ns=int(t_ns[-1]),
    )


def _loads(evidence: Evidence) -> tuple[TimeArray, TimeArray, bool] | None:
    """When the rank that told the most computed, ranks work in step; and whether each span is one
    step.

    None where only lines were printed.
    """
    rows = evidence.all_steps
    if not len(rows) or evidence.from_output:
        return None
    lane = rows.longest
    is_load = np.isin(lane["phase"], _LOADS)
    own, others = lane.where(is_load), lane.where(~is_load)
    if not len(own):
        return None
    starts, ends = merged(own.columns["start_ns"], own.columns["end_ns"])
    if _overlap(others, starts, ends):
        return None  # a wait for data in a step: the sensor says which of the two drew more
    return starts, ends, len(starts) == len(own)


def _overlap(rows: Steps, starts: TimeArray, ends: TimeArray) -> bool:
    """Whether a row lies in one of the spans, in part or as a whole."""
    before = np.searchsorted(starts, rows["end_ns"]) - 1  # the last span that begins before its end
    return bool((ends[np.clip(before, 0, None)] > rows["start_ns"])[before >= 0].any())


def _floor(power: Series, starts: TimeArray, ends: TimeArray, busy_s: float) -> float | None:
    """What is drawn in the pauses, by readings that speak of nothing else; None if all sorts.

    Between the steps; where there is next to no time between them, before and after them all: a
    device that nobody uses yet draws less than one that waits for its next step.
    """
    pauses_s = float((starts[1:] - ends[:-1]).sum()) / NS_PER_S
    after_ns = round(SEEN_AFTER_S * NS_PER_S)
    if pauses_s > _NO_PAUSES_FRAC * busy_s:
        least, seen = _LEAST_READINGS, _within(power.t_ns, ends[:-1] + after_ns, starts[1:])
    else:
        seen = (power.t_ns < starts[0]) | (power.t_ns >= ends[-1] + after_ns)
        least = _LEAST_AT_REST
    if int(seen.sum()) < least:
        return None
    low_w, floor_w, high_w = np.percentile(power.values[seen], [10, 50, 90])
    # A device at rest draws what it draws. Where it does not, there is more going on than steps.
    return float(floor_w) if high_w - low_w <= _AT_REST_FRAC * floor_w else None


def _levels(power: Series, starts: TimeArray, ends: TimeArray) -> FloatArray:
    """Watts of each step that is long enough to be seen; NaN of the others."""
    begin_ns = starts + round(SEEN_AFTER_S * NS_PER_S)
    first, last = np.searchsorted(power.t_ns, begin_ns), np.searchsorted(power.t_ns, ends)
    sums = np.append(0.0, np.cumsum(power.values))
    count = np.maximum(last - first, 0)
    levels = np.full(len(starts), np.nan)
    seen = count >= _LEAST_READINGS
    levels[seen] = (sums[last] - sums[first])[seen] / count[seen]
    return levels


def _within(
    t_ns: TimeArray, starts: TimeArray, ends: TimeArray
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    place = np.searchsorted(starts, t_ns, side="right") - 1
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (place >= 0) & (
        t_ns < ends[np.clip(place, 0, None)]
    )
    return found


def _power_between(power: Series, starts: TimeArray, ends: TimeArray) -> Series:
    """The readings that speak of long steps alone, at the times of which they speak."""
    if not len(starts):
        return Series(starts, np.empty(0))
    inside = _within(power.t_ns, starts + round(SEEN_AFTER_S * NS_PER_S), ends)
    return Series(power.t_ns[inside] - round(_SPEAKS_OF_S * NS_PER_S), power.values[inside])


def _stairs(
    starts: TimeArray, ends: TimeArray, levels_w: FloatArray, floor_w: float, seen: Series
) -> tuple[TimeArray, FloatArray]:
    """From when on how many watts: a step's level, or what was seen in it, and then the floor."""
    first = np.searchsorted(seen.t_ns, starts)
    is_seen = first < np.searchsorted(seen.t_ns, ends)
    begins_w = levels_w.copy()
    begins_w[is_seen] = seen.values[first[is_seen]]
    t_ns = np.concatenate([starts, seen.t_ns, ends])
    watts = np.concatenate([begins_w, seen.values, np.full(len(ends), floor_w)])
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], watts[order]
