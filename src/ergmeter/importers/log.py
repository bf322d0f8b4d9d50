"""Reads a training log as columns, without making a run.

`read_log(path)` chooses the importer, reads the log once in little memory, and returns its step
lines as columns, run by run. A step number or a time that falls back begins another run.

A running total, a count of one step and a count of one line look alike in a column. Counts are
stored as printed until the log's end. Then they become the work since the row before, by the rules
of the live importers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import UsageError
from ergmeter.importers.engine.parsed_line import (
    COUNTS,
    HELD_LINES,
    ParsedLine,
    decide_mode,
    mode_note,
)
from ergmeter.importers.engine.reading import StepLineImporter
from ergmeter.importers.logfile import LogFile, choose_importer
from ergmeter.records import Basis, FloatArray, Missing, Reading, Result
from ergmeter.stats.intervals import MIN_BLOCKS, ratio_interval, settled_after
from ergmeter.units import NS_PER_S, number_of

if TYPE_CHECKING:
    import numpy.typing as npt


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
        self._plain: dict[str, array[float]] = {name: array("d") for name in _PLAIN}
        self._counts: dict[str, array[float]] = {}
        self._rates: dict[str, array[float]] = {}
        self._has_loss = bytearray()  # of each row: a loss was printed, if only `nan`

    def __len__(self) -> int:
        return len(self._has_loss)

    def add(self, parsed: ParsedLine) -> None:
        """Add a step line: a new row, or further values of the last row's step."""
        if parsed.number is None or parsed.number != self._last("step"):
            self._has_loss.append(False)
        has_loss = self._has_loss[-1]
        for name, value in zip(_PLAIN, _plain_values(parsed), strict=True):
            if value is not None and not (name == "loss" and has_loss):  # `nan` is a fact
                self._put(self._plain, name, value)
        self._has_loss[-1] |= parsed.loss is not None
        self.clock = self.clock or parsed.clock
        self.of_one_rank |= parsed.of_one_rank
        if parsed.stamp_ns is not None:
            self.first_stamp_ns = self.first_stamp_ns or parsed.stamp_ns
            self.last_stamp_ns = parsed.stamp_ns
        for name, count in parsed.counts.items():
            self._put(self._counts, name, count)
        for means, printed, value, _ in parsed.pairs:
            if means.kind == "rate" and "peak" not in printed:  # of two names for one, the first
                self._put(self._rates, means.unit or means.name, value)

    def restart_reason(self, parsed: ParsedLine) -> str:
        """Why a line begins another run; "" if it continues this one.

        A step number that falls may be of the next epoch. It is a restart if the epoch is the same,
        or if the log had paused.
        """
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

    def run(self, *, rate_steps: int) -> LogRun:
        """Return the rows as a LogRun, whose columns are equally long."""
        plain = {name: self._filled(column) for name, column in self._plain.items()}
        first_stamp, last_stamp = self._stamps(plain["t_s"])
        return LogRun(
            **plain,
            clock=self.clock,
            samples=self._work("samples"),
            tokens=self._work("tokens_real", "tokens_computed"),
            rates={unit: self._filled(column) for unit, column in self._rates.items()},
            has_loss=np.array(self._has_loss, dtype=bool),
            rate_steps=rate_steps,
            of_one_rank=self.of_one_rank,
            first_stamp=first_stamp,
            last_stamp=last_stamp,
        )

    def _stamps(self, t_s: FloatArray) -> tuple[datetime | None, datetime | None]:
        """The first and the last timestamp of the step lines."""
        if self.clock == "stamps" and np.isfinite(t_s).any():
            return _moment(float(np.nanmin(t_s))), _moment(float(np.nanmax(t_s)))
        first_ns, last_ns = self.first_stamp_ns, self.last_stamp_ns
        if first_ns is None or last_ns is None:
            return None, None
        return _moment(first_ns / NS_PER_S), _moment(last_ns / NS_PER_S)

    def _work(self, *fields: str) -> FloatArray:
        """The work of each row, by the first of these fields of Step that was printed; NaN where it
        is unknown."""
        for field in fields:
            names = [name for name in self._counts if COUNTS[name][0] == field]
            if names:
                candidates = [self._since(name) for name in names]
                return max(candidates, key=lambda values: int(np.isfinite(values).sum()))
        return np.full(len(self), _NAN)

    def _last(self, name: str) -> float:
        """The last row's value; NaN if it has none."""
        column = self._plain[name]
        return column[-1] if column and len(column) == len(self) else _NAN

    def _paused(self, parsed: ParsedLine) -> bool:
        """True if the time since the last row is longer than usual, or unknown."""
        recent = self._plain["t_s"][max(0, len(self) - _RECENT) :]
        times = [t_s for t_s in recent if t_s == t_s]
        if not parsed.is_timed or len(times) < 2:
            return True
        usual_s = float(np.median(np.diff(times)))
        return not 0 <= parsed.t_ns / NS_PER_S - times[-1] <= max(_GAP_S, _GAP_PERIODS * usual_s)

    def _since(self, name: str) -> FloatArray:
        values, steps = self._filled(self._counts[name]), self._filled(self._plain["step"])
        mode = COUNTS[name][1] or self._decided(name, values, steps)
        if mode == "total":
            grown = np.diff(values, prepend=_NAN)
            return np.where(grown > 0, grown, _NAN)
        if mode == "line":
            return values
        covered = np.nan_to_num(np.diff(steps, prepend=_NAN), nan=1.0)
        if covered.max(initial=1) > 1:
            self.notes.append(f"{name} multiplied by the steps that a line covers")
        return values * np.where(covered > 0, covered, 1.0)

    def _decided(self, name: str, values: FloatArray, steps: FloatArray) -> str:
        is_printed = np.isfinite(values)
        firsts = [int(value) for value in islice(values[is_printed], HELD_LINES)]
        first_steps = islice(steps[is_printed], HELD_LINES)
        numbers = [None if np.isnan(step) else int(step) for step in first_steps]
        mode = decide_mode(numbers, firsts, final=True) or "step"
        self.notes.append(mode_note(name, mode, firsts))
        return mode

    def _put(self, columns: dict[str, array[float]], name: str, value: float) -> None:
        """Set a column's value in the last row, unless it is set; earlier gaps become NaN."""
        column = columns.setdefault(name, array("d"))
        if len(column) < len(self):
            column.extend(repeat(_NAN, len(self) - 1 - len(column)))
            column.append(value)
        elif column[-1] != column[-1]:
            column[-1] = value

    def _filled(self, column: array[float]) -> FloatArray:
        """Return a column as an array, filled up with NaN to the number of rows."""
        column.extend(repeat(_NAN, len(self) - len(column)))
        return np.array(column)


def _plain_values(parsed: ParsedLine) -> tuple[float | None, ...]:
    t_s = parsed.t_ns / NS_PER_S if parsed.is_timed else None
    return (
        parsed.number, parsed.epoch, parsed.loss, parsed.learning_rate, parsed.grad_norm,
        parsed.own_s, t_s,
    )  # fmt: skip


def runs_of(parsed_lines: Iterator[ParsedLine]) -> Iterator[LogColumns]:
    """Yield the rows of each run in a log: a step, epoch or time that falls back begins a run."""
    columns = LogColumns()
    for parsed in parsed_lines:
        if began := parsed.restarted or columns.restart_reason(parsed):
            yield columns
            columns = LogColumns(began=began)
        columns.add(parsed)
    yield columns


# A log as it was read.

_APART = (
    "by its timestamps the log took {:.6g} s from the first step line to the last, by its printed "
    "step times {:.6g} s: the rest is not in the step times, or lines stand for several steps"
)
_ALIKE = 0.1  # of the time by stamps, which may be whole seconds


@dataclass(frozen=True)
class LogRun:
    """One run in a log: a row for each step line, NaN for figures that the line lacks."""

    step: FloatArray
    epoch: FloatArray
    loss: FloatArray
    learning_rate: FloatArray
    grad_norm: FloatArray
    step_time_s: FloatArray  # as printed
    t_s: FloatArray  # when the line was written; of the clock below
    clock: str | None  # "stamps", "step times" added up, "bar": its own, "train_runtime"
    samples: FloatArray  # since the row before
    tokens: FloatArray
    rates: dict[str, FloatArray]  # by unit, or by name where none is printed
    has_loss: npt.NDArray[np.bool_]  # a loss was printed, `nan` or not
    rate_steps: int = 1  # a printed rate is a mean over so many steps
    of_one_rank: bool = False  # several ranks print: samples and tokens are those of one
    first_stamp: datetime | None = None  # of its step lines, whatever the clock
    last_stamp: datetime | None = None

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def sequence_rates(self) -> tuple[str, ...]:
        """The names of rates that are sequences per second. A `throughput` without a unit is one,
        as in nki-llama's guide; but not if the log counts tokens, since it may be tokens/s."""
        return _SEQUENCES if np.isfinite(self.tokens).any() else (*_SEQUENCES, _BARE)

    @cached_property
    def period_s(self) -> FloatArray:
        """The time in s from the row before; NaN for the first row."""
        return np.diff(self.t_s, prepend=np.nan)

    @cached_property
    def covered(self) -> FloatArray:
        """The number of steps since the row before; NaN for the first row."""
        return np.diff(self.step, prepend=np.nan)

    def steady(self) -> Steady:
        """The run's throughput after its warm-up."""
        return Steady(self, *_first(self))


@dataclass(frozen=True)
class ParsedLog:
    """A log that was read. At least one run, in the order of the file."""

    path: str
    format: str
    recognised: str  # the line by which the format was recognised
    bytes_read: int
    lines: int
    runs: tuple[LogRun, ...]
    notes: tuple[str, ...]

    @property
    def last(self) -> LogRun:
        """The last run in the file."""
        return self.runs[-1]


def read_log(
    path: str | Path, *, format: str | None = None, progress: Callable[[int], None] | None = None
) -> ParsedLog:
    """Read a log, packed with gzip or not; "-" is standard input.

    `format` names the importer; by default it is recognised. `progress` is called with the bytes
    read so far. Raises UsageError if the log or the format does not exist, FormatError without any
    step line.
    """
    log = LogFile(path, progress=progress)
    choice = choose_importer(log, format=format)
    if not isinstance(choice.importer, StepLineImporter):
        name = choice.importer.name
        raise UsageError(f"the importer {name!r} makes no columns, only runs: use erg import")
    step_lines = choice.importer.step_lines()
    all_columns = list(runs_of(step_lines.all(choice.lines)))
    dialect = step_lines.dialect
    runs = [columns.run(rate_steps=dialect.rate_steps) for columns in all_columns]
    notes = [*dialect.notes, *(note for columns in all_columns for note in columns.notes)]
    notes += _apart(runs[-1])
    began = [columns.began for columns in all_columns if columns.began]
    if len(runs) > 1:
        notes.append(f"{len(runs)} runs in one log: {'; '.join(dict.fromkeys(began))}")
    if log.is_cut_off:
        notes.append("the compressed log is truncated: it was read up to there")
    assumptions = tuple(dict.fromkeys(notes))
    return ParsedLog(
        log.path,
        choice.importer.name,
        choice.recognised,
        log.bytes_read,
        log.line_count,
        tuple(runs),
        assumptions,
    )


def _apart(run: LogRun) -> list[str]:
    """A note for logs whose step times are the clock while their timestamps differ."""
    if run.clock != "step times" or run.first_stamp is None or run.last_stamp is None:
        return []
    stamped_s = (run.last_stamp - run.first_stamp).total_seconds()
    summed_s = float(run.t_s[-1] - run.t_s[0])
    is_alike = abs(stamped_s - summed_s) <= max(1.0, _ALIKE * stamped_s)
    return [] if is_alike or not summed_s > 0 else [_APART.format(stamped_s, summed_s)]


def _moment(t_s: float) -> datetime:
    return datetime.fromtimestamp(t_s, tz=timezone.utc)


# Throughput once a log has settled. The first row opens the window and is not counted: its steps
# include data loading and, with torch.compile or on Trainium, minutes of compilation. With ten
# rows or more, unsteady rows at the start are dropped too (MSER, White 1997). Throughput is
# samples over time where the log has times. Otherwise it is the harmonic mean of the printed
# rates, and the note says so.


_SEQUENCES = ("sequences/s", "samples/s")
_BARE = "throughput"


def _first(run: LogRun) -> tuple[int, str]:
    """Return the first row to count in the throughput, and the rule that chose it."""
    if len(run) < 2:
        return 0, "one row: nothing can be left out"
    is_timed = np.isfinite(run.step_time_s[0]) or run.clock in (None, "step times")
    starts = "" if is_timed else "it only starts the clock, and "
    opened = f"the first row left out: {starts}its steps include compilation"
    periods = run.period_s[1:]
    if len(periods) < 2 * MIN_BLOCKS or not np.isfinite(periods).all():
        return 1, opened
    settled = settled_after(periods)
    if settled is None:
        return 1, f"{opened}; the step time never settled (MSER)"
    if settled == 0:
        return 1, opened
    rule = f"the first {1 + settled} rows left out, until the step time settled (MSER)"
    return 1 + settled, rule


class Steady:
    """Throughput over the rows [first, last); `rule` says why earlier rows are left out."""

    def __init__(self, run: LogRun, first: int, rule: str) -> None:
        self.first, self.last, self.rule = first, len(run), rule
        self._run = run
        self._rows = slice(first, len(run))
        # A figure is as good as its weakest input: step times that were printed are one.
        self._basis: Basis = "reported" if run.clock == "step times" else "derived"

    @cached_property
    def sequences_per_s(self) -> Result:
        """Sequences over time; else the mean of the printed rates."""
        return self._rate(self._run.samples, "sequences/s", self._run.sequence_rates)

    @cached_property
    def tokens_per_s(self) -> Result:
        """Tokens over time; else the mean of the printed rates."""
        return self._rate(self._run.tokens, "tokens/s", ("tokens/s",))

    @cached_property
    def step_s(self) -> Result:
        """Time over steps; else the mean of the printed step times."""
        periods, steps = self._durations_s, self._run.covered[self._rows]
        if periods is not None and len(steps) and np.isfinite(steps).all():
            low, high = self._interval(periods, steps, float(periods.sum()))
            over = number_of(round(steps.sum()), "step")
            note = f"{periods.sum():.6g} s{self._clock} over {over}; {self.rule}"
            return Reading(float(periods.sum() / steps.sum()), "s", self._basis, low, high, note)
        printed_s = self._run.step_time_s[self._rows]
        printed_s = printed_s[np.isfinite(printed_s)]
        if not len(printed_s):
            return Missing(self._why())
        many = f"mean of {len(printed_s)} printed step times"
        note = f"{'the one printed step time' if len(printed_s) == 1 else many}; {self.rule}"
        return Reading(float(printed_s.sum() / len(printed_s)), "s", "reported", note=note)

    def _rate(self, amounts: FloatArray, unit: str, printed: tuple[str, ...]) -> Result:
        """Amounts over time; else the mean of the printed rates of these units."""
        amounts, periods = amounts[self._rows], self._durations_s
        if periods is not None and len(amounts) and np.isfinite(amounts).all():
            value = float(amounts.sum() / periods.sum())
            low, high = self._interval(amounts, periods, float(periods.sum()))
            what = number_of(round(amounts.sum()), unit.removesuffix("s/s"))
            note = f"{what} in {periods.sum():.6g} s{self._clock}; {self.rule}"
            return Reading(value, unit, self._basis, low, high, note)
        return self._printed(unit, printed)

    def _interval(
        self, tops: FloatArray, bottoms: FloatArray, window_s: float
    ) -> tuple[float | None, float | None]:
        """The interval of a ratio. If the log's times are whole seconds, the window's length may be
        off by a second, and the interval is at least as wide as that."""
        low, high = ratio_interval(tops, bottoms) or (None, None)
        if not (self._run.t_s[self._rows] % 1 == 0).all() or window_s <= 1:
            return low, high
        value, resolved_frac = float(tops.sum() / bottoms.sum()), 1 - 1 / window_s
        lowest, highest = value * resolved_frac, value / resolved_frac
        if low is None or high is None:
            return lowest, highest
        return min(low, lowest), max(high, highest)

    @property
    def _clock(self) -> str:
        clocks = {"step times": " of printed step times", "bar": " by the progress bar"}
        return clocks.get(self._run.clock or "", "")

    @cached_property
    def _durations_s(self) -> FloatArray | None:
        """The duration of each counted row; None unless all are known."""
        if not 1 <= self.first < self.last:
            return None
        periods = self._run.period_s[self._rows]
        return periods if np.isfinite(periods).all() and periods.sum() > 0 else None

    def _printed(self, unit: str, printed: tuple[str, ...]) -> Result:
        name = next((name for name in printed if name in self._run.rates), None)
        if name is None:
            return Missing(f"{self._why()}, and the program printed no {' or '.join(printed)}")
        first = self._past_averages()
        rates = self._run.rates[name][first:]
        rates = rates[np.isfinite(rates) & (rates > 0)]
        if not len(rates):
            return Missing(f"no {unit} above 0 was printed after the warm-up: {self.rule}")
        averaged = f", from row {first} on as each is a mean over {self._run.rate_steps} steps"
        many = f"harmonic mean of {len(rates)} printed figures"
        note = (
            f"{'the one printed figure' if len(rates) == 1 else many}, not samples over time"
            f"{', throughput read as sequences/s' if name == _BARE else ''}; {self.rule}"
            f"{averaged if first > self.first else ''}"
        )
        return Reading(float(len(rates) / (1 / rates).sum()), unit, "reported", note=note)

    def _past_averages(self) -> int:
        """The first row whose printed rate, a moving average, excludes the warm-up."""
        run, first = self._run, min(self.first, len(self._run) - 1)
        if run.rate_steps < 2 or not len(run) or not np.isfinite(run.step[first]):
            return self.first
        beyond = np.flatnonzero(run.step >= run.step[max(0, first - 1)] + run.rate_steps)
        return int(beyond[0]) if len(beyond) else self.first

    def _why(self) -> str:
        if len(self._run) < 2:
            return "the log has fewer than two step lines"
        if self._run.clock is None:
            return "the log has no timestamps, step times or bar to time its steps by"
        return "the log's step lines do not say how much was done"
