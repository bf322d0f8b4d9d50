"""Confidence intervals of ratios and slopes, and the end of a run's warm-up.

Intervals come from blocks of consecutive steps, because steps are not independent. A checkpoint, a
slow data loader or a warming chip affects many in a row. Intervals from single steps would be too
narrow (batch means: Law & Kelton, Simulation Modeling and Analysis).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.stats.student_t import factor

if TYPE_CHECKING:
    from ergmeter.records import FloatArray, TimeArray

MIN_BLOCKS = 5
MAX_BLOCKS = 20


def t95(dof: int) -> float:
    """The factor on a standard error for a 95 % interval, by degrees of freedom.

    Rounded to three decimals, as statistics tables print it: recorded intervals stay the same.
    """
    return round(factor(0.95, dof), 3)


def blocks_of(steps: int) -> int:
    """The number of blocks for so many steps; 0 if there are too few for an interval."""
    return min(MAX_BLOCKS, steps // 2) if steps >= 2 * MIN_BLOCKS else 0


def ratio_interval(numerators: FloatArray, denominators: FloatArray) -> tuple[float, float] | None:
    """The 95 % interval of sum(numerators) / sum(denominators), from blocks of the rows.

    The ratio estimator's variance, linearised: residual of each block from the overall ratio.
    Both are amounts, so the interval ends at 0. Returns None if there are too few rows.
    """
    cuts = cuts_of(len(numerators))
    if cuts is None:
        return None
    edges = np.append(0, cuts)
    return interval_of(np.add.reduceat(numerators, edges), np.add.reduceat(denominators, edges))


def cuts_of(rows: int) -> TimeArray | None:
    """The first row of each block but the first; None if there are too few rows."""
    blocks = blocks_of(rows)
    return np.linspace(0, rows, blocks + 1).astype(np.int64)[1:-1] if blocks else None


def interval_of(top: FloatArray, bottom: FloatArray) -> tuple[float, float]:
    """The 95 % interval of the ratio, from the sums of each block."""
    blocks = len(top)
    ratio = float(top.sum() / bottom.sum())
    residuals = top - ratio * bottom
    variance = float(residuals @ residuals) / (blocks - 1)
    margin = t95(blocks - 1) * math.sqrt(blocks * variance) / float(bottom.sum())
    return max(0.0, ratio - margin), ratio + margin


def settled_after(durations: FloatArray) -> int | None:
    """The number of leading steps to leave out as warm-up; None if step times never settle.

    The marginal standard error rule (MSER; White 1997): drop the prefix that makes the standard
    error of the remaining mean smallest, looking at the first half only. A minimum at its very
    end means that the run never settled.
    """
    n = len(durations)
    if n < 2 * MIN_BLOCKS:
        return None
    half = n // 2
    # Centred on the mean of the second half, which is part of every tail: at least half of a tail's
    # squares is then its spread, and the difference below loses no digits. Centred on the overall
    # mean, a first step of minutes would leave rounding errors larger than the spread.
    steady = float(durations[half:].mean())
    centred = durations - steady
    tail_sum = np.cumsum(centred[::-1])[::-1]
    tail_square = np.cumsum((centred**2)[::-1])[::-1]
    left = n - np.arange(half + 1)
    spread = tail_square[: half + 1] - tail_sum[: half + 1] ** 2 / left
    # Steps that differ by less than a clock's resolution do not differ.
    noise = left * (1e-9 + 1e-9 * steady) ** 2
    spread = np.where(spread > noise, spread, 0.0)
    best = int(np.argmin(spread / left.astype(float) ** 2))
    return None if best == half else best


def slope_interval(t_s: FloatArray, values: FloatArray) -> tuple[float, float, float] | None:
    """Slope of values over time with its 95 % interval, from the means of up to 20 blocks.

    Returns None if there are too few readings.
    """
    blocks = blocks_of(len(values))
    if not blocks:
        return None
    edges = np.linspace(0, len(values), blocks + 1).astype(int)
    t = np.array([t_s[a:b].mean() for a, b in pairwise(edges)])
    v = np.array([values[a:b].mean() for a, b in pairwise(edges)])
    centred = t - t.mean()
    weight = float(centred @ centred)
    if weight == 0:
        return None
    slope = float(centred @ v) / weight
    residuals = v - v.mean() - slope * centred
    error = math.sqrt(float(residuals @ residuals) / (blocks - 2) / weight)
    margin = t95(blocks - 2) * error
    return slope, slope - margin, slope + margin


def percentile(values: FloatArray, q: float) -> float:
    """The q-th percentile (0 to 100), between the two nearest values."""
    return float(np.percentile(values, q))


def mean_rate(rates: FloatArray) -> float:
    """The harmonic mean of rates: the overall rate if each was taken over the same amount of work.

    The arithmetic mean would give a slow stretch too little weight: it lasted longer.
    """
    return float(len(rates) / np.sum(1 / rates))
