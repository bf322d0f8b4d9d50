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
    from collections.abc import Iterable, Mapping

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
    """The score of a run over a baseline. One factor may be unknown, and then there is no score."""

    baseline: Baseline
    mfu_percent: float | None
    seq_per_s: float | None
    nki_ratio: float | None
    is_mfu_impossible: bool = False

    @property
    def mfu_improvement(self) -> float | None:
        """MFU over the baseline's; None also where MFU cannot be right."""
        mfu = None if self.is_mfu_impossible else self.mfu_percent
        return _over(mfu, self.baseline.mfu_percent)

    @property
    def throughput_improvement(self) -> float | None:
        """Throughput over the baseline's."""
        return _over(self.seq_per_s, self.baseline.throughput_seq_per_s)

    @property
    def without_nki(self) -> float | None:
        """The product of the factors that do not need the compiled graphs."""
        mfu, rate, base = self.mfu_improvement, self.throughput_improvement, self.baseline
        if mfu is None or rate is None:
            return None
        return math.prod((mfu, rate, base.loss_improvement, base.convergence_rate))

    @property
    def nki_factor(self) -> float | None:
        """The offset plus the NKI ratio."""
        return None if self.nki_ratio is None else self.baseline.offset + self.nki_ratio

    @property
    def value(self) -> float | None:
        """The score."""
        factor, others = self.nki_factor, self.without_nki
        return None if factor is None or others is None else others * factor

    def breakdown(self) -> dict[str, Any]:
        """`training_score_breakdown`, with the original's names in its order."""
        base = self.baseline
        return {
            "base_mfu": base.mfu_percent,
            "base_throughput": base.throughput_seq_per_s,
            "achieved_mfu": self.mfu_percent,
            "is_mfu_impossible": self.is_mfu_impossible,
            "achieved_throughput": self.seq_per_s,
            "mfu_improvement": self.mfu_improvement,
            "throughput_improvement": self.throughput_improvement,
            "nki_flop_ratio": self.nki_ratio,
            "loss_improvement": base.loss_improvement,
            "convergence_rate": base.convergence_rate,
            "nki_factor": self.nki_factor,
            "score_offset": base.offset,
            "score_without_nki": self.without_nki,
        }

    def graph_document(self) -> dict[str, Any]:
        """A graph's own score: the job's factors with the graph's NKI ratio."""
        return {
            "score": self.value,
            "mfu_improvement": self.mfu_improvement,
            "throughput_improvement": self.throughput_improvement,
            "loss_improvement": self.baseline.loss_improvement,
            "convergence_rate": self.baseline.convergence_rate,
            "nki_flop_ratio": self.nki_ratio,
        }


def _over(value: float | None, base: float) -> float | None:
    """A factor. A baseline of 0 or less leaves it at 1, as the original does."""
    if value is None:
        return None
    return value / base if base > 0 else 1.0


def score_statistics(scores: Iterable[Mapping[str, Any] | None]) -> dict[str, float]:
    """Average, least and most of the files' own scores, if they have any."""
    values = [entry["score"] for entry in scores if entry and entry["score"] is not None]
    if not values:
        return {}
    return {
        "average_score": sum(values) / len(values),
        "min_score": min(values),
        "max_score": max(values),
    }


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


def factors(parts: Mapping[str, Any]) -> list[Factor]:
    """The five factors of `training_score_breakdown`, ours or the original's, in its order."""
    share, offset = parts["nki_flop_ratio"], parts["score_offset"]
    rate, base_rate = parts["achieved_throughput"], parts["base_throughput"]
    nki = None if share is None else offset + share
    rows: list[tuple[str, float | None, float | None, str, float | None]] = [
        ("MFU", parts["achieved_mfu"], parts["base_mfu"], "%", parts["mfu_improvement"]),
        ("throughput", rate, base_rate, "sequences/s", parts["throughput_improvement"]),
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
                name, reached, base, unit, ratio, product,
                is_given=name in ("loss", "convergence"),
                is_bound=is_nki and bool(parts.get("is_lower_bound")),
                is_uncertain=is_nki and bool(parts.get("is_uncertain")),
                is_impossible=name == "MFU" and bool(parts.get("is_mfu_impossible")),
            )
        )  # fmt: skip
    return listed
