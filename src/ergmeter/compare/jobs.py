"""Metrics of a job: all runs of one training that was stopped and resumed.

Goodput is the time in steps whose work was kept, over the time from the first run's start to the
last one's end. A job loses the steps after the last checkpoint, which are repeated; loading and
compiling at each start; evaluation, checkpoints and waits between steps; and the time between runs.

Runs can't simply be added up: a resumed run repeats the steps after the checkpoint, and the time
between runs is part of none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np

from ergmeter.compare.time_to_loss import SpanEvidence
from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.tokens import need_all_rows, steps_in
from ergmeter.metrics.definitions.tokens import tokens as tokens_of_rows
from ergmeter.metrics.evidence.ranks import missing_ranks_note
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.records import (
    Basis,
    FloatArray,
    Reading,
    Result,
    is_above,
    mapped,
    or_missing,
    or_none,
    weakest,
)
from ergmeter.runlog.identity import job_of
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S, duration, listed_by

# Facts that a training declares; a resumed run has the same values as the run before it.
_SAME_WORK = ("model", "dataset", "data_sha256", "tuning")


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job. Times are wall-clock times."""

    run: Run
    evidence: SpanEvidence
    start_s: float
    end_s: float

    @classmethod
    def of(cls, run: Run, settings: Settings | None = None) -> JobRun:
        """Wrap a run as part of a job. `settings` are added to those that the run declared."""
        evidence = SpanEvidence(run, settings=settings)
        zero_ns = run.wall_zero_ns
        start_ns = end_ns = run.start_ns
        with suppress(NotMeasurable):  # the run was cut off before its first record
            start_ns, end_ns = evidence.watched.start_ns, evidence.watched.end_ns
        return cls(run, evidence, (zero_ns + start_ns) / NS_PER_S, (zero_ns + end_ns) / NS_PER_S)

    @contextmanager
    def named_reasons(self) -> Iterator[None]:
        """Prefix NotMeasurable reasons with the run's name."""
        try:
            yield
        except NotMeasurable as error:
            raise NotMeasurable(f"{self.run.path.name}: {error}") from error

    @property
    def has_steps(self) -> bool:
        """True if the run reached its first step; otherwise only its time counts."""
        return len(self.run.trainings) > 1 or self.evidence.has_work

    @property
    def rank(self) -> Steps:
        """The training steps of the rank with the most."""
        with self.named_reasons():
            return self.evidence.work.longest

    def first_step(self) -> int:
        """The number of the run's first step."""
        return int(self._numbers()[0])

    def last_step(self) -> int:
        """The highest step number of the run."""
        return int(self._numbers().max())

    def kept_steps(self, before: int | None) -> Steps:
        """The rows of the run's steps that no later run repeated.

        `before`: the step at which a later run resumed; None for the last run.
        """
        return self.rank if before is None else self.rank.where(self._numbers() < before)

    def goes_on_from(self, earlier: JobRun) -> bool:
        """True if this run may have resumed `earlier`: same work, later, from a step it reached."""
        numbers = self._numbers()
        row_steps = max([self.rank.step_counts[0], *np.diff(numbers[:2])])
        if self.start_s < earlier.end_s or numbers[0] - row_steps > earlier.last_step():
            return False
        work, before = self.run.workload, earlier.run.workload
        stated = [name for name in _SAME_WORK if name in work and name in before]
        return all(work[name] == before[name] for name in stated)

    def _numbers(self) -> FloatArray:
        numbers = self.rank["index"]
        if np.isnan(numbers).any():
            raise NotMeasurable(f"the steps of {self.run.path.name} have no numbers")
        return numbers


def job_id(run: Run) -> str | None:
    """The id of a run's job, or None. Each program in an allocation has a job id of its own."""
    job = job_of(run.settings.get("job"), run.header)
    if job is None or run.settings.get("job"):
        return job
    return f"{job}/{run.header.get('name') or run.path.name}"


def jobs(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by job, in the order of their start; runs without a job are left out."""
    by_job = listed_by((name, run) for run in runs if (name := job_id(run)) is not None)
    return {name: sorted(parts, key=lambda run: run.wall_zero_ns + run.start_ns)
            for name, parts in by_job.items()}  # fmt: skip


def resumed_jobs(parts: Iterable[JobRun]) -> list[list[JobRun]]:
    """The resumed jobs among runs with one job's id, each in the order of their start.

    Runs that were declared as one job are one. Repeats within one allocation share its job id too.
    So a run begins another job if it starts at or below the first step of the runs before it, or
    can't have resumed the last of them.
    """
    ordered = sorted(parts, key=lambda part: part.start_s)
    if ordered and ordered[0].run.settings.get("job"):
        return [ordered] if len(ordered) > 1 else []
    by_start: list[list[JobRun]] = []
    resumed: list[list[JobRun]] = []
    lowest: int | None = None
    last: JobRun | None = None  # with steps
    for part in ordered:
        first = or_none(part.first_step) if part.has_steps else None
        goes_on = (
            last is not None
            and lowest is not None
            and first is not None
            and first > lowest
            and part.goes_on_from(last)
        )
        if by_start and (goes_on or not part.has_steps):
            by_start[-1].append(part)
            resumed += [by_start[-1]] if goes_on and by_start[-1] not in resumed else []
        else:
            by_start.append([part])
            lowest = first
        last = part if part.has_steps else last
    return resumed


def job_results(parts: Sequence[JobRun]) -> dict[str, Result]:
    """The metrics of a job by key."""
    metrics = (wall_s, down_s, goodput_frac, steps, lost_steps, tokens, tokens_per_s, energy_j)
    return {f"job.{metric.__name__}": or_missing(metric, parts) for metric in metrics}


def wall_s(parts: Sequence[JobRun]) -> Reading:
    """The time from the first run's start to the last run's end."""
    note = f"{_runs(parts)}, the time between them included"
    return Reading(_wall_s(parts), "s", "measured", note=note)


def down_s(parts: Sequence[JobRun]) -> Reading:
    """The time between the runs."""
    up_s = reached_s = 0.0
    for part in sorted(parts, key=lambda run: run.start_s):
        up_s += max(0.0, part.end_s - max(part.start_s, reached_s))
        reached_s = max(reached_s, part.end_s)
    return Reading(_wall_s(parts) - up_s, "s", "measured", note=f"between {_runs(parts)}")


def goodput_frac(parts: Sequence[JobRun]) -> Reading:
    """Share of the wall time in steps whose work was kept."""
    kept_s = sum(rows.busy_s for _, _, rows in _kept_steps(parts))
    stepless = ", ".join(part.run.path.name for part in parts if not part.has_steps)
    note = (
        f"{duration(kept_s)} in steps that no later run made again, of {duration(_wall_s(parts))}"
        f" from the first start to the last end, {_runs(parts)}"
    ) + (f"; {stepless} made no step" if stepless else "")
    reading = Reading(kept_s / _wall_s(parts), "frac", "measured", note=note)
    why = "above 100 %: steps of the runs overlap in time" if is_above(reading, 1.0) else ""
    return replace(reading, impossible=why)


def steps(parts: Sequence[JobRun]) -> Reading:
    """Steps whose work was kept."""
    value = sum(_count(rows) for _, _, rows in _kept_steps(parts))
    return Reading(value, "steps", "measured", note=f"made and kept, {_runs(parts)}")


def lost_steps(parts: Sequence[JobRun]) -> Reading:
    """Steps that a later run repeated."""
    lost = {n: _count(part.rank) - _count(rows) for n, part, rows in _kept_steps(parts)}
    each = ", ".join(f"{count:.0f} of run {number}" for number, count in lost.items() if count)
    return Reading(sum(lost.values()), "steps", "measured", note=each or "no step was repeated")


def tokens(parts: Sequence[JobRun]) -> Reading:
    """Tokens of all ranks in the steps whose work was kept."""
    total = 0.0
    bases: list[Basis] = []
    note = f"of steps that were kept, {_runs(parts)}"
    for part, before in zip(parts, _resumed(parts), strict=True):
        if not part.has_steps:
            continue
        with part.named_reasons():
            count, basis = _tokens(part, before)
            total, bases = total + count, [*bases, basis]
            whose = missing_ranks_note(part.evidence)
        note += f"; {part.run.path.name}: {whose}" if whose else ""
    return Reading(total, "tokens", weakest(*bases), note=note)


def tokens_per_s(parts: Sequence[JobRun]) -> Reading:
    """Tokens that were kept over the wall time."""
    kept, span_s = tokens(parts), _wall_s(parts)
    note = f"{kept.note}; over {duration(span_s)} from the first start to the last end"
    return mapped(kept, lambda count: count / span_s, unit="tokens/s", note=note)


def _tokens(part: JobRun, before: int | None) -> tuple[float, Basis]:
    rows = part.evidence.work
    need_all_rows(part.evidence)
    values, _, basis = tokens_of_rows(part.evidence, rows)
    kept = values if before is None else values[rows["index"] < before]
    return float(kept.sum()), basis


def energy_j(parts: Sequence[JobRun]) -> Reading:
    """The energy of all runs from start to end, lost steps included."""
    readings = []
    for part in parts:
        with part.named_reasons():
            readings.append(run_j(part.evidence))
    low, high = (
        sum(getattr(reading, edge) for reading in readings)
        if all(getattr(reading, edge) is not None for reading in readings)
        else None
        for edge in ("low", "high")
    )
    note = f"{_runs(parts)} from start to end, lost steps included, the time between them not"
    basis = weakest(*(reading.basis for reading in readings))
    return Reading(sum(reading.value for reading in readings), "J", basis, low, high, note)


def _count(rows: Steps) -> float:
    """Optimizer steps in rows of one rank."""
    return float(steps_in(rows).sum()) if len(rows) else 0.0


def _kept_steps(parts: Sequence[JobRun]) -> list[tuple[int, JobRun, Steps]]:
    """For each run with steps: its number, the run, and its rows that no later run repeated."""
    numbered = enumerate(zip(parts, _resumed(parts), strict=True), start=1)
    return [(n, part, part.kept_steps(before)) for n, (part, before) in numbered if part.has_steps]


def _resumed(parts: Sequence[JobRun]) -> list[int | None]:
    """For each run the lowest step at which a later run resumed; None if there is none."""
    if not any(part.has_steps for part in parts):
        parts[0].first_step()  # raises the reason
    firsts = [part.first_step() if part.has_steps else None for part in parts]
    first_steps = [first for first in firsts if first is not None]
    if len(first_steps) > 1 and not any(first_steps):
        raise NotMeasurable(
            f"all {len(first_steps)} runs count their steps from 0, so where each resumed is not"
            " known: call meter.continue_from(step), or use an integration"
        )
    later = (firsts[number + 1 :] for number in range(len(firsts)))
    return [min((first for first in ones if first is not None), default=None) for ones in later]


def _wall_s(parts: Sequence[JobRun]) -> float:
    return max(part.end_s for part in parts) - min(part.start_s for part in parts)


def _runs(parts: Sequence[JobRun]) -> str:
    return "1 run" if len(parts) == 1 else f"{len(parts)} runs"
