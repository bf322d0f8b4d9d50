"""What the metrics of a run are computed from: its steps, its window, its devices.

The trap that shaped it: tokens of one span over the time of another. SFT-Play divides all tokens by
the time after the warm-up and reads 1e14 tokens/s for a run shorter than that. Here the window is
chosen once, and every figure takes its tokens, its time and its joules from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.stats import settled_after
from ergmeter.records import PHASES, Device, Window
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.records import Basis, FloatArray, TimeArray
    from ergmeter.runlog.reader import Run, Series
    from ergmeter.runlog.settings import Settings

Mask: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # a choice of rows: booleans or positions

OUTPUT = "output"  # the stream of steps that were seen in a program's output
_INFERENCE = (PHASES.index("prefill"), PHASES.index("decode"))
_TRAIN = PHASES.index("train")


@dataclass(frozen=True)
class Steps:
    """Rows of steps, in order of their start within each writer."""

    columns: dict[str, FloatArray | TimeArray]

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def __getitem__(self, name: str) -> FloatArray:
        return cast("FloatArray", self.columns[name])  # times are used as numbers too

    def where(self, mask: Mask) -> Steps:
        """The rows for which the mask holds."""
        return Steps({name: column[mask] for name, column in self.columns.items()})

    @cached_property
    def writers(self) -> list[Steps]:
        """The rows of each writer by itself: one rank each."""
        return [self.where(self["writer"] == writer) for writer in np.unique(self["writer"])]

    @cached_property
    def duration_s(self) -> FloatArray:
        """How long each row lasted."""
        return (self["end_ns"] - self["start_ns"]) / NS_PER_S

    @cached_property
    def period_s(self) -> FloatArray:
        """From each row's start to the next one's; for the last, its own length. Adds up to all."""
        starts = self["start_ns"]
        following = np.append(starts[1:], self["end_ns"][-1:])
        return (following - starts) / NS_PER_S

    @property
    def count(self) -> float:
        """Optimizer steps in all rows; NaN if a row does not say how many it covers."""
        return float(self["steps"].sum())


class Evidence:
    """A run, seen through one window. Properties raise NotMeasurable with the reason."""

    def __init__(self, run: Run, settings: Settings) -> None:
        self.run = run
        self.settings = settings
        self.drawn: dict[str, object] = {}  # what each device drew, once it is known
        self._series: dict[str, dict[str, Series]] = {}

    # -- steps --------------------------------------------------------------------------------

    @cached_property
    def all_steps(self) -> Steps:
        """Every span that was recorded. What a Meter recorded is preferred to what was printed."""
        return Steps(self.run.steps(OUTPUT)) if self.from_output else self._told

    @cached_property
    def from_output(self) -> bool:
        """Whether the steps were seen in the program's output, and not told by a Meter."""
        return len(self._told) == 0

    @cached_property
    def _told(self) -> Steps:
        return Steps(self.run.steps())

    @cached_property
    def work(self) -> Steps:
        """The spans the run is about: training steps, or prefill and decode in an inference run."""
        phase = self.all_steps["phase"]
        train = phase == _TRAIN
        mask = train if train.any() else np.isin(phase, _INFERENCE)
        if not mask.any():
            raise NotMeasurable(self._why_no_steps())
        rows = self.all_steps.where(mask)
        order = np.lexsort((rows["start_ns"], rows["writer"]))
        return rows.where(order)

    @cached_property
    def counted(self) -> Steps:
        """The spans after the warm-up."""
        kept = [rows.where(self._after_warmup(rows)) for rows in self.work.writers]
        if not any(len(rows) for rows in kept):
            raise NotMeasurable(self._why_all_warmup())
        merged = {
            name: np.concatenate([rows.columns[name] for rows in kept])
            for name in self.work.columns
        }
        return Steps(merged)

    @cached_property
    def window(self) -> Window:
        """From the start of the first counted step to the end of the last."""
        return Window(int(self.counted["start_ns"].min()), int(self.counted["end_ns"].max()))

    @cached_property
    def span(self) -> Window:
        """The window; for a run without steps all of the time that was watched."""
        try:
            return self.window
        except NotMeasurable:
            if len(self.all_steps):
                raise
            return self.watched

    @cached_property
    def watched(self) -> Window:
        """From the first hand-over to the last: the life of the run."""
        start_ns = self.run.start_ns
        seen_ns = [int(series.t_ns[-1]) for series in self.run.series("cpu_s").values()]
        end_ns = max([*seen_ns, *(mark.t_ns for mark in self.run.marks)], default=start_ns)
        if len(self.all_steps):
            start_ns = min(start_ns, int(self.all_steps["start_ns"].min()))
            end_ns = max(end_ns, int(self.all_steps["end_ns"].max()))
        if end_ns <= start_ns:
            raise NotMeasurable("the run was cut off before its first hand-over")
        return Window(start_ns, end_ns)

    @property
    def window_note(self) -> str:
        """Which part of the run a figure is over, in words."""
        if not len(self.all_steps):
            return f"over the whole run, {duration(self.span.duration_s)}: no steps were seen"
        first, counted = len(self.work) - len(self.counted), len(self.counted)
        left_out = f", {first} warm-up rows left out" if first else ""
        what = "lines" if self.from_output else "steps"
        return f"over {counted} {what} in {duration(self.window.duration_s)}{left_out}"

    @property
    def steps_basis(self) -> Basis:
        """How the steps were obtained."""
        return "derived" if self.from_output else "measured"

    def warmup(self) -> tuple[int, str]:
        """How many rows of the first writer were left out, and by which rule."""
        rows = self.work.writers[0]
        return int((~self._after_warmup(rows)).sum()), self._rule()

    # -- devices ------------------------------------------------------------------------------

    def devices(self, *kinds: str) -> list[Device]:
        """The devices of these kinds that were sampled; of the GPUs, those the program used.

        Where nothing could be seen of who used which, every GPU that was visible counts.
        """
        sampled = [device for device in self.run.devices.values() if device.kind in kinds]
        used = {mark.detail for mark in self.run.marks if mark.name == "device_used"}
        return [d for d in sampled if d.kind != "gpu" or not used or d.id in used]

    def series(self, column: str) -> dict[str, Series]:
        """A column of the samples by device. A few are kept: ten million rows are 160 MB each."""
        if column not in self._series:
            while len(self._series) >= 2:
                self._series.pop(next(iter(self._series)))
            self._series[column] = self.run.series(column)
        return self._series[column]

    def why_no_device(self, what: str, *probes: str) -> str:
        """Why nothing of a kind was sampled: what its probes said, and failures during the run."""
        said = [f"{name}: {why}" for name, why in self.run.unavailable.items() if name in probes]
        said += [m.detail for m in self.run.marks if m.name in ("probe_failed", "device_lost")]
        return f"no {what}" + (f" ({'; '.join(said)})" if said else " was sampled in this run")

    # -- inside -------------------------------------------------------------------------------

    def _rule(self) -> str:
        settings = self.settings
        if any(mark.name == "warmup_end" for mark in self.run.marks):
            return "until the mark warmup_end"
        if settings.warmup_steps is not None:
            return f"{settings.warmup_steps} steps"
        if settings.warmup_s is not None:
            return f"{settings.warmup_s:g} s"
        return (
            "until the step time settled (MSER)" if settings.warmup == "auto" else "none declared"
        )

    def _after_warmup(self, rows: Steps) -> Mask:
        marks = [mark.t_ns for mark in self.run.marks if mark.name == "warmup_end"]
        if marks:
            return np.asarray(rows["start_ns"] >= marks[-1])
        if self.settings.warmup_steps is not None:
            done = np.cumsum(np.nan_to_num(rows["steps"], nan=1.0))
            return np.asarray(done > self.settings.warmup_steps)
        if self.settings.warmup_s is not None:
            since_s = (rows["start_ns"] - rows["start_ns"][0]) / NS_PER_S
            return np.asarray(since_s >= self.settings.warmup_s)
        if self.settings.warmup == "auto":
            settled = settled_after(
                rows.duration_s / np.maximum(np.nan_to_num(rows["steps"], nan=1), 1)
            )
            first = len(rows) if settled is None else settled
            return np.arange(len(rows)) >= first
        return np.ones(len(rows), dtype=bool)

    def _why_all_warmup(self) -> str:
        rows = self.work.writers[0]
        lasted = duration((int(rows["end_ns"][-1]) - int(rows["start_ns"][0])) / NS_PER_S)
        if self.settings.warmup == "auto":
            return f"the step time never settled in {len(rows)} steps ({lasted}): no steady state"
        return (
            f"the run is shorter than its warm-up: {len(rows)} steps in {lasted},"
            f" warm-up {self._rule()}"
        )

    def _why_no_steps(self) -> str:
        assumed = [mark.detail for mark in self.run.marks if mark.name == "output_unrecognised"]
        if assumed:
            return assumed[-1]
        return "no steps were recorded (use `with meter.step(...)`, or print step=.. tokens=..)"
