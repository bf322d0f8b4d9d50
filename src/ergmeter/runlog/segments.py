"""Reads the files of a table as numpy columns, also those that were cut off, and merges them.

pyarrow raises both for a file cut off by a kill and for a file that was never ours. A stream that
began as ours and ends half way was cut off, and every complete batch in it counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ergmeter.errors import FormatError
from ergmeter.records import COLUMN_KINDS, PHASES, FloatArray, TimeArray
from ergmeter.runlog import format as fmt
from ergmeter.runlog.arrays import as_numpy, present

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

_FEW_ROWS = 20_000
_NAME = re.compile(
    r"(?P<table>samples|steps|reported)(-(?P<stream>.+))?-(?P<number>\d{5})"
    rf"(?P<ending>{re.escape(fmt.LIVE)}|{re.escape(fmt.FULL)})"
)


@dataclass(frozen=True)
class Segment:
    """A file of a table. Columns are loaded on request and not cached."""

    path: Path
    stream: str
    rows: int
    names: tuple[str, ...]
    _batches: pa.Table | None  # a live stream, mapped into memory; None for Parquet

    def between(self, column: str, start_ns: int, end_ns: int) -> Segment:
        """The rows whose time in this column is after the start and not after the end."""
        t_ns = self.integers(column)
        rows = np.flatnonzero((t_ns > start_ns) & (t_ns <= end_ns))
        if len(rows) == self.rows:
            return self
        first, last = (int(rows[0]), int(rows[-1])) if len(rows) else (0, -1)
        if last - first + 1 == len(rows):  # in order, as they nearly always are: nothing is copied
            table = self.table().slice(first, len(rows))
        else:
            table = self.table().take(pa.array(rows))
        return Segment(self.path, self.stream, len(rows), self.names, table)

    def not_numbers(self, column: str) -> Segment:
        """The rows in which this column is NaN or infinite."""
        values = self.table([column])[column]
        rows = pc.and_(pc.is_valid(values), pc.invert(pc.is_finite(values)))
        if not pc.any(rows).as_py():
            return replace(self, rows=0)  # nearly always: no other column is read
        table = self.table().filter(rows)
        return replace(self, rows=table.num_rows, _batches=table)

    def table(self, names: list[str] | None = None) -> pa.Table:
        """These columns, or all, as an Arrow table."""
        if self._batches is not None:
            return self._batches if names is None else self._batches.select(names)
        import pyarrow.parquet as pq  # noqa: PLC0415  a short run has none

        try:
            # Not pq.read_table, which imports pyarrow.dataset and, where it is installed, pandas.
            # Without memory mapping, prefetching and threads: a large training has ten thousands
            # of files, each of which takes 0.5 ms this way and 1 ms otherwise.
            with pq.ParquetFile(
                self.path, page_checksum_verification=True, pre_buffer=False
            ) as file:
                return file.read(columns=names, use_threads=self.rows > _FEW_ROWS)
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{self.path}: damaged ({_first_line(error)})") from error

    def loaded(self) -> Segment:
        """The segment with all its columns in memory, after one opening of the file."""
        return self if self._batches is not None else replace(self, _batches=self.table())

    def floats(self, name: str) -> FloatArray:
        """A column of numbers, NaN where absent."""
        if name not in self.names:
            return np.full(self.rows, np.nan)
        return np.asarray(as_numpy(self.table([name])[name]), dtype=np.float64)

    def integers(self, name: str) -> TimeArray:
        """A column of times, which are never absent."""
        return np.asarray(as_numpy(self.table([name])[name]), dtype=np.int64)

    def phases(self, name: str) -> TimeArray:
        """A column of phase names as indices into PHASES; -1 for an unknown name."""
        codes, texts = _codes(self.table([name])[name])
        indices = [PHASES.index(text) if text in PHASES else -1 for text in texts]
        return np.asarray(np.array(indices, dtype=np.int64)[codes], dtype=np.int64)

    def columns_by_device(
        self, columns: Sequence[str], *, shift_ns: int = 0, splits: list[DeviceRows] | None = None
    ) -> Iterator[tuple[str, str, TimeArray, FloatArray]]:
        """Yields column, device, times and values, without rows in which the column is absent.

        Times are shifted by `shift_ns`; columns with the same rows share them. `splits` caches how
        the file was split by device, for later calls with the same shift.
        """
        splits = [] if splits is None else splits
        table = self.table([*columns] if splits else ["t_ns", "device", *columns])
        for column in columns:
            rows, values = present(table[column])
            equal = (other for other in splits if np.array_equal(other.rows, rows))
            split = next(equal, None)
            if split is None:
                if "t_ns" not in table.column_names:
                    table = self.table(["t_ns", "device", *columns])
                split = _split(table, rows, shift_ns)
                splits.append(split)
            values = values[split.order]
            for device, own_ns, start, end in split.parts:
                yield column, device, own_ns, values[start:end]


@dataclass(frozen=True)
class DeviceRows:
    """Rows of a file by device.

    Gauges are in one set of rows and counters in another, so two splits serve ten columns.
    """

    rows: Places
    order: Places  # of these rows: device by device
    parts: list[tuple[str, TimeArray, int, int]]  # a device, its times, from where to where


def _split(table: pa.Table, rows: TimeArray, shift_ns: int) -> DeviceRows:
    all_ns = np.asarray(as_numpy(table["t_ns"]), dtype=np.int64) + shift_ns
    codes, devices = _codes(table["device"])
    # One stable sort by device, in place of one pass over all rows for each of them.
    order = np.argsort(codes[rows], kind="stable")
    chosen = rows[order]
    bounds = np.searchsorted(codes[chosen], np.arange(len(devices) + 1))
    t_ns = np.split(all_ns[chosen], bounds[1:-1])
    each = zip(devices, t_ns, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    # A file has fewer than 2**31 rows: 32 bits take half the memory.
    small = rows.astype(np.int32), order.astype(np.int32)
    return DeviceRows(*small, [rows for rows in each if rows[3] > rows[2]])


# The columns of each file, which do not change. Runs of a thousand ranks have ten thousands of
# files, most without the requested column.
_columns_of: dict[str, tuple[str, ...]] = {}
_rows_of: dict[str, int] = {}  # of Parquet files, which do not change
_interned: dict[tuple[str, ...], tuple[str, ...]] = {}  # the same names for all that have them


def segments(
    directory: Path,
    table: str,
    *,
    damage: list[str],
    torn: list[str],
    since_s: float = 0.0,
    column: str | None = None,
) -> Iterator[Segment]:
    """Yield a table's segments in one writer's directory; unreadable ones are noted in `damage`.

    Files last written before `since_s` (wall clock) are not opened, nor are those known to lack
    `column`.
    """
    for path, stream in _paths(directory, table):
        try:
            if column is not None and column not in _columns_of.get(str(path), (column,)):
                continue
            if since_s and path.stat().st_mtime < since_s:
                continue
            segment = open_segment(path, stream, torn)
        except (pa.ArrowException, OSError, ValueError) as error:
            _note(damage, f"{path}: not a {table} file ({_first_line(error)})")
            continue
        if segment.rows:
            _remember(path, segment.names)
            if column is None or column in segment.names:
                yield segment


def open_segment(path: Path, stream: str, torn: list[str]) -> Segment:
    """One file of a table. Adds a line to `torn` if it was cut off; its whole batches count."""
    if path.suffix != fmt.FULL:
        try:
            return _live(path, stream, torn)
        except FileNotFoundError:  # converted to Parquet since the directory was listed
            path = path.with_suffix(fmt.FULL)
    return _parquet(path, stream)


def columns_in(directory: Path, *, damage: list[str], but: Collection[Path] = ()) -> set[str]:
    """The columns of a writer's files of samples, except the files in `but`.

    Files that were opened before are not opened again. Unreadable files are noted in `damage`.
    """
    others = {path: stream for path, stream in _paths(directory, "samples") if path not in but}
    names: set[str] = set()
    for path, stream in others.items():
        if str(path) not in _columns_of:
            try:
                is_full = path.suffix == fmt.FULL
                _remember(path, _parquet(path, stream).names if is_full else _head(path))
            except (pa.ArrowException, OSError, ValueError) as error:
                # A file cut off by a kill is reported as torn when it is read.
                if path.suffix == fmt.FULL or not _begins_as_stream(path):
                    _note(damage, f"{path}: not a samples file ({_first_line(error)})")
                continue
        names.update(_columns_of.get(str(path), ()))
    return names


def _paths(directory: Path, table: str) -> list[tuple[Path, str]]:
    paths: dict[tuple[str, str], str] = {}
    # As plain names: making Path objects of all files of a thousand ranks takes seconds.
    for name in sorted(os.listdir(directory)):  # noqa: PTH208
        match = _NAME.fullmatch(name) if name.startswith(table) else None
        if match and match["table"] == table:
            key = (match["stream"] or "", match["number"])
            # Both exist if the writer was killed between writing Parquet and removing the stream.
            if key not in paths or match["ending"] == fmt.FULL:
                paths[key] = name
    return [(directory / name, stream) for (stream, _), name in sorted(paths.items())]


def segment_names(directory: Path, tables: Collection[str]) -> dict[tuple[str, str], list[int]]:
    """The numbers of existing segments by table and stream."""
    pairs: dict[tuple[str, str], set[int]] = {}
    for name in os.listdir(directory):  # noqa: PTH208
        match = _NAME.fullmatch(name)
        if match and match["table"] in tables:
            key = (match["table"], match["stream"] or "")
            pairs.setdefault(key, set()).add(int(match["number"]))
    return {key: sorted(numbers) for key, numbers in pairs.items()}


def _parquet(path: Path, stream: str) -> Segment:
    key = str(path)
    if key not in _rows_of:
        import pyarrow.parquet as pq  # noqa: PLC0415

        with pq.ParquetFile(path) as file:
            _remember(path, tuple(file.schema_arrow.names))
            _rows_of[key] = file.metadata.num_rows
    return Segment(path, stream, _rows_of[key], _columns_of[key], None)


def _remember(path: Path, names: tuple[str, ...]) -> None:
    _columns_of[str(path)] = _interned.setdefault(names, names)


def _live(path: Path, stream: str, torn: list[str]) -> Segment:
    if path.stat().st_size == 0:  # opened, and killed before the first hand-over
        _note(torn, f"{path}: empty")
        return Segment(path, stream, 0, (), pa.table({}))
    source = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError) as error:
        if not _begins_as_stream(path):
            raise
        _note(torn, f"{path}: cut off in its first message ({_first_line(error)})")
        return Segment(path, stream, 0, (), pa.table({}))
    batches = []
    try:
        batches.extend(iter(reader))
    except (pa.ArrowException, OSError) as error:
        rows = sum(batch.num_rows for batch in batches)
        _note(torn, f"{path}: cut off after {rows} rows ({_first_line(error)})")
    table = pa.Table.from_batches(batches, schema=reader.schema)
    return Segment(path, stream, table.num_rows, tuple(reader.schema.names), table)


def _head(path: Path) -> tuple[str, ...]:
    """The columns of a live stream, from its schema message."""
    with pa.memory_map(str(path)) as source:
        return tuple(pa.ipc.open_stream(source).schema.names)


def _begins_as_stream(path: Path) -> bool:
    with path.open("rb") as file:
        return (b"\xff" * 4).startswith(file.read(4))  # Arrow's continuation marker, or part of it


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


def _codes(column: pa.ChunkedArray) -> tuple[Any, list[str]]:
    """A text column as indices and the texts they stand for."""
    if column.num_chunks == 0:
        return np.empty(0, dtype=np.int16), []
    combined = column.unify_dictionaries().combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = combined.chunk(0)
    return as_numpy(pa.chunked_array([combined.indices])), combined.dictionary.to_pylist()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Columns of many files as one: samples by device in order of time, steps one after the other. A
# run of a day has columns of 100 MB, most with the same times. Equal times are stored once, and a
# constant column is stored as one number.


_Times: TypeAlias = "tuple[TimeArray, TimeArray | None]"

FEW_STEPS = 10_000


@dataclass(frozen=True)
class Series:
    """One column of one device: times and values, in order of time, without absent ones."""

    t_ns: TimeArray
    values: FloatArray


@dataclass
class Splits:
    """Caches how the files of a writer were split by device, for later columns."""

    directory: Path
    by_file: dict[Path, list[DeviceRows]] = field(default_factory=dict)
    times: dict[tuple[int, ...], _Times] = field(default_factory=dict)  # joined, by their pieces


def step_columns(segment: Segment, offset_ns: int, writer: int) -> dict[str, Any]:
    """The columns of a file of steps, on the run's clock."""
    segment = segment.loaded()
    columns: dict[str, Any] = {}
    for name, kind in COLUMN_KINDS["steps"].items():
        if kind == "time":
            columns[name] = segment.integers(name) + offset_ns
        elif kind == "text":
            columns[name] = _constant_as_scalar(segment.phases(name))
        elif name in segment.names:
            columns[name] = _constant_as_scalar(
                segment.floats(name) + (offset_ns if name.endswith("_ns") else 0)
            )
    columns["writer"] = np.broadcast_to(np.int64(writer), segment.rows)
    return columns


def _constant_as_scalar(column: Any) -> Any:  # noqa: ANN401  whichever array type came in
    """A constant column as one broadcast number; others unchanged."""
    is_one_number = len(column) > 0 and bool((column == column[0]).all())
    return np.broadcast_to(column[0], len(column)) if is_one_number else column


def for_export(segment: Segment, writer: fmt.WriterLog, wall_zero_ns: int) -> pa.Table:
    """A file's rows on the run's clock, with columns of the wall clock and the writer."""
    table = segment.table()
    for number, name in enumerate(table.column_names):
        column = table[name]
        if pa.types.is_dictionary(column.type):
            table = table.set_column(number, name, column.cast(pa.string()))
        elif name.endswith("_ns") and writer.offset_ns:
            table = table.set_column(number, name, pc.add(column, writer.offset_ns))
    when = pc.add(table["t_ns" if "t_ns" in table.column_names else "start_ns"], wall_zero_ns)
    table = table.append_column("time", when.cast(pa.timestamp("ns", "UTC")))
    return table.append_column("writer", pa.array([writer.header["writer"]] * len(table)))


def joined_steps(
    parts: list[dict[str, Any]], *, few: int = FEW_STEPS
) -> dict[str, FloatArray | TimeArray]:
    """Concatenates columns of steps. Consumes the parts.

    It goes column by column, so that at most one column is in memory twice.
    """
    rows = [len(part["start_ns"]) for part in parts]
    names = [*COLUMN_KINDS["steps"], "writer"]
    return {name: _joined([part.pop(name, None) for part in parts], rows, few) for name in names}


def _joined(parts: list[Any], rows: list[int], few: int) -> Any:  # noqa: ANN401  of any array type
    """Concatenates parts of these row counts, with NaN for absent ones.

    Half of the columns are always absent and others constant: those are stored as one number.
    """
    if not parts:
        return np.empty(0)
    filled = [
        np.broadcast_to(np.nan, n) if p is None else p for p, n in zip(parts, rows, strict=True)
    ]
    if all(part.strides == (0,) for part in filled):
        ones = np.array([part[0] for part in filled if len(part)])
        is_one = len(ones) > 0 and sum(rows) > few and bool((ones == ones[0]).all())
        if is_one or (len(ones) and np.isnan(ones).all()):
            return np.broadcast_to(ones[0], sum(rows))
    return np.concatenate(filled)


def joined(pieces: list[Series], cached: dict[tuple[int, ...], _Times] | None = None) -> Series:
    """Concatenates the pieces of one device's column in order of time.

    Columns whose pieces share times also share the joined times, which are `cached`.
    """
    cached = {} if cached is None else cached
    key = tuple(id(piece.t_ns) for piece in pieces)
    if key not in cached:
        cached[key] = _times(pieces)
    t_ns, order = cached[key]
    values = (
        pieces[0].values if len(pieces) == 1 else np.concatenate([piece.values for piece in pieces])
    )
    return Series(t_ns, values if order is None else values[order])


def _times(pieces: list[Series]) -> _Times:
    """The sorted times of all pieces, and the sort order; None if they were sorted."""
    t_ns = pieces[0].t_ns if len(pieces) == 1 else np.concatenate([piece.t_ns for piece in pieces])
    if not np.any(t_ns[1:] < t_ns[:-1]):
        return t_ns, None
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], order
