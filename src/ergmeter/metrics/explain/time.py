"""Splits the window's time into steps, checkpoints, waits, stalls and gaps, and their blocks.

Each second counts once. A step's period runs from the end of the previous step to its own end.
Named spans (checkpoints, evaluation, waits for data, pauses) are taken out of it first. Of a period
of twice the median or more, the time above the median is a stall. Time outside of steps is a gap.
The parts and the ordinary steps add up to the window.

Times are the host's, unless steps were timed on the device. A host that waits while its device
works through a queue loses no time. So if counters give the device's idle time, waits are limited
to it. Gaps are reduced first, as queued kernels bridge them; if several waits still exceed the idle
time, they become one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.phases import (
    PHASE_TITLES,
    Spans,
    beyond_in_gap,
    beyond_median,
    covered_s,
    precedence,
    spans_of,
    why_no_stalls,
)
from ergmeter.records import Basis, FloatArray, TimeArray, weakest
from ergmeter.units import NS_PER_S, duration, number_of, percent

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.device import DeviceActivity

# Keys of blocks of the waterfall.

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
        """True if the block has several causes that the evidence does not separate."""
        return self.key in _MERGED


# The time of the window.

NAMED = ("checkpoint", "eval", "data", "prefill", "decode", "idle")
WAITS = ("slow_start", "data", "stalls", "gaps")  # the device may be busy meanwhile
_EXTRA = ("slow_start", "stalls")


@dataclass(frozen=True)
class TimeSplit:
    """The seconds of the window in each part: checkpoint, eval, data, stalls, gaps, ..."""

    whole_s: float
    parts_s: dict[str, float]
    counts: dict[str, int]  # spans or steps of a part
    longest_s: dict[str, float]
    spans: dict[str, Spans]  # named spans, clipped to the window
    edges_ns: TimeArray  # of the periods
    left_s: FloatArray  # of each period, without named spans
    extra_s: dict[str, FloatArray]  # of each period: stall, slow start
    absent: dict[str, str]  # parts that could not be determined, with the reason
    basis: Basis
    steps: float  # a printed line may stand for several

    @property
    def step_s(self) -> float:
        """The median step time, without named spans."""
        return float(np.median(self.left_s)) * len(self.left_s) / self.steps

    def frac(self, part: str) -> float:
        """The share of the window that is in a part; 0 if there is none."""
        return self.parts_s.get(part, 0.0) / self.whole_s


def time_split(evidence: Evidence) -> TimeSplit:
    """The time of a training window by part. NotMeasurable without training steps."""
    if not evidence.trains:
        raise NotMeasurable("no training steps, so there is no step time to split")
    lane = evidence.counted.longest
    window = evidence.window
    first_ns = int(lane["start_ns"][0]) if evidence.is_whole_run else evidence.first_ns(lane)
    edges_ns = np.append(first_ns, np.maximum.accumulate(lane.columns["end_ns"]))
    period_s = window.periods_s(lane, first_ns)
    steps = window.clipped(lane.columns["start_ns"], lane.columns["end_ns"])
    inside = {phase: window.clipped(*spans_of(evidence, phase)) for phase in NAMED}
    owners = {phase: {**inside, "train": steps}[phase] for phase in precedence(evidence)}
    named_s = _named(owners, edges_ns)
    left_s = period_s - sum(named_s.values())
    why = why_no_stalls(lane, from_output=evidence.from_output)
    absent = dict.fromkeys(reversed(_EXTRA), why) if why else {}
    extra_s = {} if why else dict(zip(_EXTRA, beyond_median(left_s), strict=True))
    parts_s = {name: float(each.sum()) for name, each in (named_s | extra_s).items()}
    if not evidence.from_output:
        outside_s = period_s - covered_s([steps, *inside.values()], edges_ns)
        beyond_s = sum(extra_s.values(), np.zeros(len(outside_s)))
        parts_s["gaps"] = float((outside_s - beyond_in_gap(outside_s, beyond_s)).sum())
    each_s = named_s | extra_s
    counts = {name: int((each > 0).sum()) for name, each in each_s.items()}
    longest = {name: float(each.max(initial=0.0)) for name, each in each_s.items()}
    whole_s = float(period_s.sum())
    if evidence.is_whole_run:  # it begins before the first step and ends after the last
        whole_s = window.duration_s
        ends_ns = np.array([window.start_ns, edges_ns[0], edges_ns[-1], window.end_ns])
        named = {phase: each[[0, 2]] for phase, each in _named(owners, ends_ns).items()}
        for phase, each in named.items():
            parts_s[phase] += float(each.sum())
            counts[phase] += int((each > 0).sum())
            longest[phase] = max(longest[phase], float(each.max()))
        ends_s = (np.diff(ends_ns) / NS_PER_S)[[0, 2]]
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
        float(np.maximum(lane.step_counts, 1.0).sum()),
    )


def _named(owners: dict[str, Spans], edges_ns: TimeArray) -> dict[str, FloatArray]:
    """The seconds of each named phase in each period.

    `owners`: spans by phase; an instant in several belongs to the first.
    """
    named_s = {}
    before: list[Spans] = []
    for phase, spans in owners.items():
        upto = [*before, spans]
        if phase != "train":
            named_s[phase] = covered_s(upto, edges_ns) - covered_s(before, edges_ns)
        before = upto
    return named_s


# -- blocks of the waterfall

TITLES = {
    **PHASE_TITLES,
    "around": "before the first step and after the last",
    "slow_start": "a slow beginning",
    "stalls": "stalls",
    "gaps": "between steps",
}
_HOW = {
    **dict.fromkeys(("checkpoint", "eval", "prefill", "decode"), "no training step runs meanwhile"),
    "around": "starting, loading and ending the program",
    "slow_start": "the first steps took longer than the median; --warmup-steps leaves them out",
    "data": "spans recorded as waiting for data",
    "stalls": "time beyond the median step, of steps of twice the median or more",
    "gaps": "time between steps, for no recorded reason",
    "idle": "spans recorded as idle",
}
_ASIDE = ("checkpoint", "eval", "prefill", "decode", "idle", "around")
_LAUNCH_IDLE_FRAC = 0.2  # of the time in steps: more idle time than this is launch-bound
_FEW_ACTIVE = 0.5  # of the SMs, while a kernel runs
_SHORT_STEP_S = 0.1


def wait_blocks(
    split: TimeSplit | None, activity: DeviceActivity
) -> tuple[tuple[LossBlock, ...], float]:
    """Return the blocks of waits, and the share of the rest: time with a kernel, or in steps."""
    if split is None:
        if activity.busy_frac is None:
            return (), 1.0
        return (_idle(activity, 1.0 - activity.busy_frac, None),), activity.busy_frac
    aside = tuple(_part(split, name) for name in _ASIDE if name in split.parts_s)
    waits = {name: split.frac(name) for name in WAITS if name in split.parts_s}
    left = 1.0 - sum(block.share_frac for block in aside)
    if activity.busy_frac is None:
        parts = tuple(_part(split, name) for name in waits)
        return (*aside, *parts), left - sum(block.share_frac for block in parts)
    busy = min(activity.busy_frac, left)  # clocks and counters agree to a few digits
    idle = left - busy
    own = _within(split, waits, idle, activity)
    rest = idle - sum(block.share_frac for block in own)
    inside = (_idle(activity, rest, split),) if rest > 0 else ()
    return (*aside, *own, *inside), busy


def _within(
    split: TimeSplit, waits: dict[str, float], idle: float, activity: DeviceActivity
) -> tuple[LossBlock, ...]:
    """Return the blocks of waits, limited to the share of time that the device was idle."""
    if "gaps" in waits and sum(waits.values()) > idle:
        others = sum(share for name, share in waits.items() if name != "gaps")
        waits = {**waits, "gaps": max(0.0, idle - others)}
        waits = {name: share for name, share in waits.items() if share > 0}
        idle = max(idle, sum(waits.values())) if others <= idle else idle  # to the last digit
    fact = activity.fact(activity.busy_key, activity.busy_frac or 0.0, "the time with a kernel")
    if sum(waits.values()) <= idle:
        return tuple(_part(split, name, share, fact) for name, share in waits.items())
    if len(waits) == 1:
        (name,) = waits
        return (_part(split, name, idle, fact),)
    facts = tuple(_fact(split, name) for name in waits)
    title = " and ".join(TITLES[name] for name in waits)
    why = "the device was busy in an unknown part of these"
    return (
        LossBlock(MERGED_WAITS, title, idle, weakest("derived", split.basis), (*facts, fact), why),
    )


def _fact(split: TimeSplit, name: str) -> Fact:
    seconds, count = split.parts_s[name], split.counts[name]
    took = f"{duration(seconds)} of {duration(split.whole_s)}"
    if name == "around":
        return Fact("time.before_first_step_s", took)
    if name == "gaps":
        each = duration(seconds / max(1, count))
        return Fact("time.outside_steps_frac", f"{took}, {each} a step")
    longest = f", up to {duration(split.longest_s[name])}" if count > 1 else ""
    if name in NAMED:
        key = f"time.{name}_s" if name in ("checkpoint", "eval", "data") else f"{name} spans"
        return Fact(key, f"{took}, {number_of(count, 'time')}{longest}")
    usual = duration(float(np.median(split.left_s)))
    of = f"{count} of {len(split.left_s)} steps"
    return Fact("time.step_median_s", f"{took} beyond {usual} a step, {of}{longest}")


def _part(split: TimeSplit, name: str, share: float | None = None, *more: Fact) -> LossBlock:
    full = split.frac(name)
    facts: tuple[Fact, ...] = (_fact(split, name),)
    why = _HOW[name]
    basis = split.basis
    if share is not None and share < full:
        facts = (*facts, *more)
        why += f"; the device worked on in part of it, {percent(full)} by the host's clock"
        basis = weakest("derived", basis)
    return LossBlock(name, TITLES[name], full if share is None else share, basis, facts, why)


def _idle(activity: DeviceActivity, share: float, split: TimeSplit | None) -> LossBlock:
    """The block of device idle time within steps."""
    facts = [activity.fact(activity.busy_key, activity.busy_frac or 0.0, "the time with a kernel")]
    if activity.sm_frac is not None:
        facts.append(activity.fact("activity.sm_frac", activity.sm_frac, "SMs"))
    basis = activity.basis if split is None else weakest("derived", activity.basis, split.basis)
    title, why = "idle inside steps", "the device had no kernel while a step was open"
    if split is None:
        title, why = "idle", "the device had no kernel"
    elif is_launch_bound(activity, split, share):
        facts.append(Fact("time.step_median_s", f"{duration(split.step_s)} a step"))
        if activity.cores is not None:
            facts.append(Fact("utilization.process_cores", f"{activity.cores:.2f} cores at work"))
        title = "launch-bound: device idle"
        why = "kernels end before the host has launched the next: the host sets the pace"
    return LossBlock(IDLE, title, share, basis, tuple(facts), why)


def is_launch_bound(activity: DeviceActivity, split: TimeSplit, idle_frac: float) -> bool:
    """True if the host launches kernels too slowly to keep the device busy."""
    busy_frac, sm_frac = activity.busy_frac, activity.sm_frac
    if busy_frac is None or idle_frac < _LAUNCH_IDLE_FRAC * (idle_frac + busy_frac):
        return False
    few = sm_frac is not None and sm_frac < _FEW_ACTIVE * busy_frac
    return few or split.step_s < _SHORT_STEP_S
