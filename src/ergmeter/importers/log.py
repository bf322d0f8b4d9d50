"""What does a training log hold, as columns?

For whoever needs a log's figures and no run: `read_log(path)` finds the importer that knows the
program, reads the log once from end to end in little memory, and gives its step lines as columns,
run by run. The trap: several runs in one file, read as one. A step number or a time that falls back
begins another, and each has its own columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import UsageError
from ergmeter.importers.choice import chosen
from ergmeter.importers.engine.columns import LogColumns, Tally, runs_of
from ergmeter.importers.engine.folding import MOST_ROWS, Printed
from ergmeter.importers.engine.step_lines import ParsedLine, step_lines
from ergmeter.importers.logfile import LogFile
from ergmeter.importers.steady import Steady, steady
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    import numpy.typing as npt

    from ergmeter.importers.engine.dialect import Dialect
    from ergmeter.ports import Importer, Line
    from ergmeter.records import FloatArray

_FEW_ROWS = 1024  # of a run that is not the last, where there are too many rows in all
_APART = (
    "by its timestamps the log took {:.6g} s from the first step line to the last, by its printed "
    "step times {:.6g} s: the rest is not in the step times, or lines stand for several steps"
)
_ALIKE = 0.1  # of the time by stamps, which may be whole seconds
_MANY = "{} step lines: {} to a row, so the end of the warm-up is known to so many lines"


@dataclass(frozen=True)
class LogRun:
    """One run in a log: a row for each step line, NaN where the line did not say.

    Of a run of more than `MOST_ROWS` lines, a row stands for several: its number, epoch, learning
    rate and time are those of the last, its other figures their means.
    """

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
    rates: dict[str, FloatArray]  # by unit, as printed
    has_loss: npt.NDArray[np.bool_]  # a loss was printed, `nan` or not
    lines: FloatArray  # step lines that a row stands for
    printed: dict[str, Printed]  # loss, grad_norm, step_time_s, and rates by unit: exact sums
    tally: Tally  # exact counts of steps and losses
    rate_steps: int = 1  # a printed rate is a mean over so many steps
    of_one_rank: bool = False  # several ranks print: samples and tokens are those of one
    first_stamp: datetime | None = None  # of its step lines, whatever the clock
    last_stamp: datetime | None = None

    def __len__(self) -> int:
        return len(self.step)

    @property
    def lines_per_row(self) -> int:
        """1, unless the run has too many lines for a row each."""
        return int(self.lines.max(initial=1))

    @cached_property
    def period_s(self) -> FloatArray:
        """From each row to the next; of the first row it is not known."""
        return np.diff(self.t_s, prepend=np.nan)

    @cached_property
    def covered(self) -> FloatArray:
        """The steps since the row before."""
        return np.diff(self.step, prepend=np.nan)

    def steady(self, *, skip_rows: int | None = None) -> Steady:
        """What the run came to after its warm-up; by default a rule finds where that ends."""
        return steady(self, skip_rows=skip_rows)


@dataclass(frozen=True)
class ParsedLog:
    """A log that was read. At least one run, in the order of the file."""

    path: str
    format: str
    recognised: str  # the line that spoke for the format
    bytes_read: int
    lines: int
    runs: tuple[LogRun, ...]
    notes: tuple[str, ...]

    @property
    def last(self) -> LogRun:
        """The last run in the file."""
        return self.runs[-1]


def read_log(
    path: str | Path,
    *,
    format: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> ParsedLog:
    """Read a log, packed with gzip or not; "-" is standard input.

    `format` names the importer; left out, it is found. `progress` hears of the bytes read so far.
    Raises UsageError where the log or the format isn't there, FormatError where no step line is.
    """
    log = LogFile(path, progress=progress)
    found = chosen(log, format=format)
    notes: list[str] = []
    all_columns: list[LogColumns] = []
    make = getattr(found.importer, "dialect", None)
    dialect: Dialect | None = make() if make else None
    for columns in runs_of(_parsed_lines(found.importer, dialect, found.lines)):
        all_columns.append(columns)
        _bound(all_columns)
    runs = [_run(columns, dialect.rate_steps if dialect else 1) for columns in all_columns]
    notes += [note for columns in all_columns for note in columns.notes]
    began = [columns.began for columns in all_columns if columns.began]
    if (many := runs[-1].lines_per_row) > 1:
        notes.append(_MANY.format(int(runs[-1].lines.sum()), many))
    notes += _apart(runs[-1])
    if dialect is not None:
        notes = [*dialect.notes, *notes]
    if len(runs) > 1:
        notes.append(f"{len(runs)} runs in one log: {'; '.join(dict.fromkeys(began))}")
    if log.is_cut_off:
        notes.append("the compressed log ends half way: what was there is read")
    told = tuple(dict.fromkeys(notes))
    return ParsedLog(
        log.path,
        found.importer.name,
        found.recognised,
        log.bytes_read,
        log.line_count,
        tuple(runs),
        told,
    )


def _bound(finished: list[LogColumns]) -> None:
    """Keep the rows of all runs but the last within bounds, from the first on."""
    rows = sum(len(columns) for columns in finished)
    for columns in finished[:-1]:
        if rows <= MOST_ROWS:
            return
        before = len(columns)
        columns.shrink(_FEW_ROWS)
        rows -= before - len(columns)


def _parsed_lines(
    importer: Importer, dialect: Dialect | None, lines: Iterator[Line]
) -> Iterator[ParsedLine]:
    """The step lines."""
    if hasattr(importer, "told"):
        told: Iterator[ParsedLine] = importer.told(lines)
        return told
    if dialect is None:
        raise UsageError(f"the importer {importer.name!r} makes runs, but no columns: erg import")
    return step_lines(dialect, lines)


def _run(columns: LogColumns, rate_steps: int) -> LogRun:
    plain = columns.plain()
    first_stamp, last_stamp = _stamps(columns, plain["t_s"])
    return LogRun(
        **plain,
        clock=columns.clock,
        samples=columns.done("samples"),
        tokens=columns.done("tokens_real", "tokens_computed"),
        rates=columns.rates(),
        has_loss=columns.has_loss(),
        lines=columns.lines(),
        printed=columns.printed(),
        tally=columns.tally,
        rate_steps=rate_steps,
        of_one_rank=columns.of_one_rank,
        first_stamp=first_stamp,
        last_stamp=last_stamp,
    )


def _apart(run: LogRun) -> list[str]:
    """What is said where step times are the clock, and there are stamps that tell otherwise."""
    if run.clock != "step times" or run.first_stamp is None or run.last_stamp is None:
        return []
    stamped_s = (run.last_stamp - run.first_stamp).total_seconds()
    summed_s = float(run.t_s[-1] - run.t_s[0])
    is_alike = abs(stamped_s - summed_s) <= max(1.0, _ALIKE * stamped_s)
    return [] if is_alike or not summed_s > 0 else [_APART.format(stamped_s, summed_s)]


def _stamps(columns: LogColumns, t_s: FloatArray) -> tuple[datetime | None, datetime | None]:
    """The first and the last timestamp of the step lines."""
    if columns.clock == "stamps" and np.isfinite(t_s).any():
        return _moment(float(np.nanmin(t_s))), _moment(float(np.nanmax(t_s)))
    first_ns, last_ns = columns.first_stamp_ns, columns.last_stamp_ns
    if first_ns is None or last_ns is None:
        return None, None
    return _moment(first_ns / NS_PER_S), _moment(last_ns / NS_PER_S)


def _moment(t_s: float) -> datetime:
    return datetime.fromtimestamp(t_s, tz=timezone.utc)
