"""How far a run is that is still being written, and when the rest will be done.

The trap: an arrival time from the mean since the start, in which a compilation of two minutes makes
each hour ahead longer. The rate is that of the counted steps. And a run that never said how much
there is to do has no share and no arrival time: that is said, and not guessed from its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.compute import flops_per_token
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.metrics.steps import Steps

_NO_BUDGET = (
    "the run does not say how much there is to do: Meter(budget=Budget(steps=...)) or tokens=..."
)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What one rank has done of what it is meant to do."""

    unit: str
    done: float
    total: float
    left_s: float | None  # at the rate of the counted steps; None where there is no rate yet

    @property
    def done_frac(self) -> float:
        """The share that is done; above 1 where the budget was exceeded."""
        return self.done / self.total


def ahead(evidence: Evidence) -> Ahead:
    """Where a run stands. Raises NotMeasurable where it never said what it is meant to reach."""
    unit, total = _budget(evidence)
    lane = evidence.work.longest
    done = _amount(evidence, lane, unit)
    try:
        counted = evidence.counted.longest
        span_s = float(counted["end_ns"].max() - counted["start_ns"].min()) / NS_PER_S
        rate = _amount(evidence, counted, unit) / span_s if span_s > 0 else 0.0
    except NotMeasurable:
        rate = 0.0
    left_s = max(0.0, total - done) / rate if rate > 0 else None
    return Ahead(unit, done, total, left_s)


def _budget(evidence: Evidence) -> tuple[str, float]:
    for writer in evidence.run.writers:
        said = writer.header.get("budget")
        if isinstance(said, dict):
            for unit in ("steps", "tokens", "FLOPs"):
                total = said.get(unit)
                if isinstance(total, int | float) and total > 0:
                    return unit, float(total)
    raise NotMeasurable(_NO_BUDGET)


def _amount(evidence: Evidence, lane: Steps, unit: str) -> float:
    if unit == "steps":
        return float(np.nan_to_num(lane["steps"], nan=1.0).sum())
    tokens = float(np.nansum(lane["tokens_computed"]))
    if unit == "tokens":
        return tokens
    if not evidence.flops:
        raise NotMeasurable("the budget is in FLOPs, and those of a step are not known")
    return tokens * flops_per_token(evidence.flops[0])
