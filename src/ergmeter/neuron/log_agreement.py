"""Differences between the log, the YAML and the command line, and which of them is used.

MFU takes sequences per second from the log and the sequence length from the YAML. If the log is of
another run, each is right and the product is wrong. So the log's own steps are compared with what
was configured. A measured value replaces a configured one, an option replaces both. Every
difference is a finding that names the value used and the option that changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.neuron.throughput import Throughput, rate_unit, throughput
from ergmeter.neuron.training_job import NeuronJob, micro_batches
from ergmeter.records import FloatArray, Reading
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.log import LogRun, ParsedLog, Steady

_ALIKE_FRAC = 0.05
_LOG = "the log"
_ASKED = "what was given is taken, over the log's time of a step"


@dataclass(frozen=True, slots=True)
class _Each:
    """A ratio of two columns of the log, such as tokens per sequence."""

    mean: float
    rounded: int | None  # where all rows agree on it; lengths without padding do not
    is_exact: bool  # the rows agree to the last digit

    def contradicts(self, configured: int) -> bool:
        return self.mean != configured if self.is_exact else not _alike(self.mean, configured)


def reconcile(job: NeuronJob, log: ParsedLog) -> tuple[NeuronJob, list[str]]:
    """The job with the log's lengths and batch where they differ from the YAML's, and what is said
    of it."""
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
    """Findings on throughputs that differ: printed, by the log's clock, as given."""
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
    """Compares the log's tokens per sequence with the configured length."""
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
    """Compares the log's sequences per step with the configured batch."""
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
    """Compares the log's tokens per step, for logs without sequence counts."""
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
    """Finding: the printed throughput differs from samples over the log's clock."""
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
    """Finding: the printed throughput differs from the batch over the step time."""
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
    """Printed throughput and step time, if they disagree with the batch; else None."""
    printed, step = _printed(run, steady), steady.step_s
    if not printed or not isinstance(step, Reading):
        return None
    is_alike = _alike(printed, job.batch_size / step.value)
    return None if is_alike else (printed, step.value)


def _declared_differences(log: ParsedLog, job: NeuronJob, pace: Throughput) -> Iterator[str]:
    """Finding: --throughput differs from the log's."""
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
    """`amounts` over `of` after the warm-up, over the rows that have both."""
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
