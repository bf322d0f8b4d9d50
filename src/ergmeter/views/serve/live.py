"""The newest part of a run that is being written.

Each update reads only rows since the last one, so that its cost does not grow with the run. If the
directory contains another run than before, the state starts anew.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ergmeter.errors import ErgmeterError, FormatError, NotMeasurable
from ergmeter.metrics.catalog import in_view
from ergmeter.metrics.live.recent_window import first_start_ns, recent
from ergmeter.records import Missing, Reading, Result, interval_text, value_text
from ergmeter.runlog.reader import RUNNING, Run
from ergmeter.units import NS_PER_S, duration
from ergmeter.views import documents, reading_text

_FIRST_S = 10.0  # how far back the first update reads
_MARKS = 5
_QUIET_S, _QUIET_STEPS = 30.0, 5  # after so long without a step, older metrics are hidden
# Marks of every run that are not shown.
_PLAIN = (
    *("opened", "closed", "ended", "ticks_missed"),
    *("device_used", "device_unused", "device_unknown"),
)


def status(path: str) -> str:
    """Return a run's status, which can change while its files do not: when a writer dies."""
    try:
        return Run.open(path).status
    except OSError as error:  # it was removed during the read
        raise FormatError(f"{path} can't be read ({error.strerror or error})") from error


class LiveLook:
    """Follows one run incrementally."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._id: object = None
        self._start_anew(trainings=0)

    def _start_anew(self, *, trainings: int) -> None:
        self._trainings = trainings
        self._since_ns: int | None = None
        self._usual_s = 0.0  # a step, in the last update
        self._last: dict[str, Any] = {"step": None, "readings": {}}

    def now(self) -> dict[str, Any]:
        """Return the state and the newest steps. Never raises because of a run's content."""
        try:
            run = Run.open(self._path)
            if run.header.get("id") != self._id:  # another run, recorded under the same path
                self._id = run.header.get("id")
                self._start_anew(trainings=0)
            state, several = run.status, len(run.trainings)
            if several > max(1, self._trainings):  # earlier state is of the previous run
                self._start_anew(trainings=several)
            # With several trainings, follow the newest.
            run = run.training(several) if several > 1 else run
            if state == RUNNING and run.writers:
                self._update(run)
            marks = [mark for mark in run.marks if mark.name not in _PLAIN][-_MARKS:]
        except (ErgmeterError, OSError) as error:
            return self.failed(error)
        mark_rows = [{"name": mark.name, "detail": mark.detail[:200]} for mark in marks]
        quiet_s = self._quiet_s(run) if state == RUNNING else None
        if quiet_s is not None:
            self._last = {**self._last, "readings": {}}
            mark_rows.append({"name": "quiet", "detail": f"last step {duration(quiet_s)} ago"})
        return {**self._last, "title": run.name, "state": state, "marks": mark_rows}

    def failed(self, error: Exception) -> dict[str, Any]:
        """Return the state of a run that can't be read, with what was last seen of it."""
        is_ours = isinstance(error, ErgmeterError | OSError)
        why = str(error) if is_ours else f"reading the run failed: {error!r}"
        state = "unreadable" if Path(self._path).is_dir() else "gone"
        return {**self._last, "state": state, "why": why, "marks": []}

    def _quiet_s(self, run: Run) -> float | None:
        """Return the seconds since the last step, if they are many."""
        if self._last["step"] is None or self._since_ns is None:
            return None
        quiet_s = (time.time_ns() - run.wall_zero_ns - self._since_ns) / NS_PER_S
        return quiet_s if quiet_s > max(_QUIET_S, _QUIET_STEPS * self._usual_s) else None

    def _update(self, run: Run) -> None:
        if self._since_ns is None:
            now_ns = time.time_ns() - run.wall_zero_ns
            self._since_ns = max(0, now_ns - round(_FIRST_S * NS_PER_S))
        try:
            if self._last["step"] is None:  # from the start of a step, not within one
                self._since_ns = first_start_ns(run, self._since_ns)
            keys = tuple(in_view("serve live"))
            update = recent(run, since_ns=self._since_ns, keys=keys)
        except NotMeasurable:
            return
        self._since_ns = update.window.end_ns
        step_s = update.summary.readings["time.step_s"]
        self._usual_s = step_s.value if isinstance(step_s, Reading) else 0.0
        readings = {key: result_with_texts(update.summary.readings[key]) for key in keys}
        self._last = {
            "step": update.step,
            "lasted_s": (update.window.end_ns - run.start_ns) / NS_PER_S,
            "window_s": update.length_s,
            "window": duration(update.length_s),
            "readings": readings,
        }


def result_with_texts(result: Result) -> dict[str, Any]:
    """Return a reading with its display texts, or the reason for its absence."""
    body = documents.result(result)
    if isinstance(result, Missing):
        body["text"] = "-"
    elif "value" in body:
        # A column, or a tile that is named by its unit, shows just the number.
        texts = {"text": value_text(result), "bare": reading_text.column_text(result)}
        body |= {**texts, "interval": interval_text(result)}
    return body
