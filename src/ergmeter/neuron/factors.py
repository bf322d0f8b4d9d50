"""The factors of a score one by one: what was reached, its base, the ratio, its part in the score.

The trap: a product drawn as a sum. A factor of 2 and one of 1/2 undo each other, and no bars from 0
show that. The part of a factor is its logarithm to base 2: those do add up, to that of the score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Breakdown = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor, in its place in the product. None: not known."""

    name: str
    reached: float | None  # None also where just the ratio was given
    base: float | None
    unit: str
    ratio: float | None
    product: float | None  # of this factor and those before it
    is_given: bool = False  # on the command line, by whoever asked
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
    found: list[Factor] = []
    product: float | None = 1.0
    for name, reached, base, unit, ratio in rows:
        product = None if product is None or ratio is None else product * ratio
        is_nki = name == "NKI share"
        found.append(
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
    return found
