"""Brings runs together from other directories and machines, each once.

The trap: half a copy that looks like a finished run. A run is copied beside its place and renamed
when it is whole and can be read; one that is still being written is left for the next time, since a
writer may end between the copy of its records and that of its last mark. What a machine has sent
before is known by the run's own id and not by its name.
"""

from __future__ import annotations

import json
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
from typing import IO, TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.manage.directory import run_paths
from ergmeter.runlog.manage.labels import add_labels, changed_s, foreign, labels_of, may_be_written
from ergmeter.runlog.reader import CUT_OFF, Run

if TYPE_CHECKING:
    from collections.abc import Iterator

# -- fetching --------------------------------------------------------------------------------------
# The directory of another machine, brought here: its plain files, with their times.
#
# The trap: `scp -r` follows links, and so brings whatever they lead to, outside the directory too.
# So it is rsync where that is installed, and else `tar` there, whose links are read over here.


_PLACE = re.compile(r"((?:[\w.-]+@)?(?:\[[\w:.%-]+\]|[\w.-]+)):(.+)")
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


def place_of(source: str) -> RemoteDirectory | None:
    """What [USER@]HOST:PATH names; None for what is not like that."""
    match = _PLACE.fullmatch(source)
    if match and source.startswith("-"):
        raise UsageError(f"{source!r} is no machine")
    return RemoteDirectory(match[1], match[2]) if match else None


def fetch(place: RemoteDirectory, into: Path) -> None:
    """Bring what is in it into a directory, without links and hidden files. FormatError."""
    if shutil.which("rsync"):
        inside = str(place).rstrip("/") + "/"
        words = ["rsync", "-a", "--no-links", "--exclude=.*", "--", inside, f"{into}/"]
        done = subprocess.run(words, stdin=None, stderr=subprocess.PIPE, text=True, check=False)
        failure = _failure(done.returncode, done.stderr.splitlines())
        tool = "rsync"
    elif shutil.which("ssh"):
        failure = _tarred(place, into)
        tool = "tar over ssh"
    else:
        raise UsageError("neither rsync nor ssh is installed here; mount the directory instead")
    if failure:
        raise FormatError(f"{tool} could not fetch {place}: {failure}")


def _failure(code: int, lines: list[str], broken: str = "") -> str:
    """Why it failed, from what says it best; "" where it did not."""
    if code and lines:
        return lines[-1].strip()
    return broken or (f"exit code {code}" if code else "")


def _tarred(place: RemoteDirectory, into: Path) -> str:
    """What went wrong, if anything did."""
    far = f"env LC_ALL=C tar -C {_quoted(place.path)} -cf - ."
    host = place.host.replace("[", "").replace("]", "")  # which ssh takes without
    broken = ""
    with tempfile.TemporaryFile("w+") as told:  # a pipe that nobody reads may fill up
        words = ["ssh", "--", host, far]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=told
        ) as process:
            assert process.stdout is not None
            try:
                _unfolded(process.stdout, into)
                process.stdout.read()  # what pads the end; a writer without a reader fails
            except (tarfile.TarError, EOFError) as error:
                broken = f"what came is no archive, or was cut off ({error})"
        told.seek(0)
        lines = told.read().splitlines()
    has_grown = process.returncode == 1 and lines and all(one.endswith(_GREW) for one in lines)
    return broken if has_grown else _failure(process.returncode, lines, broken)


def _quoted(path: str) -> str:
    """A path for the shell there, which alone knows whose home ~ is."""
    match = _HOME.fullmatch(path)
    return f"{match[1]}/{shlex.quote(match[2] or '.')}" if match else shlex.quote(path)


def _unfolded(stream: IO[bytes], into: Path) -> None:
    """The plain files of an archive, also such as it has once under two names."""
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


# -- collecting ------------------------------------------------------------------------------------


# What was written this short a time before it was fetched may have been written in between, too:
# twenty hand-overs, and some seconds that clocks differ by.
_NEAR_S = 30.0
_UNNAMED = "run"  # what came from HOST:. or HOST:~


@dataclass(frozen=True, slots=True)
class CollectOutcome:
    """What became of one run: collected, known already, refused, and why."""

    name: str
    said: str
    path: Path | None = None  # where it is now, if it came


def collect(source: str, into: Path) -> list[CollectOutcome]:
    """Bring the runs of a directory, here or elsewhere, into another. What became of each."""
    place = None if Path(source).exists() else place_of(source)
    if place is None:
        if not Path(source).is_dir():
            raise UsageError(f"{source} is no directory here, nor HOST:PATH on another machine")
        into.mkdir(parents=True, exist_ok=True)
        return _all_of(Path(source).resolve(), into)  # `.` has no name
    into.mkdir(parents=True, exist_ok=True)
    staging = into / f".collecting-{secrets.token_hex(4)}"
    fetched = staging / _visible(PurePosixPath(place.path).name)  # where it is a run, its name
    fetched.mkdir(parents=True)
    began_s = time.time()
    try:
        fetch(place, fetched)
        return _all_of(fetched, into, fetched_s=began_s)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _all_of(source: Path, into: Path, *, fetched_s: float | None = None) -> list[CollectOutcome]:
    paths = [source] if (source / fmt.RUN_FILE).exists() else run_paths(source)
    known = _collected_ids(into)
    return [_collect_run(path, into, known, fetched_s) for path in paths]


def _collected_ids(into: Path) -> dict[str, Path]:
    """By id the runs that are here already."""
    found = {}
    for path in run_paths(into):
        header = _header(path)
        if header.get("id"):
            found[str(header["id"])] = path
    return found


def _header(run: Path) -> dict[str, Any]:
    try:
        found = json.loads((run / fmt.RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _collect_run(
    run: Path, into: Path, known: dict[str, Path], fetched_s: float | None
) -> CollectOutcome:
    identity = str(_header(run).get("id") or "")
    before = known.get(identity)
    try:
        is_near = fetched_s is not None and changed_s(run) > fetched_s - _NEAR_S
        if may_be_written(Run.open(run)) or is_near:
            return CollectOutcome(run.name, "is being written; collect it when it has ended")
        if before is not None and not _has_more(run, before):
            return CollectOutcome(run.name, f"is here already, as {before.name}")
        path, kept, aside = _brought(run, into, before)
    except (ErgmeterError, OSError, shutil.Error) as error:
        return CollectOutcome(run.name, f"left out: {error}")
    if identity:
        known[identity] = path
    said = "collected" if before is None else "brought up to date"
    said += _several("; what had been put into the copy is still there", kept)
    said += _several("; what has no place in it any more is in the copy before", aside)
    said += _several("; links and hidden files were not copied", list(_left(run)))
    return CollectOutcome(run.name, said, path)


def _several(said: str, paths: list[Path]) -> str:
    """With the first of some files, and how many more there are; "" where there is none."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{said}: {paths[0]}{more}" if paths else ""


def _left(run: Path) -> Iterator[Path]:
    """What somebody put into a run and `_unwanted` leaves there."""
    for path in foreign(run):
        is_hidden = any(part.startswith(".") for part in path.parts)
        if is_hidden or any((run / some).is_symlink() for some in (path, *path.parents)):
            yield path


def _has_more(run: Path, before: Path) -> bool:
    """Whether the copy is of a time when the run was cut off, and the run went on after that."""
    return Run.open(before).status == CUT_OFF and _rows(run) > _rows(before)


def _rows(run: Path) -> int:
    opened = Run.open(run)
    return opened.count("steps") + opened.count("samples")


def _brought(run: Path, into: Path, before: Path | None) -> tuple[Path, list[Path], list[Path]]:
    """Where it is now, what of the copy before was kept, and what could not be and where it is."""
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
            return _replaced(before, staging)
        target = _free(into / _visible(run.name))
        staging.rename(target)
        return target, [], []
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replaced(before: Path, by: Path) -> tuple[Path, list[Path], list[Path]]:
    """A newer copy in the place of one, with what people said of that and put into it: neither is
    anywhere else. Of a file that the run has too, the run's stays.

    They are copied before anything is renamed, so that a failure leaves the copy as it was. Where
    the run has a file by now and people had a directory, the copy before is kept, and named."""
    add_labels(by, labels_of(before))
    kept, left = [], []
    for path in foreign(before):
        if os.path.lexists(by / path):
            continue
        try:
            (by / path).parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            left.append(path)
            continue
        shutil.copy2(before / path, by / path, follow_symlinks=False)
        kept.append(path)
    aside = before.with_name(f".{before.name}.old-{secrets.token_hex(4)}")
    before.rename(aside)
    by.rename(before)
    if left:
        return before, kept, [aside / path for path in left]
    shutil.rmtree(aside)
    return before, kept, []


def _unwanted(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if n.startswith(".") or (Path(folder) / n).is_symlink()]


def _visible(name: str) -> str:
    """A name for a run here: one that begins with a dot is found by no command."""
    return name.lstrip(".~") or _UNNAMED


def _free(path: Path) -> Path:
    """This path, or one like it where another run has that name."""
    number = 1
    found = path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
