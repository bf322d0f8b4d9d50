"""Reads the entries of a comparison from runs, folders of runs and ledgers.

A run that is named twice, by its directory and by a ledger's row, counts once; the directory is
used, as it has more data. Several trainings in one run are not repeats: each is a source of its
own, RUN:1 and RUN:2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ergmeter.compare.entry import (
    EVAL_LOSS,
    Entry,
    SourceEntries,
    Wanted,
    facts_of,
    over_one_window,
    source_of,
    why_left_out,
)
from ergmeter.compare.jobs import JobRun, job_id, job_results, resumed_jobs
from ergmeter.compare.ledgers import is_ledger, read_ledger
from ergmeter.errors import ErgmeterError, FormatError
from ergmeter.metrics.catalog import catalogue, in_view
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.definitions.compute import flops_per_token
from ergmeter.metrics.definitions.tokens import steps_made
from ergmeter.metrics.definitions.training import divergence
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.gpu_use import board_facts
from ergmeter.metrics.evidence.window import TRAINING
from ergmeter.metrics.summarize import analysed, ask_devices, evidence_of, readings_of
from ergmeter.records import Missing, Reading, Result, or_none
from ergmeter.runlog import format as fmt
from ergmeter.runlog.reader import FINISHED, RUNNING, Run
from ergmeter.runlog.settings import Settings
from ergmeter.units import scaled

_TRAINING = re.compile(r"(?P<run>.+):(?P<number>[1-9]\d*)")
_FINISHED = (FINISHED, "exit code 0")
_LOSSES = ("training.loss", EVAL_LOSS)
_OF_ONE_RUN = ("window", "whole_run_from", "run", "steps")


def read_entries(
    paths: Iterable[Path],
    settings: Settings | None = None,
    *,
    keys: Iterable[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> SourceEntries:
    """All entries under these paths, each run once.

    `keys`: the metrics to compute; with hundreds of runs fewer metrics save most of the time.
    `on_progress`: called with the number of parts read and their total.
    """
    wanted = Wanted(settings, tuple(catalogue() if keys is None else {*keys, *in_view("fairness")}))
    readers = [(str(path), reader) for path in paths for reader in _parts(path, wanted)]
    parts = []
    unreadable: dict[str, list[str]] = {}  # by argument
    for number, (argument, read) in enumerate(readers):
        on_progress(number, len(readers))
        parts.append(read())
        unreadable.setdefault(argument, []).extend(parts[-1].left_out)
    joined = _joined(parts)
    entries, left_out = joined.ended_well, list(joined.left_out)
    unique: dict[object, Entry] = {}
    # The last one of a run is used: a directory before its ledger row, a job's folder before both.
    for entry in sorted(entries, key=lambda e: (_is_directory(e), bool(e.job and _folder(e)))):
        identity = _identity(entry)
        if identity in unique:
            left_out.append(
                f"{unique[identity].source}: {entry.source} is the same run, named twice"
            )
        unique[identity] = entry
    order = {id(entry): number for number, entry in enumerate(entries)}
    ordered = sorted(unique.values(), key=lambda e: order[id(e)])
    failed = [entry for entry in joined.entries if entry.status != "ok"]
    with_jobs = _with_jobs([*ordered, *failed], unreadable, wanted)
    failed = [entry for entry in with_jobs.entries if entry.status != "ok"]
    ended_well = _of_one_window(list(with_jobs.ended_well), wanted)
    return SourceEntries((*ended_well, *failed), (*with_jobs.left_out, *left_out))


def _is_directory(entry: Entry) -> bool:
    """True if the entry was read from a run's directory, not from a ledger's row."""
    return bool(entry.run and entry.source.startswith(str(entry.run)))


class RunSource:
    """Runs, folders of runs, trainings of a run (RUN:2) and energy ledgers."""

    def recognises(self, path: Path) -> bool:
        """True for a directory, a training of a run, and a ledger."""
        return path.is_dir() or _split(path)[1] is not None or is_ledger(path)

    def read(self, path: Path, wanted: Wanted) -> SourceEntries:
        """The entries there, each run once."""
        return read_entries([path], wanted.settings, keys=wanted.keys)


def runs_of_cells(entries: Iterable[Entry], wanted: Wanted) -> tuple[Entry, ...]:
    """Replace bench cells by entries read from their runs, to compare them with other runs."""
    wanted = replace(wanted, keys=(*wanted.keys, *in_view("fairness")))
    result = []
    for entry in entries:
        if entry.kind != "cell" or entry.run is None or entry.status != "ok":
            result.append(entry)
        else:
            runs = _run(entry.run, argument=entry.argument, wanted=wanted).ended_well
            result += [replace(run, job="") for run in runs]
    return tuple(result)


def _of_one_window(entries: list[Entry], wanted: Wanted) -> list[Entry]:
    """Entries over one kind of window: rows of another kind are recomputed from their runs.

    If one can't be recomputed all stay unchanged, and the comparison is refused.
    """
    kinds = {entry.facts["window"] for entry in entries if "window" in entry.facts}
    asked = (wanted.settings.window if wanted.settings else None) or TRAINING
    return entries if len(kinds) < 2 else over_one_window(entries, asked)[0]


def _again(entry: Entry, wanted: Wanted) -> Entry | None:
    """Recompute a ledger's row from its run; None if it has no run, or one of many trainings."""
    result = _run(entry.run, argument=entry.argument, wanted=wanted) if entry.run else None
    if result is None or len(result.entries) != 1 or result.entries[0].status != "ok":
        return None
    computed = replace(result.entries[0], job="")
    return replace(computed, facts={**entry.facts, **computed.facts})


def _ledger(path: Path, *, argument: str, wanted: Wanted) -> SourceEntries:
    """The rows of a ledger; `again` of each recomputes it from its run."""
    source = read_ledger(path, argument=argument)
    rows = tuple(replace(entry, again=partial(_again, entry, wanted)) for entry in source.entries)
    return replace(source, entries=rows)


def _identity(entry: Entry) -> object:
    if entry.run is None:  # rows that agree in every digit are copies
        values = {key: entry.value(key) for key in entry.figures}
        return frozenset(entry.facts.items()), frozenset(values.items())
    return entry.run.resolve(), entry.training


def _parts(path: Path, wanted: Wanted) -> list[Callable[[], SourceEntries]]:
    """Readers for all runs, ledgers or other sources under a path."""
    if path.is_file():
        source = source_of(path)
        if source is not None and not isinstance(source, RunSource):
            return [partial(source.read, path, wanted)]
        return [partial(_ledger, path, argument=str(path), wanted=wanted)]
    path, training = _split(path)
    if not path.is_dir():
        raise FormatError(f"no run, folder or ledger at {path}")
    if training is not None or (path / fmt.RUN_FILE).is_file():
        return [partial(_run, path, argument=None, wanted=wanted, only=training)]
    runs = [
        header.parent
        for header in sorted(path.rglob(fmt.RUN_FILE))
        if not any(part.startswith(".") for part in header.relative_to(path).parts)
    ]
    if runs:
        return [partial(_run, run, argument=str(path), wanted=wanted) for run in runs]
    ledgers = [file for file in sorted(path.glob("*.csv")) if is_ledger(file)]
    if not ledgers:
        raise FormatError(f"no run and no energy ledger in {path}")
    return [partial(_ledger, file, argument=str(path), wanted=wanted) for file in ledgers]


def _split(path: Path) -> tuple[Path, int | None]:
    """Split RUN:2 into the run and the number of a training; an existing path is not split."""
    named = _TRAINING.fullmatch(str(path))
    if named is None or path.exists():
        return path, None
    return Path(named["run"]), int(named["number"])


def _joined(parts: list[SourceEntries]) -> SourceEntries:
    return SourceEntries(
        tuple(entry for part in parts for entry in part.entries),
        tuple(line for part in parts for line in part.left_out),
    )


def _with_jobs(
    entries: Sequence[Entry], unreadable: Mapping[str, Sequence[str]], wanted: Wanted
) -> SourceEntries:
    """Merge the runs of each resumed job in a folder into one entry; note the jobs left out.

    If there are jobs, other runs get job metrics too, so that both can be compared. `unreadable`:
    by folder, a line for each run that could not be read; a job in that folder may lack it.
    """
    by_job: dict[tuple[str, str], dict[Path, list[Entry]]] = {}
    for entry in entries:
        if entry.run and entry.job:
            by_run = by_job.setdefault((_folder(entry), entry.job), {})
            by_run.setdefault(entry.run, []).append(entry)
    left_out: list[str] = []
    resumed: dict[int, Entry | None] = {}  # the replacement of an entry (by its id())
    for (folder, name), by_run in by_job.items():
        is_alone = len(by_run) < 2
        runs = () if is_alone else [JobRun.of(Run.open(run), wanted.settings) for run in by_run]
        for parts in resumed_jobs(runs):
            own = [entry for part in parts for entry in by_run[part.run.path]]
            resumed |= {id(entry): None if folder else entry for entry in own}
            if not folder:
                continue
            job = _job(f"job {name} in {folder}", own, parts, wanted)
            damage = [line for part in parts for line in part.run.damage]
            damage += unreadable[folder]
            if damage:
                left_out.append(f"{job.source} can't be read whole: {damage[0]}")
            else:
                resumed[id(own[-1])] = job
    left = [resumed.get(id(entry), replace(entry, job="")) for entry in entries]
    is_by_job = any(entry and entry.kind == "job" for entry in left)
    if is_by_job or any(key.startswith("job.") for key in wanted.keys):
        left = [_as_job(entry, wanted) if entry else None for entry in left]
    return SourceEntries(tuple(entry for entry in left if entry), tuple(left_out))


def _folder(entry: Entry) -> str:
    """The folder that a run was found in; empty if the run itself was named."""
    return "" if entry.argument.startswith(str(entry.run)) else entry.argument


def _job(source: str, entries: Sequence[Entry], parts: Sequence[JobRun], wanted: Wanted) -> Entry:
    """The entry of a job: the facts of all its runs, the losses and the outcome of the last."""
    names = ", ".join(part.run.path.name for part in parts)
    note = f"{source}: {len(parts)} runs of one job, counted once: {names}"
    why = f"{source} has {len(parts)} runs: compare by job.tokens_per_s or job.energy_j (erg job)"
    results = job_results(parts)
    of_runs = [(key, e.figures[key]) for e in entries for key in _LOSSES if key in e.figures]
    losses = dict(of_runs) | {key: loss for key, loss in of_runs if isinstance(loss, Reading)}
    facts = {
        name: ", ".join(dict.fromkeys(e.facts[name] for e in entries if name in e.facts))
        for name in dict.fromkeys(name for entry in entries for name in entry.facts)
        if name not in _OF_ONE_RUN
    }
    steps = results["job.steps"]
    facts |= facts_of({"steps": steps.value if isinstance(steps, Reading) else None})
    return replace(
        entries[-1],
        source=source,
        facts=facts,
        figures={**dict.fromkeys(wanted.keys, Missing(why)), **losses, **results},
        run=None,
        remarks=(note,),
        training=None,
        cautions=tuple(line for entry in entries for line in entry.cautions),
        kind="job",
        job="",
    )


def _as_job(entry: Entry, wanted: Wanted) -> Entry:
    """Add job metrics to a run. Failed runs and single trainings of a run get none."""
    if entry.kind != "run" or entry.status != "ok" or entry.run is None or entry.training:
        return entry
    results = job_results([JobRun.of(Run.open(entry.run), wanted.settings)])
    return replace(entry, figures={**entry.figures, **results})


def _run(
    path: Path, *, argument: str | None, wanted: Wanted, only: int | None = None
) -> SourceEntries:
    """The entry of a run, or one for each of its trainings, or `only` that one.

    `argument`: the folder on the command line.
    """
    try:
        run = Run.open(path)
    except ErgmeterError as error:
        return _left_out(path, error)
    # If a writer's header is missing or incomplete, the run's rates would be wrong.
    if broken := [line for line in run.damage if fmt.WRITER_FILE in line]:
        return SourceEntries(left_out=tuple(broken))
    if only is not None:
        run.training(only)  # UsageError for a number out of range
    try:
        several = len(run.trainings)
        if several < 2:
            return _entry(run, str(path), argument or str(path), wanted)
        named = {f"{path}:{n}": run.training(n) for n in range(1, several + 1)}
        each = ", ".join(f"{name} ({training.name})" for name, training in named.items())
        note = f"{several} trainings in this run; name the one to compare: {each}"
        return _joined(
            [
                _entry(part, name, argument or name, wanted, remarks=(note,), training=number)
                for number, (name, part) in enumerate(named.items(), start=1)
                if only in (None, number)
            ]
        )
    except ErgmeterError as error:
        return _left_out(path, error)


def _left_out(path: Path, error: ErgmeterError) -> SourceEntries:
    message = str(error)
    return SourceEntries(left_out=(message if str(path) in message else f"{path}: {message}",))


def _entry(
    run: Run,
    source: str,
    argument: str,
    wanted: Wanted,
    *,
    remarks: Sequence[str] = (),
    training: int | None = None,
) -> SourceEntries:
    stated = run.workload.get("status")
    status = str(stated) if stated and run.status in _FINISHED else run.status
    why = why_left_out(status)
    if why:
        ended = "running" if status == RUNNING else "error"
        return _failed(run, source, argument, ended, why)
    evidence = evidence_of(run, wanted.settings)
    each = or_none(flops_per_token, evidence.flops[0]) if evidence.flops else None
    ask_devices(evidence)
    keys = (key for key in wanted.keys if key in catalogue())
    readings = readings_of(evidence, dict.fromkeys((*keys, *analysed(evidence))))
    diverged = divergence(readings)
    if diverged:
        return _failed(run, source, argument, "diverged", f"it {diverged}")
    figures = {**readings, EVAL_LOSS: _eval_loss(run, readings.get(EVAL_LOSS))}
    damage = (f"damaged, left out: {line}" for line in run.damage)
    entry = Entry(
        source,
        argument,
        _facts(evidence, each),
        figures,
        run.path,
        tuple(remarks),
        training=training,
        job=job_id(run) or "",
        cautions=(*damage, *_unfit(evidence, source)),
        flops_per_token=None if any(f.not_counted for f in evidence.flops[:1]) else each,
    )
    return SourceEntries((entry,))


def _failed(run: Run, source: str, argument: str, status: str, reason: str) -> SourceEntries:
    """The entry of a failed run, which has no metrics to compare."""
    facts = {**facts_of(run.workload), "name": run.name, "run": str(run.path)}
    job = job_id(run) or ""
    entry = Entry(source, argument, facts, {}, run.path, status=status, reason=reason, job=job)
    return SourceEntries((entry,))


def _facts(evidence: Evidence, flops: float | None) -> dict[str, str]:
    """Facts of the workload; the run fills the gaps.

    FLOPs per token name their convention, because conventions differ for the same work.
    """
    run, declared = evidence.run, evidence.settings
    own = {
        **board_facts(run),
        "precision": declared.dtype,
        "parameters": declared.parameters,
        "name": run.name,
        "started": run.header.get("created"),
        "steps": or_none(steps_made, evidence),
        "flops_per_token": flops and f"{scaled(flops, 'FLOP')}, {evidence.flops[0].convention}",
        "window": evidence.window_kind if evidence.has_work else None,
        "whole_run_from": evidence.started_by if evidence.trains else None,
    }
    return {**facts_of(own), **facts_of(run.workload), "run": str(run.path)}


def _unfit(evidence: Evidence, source: str) -> list[str]:
    """The serious findings of `erg check`, except a short window, as one caution."""
    findings = fitness(evidence).findings
    serious = [
        finding.seen
        for finding in findings
        if finding.weight == "serious" and finding.check != "window"
    ]
    if not serious:
        return []
    more = f", and {len(serious) - 1} more" if len(serious) > 1 else ""
    return [f"{source}: not fit to be compared: {serious[0]}{more} (`erg check`)"]


def _eval_loss(run: Run, reading: Result | None) -> Result:
    if isinstance(reading, Reading):
        return reading
    values = [reported for reported in run.reported() if reported.name == "eval_loss"]
    if values:
        return Reading(values[-1].value, "1", "reported", note="the last reported value")
    try:
        return Reading(float(run.workload["eval_loss"]), "1", "reported")
    except (KeyError, TypeError, ValueError):
        return Missing("no evaluation loss was recorded")
