"""Energy of a device up to any instant, from its counter or its power readings.

Sampler and counter have clocks of their own, so a window almost never begins or ends on a reading.
Adding up the readings inside loses up to an interval at each end and reads a short step as 0 J. So
energy is a curve over time, and a window is a difference of two of its values; windows side by side
add up exactly.

The usual power field is an average of about the last second on recent NVIDIA chips: integrating it
reads a 0.5 s burst 62 % low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.records import FloatArray, TimeArray, Window
from ergmeter.units import NS_PER_S

# The slowest GPU power sensors refresh at 10 Hz. Twenty refreshes missed means a
# starved sampler or a lost device, and a line drawn across that invents joules.
MAX_GAP_S = 2.0
# How far the last reading may be behind the end of a window, and the first after its beginning, as
# where a loop begins at once and the reader's thread has yet to: two refreshes and a little.
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
        """Joules up to these instants. Before the first knot and after the last the power is taken
        to be as it is there."""
        ahead_s = np.maximum(0, self.t_ns[0] - np.asarray(t_ns)) / NS_PER_S
        beyond_s = np.maximum(0, np.asarray(t_ns) - self.t_ns[-1]) / NS_PER_S
        outside = beyond_s * self._last_w - ahead_s * self._first_w
        return np.asarray(self._within(t_ns) + outside, dtype=np.float64)

    @property
    def _first_w(self) -> float:
        if self.shape is not None:
            return self.shape._first_w
        if self.power_w is not None:
            return float(self.power_w[0])
        first_s = float(self.t_ns[1] - self.t_ns[0]) / NS_PER_S
        return float(self.joules[1] - self.joules[0]) / first_s

    @property
    def _last_w(self) -> float:
        if self.shape is not None:
            return self.shape._last_w
        if self.power_w is not None:
            return float(self.power_w[-1])
        last_s = float(self.t_ns[-1] - self.t_ns[-2]) / NS_PER_S
        return float(self.joules[-1] - self.joules[-2]) / last_s

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

        The outer edges are as sure as those of one window. When a cut began is known to a refresh:
        all cuts may be off in the same direction, and each by itself; both are in the bounds.
        """
        reached = self.spanned(starts, ends)
        if not reached.all():
            first = int(np.argmin(reached))
            self._check_ends(Window(int(starts[0]), int(ends[-1])))
            self._check_gaps(Window(int(starts[first]), int(ends[first])))
        outer = self.over(Window(int(starts[0]), int(ends[-1])), is_checked=True)
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

    def over(self, window: Window, *, is_checked: bool = False) -> Energy:
        """Joules in a window. Raises NotMeasurable if the readings do not span it."""
        if not is_checked:
            self._check_ends(window)
            self._check_gaps(window)
        edges = np.array([window.start_ns, window.end_ns], dtype=np.int64)
        joules = self.at(edges)
        early, late = self._bounds(edges, joules)
        low_j = max(0.0, float(early[1] - late[0]))
        return Energy(float(joules[1] - joules[0]), low_j, float(late[1] - early[0]))

    def over_each(
        self, start_ns: TimeArray, end_ns: TimeArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Joules of each window, the least and the most they may be; NaN outside the readings."""
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
        """Which windows the readings span, without a gap that is too long."""
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
        """The least and the most that can have been drawn up to each edge."""
        early, late = np.zeros(len(edges)), np.full(len(edges), math.inf)
        if math.isfinite(self.refresh_s):
            slack_ns = round(self.refresh_s * NS_PER_S)
            early, late = self.at(edges - slack_ns), self.at(edges + slack_ns)
        if self.read is not None:
            # What a counter showed before an edge had been drawn by then; what it shows one refresh
            # after the edge holds all that was drawn up to the edge.
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

    def _check_ends(self, window: Window) -> None:
        if self.t_ns[0] > window.start_ns + LATE_S * NS_PER_S:
            late_s = (self.t_ns[0] - window.start_ns) / NS_PER_S
            raise NotMeasurable(f"readings begin {late_s:.2f} s after the window does")
        if self.seen_until_ns < window.end_ns - LATE_S * NS_PER_S:
            early_s = (window.end_ns - self.seen_until_ns) / NS_PER_S
            raise NotMeasurable(f"readings end {early_s:.2f} s before the window does")

    def _check_gaps(self, window: Window) -> None:
        first = max(0, int(np.searchsorted(self.t_ns, window.start_ns, side="right")) - 1)
        last = int(np.searchsorted(self.t_ns, window.end_ns, side="left"))
        gap_s = float(np.diff(self.t_ns[first : last + 1]).max(initial=0)) / NS_PER_S
        if gap_s > self.max_gap_s:
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

    A counter that refreshes every 100 ms shows the same value in several readings. The instant of a
    refresh lies between the last reading of the old value and the first of the new, and no further
    back from that than a refresh; half way is the best guess. Between two values the joules follow
    `shape`, if there is one, which comes `lag_s` late; a straight line if not. Raises NotMeasurable
    for a counter that never moved or that was reset.
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


def merged(starts: TimeArray, ends: TimeArray) -> tuple[TimeArray, TimeArray]:
    """Spans merged where they overlap or touch, in order."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    begins = np.append(True, starts[1:] > reached[:-1])
    last = np.append(np.flatnonzero(begins)[1:] - 1, len(starts) - 1)
    return starts[begins], reached[last]


def power_curve(t_ns: TimeArray, power_w: FloatArray, *, slack_s: float = REFRESH_S) -> EnergyCurve:
    """The integral of power readings, by trapezoids. Raises NotMeasurable if all are 0.

    `slack_s` is how far back in time a reading may speak: a refresh, or a sensor's averaging.
    """
    if not power_w.any():
        raise NotMeasurable("power reads 0 W throughout, which no device that is on draws")
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
