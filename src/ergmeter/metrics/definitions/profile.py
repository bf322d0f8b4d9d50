"""Shares of profiled steps: computation, communication, copies, idle.

The profiler makes steps longer, so results are shares of the profiled time. Computation and
communication of a step (EfficientLLM's AL) are these shares x the step time without profiler.
Communication is given twice: all of it, and the part with no computation at the same time, which is
what it costs.

Without a profile, a single rank on one GPU has both values too: it does not communicate, and its
kernels compute.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, efficientllm
from ergmeter.metrics.definitions.timing import in_step_s, outside_steps_frac
from ergmeter.metrics.definitions.utilization import busy_frac
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.ranks import world_size
from ergmeter.metrics.evidence.window import host_times
from ergmeter.records import Direction, Reading, is_above, or_none, weakest
from ergmeter.runlog.reader import Run
from ergmeter.units import NS_PER_S, duration

_MARK = "profiled"
_WHY_NOT = ("no_profile_yet", "profile_unread", "not_profiled")
_MOST_FRAC = 0.95  # with this share of time in steps, the time between them is neglected
_ALONE = "one rank on one GPU does not communicate, and computes whenever a kernel runs"
_NONE = "no steps were profiled: pass profile_steps=3 to an integration, or import a torch trace"


def profiles(run: Run) -> list[dict[str, Any]]:
    """The profiles of a run, one per profiled rank. NotMeasurable if there are none."""
    readable = []
    for mark in run.marks:
        if mark.name == _MARK:
            try:
                profile = json.loads(mark.detail)
            except ValueError:
                continue
            if isinstance(profile, dict) and profile.get("window_s"):
                readable.append({**profile, "end_ns": mark.t_ns})
    if readable:
        return readable
    reasons = [mark.detail for name in _WHY_NOT for mark in run.marks if mark.name == name]
    raise NotMeasurable(reasons[-1] if reasons else _NONE)


def share_of(run: Run, column: str, alone: tuple[float, float] | None = None) -> float:
    """The share of profiled time that `column` takes, over all profiles.

    `alone`: for one rank on one GPU, which needs no profile: the shares of time with a kernel and
    of time in steps.
    """
    try:
        each = profiles(run)
    except NotMeasurable:
        if alone is None or alone[1] < _MOST_FRAC:
            raise
        return alone[0] if column == "compute_s" else 0.0
    total_s = sum(float(profile["window_s"]) for profile in each)
    return sum(float(profile[column]) for profile in each) / total_s


def _share(evidence: Evidence, column: str, alone: tuple[float, float] | None = None) -> Reading:
    """The share of profiled time that `column` takes, as a reading."""
    value, each = share_of(evidence.run, column, alone), or_none(profiles, evidence.run)
    note = _profile_note(evidence, each) if each else _ALONE
    return Reading(value, "frac", "measured", note=note)


def _of_step(evidence: Evidence, column: str) -> Reading:
    """The share of profiled time that `column` takes x the time inside a step."""
    busy, outside = or_none(busy_frac, evidence), or_none(outside_steps_frac, evidence)
    alone = None
    if busy and outside and world_size(evidence) == len(evidence.devices("gpu")) == 1:
        alone = busy.value, 1 - outside.value
    share, step = _share(evidence, column, alone), in_step_s(evidence)
    if is_above(share, 1.0):
        raise NotMeasurable(f"the share of profiled time is impossible: {share.value:.0%}")
    basis = weakest("derived", step.basis)
    note = f"that share of a step's time; {share.note}"
    return Reading(share.value * step.value, "s", basis, note=note)


def _profile_note(evidence: Evidence, each: list[dict[str, Any]]) -> str:
    steps = max(int(profile["steps"] or 0) for profile in each)
    ranks = f" of {len(each)} ranks" if len(each) > 1 else ""
    what = f"{steps} step{'s'[: steps > 1]}{ranks} under torch's profiler"
    if not steps:
        what = "a trace of torch's profiler that names no steps"
    slower = times_as_long(evidence, each)
    cost = f", each {slower:.2f} times as long as the others" if slower else ""
    # The longest of all ranks: they wait side by side.
    held_s, ready_s = (
        max(float(profile.get(s) or 0) for profile in each) for s in ("held_s", "ready_s")
    )
    cost += f"; it delayed training by {duration(held_s)} between steps" if held_s else ""
    cost += f", by {duration(ready_s)} at the start" if ready_s else ""
    where = "kernels of the GPU" if each[0].get("on") == "gpu" else "operators on the host"
    return f"{what}{cost}; {where}"


def times_as_long(evidence: Evidence, each: list[dict[str, Any]]) -> float | None:
    """Median time of profiled steps / that of other steps, both by the host's clock.

    The host starts and stops the profiler, and may be steps ahead of its device.
    """
    if not evidence.has_work:
        return None
    start_ns, end_ns = host_times(evidence.work)
    is_profiled = np.zeros(len(end_ns), dtype=bool)
    for profile in each:
        if profile.get("lasted_s"):
            began_ns = profile["end_ns"] - profile["lasted_s"] * NS_PER_S
            is_profiled |= (end_ns > began_ns) & (end_ns <= profile["end_ns"])
    if not is_profiled.any() or is_profiled.all():
        return None
    took_ns = end_ns - start_ns
    return float(np.median(took_ns[is_profiled]) / np.median(took_ns[~is_profiled]))


# Column, title, direction, and what is divided by the time of the profiled steps.
_ROWS: tuple[tuple[str, str, Direction, str], ...] = (
    ("compute", "computing", "higher", "union of what computes"),
    ("communication", "communicating", "lower", "union of collectives"),
    (
        *("communication_alone", "communicating, nothing beside it", "lower"),
        "collectives that nothing is computed beside",
    ),
    ("copy_alone", "copying, nothing beside it", "lower", "copies beside neither"),
    ("idle", "idle", "lower", "1 - union of all of it"),
)

_of_a_step = partial(Metric, unit="s", direction="lower", needs=("profiled steps", "steps"))

METRICS = [
    *(
        Metric(
            f"profile.{name}_frac",
            f"profiled: {title}",
            "frac",
            direction,
            f"{part} / time of the profiled steps",
            ("profiled steps",),
            partial(_share, column=f"{name}_s"),
            upper_bound=1.0,
            above_bound="spans of the profile are counted twice",
        )
        for name, title, direction, part in _ROWS
    ),
    _of_a_step(
        "profile.computation_s",
        "computation of a step",
        formula="profile.compute_frac (unprofiled, one rank, one GPU: PCU) x time.in_step_s",
        compute=partial(_of_step, column="compute_s"),
        aliases=efficientllm("AL (computation)", "s", "the part of AL that computes"),
    ),
    _of_a_step(
        "profile.communication_s",
        "communication of a step",
        formula="profile.communication_frac (unprofiled, one rank, one GPU: 0) x time.in_step_s",
        compute=partial(_of_step, column="communication_s"),
        aliases=efficientllm(
            "AL (communication)", "s", "the part of AL that communicates; beside computation too"
        ),
    ),
]
