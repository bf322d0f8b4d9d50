"""The training score: a product of five factors, each shown.

The trap: one gain counted twice. With the model, the sequence length and the hardware fixed, MFU is
throughput times a constant, so a run that is 20 % faster scores 44 % more. The product is kept, for
scores to be comparable; the factors and that remark stand beside it.

Score = MFU/base x throughput/base x loss x convergence x (offset + NKI ratio). The offset is 1 in
the guide and in the version of June 2025, 0.1 in later ones; which one was used is recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

REMARK = (
    "at a fixed model, sequence length and hardware, MFU and throughput are the same gain: it is"
    " in this product twice"
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a run is held against, and what the user says of its loss and convergence."""

    mfu_percent: float = 50.0
    throughput_seq_per_s: float = 100.0
    loss_improvement: float = 1.0
    convergence_rate: float = 1.0
    offset: float = 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """The factors. One may be unknown, and then there is no score."""

    mfu_improvement: float | None
    throughput_improvement: float | None
    loss_improvement: float
    convergence_rate: float
    nki_ratio: float | None
    offset: float

    @property
    def without_nki(self) -> float | None:
        """The product of the factors that do not need the compiled graphs."""
        if self.mfu_improvement is None or self.throughput_improvement is None:
            return None
        return math.prod(
            (
                self.mfu_improvement,
                self.throughput_improvement,
                self.loss_improvement,
                self.convergence_rate,
            )
        )

    @property
    def nki_factor(self) -> float | None:
        """What the NKI kernels contribute."""
        return None if self.nki_ratio is None else self.offset + self.nki_ratio

    @property
    def value(self) -> float | None:
        """The score."""
        factor, others = self.nki_factor, self.without_nki
        return None if factor is None or others is None else others * factor


def score(
    baseline: Baseline,
    *,
    mfu_percent: float | None,
    seq_per_s: float | None,
    nki_ratio: float | None,
) -> Score:
    """The score of a run. A baseline of 0 or less leaves its factor at 1, as the original does."""
    return Score(
        _over(mfu_percent, baseline.mfu_percent),
        _over(seq_per_s, baseline.throughput_seq_per_s),
        baseline.loss_improvement,
        baseline.convergence_rate,
        nki_ratio,
        baseline.offset,
    )


def _over(value: float | None, base: float) -> float | None:
    if value is None:
        return None
    return value / base if base > 0 else 1.0


def score_statistics(scores: Iterable[dict[str, Any] | None]) -> dict[str, float]:
    """Average, least and most of the files' own scores, if they have any."""
    values = [found["score"] for found in scores if found and found["score"] is not None]
    if not values:
        return {}
    return {
        "average_score": sum(values) / len(values),
        "min_score": min(values),
        "max_score": max(values),
    }
