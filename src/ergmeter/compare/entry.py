"""What a comparison is made of: one measured run each, from a run directory or a ledger's row.

The trap: "1024", "1024.0" and 1024 are one sequence length, True and "true" one answer, and an
empty cell is none. Facts are brought to one spelling here, once, so that what differs does differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.metrics.catalog import refusal
from ergmeter.records import Missing, Reading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.records import Result

EVAL_LOSS = "training.eval_loss"
_ABSENT = ("", "none", "nan", "null", "-")
_WORDS = {"true": "yes", "false": "no"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One run: what it was (`facts`, by the ledger's column names) and what it came to."""

    source: str  # for people: a path, of a ledger with the line
    given: str  # what was named on the command line
    facts: Mapping[str, str]
    figures: Mapping[str, Result]  # by key of the catalogue
    run: Path | None = None  # its directory, where there is one
    remarks: tuple[str, ...] = ()
    assumed: frozenset[str] = frozenset()  # keys whose low and high are where they may lie instead
    training: int | None = None  # which one, of several in its directory
    cautions: tuple[str, ...] = ()  # what disturbed it, or is missing of it

    def value(self, key: str) -> float | None:
        """A figure's value, if there is one that can be computed with."""
        found = self.figures.get(key)
        return found.value if isinstance(found, Reading) and not found.impossible else None

    def why_not(self, key: str) -> str:
        """Why there is none, or none to compute with."""
        found = self.figures.get(key)
        if isinstance(found, Reading) and found.impossible:
            return refusal(found)
        return found.reason if isinstance(found, Missing) else "the source does not hold it"

    def number(self, name: str) -> float | None:
        """A fact as a number."""
        try:
            return float(self.facts[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class SourceEntries:
    """What a source held: entries, and what could not be used, each with its reason."""

    entries: tuple[Entry, ...] = ()
    left_out: tuple[str, ...] = ()


def fact(value: object) -> str | None:
    """One spelling of a fact; None where nothing is said."""
    if value is None:
        return None
    if isinstance(value, list | tuple | set | frozenset):
        return " ".join(sorted(str(one) for one in value)) or None
    text = " ".join(str(value).split())
    if text.lower() in _ABSENT:
        return None
    text = _WORDS.get(text.lower(), text)
    # Only whole numbers: 2.10 is another version than 2.1, and 12e4567 is a commit.
    return text.partition(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


def facts_of(said: Mapping[str, object]) -> dict[str, str]:
    """The facts that somebody said, each in one spelling."""
    found = {name: fact(value) for name, value in said.items()}
    return {name: value for name, value in found.items() if value is not None}


# How a run that may be compared has ended: its own word, or that of who wrote its ledger row.
_WHOLE = ("finished", "imported", "exit code 0")


def why_left_out(status: str | None) -> str | None:
    """Why a run with this status is not compared; None if it is. A ledger may say nothing."""
    if status is None or status in _WHOLE:
        return None
    return "it is still running" if status == "running" else f"it did not finish ({status})"
