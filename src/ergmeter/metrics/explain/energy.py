"""How many joules went into each block?

The trap: a price nobody measured. When the device waits for a stall's half second its counter says
what that drew. Inside a step no sensor tells a multiplication from a wait: there joules are divided
by shares of the peak, which is a way to count and not a measurement, and is called derived.
Blocks and what was achieved add up to the energy of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.step_energy import energy_of
from ergmeter.metrics.energy.energy_curve import merged
from ergmeter.metrics.explain.time import NAMED
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.time import TimeSplit
    from ergmeter.records import FloatArray, Reading

_RESOLVED_S = 0.2  # two refreshes of a sensor: of a shorter span it does not say what it drew


@dataclass(frozen=True)
class Joules:
    """The energy of the window, what parts of the time drew, and what is left for the rest."""

    whole: Reading
    parts_j: dict[str, float]

    @property
    def rest_j(self) -> float:
        """What the blocks inside steps share."""
        return self.whole.value - sum(self.parts_j.values())


def joules_of(evidence: Evidence, split: TimeSplit | None) -> Joules:
    """What the window drew, and what of it the parts of its time did."""
    whole = run_j(evidence)
    if split is None or evidence.from_output:
        return Joules(whole, {})
    parts = {
        **_of_named(evidence, split),
        **_of_extra(evidence, split),
        **_of_gaps(evidence, split),
    }
    found = Joules(whole, {name: value for name, value in parts.items() if np.isfinite(value)})
    return found if found.rest_j >= 0 else Joules(whole, {})


def _is_resolved(split: TimeSplit, part: str) -> bool:
    return split.longest_s.get(part, 0.0) >= _RESOLVED_S


def _of_named(evidence: Evidence, split: TimeSplit) -> dict[str, float]:
    """Drawn in spans that somebody named, as far as they lie in the window."""
    found = {}
    first_ns, last_ns = int(split.edges_ns[0]), int(split.edges_ns[-1])
    for phase in NAMED:
        if phase not in split.parts_s or not _is_resolved(split, phase):
            continue
        starts, ends = (np.clip(one, first_ns, last_ns) for one in split.spans[phase])
        inside = ends > starts
        each = energy_of(evidence, starts[inside], ends[inside]).joules
        spans_s = float((ends - starts)[inside].sum()) / NS_PER_S
        # Of spans that lie in others' the others come first: their part of the time is less.
        found[phase] = float(each.sum()) * min(1.0, split.parts_s[phase] / spans_s)
    return found


def _of_gaps(evidence: Evidence, split: TimeSplit) -> dict[str, float]:
    """Drawn between steps, where that is long and no part of it is a stall."""
    is_extra = any(each.any() for each in split.extra_s.values())
    if "gaps" not in split.parts_s or is_extra or not _is_resolved(split, "gaps"):
        return {}
    lane = evidence.counted.longest
    spans = [(lane.columns["start_ns"], lane.columns["end_ns"]), *split.spans.values()]
    starts, ends = merged(*(np.concatenate([one[edge] for one in spans]) for edge in (0, 1)))
    begins, until = evidence.window.clipped(ends[:-1], starts[1:])
    return {"gaps": float(energy_of(evidence, begins, until).joules.sum())}


def _of_extra(evidence: Evidence, split: TimeSplit) -> dict[str, float]:
    """Drawn beyond what the same steps would have drawn had they taken as long as usual."""
    wanted = [n for n in split.extra_s if n in split.parts_s and _is_resolved(split, n)]
    if not wanted:
        return {}
    each_j = energy_of(evidence, split.edges_ns[:-1], split.edges_ns[1:]).joules
    if np.isnan(each_j).any():  # readings do not reach all of them: by share, as the others
        return {}
    extra_s: FloatArray = np.sum(list(split.extra_s.values()), axis=0)
    is_plain = (extra_s == 0) & np.isclose(split.left_s, np.diff(split.edges_ns) / NS_PER_S)
    if not is_plain.any():
        return {}
    usual_w = float(each_j[is_plain].sum() / split.left_s[is_plain].sum())
    named_s = np.diff(split.edges_ns) / NS_PER_S - split.left_s
    found = {}
    for name in wanted:
        own = split.extra_s[name]
        rows = (own > 0) & (named_s < 1e-9)
        beyond_j = each_j[rows] - usual_w * (split.left_s - own)[rows]
        if rows.sum() == (own > 0).sum() and float(beyond_j.sum()) > 0:
            found[name] = float(beyond_j.sum())
    return found
