"""Finds module files in directories and counts many of them in parallel.

A damaged file is an error value in its result, and the others are still counted. Work is shared
among processes of our own, the largest file first. They are not forked, since the caller may have
threads, and not multiprocessing's, which runs the caller's script again. A killed process is that
file's error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib.util import source_hash
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ergmeter.atomic_write import cache_directory, write_text
from ergmeter.errors import ErgmeterError, UsageError
from ergmeter.hlo.calls import Kernel
from ergmeter.hlo.count import count_file
from ergmeter.hlo.reading import reader_name
from ergmeter.hlo.result import ModuleCount

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Iterator

# A cache of counts: a small JSON file for each module, in the user's cache directory. Modules in a
# compiler's cache never change. A file is the same if its path, size and modification time are. A
# change of the counting code makes all entries void. Errors are not cached, since the file may
# still be written.


def sources() -> list[Path]:
    """The source files of the counting code, Python and C."""
    here = Path(__file__).parent
    return sorted([*here.glob("*.py"), *here.glob("*.c")])


@lru_cache(maxsize=1)
def _version() -> str:
    """A hash of the counting code."""
    return source_hash(b"".join(source.read_bytes() for source in sources())).hex()


Key: TypeAlias = "list[object] | None"


def file_key(path: Path) -> Key:
    """Path, size and modification time of a file; None if it can't be read."""
    try:
        state = path.stat()
    except OSError:
        return None
    return [str(path.absolute()), state.st_size, state.st_mtime_ns, _version()]


class Memo:
    """Counts of earlier runs, in a directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or cache_directory() / "hlo"

    def recall(self, path: Path) -> ModuleCount | None:
        """The cached count of a file, or None."""
        try:
            cached = json.loads(self._entry_path(path).read_bytes())
            return restore_count(cached["count"]) if cached["key"] == file_key(path) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, path: Path, key: Key, count: ModuleCount) -> None:
        """Caches a count, unless the file has changed since it was opened."""
        if key is None or key != file_key(path):
            return
        target = self._entry_path(path)
        with suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_text(target, json.dumps({"key": key, "count": asdict(count)}))

    def _entry_path(self, path: Path) -> Path:
        name = source_hash(os.fsencode(path.absolute())).hex()
        return self._directory / name[:2] / f"{name}.json"


def restore_count(cached: dict[str, Any]) -> ModuleCount:
    """Restores a count from its JSON."""
    if set(cached) != {entry.name for entry in fields(ModuleCount)}:
        raise ValueError("another version's memo")
    kernels = tuple(Kernel(**entry) for entry in cached.pop("kernels"))
    loops, branches = (tuple(cached.pop(name)) for name in ("unknown_loops", "uneven_branches"))
    return ModuleCount(kernels=kernels, unknown_loops=loops, uneven_branches=branches, **cached)


# The names that Neuron's caches and XLA's dumps use, in the order in which a graph that is there
# under several of them is taken: model.hlo_module.pb; model.hlo.pb of 2023 and XLA's own dumps;
# graph.hlo of inference. Since SDK 2.27 inference also has hlo_module in the middle of a name.
_ENDINGS = (".hlo_module.pb", ".hlo.pb", ".hlo")
_OTHER = re.compile(r"(?!.*\.(lock|json|txt|neff|done|log)$).*hlo_module.*")
SHOWN_NAMES = "*.hlo_module.pb, *.hlo.pb, *.hlo, names with hlo_module; each also as .gz"
WRAPPED = "wrapped_neff.hlo"  # a compiled binary in an HLO wrapping: its work is in the module
STUBS = f"{WRAPPED}, a stub around a compiled graph"
DOUBLES = "the same graph under another name or packing, in the same directory"
# Below this, starting a process takes longer than the work; the compiled reader is quick.
_BYTES_PER_PROCESS = {"compiled": 200 << 20, "protobuf": 5 << 20}


@dataclass(frozen=True, slots=True)
class FileCount:
    """The count of a file, or its error."""

    path: Path
    size_bytes: int
    count: ModuleCount | None
    error: str | None
    from_memo: bool = False


def is_module_name(name: str) -> bool:
    """Whether a file of that name holds a module."""
    return name.removesuffix(".gz").endswith(_ENDINGS) or bool(_OTHER.fullmatch(name))


def without_doubles(paths: Iterable[str]) -> list[str]:
    """Drops duplicates: files of one directory that differ only in ending or packing.

    A cache that is carried over keeps model.hlo.pb beside model.hlo_module.pb, and what is packed
    beside what is not; counted each, one graph weighs three times.
    """
    best: dict[str, tuple[int, str]] = {}
    for path in paths:
        graph, rank = _graph_of(path)
        best[graph] = min(best.get(graph, (rank, path)), (rank, path))
    return [path for _, path in best.values()]


def _graph_of(path: str) -> tuple[str, int]:
    """The path without its ending, and the ending's rank."""
    plain = path.removesuffix(".gz")
    is_packed = plain != path
    for rank, ending in enumerate(_ENDINGS):
        if plain.endswith(ending):
            return plain.removesuffix(ending), 2 * rank + is_packed
    return plain, 2 * len(_ENDINGS) + is_packed


def module_files(path: Path) -> tuple[list[Path], dict[str, int]]:
    """Finds the modules under a directory, and counts the files left out by reason."""
    paths = sorted(str(file) for file in path.rglob("*") if is_module_name(file.name))
    files = [file for file in paths if Path(file).is_file()]
    graphs = [file for file in files if Path(file).name != WRAPPED]
    unique = without_doubles(graphs)
    left_out = {STUBS: len(files) - len(graphs), DOUBLES: len(graphs) - len(unique)}
    return list(map(Path, unique)), {why: count for why, count in left_out.items() if count}


def count_files(
    paths: Iterable[str | Path],
    *,
    processes: int | None = None,
    memo: bool | Path | None = True,
    progress: Callable[[FileCount], None] | None = None,
) -> Iterator[FileCount]:
    """Count files, in the order given; `memo` may be the directory to keep counts in.

    `progress` is called with each file as it is done, in whichever order that is.
    """
    if processes is not None and processes < 1:
        raise UsageError(f"{processes} processes can't count anything; pass 1 or more")
    cache = Memo(memo if isinstance(memo, Path) else None) if memo else None
    return _in_order(_finished([Path(path) for path in paths], processes, cache), progress)


def _in_order(
    finished: Iterator[tuple[int, FileCount]], progress: Callable[[FileCount], None] | None
) -> Iterator[FileCount]:
    early: dict[int, FileCount] = {}
    position = 0
    for number, result in finished:
        if progress:
            progress(result)
        early[number] = result
        while position in early:
            yield early.pop(position)
            position += 1


def _finished(
    files: list[Path], processes: int | None, memo: Memo | None
) -> Iterator[tuple[int, FileCount]]:
    """Yields each file's number with its result, as soon as it is ready."""
    left: dict[int, int] = {}
    for number, path in enumerate(files):
        size_bytes = _size_bytes(path)
        count = memo.recall(path) if memo else None
        if count is None:
            left[number] = size_bytes
        else:
            yield number, FileCount(path, size_bytes, count, None, from_memo=True)
    workers = _workers(processes, left)
    results = _shared(files, left, workers) if workers > 1 else _alone(files, left)
    for number, key, result in results:
        path = files[number]
        if isinstance(result, str):
            yield number, FileCount(path, left[number], None, result)
        else:
            if memo:
                memo.keep(path, key, result)
            yield number, FileCount(path, left[number], result, None)


_Result: TypeAlias = "tuple[int, Key, ModuleCount | str]"


def _alone(files: list[Path], left: dict[int, int]) -> Iterator[_Result]:
    for number in left:
        key = file_key(files[number])
        yield number, key, _tried(files[number])


def _shared(files: list[Path], left: dict[int, int], workers: int) -> Iterator[_Result]:
    # Loaded here: most counts are done before these modules are.
    from concurrent.futures import ThreadPoolExecutor, as_completed  # noqa: PLC0415
    from queue import SimpleQueue  # noqa: PLC0415

    idle: SimpleQueue[_Worker] = SimpleQueue()
    team = [_Worker() for _ in range(workers)]
    for worker in team:
        idle.put(worker)

    def count(number: int) -> _Result:
        worker = idle.get()
        try:
            return number, file_key(files[number]), worker.count(files[number])
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(workers)
    try:
        largest_first = sorted(left, key=left.__getitem__, reverse=True)
        for done in as_completed([threads.submit(count, number) for number in largest_first]):
            yield done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in team:
            worker.stop()


def _workers(processes: int | None, left: dict[int, int]) -> int:
    if processes is None:
        share_bytes = _BYTES_PER_PROCESS[reader_name()]
        has_affinity = hasattr(os, "sched_getaffinity")  # on Linux; it heeds a container's share
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        processes = min(cores, 1 + sum(left.values()) // share_bytes)
    return min(processes, len(left))


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tried(path: Path) -> ModuleCount | str:
    """The count, or why there is none, without the path."""
    try:
        return count_file(path)
    except ErgmeterError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except MemoryError:
        return "needs more memory than there is"


class _Worker:
    """A process that counts one file at a time, and is started again if it dies."""

    def __init__(self) -> None:
        self._stopped = False
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        import subprocess  # noqa: PLC0415

        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from ergmeter.hlo.files import serve; serve()"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def count(self, path: Path) -> ModuleCount | str:
        """Counts a file in the worker process."""
        reply = ""
        if self._process.stdin and self._process.stdout:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(os.fsdecode(path)) + "\n")
                self._process.stdin.flush()
                reply = self._process.stdout.readline()
        if not reply.endswith("\n"):
            self._end()
            code = self._process.returncode
            if not self._stopped:
                self._process = self._started()
            return f"the process that read it ended with code {code}"
        answer = json.loads(reply)
        return answer if isinstance(answer, str) else restore_count(answer)

    def stop(self) -> None:
        """End the process for good."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve() -> None:
    """Worker loop: counts the files whose paths arrive on standard input."""
    for line in sys.stdin:
        result = _tried(Path(json.loads(line)))
        sys.stdout.write(json.dumps(result if isinstance(result, str) else asdict(result)) + "\n")
        sys.stdout.flush()
