"""Gathers the step lines of a log as columns, a row for each line.

A running total, a count of one step and a count of one line look alike in a column. Counts are
stored as printed until the log's end. Then they become the work since the row before, by the rules
of the live importers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice, repeat
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.importers.engine.parsed_line import (
    COUNTS,
    HELD_LINES,
    ParsedLine,
    decide_mode,
    mode_note,
)
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    import numpy.typing as npt

    from ergmeter.records import FloatArray


_NAN = float("nan")
# A pause is longer than this, and than so many times the usual time between rows, as in `spans`.
_GAP_S, _GAP_PERIODS, _RECENT = 1.0, 5, 16
_PLAIN = ("step", "epoch", "loss", "learning_rate", "grad_norm", "step_time_s", "t_s")


class LogColumns:
    """The rows of one run in a log, one for each step line."""

    def __init__(self, *, began: str = "") -> None:
        self.began = began  # why it is another run than the one before
        self.clock: str | None = None
        self.of_one_rank = False
        self.first_stamp_ns: int | None = None  # of those that are not the clock
        self.last_stamp_ns: int | None = None
        self.notes: list[str] = []
        self._plain = {name: array("d") for name in _PLAIN}
        self._counts: dict[str, array[float]] = {}
        self._rates: dict[str, array[float]] = {}
        self._line_units: set[str] = set()  # units that the last row has
        self._has_loss = bytearray()  # of each row: a loss was printed, if only `nan`

    def __len__(self) -> int:
        return len(self._has_loss)

    def add(self, parsed: ParsedLine) -> None:
        """Adds a step line: a further row, or more about the last one."""
        if parsed.number is not None and parsed.number == self._last("step"):
            self._complete_row(parsed)
        else:
            for column, value in zip(self._plain.values(), _plain_values(parsed), strict=True):
                column.append(_NAN if value is None else value)
            self._has_loss.append(parsed.loss is not None)
            self._line_units.clear()
        if self.clock is None:
            self.clock = parsed.clock
        self.of_one_rank |= parsed.of_one_rank
        if parsed.stamp_ns is not None:
            self.first_stamp_ns = self.first_stamp_ns or parsed.stamp_ns
            self.last_stamp_ns = parsed.stamp_ns
        for name, count in parsed.counts.items():
            self._put(self._counts, name, count)
        for means, printed, value, _ in parsed.pairs:
            # Of two names for one thing, the first.
            is_new = means.kind == "rate" and means.unit not in self._line_units
            if is_new and "peak" not in printed:
                self._line_units.add(means.unit)
                self._put(self._rates, means.unit, value)

    def restart_reason(self, parsed: ParsedLine) -> str:
        """Why a line is no next row; "" if it is one. A number that falls may be of the next epoch:
        if the epoch stands, or the log has paused, it is not."""
        number, epoch = parsed.number, parsed.epoch
        last, before, last_s = (self._last(name) for name in ("step", "epoch", "t_s"))
        if epoch is not None and epoch < before:
            return f"the epoch went from {before:g} back to {epoch:g}"
        if number is not None and number < last:
            rose = before < (epoch or 0)
            if epoch == before or (not rose and self._paused(parsed)):
                return f"the step number went from {last:.0f} back to {number}"
        went_back = parsed.is_timed and parsed.t_ns / NS_PER_S < last_s
        return "the time went back" if went_back else ""

    def plain(self) -> dict[str, FloatArray]:
        """The columns that need no reading."""
        return {name: np.array(column) for name, column in self._plain.items()}

    def has_loss(self) -> npt.NDArray[np.bool_]:
        """Of each row whether a loss was printed, `nan` or not."""
        return np.array(self._has_loss, dtype=bool)

    def rates(self) -> dict[str, FloatArray]:
        """The program's own printed rates, by unit."""
        return {unit: self._filled(column) for unit, column in self._rates.items()}

    def work(self, *fields: str) -> FloatArray:
        """The work since the row before, by the first of these fields of Step that was printed;
        NaN where it is unknown."""
        for field in fields:
            names = [name for name in self._counts if COUNTS[name][0] == field]
            if names:
                candidates = [self._since(name) for name in names]
                return max(candidates, key=lambda values: int(np.isfinite(values).sum()))
        return np.full(len(self), _NAN)

    def _complete_row(self, parsed: ParsedLine) -> None:
        """Fills what the last row does not have yet; a `nan` loss that was printed is a fact."""
        for name, value in zip(_PLAIN, _plain_values(parsed), strict=True):
            column = self._plain[name]
            is_empty = not self._has_loss[-1] if name == "loss" else column[-1] != column[-1]
            if value is not None and is_empty:
                column[-1] = value
        self._has_loss[-1] |= parsed.loss is not None

    def _last(self, name: str) -> float:
        return self._plain[name][-1] if len(self) else _NAN

    def _paused(self, parsed: ParsedLine) -> bool:
        """True if the time since the last row is longer than usual, or unknown."""
        times = [t_s for t_s in self._plain["t_s"][-_RECENT:] if t_s == t_s]
        if not parsed.is_timed or len(times) < 2:
            return True
        usual_s = float(np.median(np.diff(times)))
        return not 0 <= parsed.t_ns / NS_PER_S - times[-1] <= max(_GAP_S, _GAP_PERIODS * usual_s)

    def _since(self, name: str) -> FloatArray:
        values, steps = self._filled(self._counts[name]), np.array(self._plain["step"])
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
        is_printed = np.isfinite(values)
        firsts = [int(value) for value in islice(values[is_printed], HELD_LINES)]
        numbers = [
            None if np.isnan(step) else int(step) for step in islice(steps[is_printed], HELD_LINES)
        ]
        mode = decide_mode(numbers, firsts, final=True) or "step"
        self.notes.append(mode_note(name, mode, firsts))
        return mode

    def _put(self, columns: dict[str, array[float]], name: str, value: float) -> None:
        """Fills the last row of a column, if it is empty. A column may begin late or end early."""
        column = columns.setdefault(name, array("d"))
        if len(column) < len(self):
            column.extend(repeat(_NAN, len(self) - 1 - len(column)))
            column.append(value)
        elif column[-1] != column[-1]:
            column[-1] = value

    def _filled(self, column: array[float]) -> FloatArray:
        """A column of as many rows as there are."""
        column.extend(repeat(_NAN, len(self) - len(column)))
        return np.array(column)


def _plain_values(parsed: ParsedLine) -> tuple[float | None, ...]:
    t_s = parsed.t_ns / NS_PER_S if parsed.is_timed else None
    return (
        parsed.number, parsed.epoch, parsed.loss, parsed.learning_rate, parsed.grad_norm,
        parsed.own_s, t_s,
    )  # fmt: skip


def runs_of(parsed_lines: Iterator[ParsedLine]) -> Iterator[LogColumns]:
    """The rows of each run in a log: a number, an epoch or a time that falls begins another."""
    columns = LogColumns()
    for parsed in parsed_lines:
        if began := parsed.restarted or columns.restart_reason(parsed):
            yield columns
            columns = LogColumns(began=began)
        columns.add(parsed)
    yield columns
