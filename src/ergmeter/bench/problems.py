"""What is wrong with a file of scenarios, all of it, in one line?

The trap: a name that matches nothing and is dropped. The system this follows left out unknown
names of frameworks in silence, so that a matrix of six ran four and nobody missed two.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ergmeter.errors import UsageError

_SHOWN = 12
_MORE = 5


@dataclass(slots=True)
class Problems:
    """Everything that is wrong with one file, collected before anything starts."""

    path: Path
    found: list[str] = field(default_factory=list)

    def add(self, text: str, *, scenario: str = "") -> None:
        """One more; said once, however many cells have it."""
        line = f"scenario {scenario!r}: {text}" if scenario else text
        if line not in self.found:
            self.found.append(line)

    def stop_if_any(self) -> None:
        """End with the first of them, and the others behind it."""
        if not self.found:
            return
        first, *others = self.found
        more = ""
        if others:
            left = f"; and {len(others) - _MORE} others" if len(others) > _MORE else ""
            more = f" (and {len(others)} more: {'; '.join(others[:_MORE])}{left})"
        raise UsageError(f"{self.path}: {first}{more}")


def hint(name: object, names: Iterable[str]) -> str:
    """What may have been meant, or what there is."""
    known = list(dict.fromkeys(names))
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    shown = ", ".join(known[:_SHOWN]) or "none"
    return f"there are {shown}" + (", ..." if len(known) > _SHOWN else "")
