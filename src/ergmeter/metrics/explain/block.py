"""A block of the waterfall: a share of the peak with its evidence and basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergmeter.records import Basis

MERGED_WAITS = "waits"  # several waits that the evidence does not separate
KERNELS = "kernels"  # everything within steps, not separated
IDLE = "idle_in_steps"
ACHIEVED = "achieved"
_MERGED = (MERGED_WAITS, KERNELS)


@dataclass(frozen=True)
class Fact:
    """One piece of evidence: a metric's key or another name, and its value as text."""

    key: str
    said: str


@dataclass(frozen=True)
class LossBlock:
    """A lost share of the peak. Negative for a gain, such as a clock above the peak's."""

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
        """True if it has several causes that the evidence does not separate."""
        return self.key in _MERGED


def percent(share: float) -> str:
    """A share as text in percent."""
    value = 100 * share
    if abs(value) < 0.05:
        return f"{value:.2g} %"
    return f"{value:.1f} %"
