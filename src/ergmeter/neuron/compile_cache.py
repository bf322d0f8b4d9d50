"""Finds the HLO files in a Neuron compile cache and selects those to count.

A cache has the graphs of every job on the machine, of all compiler versions, and of evaluation and
initialisation. It also has `wrapped_neff.hlo` files, wrappers of graphs that would be counted
twice. So the document lists the files left out, and an empty selection is an error that lists the
choices.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ergmeter.errors import FormatError, UsageError
from ergmeter.hlo.files import STUBS, module_files
from ergmeter.ports import LineHints

# The number of runs of each graph, from the user's file: the weights of the overall ratio. Without
# it an initialisation graph counts as much as the training step: a cache has each graph once.


def read_graph_runs(path: str) -> dict[str, int]:
    """Return the runs of each module, from lines `MODULE_... 1234` (or with a comma)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise FormatError(f"--graph-runs {path} can't be read: {why}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"--graph-runs {path} is not a text file: {error}") from error
    runs: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not words[1].isdigit():
            raise FormatError(
                f"--graph-runs {path}, line {number}: a module and its number of runs are needed;"
                f" got {line.strip()[:80]!r}"
            )
        runs[words[0]] = int(words[1])
    if not runs:
        raise FormatError(f"--graph-runs {path} is empty; each line needs MODULE_... and a number")
    return runs


def name_in(runs: dict[str, int], module: str | None) -> str | None:
    """Return the key of a module in `runs`, with or without its flags; None if absent."""
    names = () if module is None else (module, module.partition("+")[0])
    return next((name for name in names if name in runs), None)


def runs_of(module: str | None, runs: dict[str, int]) -> int:
    """Return how often a module ran; 0 if `runs` does not have it."""
    return runs.get(name_in(runs, module) or "", 0)


_MODULE = re.compile(r"MODULE_[0-9A-Za-z]+(?:\+[0-9A-Za-z]+)?")
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class GraphFile:
    """An HLO file, with the module and the compiler that its path names."""

    path: str
    module: str | None  # MODULE_<hash>+<flags>
    compiler: str | None  # neuronxcc-<version>


@dataclass(frozen=True, slots=True)
class Choice:
    """Which graphs to count. No field set: all."""

    compilers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    named_in_log: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class CachedGraphs:
    """The selected graphs of a directory, and counts of the other HLO files."""

    directory: str
    chosen: tuple[GraphFile, ...]
    left_out: dict[str, int]  # by reason


def graph_file(path: str) -> GraphFile:
    """Return a file with the module and compiler in its path: the last part that names each."""
    module = compiler = None
    for part in Path(path).parts:
        if part.startswith("MODULE_"):
            module = part
        elif part.startswith("neuronxcc-"):
            compiler = part
    return GraphFile(path, module, compiler)


def find_graphs(directory: str, choice: Choice) -> CachedGraphs:
    """Return the chosen HLO files under a directory, sorted by path. Raises UsageError if none."""
    paths, left_out = module_files(Path(directory))
    chosen, not_chosen = list[GraphFile](), list[GraphFile]()
    for file in (graph_file(str(path)) for path in paths):
        reason = _left_out(file, choice)
        if reason is None:
            chosen.append(file)
        else:
            not_chosen.append(file)
            left_out[reason] = left_out.get(reason, 0) + 1
    if not_chosen and not chosen:
        raise UsageError(_nothing_meant(directory, left_out, not_chosen))
    return CachedGraphs(directory, tuple(chosen), left_out)


def _nothing_meant(directory: str, left_out: dict[str, int], there: list[GraphFile]) -> str:
    """Return the error for an empty selection; it lists the cache's compilers and modules."""
    reasons = "; ".join(f"{n} {why}" for why, n in left_out.items() if why != STUBS)
    compilers = {file.compiler for file in there if file.compiler}
    modules = {file.module for file in there if file.module}
    return (
        f"no graph of {directory} is chosen: {reasons}; compilers there:"
        f" {abbreviated_list(compilers)}; modules: {abbreviated_list(modules)}"
    )


def abbreviated_list(names: Collection[str]) -> str:
    """Return the first four names as text, and the number of the others."""
    more = len(names) - _MOST_NAMES
    listed = ", ".join(sorted(names)[:_MOST_NAMES]) or "none named"
    return f"{listed} and {more} more" if more > 0 else listed


def _left_out(file: GraphFile, choice: Choice) -> str | None:
    """Return why a graph is not counted, or None if it is."""
    if not _is_chosen(file.compiler, choice.compilers, "neuronxcc-"):
        return f"of another compiler than {', '.join(choice.compilers)}"
    if not _is_chosen(file.module, choice.modules, "MODULE_"):
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


def _is_chosen(name: str | None, wanted: tuple[str, ...], prefix: str) -> bool:
    """True if `name` is in `wanted`, with or without its prefix and its `+9e31e41a` suffix."""
    bare = (name or "").removeprefix(prefix)
    named = {word.removeprefix(prefix) for word in wanted}
    return not wanted or (bool(bare) and not named.isdisjoint({bare, bare.partition("+")[0]}))


def parse_time(text: str, *, option: str) -> datetime:
    """Parse an ISO time; without a zone it is local time."""
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except ValueError:
        raise UsageError(
            f"{option} takes a time as 2025-06-10 or '2025-06-10 01:44:32'; got {text!r}"
        ) from None


def modules_named_in(path: str) -> frozenset[str]:
    """Return every MODULE_... name in a log, which may be in gzip."""
    from ergmeter.importers.logfile import LogFile  # noqa: PLC0415  for those with a log

    log = LogFile(path)
    log.words = LineHints((b"MODULE_",))
    return frozenset(name for line in log.lines() for name in _MODULE.findall(line.text))
