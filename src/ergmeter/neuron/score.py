"""The training score of nki-llama: a product of five factors, each shown.

Score = MFU/base x throughput/base x loss x convergence x (offset + NKI ratio). The offset is 1 in
the guide and in the version of June 2025, 0.1 in later ones; which one was used is recorded.

One gain is counted twice. With model, sequence length and hardware fixed, MFU is throughput times a
constant, so a run that is 20 % faster scores 44 % more. The product is kept so that scores are
comparable, and a remark says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Breakdown = Mapping[str, Any]
    from collections.abc import Iterable

# Charts show a factor by its logarithm to base 2, since logarithms add up to that of the score.


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of the score, with the product up to it. None: unknown."""

    name: str
    reached: float | None  # None also where just the ratio was given
    base: float | None
    unit: str
    ratio: float | None
    product: float | None  # of this factor and those before it
    is_given: bool = False  # on the command line
    is_bound: bool = False  # at least that: it is made of a lower bound
    is_uncertain: bool = False
    is_impossible: bool = False  # what was reached cannot be right

    @property
    def doublings(self) -> float | None:
        """The logarithm to base 2: 1 for a factor of 2, -1 for one of 1/2."""
        return None if self.ratio is None or self.ratio <= 0 else math.log2(self.ratio)


def factors(parts: Breakdown) -> list[Factor]:
    """The five factors of `training_score_breakdown`, ours or the original's, in its order."""
    share, offset = parts["nki_flop_ratio"], parts["score_offset"]
    nki = None if share is None else offset + share
    rows: list[tuple[str, float | None, float | None, str, float | None]] = [
        ("MFU", parts["achieved_mfu"], parts["base_mfu"], "%", parts["mfu_improvement"]),
        (
            "throughput",
            parts["achieved_throughput"],
            parts["base_throughput"],
            "sequences/s",
            parts["throughput_improvement"],
        ),
        ("loss", None, None, "", parts["loss_improvement"]),
        ("convergence", None, None, "", parts["convergence_rate"]),
        ("NKI share", share, offset, "", nki),
    ]
    listed: list[Factor] = []
    product: float | None = 1.0
    for name, reached, base, unit, ratio in rows:
        product = None if product is None or ratio is None else product * ratio
        is_nki = name == "NKI share"
        listed.append(
            Factor(
                name,
                reached,
                base,
                unit,
                ratio,
                product,
                is_given=name in ("loss", "convergence"),
                is_bound=is_nki and bool(parts.get("is_lower_bound")),
                is_uncertain=is_nki and bool(parts.get("is_uncertain")),
                is_impossible=name == "MFU" and bool(parts.get("is_mfu_impossible")),
            )
        )
    return listed


REMARK = (
    "at a fixed model, sequence length and hardware, MFU and throughput are the same gain: it is"
    " in this product twice"
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The score's baseline, and the user's loss and convergence factors."""

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
        """The offset plus the NKI ratio."""
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
    values = [entry["score"] for entry in scores if entry and entry["score"] is not None]
    if not values:
        return {}
    return {
        "average_score": sum(values) / len(values),
        "min_score": min(values),
        "max_score": max(values),
    }
