"""Rows of steps in a file of their own, so that one rank's can be read without the others'.

The trap: a thousand ranks. An hour of their steps is two million rows, which every metric goes
through; reading the run's own files again for each of them takes seconds, and keeping all of it
makes a report's memory grow with the training. So the columns are laid down once, as they are used,
where a column of one writer is one read. The file has no name: whatever becomes of this process,
nothing is left behind. Where there is no room for it the rows stay in memory.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class LazyColumns(Mapping[str, Array]):
    """Columns that are loaded when they are asked for, and then kept."""

    def __init__(self, names: tuple[str, ...], load: Callable[[str], Array]) -> None:
        self._names = names
        self._load = load
        self._kept: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._kept:
            if name not in self._names:
                raise KeyError(name)
            self._kept[name] = self._load(name)
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Spool:
    """Keeps columns in a file. It is closed when nobody holds on to the spool any more."""

    def __init__(self) -> None:
        file = tempfile.TemporaryFile(prefix="ergmeter-", buffering=0)  # noqa: SIM115  kept open
        self._fd = file.fileno()
        self._end = 0
        self.close = weakref.finalize(self, file.close)

    def put(self, columns: Mapping[str, Array]) -> Mapping[str, Array]:
        """The same columns, from the file from now on; as they are if it can't take them."""
        places: dict[str, Array | tuple[int, int, np.dtype[Any]]] = {}
        for name, column in columns.items():
            if column.strides == (0,):  # one number for all rows
                places[name] = np.broadcast_to(column[:1].copy(), len(column))
                continue
            try:
                places[name] = self._end, len(column), column.dtype
                self._append(column)
            except OSError:  # a full disk, most likely
                return columns
        return Stored(self, places)

    def read(self, at: int, rows: int, dtype: np.dtype[Any]) -> Array:
        """A column that was put here."""
        data = os.pread(self._fd, rows * dtype.itemsize, at)
        return np.frombuffer(data, dtype=dtype, count=rows)

    def _append(self, column: Array) -> None:
        data = memoryview(column.tobytes())
        while data:
            written = os.pwrite(self._fd, data, self._end)
            self._end += written
            data = data[written:]


class Stored(Mapping[str, Array]):
    """Columns in a spool. Each is read when it is asked for, and not kept."""

    def __init__(
        self, spool: Spool, places: dict[str, Array | tuple[int, int, np.dtype[Any]]]
    ) -> None:
        self._spool = spool
        self._places = places

    def __getitem__(self, name: str) -> Array:
        place = self._places[name]
        return self._spool.read(*place) if isinstance(place, tuple) else place

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
