"""What a profiler saw of communication and copies that nothing was computed beside.

The trap: NVLink and PCIe traffic as a cost. Bytes that move beside a computation cost no time, so
traffic alone makes no block; the time that collectives stood alone, in profiled steps, does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.explain_blocks import Block, Fact, percent
from ergmeter.metrics.profile import profiles

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence

_PARTS = {
    "communication": ("communication_alone_s", "communication, not hidden"),
    "copies": ("copy_alone_s", "copies, not hidden"),
}
_KEYS = {
    "communication": "profile.communication_alone_frac",
    "copies": "profile.copy_alone_frac",
}


@dataclass(frozen=True)
class Beside:
    """The blocks, and their sum."""

    blocks: tuple[Block, ...]

    @property
    def share_frac(self) -> float:
        """All of them."""
        return sum(one.share_frac for one in self.blocks)


def beside(evidence: Evidence, level: float) -> Beside | None:
    """Of the profiled steps' time with a kernel, the share that communicated alone x `level`."""
    try:
        found = profiles(evidence)
    except NotMeasurable:
        return None
    at_work_s = sum(float(one["window_s"]) - float(one["idle_s"]) for one in found)
    if at_work_s <= 0:
        return None
    blocks = []
    for key, (column, title) in _PARTS.items():
        share = sum(float(one[column]) for one in found) / at_work_s
        if share > 0:
            fact = Fact(_KEYS[key], f"{percent(share)} of profiled time with a kernel")
            why = "as in the profiled steps, of which the others are taken to be like"
            blocks.append(Block(key, title, share * level, "derived", (fact,), why))
    return Beside(tuple(blocks)) if blocks else None
