"""Collects runs from other directories and machines, each once.

A run is copied to a temporary name and renamed once it is complete and readable. A run that is
still being written is left for the next time: its writer may end between the copy of its records
and that of its last mark. Runs collected before are recognised by their id, not by their name.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ergmeter.atomic_write import read_json, replacing
from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.manage.labels import changed_s, foreign, may_be_written
from ergmeter.runlog.reader import Run

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def collect(source: str, into: Path) -> list[CollectOutcome]:
    """Copies the runs of a local or remote directory into another. Returns the outcome of each."""
    path = None if Path(source).exists() else remote_path(source)
    if path is None:
        if not Path(source).is_dir():
            raise UsageError(f"{source} is no directory here, nor HOST:PATH on another machine")
        into.mkdir(parents=True, exist_ok=True)
        return _all_of(Path(source).resolve(), into)  # `.` has no name
    into.mkdir(parents=True, exist_ok=True)
    staging = into / f".collecting-{secrets.token_hex(4)}"
    fetched = staging / _visible(PurePosixPath(path).name)  # where it is a run, its name
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
    paths = {}
    for path in fmt.run_paths(into):
        identity = _identity(path)
        if identity:
            paths[identity] = path
    return paths


def _identity(run: Path) -> str:
    return str(read_json(run / fmt.RUN_FILE).get("id") or "")


def _collect_run(
    run: Path, into: Path, collected: dict[str, Path], fetched_s: float | None
) -> CollectOutcome:
    identity = _identity(run)
    try:
        is_near = fetched_s is not None and changed_s(run) > fetched_s - _NEAR_S
        if may_be_written(Run.open(run)) or is_near:
            return CollectOutcome(run.name, "is being written; collect it when it has ended")
        if identity in collected:
            return CollectOutcome(run.name, f"is here already, as {collected[identity].name}")
        path = _copy(run, into)
    except (ErgmeterError, OSError, shutil.Error) as error:
        return CollectOutcome(run.name, f"left out: {error}")
    if identity:
        collected[identity] = path
    message = "collected"
    if left := list(_left(run)):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        message += f"; links and hidden files were not copied: {left[0]}{more}"
    return CollectOutcome(run.name, message)


def _left(run: Path) -> Iterator[Path]:
    """Files that were added to a run and are not copied: links and hidden files."""
    for path in foreign(run):
        is_hidden = any(part.startswith(".") for part in path.parts)
        if is_hidden or any((run / some).is_symlink() for some in (path, *path.parents)):
            yield path


def _copy(run: Path, into: Path) -> Path:
    """Copies a run. Returns its path."""
    target = _free_path(into / _visible(run.name))
    with replacing(target) as part:
        # With the times of its files, by which a run that was cut off is known; without links,
        # which may lead anywhere, and without what is unfinished.
        shutil.copytree(run, part, ignore=_unwanted, symlinks=True)
        damage = Run.open(part).verified()
        if damage and not Run.open(run).verified():
            raise FormatError(f"the copy is not whole ({damage[0]})")
    return target


def _unwanted(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if n.startswith(".") or (Path(folder) / n).is_symlink()]


def _visible(name: str) -> str:
    """A run's name without leading dots, which would hide it from all commands."""
    return name.lstrip(".~") or _UNNAMED


def _free_path(path: Path) -> Path:
    """The path, with a number appended if it is taken."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
