"""Where the warm-up ends: one instant for all ranks, by the rule the user declared.

The trap: a warm-up of its own for each rank. Tokens of one rank would then be counted over a window
in which another's are not yet. The instant is the latest that any rank asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.stats import MIN_BLOCKS, settled_after
from ergmeter.units import NS_PER_S, duration, number_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.metrics.steps import Mask, Steps
    from ergmeter.records import Mark
    from ergmeter.runlog.settings import Settings

_RULES = {
    "warmup_end": "until the mark warmup_end",
    "profile_unread": "until the profiled steps were over",
}
_FEW = 5  # steps that must be left once the profile is over,
_EARLY = 30  # if it came so early; else as many as there were before


def ending(marks: Iterable[Mark], work: Steps, settings: Settings) -> Mark | None:
    """The mark that ends the warm-up: the user's last; else where profiled steps were over.

    A profiled step is slower, and the profiler holds the training up until its trace is written:
    neither is what the training is like. They come early unless somebody wants them late, and then
    most of the run is not thrown away for them. A declared warm-up is taken as it is declared.
    """
    ends = list(marks)
    users = [mark for mark in ends if mark.name == "warmup_end"]
    if users:
        return users[-1]
    profiled = [mark for mark in ends if mark.name == "profile_unread"]
    if not profiled or any(way is not None for way in settings.warmups):
        return None
    last = max(profiled, key=lambda mark: mark.t_ns)
    for lane in work.lanes:
        left = int((lane["start_ns"] >= last.t_ns).sum())
        before = len(lane) - left
        if left < (_FEW if before <= _EARLY else before):
            return None
    return last


def rule(settings: Settings, mark: Mark | None) -> str:
    """The rule in words."""
    if mark is not None:
        return _RULES[mark.name]
    if settings.warmup_steps is not None:
        return number_of(settings.warmup_steps, "step")
    if settings.warmup_s is not None:
        return f"{settings.warmup_s:g} s"
    return "until the step time settled (MSER)" if settings.warmup == "auto" else "none declared"


def after_warmup(work: Steps, settings: Settings, mark: Mark | None) -> Steps:
    """The rows that are counted. Raises NotMeasurable, with the numbers, if none is left."""
    if mark is None and all(way is None for way in settings.warmups):
        return work
    firsts = []
    for lane in work.lanes:
        asked = _asked(lane, settings) if mark is None else lane["start_ns"] >= mark.t_ns
        if not asked.any():
            raise NotMeasurable(_why_none(lane, settings, mark))
        firsts.append(int(lane["start_ns"][int(np.argmax(asked))]))
    # Ranks start a step within a moment of each other: it is one step if most of it lies after.
    first_ns = max(firsts)
    return work.where_each(lambda lane: (lane["start_ns"] + lane["end_ns"]) / 2 >= first_ns)


def _asked(lane: Steps, settings: Settings) -> Mask:
    """The rows of one rank that its own rule would count."""
    steps = np.nan_to_num(lane["steps"], nan=1.0)
    if settings.warmup_steps is not None:
        return np.asarray(np.cumsum(steps) - steps >= settings.warmup_steps)
    if settings.warmup_s is not None:
        since_s = (lane["start_ns"] - lane["start_ns"][0]) / NS_PER_S
        return np.asarray(since_s >= settings.warmup_s)
    settled = settled_after(lane.duration_s / np.maximum(steps, 1))
    return np.arange(len(lane)) >= (len(lane) if settled is None else settled)


def _why_none(lane: Steps, settings: Settings, mark: Mark | None) -> str:
    lasted = duration((int(lane["end_ns"].max()) - int(lane["start_ns"][0])) / NS_PER_S)
    if settings.warmup == "auto" and len(lane) < 2 * MIN_BLOCKS:
        steps_told = number_of(len(lane), "step")
        return f"{steps_told}: too few to find the steady state (at least {2 * MIN_BLOCKS})"
    if settings.warmup == "auto":
        return f"the step time never settled in {len(lane)} steps ({lasted}): no steady state"
    steps = int(np.nan_to_num(lane["steps"], nan=1.0).sum())
    return (
        f"the run is shorter than its warm-up: {number_of(steps, 'step')} in {lasted},"
        f" warm-up {rule(settings, mark)}"
    )
