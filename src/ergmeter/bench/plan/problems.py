"""What is wrong with a file of scenarios, all of it at once, a line for each kind?

The trap: a name that matches nothing and is dropped. The system this follows left out unknown
names of frameworks in silence, so that a matrix of six ran four and nobody missed two.

The other trap: a list that nobody reads to its end. What differs in quoted names alone is of one
kind; each kind is told once, with its number, and the most frequent first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ergmeter.errors import UsageError

_SHOWN = 12
_KINDS = 5
_QUOTED = re.compile(r"(?<!\w)(?:'[^']*'|\"[^\"]*\")(?!\w)")


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
        """End with the first of each kind, and how many more are like it."""
        if not self.found:
            return
        kinds: dict[str, list[str]] = {}
        for line in self.found:
            kinds.setdefault(_QUOTED.sub("", line), []).append(line)
        ranked = sorted(kinds.values(), key=len, reverse=True)
        told = [
            one[0] + (f" (and {len(one) - 1} more like it)" if one[1:] else "")
            for one in ranked[:_KINDS]
        ]
        left = sum(map(len, ranked[_KINDS:]))
        told += [f"and {left} others"] if left else []
        between = "\n  " if told[1:] else " "
        raise UsageError(f"{self.path}:{between}{between.join(told)}")


def hint(name: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """What may have been meant, if anything is as near as that; or what there is."""
    known = list(dict.fromkeys(names))
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=cutoff)
    if near:
        return f"did you mean {near[0]}?"
    shown = ", ".join(known[:_SHOWN]) or "none"
    return f"there are {shown}" + (", ..." if len(known) > _SHOWN else "")
