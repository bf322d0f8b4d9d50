"""A table of results in a file: Parquet or CSV, every column in it, and back without a loss."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ergmeter.bench.schema import COLUMNS, RATES, SCHEMA
from ergmeter.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows in the one schema. What a row lacks is null, and so is an empty text."""
    told = [{name: value for name, value in row.items() if value != ""} for row in rows]
    return pa.Table.from_pylist(told, schema=SCHEMA)


def write(found: pa.Table, path: Path) -> None:
    """Write a table as Parquet or as CSV, by the file's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(found, path)
    elif path.suffix == ".csv":
        path.write_text(csv_text(found), encoding="utf-8")
    else:
        raise UsageError(f"{path.name} ends in neither .parquet nor .csv")


def csv_text(found: pa.Table) -> str:
    """All columns, the constant ones too; an empty cell is an absent value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found.column_names)
    for row in found.to_pylist():
        writer.writerow([_cell(row[name]) for name in found.column_names])
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, list):
        return " ".join(f"{one:.17g}" for one in value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def is_ours(path: Path) -> bool:
    """Whether a CSV file begins as `write` begins one."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file), [])
    return {"id", "status", *RATES} <= set(header)


def from_parquet(path: Path) -> pa.Table:
    """What `write` wrote; columns of a later version are left out."""
    try:
        found = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{path} is no Parquet file: {error}") from error
    return as_table(found.to_pylist())


def from_csv(path: Path) -> pa.Table:
    """The same, of text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return as_table(
            [
                {name: _typed(name, cell) for name, cell in row.items() if name in COLUMNS}
                for row in csv.DictReader(file)
            ]
        )


def _typed(name: str, cell: str | None) -> Any:  # noqa: ANN401  whatever the column holds
    if not cell:
        return None
    kind = COLUMNS[name]
    if pa.types.is_list(kind):
        return [float(part) for part in cell.split()]
    read: dict[pa.DataType, Callable[[str], Any]] = {pa.int64(): int, pa.float64(): float}
    return read.get(kind, str)(cell)
