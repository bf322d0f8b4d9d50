"""Collects runs from other directories and machines, each once.

A run is copied to a temporary name and renamed once it is complete and readable. A run that is
still being written is left for the next time: its writer may end between the copy of its records
and that of its last mark. Runs collected before are recognised by their id, not by their name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ergmeter.atomic_write import read_json
from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.manage.labels import add_labels, changed_s, foreign, labels_of, may_be_written
from ergmeter.runlog.reader import CUT_OFF, Run

# [USER@]HOST:PATH, as rsync has it.
_REMOTE = re.compile(r"(?!-)(?:[\w.-]+@)?(?:\[[\w:.%-]+\]|[\w.-]+):(.+)")


def remote_path(source: str) -> str | None:
    """The path on another machine of [USER@]HOST:PATH; None for any other text."""
    match = _REMOTE.fullmatch(source)
    return match[1] if match else None


def _fetch(source: str, into: Path) -> None:
    """Copies a directory of another machine by rsync, without links and hidden files."""
    if not shutil.which("rsync"):
        raise UsageError(f"{source}: rsync is not installed here; mount the directory instead")
    content = source.rstrip("/") + "/"
    words = ["rsync", "-a", "--no-links", "--exclude=.*", "--", content, f"{into}/"]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        raise FormatError(f"rsync could not fetch {source}: {lines[-1].strip()}")


# A run written this recently may still be written to: twenty hand-overs, and some seconds of clock
# difference.
_NEAR_S = 30.0
_UNNAMED = "run"  # what came from HOST:. or HOST:~


@dataclass(frozen=True, slots=True)
class CollectOutcome:
    """The outcome of one run: collected, already there or refused, and why."""

    name: str
    message: str
    path: Path | None = None  # where it is now, if it came


def collect(source: str, into: Path) -> list[CollectOutcome]:
    """Copies the runs of a local or remote directory into another. Returns the outcome of each."""
    path = None if Path(source).exists() else remote_path(source)
    if path is None and not Path(source).is_dir():
        raise UsageError(f"{source} is neither a directory here nor HOST:PATH on another machine")
    into.mkdir(parents=True, exist_ok=True)
    if path is None:
        return _all_of(Path(source).resolve(), into)  # `.` has no name
    staging = into / f".collecting-{secrets.token_hex(4)}"
    fetched = staging / _visible(PurePosixPath(path).name)  # if it is a run, its name
    fetched.mkdir(parents=True)
    began_s = time.time()
    try:
        _fetch(source, fetched)
        return _all_of(fetched, into, fetched_s=began_s)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _all_of(source: Path, into: Path, *, fetched_s: float | None = None) -> list[CollectOutcome]:
    paths = [source] if (source / fmt.RUN_FILE).exists() else fmt.run_paths(source)
    collected = _collected_ids(into)
    return [_collect_run(path, into, collected, fetched_s) for path in paths]


def _collected_ids(into: Path) -> dict[str, Path]:
    """The runs that are here already, by id."""
    paths = {_identity(path): path for path in fmt.run_paths(into)}
    paths.pop("", None)  # runs without an id
    return paths


def _identity(run: Path) -> str:
    return str(read_json(run / fmt.RUN_FILE).get("id") or "")


def _collect_run(
    run: Path, into: Path, collected: dict[str, Path], fetched_s: float | None
) -> CollectOutcome:
    identity = _identity(run)
    before = collected.get(identity)
    try:
        is_near = fetched_s is not None and changed_s(run) > fetched_s - _NEAR_S
        if may_be_written(Run.open(run)) or is_near:
            return CollectOutcome(run.name, "is being written; collect it when it has ended")
        if before is not None and not _has_more(run, before):
            return CollectOutcome(run.name, f"is here already, as {before.name}")
        path, added = _bring(run, into, before)
    except (ErgmeterError, OSError, shutil.Error) as error:
        return CollectOutcome(run.name, f"left out: {error}")
    if identity:
        collected[identity] = path
    message = "collected" if before is None else "brought up to date"
    message += _and_others("; files that were added to the copy are still there", added)
    message += _and_others("; links and hidden files were not copied", list(_left(run)))
    return CollectOutcome(run.name, message, path)


def _and_others(message: str, paths: list[Path]) -> str:
    """The message with the first of some files and the number of others; "" without files."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{message}: {paths[0]}{more}" if paths else ""


def _left(run: Path) -> Iterator[Path]:
    """Files that were added to a run and are not copied: links and hidden files."""
    for path in foreign(run):
        is_hidden = any(part.startswith(".") for part in path.parts)
        if is_hidden or any((run / some).is_symlink() for some in (path, *path.parents)):
            yield path


def _has_more(run: Path, before: Path) -> bool:
    """True if the earlier copy was cut off and the run has more rows by now."""
    return Run.open(before).status == CUT_OFF and _rows(run) > _rows(before)


def _rows(run: Path) -> int:
    opened = Run.open(run)
    return opened.count("steps") + opened.count("samples")


def _bring(run: Path, into: Path, before: Path | None) -> tuple[Path, list[Path]]:
    """Copies a run. Returns its path, and the files that people had added to an earlier copy."""
    staging = into / f".{run.name}.{secrets.token_hex(4)}"
    try:
        # With the times of its files, by which a run that was cut off is known; without links,
        # which may lead anywhere, and without what is unfinished.
        shutil.copytree(run, staging, ignore=_unwanted, symlinks=True)
        damage = Run.open(staging).verified()
        if damage and not Run.open(run).verified():
            raise FormatError(f"the copy is incomplete ({damage[0]})")
        if before is not None:
            return before, _replace(before, staging)
        target = _free_path(into / _visible(run.name))
        staging.rename(target)
        return target, []
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(before: Path, by: Path) -> list[Path]:
    """Replaces an earlier copy, keeping the labels and files that people added to it.

    For a file that both have, the run's is used. Everything is copied before anything is renamed,
    so a failure leaves the earlier copy as it was.
    """
    add_labels(by, labels_of(before))
    added = [path for path in foreign(before) if not os.path.lexists(by / path)]
    for path in added:
        (by / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(before / path, by / path, follow_symlinks=False)
    aside = before.with_name(f".{before.name}.old-{secrets.token_hex(4)}")
    before.rename(aside)
    by.rename(before)
    shutil.rmtree(aside)
    return added


def _unwanted(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if n.startswith(".") or (Path(folder) / n).is_symlink()]


def _visible(name: str) -> str:
    """A run's name without leading dots, which would hide it from all commands."""
    return name.lstrip(".~") or _UNNAMED


def _free_path(path: Path) -> Path:
    """The path, with a number appended if it is taken."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
