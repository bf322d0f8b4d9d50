"""Packs a run into one file, and unpacks it.

An archive may come from anybody. Only plain files are unpacked, only below one directory, and only
up to a total size. A run appears complete or not at all. A zip stores local time, and a run that
was cut off is recognised by its files' times, so our zips store UTC as well. No unpacked file gets
a time in the future.
"""

from __future__ import annotations

import gzip
import lzma
import os
import secrets
import shutil
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TypeAlias

from ergmeter.atomic_write import replacing
from ergmeter.errors import FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.manage.labels import may_be_written
from ergmeter.runlog.reader import Run

# A run of 8 GPUs for a week has some GB; an archive that unpacks to more than this is no run.
MAX_BYTES = 200 * 10**9
_MAX_FILES = 2_000_000
# The extra field in which zip programs tell when a file was changed, in seconds since 1970, UTC.
_UTC_FIELD = 0x5455
_HAS_CHANGED = 1  # a bit of it

# What the libraries raise for an archive that is damaged, encrypted, or not what it says.
_NO_ARCHIVE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error),
    *(EOFError, RuntimeError, OverflowError, ValueError),
)

_Member: TypeAlias = "tuple[str, int, float, Callable[[], IO[bytes] | None]]"


def pack(run: Path, into: Path) -> Path:
    """Pack a run into one file, in the format of its ending. UsageError if it is being written."""
    if not into.name.endswith(fmt.PACKED):
        raise UsageError(f"{into.name} ends in none of {', '.join(fmt.PACKED)}")
    if into.exists():
        raise UsageError(f"{into} exists; choose another name or remove it")
    if may_be_written(Run.open(run)):
        raise UsageError(f"{run} is being written, or may be; pack it when it has ended")
    run = run.resolve()  # `.` has no name
    for name in _files(run):
        if not _is_safe(name):
            raise UsageError(f"{name!r} could not be unpacked elsewhere; rename it first")
    with replacing(into) as part:
        (_zipped if into.suffix == ".zip" else _tarred)(run, part)
    return into


def unpack(archive: Path, into: Path) -> Path:
    """Unpack an archive into the directory `into`. Returns the run's path."""
    if not archive.is_file():
        raise UsageError(f"no file {archive}")
    staging = into / f".unpacking-{secrets.token_hex(4)}"
    try:
        name = _extracted(archive, staging)
        target = into / name
        if target.exists():
            raise UsageError(f"{target} exists; unpack into another directory")
        Run.open(staging / name)  # raises what is wrong with it
        (staging / name).rename(target)
    except _NO_ARCHIVE as error:
        why = str(error).partition("\n")[0].rstrip(":")  # tarfile tells of each format on a line
        raise FormatError(f"{archive}: not a packed run, or cut off ({why})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _files(run: Path) -> dict[str, Path]:
    """A run's files by their names in an archive, run.json first; hidden files are left out."""
    every = (Path(folder) / name for folder, _, names in os.walk(run) for name in names)
    plain = [path for path in every if path.is_file() and not path.is_symlink()]
    files = [p for p in plain if not any(part[0] == "." for part in p.relative_to(run).parts)]
    files.sort(key=lambda path: (path.name != fmt.RUN_FILE, path))
    return {path.relative_to(run.parent).as_posix(): path for path in files}


def _tarred(run: Path, into: Path) -> None:
    with tarfile.open(into, "w:gz", compresslevel=6) as archive:
        for name, path in _files(run).items():
            entry = archive.gettarinfo(path, name)
            # The archive does not name the user who packed it.
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            with path.open("rb") as file:
                archive.addfile(entry, file)


def _zipped(run: Path, into: Path) -> None:
    with zipfile.ZipFile(into, "w") as archive:
        for name, path in _files(run).items():
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            entry.compress_type = zipfile.ZIP_DEFLATED
            changed_s = min(max(int(path.stat().st_mtime), 0), 2**31 - 1)
            entry.extra = struct.pack("<HHBi", _UTC_FIELD, 5, _HAS_CHANGED, changed_s)
            with path.open("rb") as file, archive.open(entry, "w") as target:
                shutil.copyfileobj(file, target)


def _is_safe(name: str) -> bool:
    """True if a file of this name stays below the run's directory, on every system."""
    parts = PurePosixPath(name).parts
    is_inside = len(parts) > 1 and not any(p in ("..", "/") or p.startswith(".") for p in parts)
    return is_inside and "\\" not in name and ":" not in parts[0]


def _extracted(archive: Path, into: Path) -> str:
    """Extract all files of an archive under `into`; return the directory name they share."""
    names: set[str] = set()
    total = 0
    for number, (name, size, changed_s, opened) in enumerate(_members(archive)):
        parts = PurePosixPath(name).parts
        if not _is_safe(name):
            raise FormatError(f"{archive}: contains {name!r}, which can't be a file of a run")
        total += size
        if total > MAX_BYTES or number > _MAX_FILES:
            raise FormatError(f"{archive}: has over {MAX_BYTES / 1e9:g} GB or {_MAX_FILES:,} files")
        names.add(parts[0])
        target = into.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        source = opened()
        if source is None:
            raise FormatError(f"{archive}: {name!r} is not a plain file")
        with source, target.open("xb") as file:
            shutil.copyfileobj(source, file)  # reads no more than the stated size
            if file.tell() != size:
                raise FormatError(f"{archive}: {name!r} is shorter than the archive says")
        changed_s = min(changed_s, time.time())
        os.utime(target, (changed_s, changed_s))  # by which a run that was cut off is known
    if len(names) != 1:
        raise FormatError(f"{archive}: holds {len(names)} directories, not one run")
    return names.pop()


def _changed_s(entry: zipfile.ZipInfo) -> float:
    """When a file of a zip was changed, by its UTC field, else as local time."""
    extra = entry.extra
    while len(extra) > 8:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == _UTC_FIELD and size >= 5 and extra[4] & _HAS_CHANGED:
            return float(struct.unpack_from("<i", extra, 5)[0])
        extra = extra[4 + size :]
    return time.mktime((*entry.date_time, 0, 0, -1))


def _members(archive: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir():
                    opened = lambda info=info: zipped.open(info)  # noqa: E731
                    yield info.filename, info.file_size, _changed_s(info), opened
        return
    with tarfile.open(archive, "r:*") as tarred:
        for entry in tarred:
            if entry.isdir():
                continue
            if not entry.isreg():
                raise FormatError(f"{archive}: {entry.name!r} is a link or a device")
            yield entry.name, entry.size, entry.mtime, lambda e=entry: tarred.extractfile(e)  # type: ignore[misc]
