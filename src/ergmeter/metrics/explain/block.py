"""A block of the waterfall: a share of the peak, what says so, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergmeter.records import Basis

WAITS = "waits"  # several parts of the time that the evidence does not tell apart
KERNELS = "kernels"  # all that happens between a step's start and its end, in one
IDLE = "idle_in_steps"
ACHIEVED = "achieved"
_MERGED = (WAITS, KERNELS)


@dataclass(frozen=True)
class Fact:
    """One piece of evidence: a metric's key, or a name of its own, and its value in words."""

    key: str
    said: str


@dataclass(frozen=True)
class LossBlock:
    """A share of the peak that went somewhere. Below 0 where something gave more than the peak."""

    key: str
    title: str
    share_frac: float
    basis: Basis
    facts: tuple[Fact, ...] = ()
    why: str = ""
    joules: float | None = None
    joules_basis: Basis | None = None

    @property
    def is_merged(self) -> bool:
        """Whether it is several causes that the evidence does not tell apart."""
        return self.key in _MERGED


def percent(share: float) -> str:
    """A share in percent, for a sentence."""
    value = 100 * share
    if abs(value) < 0.05:
        return f"{value:.2g} %"
    return f"{value:.1f} %"
