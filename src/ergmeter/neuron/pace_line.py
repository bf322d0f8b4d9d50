"""The pace of a log, row by row: what the throughput of a job is the mean of.

The trap: a curve of something else than the figure beside it. Rows are computed as the figure is:
samples over time where the log has both, else what was printed, else the batch over the time of a
step. Rows before the steady state are kept, and said to be left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.timeline import Line, bounded
from ergmeter.neuron.logged import rate_unit
from ergmeter.runlog.joining import Series
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.log import LogRun, ParsedLog
    from ergmeter.neuron.job import Job
    from ergmeter.records import FloatArray


@dataclass(frozen=True)
class PaceLine:
    """Sequences per second over steps. `line.t_s` are step numbers, or rows where none were."""

    line: Line
    over: str  # "step", or "row" of the log's last run
    counted_from: float  # the first step or row that is in the figure
    how: str


def pace_line(log: ParsedLog, job: Job, *, points: int) -> PaceLine:
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
    line = bounded(Series(places_ns, rates), zero_ns=0, points=points)
    counted_from = float(places[min(first, len(run) - 1)])
    return PaceLine(line, "step" if is_numbered else "row", counted_from, how)


def _ways(run: LogRun, job: Job, first: int) -> Iterator[tuple[FloatArray, str]]:
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


def _by_batch(run: LogRun, job: Job) -> Iterator[tuple[FloatArray, str]]:
    batch = np.full(len(run), float(job.batch_size))
    yield _over(batch * run.covered, run.period_s), f"{job.batch_size} sequences over a step's time"
    yield _over(batch, run.step_time_s), f"{job.batch_size} sequences over the printed step time"


def _over(amounts: FloatArray, seconds: FloatArray) -> FloatArray:
    """Amounts per second; NaN where either is not known, or no time passed."""
    rates = np.full(len(amounts), np.nan)
    np.divide(amounts, seconds, out=rates, where=np.isfinite(seconds) & (seconds > 0))
    return rates
