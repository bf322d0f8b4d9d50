"""How is it with the cells of a bench? Gathered a cell at a time, for `erg bench list`.

The trap: a list that is made whole to show its first page. Of cells beyond `most` only their
number by status is kept, and of each setting that it is not the same everywhere.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ergmeter.bench.execute.outcome import FINAL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from ergmeter.bench.execute.outcome import Status
    from ergmeter.bench.execute.state import CellState
    from ergmeter.bench.plan.cells import Cell, Value


def document(cell: Cell, state: CellState, path: Path) -> dict[str, Any]:
    """One cell, for programs: what it is, how it is with it, and where."""
    return {
        "cell": cell.index,
        "id": cell.id,
        "scenario": cell.scenario,
        "repeat": cell.repeat,
        "num_gpus": cell.num_gpus,
        "nodes": cell.nodes,
        "settings": dict(cell.settings),
        "status": state.status,
        "reason": state.reason,
        "attempts": len(state.attempts),
        "claims_broken": state.broken,
        # Of a cell that is to run again, what went before is not its time.
        "duration_s": state.lasted_s if state.is_final else None,
        "path": str(path),
    }


class Varying:
    """Which settings are not the same in all cells, in the order they come in."""

    def __init__(self) -> None:
        self._first: dict[str, Value] = {}
        self._differ: set[str] = set()
        self._there: Counter[str] = Counter()
        self._number = 0

    def add(self, cell: Cell) -> None:
        """One more."""
        self._number += 1
        for name, value in cell.settings.items():
            self._there[name] += 1
            if self._first.setdefault(name, value) != value:
                self._differ.add(name)

    @property
    def names(self) -> list[str]:
        """Those that differ, or that only some cells have."""
        return [
            name for name in self._first if name in self._differ or self._there[name] < self._number
        ]


def varying(cells: Iterable[Cell]) -> list[str]:
    """Of these cells."""
    found = Varying()
    for cell in cells:
        found.add(cell)
    return found.names


def evidence(directory: Path) -> Path | None:
    """What to read of a cell that failed: the first file of these that has something in it."""
    names = ("stderr", "stderr.node0", "stdout", "stdout.node0", "runner.log")
    paths = [directory / name for name in names]
    return next((one for one in paths if one.is_file() and one.stat().st_size), None)


class CellListing:
    """The first cells, of those with these statuses if any are named, and counts of all."""

    def __init__(self, *, most: int | None, statuses: Collection[str] = ()) -> None:
        self._most = most
        self._statuses = statuses
        self._varying = Varying()
        self._took_s: list[float] = [0.0, 0.0]  # the sum, and of how many
        self.rows: list[tuple[Cell, CellState]] = []
        self.more: Counter[Status] = Counter()
        self.counts: Counter[Status] = Counter()
        self.broken = 0

    def add(self, cell: Cell, state: CellState) -> None:
        """One more."""
        self._varying.add(cell)
        self.counts[state.status] += 1
        self.broken += bool(state.broken)
        if state.is_final and state.lasted_s is not None:
            self._took_s[0] += state.lasted_s
            self._took_s[1] += 1
        if self._statuses and state.status not in self._statuses:
            return
        if self._most is None or len(self.rows) < self._most:
            self.rows.append((cell, state))
        else:
            self.more[state.status] += 1

    @property
    def names(self) -> list[str]:
        """The settings that tell cells apart."""
        return self._varying.names

    @property
    def eta_s(self) -> float | None:
        """How long the rest may take one after the other; None before the first has ended, and
        where nothing runs."""
        left = sum(number for status, number in self.counts.items() if status not in FINAL)
        total_s, number = self._took_s
        return total_s / number * left if number and self.counts["running"] else None
