"""Runs, benches and ledgers below a directory, each under an id.

Requests name ids that a scan found, never paths, so no request can leave the directory.
Scans follow no links. A run that contains a link out of the directory, or a pipe, is refused:
opening a pipe blocks until somebody writes to it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ergmeter.compare.ledgers import is_ledger
from ergmeter.errors import FormatError
from ergmeter.runlog import format as fmt

Kind = Literal["run", "bench", "ledger"]

_DEPTH = 4
_MOST_DIRECTORIES = 20_000
_SCAN_AGE_S = 1.0
_STAMP_AGE_S = 0.1
_CELL = "exp_"
_NO_STAMP = (float("-inf"), "", 0)


_DEFAULT = Path("runs")  # created by the first run


@dataclass(frozen=True, slots=True)
class ServedItem:
    """A run, bench or ledger. `name` is its relative path, `bench` the bench of a cell."""

    id: str
    kind: Kind
    path: Path
    name: str
    bench: str | None = None


@dataclass
class Folder:
    """A directory, scanned again on request if the last scan is a second old."""

    root: Path
    left_out: list[str] = field(default_factory=list)
    _items: dict[str, ServedItem] = field(default_factory=dict)
    _scanned_s: float = float("-inf")
    _stamps: dict[str, tuple[float, str, int]] = field(default_factory=dict)  # with the size
    _scanning: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        is_yet_to_come = self.root == _DEFAULT and not self.root.exists()
        if not self.root.is_dir() and not is_yet_to_come:
            what = "is a file" if self.root.exists() else "does not exist"
            raise FormatError(f"{self.root} {what}; erg serve takes a directory of runs")
        self.root = self.root.resolve()

    def items(self, kind: Kind) -> list[ServedItem]:
        """Return all items of a kind, by name."""
        self._scan()
        return sorted((p for p in self._items.values() if p.kind == kind), key=lambda p: p.name)

    def item(self, id: str, kind: Kind) -> ServedItem | None:
        """Return the item with this id, or None if none of this kind has it."""
        if id not in self._items:
            self._scan()
        item = self._items.get(id)
        return item if item is not None and item.kind == kind else None

    def stamp(self, item: ServedItem) -> str:
        """Return a digest that changes with the files. Raises FormatError if gone or outside."""
        now_s = time.monotonic()
        made_s, cached, _ = self._stamps.get(item.id, _NO_STAMP)
        if now_s - made_s < _STAMP_AGE_S:
            return cached
        digest = hashlib.blake2b(digest_size=12)
        if not os.access(item.path, os.F_OK):
            raise FormatError(f"{item.name} is gone")
        if not self._is_inside(item.path):
            raise FormatError(f"{item.name} leads out of the directory")
        files = sorted(self._files(item.path, item.name, depth=3))
        for line, _ in files:
            digest.update(line.encode("utf-8", "surrogateescape"))
        stamp = digest.hexdigest()
        self._stamps[item.id] = now_s, stamp, sum(size for _, size in files)
        return stamp

    def size_bytes(self, item: ServedItem) -> int:
        """Return the size of an item's files, as of its stamp."""
        return self._stamps.get(item.id, _NO_STAMP)[2]

    def relative(self, text: str) -> str:
        """Return a message with absolute paths made relative to the directory."""
        if self.root == Path(self.root.anchor):  # every slash would match
            return text
        return text.replace(f"{self.root}{os.sep}", "").replace(str(self.root), self.root.name)

    def _files(self, path: Path, name: str, *, depth: int) -> Iterator[tuple[str, int]]:
        try:
            if path.is_file():
                status = path.stat()
                yield f"{name} {status.st_size} {status.st_mtime_ns}", status.st_size
                return
            with os.scandir(path) as entries:
                listed = list(entries)
        except FileNotFoundError:  # a writer's directory is made under another name
            return
        except OSError as error:
            raise FormatError(f"{name} can't be read ({error.strerror})") from error
        for entry in listed:
            if entry.is_symlink() and not self._is_inside(Path(entry.path)):
                raise FormatError(f"{name}: the link {entry.name} leads out of the directory")
            try:
                if entry.is_dir() and depth:
                    yield from self._files(Path(entry.path), entry.name, depth=depth - 1)
                else:
                    status = entry.stat()
                    if stat.S_ISFIFO(status.st_mode):
                        raise FormatError(f"{name}/{entry.name} is a pipe, which is not read")
                    text = f"{name}/{entry.name} {status.st_size} {status.st_mtime_ns}"
                    yield text, status.st_size
            except FileNotFoundError:  # a segment that was just made into another
                yield f"{name}/{entry.name} gone", 0
            except OSError as error:
                raise FormatError(
                    f"{name}/{entry.name} can't be read ({error.strerror})"
                ) from error

    def _is_inside(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # links in a circle
            return False

    def _scan(self) -> None:
        with self._scanning:  # concurrent requests wait for this scan
            if time.monotonic() - self._scanned_s < _SCAN_AGE_S:
                return
            left_out: list[str] = []
            items = {item.id: item for item in self._walk(left_out)}
            self._items, self.left_out = items, left_out
            for id in self._stamps.copy().keys() - items.keys():  # other threads add to it
                self._stamps.pop(id, None)
            self._scanned_s = time.monotonic()

    def _walk(self, left_out: list[str]) -> Iterator[ServedItem]:
        if _passes((self.root / fmt.RUN_FILE).is_file):
            yield self._item("run", self.root)
            return
        waiting: list[tuple[Path, int, str | None]] = [(self.root, 0, None)]
        directories = 0
        packed: list[str] = []
        while waiting:
            path, depth, bench = waiting.pop()
            directories += 1
            if directories > _MOST_DIRECTORIES:
                left_out.append(f"more than {_MOST_DIRECTORIES} directories: the rest is not shown")
                break
            inside, ledgers = self._entries(path, left_out, packed)
            for ledger in ledgers:
                yield self._item("ledger", ledger)
            if bench is None and any(_is_cell(entry) for entry in inside):
                item = self._item("bench", path)
                bench = item.id
                yield item
            for directory in inside:
                header = directory / fmt.RUN_FILE
                if _passes(header.is_file) and not header.is_symlink():
                    yield self._item("run", directory, bench=bench)
                elif depth < _DEPTH:
                    waiting.append((directory, depth + 1, bench))
        if packed:
            left_out.append(_packed_in_words(sorted(packed)))

    def _entries(
        self, path: Path, left_out: list[str], packed: list[str]
    ) -> tuple[list[Path], list[Path]]:
        """Return the subdirectories and the ledgers of a directory."""
        directories, ledgers = [], []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    child = Path(entry.path)
                    if entry.name.startswith("."):
                        continue
                    if entry.is_symlink():
                        if _passes(child.is_dir):
                            left_out.append(f"{self._name(child)}: a link; links are not followed")
                    elif entry.is_dir():
                        directories.append(child)
                    elif child.suffix == ".csv" and _is_ledger(entry):
                        ledgers += [] if self._is_in_cell(child) else [child]
                    elif entry.name.endswith(fmt.PACKED):
                        packed.append(self._name(child))
        except FileNotFoundError:  # the default directory before the first run
            pass
        except OSError as error:
            left_out.append(f"{self._name(path)}: can't be read ({error.strerror})")
        return directories, ledgers

    def _is_in_cell(self, path: Path) -> bool:
        """True if a ledger belongs to a bench's cell; the bench shows it."""
        return any(_is_cell(Path(part)) for part in path.relative_to(self.root).parts)

    def _item(self, kind: Kind, path: Path, *, bench: str | None = None) -> ServedItem:
        name = self._name(path)
        # By path, not by content: a copy of a run is another run.
        digest = hashlib.blake2b(f"{kind} {name}".encode("utf-8", "surrogateescape"), digest_size=6)
        return ServedItem(digest.hexdigest(), kind, path, name, bench)

    def _name(self, path: Path) -> str:
        name = self.root.name if path == self.root else path.relative_to(self.root).as_posix()
        return name.encode("utf-8", "replace").decode()  # file names may not be valid text


def _packed_in_words(names: list[str]) -> str:
    """Return a note on packed runs, recognised by their suffix alone."""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{some}: packed, so not shown; `erg runs unpack FILE` unpacks a run"


def _is_ledger(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat()
    except OSError:  # it was removed after the listing
        return False
    # ctime is included: a change of mode may make the file readable.
    stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _begins_as_ledger(entry.path, stamp)


@lru_cache(_MOST_DIRECTORIES)
def _begins_as_ledger(path: str, _stamp: tuple[int, ...]) -> bool:
    """True if a file starts as a ledger; cached until it changes."""
    return is_ledger(Path(path))


def _is_cell(path: Path) -> bool:
    number = path.name.removeprefix(_CELL)
    return number != path.name and number.isdigit()


def _passes(test: Callable[[], bool]) -> bool:
    """True if a test of a path passes; in a directory that may not be entered, none does."""
    with suppress(OSError):  # which Python before 3.14 raises
        return test()
    return False
