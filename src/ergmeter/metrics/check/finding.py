"""What a check of a run has found: something that a comparison would trip over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence

Weight = Literal["serious", "minor"]
# Serious: another run of the same would give other figures. Minor: what they hang on, or waste.


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Something that a comparison would trip over."""

    check: str
    weight: Weight
    seen: str
    effect: str


Check: TypeAlias = "Callable[[Evidence], list[CheckFinding]]"
