"""Student's t for any degrees of freedom: its distribution, its quantile, its power.

Tables of 95 % values do not suffice: Welch's degrees of freedom are fractions, and users choose the
confidence. A normal quantile would halve an interval at 2 degrees of freedom (1.96 against 4.30).
The distribution is computed by the continued fraction of the incomplete beta function (Abramowitz &
Stegun 26.7.1 and 26.5.8, evaluated by Lentz's method), and the quantile by bisection.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.records import FloatArray

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
    """The probability of a value up to t."""
    tail = 0.5 * _incomplete_beta(dof / 2.0, 0.5, dof / (dof + t * t))
    return tail if t < 0 else 1.0 - tail


@lru_cache(maxsize=1024)
def quantile(probability: float, dof: float) -> float:
    """The value that this share of the distribution lies below."""
    if not 0.0 < probability < 1.0 or not dof > 0.0:
        raise UsageError(
            "a quantile wants a probability between 0 and 1 and degrees of freedom above 0;"
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
        raise UsageError(f"a confidence lies between 0 and 1, such as 0.95; got {confidence:g}")
    return quantile(0.5 + confidence / 2.0, dof)


def _spreads(dof: float) -> tuple[FloatArray, FloatArray]:
    """A grid of estimated over true standard deviation, and the probability of each point."""
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
    return float(weight @ (_normal(shift - edge) + _normal(-shift - edge)))


def spread_bounds(dof: float, *, confidence: float) -> tuple[float, float]:
    """The interval of the true standard deviation, as multiples of the estimated one."""
    s, weight = _spreads(dof)
    below = np.cumsum(weight) - weight / 2.0
    tail = (1.0 - confidence) / 2.0
    small, large = np.interp([tail, 1.0 - tail], below, s)
    return float(1.0 / large), float(1.0 / small)
