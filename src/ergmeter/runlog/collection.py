"""The runs of a directory as a collection: tags and notes on them, and which may go.

The trap: a tidy-up that takes a run while it is written, or one that somebody needs. A run that is
going is never removed, nor one that is tagged `keep`, nor one that can't be read and so not be
judged; a run goes by a rename first, so that no half of it is ever taken for a run.

Labels stand in `labels.json` beside `run.json`, which is written once and stays as it was.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.runlog.directory import run_paths
from ergmeter.runlog.reader import RUNNING, Run

if TYPE_CHECKING:
    from collections.abc import Iterable

LABELS_FILE = "labels.json"
KEEP = "keep"
_TAG = re.compile(r"[\w.:+=@-]{1,40}")
_AGES_S = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZES_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    "KIB": 2.0**10,
    "MIB": 2.0**20,
    "GIB": 2.0**30,
}


@dataclass(frozen=True, slots=True)
class Labels:
    """What people say of a run."""

    tags: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()  # when, and what


def labels_of(run: Path) -> Labels:
    """The tags and notes of a run; none where nobody gave it any."""
    path = run / LABELS_FILE
    try:
        found: Any = json.loads(path.read_bytes())
        tags = tuple(str(tag) for tag in found.get("tags", ()))
        return Labels(tags, tuple((str(n["at"]), str(n["text"])) for n in found.get("notes", ())))
    except FileNotFoundError:
        return Labels()
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: not the labels of a run ({error})") from error


def tag(run: Path, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> Labels:
    """Add tags and take some away. UsageError for one that is none."""
    add = tuple(add)
    for one in add:
        if not _TAG.fullmatch(one):
            raise UsageError(f"{one!r} is no tag: letters, digits and . : + = @ - _, up to 40")
    before = labels_of(run)
    gone = set(remove)
    tags = dict.fromkeys([one for one in (*before.tags, *add) if one not in gone])
    return _written(run, Labels(tuple(tags), before.notes))


def annotate(run: Path, text: str) -> Labels:
    """Add a note, with the time."""
    if not text.strip():
        raise UsageError("a note has some words; got nothing")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    before = labels_of(run)
    return _written(run, Labels(before.tags, (*before.notes, (now, text.strip()))))


def _written(run: Path, labels: Labels) -> Labels:
    whole = {"tags": labels.tags, "notes": [{"at": at, "text": said} for at, said in labels.notes]}
    staging = run / f".{LABELS_FILE}.{secrets.token_hex(4)}"
    staging.write_text(json.dumps(whole, indent=1) + "\n")
    staging.replace(run / LABELS_FILE)
    return labels


# -- which may go ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A run of the collection, and whether it may go: `kept` says why not."""

    path: Path
    size_bytes: int
    age_s: float
    tags: tuple[str, ...]
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """Which runs are to go: those of which all that is given here holds."""

    older_s: float | None = None
    larger_bytes: float | None = None
    tags: tuple[str, ...] = ()
    newest: int = 0  # so many of the newest stay in any case

    def is_meant(self, run: Listed) -> bool:
        """Whether it is one of those."""
        return (
            (self.older_s is None or run.age_s > self.older_s)
            and (self.larger_bytes is None or run.size_bytes > self.larger_bytes)
            and set(self.tags) <= set(run.tags)
        )


def chosen(parent: Path, wish: Wish) -> list[Listed]:
    """The runs that are meant, each with why it is kept, if it is. The oldest first."""
    if wish.older_s is None and wish.larger_bytes is None and not wish.tags:
        raise UsageError("which runs? give --older-than, --larger-than or --tag")
    paths = run_paths(parent)
    newest = set(paths[len(paths) - wish.newest :]) if wish.newest else set()
    listed = (_listed(path, wish) for path in paths if path not in newest)
    return [one for one in listed if wish.is_meant(one)]


def _listed(path: Path, wish: Wish) -> Listed:
    kept = ""
    tags: tuple[str, ...] = ()
    age_s = time.time() - path.stat().st_mtime
    try:
        tags = labels_of(path).tags
        run = Run.open(path)
        age_s = _age_s(run, age_s)
        kept = "it is being written" if run.status == RUNNING else ""
    except ErgmeterError as error:
        kept = f"it can't be read ({error})"
    if path.is_symlink():
        kept = "it is a link"
    elif KEEP in tags and KEEP not in wish.tags:
        kept = kept or f"it is tagged {KEEP}"
    return Listed(path, size_bytes(path), age_s, tags, kept)


def _age_s(run: Run, otherwise_s: float) -> float:
    try:
        made = datetime.fromisoformat(str(run.header.get("created")))
    except ValueError:
        return otherwise_s
    made = made if made.tzinfo else made.replace(tzinfo=timezone.utc)
    return (datetime.now(timezone.utc) - made).total_seconds()


def size_bytes(run: Path) -> int:
    """What a run takes on disk; links are not followed."""
    total = 0
    for folder, _, names in os.walk(run):
        for name in names:
            try:
                total += os.lstat(Path(folder) / name).st_size
            except FileNotFoundError:  # turned into Parquet since we looked
                continue
    return total


def remove(run: Path) -> None:
    """Take a run away. Asked once more whether somebody writes it: it may have been resumed."""
    if run.is_symlink() or Run.open(run).status == RUNNING:
        raise UsageError(f"{run} is being written, or a link; it stays")
    doomed = run.with_name(f".{run.name}.removed-{secrets.token_hex(4)}")
    run.rename(doomed)
    shutil.rmtree(doomed)


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
