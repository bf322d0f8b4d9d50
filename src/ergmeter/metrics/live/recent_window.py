"""Metrics over the newest steps of a running run, and its remaining time.

An update is over the steps that ended since the previous update, so updates add up to the run and
all metrics in one share a window. A moving average has no such window. Ranks write at slightly
different times, so an update ends where the slowest rank is.

The time left uses the rate of the counted steps: a mean since the start would include compiling.
Without a total step or token count progress is unknown. All views use `goal`, `real_tokens` and
`steps_done`, so that they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import ledger_aliases
from ergmeter.metrics.definitions.compute import flops_per_token
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.metrics.live.rows import real_tokens, steps_done
from ergmeter.metrics.summarize import readings_of, settings_of, summary_of
from ergmeter.ports import Update
from ergmeter.records import Summary, Window
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S, duration

_NO_BUDGET = "no total step or token count: pass Meter(budget=Budget(steps=N)) or Budget(tokens=N)"


@dataclass(frozen=True, slots=True)
class Remaining:
    """Progress of one rank towards its budget, and the time left."""

    unit: str
    done: float
    total: float
    left_s: float | None  # at the rate of the counted steps; None without a rate

    @property
    def done_frac(self) -> float:
        """The share that is done; above 1 if the budget is exceeded."""
        return self.done / self.total

    @property
    def text(self) -> str:
        """Progress and time left as text."""
        left = "not known yet" if self.left_s is None else duration(self.left_s)
        done = f"{self.done:,.0f} of {self.total:,.0f} {self.unit} ({self.done_frac:.1%})"
        return f"{done}; left, at the counted rate: {left}"


def remaining(evidence: Evidence) -> Remaining:
    """Progress of a run. NotMeasurable without a total step or token count."""
    target = goal(writer.header for writer in evidence.run.writers)
    if target is None:
        raise NotMeasurable(_NO_BUDGET)
    unit, total = target
    lane = evidence.work.longest
    done = float(steps_done(lane)) if unit == "steps" else _amount(evidence, lane, unit)
    try:
        counted = evidence.counted.longest
        # The outer window, as the remaining time includes evaluation and checkpoints too.
        span_s = evidence.window.outer.duration_s
        rate = _amount(evidence, counted, unit) / span_s if span_s > 0 else 0.0
    except NotMeasurable:
        rate = 0.0
    left_s = max(0.0, total - done) / rate if rate > 0 else None
    return Remaining(unit, done, total, left_s)


def goal(headers: Iterable[Mapping[str, Any]]) -> tuple[str, float] | None:
    """Return the unit and size of a run's budget, from its writers' headers; None without one."""
    for header in headers:
        budget = header.get("budget")
        budget = budget if isinstance(budget, dict) else {}
        totals = [(unit, budget.get(unit)) for unit in ("steps", "tokens", "FLOPs")]
        for unit, total in (*totals, ("steps", header.get("total_steps"))):
            if isinstance(total, int | float) and total > 0:
                return unit, float(total)
    return None


def _amount(evidence: Evidence, lane: Steps, unit: str) -> float:
    if unit == "steps":
        return float(lane.step_counts.sum())
    if unit == "tokens":
        return float(np.nansum(real_tokens(lane)))
    if not evidence.flops:
        raise NotMeasurable("the budget is in FLOPs, and the FLOPs of a step are unknown")
    return float(np.nansum(lane["tokens_computed"])) * flops_per_token(evidence.flops[0])


WITH_WARMUP = Settings(warmup_steps=0)
FOREVER_NS = 2**62


def recent(run: Run, *, since_ns: int = 0, keys: Sequence[str] = ()) -> Update:
    """All metrics, or those of `keys`, over the steps that ended after `since_ns`.

    NotMeasurable if there is no step yet. The next update begins at the end of this window.
    """
    newest = evidence_since(run, since_ns).counted
    evidence = evidence_since(run, since_ns, _reached_ns(run, newest))
    if not keys:
        return _update(evidence, summary_of(evidence), final=False)
    summary = Summary(run.name, run.status, readings_of(evidence, keys))
    return _update(evidence, summary, final=False)


def whole_run_update(run: Run) -> Update:
    """All metrics over the whole run, after its warm-up."""
    evidence = Evidence(run, settings_of(run))
    return _update(evidence, summary_of(evidence), final=True)


def evidence_since(run: Run, since_ns: int, until_ns: int = FOREVER_NS) -> Evidence:
    """The evidence of a part of a run, from one time to another, warm-up included."""
    part = run.part(Window(since_ns, until_ns))
    return Evidence(part, settings_of(part, WITH_WARMUP), heed_marks=False)


def first_start_ns(run: Run, since_ns: int) -> int:
    """When the first step that ended after `since_ns` began, on the rank that began it last;
    at most `since_ns`."""
    lanes = evidence_since(run, since_ns).counted.lanes
    return min(since_ns, max(int(lane["start_ns"].min()) for lane in lanes if len(lane)))


def _update(evidence: Evidence, summary: Summary, *, final: bool) -> Update:
    window = evidence.span
    clock = evidence.run.writers[0].header["clock"]
    wall_s = float(clock["wall_ns"] + window.end_ns - clock["monotonic_ns"]) / NS_PER_S
    done = max(map(steps_done, evidence.work.lanes if evidence.trains else ()), default=0)
    # An energy ledger's window has no cuts.
    in_ledger = [metric.key for metric, _ in ledger_aliases()]
    unbroken = readings_of(evidence.over(UNBROKEN), in_ledger) if final else {}
    return Update(
        done, wall_s, window.outer, summary, final, window.duration_s, window.kind, unbroken
    )


def _reached_ns(run: Run, rows: Steps) -> int:
    """The time up to which every running rank has written its steps."""
    ends: dict[int, int] = {}
    for lane in rows.lanes:
        for writer in np.unique(lane["writer"]).tolist():
            ends[int(writer)] = int(lane["end_ns"][lane["writer"] == writer].max())
    working = [end for number, end in ends.items() if not run.writers[number].closed]
    return min(working) if working else max(ends.values())
