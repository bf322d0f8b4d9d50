"""What the metrics of a run are computed from: its steps, its window, its devices.

The trap that shaped it: tokens of one span over the time of another. SFT-Play divides all tokens by
the time after the warm-up and reads 1e14 tokens/s for a run shorter than that. Here the window is
chosen once, and every figure takes its tokens, its time and its joules from it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.amounts import Timed
from ergmeter.metrics.clocks import aligned
from ergmeter.metrics.columns import Column, Columns
from ergmeter.metrics.steps import Steps, told
from ergmeter.metrics.warmup import after_warmup, ending, rule
from ergmeter.records import PHASES, Device, Window
from ergmeter.runlog.reader import CUT_OFF, RUNNING
from ergmeter.units import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ergmeter.records import Basis, Flops, Mark
    from ergmeter.runlog.joining import Series
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings

OUTPUT = "output"  # the stream of steps that were seen in a program's output
# How an importer says that times are sums of printed step times: as good as what was printed.
_SUMMED = "times are its step times added up"
_NO_TIMES = "a log without times has no duration"
_NO_READINGS = "a log holds no readings of energy, devices or host memory"
_ELSEWHERE = re.compile(r"no [\w ]+ here: ")
_INFERENCE = (PHASES.index("prefill"), PHASES.index("decode"))
_TRAIN = PHASES.index("train")


class Evidence:
    """A run, seen through one window. Properties raise NotMeasurable with the reason."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        *,
        heed_marks: bool = True,
        flops: Sequence[Flops] = (),
    ) -> None:
        run, self.clocks = aligned(run, settings.layout)
        self.run = run
        self.settings = settings
        self.flops = tuple(flops) or run.flops  # under each convention, the chosen one first
        self._heed_marks = (
            heed_marks  # not if the reader of the run declares a warm-up of their own
        )
        self.drawn: dict[str, object] = {}  # of the run as a whole, what was computed once
        self.answers: dict[object, object] = {}  # what was asked of each device (see `kept`)
        self._columns = Columns(run)

    # -- steps --------------------------------------------------------------------------------

    @cached_property
    def all_steps(self) -> Steps:
        """Every span that was recorded. What a Meter recorded is preferred to what was printed."""
        return told(self.run, OUTPUT) if self.from_output else self._told

    @cached_property
    def from_output(self) -> bool:
        """Whether the steps were seen in the program's output, and not told by a Meter."""
        return len(self._told) == 0

    @cached_property
    def printed(self) -> Steps:
        """The training steps that were seen in the output, also where a Meter told them."""
        rows = Steps(self.run.steps(OUTPUT))
        return rows.where(rows["phase"] == _TRAIN)

    @cached_property
    def _told(self) -> Steps:
        return told(self.run)

    @cached_property
    def work(self) -> Steps:
        """The spans the run is about: training steps, or prefill and decode in an inference run."""
        if self.several:
            raise NotMeasurable(self.several)
        phases = (_TRAIN,) if self.trains else _INFERENCE
        rows = self.all_steps.where_each(lambda lane: np.isin(lane["phase"], phases))
        if not len(rows):
            raise NotMeasurable(self._why_no_steps())
        return rows

    @property
    def several(self) -> str:
        """That there are several trainings in this run, and how to name one; "" of a single one."""
        number = len(self.run.trainings)
        if number < 2:
            return ""
        return (
            f"{number} trainings in this run, each with figures of its own: name one,"
            f" --training 1 (to {number})"
        )

    @cached_property
    def trains(self) -> bool:
        """Whether the run is a training: its rows are optimizer steps."""
        if not len(self.all_steps):
            return False
        return any((lane["phase"] == _TRAIN).any() for lane in self.all_steps.lanes)

    @cached_property
    def counted(self) -> Steps:
        """The spans after the warm-up, as far as the samples that belong to them are there."""
        rows = after_warmup(self.work, self.settings, self._warmup_mark)
        sampled_ns = self._sampled_until_ns
        if sampled_ns is None or rows.lowest("end_ns") > sampled_ns:
            return rows
        return rows.where_each(lambda lane: lane["end_ns"] <= sampled_ns)

    @cached_property
    def window(self) -> Window:
        """From the start of the first counted step to the end of the last.

        Of a part of a run from where the part begins: what lies before its first step is in it, so
        that the parts of a run add up to all of it.
        """
        start_ns = self.counted.lowest("start_ns")
        part = self.run.between
        if part is not None and part.start_ns > 0:
            start_ns = part.start_ns
        return Window(start_ns, self.counted.highest("end_ns"))

    @cached_property
    def span(self) -> Window:
        """The window; for a run without steps all of the time that was watched."""
        return self.window if self.has_work else self.watched

    @cached_property
    def has_work(self) -> bool:
        """Whether there are steps to speak of."""
        try:
            return len(self.work) > 0
        except NotMeasurable:
            return False

    @cached_property
    def _warmup_mark(self) -> Mark | None:
        return ending(self.run.marks, self.work, self.settings) if self._heed_marks else None

    @cached_property
    def _sampled_until_ns(self) -> int | None:
        """For a run that was cut off or goes on: up to when its energy is known.

        Steps are handed over more often than samples. The last few are left out of everything, so
        that all figures stay of one window.
        """
        if self.run.status not in (CUT_OFF, RUNNING) or not self.devices("gpu", "cpu"):
            return None
        columns = ("power_w", "energy_j")
        ends = [int(one.t_ns[-1]) for c in columns for one in self.series(c).values()]
        return max(ends, default=None)

    @cached_property
    def watched(self) -> Window:
        """From the first hand-over to the last: the life of the run."""
        start_ns = self.run.start_ns
        seen_ns = [
            int(series.t_ns[-1])
            for number, writer in enumerate(self.run.writers)
            if not writer.closed  # the last mark of one that was is its end
            for series in self.run.said_by(number, "cpu_s")["cpu_s"].values()
        ]
        end_ns = max([*seen_ns, *(mark.t_ns for mark in self.run.marks)], default=start_ns)
        if len(self.all_steps):
            start_ns = min(start_ns, self.all_steps.lowest("start_ns"))
            end_ns = max(end_ns, self.all_steps.highest("end_ns"))
        if self.is_imported and not len(self.all_steps) and not self.run.devices:
            raise NotMeasurable(_NO_TIMES)
        if end_ns <= start_ns:
            raise NotMeasurable("the run was cut off before its first hand-over")
        return Window(start_ns, end_ns)

    @cached_property
    def window_note(self) -> str:
        """Which part of the run a figure is over, in words."""
        if not self.has_work:
            why = self.several or "no steps were seen"
            return f"over the whole run, {duration(self.span.duration_s)}: {why}"
        start_ns, end_ns = self.window.start_ns, self.window.end_ns
        before = self.work.where_each(lambda lane: lane["start_ns"] < start_ns)
        after = self.work.where_each(lambda lane: lane["end_ns"] > end_ns)
        left_out = f", after {self._of_one(before)} of warm-up" if len(before) else ""
        left_out += f", the last {self._of_one(after)} not yet sampled" if len(after) else ""
        ranks = len(self.counted.lanes)
        whose = f" of {ranks} ranks" if ranks > 1 else ""
        took = duration(self.window.duration_s)
        return f"over {self._of_one(self.counted)}{whose} in {took}{left_out}"

    def _of_one(self, rows: Steps) -> str:
        """How many there are; training steps, which all ranks make together, of the busiest one."""
        return _in_words(rows.longest if self.trains else rows)

    @property
    def steps_basis(self) -> Basis:
        """How the steps were obtained."""
        if not self.from_output:
            return "measured"
        return "reported" if self._times_are_printed else "derived"

    @property
    def clock_basis(self) -> Basis:
        """How times were obtained: of a log that was imported, from what stands in it."""
        if not self.is_imported:
            return "measured"
        return "reported" if self._times_are_printed else "derived"

    @property
    def is_imported(self) -> bool:
        """Whether the run was made of a log."""
        return "imported" in self.run.header

    @cached_property
    def _times_are_printed(self) -> bool:
        """Whether a log's clock is the step times that the program printed."""
        marks = (mark.detail for mark in self.run.marks if mark.name == "assumed")
        return self.is_imported and any(_SUMMED in detail for detail in marks)

    def warmup(self) -> tuple[float, str]:
        """How many steps of a rank were left out at the start, and by which rule."""
        lane = self.work.longest
        before = lane["start_ns"] < self.window.start_ns
        steps = float(np.nan_to_num(lane["steps"], nan=1.0)[before].sum())
        return steps, rule(self.settings, self._warmup_mark)

    @cached_property
    def timed(self) -> Timed:
        """The counted rows in the order in which they ended, for intervals of rates."""
        return Timed(self.counted, self.window.start_ns)

    # -- devices ------------------------------------------------------------------------------

    def devices(self, *kinds: str) -> list[Device]:
        """The devices of these kinds that were sampled; of the GPUs, those the program used.

        Where nothing could be seen of who used which, every GPU that was visible counts.
        """
        return [device for device in self._devices if device.kind in kinds]

    @cached_property
    def _devices(self) -> list[Device]:
        # Of one node several may have read, one after the other; each has seen what was used then.
        used = {mark.detail for mark in self.run.marks if mark.name == "device_used"}
        counted: dict[str, None] = {}
        for writer in self.run.writers:
            is_known = any(device.id in used for device in writer.devices)
            for device in writer.devices:
                if device.kind != "gpu" or not is_known or device.id in used:
                    counted[device.id] = None
        return [self.run.devices[id_] for id_ in counted]

    def series(self, column: str) -> Mapping[str, Series]:
        """A column of the samples by device, loaded as devices are asked for."""
        return Column(self._columns, column)

    @cached_property
    def shared_devices(self) -> list[Device]:
        """Those on which other programs were seen to compute."""
        marks = [mark for mark in self.run.marks if mark.name == "device_shared"]
        ids = {mark.detail.partition(" ")[0] for mark in marks}
        return [device for device in self.run.devices.values() if device.id in ids]

    @cached_property
    def has_company(self) -> bool:
        """Whether another training of the same run was at work in the window of this one."""
        beside = replace(self.run, writers=list(self.run.beside), beside=())
        rows = Steps(beside.steps())
        span = self.span
        return bool(((rows["end_ns"] > span.start_ns) & (rows["start_ns"] < span.end_ns)).any())

    def why_no_device(self, what: str, *probes: str) -> str:
        """Why nothing of a kind was sampled: what its probes said, and failures during the run."""
        if self.is_imported:
            return f"no {what} in the log" if self.run.devices else _NO_READINGS
        reasons = {name: why for name, why in self.run.unavailable.items() if name in probes}
        # That another maker's hardware is not there is no reason that anybody looks for.
        near = {name: why for name, why in reasons.items() if not _ELSEWHERE.match(why)}
        said = [f"{name}: {why}" for name, why in (near or reasons).items()]
        said += [
            mark.detail
            for mark in self.run.marks
            if (mark.name == "probe_failed" and mark.detail.startswith(probes))
            or (mark.name == "device_lost" and "nvml" in probes)
        ]
        return f"no {what}" + (f" ({'; '.join(said)})" if said else " was sampled in this run")

    # -- inside -------------------------------------------------------------------------------

    def _why_no_steps(self) -> str:
        assumed = [mark.detail for mark in self.run.marks if mark.name == "output_unrecognised"]
        if assumed:
            return assumed[-1]
        return "no steps were recorded (use `with meter.step(...)`, or print step=.. tokens=..)"


def _in_words(rows: Steps) -> str:
    """How many steps; of a log also its lines, where a line does not stand for one step."""
    lines = _count(len(rows), "printed line")
    if np.isnan(rows["steps"]).any():
        return lines
    steps = int(rows["steps"].sum())
    if np.isin(rows["phase"], _INFERENCE).all():
        answers = int((rows["phase"] == _INFERENCE[0]).sum()) or len(rows)
        return _count(answers, "answer")
    return _count(steps, "step") + (f" ({lines})" if steps != len(rows) else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
