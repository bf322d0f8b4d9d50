"""How far a run is that is still being written, and when the rest will be done.

The trap: an arrival time from the mean since the start, in which a compilation of two minutes makes
each hour ahead longer. The rate is that of the counted steps. And a run that never said how much
there is to do has no share and no arrival time: that is said, and not guessed from its name.

What is to be reached and what counts as done are asked here by every view, so that two of them do
not differ by the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.compute import flops_per_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import FloatArray

_NO_BUDGET = "no total step or token count: pass Meter(budget=Budget(steps=N)) or Budget(tokens=N)"


@dataclass(frozen=True, slots=True)
class Remaining:
    """What one rank has done of what it is meant to do."""

    unit: str
    done: float
    total: float
    left_s: float | None  # at the rate of the counted steps; None where there is no rate yet

    @property
    def done_frac(self) -> float:
        """The share that is done; above 1 where the budget was exceeded."""
        return self.done / self.total


def remaining(evidence: Evidence) -> Remaining:
    """Where a run stands. Raises NotMeasurable where it never said what it is meant to reach."""
    unit, total = _budget(evidence)
    lane = evidence.work.longest
    done = float(steps_done(lane)) if unit == "steps" else _amount(evidence, lane, unit)
    try:
        counted = evidence.counted.longest
        # Evaluation and checkpoints are still to come as well: the time to the end has them in it.
        span_s = evidence.window.outer.duration_s
        rate = _amount(evidence, counted, unit) / span_s if span_s > 0 else 0.0
    except NotMeasurable:
        rate = 0.0
    left_s = max(0.0, total - done) / rate if rate > 0 else None
    return Remaining(unit, done, total, left_s)


def goal(headers: Iterable[Mapping[str, Any]]) -> tuple[str, float] | None:
    """What a run is to reach, by the heads of its writers: the unit and how much of it."""
    for header in headers:
        said = header.get("budget")
        said = said if isinstance(said, dict) else {}
        for unit in ("steps", "tokens", "FLOPs"):
            total = said.get(unit)
            if isinstance(total, int | float) and total > 0:
                return unit, float(total)
        total = header.get("total_steps")
        if isinstance(total, int | float) and total > 0:
            return "steps", float(total)
    return None


def real_tokens(steps: Mapping[str, Any] | Steps) -> FloatArray:
    """Tokens of each step without the padding, where that is told."""
    real = steps["tokens_real"]
    return np.where(np.isnan(real), steps["tokens_computed"], real)


def steps_done(steps: Mapping[str, Any] | Steps, *, before: int = 0) -> int:
    """The number of the last step and one more, also where a training was resumed; where steps
    have no numbers, how many there are after those `before`."""
    last = float(steps["index"][-1])
    many = float(np.nan_to_num(steps["steps"], nan=1.0).sum())
    return before + round(many) if np.isnan(last) else int(last) + 1


def _budget(evidence: Evidence) -> tuple[str, float]:
    found = goal(writer.header for writer in evidence.run.writers)
    if found is None:
        raise NotMeasurable(_NO_BUDGET)
    return found


def _amount(evidence: Evidence, lane: Steps, unit: str) -> float:
    if unit == "steps":
        return float(np.nan_to_num(lane["steps"], nan=1.0).sum())
    if unit == "tokens":
        return float(np.nansum(real_tokens(lane)))
    if not evidence.flops:
        raise NotMeasurable("the budget is in FLOPs, and the FLOPs of a step are unknown")
    return float(np.nansum(lane["tokens_computed"])) * flops_per_token(evidence.flops[0])
