"""Time and energy until the training loss reaches a target.

The loss of a single step is noisy, so the target is reached when the mean of the last five recorded
losses is at or below it. Time starts with the first training step: compiling, warm-up and
evaluations on the way are included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ergmeter.errors import ErgmeterError, NotMeasurable
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.evidence.evidence import OUTPUT, Evidence
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.evidence.window import WATCHED, TrainingWindow
from ergmeter.metrics.summarize import settings_of
from ergmeter.records import PHASES, Missing, Reading, Result, Window, or_missing
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings

TIME = "target.time_s"
ENERGY = "target.energy_j"
SMOOTHED = 5
SMOOTHING = f"mean of the last {SMOOTHED} recorded losses"
_TRAIN = PHASES.index("train")


class SpanEvidence(Evidence):
    """Evidence of a run over a span of time, warm-up included; by default its whole time."""

    def __init__(
        self, run: Run, window: Window | None = None, settings: Settings | None = None
    ) -> None:
        declared = replace(settings or Settings(), warmup_steps=0, warmup_s=None, warmup=None)
        super().__init__(run, settings_of(run, declared), heed_marks=False)
        self._window = window

    @cached_property
    def span(self) -> TrainingWindow:
        """The span of time as a window."""
        window = self._window or self.watched
        return TrainingWindow.single(WATCHED, window.start_ns, window.end_ns)


def to_target(path: Path | None, loss: float, *, training: int | None = None) -> dict[str, Result]:
    """Time and energy of a run, or of one of its trainings, until its loss reached a target."""
    if path is None:
        why = "jobs and rows of a ledger have no losses by step: name a run's directory"
        return {TIME: Missing(why), ENERGY: Missing(why)}
    try:
        run = Run.open(path)
        run = run if training is None else run.training(training)
        window, losses = _reached(run, loss)
    except ErgmeterError as error:
        return {TIME: Missing(str(error)), ENERGY: Missing(str(error))}
    note = f"from the first step until the {SMOOTHING} was {loss:g} or less, after {losses} of them"
    energy: Result = or_missing(lambda: run_j(SpanEvidence(run, window)))
    if isinstance(energy, Reading):
        energy = Reading(energy.value, "J", energy.basis, energy.low, energy.high, note)
    return {TIME: Reading(window.duration_s, "s", "measured", note=note), ENERGY: energy}


def _reached(run: Run, loss: float) -> tuple[Window, int]:
    if len(run.trainings) > 1:
        raise NotMeasurable(
            f"{len(run.trainings)} trainings in {run.path}, each with its own loss: name one,"
            f" {run.path}:1"
        )
    rows = _training(run)
    has_loss = ~np.isnan(rows["loss"])
    if int(has_loss.sum()) < SMOOTHED:
        count = int(has_loss.sum())
        raise NotMeasurable(f"only {count} steps have a loss: a target loss needs {SMOOTHED}")
    ends, losses = rows["end_ns"][has_loss], rows["loss"][has_loss]
    sums = np.cumsum(np.insert(losses, 0, 0.0))
    smooth = (sums[SMOOTHED:] - sums[:-SMOOTHED]) / SMOOTHED
    below = np.flatnonzero(smooth <= loss)
    if not len(below):
        raise NotMeasurable(
            f"the loss never reached {loss:g}: the lowest {SMOOTHING} is {smooth.min():.4g}"
        )
    at = int(below[0]) + SMOOTHED - 1
    return Window(int(rows["start_ns"].min()), int(ends[at])), at + 1


def _training(run: Run) -> Steps:
    """The training steps of the rank with the most losses."""
    for stream in ("", OUTPUT):
        rows = Steps(run.steps(stream))
        rows = rows.where(rows["phase"] == _TRAIN)
        lanes = (
            [lane for lane in rows.lanes if not np.isnan(lane["loss"]).all()] if len(rows) else []
        )
        if lanes:
            return max(lanes, key=lambda lane: int((~np.isnan(lane["loss"])).sum()))
    raise NotMeasurable("no step has a loss")
