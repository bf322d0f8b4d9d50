"""The blocks of time in which no ordinary step ran, or one ran and the device had no kernel.

The trap: a wait that cost nothing. A host that waits for data while its device works on a queue has
lost no time. So where counters say how long the device was idle, waits cost at most that; gaps
between steps give way first, as a queue of kernels bridges them, and what is left over of several
waits is one block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.metrics.explain.block import IDLE, WAITS, Fact, LossBlock, percent
from ergmeter.metrics.explain.time import WAITS as PARTS
from ergmeter.records import weakest
from ergmeter.units import duration

if TYPE_CHECKING:
    from ergmeter.metrics.explain.device import Rungs
    from ergmeter.metrics.explain.time import TimeSplit

TITLES = {
    "checkpoint": "checkpoints",
    "eval": "evaluation",
    "around": "before the first step and after the last",
    "slow_start": "a slow beginning",
    "data": "waiting for data",
    "stalls": "stalls",
    "gaps": "between steps",
}
_HOW = {
    "checkpoint": "no training step runs meanwhile",
    "eval": "no training step runs meanwhile",
    "around": "starting, loading and ending the program",
    "slow_start": "the first steps took longer than the median; --warmup-steps leaves them out",
    "data": "spans that somebody named as waiting for data",
    "stalls": "time beyond the median step, of steps of twice the median or more",
    "gaps": "no step was open, and nothing says what for",
}
_ASIDE = ("checkpoint", "eval", "around")
_LAUNCH_IDLE_FRAC = 0.2  # of the time in steps without a kernel, from which on the host is to blame
_FEW_AT_WORK = 0.5  # of the multiprocessors, while a kernel is there
_SHORT_STEP_S = 0.1


def wait_blocks(split: TimeSplit | None, seen: Rungs) -> tuple[tuple[LossBlock, ...], float]:
    """The blocks, and what is left of the window: time with a kernel, or else with a step open."""
    if split is None:
        if seen.busy_frac is None:
            return (), 1.0
        return (_idle(seen, 1.0 - seen.busy_frac, None),), seen.busy_frac
    aside = tuple(_part(split, name) for name in _ASIDE if name in split.parts_s)
    waits = {name: split.frac(name) for name in PARTS if name in split.parts_s}
    left = 1.0 - sum(one.share_frac for one in aside)
    if seen.busy_frac is None:
        parts = tuple(_part(split, name) for name in waits)
        return (*aside, *parts), left - sum(one.share_frac for one in parts)
    busy = min(seen.busy_frac, left)  # clocks and counters agree to a few digits
    idle = left - busy
    own = _within(split, waits, idle, seen)
    rest = idle - sum(one.share_frac for one in own)
    inside = (_idle(seen, rest, split),) if rest > 0 else ()
    return (*aside, *own, *inside), busy


def _within(
    split: TimeSplit, waits: dict[str, float], idle: float, seen: Rungs
) -> tuple[LossBlock, ...]:
    """The waits, as far as the device was idle."""
    if "gaps" in waits and sum(waits.values()) > idle:
        others = sum(share for name, share in waits.items() if name != "gaps")
        waits = {**waits, "gaps": max(0.0, idle - others)}
        waits = {name: share for name, share in waits.items() if share > 0}
        idle = max(idle, sum(waits.values())) if others <= idle else idle  # to the last digit
    fact = seen.said(seen.busy_key, seen.busy_frac or 0.0, "the time with a kernel")
    if sum(waits.values()) <= idle:
        return tuple(_part(split, name, share, fact) for name, share in waits.items())
    if len(waits) == 1:
        (name,) = waits
        return (_part(split, name, idle, fact),)
    facts = tuple(_fact(split, name) for name in waits)
    title = " and ".join(TITLES[name] for name in waits)
    why = "the device worked on in part of these, and in which is not known"
    return (LossBlock(WAITS, title, idle, weakest("derived", split.basis), (*facts, fact), why),)


def _fact(split: TimeSplit, name: str) -> Fact:
    seconds, count = split.parts_s[name], split.counts[name]
    took = f"{duration(seconds)} of {duration(split.whole_s)}"
    if name == "around":
        return Fact("time.before_first_step_s", took)
    if name == "gaps":
        each = duration(seconds / max(1, count))
        return Fact("time.outside_steps_frac", f"{took}, {each} a step")
    longest = f", up to {duration(split.longest_s[name])}" if count > 1 else ""
    if name in ("checkpoint", "eval", "data"):
        times = f"{count} time{'s' if count != 1 else ''}"
        return Fact(f"time.{name}_s", f"{took}, {times}{longest}")
    usual = duration(float(np.median(split.left_s)))
    of = f"{count} of {len(split.left_s)} steps"
    return Fact("time.step_median_s", f"{took} beyond {usual} a step, {of}{longest}")


def _part(split: TimeSplit, name: str, share: float | None = None, *more: Fact) -> LossBlock:
    told = split.frac(name)
    facts: tuple[Fact, ...] = (_fact(split, name),)
    why = _HOW[name]
    basis = split.basis
    if share is not None and share < told:
        facts = (*facts, *more)
        why += f"; the device worked on in part of it, {percent(told)} by the host's clock"
        basis = weakest("derived", basis)
    return LossBlock(name, TITLES[name], told if share is None else share, basis, facts, why)


def _idle(seen: Rungs, share: float, split: TimeSplit | None) -> LossBlock:
    """The device without a kernel while a step was open."""
    facts = [seen.said(seen.busy_key, seen.busy_frac or 0.0, "the time with a kernel")]
    if seen.sm_frac is not None:
        facts.append(seen.said("activity.sm_frac", seen.sm_frac, "multiprocessors"))
    basis = seen.basis if split is None else weakest("derived", seen.basis, split.basis)
    title, why = "idle inside steps", "the device had no kernel while a step was open"
    if split is None:
        title, why = "idle", "the device had no kernel"
    elif is_launch_bound(seen, split, share):
        facts.append(Fact("time.step_median_s", f"{duration(split.step_s)} a step"))
        if seen.cores is not None:
            facts.append(Fact("utilization.process_cores", f"{seen.cores:.2f} cores at work"))
        title = "launch-bound: device idle"
        why = "kernels end before the host has launched the next: the host sets the pace"
    return LossBlock(IDLE, title, share, basis, tuple(facts), why)


def is_launch_bound(seen: Rungs, split: TimeSplit, idle_frac: float) -> bool:
    """Whether the host can't keep the device busy with kernels that are this small."""
    if seen.busy_frac is None or idle_frac < _LAUNCH_IDLE_FRAC * (idle_frac + seen.busy_frac):
        return False
    few = seen.sm_frac is not None and seen.sm_frac < _FEW_AT_WORK * seen.busy_frac
    return few or split.step_s < _SHORT_STEP_S
