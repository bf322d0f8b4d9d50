"""Intervals between repeated runs: means, ratios, differences, p-values; and statistical power.

Repeats scatter by factors, so means, intervals and ratios are computed on logarithms. An interval
then never reaches below 0, and A over B is the inverse of B over A.

With three to five repeats a percentile bootstrap claims a difference in 13 to 19 % of cases where
there is none, a normal quantile in 9 to 12 %. Student's t keeps its 5 %: the paired interval for
runs with one seed (n - 1 degrees of freedom), or Welch's for groups of different scatter (Welch
1947; degrees of freedom after Satterthwaite 1946). One run on each side has no interval, unless
the scatter of a run is stated or was measured on other repeats. One run against repeats may take
the scatter of the repeats.

A loss is compared by its difference: it is a logarithm already, and exp(difference) is the ratio of
perplexities.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.records import FloatArray
from ergmeter.stats.intervals import cdf, factor, spread_bounds, tail_probability

Scale: TypeAlias = Literal["ratio", "difference"]
Way: TypeAlias = Literal["fall", "rise", "change"]

PAIRED = "paired t-interval"
WELCH = "Welch's t-interval"
# Relative scatter below this is floating-point rounding.
_SAME = 1e-12
# A ratio and its inverse must both be finite: e^700 is about 1e304.
_MOST_LOG = 700.0
_STATED_NOISE_DOF = 1e6  # degrees of freedom of a noise that is stated and not estimated
UNBOUNDED = (
    "no interval: at this confidence and with so few repeats it reaches beyond a factor of 1e304"
)


@dataclass(frozen=True, slots=True)
class Contrast:
    """A / B or A - B with its interval. `why`: the reason if there is no interval."""

    value: float
    low: float | None
    high: float | None
    scale: Scale
    confidence: float
    method: str
    repeats: tuple[int, int]
    means: tuple[float, float]  # of A and of B
    # Standard deviation of one repeat, or of a pair's difference, on the scale's axis.
    noise: float | None = None
    dof: float | None = None
    error: float | None = None  # standard error of the value, on the scale's axis
    why: str = ""

    @property
    def neutral(self) -> float:
        """The value that means no difference: 1 for a ratio, 0 for a difference."""
        return 1.0 if self.scale == "ratio" else 0.0

    @property
    def is_shown(self) -> bool:
        """True if a difference is shown: the interval does not contain `neutral`."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.neutral or self.high < self.neutral

    @property
    def is_exact(self) -> bool:
        """True if the interval has zero width: all repeats are equal, as peak memory may be."""
        return self.low is not None and self.low == self.high

    @property
    def inverse(self) -> Contrast:
        """The same contrast the other way round: B / A, or B - A."""
        low, high = (None if end is None else self._turned(end) for end in (self.high, self.low))
        repeats, means = self.repeats[::-1], self.means[::-1]
        return replace(
            self, value=self._turned(self.value), low=low, high=high, repeats=repeats, means=means
        )

    def p_value(self, way: Way = "change") -> float | None:
        """The p-value of "no difference", against a fall, a rise or any change of A."""
        if self.error is None or self.dof is None:
            return None
        shift = math.log(self.value) if self.scale == "ratio" else self.value
        if self.error == 0.0:
            t = math.copysign(math.inf, shift) if shift else 0.0
        else:
            t = shift / self.error
        if way == "change":
            return min(1.0, 2.0 * _below(-abs(t), self.dof))
        return _below(t if way == "fall" else -t, self.dof)

    def _turned(self, value: float) -> float:
        return 1.0 / value if self.scale == "ratio" else -value


def _below(t: float, dof: float) -> float:
    return float(t > 0) if math.isinf(t) else cdf(t, dof)


@dataclass(frozen=True, slots=True)
class RunNoise:
    """The standard deviation of a single run, as a share of its value: stated, or measured.

    `source`: the repeats that it was measured on, "" if stated; `dof`: their degrees of freedom.
    """

    share: float
    dof: float = _STATED_NOISE_DOF
    source: str = ""

    def __str__(self) -> str:
        if not self.source:
            return f"noise as given, {self.share * 100:g} % a run"
        return f"noise of {self.source}, {self.share * 100:.2g} % a run"


def pooled_noise(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the scatter of repeats as a share, pooled over groups, and its degrees of freedom.

    Computed on logarithms. Raises NotMeasurable if no group has two values, or a value is not above
    0.
    """
    axes = [_axis(values, "ratio") for values in groups if len(values) > 1]
    dof = sum(len(axis) - 1 for axis in axes)
    if not dof:
        raise NotMeasurable("no group has two repeats")
    squares = sum(_std(axis) ** 2 * (len(axis) - 1) for axis in axes)
    return math.expm1(math.sqrt(squares / dof)), dof


def contrast(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    scale: Scale = "ratio",
    is_paired: bool = False,
    confidence: float = 0.95,
    noise: RunNoise | None = None,
    lenders: tuple[str, str] | None = None,
) -> Contrast:
    """Return ours / theirs (or ours - theirs) with its interval. Paired values are in pair order.

    If a side has a single run, its scatter is `noise`. Without `noise`, the other side's scatter is
    used for both if `lenders` (the names of the two sides) is given.

    Raises NotMeasurable without values, or if a value of a ratio is not above 0.
    """
    a, b = _axis(ours, scale), _axis(theirs, scale)
    middle = float(a.mean() - b.mean())
    if abs(middle) < _SAME * (1.0 + float(np.abs(a).max())):
        middle = 0.0
    back = math.exp if scale == "ratio" else float
    method = PAIRED if is_paired else WELCH
    plain = Contrast(
        *(back(middle), None, None, scale, confidence, method, (len(a), len(b))),
        means=(back(float(a.mean())), back(float(b.mean()))),
        why=_why_no_interval((len(a), len(b))),
    )
    if plain.why:
        single = _single(a, b, plain, noise, lenders)
        if single is None:
            return plain
        error, dof, scatter, method = single
    else:
        error, dof, scatter = _paired(a - b) if is_paired else _welch(a, b)
    low, high = _ends(middle, factor(confidence, dof) * error, scale)
    return replace(
        plain,
        low=low,
        high=high,
        method=method,
        noise=scatter,
        dof=dof,
        error=error,
        why=UNBOUNDED if low is None else "",
    )


def _single(
    a: FloatArray,
    b: FloatArray,
    plain: Contrast,
    noise: RunNoise | None,
    lenders: tuple[str, str] | None,
) -> tuple[float, float, float, str] | None:
    """For a side with one run: error, degrees of freedom, scatter and method; None if unknown."""
    repeated = max((a, b), key=len)
    if noise is not None:
        share, dof, method = noise.share, noise.dof, str(noise)
        size = max(map(abs, plain.means))
        scatter = math.log1p(share) if plain.scale == "ratio" else share * size
        if share and scatter == 0.0:
            return None
    elif lenders is not None and len(repeated) > 1:
        scatter, dof = _std(repeated), len(repeated) - 1.0
        method = f"the noise of {lenders[0 if len(a) > 1 else 1]}'s repeats, for both sides"
    else:
        return None
    return scatter * math.sqrt(1.0 / len(a) + 1.0 / len(b)), dof, scatter, method


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """For each p-value, True if Holm's method (1979) rejects it at family-wise level `alpha`."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def benjamini_hochberg(p_values: Sequence[float], alpha: float) -> float:
    """The largest p-value that the method of Benjamini and Hochberg (1995) rejects; -1 if none."""
    ordered = sorted(p_values)
    return max(
        (p for rank, p in enumerate(ordered, 1) if p <= alpha * rank / len(ordered)), default=-1.0
    )


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of repeats and its interval."""

    value: float
    low: float | None
    high: float | None
    noise: float | None
    repeats: int


def mean(values: Sequence[float], *, scale: Scale = "ratio", confidence: float = 0.95) -> Mean:
    """The mean of repeats: geometric for amounts, arithmetic for losses."""
    axis = _axis(values, scale)
    back = math.exp if scale == "ratio" else float
    middle = float(axis.mean())
    if len(axis) < 2:
        return Mean(back(middle), None, None, None, 1)
    noise = _std(axis)
    margin = factor(confidence, len(axis) - 1.0) * noise / math.sqrt(len(axis))
    low, high = _ends(middle, margin, scale)
    return Mean(back(middle), low, high, noise, len(axis))


def _ends(middle: float, margin: float, scale: Scale) -> tuple[float, float] | tuple[None, None]:
    """Return both ends of an interval; (None, None) if a ratio would overflow."""
    if scale == "difference":
        return middle - margin, middle + margin
    if abs(middle) + margin > _MOST_LOG:
        return None, None
    return math.exp(middle - margin), math.exp(middle + margin)


def _axis(values: Sequence[float], scale: Scale) -> FloatArray:
    axis = np.asarray(values, dtype=np.float64)
    if not len(axis):
        raise NotMeasurable("no run has a value")
    if not np.isfinite(axis).all():
        raise NotMeasurable("a value is not a finite number")
    if scale == "difference":
        return axis
    if (axis <= 0).any():
        raise NotMeasurable(f"a value is {axis.min():g}: a ratio needs values above 0")
    return np.log(axis)


def _why_no_interval(repeats: tuple[int, int]) -> str:
    if min(repeats) > 1:
        return ""
    few = "one run of each" if max(repeats) == 1 else "one run on a side"
    return f"{few}: no interval, since a single run does not show how runs scatter"


def _std(values: FloatArray) -> float:
    deviation = float(np.std(values, ddof=1))
    return 0.0 if deviation < _SAME * (1.0 + float(np.abs(values).max())) else deviation


def _paired(differences: FloatArray) -> tuple[float, float, float]:
    noise = _std(differences)
    return noise / math.sqrt(len(differences)), len(differences) - 1.0, noise


def _welch(a: FloatArray, b: FloatArray) -> tuple[float, float, float]:
    squares = _std(a) ** 2 / len(a), _std(b) ** 2 / len(b)
    total = sum(squares)
    noise = math.sqrt((_std(a) ** 2 + _std(b) ** 2) / 2.0)
    if total == 0.0:
        return 0.0, len(a) + len(b) - 2.0, 0.0
    parts = squares[0] ** 2 / (len(a) - 1) + squares[1] ** 2 / (len(b) - 1)
    return math.sqrt(total), total**2 / parts, noise


# Statistical power: how often so many repeats show a difference, and how many are needed. "No
# difference shown" is not "no difference": three repeats that scatter by 2 % show a difference of
# 3 % in one case of five. So the number of repeats needed is reported with the verdict. The scatter
# is itself estimated from few repeats. With two on each side the true scatter may be three times
# the estimate, so the number needed has a range.

POWER = 0.8  # the usual value: four of five repetitions of the experiment show the effect
_MOST = 1000
_SHARES = 12


@dataclass(frozen=True, slots=True)
class Needed:
    """The repeats needed on each side (or pairs), with a range. None: more than a thousand."""

    repeats: int | None
    fewest: int | None
    most: int | None
    effect: float
    power: float


def power(
    effect: float, noise: float, repeats: int, *, is_paired: bool = False, confidence: float = 0.95
) -> float:
    """The probability that `repeats` on each side (or pairs) show an effect.

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
    """The distribution of Welch's degrees of freedom, as (value, weight), for equal scatter.

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
    """Convert a relative difference (0.03 for 3 %) to an effect on the logarithmic scale."""
    if not share > -1.0 or share == 0.0:
        raise UsageError(f"the difference is {share:g}; must be above -1 and not 0, such as 0.02")
    return math.log1p(share)


def needed(
    effect: float, noise: float, *, dof: float, is_paired: bool = False, confidence: float = 0.95
) -> Needed:
    """The repeats needed to show an effect with the power `POWER` (0.8), with a range.

    `dof`: degrees of freedom of the noise estimate; its 80 % range gives the fewest and most.
    """
    narrow, wide = spread_bounds(dof, confidence=0.8)
    likely, fewest, most = (
        _fewest(effect, noise * part, is_paired=is_paired, confidence=confidence)
        for part in (1.0, narrow, wide)
    )
    return Needed(likely, fewest, most, effect, POWER)


def shows(effect: float, noise: float, repeats: int, *, is_paired: bool, confidence: float) -> bool:
    """True if `repeats` show an effect with at least the power `POWER` (0.8)."""
    return power(effect, noise, repeats, is_paired=is_paired, confidence=confidence) >= POWER


def _fewest(effect: float, noise: float, *, is_paired: bool, confidence: float) -> int | None:
    def suffices(repeats: int) -> bool:
        return shows(effect, noise, repeats, is_paired=is_paired, confidence=confidence)

    most = 2
    while most < _MOST and not suffices(most):
        most = min(2 * most, _MOST)
    fewest = bisect_left(range(most + 1), True, key=suffices)
    return fewest if fewest <= most else None
