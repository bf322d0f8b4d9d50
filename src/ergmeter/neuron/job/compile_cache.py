"""Which compiled graphs are meant: the HLO files of a Neuron compile cache, and a choice of them.

The trap: everything under one directory. A cache keeps the graphs of every job that ever ran there,
of other compiler versions, of evaluation and initialisation, and `wrapped_neff.hlo`, a stub around
a compiled graph that would be counted again. So the selection is part of the answer: what was left
out is listed, and what could have been meant is said when nothing was found.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from ergmeter.errors import UsageError
from ergmeter.hlo.files import DOUBLES, STUBS, WRAPPED, is_module_name, without_doubles

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_MODULE = re.compile(rb"MODULE_[0-9A-Za-z]+(?:\+[0-9A-Za-z]+)?")
_MOST_OF_A_NAME = 256
_MOST_NAMES = 4
_CHUNK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One HLO file and what its path says of it."""

    path: str
    module: str | None  # MODULE_<hash>+<flags>
    compiler: str | None  # neuronxcc-<version>


@dataclass(frozen=True, slots=True)
class Choice:
    """Which graphs to count. Nothing chosen: all."""

    compilers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    named_in_log: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class CachedGraphs:
    """The graphs that were chosen, and what was seen on the way."""

    directory: str
    chosen: tuple[GraphFile, ...]
    left_out: dict[str, int]  # by reason
    seen: int  # HLO files, before any choice
    other_files: int
    near: tuple[str, ...]  # paths that look like a cache or a module, where nothing was found

    @property
    def compilers(self) -> tuple[str, ...]:
        """Versions of the compiler among the chosen graphs."""
        return tuple(sorted({file.compiler for file in self.chosen if file.compiler}))


def graph_file(path: str) -> GraphFile:
    """What a path says: the last of its parts that names a module, and that names a compiler."""
    module = compiler = None
    for part in Path(path).parts:
        if part.startswith("MODULE_"):
            module = part
        elif part.startswith("neuronxcc-"):
            compiler = part
    return GraphFile(path, module, compiler)


def find_graphs(directory: str, choice: Choice) -> CachedGraphs:
    """The HLO files under a directory, in the order of their paths."""
    left_out: dict[str, int] = {}
    chosen: list[GraphFile] = []
    seen = others = 0
    near: list[str] = []
    not_meant: list[GraphFile] = []
    for path in _files(directory):
        name = path.rpartition(os.sep)[2]
        if path != directory and not is_module_name(name):
            others += 1
            if name.endswith((".pb", ".neff", ".hlo.txt")) and len(near) < 3:
                near.append(path)
            continue
        seen += 1
        file = graph_file(path)
        if name == WRAPPED:
            reason: str | None = STUBS
        elif reason := _left_out(file, choice):
            not_meant.append(file)
        else:
            chosen.append(file)
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
    if not_meant and not chosen:
        raise UsageError(_nothing_meant(directory, left_out, not_meant))
    once = set(without_doubles(file.path for file in chosen))
    if len(once) < len(chosen):
        left_out[DOUBLES] = len(chosen) - len(once)
        chosen = [file for file in chosen if file.path in once]
    return CachedGraphs(directory, tuple(chosen), left_out, seen, others, tuple(near))


def _nothing_meant(directory: str, left_out: dict[str, int], there: list[GraphFile]) -> str:
    """That a choice leaves nothing, and what could have been chosen."""
    reasons = "; ".join(f"{n} {why}" for why, n in left_out.items() if why != STUBS)
    compilers = {file.compiler for file in there if file.compiler}
    modules = {file.module for file in there if file.module}
    return (
        f"no graph of {directory} is chosen: {reasons}; compilers there: {some(compilers)};"
        f" modules: {some(modules)}"
    )


def some(names: Collection[str]) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    shown = ", ".join(sorted(names)[:_MOST_NAMES]) or "none named"
    return f"{shown} and {more} more" if more > 0 else shown


def _files(directory: str) -> Iterable[str]:
    if Path(directory).is_file():
        return [directory]
    found = (str(Path(folder, name)) for folder, _, names in os.walk(directory) for name in names)
    return sorted(found)


def _left_out(file: GraphFile, choice: Choice) -> str | None:
    """Why a graph is not counted, or None if it is."""
    if choice.compilers and not _is_compiler(file.compiler, choice.compilers):
        return f"of another compiler than {', '.join(choice.compilers)}"
    if choice.modules and not _is_module(file.module, choice.modules):
        return f"of another module than {', '.join(choice.modules)}"
    if choice.named_in_log is not None and file.module not in choice.named_in_log:
        return "of a module that the log does not name"
    if choice.since is None and choice.until is None:
        return None
    written = datetime.fromtimestamp(Path(file.path).stat().st_mtime).astimezone()
    if choice.since is not None and written < choice.since:
        return f"written before {choice.since.isoformat(sep=' ')}"
    if choice.until is not None and written > choice.until:
        return f"written after {choice.until.isoformat(sep=' ')}"
    return None


def _is_compiler(name: str | None, wanted: tuple[str, ...]) -> bool:
    """A version with or without its `neuronxcc-`, and with or without its build (`+9e31e41a`)."""
    version = (name or "").removeprefix("neuronxcc-")
    named = [word.removeprefix("neuronxcc-") for word in wanted]
    return bool(version) and any(word in (version, version.partition("+")[0]) for word in named)


def _is_module(name: str | None, wanted: tuple[str, ...]) -> bool:
    """A module with or without its `MODULE_`, and with or without its flags (`+a65e371e`)."""
    module = (name or "").removeprefix("MODULE_")
    named = [word.removeprefix("MODULE_") for word in wanted]
    return bool(module) and any(word in (module, module.partition("+")[0]) for word in named)


def parse_time(text: str, *, option: str) -> datetime:
    """A time as people write it, in the local zone where it has none."""
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except ValueError:
        raise UsageError(
            f"{option} takes a time as 2025-06-10 or '2025-06-10 01:44:32'; got {text!r}"
        ) from None


def modules_named_in(path: str) -> frozenset[str]:
    """Every MODULE_... that a log names; the file is read in pieces, whatever its size."""
    names: set[bytes] = set()
    try:
        with _opened(Path(path)) as stream:
            tail = b""
            while piece := stream.read(_CHUNK_BYTES):
                text = tail + piece
                # A name that touches the end may go on in the next piece.
                names.update(
                    match[0] for match in _MODULE.finditer(text) if match.end() < len(text)
                )
                tail = text[-_MOST_OF_A_NAME:]
            names.update(match[0] for match in _MODULE.finditer(tail))
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    return frozenset(name.decode() for name in names)


def _opened(path: Path) -> BinaryIO:
    """The file, unpacked if it is packed."""
    with path.open("rb") as stream:
        is_packed = stream.read(2) == _GZIP
    return cast("BinaryIO", gzip.open(path)) if is_packed else path.open("rb")
