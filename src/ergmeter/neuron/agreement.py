"""Do the log, the YAML and the command line speak of the same training?

The trap: MFU takes its sequences per second from the log and the length of a sequence from the
YAML. Where the log is of another run (2048 tokens a sequence, the YAML 4096) each is right and the
product is wrong by a factor of two. So what the log says of its own steps is held against what the
figures were made with, and every difference is a finding with the option that settles it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.neuron.advice import Finding
from ergmeter.neuron.logged import printed_rates
from ergmeter.neuron.pace import throughput
from ergmeter.records import Reading
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.log import LogRun, ParsedLog
    from ergmeter.importers.steady import Steady
    from ergmeter.neuron.job import Job
    from ergmeter.neuron.pace import Throughput
    from ergmeter.records import FloatArray

_ALIKE_FRAC = 0.05


def about_log(log: ParsedLog, job: Job, pace: Throughput) -> list[Finding]:
    """What the log's last run says otherwise."""
    run = log.last
    steady = run.steady()
    samples = _each(run.samples, run.covered, steady)
    texts = [
        *_lengths(run, steady, job),
        *(_batches(samples, job) if samples else _tokens(run, steady, job)),
        *(_clock(run, steady) if samples else _step_times(run, steady, job)),
        *_given(log, job, pace),
    ]
    return [Finding("log_disagrees", text) for text in texts]


def _lengths(run: LogRun, steady: Steady, job: Job) -> Iterator[str]:
    """Tokens over sequences, counted or as rates."""
    length = _each(run.tokens, run.samples, steady)
    rates = printed_rates(run)
    if length is None and rates is not None and "tokens/s" in run.rates:
        length = _each(run.rates["tokens/s"], rates, steady)
    if length and not _alike(length, job.seq_len):
        yield (
            f"the log says {_count(length)} tokens a sequence, {job.seq_len_from}"
            f" {job.seq_len:,}, which FLOPs are counted for: --seq-len takes another"
        )


def _batches(samples: float, job: Job) -> Iterator[str]:
    if not _alike(samples, job.batch_size):
        yield (
            f"the log says {_count(samples)} sequences a step, {job.batch_from}"
            f" {job.batch_size:,}: --batch-size takes another"
        )


def _tokens(run: LogRun, steady: Steady, job: Job) -> Iterator[str]:
    """Tokens of a step, where the log does not say how many sequences they are."""
    tokens, whole = _each(run.tokens, run.covered, steady), job.batch_size * job.seq_len
    if not tokens or _alike(tokens, whole):
        return
    times = whole / tokens
    ranks = f" Are they those of one of {times:.0f} ranks?" if times > 1 and times % 1 == 0 else ""
    yield (
        f"the log says {_count(tokens)} tokens a step, while {job.batch_size:,} sequences of"
        f" {job.seq_len:,} are {whole:,}.{ranks} --throughput, --batch-size and --seq-len take"
        " others"
    )


def _clock(run: LogRun, steady: Steady) -> Iterator[str]:
    """A program that prints another throughput than its own samples over its own clock."""
    printed, used = _printed(run, steady), steady.sequences_per_s
    if printed and isinstance(used, Reading) and not _alike(printed, used.value):
        yield (
            f"the log prints {significant(printed)} sequences/s on average, while its samples over"
            f" its own clock come to {significant(used.value)}, which is taken unless --throughput"
            " says otherwise"
        )


def _step_times(run: LogRun, steady: Steady, job: Job) -> Iterator[str]:
    """A printed throughput against the batch over the time of a step."""
    printed, step = _printed(run, steady), steady.step_s
    if not printed or not isinstance(step, Reading):
        return
    timed = job.batch_size / step.value
    if not _alike(printed, timed):
        yield (
            f"the log prints {significant(printed)} sequences/s, while {job.batch_size:,} sequences"
            f" ({job.batch_from}) in its {significant(step.value)} s a step are"
            f" {significant(timed)}: --batch-size or --throughput takes another"
        )


def _given(log: ParsedLog, job: Job, pace: Throughput) -> Iterator[str]:
    """--throughput against what the log would have said."""
    if pace.is_from_log or pace.seq_per_s is None:
        return
    logged = throughput(None, log, seq_len=job.seq_len, batch_size=job.batch_size).seq_per_s
    if logged and not _alike(pace.seq_per_s, logged):
        yield (
            f"--throughput is {significant(pace.seq_per_s)} sequences/s and is taken; the log"
            f" comes to {significant(logged)}"
        )


def _printed(run: LogRun, steady: Steady) -> float | None:
    rates = printed_rates(run)
    return None if rates is None else _each(rates, np.ones_like(rates), steady)


def _each(amounts: FloatArray, of: FloatArray, steady: Steady) -> float | None:
    """The one over the other after the warm-up, over the rows that have both."""
    rows = slice(steady.first, steady.last)
    amounts, of = amounts[rows], of[rows]
    known = np.isfinite(amounts) & np.isfinite(of) & (of > 0)
    return float(amounts[known].sum() / of[known].sum()) if known.any() else None


def _alike(one: float, other: float) -> bool:
    return abs(one / other - 1) <= _ALIKE_FRAC


def _count(value: float) -> str:
    return f"{value:,.0f}"
