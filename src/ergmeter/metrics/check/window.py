"""The checks of a run's record and of its window: whole, long, even and settled enough?

The trap: a pause that somebody named, taken for a stall. What is no ordinary step is told apart as
`erg explain` tells it, so that both say the same of one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.check.finding import CheckFinding
from ergmeter.metrics.definitions.stragglers import STRAGGLING_FRAC, pace_of_ranks
from ergmeter.metrics.definitions.throughput import pace
from ergmeter.metrics.evidence.gauges import sampled
from ergmeter.metrics.evidence.missing_ranks import is_declared, why_not_all
from ergmeter.metrics.explain.block import percent
from ergmeter.metrics.explain.time import NAMED, slow_rows, time_split
from ergmeter.metrics.explain.waits import TITLES
from ergmeter.records import PHASES
from ergmeter.runlog.dropped import dropped_steps
from ergmeter.runlog.reader import CUT_OFF
from ergmeter.units import duration, number_of

if TYPE_CHECKING:
    from ergmeter.metrics.check.finding import Check
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps

_SHORT_S = 5.0
_FEW_STEPS = 10
_NOISY_FRAC = 0.05  # half the interval, over the rate
_WAITS_FRAC = 0.02  # of the window
_LEFT = "metrics that need it are absent, or cover only what is left"
_MERGED = "totals and rates are exact; a step's time is the mean over its row"
_LOST = (
    "rows_dropped",
    "samples_dropped",
    "handover_failed",
    "probe_failed",
    "device_lost",
)


# -- the record -------------------------------------------------------------------------------


def _record(evidence: Evidence) -> list[CheckFinding]:
    found = []
    if evidence.run.status == CUT_OFF:
        effect = "the window ends with the last records that were written"
        found.append(CheckFinding("record", "serious", "the run was cut off", effect))
    lost = [f"{dropped}" for dropped in dropped_steps(evidence.run)]
    others = [mark for mark in evidence.run.marks if mark.name in _LOST]
    lost += [f"{mark.name.replace('_', ' ')}: {mark.detail}" for mark in others[:1]]
    for said in lost:
        seen = f"part of the record is missing: {said}"
        found.append(CheckFinding("record", "serious", seen, _LEFT))
    merged = [mark for mark in evidence.run.marks if mark.name == "steps_merged"]
    found += [CheckFinding("record", "minor", mark.detail, _MERGED) for mark in merged]
    found += [CheckFinding("record", "serious", said, _LEFT) for said in evidence.run.verified()]
    if not found and not evidence.has_work:
        effect = "only the whole run can be compared: its time, energy and memory"
        found.append(CheckFinding("record", "minor", evidence.no_work, effect))
    return found


def _ranks(evidence: Evidence) -> list[CheckFinding]:
    """Ranks that told no steps, whose tokens nobody else tells."""
    why = why_not_all(evidence)
    effect = (
        "tokens are those declared, not counted on every rank"
        if is_declared(evidence)
        else "tokens are of the other ranks only: metrics per device or per joule are absent"
    )
    return [CheckFinding("ranks", "serious", why, effect)] if why else []


def _company(evidence: Evidence) -> list[CheckFinding]:
    own = {device.id for device in sampled(evidence, "gpu")}
    marks = [mark for mark in evidence.run.marks if mark.detail.partition(" ")[0] in own]
    if not any(mark.name == "device_used" for mark in marks):
        raise NotMeasurable("the processes on the GPU could not be identified")
    return [
        CheckFinding(
            "company",
            "serious",
            f"another program computed on a GPU of this run: {mark.detail}",
            "time, memory and energy are not this run's alone",
        )
        for mark in marks
        if mark.name == "device_shared"
    ]


# -- the window -------------------------------------------------------------------------------


def _window(evidence: Evidence) -> list[CheckFinding]:
    lasted_s, rows = evidence.window.duration_s, evidence.counted
    if evidence.trains:
        lane = max(rows.lanes, key=len)
        steps, what = len(lane), _name_of_rows(evidence, lane)
    else:  # a request is up to two rows
        phases = (
            np.bincount(lane["phase"].astype(int), minlength=len(PHASES)) for lane in rows.lanes
        )
        steps, what = int(np.max(sum(phases))), "request"
    if lasted_s >= _SHORT_S and steps >= _FEW_STEPS:
        return []
    made = number_of(steps, what)
    if steps >= _FEW_STEPS:
        seen = f"the window is {duration(lasted_s)} long, with {made}"
        enough = f"measure {_SHORT_S:g} s or more"
    elif lasted_s >= _SHORT_S:
        seen = f"{made} in {duration(lasted_s)}"
        enough = f"measure {number_of(_FEW_STEPS, what)} or more"
    else:
        seen = f"the window is {duration(lasted_s)} long, with {made}"
        enough = f"measure {_SHORT_S:g} s and {number_of(_FEW_STEPS, what)} or more"
    return [
        CheckFinding(
            "window", "serious", seen, f"too little to separate speed from chance: {enough}"
        )
    ]


def _warm_up(evidence: Evidence) -> list[CheckFinding]:
    """Steps at the beginning that are slower than the rest."""
    _only_equal_rows(evidence)
    if evidence.is_whole_run:
        raise NotMeasurable("a whole run includes its warm-up")
    lane, split = evidence.counted.longest, time_split(evidence)
    if len(lane) < _FEW_STEPS:
        raise NotMeasurable(
            f"{number_of(len(lane), _name_of_rows(evidence, lane))}: too few to tell a slow"
            " beginning from the rest"
        )
    rows = slow_rows(split.left_s)
    if not rows:
        return []
    usual_s = float(np.median(split.left_s))
    early_s = split.left_s[:rows]
    share = float((early_s - usual_s).sum()) / split.whole_s
    slow = int(np.nan_to_num(lane["steps"][:rows], nan=1.0).sum())  # a printed line may be of ten
    which = "the first counted step is" if slow == 1 else f"the first {slow} counted steps are"
    seen = f"{which} up to {early_s.max() / usual_s:.1f} times as slow as the median"
    they, them = ("it costs", "it") if slow == 1 else ("they cost", "them")
    option = _without_first(evidence, lane, rows, slow)
    effect = f"{they} {percent(share)} of the time: {option} leaves {them} out"
    return [CheckFinding("warm_up", "serious", seen, effect)]


def _without_first(evidence: Evidence, lane: Steps, rows: int, steps: int) -> str:
    """The option that leaves out the first rows of the window, of so many steps."""
    if evidence.settings.steps_range is None:  # the option counts from the run's beginning
        return f"--warmup-steps {int(evidence.warmup()[0]) + steps}"
    first, last = evidence.settings.steps_range
    number = lane["index"][rows]
    start = first + steps if np.isnan(number) else int(number)
    return f"--window {start}:{'' if last is None else last}"


def _noise(evidence: Evidence) -> list[CheckFinding]:
    rate = pace(evidence)
    if rate.low is None or rate.high is None:
        if evidence.is_whole_run:
            raise NotMeasurable("a whole run has no interval: its start and its pauses are in it")
        rows = evidence.counted
        made = number_of(len(rows), _name_of_rows(evidence, rows))
        raise NotMeasurable(f"{made}: too few for an interval, which needs {_FEW_STEPS}")
    half = (rate.high - rate.low) / 2 / rate.value
    if half <= _NOISY_FRAC:
        return []
    effect = f"differences below {100 * half:.0f} % may be chance: measure longer"
    return [
        CheckFinding(
            "noise", "serious", f"steps per second are known to ± {100 * half:.0f} %", effect
        )
    ]


def _stalls(evidence: Evidence) -> list[CheckFinding]:
    """Steps that took much longer than the others, without what is named and the beginning."""
    _only_equal_rows(evidence)
    split = time_split(evidence)
    if "stalls" in split.absent:
        raise NotMeasurable(split.absent["stalls"])
    if split.frac("stalls") <= _WAITS_FRAC:
        return []
    seen = (
        f"{split.counts['stalls']} of {len(split.left_s)} steps took twice the median or more,"
        f" up to {duration(split.longest_s['stalls'])} beyond it"
    )
    took = f"{percent(split.frac('stalls'))} of the time"
    effect = (
        f"{took}: look for what stops the steps: data loading, checkpoints or logging that is not"
        " a phase of its own"
    )
    return [CheckFinding("stalls", "minor", seen, effect)]


def _pauses(evidence: Evidence) -> list[CheckFinding]:
    """Checkpoints, evaluation and waits for data: what is named, and no stall for that."""
    _only_training(evidence)
    split = time_split(evidence)
    effect = "it is part of the window: compare runs that spend as much on it"
    found = []
    for part in NAMED:
        if split.frac(part) <= _WAITS_FRAC:
            continue
        times = number_of(split.counts[part], "time")
        took = f"{percent(split.frac(part))} of the window ({duration(split.parts_s[part])}"
        found.append(
            CheckFinding("pauses", "minor", f"{TITLES[part]} took {took}, {times})", effect)
        )
    return found


def _stragglers(evidence: Evidence) -> list[CheckFinding]:
    """A rank that the others wait for, or that falls behind them."""
    if len(evidence.counted.lanes) < 2:
        return []
    worst = pace_of_ranks(evidence).straggler()
    if worst.by_frac <= STRAGGLING_FRAC:
        return []
    effect = (
        f"{percent(worst.by_frac)} of each step: look at its data loading, its host and its GPU"
    )
    return [CheckFinding("stragglers", "minor", worst.said, effect)]


def _only_training(evidence: Evidence) -> None:
    if not evidence.has_work:
        raise NotMeasurable(evidence.no_work)
    if not evidence.trains:
        raise NotMeasurable("requests differ in length, so none is slow by itself")


def _only_equal_rows(evidence: Evidence) -> None:
    """Refuse rows that differ in length because they stand for different numbers of steps."""
    _only_training(evidence)
    for lane in evidence.counted.lanes:
        steps = lane["steps"]
        rows = f"{_name_of_rows(evidence, lane)}s"
        if np.isnan(steps).any():
            raise NotMeasurable(f"{rows} do not say how many steps they stand for")
        if steps.min() < steps.max():
            raise NotMeasurable(f"{rows} stand for different numbers of steps")


def _name_of_rows(evidence: Evidence, lane: Steps) -> str:
    """A step, unless rows of the log or of the Meter stand for several or an unknown number."""
    if (lane["steps"] == 1).all():
        return "step"
    return "printed line" if evidence.from_output else "row"


CHECKS: dict[str, Check] = {
    "ranks": _ranks,
    "record": _record,
    "window": _window,
    "warm_up": _warm_up,
    "noise": _noise,
    "company": _company,
    "stalls": _stalls,
    "pauses": _pauses,
    "stragglers": _stragglers,
}
