"""Finds what is to be compared: runs, folders of runs, ledgers.

The trap: one run counted twice, once in its directory and once as its ledger's row, which makes
two repeats that agree to the last digit. Where both are named the directory is used: it says more.

And two trainings of one command taken for repeats, as they are in one run: named by its path, each
of them is a source of its own, RUN:1 and RUN:2, and may be named so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.compare.entry import EVAL_LOSS, Entry, SourceEntries, facts_of, why_left_out
from ergmeter.compare.ledgers import is_ledger, read_ledger
from ergmeter.errors import ErgmeterError, FormatError, NotMeasurable
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.check.checks import fitness
from ergmeter.metrics.definitions.compute import flops_per_token
from ergmeter.metrics.definitions.tokens import steps_made
from ergmeter.metrics.definitions.training import divergence
from ergmeter.metrics.evidence.device_info import board_facts
from ergmeter.metrics.evidence.window import TRAINING
from ergmeter.metrics.summarize import ask_devices, evidence_of, readings_of
from ergmeter.records import Missing, Reading
from ergmeter.runlog import format as fmt
from ergmeter.runlog.reader import FINISHED, Run
from ergmeter.units import scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Result
    from ergmeter.runlog.settings import Settings

_TRAINING = re.compile(r"(?P<run>.+):(?P<number>[1-9]\d*)")
_FINISHED = (FINISHED, "exit code 0")
_NEEDED = ("training.loss", "time.window_s", "steps.count")  # to tell whether it may be compared


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be found out of each run."""

    settings: Settings | None
    keys: tuple[str, ...]


def found_in(
    paths: Iterable[Path],
    settings: Settings | None = None,
    *,
    keys: Iterable[str] | None = None,
    tell: Callable[[int, int], None] = lambda _done, _of: None,
) -> SourceEntries:
    """Everything under these paths, each run once. Of runs just the metrics of these keys, if they
    are given: of hundreds of runs that is most of the work. `tell` hears how many of how many have
    been read."""
    wanted = _Wanted(settings, tuple(catalogue() if keys is None else {*keys, *_NEEDED}))
    entries: list[Entry] = []
    left_out: list[str] = []
    parts = [part for path in paths for part in _parts(path, wanted)]
    for number, part in enumerate(parts):
        tell(number, len(parts))
        one = part()
        entries += one.entries
        left_out += one.left_out
    kept: dict[object, Entry] = {}
    # Directories last, so that they take the place of their ledger's row.
    for entry in sorted(entries, key=_is_directory):
        known = _identity(entry)
        if known in kept:
            left_out.append(f"{kept[known].source}: {entry.source} is the same run, named twice")
        kept[known] = entry
    order = {id(entry): number for number, entry in enumerate(entries)}
    ordered = sorted(kept.values(), key=lambda e: order[id(e)])
    return SourceEntries(tuple(_of_one_window(ordered, wanted)), tuple(left_out))


def _of_one_window(entries: list[Entry], wanted: _Wanted) -> list[Entry]:
    """Rows over another kind of window than the runs, computed anew from their own runs.

    Where one of them can't be, all stay as they are: a comparison across kinds is then refused.
    """
    kinds = {entry.facts["window"] for entry in entries if "window" in entry.facts}
    asked = (wanted.settings.window if wanted.settings else None) or TRAINING
    if len(kinds) < 2:
        return entries
    anew: list[Entry] = []
    for entry in entries:
        if _is_directory(entry) or entry.facts.get("window", asked) == asked:
            anew.append(entry)
            continue
        found = _run(entry.run, given=entry.given, wanted=wanted) if entry.run else SourceEntries()
        if len(found.entries) != 1:
            return entries
        anew += [replace(one, facts={**entry.facts, **one.facts}) for one in found.entries]
    return anew


def _is_directory(entry: Entry) -> bool:
    return entry.run is not None and entry.source.startswith(str(entry.run))


def _identity(entry: Entry) -> object:
    if entry.run is None:  # two rows that agree to the last digit are copies of one
        values = {key: entry.value(key) for key in entry.figures}
        return frozenset(entry.facts.items()), frozenset(values.items())
    return entry.run.resolve(), entry.training


def _parts(path: Path, wanted: _Wanted) -> list[Callable[[], SourceEntries]]:
    """What there is under a path, each to be read when it is asked for."""
    if path.is_file():
        return [partial(read_ledger, path, given=str(path))]
    path, training = _split(path)
    if not path.is_dir():
        raise FormatError(f"no run, folder or ledger at {path}")
    if training is not None or (path / fmt.RUN_FILE).is_file():
        return [partial(_run, path, given=None, wanted=wanted, only=training)]
    runs = [
        header.parent
        for header in sorted(path.rglob(fmt.RUN_FILE))
        if not any(part.startswith(".") for part in header.relative_to(path).parts)
    ]
    if runs:
        return [partial(_run, run, given=str(path), wanted=wanted) for run in runs]
    ledgers = [file for file in sorted(path.glob("*.csv")) if is_ledger(file)]
    if not ledgers:
        raise FormatError(f"no run and no energy ledger in {path}")
    return [partial(read_ledger, ledger, given=str(path)) for ledger in ledgers]


def _split(path: Path) -> tuple[Path, int | None]:
    """RUN:2 as the run and the number of a training in it. A directory of that name is itself."""
    named = _TRAINING.fullmatch(str(path))
    if named is None or path.exists():
        return path, None
    return Path(named["run"]), int(named["number"])


def _joined(parts: list[SourceEntries]) -> SourceEntries:
    return SourceEntries(
        tuple(entry for part in parts for entry in part.entries),
        tuple(line for part in parts for line in part.left_out),
    )


def _run(
    path: Path, *, given: str | None, wanted: _Wanted, only: int | None = None
) -> SourceEntries:
    """A run's entry; of several trainings in it, one each, or `only` that one. `given`: the folder
    it was found in."""
    try:
        run = Run.open(path)
    except ErgmeterError as error:
        return _left_out(path, error)
    if only is not None:
        run.training(only)  # a number that there is not is misuse
    try:
        several = len(run.trainings)
        if several < 2:
            return _entry(run, str(path), given or str(path), wanted)
        named = {f"{path}:{n}": run.training(n) for n in range(1, several + 1)}
        each = ", ".join(f"{name} ({one.name})" for name, one in named.items())
        note = f"{several} trainings in this run, each to be named by itself: {each}"
        return _joined(
            [
                _entry(one, name, given or name, wanted, remarks=(note,), training=number)
                for number, (name, one) in enumerate(named.items(), start=1)
                if only in (None, number)
            ]
        )
    except ErgmeterError as error:
        return _left_out(path, error)


def _left_out(path: Path, error: ErgmeterError) -> SourceEntries:
    said = str(error)
    return SourceEntries(left_out=(said if str(path) in said else f"{path}: {said}",))


def _entry(
    run: Run,
    source: str,
    given: str,
    wanted: _Wanted,
    *,
    remarks: Sequence[str] = (),
    training: int | None = None,
) -> SourceEntries:
    said = run.workload.get("status")
    status = str(said) if said and run.status in _FINISHED else run.status
    why = why_left_out(status)
    if why:
        return SourceEntries(left_out=(f"{source}: {why}",))
    evidence = evidence_of(run, wanted.settings)
    ask_devices(evidence)
    readings = readings_of(evidence, (key for key in wanted.keys if key in catalogue()))
    diverged = divergence(readings)
    if diverged:
        return SourceEntries(left_out=(f"{source}: it {diverged}",))
    figures = {**readings, EVAL_LOSS: _eval_loss(run, readings.get(EVAL_LOSS))}
    damage = (f"damaged, left out: {line}" for line in run.damage)
    entry = Entry(
        source,
        given,
        _facts(evidence),
        figures,
        run.path,
        tuple(remarks),
        training=training,
        cautions=(*damage, *_unfit(evidence, source)),
    )
    return SourceEntries((entry,))


def _facts(evidence: Evidence) -> dict[str, str]:
    """What the workload said, and what the run itself knows where it did not."""
    run, declared = evidence.run, evidence.settings
    own = {
        **board_facts(run),
        "precision": declared.dtype,
        "parameters": declared.parameters,
        "name": run.name,
        "started": run.header.get("created"),
        "steps": _steps(evidence),
        "flops_per_token": _flops(evidence),
        "window": evidence.window_kind if evidence.trains else None,
        "whole_run_from": evidence.started_by if evidence.trains else None,
    }
    return {**facts_of(own), **facts_of(run.workload), "run": str(run.path)}


def _steps(evidence: Evidence) -> float | None:
    try:
        return steps_made(evidence)
    except NotMeasurable:
        return None


def _flops(evidence: Evidence) -> str | None:
    """Of a token, with the way they were counted: two ways differ where the work does not."""
    if not evidence.flops:
        return None
    try:
        each = flops_per_token(evidence.flops[0])
    except NotMeasurable:
        return None
    return f"{scaled(each, 'FLOP')}, {evidence.flops[0].convention}"


def _unfit(evidence: Evidence, source: str) -> list[str]:
    """What `erg check` has against the run; a short window is refused by itself."""
    found = fitness(evidence).findings
    serious = [one.seen for one in found if one.weight == "serious" and one.check != "window"]
    if not serious:
        return []
    more = f", and {len(serious) - 1} more" if len(serious) > 1 else ""
    return [f"{source}: not fit to be compared: {serious[0]}{more} (`erg check`)"]


def _eval_loss(run: Run, known: Result | None) -> Result:
    if isinstance(known, Reading):
        return known
    told = [one for one in run.reported() if one.name == "eval_loss"]
    if told:
        return Reading(told[-1].value, "1", "reported", note="the last that the program told")
    try:
        return Reading(float(run.workload["eval_loss"]), "1", "reported")
    except (KeyError, TypeError, ValueError):
        return Missing("no evaluation loss was recorded")
