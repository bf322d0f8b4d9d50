"""What a run that is being written came to lately: the same metrics, over the newest steps alone.

The trap: a moving average. It has no window, two of them in one picture contradict each other, and
the last one becomes the run's result. Here an update is over the steps that ended since the update
before it, so that updates add up to the run, and every figure in it is of that one window.

Ranks hand over at slightly different times. An update ends where the slowest of them has got to:
half a second of one rank's tokens is not missing from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.metrics.catalog import LEDGER_SYSTEM, catalogue
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.metrics.summarize import readings_of, settings_of, summary_of
from ergmeter.ports import Update
from ergmeter.records import Summary, Window
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.runlog.reader import Run

_ALL = Settings(warmup_steps=0)  # lately is lately: the warm-up is shown too
_FOREVER_NS = 2**62


def recent(run: Run, *, since_ns: int = 0, keys: Sequence[str] = ()) -> Update:
    """All metrics, or just these, over the steps that ended after this instant of the run's clock.

    NotMeasurable if there is none yet. The next update begins where this one's window ends.
    """
    newest = evidence_since(run, since_ns).counted
    end_ns = _reached_ns(run, newest)
    part = run.part(Window(since_ns, end_ns))
    evidence = Evidence(part, settings_of(part, _ALL), heed_marks=False)
    if keys:
        readings = readings_of(evidence, keys)
        return _update(part, evidence, Summary(run.name, run.status, readings), final=False)
    return _update(part, evidence, summary_of(evidence), final=False)


def whole_run_update(run: Run) -> Update:
    """All metrics over the whole run, after its warm-up."""
    evidence = Evidence(run, settings_of(run))
    return _update(run, evidence, summary_of(evidence), final=True)


def evidence_since(run: Run, since_ns: int) -> Evidence:
    """The newest part of a run, for who wants a few metrics of it and not all."""
    part = run.part(Window(since_ns, _FOREVER_NS))
    return Evidence(part, settings_of(part, _ALL), heed_marks=False)


def _update(run: Run, evidence: Evidence, summary: Summary, *, final: bool) -> Update:
    window = evidence.span
    done, wall_s = _steps_done(evidence), _wall_s(run, window.end_ns)
    unbroken = readings_of(evidence.over(UNBROKEN), _ledger_keys()) if final else {}
    return Update(
        done, wall_s, window.outer, summary, final, window.duration_s, window.kind, unbroken
    )


def _ledger_keys() -> list[str]:
    """The metrics that have a name in SFT-Play's ledger, whose window has no cuts."""
    return [
        key
        for key, metric in catalogue().items()
        if any(alias.system == LEDGER_SYSTEM for alias in metric.aliases)
    ]


def _reached_ns(run: Run, rows: Steps) -> int:
    """Up to when every rank that is still at work has handed over its steps."""
    ends: dict[int, int] = {}
    for lane in rows.lanes:
        for writer in np.unique(lane["writer"]).tolist():
            ends[int(writer)] = int(lane["end_ns"][lane["writer"] == writer].max())
    working = [end for number, end in ends.items() if not run.writers[number].closed]
    return min(working) if working else max(ends.values())


def _steps_done(evidence: Evidence) -> int:
    """The number of the last step and one more; where steps have no numbers, how many there are."""
    lanes = evidence.work.lanes if evidence.trains else ()
    last = [float(np.nanmax(lane["index"])) for lane in lanes if not np.isnan(lane["index"]).all()]
    if last:
        return int(max(last)) + 1
    return int(sum(float(np.nansum(lane["steps"])) for lane in lanes))


def _wall_s(run: Run, t_ns: int) -> float:
    clock = run.writers[0].header["clock"]
    return float(clock["wall_ns"] + t_ns - clock["monotonic_ns"]) / NS_PER_S
