"""Running totals of one writer of a run, at a cost that does not grow with the run.

A mean over the whole run that is printed every few steps can't reread the run each time. So sums
of joules, seconds, steps, tokens and byte-seconds are stored.

Energy up to now is known better a few seconds later, when the counter has been read again. So only
intervals that ended 10 s ago or earlier are added to the stored sums; the newest interval is
recomputed at each call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.tokens import known_counts
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import mean, sampled
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.evidence.window import TRAINING, TrainingWindow
from ergmeter.metrics.live.recent_window import FOREVER_NS, WITH_WARMUP
from ergmeter.metrics.summarize import settings_of
from ergmeter.records import Device, Missing, Window, or_missing
from ergmeter.runlog.reader import Run
from ergmeter.units import NS_PER_S

Amount: TypeAlias = "float | Missing"

# Energy up to an instant is final after this time. NVML's counters are read every 4 s at the
# slowest (H200), and a reading on each side of the instant is needed.
SETTLED_S = 10.0
_SETTLED_NS = round(SETTLED_S * NS_PER_S)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the time from the first step's start to the last step's end."""

    start_ns: int
    end_ns: int
    steps: int
    in_steps_s: float
    tokens: Amount
    samples: Amount
    energy_j: Amount
    memory_byte_s: Amount  # memory in use on a device, mean over the devices, times time
    busy_s: Amount

    @property
    def window_s(self) -> float:
        """Seconds from the first step's start to the last one's end."""
        return (self.end_ns - self.start_ns) / NS_PER_S

    def __add__(self, later: Totals) -> Totals:
        """Add the totals of the next, adjacent interval."""
        amounts: dict[str, Any] = {
            part.name: _sum(getattr(self, part.name), getattr(later, part.name))
            for part in fields(self)
            if part.name not in ("start_ns", "end_ns")
        }
        return replace(self, end_ns=later.end_ns, **amounts)


class RunningTotals:
    """Adds up one writer's part of a run while it is written."""

    def __init__(self, writer: str, *, since_ns: int = 0) -> None:
        """`writer`: the writer's id; `since_ns`: when totals begin, on the run's clock."""
        self._writer = writer
        self._since_ns = since_ns
        self._settled: Totals | None = None

    def totals(self, run: Run, *, gpus: Collection[str] = ()) -> Totals:
        """Return the totals up to the newest step. NotMeasurable if there is no step yet.

        `gpus`: the ids of this writer's GPUs; if empty, all GPUs of the run.
        """
        newest = self._stretch(run, FOREVER_NS, gpus)
        try:
            ends = newest.counted["end_ns"]
        except NotMeasurable:
            if self._settled is None:
                raise
            return self._settled
        if float(ends.max() - ends.min()) > 2 * _SETTLED_NS:
            until_ns = int(ends[ends <= ends.max() - _SETTLED_NS].max())
            self._settled = self._plus(_totals(self._stretch(run, until_ns, gpus)))
            self._since_ns = until_ns
            newest = self._stretch(run, FOREVER_NS, gpus)
        return self._plus(_totals(newest))

    def _plus(self, later: Totals) -> Totals:
        return later if self._settled is None else self._settled + later

    def _stretch(self, run: Run, until_ns: int, gpus: Collection[str]) -> _Stretch:
        ids = [writer.header["writer"] for writer in run.writers]
        if self._writer not in ids:
            raise NotMeasurable(f"the run {run.path} has no writer {self._writer}")
        return _Stretch(run, ids.index(self._writer), self._since_ns, until_ns, gpus)


class _Stretch(Evidence):
    """The steps of one writer that ended in a window, with samples some seconds around it."""

    def __init__(
        self, run: Run, writer: int, since_ns: int, until_ns: int, gpus: Collection[str]
    ) -> None:
        wide = Window(max(0, since_ns - _SETTLED_NS), until_ns + _SETTLED_NS)
        super().__init__(run.part(wide), settings_of(run, WITH_WARMUP), heed_marks=False)
        self._writer = writer
        self._since_ns = since_ns
        self._until_ns = until_ns
        self._gpus = gpus

    @cached_property
    def all_steps(self) -> Steps:
        rows = Steps(self.run.steps())
        ends = rows["end_ns"]
        own = rows["writer"] == self._writer
        return rows.where(own & (ends > self._since_ns) & (ends <= self._until_ns))

    @cached_property
    def counted(self) -> Steps:
        """All steps, except the last few for which device samples have not been written yet.

        If sampling has stopped, these steps count too, and metrics of devices are absent.
        """
        rows = self.work
        sampled_ns = self._sampled_until_ns if self._until_ns == FOREVER_NS else None
        if sampled_ns is None or rows["end_ns"].max() > sampled_ns + _SETTLED_NS:
            return rows
        reached = rows["end_ns"] <= sampled_ns
        return rows.where(reached) if reached.any() else rows

    @cached_property
    def window(self) -> TrainingWindow:
        """From the end of the previous stretch to the last step's end, without cuts."""
        start_ns = self._since_ns or int(self.counted["start_ns"].min())
        return TrainingWindow.single(TRAINING, start_ns, int(self.counted["end_ns"].max()))

    def devices(self, *kinds: str) -> list[Device]:
        """The devices of these kinds; of GPUs only this writer's, if known."""
        all_devices = super().devices(*kinds)
        own = [device for device in all_devices if device.kind != "gpu" or device.id in self._gpus]
        return own if any(device.kind == "gpu" for device in own) else all_devices


def _totals(stretch: _Stretch) -> Totals:
    rows = stretch.counted
    return Totals(
        stretch.window.start_ns,
        stretch.window.end_ns,
        int(np.nansum(rows["steps"])),
        float(rows.duration_s.sum()),
        or_missing(_counts, rows, "tokens_real", "tokens_computed"),
        or_missing(_counts, rows, "samples"),
        or_missing(lambda: run_j(stretch).value),
        or_missing(_over_time, stretch, "memory_bytes"),
        or_missing(_over_time, stretch, "busy_frac"),
    )


def _counts(rows: Steps, *columns: str) -> float:
    """The sum of the first of these columns that the steps have."""
    for column in columns:
        values = known_counts(rows, column)
        if values is not None:
            return float(values.sum())
    raise NotMeasurable(f"the steps have no count of {columns[-1].partition('_')[0]}")


def _over_time(stretch: _Stretch, column: str) -> float:
    means = [mean(stretch, column, device) for device in sampled(stretch, "gpu")]
    return sum(means) / len(means) * stretch.window.duration_s


def _sum(earlier: Amount, later: Amount) -> Amount:
    """The sum of two amounts; Missing if either is."""
    if isinstance(earlier, Missing):
        return earlier
    return later if isinstance(later, Missing) else earlier + later
