"""The step lines of a log as columns: how are they gathered, and what did each line add?

The trap: a running total, a count of one step and a count of a line all look alike in a column.
Counts are kept as printed until the log's end, and only then turned into what was done since the
row before, by the rules that the live importers use.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.importers.counts import COUNTS, HELD_LINES, decided, explained
from ergmeter.importers.steplines import Told
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.records import FloatArray

_NAN = float("nan")
# A pause is longer than this, and than so many times the usual time between rows, as in `spans`.
_GAP_S, _GAP_PERIODS, _RECENT = 1.0, 5, 16
PLAIN = ("step", "epoch", "loss", "learning_rate", "grad_norm", "step_time_s", "t_s")


class Columns:
    """The rows of one run in a log."""

    def __init__(self, *, began: str = "") -> None:
        self.began = began  # why it is another run than the one before
        self.clock: str | None = None
        self.notes: list[str] = []
        self._rows = 0
        self._columns = {name: array("d") for name in PLAIN}
        self._counts: dict[str, array[float]] = {}
        self._rates: dict[str, array[float]] = {}
        self._said: set[str] = set()  # units that the last line gave

    def __len__(self) -> int:
        return self._rows

    def add(self, told: Told) -> None:
        """A step line: a further row, or more about the last one."""
        seen = told.seen
        is_more = seen.number is not None and self._rows and self.last("step") == seen.number
        if not is_more:
            self._rows += 1
            self._said = set()
        self.clock = self.clock or told.clock
        values = (
            seen.number, told.epoch, seen.loss, seen.learning_rate, seen.grad_norm, seen.own_s,
            None if told.t_ns is None else told.t_ns / NS_PER_S,
        )  # fmt: skip
        for name, value in zip(PLAIN, values, strict=True):
            self._put(self._columns[name], value)
        for name, number in told.counts.items():
            self._put(self._counts.setdefault(name, array("d")), number)
        for pair in told.found:
            if pair.means.kind == "rate" and "peak" not in pair.printed:
                self._rate(pair.means.unit, pair.value)

    def last(self, name: str) -> float:
        """The last row's value, NaN if it has none."""
        column = self._columns[name]
        return column[-1] if column and len(column) == self._rows else _NAN

    def paused(self, t_ns: int | None) -> bool:
        """Whether more time went by than goes by between rows; so too where that is not known."""
        recent = self._columns["t_s"][-_RECENT:]
        if t_ns is None or len(recent) < 2 or recent[-1] != recent[-1]:
            return True
        usual_s = float(np.nanmedian(np.diff(recent)))
        return not 0 <= t_ns / NS_PER_S - recent[-1] <= max(_GAP_S, _GAP_PERIODS * usual_s)

    def plain(self) -> dict[str, FloatArray]:
        """The columns that need no reading."""
        return {name: self._whole(column) for name, column in self._columns.items()}

    def rates(self) -> dict[str, FloatArray]:
        """What the program said of its own pace, by unit."""
        return {unit: self._whole(column) for unit, column in self._rates.items()}

    def done(self, *fields: str) -> FloatArray:
        """What was done of the first of these fields of Step that was printed, since the row
        before; NaN where that is not known."""
        for field in fields:
            found = [self._since(name) for name in self._counts if COUNTS[name][0] == field]
            if found:
                return max(found, key=lambda values: int(np.isfinite(values).sum()))
        return np.full(self._rows, _NAN)

    def _since(self, name: str) -> FloatArray:
        values, steps = self._whole(self._counts[name]), self._whole(self._columns["step"])
        mode = COUNTS[name][1] or self._decided(name, values, steps)
        if mode == "total":
            grown = np.diff(values, prepend=_NAN)
            return np.where(grown > 0, grown, _NAN)
        if mode == "line":
            return values
        covered = np.nan_to_num(np.diff(steps, prepend=_NAN), nan=1.0)
        if covered.max(initial=1) > 1:
            self.notes.append(f"{name} taken times the steps a line covers")
        return values * np.where(covered > 0, covered, 1.0)

    def _decided(self, name: str, values: FloatArray, steps: FloatArray) -> str:
        known = np.isfinite(values)
        firsts = [int(value) for value in islice(values[known], HELD_LINES)]
        numbers = [_whole(step) for step in islice(steps[known], HELD_LINES)]
        mode = decided(numbers, firsts, final=True) or "step"
        self.notes.append(explained(name, mode, firsts))
        return mode

    def _rate(self, unit: str, value: float) -> None:
        if unit not in self._said:  # of two names for one thing, the first
            self._said.add(unit)
            self._put(self._rates.setdefault(unit, array("d")), value)

    def _put(self, column: array[float], value: float | None) -> None:
        """Fill the last row of a column, if it is empty. A column may begin late."""
        if len(column) < self._rows:
            column.extend([_NAN] * (self._rows - 1 - len(column)))
            column.append(_NAN if value is None else value)
        elif value is not None and column[-1] != column[-1]:
            column[-1] = value

    def _whole(self, column: array[float]) -> FloatArray:
        values = np.full(self._rows, _NAN)
        values[: len(column)] = column
        return values


def _whole(value: float) -> int | None:
    return int(value) if value == value else None


def runs_of(told: Iterator[Told]) -> Iterator[Columns]:
    """The rows of each run in a log: a number, an epoch or a time that falls begins another."""
    columns = Columns()
    for one in told:
        if began := one.restarted or _began_again(columns, one):
            yield columns
            columns = Columns(began=began)
        columns.add(one)
    yield columns


def _began_again(columns: Columns, told: Told) -> str:
    """Why a line is no next one. A number that falls may be of the next epoch: if the epoch stands,
    or the log has paused, it is not."""
    number, last = told.seen.number, columns.last("step")
    epoch, before = told.epoch, columns.last("epoch")
    if not len(columns):
        return ""
    if epoch is not None and epoch < before:
        return f"the epoch went from {before:g} back to {epoch:g}"
    is_another = epoch == before or (not before < (epoch or 0) and columns.paused(told.t_ns))
    if number is not None and number < last and is_another:
        return f"the step number went from {last:.0f} back to {number}"
    went_back = told.t_ns is not None and told.t_ns / NS_PER_S < columns.last("t_s")
    return "the time went back" if went_back else ""
