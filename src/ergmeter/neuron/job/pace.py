"""How fast the job went, in sequences per second, and who says so.

The trap: a default. Without a throughput the original takes 100 sequences a second, which for an
8B model on one instance is an MFU of 737 %. Here it is then absent, and MFU with it. From a log it
is the steady state: compilation and warm-up are in the first lines, and a mean over all of them is
a mean over something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.timeline import BoundedSeries, bounded_series
from ergmeter.neuron.job.log_figures import rate_unit
from ergmeter.records import Reading
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.log import LogRun, ParsedLog
    from ergmeter.neuron.job.job import NeuronJob
    from ergmeter.records import Basis, FloatArray

# -- pace line -------------------------------------------------------------------------------------
# The pace of a log, row by row: what the throughput of a job is the mean of.
#
# The trap: a curve of something else than the figure beside it. Rows are computed as the figure is:
# samples over time where the log has both, else what was printed, else the batch over the time of a
# step. Rows before the steady state are kept, and said to be left out.


@dataclass(frozen=True)
class PaceLine:
    """Sequences per second over steps. `line.t_s` are step numbers, or rows where none were."""

    line: BoundedSeries
    over: str  # "step", or "row" of the log's last run
    counted_from: float  # the first step or row that is in the figure
    how: str


def pace_line(log: ParsedLog, job: NeuronJob, *, points: int) -> PaceLine:
    """The line of a job's log. Raises NotMeasurable where its rows have no pace."""
    run = log.last
    first = run.steady().first
    found = next(_ways(run, job, first), None)
    if found is None:
        raise NotMeasurable(f"{log.path} has no pace of single steps")
    rates, how = found
    is_numbered = bool(np.isfinite(run.step).all() and (np.diff(run.step) > 0).all())
    places = run.step if is_numbered else np.arange(len(run), dtype=np.float64)
    places_ns = (places * NS_PER_S).astype(np.int64)
    line = bounded_series(Series(places_ns, rates), zero_ns=0, points=points)
    counted_from = float(places[min(first, len(run) - 1)])
    return PaceLine(line, "step" if is_numbered else "row", counted_from, how)


def _ways(run: LogRun, job: NeuronJob, first: int) -> Iterator[tuple[FloatArray, str]]:
    """Ways to a pace that hold for every counted row, in the order of `pace.throughput`."""
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
        known = np.isfinite(rates[first:])
        if known.any() and (known.all() or "printed" in how):
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


# -- pace ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Throughput:
    """Sequences per second of the whole job, or the reason why they are not known."""

    seq_per_s: float | None
    said: str
    basis: Basis = "reported"
    is_from_log: bool = False
    how: str | None = None  # how it was obtained from the log, in a few words
    low: float | None = None  # the edges of its 95 % interval, where the log has enough rows
    high: float | None = None


def throughput(given: float | None, log: ParsedLog | None, job: NeuronJob) -> Throughput:
    """What was given on the command line, else what the log's last run shows."""
    if given is not None:
        return Throughput(given, f"{given:g} sequences/s, as given")
    if log is None:
        return Throughput(None, "no throughput: pass --throughput, or --log-file")
    steady = log.last.steady()
    found, tokens, step = steady.sequences_per_s, steady.tokens_per_s, steady.step_s
    if isinstance(step, Reading) and job.batch_overrules:
        return _pace_by_batch(log, step, job)
    if isinstance(found, Reading):
        said = f"{log.path}: {found.note}"
        return Throughput(
            found.value, said, found.basis, is_from_log=True, how=_how(found),
            low=found.low, high=found.high,
        )  # fmt: skip
    if isinstance(tokens, Reading):
        length = job.seq_len
        said = f"{log.path}, in sequences of {length}: {tokens.note}"
        how = f"{_how(tokens)}, in sequences of {length}"
        low, high = (None if end is None else end / length for end in (tokens.low, tokens.high))
        return Throughput(
            tokens.value / length, said, tokens.basis, is_from_log=True, how=how,
            low=low, high=high,
        )  # fmt: skip
    if isinstance(step, Reading):
        return _pace_by_batch(log, step, job)
    return Throughput(None, f"{log.path} shows no throughput ({found.reason}): pass --throughput")


def _pace_by_batch(log: ParsedLog, step: Reading, job: NeuronJob) -> Throughput:
    """The batch over the log's time of a step."""
    batch = f"{job.batch_size} sequence{'' if job.batch_size == 1 else 's'} a step"
    said = f"{log.path}, with {batch} ({job.batch_from}): {step.note}"
    how = f"{_how(step)}, with {batch} ({job.batch_from})"
    # The shortest step makes the most sequences a second; one that may take no time, any number.
    low, high = (job.batch_size / end if end else None for end in (step.high, step.low))
    return Throughput(
        job.batch_size / step.value, said, step.basis, is_from_log=True, how=how,
        low=low, high=high,
    )  # fmt: skip


def _how(found: Reading) -> str:
    """A reading's note without the rule of the warm-up, which stands elsewhere."""
    return (found.note or "").partition(";")[0]
