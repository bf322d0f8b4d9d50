"""What did each step draw, and how well is that known?

The trap: a counter that refreshes ten times a second. Read at both ends of a step of 20 ms it says
0 J four times and 60 J the fifth. Here a step is a difference of the devices' curves at its ends
(`power`), so that steps side by side add up to what the counter says of all of them; and how far
each edge may be off is each step's own uncertainty, which for a short step is most of it.

Of several ranks, the steps of the first: all ranks make a step together, and all devices are in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.energy import boundary, curve_of
from ergmeter.metrics.stats import percentile
from ergmeter.records import Reading, weakest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence import Evidence
    from ergmeter.records import Basis, FloatArray, TimeArray

_KEPT = "step energy"


@dataclass(frozen=True, slots=True)
class EachEnergy:
    """Of each span: the joules of all devices, and between which they must lie."""

    joules: FloatArray
    low_j: FloatArray
    high_j: FloatArray
    basis: Basis


def energy_of(evidence: Evidence, start_ns: TimeArray, end_ns: TimeArray) -> EachEnergy:
    """What the run's devices drew in each of these spans; NaN where readings do not reach it."""
    sums = np.zeros((3, len(start_ns)))
    bases: list[Basis] = []
    for device in boundary(evidence):
        curve, basis = curve_of(evidence, device)
        sums += np.stack(curve.over_each(start_ns, end_ns))
        bases.append(basis)
    joules, low_j, high_j = sums
    return EachEnergy(joules, low_j, high_j, weakest(*bases))


def steps_energy(evidence: Evidence) -> EachEnergy:
    """Of each counted step of the first rank."""
    if evidence.from_output:
        raise NotMeasurable("a printed line does not say when its step began")
    kept = evidence.drawn.get(_KEPT)
    if not isinstance(kept, EachEnergy):
        lane = evidence.counted.lanes[0]
        kept = energy_of(evidence, lane.columns["start_ns"], lane.columns["end_ns"])  # type: ignore[arg-type]
        evidence.drawn[_KEPT] = kept
    return kept


def _quantile(share: float) -> Callable[[Evidence], Reading]:
    def compute(evidence: Evidence) -> Reading:
        each = steps_energy(evidence)
        known = ~np.isnan(each.joules)
        if not known.any():
            raise NotMeasurable("no step lies within the readings")
        value, low, high = (
            percentile(one[known], share) for one in (each.joules, each.low_j, each.high_j)
        )
        off = float(np.median((each.high_j - each.low_j)[known])) / 2
        note = (
            f"{int(known.sum())} steps, each known to {off:.3g} J; from a step's start to its end"
        )
        return Reading(value, "J", each.basis, low, high, note)

    return compute


_NEEDS = ("an energy counter or power readings", "steps of a Meter or an integration")

METRICS = [
    Metric(
        "energy.step_median_j",
        "energy of a step, median",
        "J",
        "lower",
        "median over steps of the energy from a step's start to its end",
        _NEEDS,
        _quantile(50),
    ),
    Metric(
        "energy.step_p95_j",
        "energy of a step, 95th percentile",
        "J",
        "lower",
        "95th percentile over steps of the energy from a step's start to its end",
        _NEEDS,
        _quantile(95),
    ),
]
