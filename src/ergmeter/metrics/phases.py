"""Which phase each instant of a run belongs to: one partition for times, joules and memory.

A wait for data may lie inside a step, a checkpoint inside an evaluation. An instant in several
spans belongs to the first of their phases in `precedence`, so the phases add up. If steps are
timed by the device, training comes before data: a wait of the host costs nothing while the device
computes.

A step's period runs from the end of the previous step to its own end. If a period without named
spans takes more than twice the median, the time above the median is a stall.

Spans are those of the rank with the most rows: ranks work in step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ergmeter.metrics.evidence.samples import cached_result
from ergmeter.records import FloatArray, TimeArray
from ergmeter.units import NS_PER_S, number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps

Spans: TypeAlias = "tuple[TimeArray, TimeArray]"  # starts and ends

PRECEDENCE = ("checkpoint", "eval", "data", "prefill", "decode", "train", "idle")
_TIMED_BY_DEVICE = ("checkpoint", "eval", "prefill", "decode", "train", "data", "idle")
PHASE_TITLES = {
    "data": "waiting for data",
    "train": "training steps",
    "prefill": "reading prompts",
    "decode": "writing answers",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
    "idle": "idle spans",
}
STALL = 2.0  # times the median: a period above it has a stall
_FEW_STEPS = 10
_SLOW_START = 1.2  # times the median: steps above it at the start are slow
_SLOW_START_FRAC = 0.01  # of the time of all steps
_ROUNDING = 1e-6


@cached_result
def precedence(evidence: Evidence) -> tuple[str, ...]:
    """The phases in order of precedence: an instant in several belongs to the first."""
    rows = evidence.all_steps.longest
    is_by_device = len(rows) and not np.isnan(rows["host_end_ns"]).all()
    return _TIMED_BY_DEVICE if is_by_device else PRECEDENCE


def before(evidence: Evidence, phase: str) -> tuple[str, ...]:
    """The phases that take precedence over `phase`."""
    order = precedence(evidence)
    return order[: order.index(phase)]


@cached_result
def spans_of(evidence: Evidence, phase: str) -> Spans:
    """The recorded spans of a phase, of the rank with the most rows."""
    own = evidence.all_steps.longest.of_phase(phase)
    return own.columns["start_ns"], own.columns["end_ns"]


@cached_result
def union_of(evidence: Evidence, *phases: str) -> Spans:
    """The time in spans of any of these phases, as spans that do not touch."""
    return joined([spans_of(evidence, phase) for phase in phases])


def merged(starts: TimeArray, ends: TimeArray) -> tuple[TimeArray, TimeArray]:
    """Spans merged where they overlap or touch, in order."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    begins = np.append(True, starts[1:] > reached[:-1])
    last = np.append(np.flatnonzero(begins)[1:] - 1, len(starts) - 1)
    return starts[begins], reached[last]


def joined(spans: list[Spans]) -> Spans:
    """The time that any of these spans covers, as spans that do not touch."""
    none = np.array([], dtype=np.int64)
    starts, ends = (np.concatenate([none, *(pair[edge] for pair in spans)]) for edge in (0, 1))
    return merged(starts, ends)


def within(t_ns: TimeArray, starts: TimeArray, ends: TimeArray) -> Any:  # noqa: ANN401  a mask
    """A mask of the times that lie in a span. Spans do not overlap; a span's end is outside it."""
    span = np.searchsorted(starts, t_ns, side="right") - 1
    return (span >= 0) & (t_ns < ends[np.maximum(span, 0)]) if len(starts) else span >= 0


def touched(spans: Spans, since_ns: TimeArray, until_ns: TimeArray) -> Any:  # noqa: ANN401  a mask
    """A mask of the intervals `since_ns` to `until_ns` that overlap a span. Spans do not touch."""
    starts, ends = spans
    last = np.searchsorted(starts, until_ns, side="right") - 1
    if not len(starts):
        return np.zeros(len(until_ns), dtype=bool)
    return (last >= 0) & (ends[last] >= since_ns)


def covered_until_s(spans: list[Spans], t_ns: TimeArray) -> FloatArray:
    """The seconds that any of these spans cover up to each time."""
    starts, ends = joined(spans)
    if not len(starts):
        return np.zeros(len(t_ns))
    knots = np.column_stack((starts, ends)).ravel()
    covered_ns = np.cumsum(np.column_stack((np.zeros(len(starts)), ends - starts)).ravel())
    return np.asarray(np.interp(t_ns, knots, covered_ns) / NS_PER_S, dtype=np.float64)


def covered_s(spans: list[Spans], edges_ns: TimeArray) -> FloatArray:
    """The seconds of each period that any of these spans cover; `edges_ns`: of the periods."""
    return np.asarray(np.diff(covered_until_s(spans, edges_ns)), dtype=np.float64)


def why_no_stalls(steps: Steps, *, from_output: bool) -> str:
    """Why stalls can't be detected in these steps; "" if they can."""
    row = "printed line" if from_output else "row"
    if np.isnan(steps["steps"]).any():
        return f"the number of steps in a {row} is unknown"
    if (steps["steps"] > 1).any():
        return f"some {row}s cover several steps"
    if len(steps) < _FEW_STEPS:
        return f"{number_of(len(steps), 'step')}: too few to tell a stall from the rest"
    return ""


def beyond_median(periods: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the time of each period above the median: in a slow beginning, and in stalls.

    `periods`: without named spans. If most are then empty there is no usual period, so all are 0.
    """
    usual = float(np.median(periods))
    if _is_nothing(usual, periods):
        return np.zeros(len(periods)), np.zeros(len(periods))
    is_start = np.arange(len(periods)) < slow_rows(periods)
    is_stall = ~is_start & (periods > STALL * usual)
    return np.where(is_start, periods - usual, 0.0), np.where(is_stall, periods - usual, 0.0)


def slow_rows(periods: FloatArray) -> int:
    """The number of slow periods at the start; 0 if they cost under 1 % of the time."""
    usual = float(np.median(periods))
    if _is_nothing(usual, periods):
        return 0
    slow = int(np.argmax(periods <= _SLOW_START * usual))  # at least half of them are
    beyond = float((periods[:slow] - usual).sum())
    return slow if beyond > _SLOW_START_FRAC * float(periods.sum()) else 0


def _is_nothing(usual: float, periods: FloatArray) -> bool:
    """True if the median is 0, apart from rounding errors of long clock times."""
    return usual <= _ROUNDING * float(periods.max(initial=0.0))


def beyond_in_gap(gaps: FloatArray, beyond: FloatArray) -> FloatArray:
    """The part of `beyond` (see beyond_median) that is in the gap before a step."""
    is_usual = beyond == 0
    usual = float(np.median(gaps[is_usual])) if is_usual.any() else 0.0
    return np.clip(gaps - usual, 0.0, beyond)
