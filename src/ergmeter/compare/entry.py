"""Entries of a comparison: one measured run each, from a run, a ledger's row, a bench cell or an
analysis. Each package declares its sources of entries under the entry point `ergmeter.entries`.

Facts are normalised here: "1024", "1024.0" and 1024 are one sequence length, True and "true" one
value, and an empty cell is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from ergmeter.metrics.catalog import refusal
from ergmeter.records import Missing, Reading, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ergmeter.runlog.settings import Settings

EntryKind: TypeAlias = Literal["run", "ledger", "cell", "analysis"]
FAILED = ("oom", "error", "timeout", "diverged", "cancelled")  # statuses of runs that failed
EVAL_LOSS = "training.eval_loss"
_ABSENT = ("", "none", "nan", "null", "-")
_WORDS = {"true": "yes", "false": "no"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One run: its `facts` by the ledger's column names, and its metrics."""

    source: str  # for messages: a path, with the line in a ledger
    argument: str  # what was named on the command line
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

    def value(self, key: str) -> float | None:
        """A metric's value; None if it is missing or impossible."""
        reading = self.figures.get(key)
        return reading.value if isinstance(reading, Reading) and not reading.impossible else None

    def why_not(self, key: str) -> str:
        """The reason why `value` is None."""
        result = self.figures.get(key)
        if isinstance(result, Reading) and result.impossible:
            return refusal(result)
        return result.reason if isinstance(result, Missing) else "the source does not hold it"

    def number(self, name: str) -> float | None:
        """A fact as a number; None if it is absent or no number."""
        try:
            return float(self.facts[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class SourceEntries:
    """The entries of a source, and what could not be used with the reasons."""

    entries: tuple[Entry, ...] = ()
    left_out: tuple[str, ...] = ()
    failed: tuple[Entry, ...] = ()  # runs without metrics; each has a line in `left_out`


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
        """The entries there; cells that failed are entries too. FormatError if it is damaged."""


def over_one_window(entries: Sequence[Entry], window: str) -> tuple[list[Entry], Entry | None]:
    """Entries over one kind of window, and the first that can't be computed again over it."""
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
