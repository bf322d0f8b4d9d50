"""How sure a figure is, and when a run has settled. Pure functions of arrays.

Intervals come from blocks of consecutive steps, because steps are not independent: a checkpoint, a
slow reader or a warming chip colours many in a row, and treating each as a fresh draw would promise
a precision the run does not have (batch means: Law & Kelton, Simulation Modeling and Analysis).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ergmeter.records import FloatArray, TimeArray

MIN_BLOCKS = 5
MAX_BLOCKS = 20
# Student's t, two-sided 95 %, by degrees of freedom 3 to 19 (any statistics table).
_T95: tuple[float, ...] = (
    *(3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201),
    *(2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)


def t95(freedom: int) -> float:
    """The factor on a standard error with so many degrees of freedom."""
    return _T95[freedom - 3]


def blocks_of(steps: int) -> int:
    """Into how many blocks to cut so many steps; 0 if there are too few for an interval."""
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
    """Before which rows to cut so many of them into blocks; None if they are too few."""
    blocks = blocks_of(rows)
    return np.linspace(0, rows, blocks + 1).astype(np.int64)[1:-1] if blocks else None


def interval_of(top: FloatArray, bottom: FloatArray) -> tuple[float, float]:
    """The same, of the blocks' sums."""
    blocks = len(top)
    ratio = float(top.sum() / bottom.sum())
    residuals = top - ratio * bottom
    variance = float(residuals @ residuals) / (blocks - 1)
    margin = t95(blocks - 1) * math.sqrt(blocks * variance) / float(bottom.sum())
    return max(0.0, ratio - margin), ratio + margin


def settled_after(durations: FloatArray) -> int | None:
    """How many leading steps to leave out so that the rest is steady; None if none settles.

    The marginal standard error rule (MSER; White 1997): drop the prefix that makes the standard
    error of the mean of what is left smallest, looking at the first half only; a minimum at its
    very end says that the run never settled.
    """
    n = len(durations)
    if n < 2 * MIN_BLOCKS:
        return None
    half = n // 2
    # Around the mean of the second half, which every tail has in it: then at least half of a
    # tail's squares is its spread, and the difference below loses nothing. Around the mean of all,
    # a first step of minutes would leave more rounding in it than the rest has spread.
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
    """Work over time of rates that were each taken over as much work: their harmonic mean.

    The arithmetic mean weighs a slow stretch as little as a fast one, though it lasted longer.
    """
    return float(len(rates) / np.sum(1 / rates))
