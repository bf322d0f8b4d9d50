"""A look at a run that is being written: what came since the look before.

The trap: reading all of it again. A look takes the newest part of the run only, so that it costs
the same in the first minute and after a day. And a directory may hold another run than it did at
the look before: what was seen of the one is told of no other.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError, FormatError, NotMeasurable
from ergmeter.metrics.live.recent_window import evidence_since, recent
from ergmeter.records import Reading
from ergmeter.runlog.reader import RUNNING, Run
from ergmeter.units import NS_PER_S, duration
from ergmeter.views import documents
from ergmeter.views.run import card

if TYPE_CHECKING:
    from ergmeter.records import Result

_FIRST_S = 10.0  # how far back the first look goes
_MARKS = 5
_QUIET_S, _QUIET_STEPS = 30.0, 5  # without a step for so long, the figures before are not shown
KEYS = (
    "throughput.tokens_per_s",
    "time.step_s",
    "training.loss",
    "energy.mean_w",
    "energy.joules_per_token",
    "utilization.mfu_frac",
    "memory.device_peak_bytes",
    "memory.process_peak_bytes",
)
# What every run has, and says nothing about its course.
_PLAIN = (
    "opened",
    "closed",
    "device_used",
    "device_unused",
    "device_unknown",
    "ended",
    "ticks_missed",
)


def status(path: str) -> str:
    """How a run is doing, which changes without its files when a writer dies."""
    try:
        return Run.open(path).status
    except OSError as error:  # it went while it was read
        raise FormatError(f"{path} can't be read ({error.strerror or error})") from error


class LiveLook:
    """Looks at one run again and again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._id: object = None
        self._start_anew(trainings=0)

    def _start_anew(self, *, trainings: int) -> None:
        self._trainings = trainings
        self._since_ns: int | None = None
        self._usual_s = 0.0  # a step, in the look before
        self._last: dict[str, Any] = {"step": None, "readings": {}}

    def now(self) -> dict[str, Any]:
        """Its state, and what its newest steps came to. Never raises for what a run holds."""
        try:
            run = Run.open(self._path)
            if run.header.get("id") != self._id:  # another one, recorded under the same path
                self._id = run.header.get("id")
                self._start_anew(trainings=0)
            state, several = run.status, len(run.trainings)
            if several > max(1, self._trainings):  # what was seen is of the one before
                self._start_anew(trainings=several)
            # Figures of several trainings there are none: what goes on is the newest.
            run = run.training(several) if several > 1 else run
            if state == RUNNING:
                self._update(run)
            marks = [mark for mark in run.marks if mark.name not in _PLAIN][-_MARKS:]
        except (ErgmeterError, OSError) as error:
            # What is still there is not gone.
            state = "unreadable" if Path(self._path).is_dir() else "gone"
            return {**self._last, "state": state, "why": str(error), "marks": []}
        said = [{"name": mark.name, "detail": mark.detail[:200]} for mark in marks]
        quiet_s = self._quiet_s(run) if state == RUNNING else None
        if quiet_s is not None:
            self._last = {**self._last, "readings": {}}
            said.append({"name": "quiet", "detail": f"last step {duration(quiet_s)} ago"})
        return {**self._last, "title": run.name, "state": state, "marks": said}

    def _quiet_s(self, run: Run) -> float | None:
        """For how long there has been no step, where that is long."""
        if self._last["step"] is None or self._since_ns is None:
            return None
        quiet_s = (time.time_ns() - run.wall_zero_ns - self._since_ns) / NS_PER_S
        return quiet_s if quiet_s > max(_QUIET_S, _QUIET_STEPS * self._usual_s) else None

    def _update(self, run: Run) -> None:
        if self._since_ns is None:
            now_ns = time.time_ns() - run.wall_zero_ns
            self._since_ns = max(0, now_ns - round(_FIRST_S * NS_PER_S))
        try:
            if self._last["step"] is None:  # from the start of a step, and not from within one
                lanes = evidence_since(run, self._since_ns).counted.lanes
                starts_ns = [int(lane["start_ns"].min()) for lane in lanes if len(lane)]
                self._since_ns = min(self._since_ns, max(starts_ns))
            found = recent(run, since_ns=self._since_ns, keys=KEYS)
        except NotMeasurable:
            return
        self._since_ns = found.window.end_ns
        step_s = found.summary.readings["time.step_s"]
        self._usual_s = step_s.value if isinstance(step_s, Reading) else 0.0
        shown = {key: _result_json(found.summary.readings[key]) for key in KEYS}
        self._last = {
            "step": found.step,
            "lasted_s": (found.window.end_ns - run.start_ns) / NS_PER_S,
            "window_s": found.length_s,
            "window": duration(found.length_s),
            "readings": shown,
        }


def _result_json(found: Result) -> dict[str, Any]:
    whole = documents.result(found)
    if isinstance(found, Reading):
        # A loss has no unit to show; a tile that is named by its unit shows just the number.
        whole |= {"text": card.value(found), "bare": card.bare(found)}
    return whole
