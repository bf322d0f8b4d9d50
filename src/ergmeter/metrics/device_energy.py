"""Energy of a device over time and in the window, by its counter or its power readings.

An energy counter is exact but is read seldom; power is read often but on some chips is an average.
So the counter is used, interpolated between its readings by the steps or the power. Power alone is
used only where there is no counter; the two are never mixed. `boundary` returns the devices whose
energy counts as the run's: accelerators, else CPU packages and DRAM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import (
    ACCELERATORS,
    BOUNDARY,
    CPUS,
    cached_for_kinds,
    cached_result,
    why_absent,
)
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.evidence.window import TrainingWindow
from ergmeter.metrics.phases import merged, within
from ergmeter.records import (
    PHASES,
    Basis,
    Device,
    FloatArray,
    Missing,
    TimeArray,
    Window,
    or_missing,
    present,
)
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S, duration

# The curve of a device. Sampler and counter have clocks of their own, so a window almost never
# begins or ends on a reading. Adding up the readings inside loses up to an interval at each end and
# reads a short step as 0 J. So energy is a curve over time, and a window is a difference of two of
# its values; windows side by side add up exactly. The usual power field is an average of about the
# last second on recent NVIDIA chips: integrating it reads a 0.5 s burst 62 % low.

# The slowest GPU power sensors refresh at 10 Hz. Twenty refreshes missed means a
# starved sampler or a lost device, and a line drawn across that invents joules.
MAX_GAP_S = 2.0
# The first reading may be this late after a window begins, and the last this early before it ends:
# a loop may start before the sampler's thread does. Two refreshes and a little.
LATE_S = 0.25
# How often NVIDIA's counters and power sensors refresh (20 ms on a V100): an edge of a window can't
# be placed better. RAPL counters refresh every millisecond.
REFRESH_S = 0.1
RAPL_REFRESH_S = 0.001


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of a device in a window, with lower and upper bounds."""

    joules: float
    low_j: float
    high_j: float


@dataclass(frozen=True, slots=True)
class EnergyCurve:
    """Joules since the first reading: known at the knots, interpolated between them."""

    t_ns: TimeArray
    joules: FloatArray
    refresh_s: float  # how far off in time the curve may be between the knots
    max_gap_s: float  # how far apart readings may be: a counter never forgets, power does
    seen_until_ns: int
    power_w: FloatArray | None = None  # at the knots: between two of them a straight line
    shape: EnergyCurve | None = None  # another curve, whose rise is followed between two knots
    shape_j: FloatArray | None = None  # and what that one is at the knots of this
    read: tuple[TimeArray, FloatArray] | None = None  # a counter's readings, as they were taken

    def at(self, t_ns: TimeArray | FloatArray) -> FloatArray:
        """Joules up to each instant. Outside the knots, power is that at the nearest knot."""
        ahead_s = np.maximum(0, self.t_ns[0] - np.asarray(t_ns)) / NS_PER_S
        beyond_s = np.maximum(0, np.asarray(t_ns) - self.t_ns[-1]) / NS_PER_S
        outside = beyond_s * self._end_w(-1) - ahead_s * self._end_w(0)
        return np.asarray(self._within(t_ns) + outside, dtype=np.float64)

    def _end_w(self, end: int) -> float:
        """The power at the first knot (0) or at the last (-1)."""
        if self.shape is not None:
            return self.shape._end_w(end)
        if self.power_w is not None:
            return float(self.power_w[end])
        two = slice(2) if end == 0 else slice(-2, None)
        lasted_s = float(np.diff(self.t_ns[two])[0]) / NS_PER_S
        return float(np.diff(self.joules[two])[0]) / lasted_s

    def _within(self, t_ns: TimeArray | FloatArray) -> FloatArray:
        if self.power_w is None and self.shape is None:
            return np.asarray(np.interp(t_ns, self.t_ns, self.joules), dtype=np.float64)
        when_ns: Any = np.clip(t_ns, self.t_ns[0], self.t_ns[-1])
        left = np.searchsorted(self.t_ns, when_ns, side="right") - 1
        left = np.clip(left, 0, len(self.t_ns) - 2)
        if self.shape is not None:
            assert self.shape_j is not None
            here, start, end = self.shape.at(when_ns), self.shape_j[left], self.shape_j[left + 1]
            share = np.divide(here - start, end - start, out=np.zeros(len(here)), where=end > start)
            rise = share * (self.joules[left + 1] - self.joules[left])
        else:
            power_w = self.power_w
            assert power_w is not None
            mean_w = (power_w[left] + np.interp(when_ns, self.t_ns, power_w)) / 2
            rise = (when_ns - self.t_ns[left]) / NS_PER_S * mean_w
        return np.asarray(self.joules[left] + rise, dtype=np.float64)

    def over_all(self, starts: TimeArray, ends: TimeArray) -> Energy:
        """Joules in intervals with cuts between them. Raises NotMeasurable outside the readings.

        The bounds include two errors of the cuts. All cuts may be shifted together by up to one
        sensor refresh, and each cut has an error of its own.
        """
        self._check_reach(starts, ends)
        outer = Energy(*(float(bound[0]) for bound in self._over_each(starts[:1], ends[-1:])))
        if len(starts) == 1:
            return outer
        cuts = ends[:-1], starts[1:]
        cut_j, low_j, high_j = self._over_each(*cuts)
        slack_ns = round(min(self.refresh_s, 1.0) * NS_PER_S)
        moved = (
            float((self.at(cuts[1] + by) - self.at(cuts[0] + by)).sum() - cut_j.sum())
            for by in (-slack_ns, -slack_ns // 2, slack_ns // 2, slack_ns)
        )
        off_j = max(map(abs, moved)) + float(np.sqrt((((high_j - low_j) / 2) ** 2).sum()))
        joules = outer.joules - float(cut_j.sum())
        return Energy(
            joules,
            max(0.0, joules - (outer.joules - outer.low_j) - off_j),
            joules + (outer.high_j - outer.joules) + off_j,
        )

    def over(self, window: Window) -> Energy:
        """Joules in a window. Raises NotMeasurable if the readings do not span it."""
        return self.over_all(np.array([window.start_ns]), np.array([window.end_ns]))

    def over_each(
        self, start_ns: TimeArray, end_ns: TimeArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Joules of each window with lower and upper bounds; NaN outside the readings."""
        is_spanned = self.spanned(start_ns, end_ns)
        bounds = self._over_each(start_ns, end_ns)
        joules, low_j, high_j = (np.where(is_spanned, column, np.nan) for column in bounds)
        return joules, low_j, high_j

    def _over_each(
        self, start_ns: TimeArray, end_ns: TimeArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        starts, ends = self.at(start_ns), self.at(end_ns)
        start_early, start_late = self._bounds(start_ns, starts)
        end_early, end_late = self._bounds(end_ns, ends)
        return ends - starts, np.maximum(0.0, end_early - start_late), end_late - start_early

    def spanned(self, start_ns: TimeArray, end_ns: TimeArray) -> Any:  # noqa: ANN401  a mask
        """A mask of the windows that the readings cover without too long a gap."""
        late_ns = round(LATE_S * NS_PER_S)
        within = (self.t_ns[0] - late_ns <= start_ns) & (end_ns - late_ns <= self.seen_until_ns)
        if not math.isfinite(self.max_gap_s):
            return within
        gaps = np.diff(self.t_ns) > self.max_gap_s * NS_PER_S
        before = np.append(0, np.cumsum(gaps))
        first = np.clip(np.searchsorted(self.t_ns, start_ns, side="right") - 1, 0, None)
        last = np.clip(np.searchsorted(self.t_ns, end_ns, side="left"), 0, len(self.t_ns) - 1)
        return within & (before[last] == before[first])

    def _bounds(self, edges: TimeArray, joules: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The least and the most energy that can have been used up to each edge."""
        early, late = np.zeros(len(edges)), np.full(len(edges), math.inf)
        if math.isfinite(self.refresh_s):
            slack_ns = round(self.refresh_s * NS_PER_S)
            early, late = self.at(edges - slack_ns), self.at(edges + slack_ns)
        if self.read is not None:
            # Lower bound: the counter's last value before the edge. Upper bound: its value one
            # refresh after the edge, which includes all energy used up to the edge.
            read_ns, read_j = self.read
            refresh_ns = round(REFRESH_S * NS_PER_S)
            before = np.clip(np.searchsorted(read_ns, edges, side="right") - 1, 0, None)
            after = np.searchsorted(read_ns, edges + refresh_ns)
            read_after = read_j[np.minimum(after, len(read_ns) - 1)]
            beyond = after == len(read_ns)
            read_after[beyond] = self.at(edges[beyond] + refresh_ns)
            read_before = np.where(edges < read_ns[0], -math.inf, read_j[before])
            early, late = np.maximum(early, read_before), np.minimum(late, read_after)
        return np.minimum(early, joules), np.maximum(late, joules)

    def _check_reach(self, starts: TimeArray, ends: TimeArray) -> None:
        """Raises NotMeasurable if the readings do not span these intervals."""
        reached = self.spanned(starts, ends)
        if reached.all():
            return
        if self.t_ns[0] > starts[0] + LATE_S * NS_PER_S:
            late_s = (self.t_ns[0] - starts[0]) / NS_PER_S
            raise NotMeasurable(f"readings begin {late_s:.2f} s after the window does")
        if self.seen_until_ns < ends[-1] - LATE_S * NS_PER_S:
            early_s = (ends[-1] - self.seen_until_ns) / NS_PER_S
            raise NotMeasurable(f"readings end {early_s:.2f} s before the window does")
        at = int(np.argmin(reached))
        first = max(0, int(np.searchsorted(self.t_ns, starts[at], side="right")) - 1)
        last = int(np.searchsorted(self.t_ns, ends[at], side="left"))
        gap_s = float(np.diff(self.t_ns[first : last + 1]).max(initial=0)) / NS_PER_S
        raise NotMeasurable(f"no power reading for {gap_s:.1f} s (limit {self.max_gap_s:g} s)")


def counter_curve(
    t_ns: TimeArray,
    counter_j: FloatArray,
    *,
    shape: EnergyCurve | None = None,
    lag_s: float = REFRESH_S / 2,
    refresh_s: float = REFRESH_S,
) -> EnergyCurve:
    """The curve of an energy counter, interpolated between its refreshes.

    A counter that refreshes every 100 ms shows the same value in several readings. It refreshed
    between the last reading of the old value and the first of the new, at most `refresh_s` before
    the latter; the middle is taken. Between two values the joules follow `shape`, whose times are
    `lag_s` late; without it, a straight line. Raises NotMeasurable for a counter that never moved
    or that was reset.
    """
    if len(t_ns) < 2:
        raise NotMeasurable("the energy counter was read once: two readings are needed")
    fresh = np.flatnonzero(np.diff(counter_j) != 0) + 1
    if not len(fresh):
        span_s = (int(t_ns[-1]) - int(t_ns[0])) / NS_PER_S
        raise NotMeasurable(
            f"the energy counter stood still at {counter_j[0]:.1f} J for {span_s:.1f} s"
        )
    refresh_ns = round(refresh_s * NS_PER_S)
    age_ns = np.minimum(t_ns[fresh] - t_ns[fresh - 1], refresh_ns) // 2
    knots_ns = np.append(t_ns[:1] - refresh_ns // 2, t_ns[fresh] - age_ns)
    knots_j = np.append(counter_j[:1], counter_j[fresh])
    falls = np.flatnonzero(np.diff(knots_j) < 0)
    if len(falls):
        before_j, after_j = knots_j[falls[0] : falls[0] + 2]
        raise NotMeasurable(f"the energy counter was reset from {before_j:.1f} to {after_j:.1f} J")
    late_ns = round(LATE_S * NS_PER_S)
    if shape is not None and not (
        shape.t_ns[0] <= knots_ns[0] + late_ns and shape.t_ns[-1] >= knots_ns[-1] - late_ns
    ):
        shape = None
    if shape is not None:
        # A sensor's reading is half a refresh old on average. On the H200 recording, with readings
        # at 10 Hz and the counter once a second, this takes the worst phase from 1.1 to 0.6 %.
        shape = replace(shape, t_ns=shape.t_ns - round(lag_s * NS_PER_S))
    return EnergyCurve(
        knots_ns,
        knots_j - knots_j[0],
        refresh_s=math.inf if shape is None else min(refresh_s, shape.refresh_s),
        max_gap_s=math.inf,
        seen_until_ns=int(t_ns[-1]),
        shape=shape,
        shape_j=None if shape is None else shape.at(knots_ns),
        read=(t_ns, counter_j - counter_j[0]),
    )


def power_curve(t_ns: TimeArray, power_w: FloatArray, *, slack_s: float = REFRESH_S) -> EnergyCurve:
    """The integral of power readings, by trapezoids. Raises NotMeasurable if all are 0.

    `slack_s`: the age of what a reading shows, at most: a refresh, or the sensor's averaging time.
    """
    if not power_w.any():
        raise NotMeasurable("power reads 0 W throughout: the sensor does not work")
    if not np.isfinite(power_w).all():
        raise NotMeasurable("a power reading is not a number")
    pieces = np.diff(t_ns) / NS_PER_S * (power_w[1:] + power_w[:-1]) / 2
    joules = np.append(0.0, np.cumsum(pieces))
    return EnergyCurve(
        t_ns,
        joules,
        refresh_s=slack_s,
        max_gap_s=MAX_GAP_S,
        seen_until_ns=int(t_ns[-1]),
        power_w=power_w,
    )


# Interpolation between two readings of a counter. It is read every second or two. Instant power
# places the joules well for a steady load, but not for bursts: a sensor that samples a part of each
# 100 ms misses most of a 30 ms burst (on an H200 a quarter to three quarters of the energy went to
# the pauses). The steps give the times of the bursts, and the sensor measures the level between
# them.
#
# So if power was read at rest, around or between the steps, and was lower than under load, the
# joules above that floor go to the steps. A step long enough for readings has its own level. For
# steps without pauses the sensor gives the level, except at the edges. Short steps share the rest.

# A reading may be a refresh old, and averages over 20 ms (measured on an H200: power lags the load
# by 70 ms on average, the counter by less than 10).
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
    """Return a curve that rises during steps; None where power readings place the energy better."""
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
    spread = ~unseen & (not are_steps)  # within one step it does not matter
    readings = _power_between(power, starts[spread], ends[spread])
    t_ns, watts = _stairs(starts, ends, levels_w, floor_w, readings)
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
    """Return the computing spans of the longest rank, and whether each span is one step.

    None if steps are known only from printed lines, or if other spans overlap them.
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
    """True if any row overlaps one of the spans."""
    before = np.searchsorted(starts, rows["end_ns"]) - 1  # the last span that begins before its end
    return bool((ends[np.clip(before, 0, None)] > rows["start_ns"])[before >= 0].any())


def _floor(power: Series, starts: TimeArray, ends: TimeArray, busy_s: float) -> float | None:
    """Return the watts in pauses between steps; None if there are too few readings or they vary.

    Pauses between steps are preferred: a device without a context uses less power than one that
    waits for its next step. If there are next to none, the time before and after all steps is used.
    """
    pauses_s = float((starts[1:] - ends[:-1]).sum()) / NS_PER_S
    after_ns = round(SEEN_AFTER_S * NS_PER_S)
    if pauses_s > _NO_PAUSES_FRAC * busy_s:
        least, at_rest = _LEAST_READINGS, within(power.t_ns, ends[:-1] + after_ns, starts[1:])
    else:
        at_rest = (power.t_ns < starts[0]) | (power.t_ns >= ends[-1] + after_ns)
        least = _LEAST_AT_REST
    if int(at_rest.sum()) < least:
        return None
    low_w, floor_w, high_w = np.percentile(power.values[at_rest], [10, 50, 90])
    # A device at rest has steady power. If it varies, something else than the steps is running.
    return float(floor_w) if high_w - low_w <= _AT_REST_FRAC * floor_w else None


def _levels(power: Series, starts: TimeArray, ends: TimeArray) -> FloatArray:
    """Watts of each step that is long enough for several readings; NaN for shorter ones."""
    begin_ns = starts + round(SEEN_AFTER_S * NS_PER_S)
    first, last = np.searchsorted(power.t_ns, begin_ns), np.searchsorted(power.t_ns, ends)
    sums = np.append(0.0, np.cumsum(power.values))
    count = np.maximum(last - first, 0)
    levels = np.full(len(starts), np.nan)
    is_long = count >= _LEAST_READINGS
    levels[is_long] = (sums[last] - sums[first])[is_long] / count[is_long]
    return levels


def _power_between(power: Series, starts: TimeArray, ends: TimeArray) -> Series:
    """Return the readings taken wholly within these steps, moved back by the sensor's lag."""
    if not len(starts):
        return Series(starts, np.empty(0))
    inside = within(power.t_ns, starts + round(SEEN_AFTER_S * NS_PER_S), ends)
    return Series(power.t_ns[inside] - round(_SPEAKS_OF_S * NS_PER_S), power.values[inside])


def _stairs(
    starts: TimeArray, ends: TimeArray, levels_w: FloatArray, floor_w: float, readings: Series
) -> tuple[TimeArray, FloatArray]:
    """Return instants, and the watts from each on: a step's level or readings, then the floor."""
    first = np.searchsorted(readings.t_ns, starts)
    is_seen = first < np.searchsorted(readings.t_ns, ends)
    begins_w = levels_w.copy()
    begins_w[is_seen] = readings.values[first[is_seen]]
    t_ns = np.concatenate([starts, readings.t_ns, ends])
    watts = np.concatenate([begins_w, readings.values, np.full(len(ends), floor_w)])
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], watts[order]


# Energy of a device in the window.

COUNTER = "energy counter"
DRAW = "power draw (on recent chips an average of about a second)"
BASIS: dict[str, Basis] = {COUNTER: "measured"}  # by the method; all others are derived
_HINT = "a GPU with its driver, or readable RAPL counters, would provide it (see `erg doctor`)"
_HINT_CPU = "readable RAPL counters would provide it (see `erg doctor`)"
_APART_S = 4.0  # of a counter's readings: a refresh is a fortieth of that


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """A device's energy in the window. `way`: the method; `remark`: why no counter was used."""

    energy: Energy
    way: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class DeviceCurves:
    """A device's energy over time, from its power and from its counter; or why each is missing."""

    integral: EnergyCurve | Missing
    counter: EnergyCurve | Missing


@cached_result
def device_drawn(evidence: Evidence, device: Device) -> DeviceEnergy:
    """Energy of one device in the window. Raises NotMeasurable with the device and the reason."""
    curves = _curves(evidence, device)
    try:
        return DeviceEnergy(_over(curves.counter, evidence.span), COUNTER)
    except NotMeasurable as error:
        why_no_counter = str(error)
    try:
        way = f"{DRAW if _is_averaged(device) else 'instant power'}, integrated"
        return DeviceEnergy(_over(curves.integral, evidence.span), way, why_no_counter)
    except NotMeasurable as error:
        reasons = "; ".join(dict.fromkeys([*evidence.lost(device), why_no_counter, str(error)]))
        raise NotMeasurable(f"{device.name} [{device.id}]: {reasons}") from error


def _is_averaged(device: Device) -> bool:
    """True if the device's power readings are means over about a second."""
    return device.facts.get("power_field") == "draw"


@cached_for_kinds(BOUNDARY)
def _drawn_in_whole_run(evidence: Evidence, device: Device) -> DeviceEnergy:
    """Energy of one device in the whole run; cached while the device's samples are in memory."""
    return device_drawn(evidence.whole_run, device)


def _over(curve: EnergyCurve | Missing, window: TrainingWindow) -> Energy:
    """The energy of a window. The upper bound includes the energy of uncertain cuts."""
    curve = present(curve)
    energy = curve.over_all(window.starts_ns, window.ends_ns)
    if not len(window.uncertain[0]):
        return energy
    more_j = float((curve.at(window.uncertain[1]) - curve.at(window.uncertain[0])).sum())
    return Energy(energy.joules, energy.low_j, energy.high_j + more_j)


def curve_of(evidence: Evidence, device: Device) -> tuple[EnergyCurve, Basis]:
    """Return a device's energy over time, by its counter or else by its power, and its basis."""
    curves = _curves(evidence, device)
    if isinstance(curves.counter, EnergyCurve):
        is_unknown = device in evidence.gpus("unknown")
        return curves.counter, "derived" if is_unknown else BASIS[COUNTER]
    if isinstance(curves.integral, EnergyCurve):
        return curves.integral, "derived"
    whys = f"{curves.counter.reason}; {curves.integral.reason}"
    raise NotMeasurable(f"{device.name} [{device.id}]: {whys}")


def _curves(evidence: Evidence, device: Device) -> DeviceCurves:
    """The energy curves of a device. Only those of the last device are cached, to save memory."""
    if device.id not in evidence.device_curves:
        integral = or_missing(_integral, evidence, device)
        counter = or_missing(_shaped_counter, evidence, device, integral)
        evidence.device_curves.clear()
        evidence.device_curves[device.id] = DeviceCurves(integral, counter)
    return evidence.device_curves[device.id]


@cached_result
def counter_and_integral(evidence: Evidence, device: Device) -> tuple[float, float]:
    """Return a device's joules by its energy counter, and by its instant power alone.

    Both from the first refresh of the counter to the last, where the counter is exact.
    """
    if _is_averaged(device):
        raise NotMeasurable(
            "its power readings are 1 s averages, too coarse to check its energy counter"
        )
    integral = present(_curves(evidence, device).integral)
    counter = _counter(evidence, device)
    inside = (counter.t_ns >= integral.t_ns[0]) & (counter.t_ns <= integral.t_ns[-1])
    t_ns, joules = counter.t_ns[inside], counter.joules[inside]
    if len(t_ns) < 2 or (apart_s := float(t_ns[-1] - t_ns[0]) / NS_PER_S) < _APART_S:
        overlap = duration(apart_s) if len(t_ns) > 1 else "0 s"
        raise NotMeasurable(
            f"energy counter and power were read together for only {overlap}; the check needs"
            f" {_APART_S:g} s"
        )
    return float(joules[-1] - joules[0]), integral.over(Window(int(t_ns[0]), int(t_ns[-1]))).joules


def _integral(evidence: Evidence, device: Device) -> EnergyCurve:
    power = evidence.series("power_w").get(device.id)
    if power is None or len(power.t_ns) < 2:
        reason = "no power reading" if power is None else "only one power reading"
        raise NotMeasurable(why_absent(device, "power_w") or reason)
    slack_s = 1.0 if _is_averaged(device) else REFRESH_S
    return power_curve(power.t_ns, power.values, slack_s=slack_s)


def _shaped_counter(
    evidence: Evidence, device: Device, integral: EnergyCurve | Missing
) -> EnergyCurve:
    """The curve of the energy counter; between readings it follows the steps, else the power."""
    if isinstance(integral, Missing):
        return _counter(evidence, device)
    power = evidence.series("power_w")[device.id]
    counter = evidence.series("energy_j").get(device.id)
    if counter is not None and len(counter.t_ns) > 1:
        spans = span_shape(evidence, power, counter)
        if spans is not None:
            return _counter(evidence, device, spans, lag_s=0.0)
    return _counter(evidence, device, integral)


def _counter(
    evidence: Evidence,
    device: Device,
    shape: EnergyCurve | None = None,
    *,
    lag_s: float = REFRESH_S / 2,
) -> EnergyCurve:
    counter = evidence.series("energy_j").get(device.id)
    if counter is None:
        raise NotMeasurable(why_absent(device, "energy_j") or "no energy counter was read")
    refresh_s = REFRESH_S if device.kind == "gpu" else RAPL_REFRESH_S
    return counter_curve(
        counter.t_ns, counter.values, shape=shape, lag_s=lag_s, refresh_s=refresh_s
    )


def boundary(evidence: Evidence) -> list[Device]:
    """The devices whose energy counts as the run's: accelerators, else CPU packages and DRAM."""
    devices = counted_once(evidence.devices("gpu") or evidence.devices("cpu", "dram"))
    if not devices:
        why = evidence.why_no_device("energy sensor", *dict.fromkeys((*ACCELERATORS, *CPUS)))
        if evidence.is_imported:
            raise NotMeasurable(why)
        raise NotMeasurable(f"{why}; {_HINT_CPU if evidence.gpus('unused') else _HINT}")
    marked = {detail.partition(" ")[0] for detail in evidence.marked("device_shared")}
    shared = [device.id for device in devices if device.id in marked]
    if shared:
        raise NotMeasurable(
            f"other programs computed on {', '.join(shared)} too (see the"
            " mark device_shared): the energy of the board can't be split between them"
        )
    if evidence.has_company:
        raise NotMeasurable(
            "another training of the same command ran at the same time: the energy of the devices"
            " can't be split between them; measure each in its own command"
        )
    return devices


def counted_once(devices: list[Device]) -> list[Device]:
    """Leave out devices whose energy is in another's counter, such as a board's second die."""
    ids = {device.id for device in devices}
    return [device for device in devices if device.facts.get("energy_counted_in") not in ids]
