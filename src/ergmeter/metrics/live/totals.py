"""The totals of a run so far, one writer's, at a price that does not grow with the run.

Who prints a mean over the whole run every few steps, for days, can't read the whole run each time;
and a mean over the last thousand readings, which is the usual way out, is another figure under the
same name. What adds up is kept as sums: joules, seconds, steps, tokens, byte-seconds.

The trap is the newest edge. What a device drew up to this moment is known better a few seconds
later, when the counter has been read again; a sum over windows that each end on such a guess keeps
every one of the guesses. So only what lies some seconds back is added for good, and the rest is
looked at again the next time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.tokens import known_counts
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.gauges import mean, sampled
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.evidence.window import TRAINING, TrainingWindow
from ergmeter.metrics.summarize import settings_of
from ergmeter.records import Missing, Window
from ergmeter.runlog.segments import Series
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ergmeter.records import Device
    from ergmeter.runlog.reader import Run

Amount: TypeAlias = "float | Missing"

# How far back an edge must lie to be final. NVML's counters are read every few seconds at the
# slowest (4 s on an H200), and a reading on each side says what the counter stood at in between.
SETTLED_S = 10.0
_SETTLED_NS = round(SETTLED_S * NS_PER_S)
_FOREVER_NS = 2**62
_ALL = Settings(warmup_steps=0)
_COLUMNS = ("power_w", "energy_j", "memory_bytes", "busy_frac")


@dataclass(frozen=True, slots=True)
class Totals:
    """What adds up, from the start of the first step to the end of the last."""

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
        """From the first step's start to the last one's end."""
        return (self.end_ns - self.start_ns) / NS_PER_S

    def __add__(self, later: Totals) -> Totals:
        """Both, where the later begins at the end of this one."""
        return Totals(
            self.start_ns,
            later.end_ns,
            self.steps + later.steps,
            self.in_steps_s + later.in_steps_s,
            *(
                _sum(getattr(self, name), getattr(later, name))
                for name in ("tokens", "samples", "energy_j", "memory_byte_s", "busy_s")
            ),
        )


class Running:
    """Adds up one writer's share of a run while it is written."""

    def __init__(self, writer: str, *, since_ns: int = 0) -> None:
        """`writer` is its id; `since_ns`: only what comes after, on the clock of the run."""
        self._writer = writer
        self._since_ns = since_ns
        self._settled: Totals | None = None

    def totals(self, run: Run, *, gpus: Collection[str] = ()) -> Totals:
        """Everything up to the newest step. NotMeasurable where there is none yet.

        `gpus`: the ids of this writer's own; left out, all that the run is known to use.
        """
        newest = self._stretch(run, _FOREVER_NS, gpus)
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
            newest = self._stretch(run, _FOREVER_NS, gpus)
        return self._plus(_totals(newest))

    def _plus(self, later: Totals) -> Totals:
        return later if self._settled is None else self._settled + later

    def _stretch(self, run: Run, until_ns: int, gpus: Collection[str]) -> _Stretch:
        ids = [writer.header["writer"] for writer in run.writers]
        if self._writer not in ids:
            raise NotMeasurable(f"the run {run.path} has no writer {self._writer}")
        return _Stretch(run, ids.index(self._writer), self._since_ns, until_ns, gpus)


class _Stretch(Evidence):
    """The steps of one writer that ended in a window, and the samples some seconds around it."""

    def __init__(
        self, run: Run, writer: int, since_ns: int, until_ns: int, gpus: Collection[str]
    ) -> None:
        wide = Window(max(0, since_ns - _SETTLED_NS), until_ns + _SETTLED_NS)
        super().__init__(run.part(wide), settings_of(run, _ALL), heed_marks=False)
        self._writer = writer
        self._since_ns = since_ns
        self._until_ns = until_ns
        self._gpus = gpus
        self._read: dict[str, dict[str, Series]] = {}

    @cached_property
    def all_steps(self) -> Steps:
        rows = Steps(self.run.steps())
        ends = rows["end_ns"]
        own = rows["writer"] == self._writer
        return rows.where(own & (ends > self._since_ns) & (ends <= self._until_ns))

    @cached_property
    def counted(self) -> Steps:
        """All of them, but for the last few of a run that no sample has reached yet.

        A probe that is dead reaches no step any more: then they count, and its figures are absent.
        """
        rows = self.work
        sampled_ns = self._sampled_until_ns if self._until_ns == _FOREVER_NS else None
        if sampled_ns is None or rows["end_ns"].max() > sampled_ns + _SETTLED_NS:
            return rows
        reached = rows["end_ns"] <= sampled_ns
        return rows.where(reached) if reached.any() else rows

    @cached_property
    def window(self) -> TrainingWindow:
        """From where the last stretch ended, so that stretches add up. Nothing is cut."""
        start_ns = self._since_ns or int(self.counted["start_ns"].min())
        return TrainingWindow.single(TRAINING, start_ns, int(self.counted["end_ns"].max()))

    def series(self, column: str) -> Mapping[str, Series]:
        """All columns that totals need in one pass: opening a file that is being written costs as
        much as reading it."""
        if column not in _COLUMNS:
            return super().series(column)
        if not self._read:
            self._read = _several(self.run)
        return self._read[column]

    def devices(self, *kinds: str) -> list[Device]:
        """Of the GPUs, this writer's own where they are known."""
        found = super().devices(*kinds)
        own = [one for one in found if one.kind != "gpu" or one.id in self._gpus]
        return own if any(one.kind == "gpu" for one in own) else found


def _several(run: Run) -> dict[str, dict[str, Series]]:
    """The columns by device, as `Run.series` gives one of them."""
    parts: dict[str, dict[str, list[Series]]] = {column: {} for column in _COLUMNS}
    for writer in run.writers:
        for segment in run._segments(writer, "samples"):
            for column in parts.keys() & set(segment.names):
                for device, t_ns, values in segment.by_device(column):
                    part = Series(t_ns + writer.offset_ns, values)
                    parts[column].setdefault(device, []).append(part)
    return {
        column: {device: _in_order(pieces) for device, pieces in by_device.items()}
        for column, by_device in parts.items()
    }


def _in_order(pieces: list[Series]) -> Series:
    t_ns = np.concatenate([piece.t_ns for piece in pieces])
    values = np.concatenate([piece.values for piece in pieces])
    order = np.argsort(t_ns, kind="stable")
    return Series(t_ns[order], values[order])


def _totals(stretch: _Stretch) -> Totals:
    rows = stretch.counted
    return Totals(
        stretch.window.start_ns,
        stretch.window.end_ns,
        int(np.nansum(rows["steps"])),
        float(rows.duration_s.sum()),
        _amount(lambda: _counts(rows, "tokens_real", "tokens_computed")),
        _amount(lambda: _counts(rows, "samples")),
        _amount(lambda: run_j(stretch).value),
        _amount(lambda: _over_time(stretch, "memory_bytes")),
        _amount(lambda: _over_time(stretch, "busy_frac")),
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


def _amount(compute: Callable[[], float]) -> Amount:
    try:
        return compute()
    except NotMeasurable as error:
        return Missing(str(error))


def _sum(earlier: Amount, later: Amount) -> Amount:
    """What was missing once is missing from the sum."""
    for one in (earlier, later):
        if isinstance(one, Missing):
            return one
    assert isinstance(earlier, float)
    assert isinstance(later, float)
    return earlier + later
