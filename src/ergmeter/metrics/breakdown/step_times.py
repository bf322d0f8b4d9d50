"""How step times are spread, and which steps stand out.

The trap: a histogram whose last bar is one step of 40 s, in which all the others are the first bar.
The bars reach to three times the median, and what lies beyond is counted and named, never dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.breakdown.time_breakdown import STALL
from ergmeter.metrics.breakdown.timeline import seconds
from ergmeter.units import number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import FloatArray, TimeArray

BARS = 40
_REACH = 3.0  # times the median: what is beyond is named by itself
_NAMED = 20


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step of more than twice the median."""

    index: int | None  # by its program's own count
    at_s: float  # since the run began
    took_s: float
    times: float  # the median


@dataclass(frozen=True)
class Distribution:
    """Counted steps by how long they took."""

    edges_s: FloatArray
    counts: TimeArray
    median_s: float
    p95_s: float
    beyond: int  # steps that are longer than the last edge
    outliers: tuple[Outlier, ...]  # the longest first, some of them
    stalled: int  # how many there are
    note: str


def distribution(evidence: Evidence) -> Distribution:
    """Of the counted steps of the rank that told the most. Raises NotMeasurable if few are."""
    lane = evidence.counted.longest
    if not evidence.trains:
        raise NotMeasurable("an inference run has requests and no steps: see its latencies")
    if len(lane) < 3:
        raise NotMeasurable(f"{number_of(len(lane), 'counted step')}: too few for a distribution")
    times_s = evidence.periods_s(lane)
    times_s = times_s / np.maximum(np.nan_to_num(lane["steps"], nan=1.0), 1.0)
    median_s = float(np.median(times_s))
    reach_s = _REACH * median_s
    inside = times_s[times_s <= reach_s]
    counts, edges_s = np.histogram(inside, bins=_bars(len(inside)), range=_range(inside))
    slow = np.flatnonzero(times_s > STALL * median_s)
    slow = slow[np.argsort(-times_s[slow], kind="stable")]
    return Distribution(
        edges_s,
        counts,
        median_s,
        float(np.percentile(times_s, 95)),
        len(times_s) - len(inside),
        tuple(_outlier(evidence, int(place), times_s, median_s) for place in slow[:_NAMED]),
        len(slow),
        evidence.window_note,
    )


def _bars(steps: int) -> int:
    """Two for each root of the steps: a bar for every one of ten steps shows nothing."""
    return min(BARS, 2 * math.isqrt(max(1, steps)))


def _range(times_s: FloatArray) -> tuple[float, float]:
    low, high = float(times_s.min()), float(times_s.max())
    # Steps of one length to the nanosecond: a bar needs some width.
    return (low, high) if high > low else (low * 0.99, low * 1.01 or 1e-9)


def _outlier(evidence: Evidence, place: int, times_s: FloatArray, median_s: float) -> Outlier:
    lane = evidence.counted.longest
    index = float(lane["index"][place])
    took_s = float(times_s[place])
    return Outlier(
        None if np.isnan(index) else int(index),
        seconds(evidence, int(lane["start_ns"][place])),
        took_s,
        took_s / median_s,
    )
