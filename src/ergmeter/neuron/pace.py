"""How fast the job went, in sequences per second, and who says so.

The trap: a default. Without a throughput the original takes 100 sequences a second, which for an
8B model on one instance is an MFU of 737 %. Here it is then absent, and MFU with it. From a log it
is the steady state: compilation and warm-up are in the first lines, and a mean over all of them is
a mean over something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.records import Reading

if TYPE_CHECKING:
    from ergmeter.importers.log import ParsedLog
    from ergmeter.neuron.job import Job
    from ergmeter.records import Basis


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


def throughput(given: float | None, log: ParsedLog | None, job: Job) -> Throughput:
    """What was given on the command line, else what the log's last run shows."""
    if given is not None:
        return Throughput(given, f"{given:g} sequences/s, as given")
    if log is None:
        return Throughput(None, "no throughput: pass --throughput, or --log-file")
    steady = log.last.steady()
    found, tokens, step = steady.sequences_per_s, steady.tokens_per_s, steady.step_s
    if isinstance(step, Reading) and job.batch_overrules:
        return _by_batch(log, step, job)
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
        return _by_batch(log, step, job)
    return Throughput(None, f"{log.path} shows no throughput ({found.reason}): pass --throughput")


def _by_batch(log: ParsedLog, step: Reading, job: Job) -> Throughput:
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
