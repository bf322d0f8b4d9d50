"""Of the window's time, how much was no ordinary step: checkpoints, waits, stalls, gaps?

The trap: counting a second twice. A wait for data may be what made a step slow, and a stall may lie
inside a step or before it. So each step's period, from the end of the step before to its own, is
first freed of the spans that somebody named (of checkpoints and evaluation, what the window still
holds; waits for data); what is left is a stall as far as
it goes beyond the median of the rest; and what is then outside of all steps is a gap. The parts and
the ordinary steps add up to the window.

By the clock of the host, unless steps were timed by the device: a device may work on meanwhile, and
`explain_device` says whether it did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.energy.energy_curve import merged
from ergmeter.records import PHASES
from ergmeter.units import NS_PER_S, number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import Basis, FloatArray, TimeArray

Spans: TypeAlias = "tuple[TimeArray, TimeArray]"

NAMED = ("checkpoint", "eval", "data")  # an instant in several belongs to the first
WAITS = ("slow_start", "data", "stalls", "gaps")  # in which a device may have worked on

_FEW_STEPS = 10
_STALL = 2.0  # times the median
_SLOW_START = 1.2  # times the median, from the first step on
_SLOW_START_FRAC = 0.01  # of the time of all steps


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of the window by part; `ordinary` is what is left for steps as they usually are."""

    whole_s: float
    parts_s: dict[str, float]
    counts: dict[str, int]  # spans, or steps, that a part is made of
    longest_s: dict[str, float]
    spans: dict[str, Spans]  # of the named ones, as far as they are in the window
    edges_ns: TimeArray  # of the periods
    left_s: FloatArray  # of each period, without what was named
    extra_s: dict[str, FloatArray]  # of each period: a stall's part, a slow beginning's
    absent: dict[str, str]  # what could not be looked for, and why
    basis: Basis
    steps: float  # a printed line may be of several

    @property
    def step_s(self) -> float:
        """A usual step, without what was named."""
        return float(np.median(self.left_s)) * len(self.left_s) / self.steps

    def frac(self, part: str) -> float:
        """A part of the window."""
        return self.parts_s.get(part, 0.0) / self.whole_s

    @property
    def ordinary_frac(self) -> float:
        """What is left for steps."""
        return 1.0 - sum(self.parts_s.values()) / self.whole_s


def time_split(evidence: Evidence) -> TimeSplit:
    """The window of a training by what its time went into. NotMeasurable for one without steps."""
    if not evidence.trains:
        raise NotMeasurable("no training steps, so there is no step time to split")
    lane = evidence.counted.longest
    window = evidence.window
    first_ns = int(lane["start_ns"][0]) if evidence.is_whole_run else evidence.first_ns(lane)
    edges_ns = np.append(first_ns, np.maximum.accumulate(lane.columns["end_ns"]))
    period_s = window.periods_s(lane, first_ns)
    is_by_device = not evidence.from_output and not np.isnan(lane["host_end_ns"]).all()
    spans = {phase: _spans(evidence, phase) for phase in NAMED}
    steps = window.clipped(lane.columns["start_ns"], lane.columns["end_ns"])
    inside = {phase: window.clipped(*one) for phase, one in spans.items()}
    named_s = _named(inside, edges_ns, steps if is_by_device else None)
    left_s = period_s - sum(named_s.values())
    extra_s, absent = _extra(lane, left_s, from_output=evidence.from_output)
    parts_s = {name: float(each.sum()) for name, each in (named_s | extra_s).items()}
    if not evidence.from_output:
        outside_s = period_s - covered_s([steps, *inside.values()], edges_ns)
        parts_s["gaps"] = _gaps_s(outside_s, extra_s)
    counts = {name: int((each > 0).sum()) for name, each in (named_s | extra_s).items()}
    longest = {n: float(each.max(initial=0.0)) for n, each in (named_s | extra_s).items()}
    whole_s = float(period_s.sum())
    if evidence.is_whole_run:  # which begins before the first step, and ends after the last
        whole_s = window.duration_s
        ends_ns = np.array([window.start_ns, edges_ns[0], edges_ns[-1], window.end_ns])
        named = {phase: _ends(each) for phase, each in _named(inside, ends_ns, None).items()}
        for phase, each in named.items():
            parts_s[phase] += float(each.sum())
            counts[phase] += int((each > 0).sum())
            longest[phase] = max(longest[phase], float(each.max()))
        ends_s = _ends(np.diff(ends_ns) / NS_PER_S)
        parts_s["around"] = float(ends_s.sum() - sum(each.sum() for each in named.values()))
        counts["around"], longest["around"] = 2, float(ends_s.max())
    if "gaps" in parts_s:
        counts["gaps"] = len(period_s)
        longest["gaps"] = parts_s["gaps"] / len(period_s)
    return TimeSplit(
        whole_s,
        {name: value for name, value in parts_s.items() if value > 0},
        counts,
        longest,
        inside,
        edges_ns,
        left_s,
        extra_s,
        absent,
        evidence.steps_basis,
        float(np.maximum(np.nan_to_num(lane["steps"], nan=1.0), 1.0).sum()),
    )


def _spans(evidence: Evidence, phase: str) -> Spans:
    lane = evidence.all_steps.longest
    own = lane.where(lane["phase"] == PHASES.index(phase)) if len(lane) else lane
    return own.columns["start_ns"], own.columns["end_ns"]


def _ends(each: FloatArray) -> FloatArray:
    """Of three periods the first and the last."""
    return np.asarray(each[[0, 2]])


def covered_s(spans: list[Spans], edges_ns: TimeArray) -> FloatArray:
    """Of each period the time that any of these spans holds."""
    return np.asarray(np.diff(held_until_s(spans, edges_ns)), dtype=np.float64)


def held_until_s(spans: list[Spans], t_ns: TimeArray) -> FloatArray:
    """The time that any of these spans holds, up to each instant."""
    starts = np.concatenate([one[0] for one in spans]) if spans else np.array([], dtype=np.int64)
    ends = np.concatenate([one[1] for one in spans]) if spans else np.array([], dtype=np.int64)
    if not len(starts):
        return np.zeros(len(t_ns))
    starts, ends = merged(starts, ends)
    knots = np.column_stack((starts, ends)).ravel()
    held_ns = np.cumsum(np.column_stack((np.zeros(len(starts)), ends - starts)).ravel())
    return np.asarray(np.interp(t_ns, knots, held_ns) / NS_PER_S, dtype=np.float64)


def _named(
    spans: dict[str, Spans], edges_ns: TimeArray, steps: Spans | None
) -> dict[str, FloatArray]:
    """What each of the named spans has of each period. `steps`: within which no wait for data
    counts, as the device had work."""
    found = {}
    before: list[Spans] = []
    for phase in NAMED:
        if phase == "data" and steps is not None:
            before = [*before, steps]
        upto = [*before, spans[phase]]
        found[phase] = covered_s(upto, edges_ns) - covered_s(before, edges_ns)
        before = upto
    return found


def _extra(
    lane: Steps, left_s: FloatArray, *, from_output: bool
) -> tuple[dict[str, FloatArray], dict[str, str]]:
    """What steps took beyond the usual: at the beginning, and by stalls."""
    steps = lane["steps"]
    if np.isnan(steps).any() or (steps > 1).any():
        why = f"{'printed lines' if from_output else 'rows'} stand for several steps each"
        return {}, {"stalls": why, "slow_start": why}
    if len(left_s) < _FEW_STEPS:
        why = f"{number_of(len(left_s), 'step')}: too few to tell a stall from the rest"
        return {}, {"stalls": why, "slow_start": why}
    usual_s = float(np.median(left_s))
    beyond_s = left_s - usual_s
    slow = slow_rows(left_s)
    place = np.arange(len(left_s))
    late = (place >= slow) & (left_s > _STALL * usual_s)
    return {
        "slow_start": np.where(place < slow, beyond_s, 0.0),
        "stalls": np.where(late, beyond_s, 0.0),
    }, {}


def slow_rows(left_s: FloatArray) -> int:
    """How many rows at the beginning are slow; 0 where that makes next to nothing of the time."""
    usual_s = float(np.median(left_s))
    slow = int(np.argmax(left_s <= _SLOW_START * usual_s))  # half of them are, and more
    beyond_s = float((left_s[:slow] - usual_s).sum())
    return slow if beyond_s > _SLOW_START_FRAC * float(left_s.sum()) else 0


def _gaps_s(outside_s: FloatArray, extra_s: dict[str, FloatArray]) -> float:
    """The time outside of steps and of all that is named; of a stall's, what is usual."""
    is_extra = np.zeros(len(outside_s), dtype=bool)
    for each in extra_s.values():
        is_extra |= each > 0
    usual_s = float(np.median(outside_s[~is_extra])) if (~is_extra).any() else 0.0
    return float(np.where(is_extra, np.minimum(outside_s, usual_s), outside_s).sum())
