"""Reads what was added to a run since the last look, each row once.

A live segment is read on from where the last look ended, in one open file. A segment that has
become Parquet in the meantime is read from the next row. A backlog is read segment by segment, so
that at most one segment of each stream is in memory.

A look costs as much as there are new rows, and a listing of each writer's directory.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ergmeter.runlog import format as fmt
from ergmeter.runlog.arrays import as_numpy
from ergmeter.runlog.segments import segment_names
from ergmeter.units import NS_PER_S

# Writers write steps every half second and samples every second, so rows that are this much older
# than the newest one are complete.
LATE_NS = round(2.5 * NS_PER_S)


@dataclass(frozen=True)
class StreamRows:
    """New rows of one stream of one writer."""

    writer: str
    table: str
    stream: str
    rows: pa.Table


@dataclass(frozen=True)
class NewRows:
    """The rows that one `look` returned. All rows before `until_ns` (run's clock) have been read.

    `is_behind`: there are more rows already; look again.
    """

    parts: tuple[StreamRows, ...]
    until_ns: int
    is_behind: bool


class Follower:
    """Reads new rows of a run, from all its writers or only the writer `only`."""

    def __init__(
        self, run: Path, *, only: str | None = None, columns: Collection[str] | None = None
    ) -> None:
        """`columns`: read only these columns of samples, besides time and device."""
        self._run = run
        self._only = only
        self._columns = columns
        self._streams: dict[tuple[str, str, str], _Stream] = {}
        self.newest_ns = 0  # the time of the newest row, on the run's clock
        self.offsets_ns: dict[str, int] = {}  # by writer: offset from its clock to the run's

    def look(self, *, is_last: bool = False) -> NewRows:
        """Return the new rows. `is_last`: the run has ended, so that no row can still come.

        Raises FileNotFoundError if the run's directory is gone.
        """
        parts = []
        for writer in self._writers():
            self._find(writer)
        for (writer, table, stream), followed in self._streams.items():
            rows = followed.read()
            if rows is not None and rows.num_rows:
                offset_ns = self.offsets_ns.get(writer, 0)
                when = as_numpy(rows["end_ns" if table == "steps" else "t_ns"])
                followed.last_ns = max(followed.last_ns, int(np.max(when)) + offset_ns)
                parts.append(StreamRows(writer, table, stream, rows))
        lasts_ns = (followed.last_ns for followed in self._streams.values())
        self.newest_ns = max([self.newest_ns, *lasts_ns])
        behind = [followed.last_ns for followed in self._streams.values() if followed.is_behind]
        until_ns = self.newest_ns - (0 if is_last else LATE_NS)
        return NewRows(tuple(parts), min([until_ns, *behind]), bool(behind))

    def close(self) -> None:
        """Close the open files."""
        for followed in self._streams.values():
            followed.close()

    def _writers(self) -> list[str]:
        names = sorted(os.listdir(self._run))  # noqa: PTH208  a thousand ranks: no paths of all
        return [n for n in names if not n.startswith(".") and self._only in (None, n)]

    def _find(self, writer: str) -> None:
        directory = self._run / writer
        try:
            names = segment_names(directory, ("steps", "samples"))
        except (NotADirectoryError, FileNotFoundError):
            return
        for (table, stream), numbers in names.items():
            key = (writer, table, stream)
            if key not in self._streams:
                columns = self._columns if table == "samples" else None
                self._streams[key] = _Stream(directory, table, stream, columns)
            self._streams[key].numbers = numbers


class _Stream:
    """One stream of a table: its segments, and how many rows of them have been read."""

    def __init__(
        self, directory: Path, table: str, stream: str, columns: Collection[str] | None
    ) -> None:
        self._directory = directory
        self._table, self._name = table, stream
        self._columns = columns
        self.numbers: list[int] = []  # of the segments there are
        self.last_ns = 0
        self.is_behind = False
        self._number: int | None = None
        self._rows = 0  # of this segment, read already
        self._file: FileIO | None = None
        self._reader: Any = None

    def read(self) -> pa.Table | None:
        """Return new rows of the current segment; later segments follow at the next calls."""
        later = [n for n in self.numbers if self._number is None or n > self._number]
        if self._number is None:
            if not later:
                return None
            self._number = later.pop(0)
        rows = self._rest()
        if later:  # it is written no more: a writer begins the next when it has ended one
            self.close()
            self._number, self._rows = later[0], 0
        self.is_behind = bool(later)
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._reader = None

    def _rest(self) -> pa.Table | None:
        name = fmt.segment_name(self._table, self._name, self._number or 0)
        try:
            rows = self._live(self._directory / (name + fmt.LIVE))
        except FileNotFoundError:
            rows = self._full(self._directory / (name + fmt.FULL))
        except (pa.ArrowException, OSError):
            # Half a message, as another host may see it: from the start at the next look.
            self.close()
            return None
        if rows is not None:
            self._rows += rows.num_rows
        return rows

    def _live(self, path: Path) -> pa.Table | None:
        skip = 0
        if self._reader is None:
            if path.stat().st_size == 0:
                return None
            self._file = path.open("rb", buffering=0)
            self._reader = pa.ipc.open_stream(self._file)
            skip = self._rows
        batches = list(self._reader)  # that there are now: the file may grow
        if not batches:
            return None
        rows = pa.Table.from_batches(batches).slice(skip)
        return rows.select([name for name in rows.column_names if self._is_wanted(name)])

    def _full(self, path: Path) -> pa.Table | None:
        import pyarrow.parquet as pq  # noqa: PLC0415  a short run has none

        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                names = [n for n in file.schema_arrow.names if self._is_wanted(n)]
                return file.read(columns=names).slice(self._rows)
        except (pa.ArrowException, OSError):
            return None  # damaged: `erg report` says so

    def _is_wanted(self, name: str) -> bool:
        return self._columns is None or name in ("t_ns", "device") or name in self._columns
