"""Collects runs from other directories and machines, each once.

A run is copied to a temporary name and renamed once it is complete and readable. A run that is
still being written is left for the next time: its writer may end between the copy of its records
and that of its last mark. Runs collected before are recognised by their id, not by their name.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.manage.labels import add_labels, changed_s, foreign, labels_of, may_be_written
from ergmeter.runlog.reader import CUT_OFF, Run

if TYPE_CHECKING:
    from collections.abc import Iterator


# Fetching from another machine: plain files, with their times. `scp -r` would follow links out of
# the directory. So rsync is used where installed, else `tar` on the other machine, whose links
# are skipped here.


_REMOTE = re.compile(r"((?:[\w.-]+@)?(?:\[[\w:.%-]+\]|[\w.-]+)):(.+)")
_HOME = re.compile(r"(~[\w.-]*)(?:/(.*))?")
# What GNU tar says of a file that grew: its run is being written, and is judged by its times.
_GREW = "file changed as we read it"


@dataclass(frozen=True, slots=True)
class RemoteDirectory:
    """A directory of another machine: [USER@]HOST:PATH."""

    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.host}:{self.path}"


def remote_of(source: str) -> RemoteDirectory | None:
    """The remote directory of [USER@]HOST:PATH; None for any other text."""
    match = _REMOTE.fullmatch(source)
    if match and source.startswith("-"):
        raise UsageError(f"{source!r} is no machine")
    return RemoteDirectory(match[1], match[2]) if match else None


def fetch(remote: RemoteDirectory, into: Path) -> None:
    """Copies its content into a directory, without links and hidden files. Raises FormatError."""
    if shutil.which("rsync"):
        inside = str(remote).rstrip("/") + "/"
        words = ["rsync", "-a", "--no-links", "--exclude=.*", "--", inside, f"{into}/"]
        done = subprocess.run(words, stdin=None, stderr=subprocess.PIPE, text=True, check=False)
        failure = _failure(done.returncode, done.stderr.splitlines())
        tool = "rsync"
    elif shutil.which("ssh"):
        failure = _fetch_by_tar(remote, into)
        tool = "tar over ssh"
    else:
        raise UsageError("neither rsync nor ssh is installed here; mount the directory instead")
    if failure:
        raise FormatError(f"{tool} could not fetch {remote}: {failure}")


def _failure(code: int, lines: list[str], broken: str = "") -> str:
    """Why a command failed, by the last line of its stderr; "" if it did not."""
    if code and lines:
        return lines[-1].strip()
    return broken or (f"exit code {code}" if code else "")


def _fetch_by_tar(remote: RemoteDirectory, into: Path) -> str:
    """Fetches by `tar`. Returns the error, "" if there was none."""
    far = f"env LC_ALL=C tar -C {_quoted(remote.path)} -cf - ."
    host = remote.host.replace("[", "").replace("]", "")  # which ssh takes without
    broken = ""
    with tempfile.TemporaryFile("w+") as stderr:  # a pipe that nobody reads may fill up
        words = ["ssh", "--", host, far]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        ) as process:
            assert process.stdout is not None
            try:
                _unfolded(process.stdout, into)
                process.stdout.read()  # what pads the end; a writer without a reader fails
            except (tarfile.TarError, EOFError) as error:
                broken = f"what came is no archive, or was cut off ({error})"
        stderr.seek(0)
        lines = stderr.read().splitlines()
    has_grown = process.returncode == 1 and lines and all(line.endswith(_GREW) for line in lines)
    return broken if has_grown else _failure(process.returncode, lines, broken)


def _quoted(path: str) -> str:
    """A path quoted for the remote shell, which expands a leading ~."""
    match = _HOME.fullmatch(path)
    return f"{match[1]}/{shlex.quote(match[2] or '.')}" if match else shlex.quote(path)


def _unfolded(stream: IO[bytes], into: Path) -> None:
    """Extracts the plain files of an archive, also hard links."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            parts = PurePosixPath(entry.name).parts
            is_hidden = any(part.startswith((".", "/")) for part in parts)  # `..` is, too
            if is_hidden or not (entry.isreg() or entry.islnk()):
                continue
            target = into.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.islnk():
                _copied_again(entry, into, target)
                continue
            source = archive.extractfile(entry)
            assert source is not None
            with source, target.open("xb") as file:
                shutil.copyfileobj(source, file)
            os.utime(target, (entry.mtime, entry.mtime))


def _copied_again(entry: tarfile.TarInfo, into: Path, target: Path) -> None:
    parts = PurePosixPath(entry.linkname).parts
    if any(part.startswith((".", "/")) for part in parts) or not into.joinpath(*parts).is_file():
        raise tarfile.ReadError(f"{entry.name} is one with {entry.linkname}, which did not come")
    shutil.copy2(into.joinpath(*parts), target)


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
    remote = None if Path(source).exists() else remote_of(source)
    if remote is None:
        if not Path(source).is_dir():
            raise UsageError(f"{source} is no directory here, nor HOST:PATH on another machine")
        into.mkdir(parents=True, exist_ok=True)
        return _all_of(Path(source).resolve(), into)  # `.` has no name
    into.mkdir(parents=True, exist_ok=True)
    staging = into / f".collecting-{secrets.token_hex(4)}"
    fetched = staging / _visible(PurePosixPath(remote.path).name)  # where it is a run, its name
    fetched.mkdir(parents=True)
    began_s = time.time()
    try:
        fetch(remote, fetched)
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
    return str(fmt.readable_header(run / fmt.RUN_FILE).get("id") or "")


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
        path, replaced, aside = _bring(run, into, before)
    except (ErgmeterError, OSError, shutil.Error) as error:
        return CollectOutcome(run.name, f"left out: {error}")
    if identity:
        collected[identity] = path
    message = "collected" if before is None else "brought up to date"
    message += _and_others("; what had been put into the copy is still there", replaced)
    message += _and_others("; what has no place in it any more is in the copy before", aside)
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


def _bring(run: Path, into: Path, before: Path | None) -> tuple[Path, list[Path], list[Path]]:
    """Copies a run. Returns its path, the kept files of an earlier copy, and those set aside."""
    staging = into / f".{run.name}.{secrets.token_hex(4)}"
    try:
        # With the times of its files, by which a run that was cut off is known; without links,
        # which may lead anywhere, and without what is unfinished.
        shutil.copytree(run, staging, ignore=_unwanted, symlinks=True)
        copied = Run.open(staging)
        damage = copied.verified()
        if damage and not Run.open(run).verified():
            raise FormatError(f"the copy is not whole ({damage[0]})")
        if before is not None:
            return _replace(before, staging)
        target = _free_path(into / _visible(run.name))
        staging.rename(target)
        return target, [], []
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(before: Path, by: Path) -> tuple[Path, list[Path], list[Path]]:
    """Replaces an earlier copy, keeping the labels and files that people added to it.

    A file that the run has too is the run's. Everything is copied before anything is renamed, so a
    failure leaves the earlier copy as it was. Where an added directory has become a file of the
    run, the earlier copy is kept aside, and its path is returned.
    """
    add_labels(by, labels_of(before))
    stayed, left = [], []
    for path in foreign(before):
        if os.path.lexists(by / path):
            continue
        try:
            (by / path).parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            left.append(path)
            continue
        shutil.copy2(before / path, by / path, follow_symlinks=False)
        stayed.append(path)
    aside = before.with_name(f".{before.name}.old-{secrets.token_hex(4)}")
    before.rename(aside)
    by.rename(before)
    if left:
        return before, stayed, [aside / path for path in left]
    shutil.rmtree(aside)
    return before, stayed, []


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
