"""Do the log, the YAML and the command line speak of the same training, and who is believed?

The trap: MFU takes its sequences per second from the log and the length of a sequence from the
YAML. Where the log is of another run (2048 tokens a sequence, the YAML 4096) each is right and the
product is wrong by a factor of two. So what the log says of its own steps is held against what was
configured. What was measured beats what was configured, an option beats both, and every difference
is a finding that says which was taken and what takes another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.neuron.advice import AdviceFinding
from ergmeter.neuron.job.job import micro_batches
from ergmeter.neuron.job.log_figures import rate_unit
from ergmeter.neuron.job.pace import throughput
from ergmeter.records import Reading
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.log import LogRun, ParsedLog, Steady
    from ergmeter.neuron.job.job import NeuronJob
    from ergmeter.neuron.job.pace import Throughput
    from ergmeter.records import FloatArray

_ALIKE_FRAC = 0.05
_LOG = "the log"
_ASKED = "what was given is taken, over the log's time of a step"


@dataclass(frozen=True, slots=True)
class _Each:
    """So much of one thing for each of another, by the log."""

    mean: float
    whole: int | None  # where all rows agree on it; lengths without padding do not
    is_exact: bool  # the rows agree to the last digit

    def contradicts(self, configured: int) -> bool:
        return self.mean != configured if self.is_exact else not _alike(self.mean, configured)


def settled(job: NeuronJob, log: ParsedLog) -> tuple[NeuronJob, list[AdviceFinding]]:
    """The job with the log's lengths and batch where they differ from the YAML's, and what is said
    of it."""
    run = log.last
    steady = run.steady()
    job, texts = _length(job, run, steady)
    if run.of_one_rank:
        return replace(job, batch_overrules=True), [
            AdviceFinding("log_disagrees", t) for t in texts
        ]
    samples = _each(run.samples, run.covered, run, steady)
    if samples is not None:
        job, more = _batch(job, samples)
    else:
        job, more = _tokens(job, _each(run.tokens, run.covered, run, steady))
        if job.batch_from == "--batch-size" and _timed(run, steady, job) is not None:
            job = replace(job, batch_overrules=True)
    return job, [AdviceFinding("log_disagrees", text) for text in (*texts, *more)]


def about_log(log: ParsedLog, job: NeuronJob, pace: Throughput) -> list[AdviceFinding]:
    """Where the log's paces differ: printed, by its clock, and as given."""
    run = log.last
    steady = run.steady()
    if not pace.is_from_log:
        texts = _declared_differences(log, job, pace)
    elif not run.of_one_rank and _each(run.samples, run.covered, run, steady) is not None:
        texts = _clock(run, steady, job, pace)
    else:
        texts = _step_times(run, steady, job)
    return [AdviceFinding("log_disagrees", text) for text in texts]


def is_printed(log: ParsedLog, job: NeuronJob, pace: Throughput) -> bool:
    """Whether the throughput is a figure that somebody wrote down, and not sequences over time."""
    if not pace.is_from_log:
        return True
    run = log.last
    if job.batch_overrules or rate_unit(run) is None:
        return False
    return _each(run.samples, run.covered, run, run.steady()) is None


def _length(job: NeuronJob, run: LogRun, steady: Steady) -> tuple[NeuronJob, list[str]]:
    """Tokens over sequences, counted or as rates."""
    length = _each(run.tokens, run.samples, run, steady)
    unit = rate_unit(run)
    if length is None and unit is not None and "tokens/s" in run.rates:
        length = _each(run.rates["tokens/s"], run.rates[unit], run, steady)
    if length is None or not length.contradicts(job.seq_len):
        return job, []
    said = (
        f"the log says {_count(length.mean)} tokens a sequence, {job.seq_len_from} {job.seq_len:,}:"
    )
    if job.seq_len_from == "--seq-len":
        return job, [f"{said} what was given is taken"]
    if length.whole is None:
        why = "the log's vary from line to line, as without padding"
        return job, [f"{said} the YAML's is taken, as {why}; --seq-len takes another"]
    taken = replace(job, seq_len=length.whole, seq_len_from=_LOG)
    return taken, [f"{said} the log's is taken, as what was measured; --seq-len takes another"]


def _batch(job: NeuronJob, samples: _Each) -> tuple[NeuronJob, list[str]]:
    """Sequences of a step, counted."""
    if not samples.contradicts(job.batch_size):
        return job, []
    said = f"the log says {_sequences(samples.mean)} a step, {job.batch_from} {job.batch_size:,}:"
    if job.batch_from == "--batch-size":
        return replace(job, batch_overrules=True), [f"{said} {_ASKED}"]
    if samples.whole is None:
        why = "the log's vary from line to line"
        return job, [f"{said} the YAML's is shown, as {why}; throughput is the log's"]
    taken = _with_batch(job, samples.whole)
    return taken, [f"{said} the log's is taken, as what was measured; --batch-size takes another"]


def _tokens(job: NeuronJob, tokens: _Each | None) -> tuple[NeuronJob, list[str]]:
    """Tokens of a step, where the log does not say how many sequences they are."""
    whole = job.batch_size * job.seq_len
    if tokens is None or not tokens.contradicts(whole):
        return job, []
    times = whole / tokens.mean
    ranks = f" Are they those of one of {times:.0f} ranks?" if times > 1 and times % 1 == 0 else ""
    said = (
        f"the log says {_count(tokens.mean)} tokens a step, while {_sequences(job.batch_size)} of"
        f" {job.seq_len:,} ({job.batch_from}, {job.seq_len_from}) make {whole:,}"
    )
    if job.batch_from == "--batch-size":
        return replace(job, batch_overrules=True), [f"{said}: {_ASKED}"]
    said += f": the log's are taken, as what was measured.{ranks} --batch-size takes another"
    if tokens.whole is None or tokens.whole % job.seq_len:
        return job, [said]
    return _with_batch(job, tokens.whole // job.seq_len), [said]


def _with_batch(job: NeuronJob, batch: int) -> NeuronJob:
    return replace(
        job,
        batch_size=batch,
        batch_from=_LOG,
        micro_batches=micro_batches(batch, job.at_once),
    )


def _clock(run: LogRun, steady: Steady, job: NeuronJob, pace: Throughput) -> Iterator[str]:
    """A program that prints another throughput than its own samples over its own clock."""
    printed, used = _printed(run, steady), steady.sequences_per_s
    if not printed or not isinstance(used, Reading) or _alike(printed, used.value):
        return
    said = (
        f"the log prints {significant(printed)} sequences/s on average, while its samples over its"
        f" own clock come to {significant(used.value)}"
    )
    if job.batch_overrules and pace.seq_per_s is not None:
        taken = significant(pace.seq_per_s)
        yield f"{said}; {taken} is taken, as --batch-size was given: that batch over its step time"
    else:
        yield f"{said}, which is taken; --throughput takes another"


def _step_times(run: LogRun, steady: Steady, job: NeuronJob) -> Iterator[str]:
    """A printed throughput against the batch over the time of a step."""
    found = _timed(run, steady, job)
    if found is None:
        return
    printed, step_s = found
    said = (
        f"the log prints {significant(printed)} sequences/s, while {_sequences(job.batch_size)}"
        f" ({job.batch_from}) in its {significant(step_s)} s a step make"
        f" {significant(job.batch_size / step_s)}"
    )
    if not job.batch_overrules:
        yield f"{said}: what it prints is taken; --batch-size or --throughput takes another"
    elif job.batch_from == "--batch-size":
        yield f"{said}, which is taken, as --batch-size was given; --throughput takes another"
    else:
        yield f"{said}, which is taken, as each rank prints its own; --throughput takes another"


def _timed(run: LogRun, steady: Steady, job: NeuronJob) -> tuple[float, float] | None:
    """The printed throughput and the time of a step, where the batch makes another of that."""
    printed, step = _printed(run, steady), steady.step_s
    if not printed or not isinstance(step, Reading):
        return None
    is_alike = _alike(printed, job.batch_size / step.value)
    return None if is_alike else (printed, step.value)


def _declared_differences(log: ParsedLog, job: NeuronJob, pace: Throughput) -> Iterator[str]:
    """--throughput against what the log would have said."""
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
    found = _each(rates, np.ones_like(rates), run, steady)
    return None if found is None else found.mean


def _each(amounts: FloatArray, of: FloatArray, run: LogRun, steady: Steady) -> _Each | None:
    """The one over the other after the warm-up, over the rows that have both."""
    rows = slice(steady.first, steady.last)
    amounts, of = amounts[rows], of[rows]
    known = np.isfinite(amounts) & np.isfinite(of) & (amounts > 0) & (of > 0)
    if not known.any():
        return None
    each = amounts[known] / of[known]
    is_exact = bool((each == each[0]).all()) and float(each[0]).is_integer()
    mean = float(each[0] if is_exact else amounts[known].sum() / of[known].sum())
    # Means of many lines differ by less than the lines do.
    alike_frac = _ALIKE_FRAC / math.sqrt(run.lines_per_row)
    agree = is_exact or bool((np.abs(each / mean - 1) <= alike_frac).all())
    return _Each(mean, max(1, round(mean)) if agree else None, is_exact)


def _alike(one: float, other: float) -> bool:
    return abs(one / other - 1) <= _ALIKE_FRAC


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else significant(value)


def _sequences(count: float) -> str:
    return f"{_count(count)} sequence{'' if count == 1 else 's'}"
