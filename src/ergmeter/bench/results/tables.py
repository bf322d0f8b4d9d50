"""A table of results in a file: Parquet or CSV, every column in it, and back without a loss.

The trap: the table as one piece. Rows come and go some hundred at a time, so that a file of 20 000
cells takes no more memory than one of 500; and a file is there whole or not at all.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ergmeter.bench.results.schema import COLUMNS, RATES, SCHEMA
from ergmeter.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

ROWS = 250  # in a batch
_ENDINGS = (".parquet", ".csv")
_NEEDED = {"id", "status"}
_JSON = ("missing", "impossible", "settings", "raw", "training")
_LONGEST = 1 << 27  # characters of a cell: `raw` has all that a training told


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows in the one schema. What a row lacks is null, and so is an empty text."""
    told = [{name: value for name, value in row.items() if value != ""} for row in rows]
    return pa.Table.from_pylist(told, schema=SCHEMA)


def batched(rows: Iterable[dict[str, Any]]) -> Iterator[pa.Table]:
    """The same, some hundred rows at a time."""
    left = iter(rows)
    while some := list(itertools.islice(left, ROWS)):
        yield as_table(some)


def one_table(batches: Iterable[pa.Table]) -> pa.Table:
    """All rows in one table; without any an empty one."""
    return pa.concat_tables([as_table([]), *batches]).combine_chunks()


class TableWriter:
    """Writes a table as Parquet or as CSV, by the file's ending; the file is there at the end."""

    def __init__(self, path: Path) -> None:
        check_ending(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._beside = path.with_name(f".{path.name}.{os.getpid()}")
        self._parquet = self._text = None
        if path.suffix == ".parquet":
            self._parquet = pq.ParquetWriter(self._beside, SCHEMA)
        else:
            self._text = self._beside.open("w", encoding="utf-8")
            self._text.write(csv_text(as_table([])))

    def add(self, batch: pa.Table) -> None:
        """Some rows more."""
        if self._parquet is not None:
            self._parquet.write_table(batch)
        if self._text is not None:
            self._text.write(csv_text(batch, header=False))

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in (self._parquet, self._text):
            if file is not None:
                file.close()
        if kind is None:
            self._beside.replace(self._path)
        self._beside.unlink(missing_ok=True)


def check_ending(path: Path) -> None:
    """Raise UsageError if the name does not say which kind of file it is."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"{path.name} ends in neither .parquet nor .csv")


def write(found: pa.Table, path: Path) -> None:
    """Write a table as Parquet or as CSV, by the file's ending."""
    with TableWriter(path) as writer:
        writer.add(found)


def csv_text(found: pa.Table, *, header: bool = True) -> str:
    """All columns, the constant ones too; an empty cell is an absent value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(found.column_names)
    writer.writerows([_cell(row[name]) for name in found.column_names] for row in found.to_pylist())
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, list):
        return " ".join(f"{one:.17g}" for one in value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def documents(found: pa.Table) -> Iterator[dict[str, Any]]:
    """Each row for programs: what is JSON in it as such."""
    for row in found.to_pylist():
        told = {name: json.loads(row[name]) if row[name] else None for name in _JSON}
        yield {**row, **told}


def is_ours(path: Path) -> bool:
    """Whether a CSV file begins as `write` begins one."""
    csv.field_size_limit(_LONGEST)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file), [])
    return {"id", "status", *RATES} <= set(header)


def from_parquet(path: Path) -> Iterator[pa.Table]:
    """What `write` wrote; columns of a later version are left out."""
    try:
        file = pq.ParquetFile(path)
        if _NEEDED - {*file.schema_arrow.names}:
            raise FormatError(f"{path} is no table of results: it has no columns id and status")
        for batch in file.iter_batches(batch_size=ROWS):
            yield as_table(batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{path} is no Parquet file of results: {error}") from error


def from_csv(path: Path) -> Iterator[pa.Table]:
    """The same, of text."""
    csv.field_size_limit(_LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            yield from batched(
                {name: _typed(name, cell) for name, cell in row.items() if name in COLUMNS}
                for row in rows
            )
        except (ValueError, csv.Error, pa.ArrowException) as error:
            raise FormatError(f"{path}: line {rows.line_num}: {error}") from error


def _typed(name: str, cell: str | None) -> Any:  # noqa: ANN401  whatever the column holds
    if not cell:
        return None
    kind = COLUMNS[name]
    read: dict[pa.DataType, Callable[[str], Any]] = {pa.int64(): int, pa.float64(): float}
    try:
        if pa.types.is_list(kind):
            return [float(part) for part in cell.split()]
        return read.get(kind, str)(cell)
    except ValueError as error:
        raise ValueError(f"{name} can't be {cell[:40]!r}") from error
