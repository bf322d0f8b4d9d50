"""Evidence: what the metrics of a run are computed from: its steps, its window, its devices.

Tokens, time and energy of a metric must be of the same window: all tokens over the time after the
warm-up gave 1e14 tokens/s in SFT-Play for a run shorter than its warm-up. So the window is chosen
once, here. The same metrics over the whole run come from a second Evidence, `whole_run`.
"""

from __future__ import annotations

import copy
import re
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence.gpu_use import GpuUse, gpu_names, gpu_use
from ergmeter.metrics.evidence.ranks import aligned
from ergmeter.metrics.evidence.requests import LOAD_MARK, Offered, offered
from ergmeter.metrics.evidence.samples import Column, SampleColumns
from ergmeter.metrics.evidence.steps import Steps, Timed, read_steps
from ergmeter.metrics.evidence.window import (
    LOOKED_AT_STEPS,
    REQUESTS,
    TRAINING,
    UNBROKEN,
    WATCHED,
    WHOLE_RUN,
    CountedRows,
    SingleStep,
    TrainingWindow,
    after_warmup,
    cuts_text,
    ending,
    training_window,
    without_named,
)
from ergmeter.records import (
    PHASES,
    STEP_LOSS,
    Basis,
    Device,
    FloatArray,
    Flops,
    Mark,
    Window,
    or_none,
)
from ergmeter.runlog.reader import CUT_OFF, RUNNING, Run
from ergmeter.runlog.segments import Series
from ergmeter.units import duration, number_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from ergmeter.metrics.device_energy import DeviceCurves
    from ergmeter.runlog.settings import Settings

OUTPUT = "output"  # the stream of steps that were seen in a program's output
# An importer's remark that times are sums of printed step times: as exact as the printed ones.
_SUMMED = "times are its step times added up"
_STEP_TIMES_GIVEN = "step times are those that the lines give"
_NO_TIMES = "a log without times has no duration"
_NO_READINGS = "a log holds no readings of energy, devices or host memory"
_ELSEWHERE = re.compile(r"no [\w ]+ here: ")
COMMAND, METER = "command", "meter"  # what started the run
_SINCE = {COMMAND: "the command's start", METER: "the Meter's start"}
# The cached properties that depend on the window.
_OF_THE_WINDOW = (
    *("counted", "_counted", "window", "span", "window_note", "timed", "whole_run"),
    *("_why_single_step", "has_company"),
)
_INFERENCE = ("prefill", "decode")


class Evidence:
    """A run, seen through one window. Properties raise NotMeasurable with the reason."""

    def __init__(
        self, run: Run, settings: Settings, *, heed_marks: bool = True, flops: Sequence[Flops] = ()
    ) -> None:
        unread = replace(run, damage=list(run.damage), torn=list(run.torn))
        # Makes this evidence anew, without what has been read of the run.
        self.again = partial(Evidence, unread, settings, heed_marks=heed_marks, flops=flops)
        run, self.clocks = aligned(run, settings.layout)
        self.run = run
        self.settings = settings
        self.flops = tuple(flops) or run.flops  # under each convention, the chosen one first
        self._heed_marks = heed_marks  # not if the reader declares a warm-up of their own
        # Cached results of functions of this evidence, or why there is none, by function and
        # arguments.
        self.results: dict[Hashable, object] = {}
        # Curves of one device at a time: those of all devices of a large run would fill memory.
        self.device_curves: dict[str, DeviceCurves] = {}
        self._columns = SampleColumns(run)

    # -- steps --------------------------------------------------------------------------------

    @cached_property
    def all_steps(self) -> Steps:
        """All recorded steps and phases, from a Meter if there are any, else from printed lines."""
        return read_steps(self.run, OUTPUT) if self.from_output else self._meter_steps

    @cached_property
    def from_output(self) -> bool:
        """True if the steps come from the program's output and not from a Meter."""
        return len(self._meter_steps) == 0

    @cached_property
    def printed(self) -> Steps:
        """The training steps printed in the program's output, even if a Meter recorded steps."""
        return Steps(self.run.steps(OUTPUT)).of_phase("train")

    @cached_property
    def losses_beside_steps(self) -> Series:
        """Printed losses that belong to no step: the first line, or a progress bar's repeats."""
        losses = [reported for reported in self.run.printed if reported.name == STEP_LOSS]
        finite = [loss for loss in losses if np.isfinite(loss.value)]
        t_ns = np.array([loss.t_ns for loss in finite], dtype=np.int64)
        return Series(t_ns, np.array([loss.value for loss in finite], dtype=float))

    @cached_property
    def _meter_steps(self) -> Steps:
        return read_steps(self.run)

    @cached_property
    def work(self) -> Steps:
        """The rows that metrics count: training steps, or prefill and decode in inference."""
        if self.several:
            raise NotMeasurable(self.several)
        rows = self.all_steps.of_phase(*(("train",) if self.trains else _INFERENCE))
        if not len(rows):
            raise NotMeasurable(self._why_no_steps())
        return rows

    @property
    def several(self) -> str:
        """If the run has several trainings, a message on how to choose one; else ""."""
        number = len(self.run.trainings)
        if number < 2:
            return ""
        return (
            f"{number} trainings in this run, each with its own metrics: choose one,"
            f" --training 1 (to {number})"
        )

    @cached_property
    def trains(self) -> bool:
        """True if the run is a training: its rows are optimizer steps."""
        return len(self.all_steps.of_phase("train")) > 0

    @cached_property
    def counted(self) -> Steps:
        """The rows after the warm-up, without those too recent to have device samples yet."""
        rows = self._counted.rows
        sampled_ns = self._sampled_until_ns
        if sampled_ns is None or rows.lowest("end_ns") > sampled_ns:
            return rows
        return rows.where_each(lambda lane: lane["end_ns"] <= sampled_ns)

    @cached_property
    def _counted(self) -> CountedRows:
        """The rows after the warm-up, and the rule that ended it."""
        if self.is_whole_run:
            return CountedRows(self.work, self._whole_start_ns, "the whole run")
        return after_warmup(
            self.work,
            self.settings,
            self._warmup_mark,
            self.all_periods_s if self.trains and not self._is_unbroken else None,
        )

    @cached_property
    def unbroken(self) -> TrainingWindow:
        """All steps without evaluation, checkpoints and pauses; used to find the warm-up."""
        start_ns, end_ns = self._work_start_ns, self.work.highest("end_ns")
        if end_ns <= start_ns:
            raise NotMeasurable("the steps have no duration: all began and ended at one instant")
        return without_named(Window(start_ns, end_ns), self.all_steps)

    @cached_property
    def _work_start_ns(self) -> int:
        return self.work.lowest("start_ns")

    def all_periods_s(self, lane: Steps) -> FloatArray:
        """Seconds of each row of a rank, warm-up included, without evaluation and other phases."""
        return self.unbroken.periods_s(lane, int(lane["start_ns"][0]))

    def first_ns(self, lane: Steps) -> int:
        """When the time of a rank's first counted row begins: at the row's start if no row was left
        out before it; else at the window's start, so that it includes the gap before it."""
        start_ns = self.window.start_ns
        nothing_before = self.run.between is None and start_ns == self._work_start_ns
        return int(lane["start_ns"][0]) if nothing_before else start_ns

    def periods_s(self, lane: Steps) -> FloatArray:
        """Seconds of each counted row of a rank, with the gap before it and without cuts."""
        return self.window.periods_s(lane, self.first_ns(lane))

    @property
    def is_whole_run(self) -> bool:
        """True if the window is the whole run of a training."""
        return self.settings.window == WHOLE_RUN and self.trains

    @property
    def _is_unbroken(self) -> bool:
        return self.settings.window == UNBROKEN

    @property
    def window_kind(self) -> str:
        """The kind of the window: training, whole, "steps A:B", requests."""
        if not self.trains:
            return REQUESTS if self.has_work else WATCHED
        if self.settings.steps_range is not None:
            return f"steps {self.settings.window}"
        return self.settings.window or TRAINING

    @cached_property
    def window(self) -> TrainingWindow:
        """From the end of the last warm-up step to the end of the last counted one, without cuts.

        Without a warm-up it begins with the first step. If only a part of the run was chosen, it
        begins with that part, so that parts add up to the run.
        """
        if self.offered is not None:
            requests = self.offered.window
            return TrainingWindow.single(REQUESTS, requests.start_ns, requests.end_ns)
        start_ns, end_ns = self._counted.start_ns, self.counted.highest("end_ns")
        part = self.run.between
        if part is not None and part.start_ns > 0:
            start_ns = part.start_ns
        if self.is_whole_run:
            return TrainingWindow.single(WHOLE_RUN, start_ns, self._whole_end_ns(end_ns))
        if not self.trains:
            start_ns = self.counted.lowest("start_ns") if part is None else start_ns
            return TrainingWindow.single(REQUESTS, start_ns, end_ns)
        if self._is_unbroken:
            return TrainingWindow.single(UNBROKEN, start_ns, end_ns)
        return training_window(
            self.window_kind,
            Window(start_ns, end_ns),
            self.all_steps,
            printed=self.from_output,
            on_gpu=bool(self.devices("gpu")) or self.is_imported,
        )

    @cached_property
    def offered(self) -> Offered | None:
        """The requests of `erg load` after its warm-up, failed ones too; None in other runs."""
        if self.trains or not self.marked(LOAD_MARK):
            return None
        ends = [mark.t_ns for mark in self.run.marks if mark.name == "warmup_end"]
        since_ns = ends[-1] if ends and self._heed_marks else None
        if since_ns is None and self.has_work:
            first_ns = self.counted.lowest("start_ns")
            since_ns = first_ns if first_ns > self.work.lowest("start_ns") else None
        return offered(self.run, since_ns, self._sampled_until_ns)

    @cached_property
    def whole_run(self) -> Evidence:
        """The same run from its start to its end, with all its training steps."""
        if self.is_whole_run:
            return self
        self.work  # noqa: B018  or the reason why there are no steps
        if not self.trains:
            raise NotMeasurable("no training steps: this run only generates")
        return self.over(WHOLE_RUN)

    def over(self, window: str) -> Evidence:
        """The same run seen through another window. Data already read is shared."""
        beside = copy.copy(self)
        for name in _OF_THE_WINDOW:
            beside.__dict__.pop(name, None)
        beside.settings = replace(self.settings, window=window)
        beside.results = {}
        return beside

    def window_facts(self) -> dict[str, Any]:
        """The window for JSON: its kind, the warm-up rule, what was cut."""
        try:
            span = self.span
        except NotMeasurable as error:
            return {"kind": self.window_kind, "why_absent": str(error)}
        facts: dict[str, Any] = {"kind": span.kind, "seconds": span.duration_s}
        if span.kind in (WATCHED, REQUESTS):
            return facts
        steps, rule = self.warmup()
        return facts | {
            "warmup_steps": steps,
            "warmup_rule": rule,
            "cuts": [asdict(cut) for cut in span.cuts],
            "uncertain_s": span.uncertain_s,
            "is_provisional": self.is_provisional,
            "whole_run_from": self.started_by,
        }

    @cached_property
    def _whole_start_ns(self) -> int:
        if self.is_imported:
            raise NotMeasurable("a log does not say when its program started: no whole run")
        if self.run.between is not None:
            raise NotMeasurable("only a part of the run was chosen, so there is no whole run")
        if self.run.beside:
            raise NotMeasurable(
                "several trainings in this run: the run's start is not this training's"
            )
        return self.watched.start_ns

    @property
    def started_by(self) -> str:
        """What started the run: "command" (`erg record`) or "meter" (a Meter in the program)."""
        sources = {str(writer.header.get("source")) for writer in self.run.writers}
        return COMMAND if "recorder" in sources else METER

    def _whole_end_ns(self, last_step_ns: int) -> int:
        """The run's end; if it was cut off or is running, the time of the last device sample."""
        sampled_ns = self._sampled_until_ns
        if sampled_ns is None:
            return self.watched.end_ns
        return max(last_step_ns, min(sampled_ns, self.watched.end_ns))

    @property
    def is_provisional(self) -> bool:
        """True if later steps of a running run may change which steps count as warm-up."""
        if not self.trains or self.run.status != RUNNING or self.is_whole_run:
            return False
        is_by_rule = (
            not self._is_unbroken
            and self._warmup_mark is None
            and all(way in (None, "auto") for way in self.settings.warmups)
        )
        made = float(np.nan_to_num(self.work.longest["steps"], nan=1.0).sum())
        return is_by_rule and self.settings.steps_range is None and made < LOOKED_AT_STEPS

    @cached_property
    def span(self) -> TrainingWindow:
        """The window; without a window of steps, the time from the first record to the last."""
        has_steps = self.has_work and not self._why_single_step
        if has_steps or (self.offered and self.offered.settled):
            return self.window
        return TrainingWindow.single(WATCHED, self.watched.start_ns, self.watched.end_ns)

    @cached_property
    def has_work(self) -> bool:
        """True if the run has training steps, or requests of an inference run."""
        return or_none(lambda: self.work) is not None

    @property
    def no_work(self) -> str:
        """The reason why there are no steps or requests. Valid only if `has_work` is False."""
        if self.several:
            return self.several
        if self.marked(LOAD_MARK):
            return "no request was answered"
        if not len(self.all_steps):
            return "no steps were seen"
        others = [phase for phase in PHASES if len(self.all_steps.of_phase(phase))]
        return f"no training steps, only {', '.join(others)}"

    @cached_property
    def _why_single_step(self) -> str:
        """Why a training of one step has no window; "" for all other runs."""
        try:
            if self.has_work and self.trains and not self.is_whole_run:
                self._counted  # noqa: B018
        except NotMeasurable as error:
            return str(error) if isinstance(error, SingleStep) else ""
        return ""

    @cached_property
    def _warmup_mark(self) -> Mark | None:
        return ending(self.run.marks, self.work, self.settings) if self._heed_marks else None

    @cached_property
    def _sampled_until_ns(self) -> int | None:
        """The time up to which energy is known in a run that was cut off or is running; else None.

        Steps are written more often than device samples. Steps after the last sample are left out
        of every metric, so that all metrics have the same window.
        """
        if self.run.status not in (CUT_OFF, RUNNING) or not self.devices("gpu", "cpu"):
            return None
        columns = ("power_w", "energy_j")
        ends = [int(series.t_ns[-1]) for c in columns for series in self.series(c).values()]
        return max(ends, default=None)

    @cached_property
    def watched(self) -> Window:
        """The time from the run's first record to its last, or to the end of its command.

        The recorder may go on counting FLOPs after that.
        """
        start_ns = self.run.start_ns
        seen_ns = [
            int(series.t_ns[-1])
            for number, writer in enumerate(self.run.writers)
            if not writer.closed  # a closed writer's last mark is its end
            for series in self.run.said_by(number, "cpu_s")["cpu_s"].values()
        ]
        marks = [mark for mark in self.run.marks if mark.name == "ended"]
        if not marks or self.started_by != COMMAND:
            marks = self.run.marks
        end_ns = max([*seen_ns, *(mark.t_ns for mark in marks)], default=start_ns)
        if len(self.all_steps):
            start_ns = min(start_ns, self.all_steps.lowest("start_ns"))
            end_ns = max(end_ns, self.all_steps.highest("end_ns"))
        if self.is_imported and not len(self.all_steps) and not self.run.devices:
            raise NotMeasurable(_NO_TIMES)
        if end_ns <= start_ns:
            if self.run.status == RUNNING:
                raise NotMeasurable("the run has just started: nothing was written yet")
            raise NotMeasurable("the run ended before its first records were written")
        return Window(start_ns, end_ns)

    @cached_property
    def window_note(self) -> str:
        """Which part of the run the metrics cover, as text."""
        if self.offered and self.offered.settled:
            return self.offered.note
        if self.span.kind == WATCHED:
            why = self._why_single_step or self.no_work
            return f"over the whole run, {duration(self.span.duration_s)}: {why}"
        ranks = len(self.counted.lanes)
        whose = f" of {ranks} ranks" if ranks > 1 else ""
        took = duration(self.window.duration_s)
        if self.is_whole_run:
            made = self._of_one(self.counted)
            return f"over the whole run, {made}{whose} in {took}, since {_SINCE[self.started_by]}"
        start_ns, end_ns = self.window.start_ns, self.window.end_ns
        before = self.work.where_each(lambda lane: lane.middle_ns < start_ns)
        after = self.work.where_each(lambda lane: lane["end_ns"] > end_ns)
        left_out = f", after {self._of_one(before)} of warm-up" if len(before) else ""
        if self.settings.steps_range is not None:
            left_out = f", steps {self.settings.window} of the run"
        elif len(after):
            left_out += f", the last {self._of_one(after)} not yet sampled"
        if self.is_provisional:
            left_out += ", provisional"
        return (
            f"over {self._of_one(self.counted)}{whose} in {took}{left_out}"
            f"{cuts_text(self.window.cuts)}"
        )

    @property
    def window_or_reason(self) -> str:
        """Which part of the run the metrics cover, or why there is none, as text."""
        try:
            return self.window_note
        except NotMeasurable as error:
            return str(error)

    def _of_one(self, rows: Steps) -> str:
        """The number of rows as text; training steps are counted on one rank only."""
        rows = rows.longest if self.trains else rows
        return _in_words(rows, "printed line" if self.from_output else "row")

    @property
    def steps_basis(self) -> Basis:
        """The basis of the steps: measured by a Meter, else reported or derived."""
        if not self.from_output:
            return "measured"
        is_printed = self._times_are_printed or self._step_times_are_printed
        return "reported" if is_printed else "derived"

    @property
    def clock_basis(self) -> Basis:
        """The basis of times: measured, or in an imported log reported or derived."""
        if not self.is_imported:
            return "measured"
        return "reported" if self._times_are_printed else "derived"

    @property
    def is_imported(self) -> bool:
        """True if the run was imported from a log."""
        return "imported" in self.run.header

    @cached_property
    def _times_are_printed(self) -> bool:
        """True if a log's times are sums of the step times that the program printed."""
        return self.is_imported and any(_SUMMED in detail for detail in self.marked("assumed"))

    @cached_property
    def _step_times_are_printed(self) -> bool:
        """True if output was buffered, and step times were taken from the text of the lines."""
        return any(_STEP_TIMES_GIVEN in detail for detail in self.marked("output_buffered"))

    def warmup(self) -> tuple[float, str]:
        """The number of warm-up steps of a rank that were left out, and the rule that chose it."""
        lane = self.work.longest
        before = np.zeros(len(lane), dtype=bool)
        if not self.is_whole_run:
            before = np.asarray(lane.middle_ns < self.window.start_ns)
        return float(lane.step_counts[before].sum()), self._counted.rule

    @property
    def window_remarks(self) -> tuple[str, ...]:
        """Remarks about the window: slow steps, or evaluation and the like, that it includes."""
        return (*self._counted.remarks, *self.window.remarks)

    @cached_property
    def timed(self) -> Timed:
        """The counted rows in the order in which they ended, for intervals of rates."""
        return Timed(self.counted, self.window)

    def marked(self, name: str) -> list[str]:
        """The details of all marks with this name, in order."""
        return [mark.detail for mark in self.run.marks if mark.name == name]

    # -- devices ------------------------------------------------------------------------------

    def devices(self, *kinds: str) -> list[Device]:
        """The sampled devices of these kinds, without GPUs that the run did not use."""
        return [device for device in self._devices if device.kind in kinds]

    @cached_property
    def _devices(self) -> list[Device]:
        unused = {gpu.id for gpu in self.gpus("unused")}
        return [device for id_, device in self.run.devices.items() if id_ not in unused]

    @cached_property
    def gpu_use(self) -> dict[str, GpuUse]:
        """For each GPU id, whether the run used that GPU."""
        return gpu_use(self.run, self.settings.devices)

    def gpus(self, state: str) -> list[Device]:
        """Return the GPUs whose use is `state`: "used", "unused" or "unknown"."""
        return [self.run.devices[id_] for id_, use in self.gpu_use.items() if use.state == state]

    def series(self, column: str) -> Mapping[str, Series]:
        """A column of the samples, by device; a device's values are loaded on access."""
        return Column(self._columns, column)

    @cached_property
    def has_company(self) -> bool:
        """True if another training of the same run had steps within this training's window."""
        rows = Steps(replace(self.run, writers=list(self.run.beside), beside=()).steps())
        span = self.span
        return bool(((rows["end_ns"] > span.start_ns) & (rows["start_ns"] < span.end_ns)).any())

    def lost(self, device: Device) -> list[str]:
        """The marks written when a device could no longer be read."""
        names = (f"{device.id}: ", f"{device.id} ")
        return [detail for detail in self.marked("device_lost") if detail.startswith(names)]

    def why_no_device(self, what: str, *probes: str) -> str:
        """Return why no device of a kind was sampled: its probes' reasons and failures.

        `what`: the kind, for the message; `probes`: the probes that could have sampled it.
        """
        if self.is_imported:
            return f"no {what} in the log" if self.run.devices else _NO_READINGS
        reasons = {name: why for name, why in self.run.unavailable.items() if name in probes}
        # Leave out that hardware of another vendor is absent: no reader looks for that.
        near = {name: why for name, why in reasons.items() if not _ELSEWHERE.match(why)}
        causes = [f"{name}: {why}" for name, why in (near or reasons).items()]
        causes += [why for why in self.marked("probe_failed") if why.startswith(probes)]
        own = [device for device in self.run.devices.values() if device.probe in probes]
        causes += [detail for device in own for detail in self.lost(device)]
        unused = self.gpus("unused")
        if unused and "nvml" in probes:
            causes.append(f"{gpu_names(unused)} not used by this run")
        return f"no {what}" + (f" ({'; '.join(causes)})" if causes else " was sampled in this run")

    # -- inside -------------------------------------------------------------------------------

    def _why_no_steps(self) -> str:
        unrecognised = self.marked("output_unrecognised")
        if len(self.all_steps) or self.marked(LOAD_MARK):
            return self.no_work
        if unrecognised:
            return unrecognised[-1]
        return "no steps were recorded (use `with meter.step(...)`, or print step=.. tokens=..)"


def _in_words(rows: Steps, what: str) -> str:
    """The number of steps as text, and of rows (named `what`) if a row is not one step."""
    lines = number_of(len(rows), what)
    if np.isnan(rows["steps"]).any():
        return lines
    steps = int(rows["steps"].sum())
    if rows.is_of_phase(*_INFERENCE).all():
        return number_of(int(rows.is_of_phase("prefill").sum()) or len(rows), "answer")
    return number_of(steps, "step") + (f" ({lines})" if steps != len(rows) else "")
