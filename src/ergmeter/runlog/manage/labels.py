"""The runs of a directory: their tags and notes, and which may be removed.

Never removed: a run that may be running, one tagged `keep`, one that can't be read, and files that
are not ours, such as a program's checkpoints. A run is renamed before it is deleted, so that no
half of it is taken for a run.

`Run.status` describes a run. This module also asks whether a process may still write to it: one
rank may have failed while another goes on, and a file system may hide recent writes.

Labels are in `labels.json` beside `run.json`, which is written once and never changed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ergmeter.atomic_write import write_json
from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.process_group import boot_id, is_alive, started_s
from ergmeter.runlog.reader import Run

LABELS_FILE = "labels.json"
KEEP = "keep"
# NFS hides what was appended for up to 60 s, and clocks differ by minutes; nobody misses an hour.
_QUIET_S = 3600.0
# Beside the writers' directories: what ergmeter itself may have written into a run.
_BESIDE = (fmt.RUN_FILE, LABELS_FILE, "figures.csv", "figures.jsonl", "requests.jsonl")
# With the ending of a file that a killed writer was about to replace.
_OF_A_WRITER = re.compile(
    r"\.?(?:writer\.json|marks\.jsonl|.+-\d{5}\.(?:arrows|parquet))(?:\.[0-9a-f]{8})?"
)
_OF_A_PROFILE = re.compile(r"\.?rank\d+\.json(?:\.gz)?")
_TAG = re.compile(r"[\w.:+=@-]{1,40}")
_AGES_S = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZES_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    "KIB": 2.0**10,
    "MIB": 2.0**20,
    "GIB": 2.0**30,
}


@dataclass(frozen=True, slots=True)
class Labels:
    """The tags and notes of a run."""

    tags: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()  # when, and what

    def as_json(self) -> dict[str, Any]:
        """The labels as JSON."""
        notes = [{"at": at, "text": text} for at, text in self.notes]
        return {"tags": list(self.tags), "notes": notes}


def labels_of(run: Path) -> Labels:
    """Reads the tags and notes of a run; empty if it has none."""
    path = run / LABELS_FILE
    if not path.exists():
        return Labels()
    stored = fmt.json_object(path)
    try:
        tags = tuple(str(tag) for tag in stored.get("tags", ()))
        return Labels(tags, tuple((str(n["at"]), str(n["text"])) for n in stored.get("notes", ())))
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path}: not the labels of a run ({error})") from error


def tag(run: Path, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> Labels:
    """Add and remove tags of a run. Raises UsageError for an invalid tag."""
    add = tuple(add)
    for tag_text in add:
        if not _TAG.fullmatch(tag_text):
            raise UsageError(f"{tag_text!r} can't be a tag: 1 to 40 letters, digits or .:+=@-_")
    before = labels_of(run)
    gone = set(remove)
    tags = dict.fromkeys([tag_text for tag_text in (*before.tags, *add) if tag_text not in gone])
    return _write_labels(run, Labels(tuple(tags), before.notes))


def annotate(run: Path, text: str) -> Labels:
    """Add a note, with the time."""
    if not text.strip():
        raise UsageError("the note is empty; write some text")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    before = labels_of(run)
    return _write_labels(run, Labels(before.tags, (*before.notes, (now, text.strip()))))


def add_labels(run: Path, more: Labels) -> Labels:
    """Give a run the tags and notes of another copy of it, each once."""
    own = labels_of(run)
    if not (more.tags or more.notes):
        return own
    tags = dict.fromkeys((*more.tags, *own.tags))
    return _write_labels(run, Labels(tuple(tags), tuple(sorted({*more.notes, *own.notes}))))


def _write_labels(run: Path, labels: Labels) -> Labels:
    write_json(run / LABELS_FILE, labels.as_json())
    return labels


# Which runs may be removed.


@dataclass(frozen=True, slots=True)
class Listed:
    """A run with its size and age; `reason`: why it may not be removed, "" if it may."""

    path: Path
    size_bytes: int
    age_s: float
    tags: tuple[str, ...]
    reason: str = ""


def chosen(
    parent: Path,
    *,
    older_s: float | None = None,
    larger_bytes: float | None = None,
    tags: Iterable[str] = (),
    newest: int = 0,
) -> list[Listed]:
    """The runs to remove, oldest first, each with the reason if it may not be removed.

    They match all conditions. `newest`: how many of the newest runs stay in any case.
    """
    if older_s is None and larger_bytes is None and not tags:
        raise UsageError("which runs? give --older-than, --larger-than or --tag")
    paths = fmt.run_paths(parent)
    return [
        run
        for run in map(_listed, paths[: max(0, len(paths) - newest)])
        if (older_s is None or run.age_s > older_s)
        and (larger_bytes is None or run.size_bytes > larger_bytes)
        and set(tags) <= set(run.tags)
    ]


def _listed(path: Path) -> Listed:
    tags: tuple[str, ...] = ()
    try:
        tags = labels_of(path).tags
        reason = _why_not_removable(path)
    except ErgmeterError as error:
        reason = f"it can't be read ({error})"
    return Listed(path, size_bytes(path), time.time() - changed_s(path), tags, reason)


def _why_not_removable(path: Path) -> str:
    """Why a run may not be removed; "" if it may."""
    if path.is_symlink():
        return "it is a link"
    if may_be_written(Run.open(path)) or time.time() - changed_s(path) < _QUIET_S:
        return "it may be being written: wait until an hour after its last record"
    if KEEP in labels_of(path).tags:
        return f"it is tagged {KEEP}"
    other = next(foreign(path), None)
    if other is None:
        return ""
    if (path / other).is_dir() and not (path / other).is_symlink():
        return f"it holds a directory that can't be read ({other})"
    return f"it holds files that are no part of a run ({other})"


def may_be_written(run: Run) -> bool:
    """True if a writer that has not closed its share may still be running."""
    return any(not writer.closed and _may_live(writer) for writer in run.writers)


def _may_live(writer: fmt.WriterLog) -> bool:
    header = writer.header
    quiet_s = time.time() - changed_s(writer.directory)
    if is_alive(writer.directory, header):
        return True
    if header.get("boot_id") != boot_id() or boot_id() is None:
        return quiet_s < _QUIET_S  # of another host: the files are all we can see
    try:
        began_s = started_s(int(header["pid"]))
        return began_s is not None and abs(began_s - float(header["pid_started_s"])) < 1.0
    except (KeyError, TypeError, ValueError):
        return quiet_s < _QUIET_S


def changed_s(run: Path) -> float:
    """When a file of the run was last written, by its host's clock; labels do not count."""
    newest_s = 0.0
    for path in _inside(run):
        if path.name != LABELS_FILE:
            try:
                newest_s = max(newest_s, path.lstat().st_mtime)
            except FileNotFoundError:  # renamed just now
                newest_s = time.time()
    return newest_s


def foreign(run: Path) -> Iterator[Path]:
    """Files in a run's directory that ergmeter did not write, relative to it."""
    for path in _inside(run):
        inside = path.relative_to(run)
        if path.is_symlink() or not _is_ours(run, inside.parts):
            yield inside


def _is_ours(run: Path, parts: tuple[str, ...]) -> bool:
    name = parts[-1]
    if len(parts) == 1:
        return name in _BESIDE or name.startswith(f".{LABELS_FILE}.")
    if len(parts) > 2:
        return False
    if (run / parts[0] / fmt.WRITER_FILE).exists():
        return bool(_OF_A_WRITER.fullmatch(name))
    # What a recorder that was killed left, and the files of `profile=`.
    return parts[0] == ".hook" or (parts[0] == "profile" and bool(_OF_A_PROFILE.fullmatch(name)))


def _inside(run: Path) -> Iterator[Path]:
    """All files and links under a directory, and directories that can't be read.

    Links are not followed.
    """
    unread: list[OSError] = []
    for folder, folders, names in os.walk(run, onerror=unread.append):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in (*sorted(names), *links):
            yield Path(folder) / name
    for error in unread:
        if not isinstance(error, FileNotFoundError) and Path(error.filename) != run:
            yield Path(error.filename)


def size_bytes(run: Path) -> int:
    """A run's size on disk; links are not followed."""
    total = 0
    for path in _inside(run):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:  # turned into Parquet since we looked
            continue
    return total


def remove(run: Path) -> None:
    """Remove a run, after checking again that it may go: it may have been resumed or tagged.

    Raises FormatError if it could not be removed, or only in part.
    """
    reason = _why_not_removable(run)
    if reason:
        raise UsageError(f"stays: {reason}")
    doomed = run.with_name(f".{run.name}.removed-{secrets.token_hex(4)}")
    try:
        run.rename(doomed)
    except OSError as error:
        raise FormatError(f"stays: {error}") from error
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        raise FormatError(f"partly removed; the rest is in {doomed} ({error})") from error


def age_parsed(text: str) -> float:
    """An age in seconds: 30d, 12h, 2w."""
    return _amount(text, _AGES_S, "an age is like 30d, 12h or 2w")


def size_parsed(text: str) -> float:
    """A size in bytes: 500MB, 2GB, 1GiB."""
    return _amount(text.upper(), _SIZES_BYTES, "a size is like 500MB, 2GB or 1GiB")


def _amount(text: str, units: dict[str, float], how: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if not match or match[2] not in units:
        raise UsageError(f"{how}; got {text!r}")
    return float(match[1]) * units[match[2]]
