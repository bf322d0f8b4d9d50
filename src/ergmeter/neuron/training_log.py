"""Throughput and statistics from a job's log, and differences between the log and the YAML.

Without a throughput the original script assumes 100 sequences a second: an MFU of 737 % for an 8B
model on one instance. Here throughput and MFU are then missing. A log's throughput is that of the
steady state: its first lines have compilation and warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.neuron.training_job import NeuronJob, micro_batches
from ergmeter.records import FloatArray, Missing, Reading, Result, mapped
from ergmeter.units import number_of, significant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.log import LogRun, ParsedLog, Steady


_UNIT = "samples/s"  # a sample of these jobs is a sequence


@dataclass(frozen=True, slots=True)
class Throughput:
    """Sequences per second of the job, the catalogue's `throughput.samples_per_s`."""

    result: Result
    formula: str = "as given by --throughput"
    is_from_log: bool = False

    @property
    def seq_per_s(self) -> float | None:
        """The throughput in sequences per second; None if it is missing."""
        return self.result.value if isinstance(self.result, Reading) else None

    @property
    def source(self) -> str:
        """The source of the throughput, or the reason why it is missing."""
        return self.result.note if isinstance(self.result, Reading) else self.result.reason


def throughput(declared: float | None, log: ParsedLog | None, job: NeuronJob) -> Throughput:
    """Return the throughput given on the command line, else that of the log's last run."""
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
    """Return the throughput as the batch size divided by the log's step time."""
    batch = f"{number_of(job.batch_size, 'sequence')} a step"
    # The shortest step gives the highest rate; a step that may take 0 s gives no upper limit.
    low, high = (job.batch_size / step_s if step_s else None for step_s in (step.high, step.low))
    rate = replace(step, value=job.batch_size / step.value, low=low, high=high)
    return _logged(log, rate, f", with {batch} ({job.batch_from})")


def _logged(log: ParsedLog, rate: Reading, detail: str = "") -> Throughput:
    """Return a log's throughput with its source as note."""
    how = rate.note.partition(";")[0]  # without the warm-up rule
    note = f"{log.path}{detail}: {rate.note}"
    return Throughput(replace(rate, unit=_UNIT, note=note), f"{how}{detail}", is_from_log=True)


# Statistics of a log's last run; rates and times are those after the warm-up. Field names and their
# order are those of the original script's JSON.


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the finite values that a log printed."""

    average: float | None = None
    min: float | None = None
    max: float | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class LossStatistics(Statistics):
    """Statistics of losses; `nan` or `inf` (`not_finite`) and absent losses are counted too."""

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
    """The rows after the warm-up, which are counted, and the rule that found them."""

    first_row: int
    last_row: int
    rule: str


@dataclass(frozen=True, slots=True)
class LogSummary:
    """Statistics of the last run in a log."""

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
    """Return the statistics of the last run in a log."""
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
    """Return the unit under which the log has sequences per second, or None."""
    return next((unit for unit in run.sequence_rates if unit in run.rates), None)


def _modified(path: str) -> str | None:
    """Return when the file was last written; None for standard input."""
    file = Path(path)
    return _stamp(datetime.fromtimestamp(file.stat().st_mtime)) if file.is_file() else None


def _steps(run: LogRun) -> StepNumbers:
    numbers = np.unique(run.step[~np.isnan(run.step)]).astype(int).tolist()
    first, last = (numbers[0], numbers[-1]) if numbers else (None, None)
    return StepNumbers(len(numbers), first, last)


def _statistics(printed: FloatArray) -> tuple[float | None, float | None, float | None, int]:
    """Return average, min, max and number of the finite values."""
    values = printed[np.isfinite(printed)]
    if not len(values):
        return None, None, None, 0
    return float(values.sum() / len(values)), float(values.min()), float(values.max()), len(values)


def _stamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


# Differences between the log, the YAML and the command line, and which value is used. MFU uses
# sequences per second from the log and the sequence length from the YAML. If the log is of another
# run, their product is wrong. So the log's own steps are compared with the configuration. A
# measured value replaces a configured one; an option replaces both. Every difference is a finding
# that names the value used and the option that changes it.


_ALIKE_FRAC = 0.05
_LOG = "the log"
_ASKED = "what was given is taken, over the log's time of a step"


@dataclass(frozen=True, slots=True)
class _Each:
    """A ratio of two columns of the log, such as tokens per sequence."""

    mean: float
    rounded: int | None  # the mean if all rows agree; sequence lengths without padding vary
    is_exact: bool  # the rows agree to the last digit

    def contradicts(self, configured: int) -> bool:
        return self.mean != configured if self.is_exact else not _alike(self.mean, configured)


def reconcile(job: NeuronJob, log: ParsedLog) -> tuple[NeuronJob, list[str]]:
    """Return the job with the log's sequence length and batch, and a text for each difference."""
    run = log.last
    steady = run.steady()
    job, texts = _length(job, run, steady)
    if run.of_one_rank:
        return replace(job, batch_overrules=True), texts
    samples = _each(run.samples, run.covered, steady)
    if samples is not None:
        job, more = _batch(job, samples)
    else:
        job, more = _tokens(job, _each(run.tokens, run.covered, steady))
        if job.batch_from == "--batch-size" and _timed(run, steady, job) is not None:
            job = replace(job, batch_overrules=True)
    return job, [*texts, *more]


def about_log(log: ParsedLog, job: NeuronJob, pace: Throughput) -> Iterator[str]:
    """Return findings on throughputs that differ: printed, from the log's times, or given."""
    run = log.last
    steady = run.steady()
    if not pace.is_from_log:
        return _declared_differences(log, job, pace)
    if not run.of_one_rank and _each(run.samples, run.covered, steady) is not None:
        return _clock(run, steady, job, pace)
    return _step_times(run, steady, job)


def is_printed(log: ParsedLog, job: NeuronJob, pace: Throughput) -> bool:
    """True if the throughput was printed or given, not computed from sequences over time."""
    if not pace.is_from_log:
        return True
    run = log.last
    if job.batch_overrules or rate_unit(run) is None:
        return False
    return _each(run.samples, run.covered, run.steady()) is None


def _length(job: NeuronJob, run: LogRun, steady: Steady) -> tuple[NeuronJob, list[str]]:
    """Compare the log's tokens per sequence with the configured length; return job and findings."""
    length = _each(run.tokens, run.samples, steady)
    unit = rate_unit(run)
    if length is None and unit is not None and "tokens/s" in run.rates:
        length = _each(run.rates["tokens/s"], run.rates[unit], steady)
    if length is None or not length.contradicts(job.seq_len):
        return job, []
    text = (
        f"the log says {_count(length.mean)} tokens a sequence, {job.seq_len_from} {job.seq_len:,}:"
    )
    if job.seq_len_from == "--seq-len":
        return job, [f"{text} what was given is taken"]
    if length.rounded is None:
        why = "the log's vary from line to line, as without padding"
        return job, [f"{text} the YAML's is taken, as {why}; --seq-len takes another"]
    taken = replace(job, seq_len=length.rounded, seq_len_from=_LOG)
    return taken, [f"{text} the log's is taken, as what was measured; --seq-len takes another"]


def _batch(job: NeuronJob, samples: _Each) -> tuple[NeuronJob, list[str]]:
    """Compare the log's sequences per step with the configured batch; return job and findings."""
    if not samples.contradicts(job.batch_size):
        return job, []
    text = f"the log says {_sequences(samples.mean)} a step, {job.batch_from} {job.batch_size:,}:"
    if job.batch_from == "--batch-size":
        return replace(job, batch_overrules=True), [f"{text} {_ASKED}"]
    if samples.rounded is None:
        why = "the log's vary from line to line"
        return job, [f"{text} the YAML's is shown, as {why}; throughput is the log's"]
    taken = _with_batch(job, samples.rounded)
    return taken, [f"{text} the log's is taken, as what was measured; --batch-size takes another"]


def _tokens(job: NeuronJob, tokens: _Each | None) -> tuple[NeuronJob, list[str]]:
    """Compare the log's tokens per step with the configured ones; for logs without sequences."""
    configured = job.batch_size * job.seq_len
    if tokens is None or not tokens.contradicts(configured):
        return job, []
    times = configured / tokens.mean
    ranks = f" Are they those of one of {times:.0f} ranks?" if times > 1 and times % 1 == 0 else ""
    text = (
        f"the log says {_count(tokens.mean)} tokens a step, while {_sequences(job.batch_size)} of"
        f" {job.seq_len:,} ({job.batch_from}, {job.seq_len_from}) make {configured:,}"
    )
    if job.batch_from == "--batch-size":
        return replace(job, batch_overrules=True), [f"{text}: {_ASKED}"]
    text += f": the log's are taken, as what was measured.{ranks} --batch-size takes another"
    if tokens.rounded is None or tokens.rounded % job.seq_len:
        return job, [text]
    return _with_batch(job, tokens.rounded // job.seq_len), [text]


def _with_batch(job: NeuronJob, batch: int) -> NeuronJob:
    micro = micro_batches(batch, job.at_once)
    return replace(job, batch_size=batch, batch_from=_LOG, micro_batches=micro)


def _clock(run: LogRun, steady: Steady, job: NeuronJob, pace: Throughput) -> Iterator[str]:
    """Yield a finding if the printed throughput differs from samples over the log's own times."""
    printed, used = _printed(run, steady), steady.sequences_per_s
    if not printed or not isinstance(used, Reading) or _alike(printed, used.value):
        return
    text = (
        f"the log prints {significant(printed)} sequences/s on average, while its samples over its"
        f" own clock come to {significant(used.value)}"
    )
    if job.batch_overrules and pace.seq_per_s is not None:
        taken = significant(pace.seq_per_s)
        yield f"{text}; {taken} is taken, as --batch-size was given: that batch over its step time"
    else:
        yield f"{text}, which is taken; --throughput takes another"


def _step_times(run: LogRun, steady: Steady, job: NeuronJob) -> Iterator[str]:
    """Yield a finding if the printed throughput differs from batch size over step time."""
    differing = _timed(run, steady, job)
    if differing is None:
        return
    printed, step_s = differing
    text = (
        f"the log prints {significant(printed)} sequences/s, while {_sequences(job.batch_size)}"
        f" ({job.batch_from}) in its {significant(step_s)} s a step make"
        f" {significant(job.batch_size / step_s)}"
    )
    if not job.batch_overrules:
        yield f"{text}: what it prints is taken; --batch-size or --throughput takes another"
        return
    is_given = job.batch_from == "--batch-size"
    why = "--batch-size was given" if is_given else "each rank prints its own"
    yield f"{text}, which is taken, as {why}; --throughput takes another"


def _timed(run: LogRun, steady: Steady, job: NeuronJob) -> tuple[float, float] | None:
    """Return the printed throughput and the step time if their product is not the batch size."""
    printed, step = _printed(run, steady), steady.step_s
    if not printed or not isinstance(step, Reading):
        return None
    is_alike = _alike(printed, job.batch_size / step.value)
    return None if is_alike else (printed, step.value)


def _declared_differences(log: ParsedLog, job: NeuronJob, pace: Throughput) -> Iterator[str]:
    """Yield a finding if --throughput differs from the log's throughput."""
    if pace.seq_per_s is None:
        return
    logged = throughput(None, log, job).seq_per_s
    if logged and not _alike(pace.seq_per_s, logged):
        yield (
            f"--throughput is {significant(pace.seq_per_s)} sequences/s and is taken; the log"
            f" comes to {significant(logged)}"
        )


def _printed(run: LogRun, steady: Steady) -> float | None:
    unit = rate_unit(run)
    if unit is None:
        return None
    rates = run.rates[unit]
    rate = _each(rates, np.ones_like(rates), steady)
    return None if rate is None else rate.mean


def _each(amounts: FloatArray, of: FloatArray, steady: Steady) -> _Each | None:
    """Return the ratio of two columns after the warm-up, from the rows that have both values."""
    rows = slice(steady.first, steady.last)
    amounts, of = amounts[rows], of[rows]
    has_both = np.isfinite(amounts) & np.isfinite(of) & (amounts > 0) & (of > 0)
    if not has_both.any():
        return None
    each = amounts[has_both] / of[has_both]
    is_exact = bool((each == each[0]).all()) and float(each[0]).is_integer()
    mean = float(each[0] if is_exact else amounts[has_both].sum() / of[has_both].sum())
    agree = is_exact or bool((np.abs(each / mean - 1) <= _ALIKE_FRAC).all())
    return _Each(mean, max(1, round(mean)) if agree else None, is_exact)


def _alike(value: float, other: float) -> bool:
    return abs(value / other - 1) <= _ALIKE_FRAC


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else significant(value)


def _sequences(count: float) -> str:
    return f"{_count(count)} sequence{'' if count == 1 else 's'}"
