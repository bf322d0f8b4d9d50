"""The directory of another machine, brought here: its plain files, with their times.

The trap: `scp -r` follows links, and so brings whatever they lead to, outside the directory too. So
it is rsync where that is installed, and else `tar` there, whose links are read over here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from ergmeter.errors import FormatError, UsageError

_PLACE = re.compile(r"((?:[\w.-]+@)?(?:\[[\w:.%-]+\]|[\w.-]+)):(.+)")
_HOME = re.compile(r"(~[\w.-]*)(?:/(.*))?")
# What GNU tar says of a file that grew: its run is being written, and is judged by its times.
_GREW = "file changed as we read it"


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of another machine: [USER@]HOST:PATH."""

    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.host}:{self.path}"


def place_of(source: str) -> Place | None:
    """What [USER@]HOST:PATH names; None for what is not like that."""
    match = _PLACE.fullmatch(source)
    if match and source.startswith("-"):
        raise UsageError(f"{source!r} is no machine")
    return Place(match[1], match[2]) if match else None


def fetch(place: Place, into: Path) -> None:
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


def _tarred(place: Place, into: Path) -> str:
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
