"""Gathers the step lines of a log as columns, a row for each line or for several lines.

A running total, a count of one step and a count of one line look alike in a column. Counts are
stored as printed until the log's end. Then they become the work since the row before, by the rules
of the live importers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Literal

import numpy as np

from ergmeter.importers.engine.step_line import COUNTS, HELD_LINES, decide_mode, mode_note
from ergmeter.importers.engine.step_lines import ParsedLine
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    import numpy.typing as npt

    from ergmeter.records import FloatArray


# Folding. Each line is a row until there are `MOST_ROWS`; then two rows become one, then four,
# and so on. The first row stays apart because it starts the clock. A row keeps sums, counts,
# minimum, maximum and the last number and time, so totals and means stay exact. Only the end of
# the warm-up becomes coarser.


Part = Literal["last", "sum", "known", "low", "high", "inverse", "positive", "amount"]
Key = tuple[str, Part]

_PRINTED: tuple[Part, ...] = ("sum", "known", "low", "high", "inverse", "positive")
MOST_ROWS = 1 << 18
FOLD_ROWS = MOST_ROWS // 8  # at a time
FOLDED_ROWS = MOST_ROWS // 4  # once there were more


@dataclass(frozen=True, slots=True)
class Printed:
    """A printed figure, row by row: sums over the lines of a row that had it."""

    total: FloatArray
    lines: FloatArray  # lines
    low: FloatArray  # NaN where no line had it
    high: FloatArray
    inverse: FloatArray  # the sum of 1 / value over those above 0
    positive: FloatArray  # lines with a value above 0

    @classmethod
    def of(cls, values: FloatArray) -> Printed:
        """A figure whose rows are single lines."""
        is_known = np.isfinite(values)
        is_positive = is_known & (values > 0)
        values_printed = np.where(is_known, values, np.nan)
        inverse = np.zeros(len(values))
        np.divide(1.0, values, out=inverse, where=is_positive)
        return cls(
            np.where(is_known, values, 0.0),
            is_known.astype(float),
            values_printed,
            values_printed,
            inverse,
            is_positive.astype(float),
        )

    def after(self, first: int) -> Printed:
        """Without the rows before this one."""
        return Printed(*(part[first:] for part in self.parts))

    @property
    def parts(self) -> tuple[FloatArray, ...]:
        """Its columns, in the order in which it is made of them."""
        return self.total, self.lines, self.low, self.high, self.inverse, self.positive

    @property
    def count(self) -> int:
        """The lines that had it, as a finite number."""
        return int(self.lines.sum())

    @property
    def mean(self) -> float:
        """Over all lines that had it."""
        return float(self.total[self.lines > 0].sum() / self.count)

    @property
    def count_positive(self) -> int:
        """The lines that had it above 0."""
        return int(self.positive.sum())

    @property
    def harmonic_mean(self) -> float:
        """Over all lines that had it above 0."""
        return float(self.count_positive / self.inverse[self.positive > 0].sum())

    @property
    def means(self) -> FloatArray:
        """Of each row; NaN where no line had it."""
        means = np.full(len(self.lines), np.nan)
        np.divide(self.total, self.lines, out=means, where=self.lines > 0)
        return means


def parts_of(name: str, values: FloatArray) -> dict[Key, FloatArray]:
    """The sums, counts and bounds of a column of single lines."""
    parts = zip(_PRINTED, Printed.of(values).parts, strict=True)
    return {(name, part): array for part, array in parts}


class Folded:
    """Rows that stand for ever more lines, so that their number stays bounded."""

    def __init__(self) -> None:
        self.rows = 0
        self._width = 1  # lines of a row
        self._parts: dict[Key, FloatArray] = {}

    def append(self, more: dict[Key, FloatArray]) -> None:
        """Further lines; but for the first and the last time, as many as a power of two."""
        starts = self._starts(len(next(iter(more.values()))))
        for key in dict.fromkeys((*self._parts, *more)):  # one by one: the rest needs no room twice
            begin = self._parts.get(key, _empty_column(key, self.rows))
            is_there = key in more
            end = _MERGE[key[1]](more[key], starts) if is_there else _empty_column(key, len(starts))
            self._parts[key] = np.concatenate((begin, end))
        self.rows += len(starts)
        self.shrink(FOLDED_ROWS)

    def shrink(self, most: int) -> None:
        """Make rows one of two until there are no more than so many, and the first."""
        while self.rows > most + 1:
            starts = np.append(0, np.arange(1, self.rows, 2))
            for key, values in self._parts.items():
                self._parts[key] = _MERGE[key[1]](values, starts)
            self.rows, self._width = len(starts), 2 * self._width

    def last(self, name: str) -> FloatArray:
        """The last of each row."""
        return self._of(name, "last")

    def amount(self, name: str) -> FloatArray:
        """The sum of each row."""
        return self._of(name, "amount")

    def printed(self, name: str) -> Printed:
        """A figure."""
        return Printed(*(self._of(name, part) for part in _PRINTED))

    def _of(self, name: str, part: Part) -> FloatArray:
        return self._parts.get((name, part), _empty_column((name, part), self.rows))

    def _starts(self, lines: int) -> npt.NDArray[np.int64]:
        """Where rows begin in these lines."""
        if self.rows:
            return np.arange(0, lines, self._width)
        return np.append(0, np.arange(1, lines, self._width))


def _last_of(array: FloatArray, starts: npt.NDArray[np.int64]) -> FloatArray:
    ends: FloatArray = array[np.append(starts[1:], len(array)) - 1]
    return ends


_MERGE: dict[Part, Callable[[FloatArray, npt.NDArray[np.int64]], FloatArray]] = {
    "last": _last_of,
    "sum": np.add.reduceat,
    "known": np.add.reduceat,
    "low": np.fmin.reduceat,
    "high": np.fmax.reduceat,
    "inverse": np.add.reduceat,
    "positive": np.add.reduceat,
    "amount": np.add.reduceat,  # not known of a row if not of each of its lines
}


def _empty_column(key: Key, rows: int) -> FloatArray:
    """The value of a column before its first line and after its last."""
    return np.full(rows, np.nan if key[1] in ("last", "low", "high", "amount") else 0.0)


# A run's steps and losses. A printed `nan` loss and a missing loss look alike in a column of
# means, so both are counted here.


@dataclass
class Tally:
    """Steps and losses of a run, whatever the number of its lines."""

    steps: int = 0  # numbers; beyond so many rows, those above all before
    first_step: int | None = None
    last_step: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    losses_not_finite: int = 0
    first_not_finite_step: int | None = None
    losses_not_printed: int = 0

    def take(self, step: FloatArray, loss: FloatArray, has_loss: npt.NDArray[np.bool_]) -> None:
        """Further lines."""
        numbers = step[~np.isnan(step)]
        if len(numbers):
            before = self.last_step
            fresh = numbers if before is None else numbers[numbers > before]
            self.steps += len(np.unique(fresh))
            least, most = int(numbers.min()), int(numbers.max())
            self.first_step = least if self.first_step is None else min(self.first_step, least)
            self.last_step = most if before is None else max(before, most)
        losses = loss[np.isfinite(loss)]
        if len(losses):
            self.first_loss = float(losses[0]) if self.first_loss is None else self.first_loss
            self.last_loss = float(losses[-1])
        is_broken = has_loss & ~np.isfinite(loss)
        if is_broken.any() and not self.losses_not_finite:
            self.first_not_finite_step = whole_number(float(step[is_broken][0]))
        self.losses_not_finite += int(is_broken.sum())
        self.losses_not_printed += int((~has_loss).sum())


def whole_number(value: float) -> int | None:
    """A step's number; None if it is NaN."""
    return int(value) if value == value else None


_NAN = float("nan")
# A pause is longer than this, and than so many times the usual time between rows, as in `spans`.
_GAP_S, _GAP_PERIODS, _RECENT = 1.0, 5, 16
PLAIN = ("step", "epoch", "loss", "learning_rate", "grad_norm", "step_time_s", "t_s")
_STEP, _EPOCH, _LOSS, _T = (PLAIN.index(name) for name in ("step", "epoch", "loss", "t_s"))
_LAST = ("step", "epoch", "learning_rate", "t_s")  # of a row of several lines, that of the last
_LINES, _HAS_LOSS = "lines", "has a loss"  # and of these the sum
_MEAN = ("loss", "grad_norm", "step_time_s")  # and of these the mean


class LogColumns:
    """The rows of one run in a log: a line each, until there are too many of them."""

    def __init__(self, *, began: str = "") -> None:
        self.began = began  # why it is another run than the one before
        self.clock: str | None = None
        self.of_one_rank = False
        self.first_stamp_ns: int | None = None  # of those that are not the clock
        self.last_stamp_ns: int | None = None
        self.notes: list[str] = []
        self.tally = Tally()
        self._rows = 0  # that are lines
        self._row = [_NAN] * len(PLAIN)  # the last of them
        self._most = MOST_ROWS + 1 + _RECENT
        self._folded: Folded | None = None  # the rows before them, which stand for several lines
        self._columns = {name: array("d") for name in PLAIN}
        self._counts: dict[str, array[float]] = {}
        self._rates: dict[str, array[float]] = {}
        self._line_units: set[str] = set()  # units that the last line gave
        self._has_loss = bytearray()  # of each row: a loss was printed, if only `nan`
        self._modes: dict[str, str] = {}  # of counts
        self._before: dict[str, float] = {}  # the last values that were folded

    def __len__(self) -> int:
        return self._rows + (self._folded.rows if self._folded else 0)

    def add(self, parsed: ParsedLine) -> None:
        """Adds a step line: a further row, or more about the last one."""
        line = parsed.step_line
        t_s = None if parsed.written_ns is None else parsed.written_ns / NS_PER_S
        values = (
            line.number, parsed.epoch, line.loss, line.learning_rate, line.grad_norm, line.own_s,
            t_s,
        )  # fmt: skip
        if line.number is not None and line.number == self._row[_STEP]:
            self._add_more(values)
        else:
            self._begin_row(values)
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
            if (
                means.kind == "rate"
                and means.unit not in self._line_units
                and "peak" not in printed
            ):
                self._line_units.add(means.unit)
                self._put(self._rates, means.unit, value)

    @property
    def reached(self) -> tuple[float, float, float]:
        """The last row's step, epoch and time; NaN where it has none."""
        row = self._row
        return row[_STEP], row[_EPOCH], row[_T]

    def paused(self, t_ns: int | None) -> bool:
        """True if the time since the last row is longer than usual, or unknown."""
        if t_ns is None or self.clock is None:
            return True
        times = self._columns["t_s"]
        recent, end = [self._row[_T]], len(times)
        while end and recent[-1] != recent[-1]:  # of the last rows that have none
            end -= 1
            recent = [times[end]]
        recent = [*times[max(0, end + 1 - _RECENT) : end], *recent]
        if len(recent) < 2 or recent[-1] != recent[-1]:
            return True
        usual_s = float(np.nanmedian(np.diff(recent)))
        return not 0 <= t_ns / NS_PER_S - recent[-1] <= max(_GAP_S, _GAP_PERIODS * usual_s)

    def close(self) -> None:
        """No line comes any more."""
        self._end_row()
        self._tally(self._rows)
        if self._folded is not None:
            self._fold(self._rows)

    def shrink(self, most: int) -> None:
        """Keep no more than so many rows of a run that is closed, and its first."""
        if len(self) > most + 1:
            if self._folded is None:
                self._fold(self._rows)
            assert self._folded is not None
            self._folded.shrink(most)

    def lines(self) -> FloatArray:
        """How many step lines each row stands for."""
        return self._folded.printed(_LINES).total if self._folded else np.ones(self._rows)

    def plain(self) -> dict[str, FloatArray]:
        """The columns that need no reading."""
        if self._folded is None:
            return {name: self._full_column(column) for name, column in self._columns.items()}
        last = {name: self._folded.last(name) for name in _LAST}
        return last | {name: self._folded.printed(name).means for name in _MEAN}

    def printed(self) -> dict[str, Printed]:
        """Printed figures, and the program's own rates by unit."""
        if self._folded is not None:
            return {name: self._folded.printed(name) for name in (*_MEAN, *self._rates)}
        named = {name: self._columns[name] for name in _MEAN} | self._rates
        return {name: Printed.of(self._full_column(column)) for name, column in named.items()}

    def has_loss(self) -> npt.NDArray[np.bool_]:
        """Of each row whether one of its lines printed a loss, `nan` or not."""
        if self._folded is not None:
            return self._folded.printed(_HAS_LOSS).total > 0
        return np.frombuffer(self._has_loss, dtype=bool)

    def rates(self) -> dict[str, FloatArray]:
        """The program's own printed rates, by unit."""
        if self._folded is not None:
            return {unit: self._folded.printed(unit).means for unit in self._rates}
        return {unit: self._full_column(column) for unit, column in self._rates.items()}

    def done(self, *fields: str) -> FloatArray:
        """What was done of the first of these fields of Step that was printed, since the row
        before; NaN where that is not known."""
        for field in fields:
            names = [name for name in self._counts if COUNTS[name][0] == field]
            if names:
                candidates = [
                    self._folded.amount(n) if self._folded else self._since(n) for n in names
                ]
                return max(candidates, key=lambda values: int(np.isfinite(values).sum()))
        return np.full(len(self), _NAN)

    def _add_more(self, values: tuple[float | None, ...]) -> None:
        """Fill what the last row does not have yet."""
        row, loss = self._row, self._row[_LOSS]
        for column, value in enumerate(values):
            if value is not None and row[column] != row[column]:
                row[column] = value
        if self._has_loss[-1]:
            row[_LOSS] = loss  # a `nan` that was printed is a fact
        self._has_loss[-1] |= values[_LOSS] is not None

    def _begin_row(self, values: tuple[float | None, ...]) -> None:
        self._end_row()
        if self._rows == self._most:
            self._tally(self._rows - _RECENT)
            self._fold(self._rows - _RECENT)
            self._most = FOLD_ROWS + _RECENT
        self._rows += 1
        self._row = [_NAN if value is None else value for value in values]
        self._line_units.clear()
        self._has_loss.append(values[_LOSS] is not None)

    def _end_row(self) -> None:
        if self._rows:
            for column, value in zip(self._columns.values(), self._row, strict=True):
                column.append(value)

    def _tally(self, rows: int) -> None:
        step, loss = (self._full_column(self._columns[name])[:rows] for name in ("step", "loss"))
        self.tally.take(step, loss, np.frombuffer(self._has_loss, dtype=bool)[:rows])

    def _fold(self, rows: int) -> None:
        """The first of the rows that are lines become part of those that are several."""
        while rows > FOLD_ROWS + 1:  # a part at a time, for the room it takes
            part = FOLD_ROWS + (self._folded is None)
            self._fold_part(part)
            rows -= part
        self._fold_part(rows)

    def _fold_part(self, rows: int) -> None:
        if not rows:
            return
        values = {name: self._full_column(column) for name, column in self._columns.items()}
        has_loss = np.frombuffer(self._has_loss, dtype=bool)
        more: dict[Key, FloatArray] = {(_LINES, "sum"): np.ones(rows)}
        more[_HAS_LOSS, "sum"] = has_loss[:rows].astype(float)
        more |= {(name, "last"): values[name][:rows] for name in _LAST}
        more |= {(name, "amount"): self._since(name)[:rows] for name in self._counts}
        for name in _MEAN:
            more |= parts_of(name, values[name][:rows])
        for unit, column in self._rates.items():
            more |= parts_of(unit, self._full_column(column)[:rows])
        self._folded = self._folded or Folded()
        self._folded.append(more)
        self._drop(rows)

    def _drop(self, rows: int) -> None:
        for columns in (self._columns, self._counts, self._rates):
            for name, column in columns.items():
                self._before[name] = column[rows - 1] if len(column) >= rows else _NAN
                columns[name] = column[rows:]  # a copy: arrays over the old one may still be held
        self._has_loss = self._has_loss[rows:]
        self._rows -= rows

    def _since(self, name: str) -> FloatArray:
        values, steps = (
            self._full_column(self._counts[name]),
            self._full_column(self._columns["step"]),
        )
        mode = COUNTS[name][1] or self._modes.get(name) or self._decided(name, values, steps)
        self._modes[name] = mode
        if mode == "total":
            grown = np.diff(values, prepend=self._before.get(name, _NAN))
            return np.where(grown > 0, grown, _NAN)
        if mode == "line":
            return values
        covered = np.nan_to_num(np.diff(steps, prepend=self._before.get("step", _NAN)), nan=1.0)
        if covered.max(initial=1) > 1:
            self.notes.append(f"{name} taken times the steps a line covers")
        return values * np.where(covered > 0, covered, 1.0)

    def _decided(self, name: str, values: FloatArray, steps: FloatArray) -> str:
        is_printed = np.isfinite(values)
        firsts = [int(value) for value in islice(values[is_printed], HELD_LINES)]
        numbers = [whole_number(step) for step in islice(steps[is_printed], HELD_LINES)]
        mode = decide_mode(numbers, firsts, final=True) or "step"
        self.notes.append(mode_note(name, mode, firsts))
        return mode

    def _put(self, columns: dict[str, array[float]], name: str, value: float) -> None:
        """Fill the last row of a column, if it is empty. A column may begin late, and end early."""
        column = columns.get(name)
        if column is None:
            column = columns[name] = array("d")
        rows = len(column)
        if rows == self._rows - 1:
            column.append(value)
        elif rows < self._rows:
            column.extend(repeat(_NAN, self._rows - 1 - rows))
            column.append(value)
        elif column[-1] != column[-1]:
            column[-1] = value

    def _full_column(self, column: array[float]) -> FloatArray:
        """All rows, without a copy: a log may have many."""
        if not column:
            return np.broadcast_to(np.float64(_NAN), self._rows)
        if len(column) < self._rows:
            column.extend(repeat(_NAN, self._rows - len(column)))
        return np.frombuffer(column, dtype=np.float64)


def runs_of(parsed_lines: Iterator[ParsedLine]) -> Iterator[LogColumns]:
    """The rows of each run in a log: a number, an epoch or a time that falls begins another."""
    columns = LogColumns()
    for parsed in parsed_lines:
        if began := parsed.restarted or _restart_reason(columns, parsed):
            columns.close()
            yield columns
            columns = LogColumns(began=began)
        columns.add(parsed)
    columns.close()
    yield columns


def _restart_reason(columns: LogColumns, parsed: ParsedLine) -> str:
    """Why a line is no next one. A number that falls may be of the next epoch: if the epoch stands,
    or the log has paused, it is not."""
    if not len(columns):
        return ""
    number, epoch = parsed.step_line.number, parsed.epoch
    last, before, last_s = columns.reached
    if epoch is not None and epoch < before:
        return f"the epoch went from {before:g} back to {epoch:g}"
    if number is not None and number < last:
        rose = before < (epoch or 0)
        if epoch == before or (not rose and columns.paused(parsed.written_ns)):
            return f"the step number went from {last:.0f} back to {number}"
    went_back = parsed.written_ns is not None and parsed.written_ns / NS_PER_S < last_s
    return "the time went back" if went_back else ""
