"""Energy a device drew up to any instant: from its counter, else from readings of its power.

Two traps. The sampler ticks on its own clock and a counter refreshes on its own, so a window almost
never begins or ends on a reading: adding up what lies inside loses up to an interval at each end
and reads a short step as zero joules. So the energy is a curve over time, and a window is a
difference of two of its values; windows side by side add up exactly. And the usual power field is
an average of about the last second on recent NVIDIA chips: integrating it reads a 0.5 s burst 62 %
low.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.records import FloatArray, TimeArray, Window
from ergmeter.units import NS_PER_S

# The slowest GPU power sensors refresh at 10 Hz. Twenty refreshes missed means a
# starved sampler or a lost device, and a line drawn across that invents joules.
MAX_GAP_S = 2.0
# How far the last reading may be behind the end of a window: two refreshes and a little.
LATE_S = 0.25


@dataclass(frozen=True, slots=True)
class Energy:
    """What a device drew in a window, and between which values the readings say it must lie."""

    joules: float
    low_j: float
    high_j: float


@dataclass(frozen=True, slots=True)
class EnergyCurve:
    """Joules since the first reading, at each knot; between knots the power is a straight line."""

    t_ns: TimeArray
    joules: FloatArray
    power_w: FloatArray | None  # at the knots; None: constant between two knots
    seen_until_ns: int

    def at(self, t_ns: TimeArray | FloatArray) -> FloatArray:
        """Joules up to these instants."""
        if self.power_w is None:
            return np.asarray(np.interp(t_ns, self.t_ns, self.joules), dtype=np.float64)
        left = np.clip(np.searchsorted(self.t_ns, t_ns, side="right") - 1, 0, len(self.t_ns) - 1)
        since_s = (np.clip(t_ns, self.t_ns[0], self.t_ns[-1]) - self.t_ns[left]) / NS_PER_S
        mean_w = (self.power_w[left] + np.interp(t_ns, self.t_ns, self.power_w)) / 2
        return np.asarray(self.joules[left] + since_s * mean_w, dtype=np.float64)

    def over(self, window: Window) -> Energy:
        """Joules in a window. Raises NotMeasurable if the readings do not span it."""
        self._check_span(window)
        edges = np.array([window.start_ns, window.end_ns], dtype=np.int64)
        start_j, end_j = self.at(edges)
        # The curve only rises, so at an edge it lies between the knots on either side of it.
        before = np.clip(np.searchsorted(self.t_ns, edges, side="right") - 1, 0, None)
        after = np.clip(np.searchsorted(self.t_ns, edges, side="left"), None, len(self.t_ns) - 1)
        low_j = max(0.0, float(self.joules[before[1]] - self.joules[after[0]]))
        high_j = float(self.joules[after[1]] - self.joules[before[0]])
        return Energy(float(end_j - start_j), low_j, high_j)

    def _check_span(self, window: Window) -> None:
        if self.t_ns[0] > window.start_ns:
            late_s = (self.t_ns[0] - window.start_ns) / NS_PER_S
            raise NotMeasurable(f"readings begin {late_s:.2f} s after the window does")
        if self.seen_until_ns < window.end_ns - LATE_S * NS_PER_S:
            early_s = (window.end_ns - self.seen_until_ns) / NS_PER_S
            raise NotMeasurable(f"readings end {early_s:.2f} s before the window does")
        if self.power_w is None:
            return  # a counter never forgets, however long nobody looked
        first = int(np.searchsorted(self.t_ns, window.start_ns, side="right")) - 1
        last = int(np.searchsorted(self.t_ns, window.end_ns, side="left"))
        gap_s = float(np.diff(self.t_ns[first : last + 1]).max(initial=0)) / NS_PER_S
        if gap_s > MAX_GAP_S:
            raise NotMeasurable(f"no power reading for {gap_s:.1f} s (limit {MAX_GAP_S:g} s)")


def counter_curve(t_ns: TimeArray, counter_j: FloatArray) -> EnergyCurve:
    """The curve of an energy counter, interpolated between its refreshes.

    A counter that refreshes every 100 ms shows the same value in several readings. The instant of a
    refresh lies between the last reading of the old value and the first of the new; half way is the
    best guess. Raises NotMeasurable for a counter that never moved or that was reset.
    """
    fresh = np.flatnonzero(np.diff(counter_j) != 0) + 1
    if not len(fresh):
        span_s = (int(t_ns[-1]) - int(t_ns[0])) / NS_PER_S
        raise NotMeasurable(
            f"the energy counter stood still at {counter_j[0]:.1f} J for {span_s:.1f} s"
        )
    knots_ns = np.append(t_ns[:1], t_ns[fresh - 1] + (t_ns[fresh] - t_ns[fresh - 1]) // 2)
    knots_j = np.append(counter_j[:1], counter_j[fresh])
    falls = np.flatnonzero(np.diff(knots_j) < 0)
    if len(falls):
        before_j, after_j = knots_j[falls[0] : falls[0] + 2]
        raise NotMeasurable(f"the energy counter was reset from {before_j:.1f} to {after_j:.1f} J")
    return EnergyCurve(knots_ns, knots_j - knots_j[0], None, int(t_ns[-1]))


def power_curve(t_ns: TimeArray, power_w: FloatArray) -> EnergyCurve:
    """The integral of power readings, by trapezoids. Raises NotMeasurable if all are 0."""
    if not power_w.any():
        raise NotMeasurable("power reads 0 W throughout, which no device that is on draws")
    spans_s = np.diff(t_ns) / NS_PER_S
    pieces = spans_s * (power_w[1:] + power_w[:-1]) / 2
    return EnergyCurve(t_ns, np.append(0.0, np.cumsum(pieces)), power_w, int(t_ns[-1]))
