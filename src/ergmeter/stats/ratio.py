"""By what factor do two groups of repeated runs differ, and how sure is that?

Repeats of a run scatter by factors, so means, intervals and ratios are taken of logarithms and
taken back: an interval never reaches below 0, and A to B is the inverse of B to A.

The trap: an interval that promises too much from three to five repeats. A percentile bootstrap
claims a difference in 13 to 19 % of cases where there is none; a normal quantile in 9 to 12 %.
Student's t holds: of pairs with one seed (n - 1 degrees of freedom), or Welch's for two groups
whose scatter need not be alike (Welch 1947; degrees of freedom after Satterthwaite 1946). One run
of each has no interval, whatever it looks like.

A loss is compared by its difference: it is a logarithm already, and exp(difference) is the ratio of
perplexities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.stats.student_t import factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.records import FloatArray

Scale: TypeAlias = Literal["ratio", "difference"]

PAIRED = "paired t-interval"
WELCH = "Welch's t-interval"
# Below this the scatter is rounding of the figures, and not of the runs.
_SAME = 1e-12
# Of a factor and of its inverse, so that both are numbers above 0: e^700 is about 1e304.
_MOST_LOG = 700.0
UNBOUNDED = (
    "no interval: at this confidence and with so few repeats it reaches beyond a factor of 1e304"
)


@dataclass(frozen=True, slots=True)
class Contrast:
    """A over B, or A minus B, with its interval; `why` says why there is none, or it is wide."""

    value: float
    low: float | None
    high: float | None
    scale: Scale
    confidence: float
    method: str
    repeats: tuple[int, int]
    noise: float | None = (
        None  # standard deviation of one repeat (of a pair's), on the scale's axis
    )
    freedom: float | None = None
    why: str = ""

    @property
    def neutral(self) -> float:
        """The value of no difference."""
        return 1.0 if self.scale == "ratio" else 0.0

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves out that there is no difference."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.neutral or self.high < self.neutral

    @property
    def is_exact(self) -> bool:
        """Whether no repeat differed from another, as a program's memory may not."""
        return self.low is not None and self.low == self.high

    @property
    def inverse(self) -> Contrast:
        """B to A."""
        low, high = (None if end is None else self._turned(end) for end in (self.high, self.low))
        repeats = (self.repeats[1], self.repeats[0])
        return replace(self, value=self._turned(self.value), low=low, high=high, repeats=repeats)

    def _turned(self, value: float) -> float:
        return 1.0 / value if self.scale == "ratio" else -value


def contrast(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    scale: Scale = "ratio",
    is_paired: bool = False,
    confidence: float = 0.95,
) -> Contrast:
    """Ours to theirs. If paired, the two are in the order of their pairs.

    Raises NotMeasurable where there is nothing to take a ratio of.
    """
    a, b = _axis(ours, scale), _axis(theirs, scale)
    middle = float(a.mean() - b.mean())
    if abs(middle) < _SAME * (1.0 + float(np.abs(a).max())):
        middle = 0.0
    repeats = (len(a), len(b))
    back = math.exp if scale == "ratio" else float
    method = PAIRED if is_paired else WELCH
    why = _why_no_interval(repeats)
    if why:
        return Contrast(back(middle), None, None, scale, confidence, method, repeats, why=why)
    error, freedom, noise = _paired(a - b) if is_paired else _welch(a, b)
    margin = factor(confidence, freedom) * error
    low, high = _ends(middle, margin, scale)
    return Contrast(
        back(middle),
        low,
        high,
        scale,
        confidence,
        method,
        repeats,
        noise,
        freedom,
        why=UNBOUNDED if low is None else "",
    )


@dataclass(frozen=True, slots=True)
class Mean:
    """What repeats come to: the mean that a contrast is made of, and its interval."""

    value: float
    low: float | None
    high: float | None
    noise: float | None
    repeats: int


def mean(values: Sequence[float], *, scale: Scale = "ratio", confidence: float = 0.95) -> Mean:
    """The mean of repeats: geometric of amounts, plain of losses."""
    found = _axis(values, scale)
    back = math.exp if scale == "ratio" else float
    middle = float(found.mean())
    if len(found) < 2:
        return Mean(back(middle), None, None, None, 1)
    noise = _std(found)
    margin = factor(confidence, len(found) - 1.0) * noise / math.sqrt(len(found))
    low, high = _ends(middle, margin, scale)
    return Mean(back(middle), low, high, noise, len(found))


def _ends(middle: float, margin: float, scale: Scale) -> tuple[float, float] | tuple[None, None]:
    """The ends of an interval; none where a ratio is so open that its ends are no numbers."""
    if scale == "difference":
        return middle - margin, middle + margin
    if abs(middle) + margin > _MOST_LOG:
        return None, None
    return math.exp(middle - margin), math.exp(middle + margin)


def _axis(values: Sequence[float], scale: Scale) -> FloatArray:
    found = np.asarray(values, dtype=np.float64)
    if not len(found):
        raise NotMeasurable("no run says it")
    if not np.isfinite(found).all():
        raise NotMeasurable("a value is not a finite number")
    if scale == "difference":
        return found
    if (found <= 0).any():
        raise NotMeasurable(f"no ratio of a value that is not above 0 ({found.min():g})")
    return np.log(found)


def _why_no_interval(repeats: tuple[int, int]) -> str:
    if min(repeats) > 1:
        return ""
    few = "one run of each" if max(repeats) == 1 else "one run on a side"
    return f"{few}: no interval, since a single run does not say how runs scatter"


def _std(values: FloatArray) -> float:
    found = float(np.std(values, ddof=1))
    return 0.0 if found < _SAME * (1.0 + float(np.abs(values).max())) else found


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
