"""What is there to show under a directory: runs, benches, ledgers, each under an id.

The trap: a path in an address. Whatever a request names is looked up among what a scan has found,
so there is nothing to escape from; and a scan follows no link, since a link may lead anywhere. A
run with a link inside that leads out of the directory is refused as a whole, and so is one with a
pipe in it: whoever opens that waits until somebody writes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ergmeter.compare.ledgers import is_ledger
from ergmeter.errors import FormatError, UsageError
from ergmeter.runlog import format as fmt

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["run", "bench", "ledger"]
Stamp = str

_DEPTH = 4
_MOST_DIRECTORIES = 20_000
_SCAN_AGE_S = 1.0
_STAMP_AGE_S = 0.1
_CELL = "exp_"


@dataclass(frozen=True, slots=True)
class ServedItem:
    """Something to show. `name` is its path under the directory; `bench` whose cell a run is."""

    id: str
    kind: Kind
    path: Path
    name: str
    bench: str | None = None


@dataclass
class Folder:
    """A directory, scanned again when somebody asks and a second has passed."""

    root: Path
    left_out: list[str] = field(default_factory=list)
    _places: dict[str, ServedItem] = field(default_factory=dict)
    _scanned_s: float = float("-inf")
    _stamps: dict[str, tuple[float, Stamp]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _scanning: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            what = "is a file" if self.root.exists() else "does not exist"
            raise UsageError(f"{self.root} {what}; erg serve takes a directory of runs")
        self.root = self.root.resolve()

    def places(self, kind: Kind) -> list[ServedItem]:
        """All of a kind, by name."""
        self._scan()
        return sorted((p for p in self._places.values() if p.kind == kind), key=lambda p: p.name)

    def place(self, id: str, kind: Kind) -> ServedItem | None:
        """What has this id; None if nothing has, or it is of another kind."""
        if id not in self._places:
            self._scan()
        found = self._places.get(id)
        return found if found is not None and found.kind == kind else None

    def stamp(self, place: ServedItem) -> Stamp:
        """What changes when its files do. FormatError if it is gone or leads out of here."""
        now_s = time.monotonic()
        made_s, known = self._stamps.get(place.id, (float("-inf"), ""))
        if now_s - made_s < _STAMP_AGE_S:
            return known
        digest = hashlib.blake2b(digest_size=12)
        if not os.access(place.path, os.F_OK):
            raise FormatError(f"{place.name} is gone")
        if not self._is_inside(place.path):
            raise FormatError(f"{place.name} leads out of the directory")
        files = sorted(self._files(place.path, place.name, depth=3))
        for line, _ in files:
            digest.update(line.encode("utf-8", "surrogateescape"))
        self._stamps[place.id] = now_s, digest.hexdigest()
        self._sizes[place.id] = sum(size for _, size in files)
        return digest.hexdigest()

    def size_bytes(self, place: ServedItem) -> int:
        """What its files take, as of its stamp."""
        return self._sizes.get(place.id, 0)

    def shown(self, text: str) -> str:
        """A message with the paths in it as they are under the directory."""
        if self.root == Path(self.root.anchor):  # every slash would be the directory
            return text
        return text.replace(f"{self.root}{os.sep}", "").replace(str(self.root), self.root.name)

    def _files(self, path: Path, name: str, *, depth: int) -> Iterator[tuple[str, int]]:
        try:
            if path.is_file():
                status = path.stat()
                yield f"{name} {status.st_size} {status.st_mtime_ns}", status.st_size
                return
            with os.scandir(path) as entries:
                found = list(entries)
        except FileNotFoundError:  # a writer's directory is made under another name
            return
        except OSError as error:
            raise FormatError(f"{name} can't be read ({error.strerror})") from error
        for entry in found:
            if entry.is_symlink() and not self._is_inside(Path(entry.path)):
                raise FormatError(f"{name}: the link {entry.name} leads out of the directory")
            try:
                if entry.is_dir() and depth:
                    yield from self._files(Path(entry.path), entry.name, depth=depth - 1)
                else:
                    status = entry.stat()
                    if stat.S_ISFIFO(status.st_mode):
                        raise FormatError(f"{name}/{entry.name} is a pipe, which is not read")
                    said = f"{name}/{entry.name} {status.st_size} {status.st_mtime_ns}"
                    yield said, status.st_size
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
        with self._scanning:  # who comes meanwhile waits for this one
            if time.monotonic() - self._scanned_s < _SCAN_AGE_S:
                return
            left_out: list[str] = []
            places = {place.id: place for place in self._walk(left_out)}
            self._places, self.left_out = places, left_out
            for id in self._stamps.copy().keys() - places.keys():  # other threads add to it
                self._stamps.pop(id, None)
                self._sizes.pop(id, None)
            self._scanned_s = time.monotonic()

    def _walk(self, left_out: list[str]) -> Iterator[ServedItem]:
        if _is_file(self.root / fmt.RUN_FILE):
            yield self._found("run", self.root)
            return
        waiting: list[tuple[Path, int, str | None]] = [(self.root, 0, None)]
        seen = 0
        packed: list[str] = []
        while waiting:
            path, depth, bench = waiting.pop()
            seen += 1
            if seen > _MOST_DIRECTORIES:
                left_out.append(f"more than {_MOST_DIRECTORIES} directories: the rest is not shown")
                break
            inside, ledgers = self._entries(path, left_out, packed)
            for one in ledgers:
                yield self._found("ledger", one)
            if bench is None and any(_is_cell(one) for one in inside):
                found = self._found("bench", path)
                bench = found.id
                yield found
            for one in inside:
                if _is_plain_file(one / fmt.RUN_FILE):
                    yield self._found("run", one, bench=bench)
                elif depth < _DEPTH:
                    waiting.append((one, depth + 1, bench))
        if packed:
            left_out.append(_packed_in_words(sorted(packed)))

    def _entries(
        self, path: Path, left_out: list[str], packed: list[str]
    ) -> tuple[list[Path], list[Path]]:
        """The directories in one, and the ledgers."""
        directories, ledgers = [], []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    one = Path(entry.path)
                    if entry.name.startswith("."):
                        continue
                    if entry.is_symlink():
                        if _is_directory(one):
                            left_out.append(f"{self._name(one)}: a link; links are not followed")
                    elif entry.is_dir():
                        directories.append(one)
                    elif one.suffix == ".csv" and _is_ledger(entry):
                        ledgers += [] if self._is_in_cell(one) else [one]
                    elif entry.name.endswith(fmt.PACKED):
                        packed.append(self._name(one))
        except OSError as error:
            left_out.append(f"{self._name(path)}: can't be read ({error.strerror})")
        return directories, ledgers

    def _is_in_cell(self, path: Path) -> bool:
        """Whether a ledger is that of a bench's cell: its bench shows it."""
        return any(_is_cell(Path(part)) for part in path.relative_to(self.root).parts)

    def _found(self, kind: Kind, path: Path, *, bench: str | None = None) -> ServedItem:
        name = self._name(path)
        # By its place and not by what it says of itself: a copy of a run is another run.
        whole = hashlib.blake2b(f"{kind} {name}".encode("utf-8", "surrogateescape"), digest_size=6)
        return ServedItem(whole.hexdigest(), kind, path, name, bench)

    def _name(self, path: Path) -> str:
        name = self.root.name if path == self.root else path.relative_to(self.root).as_posix()
        return name.encode("utf-8", "replace").decode()  # a file's name may be no text at all


def _packed_in_words(names: list[str]) -> str:
    """By their endings alone: what is in an archive is not looked at with every scan."""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{some}: not looked into; `erg runs unpack FILE` makes a run of a packed one"


def _is_ledger(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat()
    except OSError:  # it went since it was listed
        return False
    # Also by when its mode or its name changed: one that may be read now is another.
    stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _begins_as_ledger(entry.path, stamp)


@lru_cache(_MOST_DIRECTORIES)
def _begins_as_ledger(path: str, _stamp: tuple[int, ...]) -> bool:
    """Looked at once, and again when the file has changed."""
    return is_ledger(Path(path))


def _is_cell(path: Path) -> bool:
    number = path.name.removeprefix(_CELL)
    return number != path.name and number.isdigit()


def _is_plain_file(path: Path) -> bool:
    return _is_file(path) and not path.is_symlink()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # in a directory that may not be entered; Python before 3.14 raises
        return False


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
