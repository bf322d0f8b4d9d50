"""Finds HLO module files in directories, and counts them.

A damaged file has an error in its result; the other files are still counted. Without the compiled
reader, large amounts are counted in parallel by one process per core.
"""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.errors import ErgmeterError
from ergmeter.hlo.count import count_file
from ergmeter.hlo.reading import reader_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ergmeter.hlo.result import ModuleCount

# File names of Neuron's caches and XLA's dumps. If a graph has several files, the first name in
# this order is counted: model.hlo_module.pb; model.hlo.pb of 2023 and XLA's own dumps; graph.hlo of
# inference. Since SDK 2.27 inference also has hlo_module in the middle of a name.
_ENDINGS = (".hlo_module.pb", ".hlo.pb", ".hlo")
_OTHER = re.compile(r"(?!.*\.(lock|json|txt|neff|done|log)$).*hlo_module.*")
SHOWN_NAMES = "*.hlo_module.pb, *.hlo.pb, *.hlo, names with hlo_module; each also as .gz"
WRAPPED = "wrapped_neff.hlo"  # a compiled binary in an HLO wrapper: the module has the same work
_MANY_BYTES = 64 << 20  # counting this takes 0.6 s, starting processes 0.1 s
STUBS = f"{WRAPPED}, a stub around a compiled graph"
DOUBLES = "the same graph under another name or packing, in the same directory"


@dataclass(frozen=True, slots=True)
class FileCount:
    """The count of a file, or its error."""

    path: Path
    size_bytes: int
    count: ModuleCount | None
    error: str | None


def is_module_name(name: str) -> bool:
    """True if the file name is one of an HLO module."""
    return name.removesuffix(".gz").endswith(_ENDINGS) or bool(_OTHER.fullmatch(name))


def without_doubles(paths: Iterable[str]) -> list[str]:
    """Drop duplicates: files of one directory that differ only in ending or gzip packing.

    A cache of several SDK versions can have model.hlo.pb, model.hlo_module.pb and a .gz of one
    graph, which would then be counted three times.
    """
    best: dict[str, tuple[int, str]] = {}
    for path in paths:
        graph, rank = _graph_of(path)
        best[graph] = min(best.get(graph, (rank, path)), (rank, path))
    return [path for _, path in best.values()]


def _graph_of(path: str) -> tuple[str, int]:
    """Return the path without its ending, and the ending's rank (lowest is preferred)."""
    plain = path.removesuffix(".gz")
    is_packed = plain != path
    for rank, ending in enumerate(_ENDINGS):
        if plain.endswith(ending):
            return plain.removesuffix(ending), 2 * rank + is_packed
    return plain, 2 * len(_ENDINGS) + is_packed


def module_files(path: Path) -> tuple[list[Path], dict[str, int]]:
    """Return the module files under a directory, and the number of files left out by reason.

    If `path` is a file, it is the only module, whatever its name.
    """
    paths = [path] if path.is_file() else [p for p in path.rglob("*") if is_module_name(p.name)]
    files = sorted(str(file) for file in paths if file.is_file())
    graphs = [file for file in files if Path(file).name != WRAPPED]
    unique = without_doubles(graphs)
    left_out = {STUBS: len(files) - len(graphs), DOUBLES: len(graphs) - len(unique)}
    return list(map(Path, unique)), {why: count for why, count in left_out.items() if count}


def count_files(paths: Iterable[str | Path]) -> Iterator[FileCount]:
    """Yield the count or the error of each file, in the order given."""
    every = [Path(path) for path in paths]
    if sys.platform != "linux" or reader_name() == "compiled" or len(every) < 2:
        return map(_counted, every)
    size_bytes = sum(path.stat().st_size for path in every if path.is_file())
    return map(_counted, every) if size_bytes < _MANY_BYTES else _counted_by_processes(every)


def _counted_by_processes(paths: Sequence[Path]) -> Iterator[FileCount]:
    """Count files on all cores; if a process is killed, the rest in this process."""
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415  slow to load
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415
    from multiprocessing import get_context  # noqa: PLC0415

    ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command itself
    pool = ProcessPoolExecutor(None, get_context("fork"), signal.signal, ignored)
    done = 0
    try:
        for done, counted in enumerate(pool.map(_counted, paths), start=1):  # noqa: B007
            yield counted
    except BrokenProcessPool:
        yield from map(_counted, paths[done:])
    finally:
        pool.shutdown(cancel_futures=True)


def _counted(path: Path) -> FileCount:
    """Return the count of a file, or its error (without the path)."""
    count, error = None, None
    try:
        size_bytes = path.stat().st_size
    except OSError:
        size_bytes = 0
    try:
        count = count_file(path)
    except ErgmeterError as failure:
        error = str(failure).removeprefix(f"{path}: ")
    except OSError as failure:
        error = f"can't be read: {failure.strerror or failure}"
    except MemoryError:
        error = "needs more memory than there is"
    return FileCount(path, size_bytes, count, error)
