"""Student's t, intervals within one run (ratios, slopes), the end of the warm-up, percentiles.

Intervals come from blocks of consecutive steps, because steps are not independent. A checkpoint, a
slow data loader or a warming chip affects many in a row. Intervals from single steps would be too
narrow (batch means: Law & Kelton, Simulation Modeling and Analysis).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ergmeter.errors import UsageError
from ergmeter.records import FloatArray, TimeArray

# -- Student's t -----------------------------------------------------------------------------------
#
# Tables of 95 % values do not suffice: Welch's degrees of freedom are fractions, and users choose
# the confidence. A normal quantile would halve an interval at 2 degrees of freedom (1.96 against
# 4.30). The distribution is computed by the continued fraction of the incomplete beta function
# (Abramowitz & Stegun 26.7.1 and 26.5.8, evaluated by Lentz's method), and the quantile by
# bisection.


_TINY = 1e-300
_TERMS = 500
_POINTS = 1001


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function; it converges for small x."""
    c, d = 1.0, 1.0 / _away_from_0(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away_from_0(1.0 + term * d)
            c = _away_from_0(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _away_from_0(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    front = math.exp(log_front)
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _fraction(a, b, x) / a
    return 1.0 - front * _fraction(b, a, 1.0 - x) / b


def cdf(t: float, dof: float) -> float:
    """Student's t distribution: the probability of a value up to `t`."""
    tail = 0.5 * _incomplete_beta(dof / 2.0, 0.5, dof / (dof + t * t))
    return tail if t < 0 else 1.0 - tail


@lru_cache(maxsize=1024)
def quantile(probability: float, dof: float) -> float:
    """Student's t distribution: the value below which a value lies with this probability."""
    if not 0.0 < probability < 1.0 or not dof > 0.0:
        raise UsageError(
            "a quantile needs a probability between 0 and 1, and degrees of freedom above 0;"
            f" got {probability} and {dof}"
        )
    if probability < 0.5:
        return -quantile(1.0 - probability, dof)
    low, high = 0.0, 1.0
    while cdf(high, dof) < probability:
        low, high = high, 2.0 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if cdf(middle, dof) < probability else (low, middle)
    return (low + high) / 2.0


def factor(confidence: float, dof: float) -> float:
    """The factor on a standard error for a two-sided interval of this confidence."""
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"the confidence is {confidence:g}; must be between 0 and 1, such as 0.95")
    return quantile(0.5 + confidence / 2.0, dof)


def _spreads(dof: float) -> tuple[FloatArray, FloatArray]:
    """Return a grid of estimated / true standard deviation, and the probability of each point."""
    edges = np.linspace(0.0, 1.0 + 12.0 / math.sqrt(dof), _POINTS)
    s = (edges[1:] + edges[:-1]) / 2.0
    log_density = (dof - 1.0) * np.log(s) - dof * s * s / 2.0
    weight = np.exp(log_density - log_density.max())
    return s, weight / weight.sum()


_normal = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2.0)), otypes=[np.float64])


def tail_probability(shift: float, dof: float, *, critical: float) -> float:
    """The probability that |t| exceeds a critical value: both tails of the noncentral t.

    `shift`: the true effect in standard errors. Integrated over the estimated standard deviation.
    """
    s, weight = _spreads(dof)
    edge = critical * s
    return float((weight * (_normal(shift - edge) + _normal(-shift - edge))).sum())


def spread_bounds(dof: float, *, confidence: float) -> tuple[float, float]:
    """The interval of the true standard deviation, as multiples of the estimated one."""
    s, weight = _spreads(dof)
    below = np.cumsum(weight) - weight / 2.0
    tail = (1.0 - confidence) / 2.0
    small, large = np.interp([tail, 1.0 - tail], below, s)
    return float(1.0 / large), float(1.0 / small)


# -- intervals from blocks of steps ----------------------------------------------------------------


MIN_BLOCKS = 5
MAX_BLOCKS = 20


def t95(dof: int) -> float:
    """The factor on a standard error for a 95 % interval, by degrees of freedom.

    Rounded to three decimals, as statistics tables print it, so that recorded intervals stay the
    same.
    """
    return round(factor(0.95, dof), 3)


def blocks_of(steps: int) -> int:
    """The number of blocks that `steps` are cut into; 0 if there are too few for an interval."""
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
    """The first row of every block except block 0; None if there are too few rows."""
    blocks = blocks_of(rows)
    return np.linspace(0, rows, blocks + 1).astype(np.int64)[1:-1] if blocks else None


def interval_of(top: FloatArray, bottom: FloatArray) -> tuple[float, float]:
    """The 95 % interval of sum(top) / sum(bottom); `top`, `bottom`: the sums of each block."""
    blocks = len(top)
    ratio = float(top.sum() / bottom.sum())
    residuals = top - ratio * bottom
    variance = float((residuals**2).sum()) / (blocks - 1)
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
    # Both centred, so that values that do not change have a slope of exactly 0.
    t, v = t - t.mean(), v - v.mean()
    weight = float((t**2).sum())
    if weight == 0:
        return None
    slope = float((t * v).sum()) / weight
    error = math.sqrt(float(((v - slope * t) ** 2).sum()) / (blocks - 2) / weight)
    margin = t95(blocks - 2) * error
    return slope, slope - margin, slope + margin


def percentile(values: FloatArray, q: float) -> float:
    """The q-th percentile (0 to 100), interpolated between the two nearest values."""
    return float(np.percentile(values, q))


def mean_rate(rates: FloatArray) -> float:
    """The harmonic mean of rates: the overall rate if each was taken over the same amount of work.

    The arithmetic mean would give a slow stretch too little weight: it lasted longer.
    """
    return float(len(rates) / np.sum(1 / rates))
