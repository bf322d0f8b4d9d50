"""Throughput of a job in sequences per second, with its source.

Without a throughput the original assumes 100 sequences a second, which for an 8B model on one
instance is an MFU of 737 %. Here it is then absent, and MFU with it. From a log it is that of the
steady state: the first lines hold compilation and warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.timeline import BoundedSeries, bounded_series
from ergmeter.records import FloatArray, Missing, Reading, Result, mapped
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S, number_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.log import LogRun, ParsedLog
    from ergmeter.neuron.training_job import NeuronJob


_UNIT = "samples/s"  # a sample of these jobs is a sequence

# The throughput row by row, for a chart. Rows are computed as the mean is: samples over time if the
# log has both, else as printed, else the batch over the step time. Rows before the steady state are
# included and marked as left out.


@dataclass(frozen=True)
class PaceLine:
    """Sequences per second over steps. `line.t_s` are step numbers, or rows where none were."""

    line: BoundedSeries
    over: str  # "step", or "row" of the log's last run
    counted_from: float  # the first step or row that is in the figure
    how: str


def pace_line(log: ParsedLog, job: NeuronJob, *, points: int) -> PaceLine:
    """The throughput of each log row. Raises NotMeasurable where rows have none."""
    run = log.last
    first = run.steady().first
    way = next(_ways(run, job, first), None)
    if way is None:
        raise NotMeasurable(f"{log.path} has no pace of single steps")
    rates, how = way
    is_numbered = bool(np.isfinite(run.step).all() and (np.diff(run.step) > 0).all())
    places = run.step if is_numbered else np.arange(len(run), dtype=np.float64)
    places_ns = (places * NS_PER_S).astype(np.int64)
    line = bounded_series(Series(places_ns, rates), zero_ns=0, points=points)
    counted_from = float(places[min(first, len(run) - 1)])
    return PaceLine(line, "step" if is_numbered else "row", counted_from, how)


def _ways(run: LogRun, job: NeuronJob, first: int) -> Iterator[tuple[FloatArray, str]]:
    """Ways to compute the throughput of every counted row, in `throughput`'s order."""
    by_batch = list(_by_batch(run, job))
    unit = rate_unit(run)
    ways = [
        *(by_batch if job.batch_overrules else ()),
        (_over(run.samples, run.period_s), "sequences over time"),
        *([(run.rates[unit], "as printed")] if unit else ()),
        (_over(run.tokens, run.period_s) / job.seq_len, "tokens over time"),
        *(
            [(run.rates["tokens/s"] / job.seq_len, "tokens as printed")]
            if "tokens/s" in run.rates
            else ()
        ),
        *by_batch,
    ]
    for rates, how in ways:
        # A row may have printed nothing; over time the figure is of all rows or of none.
        is_finite = np.isfinite(rates[first:])
        if is_finite.any() and (is_finite.all() or "printed" in how):
            yield rates, how


def _by_batch(run: LogRun, job: NeuronJob) -> Iterator[tuple[FloatArray, str]]:
    batch = np.full(len(run), float(job.batch_size))
    yield _over(batch * run.covered, run.period_s), f"{job.batch_size} sequences over a step's time"
    yield _over(batch, run.step_time_s), f"{job.batch_size} sequences over the printed step time"


def _over(amounts: FloatArray, seconds: FloatArray) -> FloatArray:
    """Amounts per second; NaN where either is not known, or no time passed."""
    rates = np.full(len(amounts), np.nan)
    np.divide(amounts, seconds, out=rates, where=np.isfinite(seconds) & (seconds > 0))
    return rates


@dataclass(frozen=True, slots=True)
class Throughput:
    """Sequences per second of the job, the catalogue's `throughput.samples_per_s`."""

    result: Result
    formula: str = "as given by --throughput"
    is_from_log: bool = False

    @property
    def seq_per_s(self) -> float | None:
        """Its value; None where there is none."""
        return self.result.value if isinstance(self.result, Reading) else None

    @property
    def source(self) -> str:
        """Where it is from, or why there is none."""
        return self.result.note if isinstance(self.result, Reading) else self.result.reason


def throughput(declared: float | None, log: ParsedLog | None, job: NeuronJob) -> Throughput:
    """The throughput given on the command line, else that of the log's last run."""
    if declared is not None:
        note = f"{declared:g} sequences/s, as given"
        return Throughput(Reading(declared, _UNIT, "reported", note=note))
    if log is None:
        return Throughput(Missing("no throughput: pass --throughput, or --log-file"))
    steady = log.last.steady()
    sequences, tokens, step = steady.sequences_per_s, steady.tokens_per_s, steady.step_s
    if isinstance(step, Reading) and job.batch_overrules:
        return _pace_by_batch(log, step, job)
    if isinstance(sequences, Reading):
        return _logged(log, sequences)
    if isinstance(tokens, Reading):
        rate = mapped(tokens, lambda tokens_per_s: tokens_per_s / job.seq_len)
        return _logged(log, rate, f", in sequences of {job.seq_len}")
    if isinstance(step, Reading):
        return _pace_by_batch(log, step, job)
    why = f"{log.path} shows no throughput ({sequences.reason}): pass --throughput"
    return Throughput(Missing(why))


def _pace_by_batch(log: ParsedLog, step: Reading, job: NeuronJob) -> Throughput:
    """Throughput as the batch over the log's step time."""
    batch = f"{number_of(job.batch_size, 'sequence')} a step"
    # The shortest step makes the most sequences a second; one that may take no time, any number.
    low, high = (job.batch_size / step_s if step_s else None for step_s in (step.high, step.low))
    rate = replace(step, value=job.batch_size / step.value, low=low, high=high)
    return _logged(log, rate, f", with {batch} ({job.batch_from})")


def _logged(log: ParsedLog, rate: Reading, detail: str = "") -> Throughput:
    """A log's throughput, with its source."""
    how = rate.note.partition(";")[0]  # without the warm-up rule
    note = f"{log.path}{detail}: {rate.note}"
    result = replace(rate, unit=_UNIT, note=note)
    return Throughput(result, f"{how}{detail}", is_from_log=True)


# A log's statistics: of its last run, rates and times after the warm-up. Fields have the original's
# names, in its order.


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the finite values that a log printed."""

    average: float | None = None
    min: float | None = None
    max: float | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class LossStatistics(Statistics):
    """Statistics of losses. One that is `nan` or `inf` is counted apart from an absent one."""

    first: float | None = None
    last: float | None = None
    not_finite: int = 0
    first_not_finite_step: int | None = None
    not_printed: int = 0


@dataclass(frozen=True, slots=True)
class LogTimes:
    """When a log was written."""

    first: str | None
    last: str | None
    file_modification: str | None


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The steps of a log."""

    count: int
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True)
class SteadyRows:
    """The rows that are counted, and by which rule."""

    first_row: int
    last_row: int
    rule: str


@dataclass(frozen=True, slots=True)
class LogSummary:
    """What a log says of its last run."""

    log_file: str
    timestamps: LogTimes
    steps: StepNumbers
    step_times: Statistics
    throughput: Statistics
    losses: LossStatistics
    format: str = ""
    runs_in_log: int = 1
    steady_state: SteadyRows | None = None  # None: as the original reads it, warm-up included
    notes: tuple[str, ...] = ()


def summarize_log(log: ParsedLog) -> LogSummary:
    """Summarizes the last run of a log."""
    run = log.last
    steady = run.steady()
    unit = rate_unit(run)
    rates = run.rates[unit][steady.first :] if unit else np.empty(0)
    stamps = (_stamp(run.first_stamp), _stamp(run.last_stamp), _modified(log.path))
    return LogSummary(
        log_file=log.path,
        timestamps=LogTimes(*stamps),
        steps=_steps(run),
        step_times=Statistics(*_statistics(run.step_time_s[steady.first :])),
        throughput=Statistics(*_statistics(rates)),
        losses=_losses(run),
        format=log.format,
        runs_in_log=len(log.runs),
        steady_state=SteadyRows(steady.first, steady.last, steady.rule),
        notes=log.notes,
    )


def _losses(run: LogRun) -> LossStatistics:
    losses = run.loss[np.isfinite(run.loss)].tolist()
    not_finite_steps = run.step[run.has_loss & ~np.isfinite(run.loss)].tolist()
    first_step = not_finite_steps[0] if not_finite_steps else math.nan
    return LossStatistics(
        *_statistics(run.loss),
        first=losses[0] if losses else None,
        last=losses[-1] if losses else None,
        not_finite=len(not_finite_steps),
        first_not_finite_step=None if math.isnan(first_step) else int(first_step),
        not_printed=int((~run.has_loss).sum()),
    )


def rate_unit(run: LogRun) -> str | None:
    """The unit of the sequences per second that the program printed."""
    return next((unit for unit in ("sequences/s", "samples/s") if unit in run.rates), None)


def _modified(path: str) -> str | None:
    """When the file was last written; standard input has no such time."""
    file = Path(path)
    return _stamp(datetime.fromtimestamp(file.stat().st_mtime)) if file.is_file() else None


def _steps(run: LogRun) -> StepNumbers:
    numbers = np.unique(run.step[~np.isnan(run.step)]).astype(int).tolist()
    first, last = (numbers[0], numbers[-1]) if numbers else (None, None)
    return StepNumbers(len(numbers), first, last)


def _statistics(printed: FloatArray) -> tuple[float | None, float | None, float | None, int]:
    """Average, least, most and count of the finite values."""
    values = printed[np.isfinite(printed)]
    if not len(values):
        return None, None, None, 0
    return float(values.sum() / len(values)), float(values.min()), float(values.max()), len(values)


def _stamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")
