"""Statistical power: how often so many repeats show a difference, and how many are needed.

"No difference shown" is not "no difference": three repeats that scatter by 2 % show a difference
of 3 % in one case of five. The number of repeats needed is therefore reported with the verdict.

The scatter is itself estimated from few repeats. With two on each side the true scatter may be
three times the estimate, so the number needed has a range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ergmeter.errors import UsageError
from ergmeter.stats.intervals import factor, spread_bounds, tail_probability

POWER = 0.8  # the usual value: four of five repetitions of the experiment show the effect
_MOST = 1000
_SHARES = 12


@dataclass(frozen=True, slots=True)
class Needed:
    """Repeats on each side (or pairs). None: more than a thousand."""

    repeats: int | None
    fewest: int | None
    most: int | None
    effect: float
    power: float


def power(
    effect: float, noise: float, repeats: int, *, is_paired: bool = False, confidence: float = 0.95
) -> float:
    """The probability that so many repeats on each side show an effect.

    Effect and noise are both logarithms of ratios (`relative`), or both differences of losses.
    With pairs, noise is the deviation of a pair's difference; otherwise that of one repeat.
    """
    if repeats < 2:
        return 0.0
    if noise == 0.0:
        return 1.0 if effect else 0.0
    if is_paired:
        shift, dof = abs(effect) / noise * math.sqrt(repeats), repeats - 1.0
        return tail_probability(shift, dof, critical=factor(confidence, dof))
    shift, dof = abs(effect) / noise * math.sqrt(repeats / 2.0), 2.0 * (repeats - 1.0)
    return sum(
        weight * tail_probability(shift, dof, critical=factor(confidence, welch))
        for welch, weight in _welch_dof(repeats)
    )


@lru_cache(maxsize=256)
def _welch_dof(repeats: int) -> tuple[tuple[float, float], ...]:
    """The distribution of Welch's degrees of freedom, if both sides scatter alike.

    One side's share of the total variance follows a beta distribution, independent of the total.
    So the power is that of a pooled test, averaged over critical values.
    """
    # share = sin(angle)^2 removes the poles of the density; the second half mirrors the first.
    angle = (np.arange(_SHARES) + 0.5) / _SHARES * math.pi / 4.0
    share = np.sin(angle) ** 2
    log_weight = (repeats - 2.0) * np.log(np.sin(2.0 * angle))
    weight = np.exp(log_weight - log_weight.max())
    dof = (repeats - 1) / (share**2 + (1.0 - share) ** 2)
    return tuple(zip(dof.tolist(), (weight / weight.sum()).tolist(), strict=True))


def relative(share: float) -> float:
    """A relative difference (0.03 for 3 %) as an effect on the axis of logarithms."""
    if not share > -1.0 or share == 0.0:
        raise UsageError(f"a difference to show is a share such as 0.02, not 0; got {share:g}")
    return math.log1p(share)


def needed(
    effect: float,
    noise: float,
    *,
    dof: float,
    is_paired: bool = False,
    confidence: float = 0.95,
) -> Needed:
    """The repeats that show an effect in `POWER` of cases, with a range.

    `dof`: degrees of freedom of the noise estimate; its 80 % range gives the fewest and most.
    """
    narrow, wide = spread_bounds(dof, confidence=0.8)
    likely, fewest, most = (
        _fewest(effect, noise * part, is_paired=is_paired, confidence=confidence)
        for part in (1.0, narrow, wide)
    )
    return Needed(likely, fewest, most, effect, POWER)


def shows(
    effect: float,
    noise: float,
    repeats: int,
    *,
    is_paired: bool,
    confidence: float,
) -> bool:
    """True if so many repeats show an effect in `POWER` of cases."""
    return power(effect, noise, repeats, is_paired=is_paired, confidence=confidence) >= POWER


def _fewest(effect: float, noise: float, *, is_paired: bool, confidence: float) -> int | None:
    def suffices(repeats: int) -> bool:
        return shows(effect, noise, repeats, is_paired=is_paired, confidence=confidence)

    if not suffices(_MOST):
        return None
    low, high = 1, 2
    while not suffices(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
