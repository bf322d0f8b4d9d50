"""Entries of a comparison, their groups, and the measures that they are compared by.

An entry is a run, a job of several runs, a ledger's row, a bench cell or an analysis. Each package
declares its sources of entries under the entry point `ergmeter.entries`.

Facts are normalised here: "1024", "1024.0" and 1024 are one sequence length, True and "true" one
value, and an empty cell is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from ergmeter import registry
from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.metrics.catalog import Metric, every_metric, find, refusal
from ergmeter.records import Missing, Reading, Result
from ergmeter.runlog.settings import Settings
from ergmeter.stats.ratio import mean

EntryKind: TypeAlias = Literal["run", "job", "ledger", "cell", "analysis"]
FAILED = ("oom", "error", "timeout", "diverged", "cancelled")  # statuses of runs that failed
EVAL_LOSS = "training.eval_loss"
SOURCE = "source"  # not a column of the data: the path on the command line
BATCH = ("batch_size", "grad_accum", "world_size")
_NAMES = {"eval_loss": EVAL_LOSS, "train_loss": "training.loss"}
NOT_COMPARABLE = "not comparable: "  # begins a reason against comparing one metric
_ABSENT = ("", "none", "nan", "null", "-")
_WORDS = {"true": "yes", "false": "no"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One run: its `facts` by the ledger's column names, and its metrics."""

    source: str  # for messages: a path, with the line in a ledger
    argument: str  # the path named on the command line
    facts: Mapping[str, str]
    figures: Mapping[str, Result]  # by key of the catalogue
    run: Path | None = None  # its directory, where there is one
    remarks: tuple[str, ...] = ()
    assumed: frozenset[str] = frozenset()  # keys whose low and high are bounds of an assumption
    training: int | None = None  # its number, if its directory has several trainings
    cautions: tuple[str, ...] = ()  # what disturbed the run, or is missing
    kind: EntryKind = "run"
    status: str = "ok"  # or one of FAILED, or "running", "pending"
    reason: str = ""  # why it failed
    broken: str = ""  # expectations of its scenario that it did not meet
    settings: Mapping[str, Any] = field(default_factory=dict)  # its configuration, as spelled there
    configuration_id: str = ""  # equal for repeats of one bench configuration
    conditions: Mapping[str, str | None] = field(default_factory=dict)  # how it was measured
    again: Callable[[], Entry | None] | None = None  # computes it again over the training window
    job: str = ""  # the job that it is a run of; once all runs are read, only if that was resumed
    flops_per_token: float | None = None  # under the convention in its facts

    def value(self, key: str) -> float | None:
        """A metric's value; None if it is missing or impossible."""
        reading = self.figures.get(key)
        return reading.value if isinstance(reading, Reading) and not reading.impossible else None

    def why_not(self, key: str) -> str:
        """The reason why `value` is None."""
        result = self.figures.get(key)
        if isinstance(result, Reading) and result.impossible:
            return refusal(result)
        return result.reason if isinstance(result, Missing) else "the source does not have it"

    def number(self, name: str) -> float | None:
        """A fact as a number; None if it is absent or no number."""
        try:
            return float(self.facts[name])
        except (KeyError, ValueError):
            return None


# Measures.


def measure(name: str) -> Metric:
    """A metric by its key or an alias. UsageError for an unknown one."""
    metric = every_metric().get(_NAMES.get(name.lower(), name)) or find(name)[0]
    if metric.unit == "C":
        raise UsageError(f"a ratio of temperatures ({metric.key}) means nothing")
    return metric


def rule_scale(name: str) -> float:
    """The factor from the catalogue's unit to that of a rule's metric name: 1e-6 for MB."""
    try:
        alias = find(name, every_metric())[1]
    except UsageError:
        return 1.0  # a name that only rules have
    return alias.scale if alias else 1.0


# Groups.


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that are repeats of one another."""

    name: str
    entries: tuple[Entry, ...]

    def values(self, column: str) -> set[str]:
        """The distinct values of a column."""
        values = (column_of(entry, column) for entry in self.entries)
        return {value for value in values if value is not None}

    @property
    def ok(self) -> tuple[Entry, ...]:
        """The runs that ended well."""
        return tuple(entry for entry in self.entries if entry.status == "ok")

    @property
    def failed(self) -> tuple[Entry, ...]:
        """The runs that failed."""
        return tuple(entry for entry in self.entries if entry.status in FAILED)

    @property
    def broken(self) -> tuple[str, ...]:
        """Expectations that runs which ended well did not meet.

        A failed run may have ended before it could meet them.
        """
        return tuple(dict.fromkeys(entry.broken for entry in self.ok if entry.broken))

    def numbers(self, key: str) -> list[float]:
        """A metric of each run that ended well and has it; empty if one is impossible."""
        readings = [entry.figures.get(key) for entry in self.ok]
        present = [reading for reading in readings if isinstance(reading, Reading)]
        if any(reading.impossible for reading in present):
            return []
        return [reading.value for reading in present]

    def keys_of(self, measured: Metric) -> tuple[str, ...]:
        """The metrics by which a measure is compared, the best first.

        A cell's headline rate is not one of them: it may be of real or of computed tokens.
        """
        if measured.alternatives and all(entry.kind == "cell" for entry in self.entries):
            return measured.alternatives
        return measured.every_key

    def has(self, measured: Metric) -> bool:
        """True if a run that ended well has one of the measure's metrics."""
        return any(self.numbers(key) for key in self.keys_of(measured))

    def mean(self, key: str) -> float | None:
        """The geometric mean of a metric; None if there is none."""
        try:
            return mean(self.numbers(key)).value
        except NotMeasurable:
            return None


def column_of(entry: Entry, column: str) -> str | None:
    """The value of a column of an entry; None if it has none."""
    if column == SOURCE:
        return entry.argument
    if column == "batch":
        size, accum, world = (entry.number(name) for name in BATCH)
        return None if size is None else f"{size * (accum or 1) * (world or 1):g}"
    value = entry.facts.get(column)
    if column == "bits" and value is None and "tuning" in entry.facts:
        return "none"  # a run that states its tuning also states bits, if quantised
    # QLoRA is LoRA on quantised weights; bits are a column of their own.
    return "lora" if column == "tuning" and value == "qlora" else value


# Sources.


@dataclass(frozen=True, slots=True)
class SourceEntries:
    """A source's entries, failed runs included, and a line for each part that was unreadable."""

    entries: tuple[Entry, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def ended_well(self) -> tuple[Entry, ...]:
        """The entries that can be compared."""
        return tuple(entry for entry in self.entries if entry.status == "ok")

    @property
    def unused(self) -> tuple[str, ...]:
        """A line with the reason for each thing that can't be compared, failed runs included."""
        failed = [entry for entry in self.entries if entry.status != "ok"]
        return (*self.left_out, *(f"{e.source}: {e.reason or e.status}" for e in failed))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings and metrics that are read from each run."""

    settings: Settings | None = None
    keys: tuple[str, ...] = ()


class EntrySource(Protocol):
    """A kind of file or directory that entries are read from (entry point `ergmeter.entries`)."""

    def recognises(self, path: Path) -> bool:
        """True if the path is of this kind. Reads no more than its beginning."""

    def read(self, path: Path, wanted: Wanted) -> SourceEntries:
        """The entries at `path`, failed cells included. FormatError if it is damaged."""


def source_of(path: Path) -> EntrySource | None:
    """The source that recognises a path; None if none does."""
    for name in registry.names("entries"):
        source: EntrySource = registry.load("entries", name)()
        if source.recognises(path):
            return source
    return None


def read_side(path: Path, keys: Iterable[str]) -> SourceEntries:
    """The entries of one side of a gate: bench cells, an analysis, runs or a ledger.

    Failed runs are entries too. FormatError if the path is missing or holds none of these.
    """
    source = source_of(path)
    if source is None:
        state = "has nothing to judge" if path.exists() else "is not there"
        raise FormatError(
            f"{path} {state}: give a run, a ledger, a directory of results, a Parquet or CSV file,"
            " or an analysis"
        )
    return source.read(path, Wanted(keys=tuple(keys)))


def over_one_window(entries: Sequence[Entry], window: str) -> tuple[list[Entry], Entry | None]:
    """Recompute entries over one kind of window.

    If an entry can't be recomputed, return all entries unchanged, and that entry.
    """
    result = []
    for entry in entries:
        if entry.kind == "run" or entry.facts.get("window", window) == window:
            result.append(entry)
            continue
        computed = entry.again() if entry.again else None
        if computed is None:
            return list(entries), entry
        result.append(computed)
    return result, None


def fact(value: object) -> str | None:
    """A fact in its normal spelling; None if it is empty."""
    if value is None:
        return None
    if isinstance(value, list | tuple | set | frozenset):
        return " ".join(sorted(str(item) for item in value)) or None
    text = " ".join(str(value).split())
    if text.lower() in _ABSENT:
        return None
    text = _WORDS.get(text.lower(), text)
    # Only whole numbers: 2.10 is another version than 2.1, and 12e4567 is a commit.
    return text.partition(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


def facts_of(values: Mapping[str, object]) -> dict[str, str]:
    """The facts that are not empty, in their normal spelling."""
    facts = {name: fact(value) for name, value in values.items()}
    return {name: value for name, value in facts.items() if value is not None}


# Statuses of complete runs, in a run's own header or in a ledger.
_COMPLETE = ("finished", "imported", "exit code 0")


def why_left_out(status: str | None) -> str | None:
    """The reason why a run with this status is left out; None if it is compared."""
    if status is None or status in _COMPLETE:
        return None
    return "it is still running" if status == "running" else f"it did not finish ({status})"
