"""Packs a run into one file, and unpacks it.

An archive may come from anybody. Only plain files are unpacked, only under the run's own name, only
up to a size. A run appears whole or not at all. The times of its files are kept, because a run that
was cut off is recognised by them; no unpacked file gets a time in the future.
"""

from __future__ import annotations

import gzip
import lzma
import os
import secrets
import shutil
import tarfile
import time
import zlib
from pathlib import Path, PurePosixPath

from ergmeter.atomic_write import replacing
from ergmeter.errors import FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.manage.labels import may_be_written
from ergmeter.runlog.reader import Run

# A run of 8 GPUs for a week is some GB; what unfolds to more than this is no run.
MAX_BYTES = 200 * 10**9
_MAX_FILES = 2_000_000
# What the libraries raise for an archive that is damaged or not what it says.
_NO_ARCHIVE = (
    *(tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error),
    *(EOFError, OverflowError, ValueError),
)


def pack(run: Path, into: Path) -> Path:
    """Write a run into one file. UsageError while the run is written."""
    if not into.name.endswith(fmt.PACKED):
        raise UsageError(f"{into.name} ends in none of {', '.join(fmt.PACKED)}")
    if into.exists():
        raise UsageError(f"{into} exists; choose another name or remove it")
    if may_be_written(Run.open(run)):
        raise UsageError(f"{run} is being written, or may be; pack it when it has ended")
    run = run.resolve()  # `.` has no name
    for path in _files(run):
        name = (Path(run.name) / path.relative_to(run)).as_posix()
        if not _is_safe(name):
            raise UsageError(f"{name!r} could not be unpacked elsewhere; rename it first")
    with replacing(into) as part:
        _write_archive(run, part)
    return into


def unpack(archive: Path, into: Path) -> Path:
    """Unpacks a file under a directory. Returns the run's path."""
    if not archive.is_file():
        raise UsageError(f"no file {archive}")
    staging = into / f".unpacking-{secrets.token_hex(4)}"
    try:
        name = _extracted(archive, staging)
        target = into / name
        if target.exists():
            raise UsageError(f"{target} exists; unpack into another directory")
        Run.open(staging / name)  # or what is wrong with it
        (staging / name).rename(target)
    except _NO_ARCHIVE as error:
        why = str(error).partition("\n")[0].rstrip(":")  # tarfile tells of each format on a line
        raise FormatError(f"{archive}: not a packed run, or cut off ({why})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _files(run: Path) -> list[Path]:
    """Its files, run.json first, without those that are unfinished."""
    every = (Path(folder) / name for folder, _, names in os.walk(run) for name in names)
    plain = [path for path in every if path.is_file() and not path.is_symlink()]
    files = [p for p in plain if not any(part[0] == "." for part in p.relative_to(run).parts)]
    return sorted(files, key=lambda path: (path.name != fmt.RUN_FILE, path))


def _write_archive(run: Path, into: Path) -> None:
    with tarfile.open(into, "w:gz", compresslevel=6) as archive:
        for path in _files(run):
            entry = archive.gettarinfo(path, str(Path(run.name) / path.relative_to(run)))
            # Who packed it is nobody's business.
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            with path.open("rb") as file:
                archive.addfile(entry, file)


def _is_safe(name: str) -> bool:
    """True if a file of this name stays below the run's directory, on every system."""
    parts = PurePosixPath(name).parts
    is_inside = len(parts) > 1 and not any(p in ("..", "/") or p.startswith(".") for p in parts)
    return is_inside and "\\" not in name and ":" not in parts[0]


def _extracted(archive: Path, into: Path) -> str:
    """All files of an archive, under `into`. The one name that they share."""
    names: set[str] = set()
    total = 0
    with tarfile.open(archive, "r:*") as packed:
        for number, entry in enumerate(packed):
            if entry.isdir():
                continue
            source = packed.extractfile(entry) if entry.isreg() and _is_safe(entry.name) else None
            if source is None:
                raise FormatError(f"{archive}: holds {entry.name!r}, which is no file of a run")
            total += entry.size
            if total > MAX_BYTES or number > _MAX_FILES:
                raise FormatError(f"{archive}: unfolds to more than a run would be")
            names.add(PurePosixPath(entry.name).parts[0])
            target = into / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("xb") as file:
                shutil.copyfileobj(source, file)
            changed_s = min(entry.mtime, time.time())
            os.utime(target, (changed_s, changed_s))  # by which a run that was cut off is known
    if len(names) != 1:
        raise FormatError(f"{archive}: holds {len(names)} directories, not one run")
    return names.pop()
