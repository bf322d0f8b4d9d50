"""What did each step draw, and how well is that known?

The trap: a counter that refreshes ten times a second. Read at both ends of a step of 20 ms it says
0 J four times and 60 J the fifth. Here a step is a difference of the devices' curves at its ends
(`power`), so that steps side by side add up to what the counter says of all of them; and how far
each edge may be off is each step's own uncertainty, which for a short step is most of it.

Of several ranks, the steps of the one that told the most: all ranks make a step together, and all
devices are in it. Requests are no steps: they differ in length, and overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.energy.device_energy import boundary, curve_of
from ergmeter.metrics.evidence.device_cache import BOUNDARY, asked_of, cached_per_device
from ergmeter.records import Reading, weakest
from ergmeter.stats.intervals import percentile
from ergmeter.units import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import Basis, Device, FloatArray, TimeArray


@dataclass(frozen=True, slots=True)
class EachEnergy:
    """Of each span: the joules of all devices, and between which they must lie."""

    joules: FloatArray
    low_j: FloatArray
    high_j: FloatArray
    basis: Basis


class _Sums:
    """Device after device is added to it: of a thousand devices, the steps of each are too many."""

    def __init__(self, start_ns: TimeArray, end_ns: TimeArray) -> None:
        self._spans = start_ns, end_ns
        self._sums = np.zeros((3, len(start_ns)))

    def add(self, evidence: Evidence, device: Device) -> Basis:
        """What a device drew in each span, and how that is known."""
        curve, basis = curve_of(evidence, device)
        self._sums += np.stack(curve.over_each(*self._spans))
        return basis

    def total(self, bases: list[Basis]) -> EachEnergy:
        """What all of them drew."""
        joules, low_j, high_j = self._sums
        return EachEnergy(joules, low_j, high_j, weakest(*bases))


def energy_of(evidence: Evidence, start_ns: TimeArray, end_ns: TimeArray) -> EachEnergy:
    """What the run's devices drew in each of these spans; NaN where readings do not reach it."""
    sums = _Sums(start_ns, end_ns)
    return sums.total([sums.add(evidence, device) for device in boundary(evidence)])


def steps_energy(evidence: Evidence) -> EachEnergy:
    """Of each counted step of the rank that told the most."""
    sums = _steps_sums(evidence)
    return sums.total([_added(evidence, device) for device in boundary(evidence)])


@asked_of(BOUNDARY)
def _added(evidence: Evidence, device: Device) -> Basis:
    """Add what a device drew in each step, once."""
    return _steps_sums(evidence).add(evidence, device)


@cached_per_device
def _steps_sums(evidence: Evidence) -> _Sums:
    lane = step_rows(evidence)
    return _Sums(lane.columns["start_ns"], lane.columns["end_ns"])


def step_rows(evidence: Evidence) -> Steps:
    """The steps whose energy is told, or the reason why there are none."""
    rows = evidence.counted.longest  # or the reason why there are none
    if evidence.from_output:
        raise NotMeasurable("a printed line does not say when its step began: a Meter does")
    if not evidence.trains:
        raise NotMeasurable("no training steps: requests overlap, and differ in length")
    if (rows["steps"] > 1).any():
        raise NotMeasurable("a row holds several steps: a single step's energy is not known")
    return rows


def _quantile(share: float) -> Callable[[Evidence], Reading]:
    def compute(evidence: Evidence) -> Reading:
        each = steps_energy(evidence)
        known = ~np.isnan(each.joules)
        if not known.any():
            raise NotMeasurable("the devices' readings cover no step")
        value, low, high = (
            percentile(one[known], share) for one in (each.joules, each.low_j, each.high_j)
        )
        off = float(np.median((each.high_j - each.low_j)[known])) / 2
        steps = number_of(int(known.sum()), "step")
        note = f"{steps}, each known to {off:.3g} J; from a step's start to its end"
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
