"""Where the time of profiled steps went: computation, communication, copies, idle.

From what a profiler saw of a few steps, as shares of their time: the profiler makes steps longer,
so its seconds are not those of the others. AL's two parts are its shares of the step time that was
measured without it. The trap: communication that hides behind computation. It is given twice: all
of it, and what nothing was computed beside, which is what it costs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Alias, Metric
from ergmeter.metrics.timing import in_step_s
from ergmeter.records import Reading, weakest
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence import Evidence

_MARK = "profiled"
_NONE = "no steps were profiled: profile_steps=3 of a callback, or `erg import` of a torch trace"


def profiles(evidence: Evidence) -> list[dict[str, Any]]:
    """What was seen of the profiled steps, by each rank that looked."""
    found = []
    for mark in evidence.run.marks:
        if mark.name == _MARK:
            try:
                one = json.loads(mark.detail)
            except ValueError:
                continue
            if isinstance(one, dict) and one.get("window_s"):
                found.append({**one, "end_ns": mark.t_ns})
    if found:
        return found
    said = [mark.detail for mark in evidence.run.marks if mark.name == "not_profiled"]
    raise NotMeasurable(said[-1] if said else _NONE)


def _share(column: str) -> Callable[[Evidence], Reading]:
    """Of the time of all profiled steps."""

    def compute(evidence: Evidence) -> Reading:
        found = profiles(evidence)
        whole_s = sum(float(one["window_s"]) for one in found)
        value = sum(float(one[column]) for one in found) / whole_s
        return Reading(value, "frac", "measured", note=_said(evidence, found))

    return compute


def _of_step(column: str) -> Callable[[Evidence], Reading]:
    """That share of the time inside a step, as measured over all of them."""

    def compute(evidence: Evidence) -> Reading:
        share, whole = _share(column)(evidence), in_step_s(evidence)
        value = share.value * whole.value
        basis = weakest("derived", whole.basis)
        return Reading(value, "s", basis, note=f"that share of a step's time; {share.note}")

    return compute


def _said(evidence: Evidence, found: list[dict[str, Any]]) -> str:
    steps = max(int(one["steps"]) for one in found)
    ranks = f" of {len(found)} ranks" if len(found) > 1 else ""
    slower = times_as_long(evidence, found)
    cost = f", each {slower:.2f} times as long as the others" if slower else ""
    where = "kernels of the GPU" if found[0].get("on") == "gpu" else "operators on the host"
    plural = "s" if steps > 1 else ""
    return f"{steps} step{plural}{ranks} under torch's profiler{cost}; {where}"


def times_as_long(evidence: Evidence, found: list[dict[str, Any]]) -> float | None:
    """What the profiler costs: a step that it looked at, against the others."""
    rows = evidence.counted
    is_seen = np.zeros(len(rows), dtype=bool)
    for one in found:
        if one.get("lasted_s"):
            start_ns = one["end_ns"] - one["lasted_s"] * NS_PER_S
            is_seen |= (rows["end_ns"] > start_ns) & (rows["end_ns"] <= one["end_ns"])
    if not is_seen.any() or is_seen.all():
        return None
    seen, others = rows.duration_s[is_seen], rows.duration_s[~is_seen]
    return float(np.median(seen) / np.median(others))


def _metric(key: str, label: str, direction: Any, formula: str, column: str) -> Metric:  # noqa: ANN401
    return Metric(key, label, "frac", direction, formula, ("profiled steps",), _share(column))


METRICS = [
    _metric(
        "profile.compute_frac",
        "profiled: computing",
        "higher",
        "union of what computes / time of the profiled steps",
        "compute_s",
    ),
    _metric(
        "profile.communication_frac",
        "profiled: communicating",
        "lower",
        "union of collectives / time of the profiled steps",
        "communication_s",
    ),
    _metric(
        "profile.communication_alone_frac",
        "profiled: communicating, nothing beside it",
        "lower",
        "collectives that nothing is computed beside / time of the profiled steps",
        "communication_alone_s",
    ),
    _metric(
        "profile.copy_alone_frac",
        "profiled: copying, nothing beside it",
        "lower",
        "copies beside neither / time of the profiled steps",
        "copy_alone_s",
    ),
    _metric(
        "profile.idle_frac",
        "profiled: idle",
        "lower",
        "1 - union of all of it / time of the profiled steps",
        "idle_s",
    ),
    Metric(
        "profile.computation_s",
        "computation of a step",
        "s",
        "lower",
        "profile.compute_frac x time.in_step_s",
        ("profiled steps", "steps"),
        _of_step("compute_s"),
        aliases=(Alias("AL (computation)", "EfficientLLM", "the part of AL that computes", "s"),),
    ),
    Metric(
        "profile.communication_s",
        "communication of a step",
        "s",
        "lower",
        "profile.communication_frac x time.in_step_s",
        ("profiled steps", "steps"),
        _of_step("communication_s"),
        aliases=(
            Alias(
                "AL (communication)",
                "EfficientLLM",
                "the part of AL that communicates; beside computation too",
                "s",
            ),
        ),
    ),
]
