"""The samples of a run, device by device, with few of them in memory at a time.

The trap: a thousand GPUs read ten times a second. An hour of one column is 600 MB, and a report
asks for twenty columns. Whoever goes through the devices goes node by node, so what one writer said
of a column is loaded when a device of its is asked for, and let go when there is too much: the
largest first, since a small piece costs as much to load as it is dear to keep: a file to open.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ergmeter.runlog.segments import Series, joined

if TYPE_CHECKING:
    from ergmeter.runlog.reader import Run

# Readings that are kept, of 16 bytes each. A run of one node and some hours stays as a whole.
KEPT = 4_000_000


class SampleColumns:
    """Loads and lets go of what the writers of a run said."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kept: dict[tuple[int, str], _StreamFacts] = {}
        self._largest: list[tuple[int, int, tuple[int, str]]] = []  # a heap of what is kept
        self._count = itertools.count()
        self._held = 0
        self._loaded: set[tuple[int, str]] = set()  # once, if it was let go or not
        self._names: dict[int, set[str]] = {}  # what each writer has said at all
        self._writers: dict[str, list[int]] = {}
        for number, writer in enumerate(run.writers):
            for device in writer.devices:
                if number not in self._writers.setdefault(device.id, []):
                    self._writers[device.id].append(number)

    def devices(self) -> Iterator[str]:
        """All there are, those of one writer together."""
        return iter(self._writers)

    def of(self, device: str, column: str) -> Series | None:
        """What was said of a device; None if nothing was."""
        said = (self._said_by(number, column) for number in self._writers.get(device, ()))
        parts = [one[device] for one in said if device in one]
        if len(parts) == 1:
            return parts[0]
        return joined(parts) if parts else None

    def _said_by(self, number: int, column: str) -> dict[str, Series]:
        kept = self._kept.get((number, column))
        if kept is not None:
            return kept.by_device
        if number not in self._names:
            self._names[number] = self._run.has_said(number)
        if column not in self._names[number]:
            return {}
        # At first with all that stands in the same files; what is wanted again comes by itself.
        alone = (number, column) in self._loaded
        found = self._run.said_by(number, column, alone=alone)
        for name, by_device in found.items():
            if (number, name) not in self._kept:
                one = self._kept[number, name] = _StreamFacts(by_device)
                self._held += one.size
                self._loaded.add((number, name))
                heapq.heappush(self._largest, (-one.size, next(self._count), (number, name)))
        self._let_go(but=number)
        return found[column]

    def _let_go(self, *, but: int) -> None:
        """Keep no more than may be kept; what the writer said that is looked at now stays."""
        passed = []
        while self._held > KEPT and self._largest:
            one = heapq.heappop(self._largest)
            if one[2][0] == but:
                passed.append(one)
            else:
                self._held -= self._kept.pop(one[2]).size
        for one in passed:
            heapq.heappush(self._largest, one)


class Column(Mapping[str, Series]):
    """One column by device. A device that never said it is not in it."""

    def __init__(self, columns: SampleColumns, name: str) -> None:
        self._columns = columns
        self._name = name

    def __getitem__(self, device: str) -> Series:
        found = self._columns.of(device, self._name)
        if found is None:
            raise KeyError(device)
        return found

    def __iter__(self) -> Iterator[str]:
        devices = self._columns.devices()
        return (one for one in devices if self._columns.of(one, self._name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _StreamFacts:
    """What one writer said in one column."""

    def __init__(self, by_device: dict[str, Series]) -> None:
        self.by_device = by_device
        self.size = 1 + sum(len(one.t_ns) for one in by_device.values())
