"""Columns of many files as one: samples by device in order of time, steps one after the other.

The trap: copies. A run of a day has columns of 100 MB, most of which share their times, and half of
a step's columns are never told: what is the same is held once, and what says one thing is a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ergmeter.records import COLUMN_KINDS

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.records import FloatArray, TimeArray
    from ergmeter.runlog.headers import WriterLog
    from ergmeter.runlog.segments import DeviceRows, Segment

_Times: TypeAlias = "tuple[TimeArray, TimeArray | None]"

_TIMES = ("t_ns", "start_ns", "end_ns", "host_start_ns", "host_end_ns")
FEW_STEPS = 10_000


@dataclass(frozen=True)
class Series:
    """One column of one device: what it said and when, in order of time, without the gaps."""

    t_ns: TimeArray
    values: FloatArray


@dataclass
class Splits:
    """How the files of a writer were split by device, for the columns that are asked for next."""

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
            columns[name] = _thin(segment.phases(name))
        elif name in segment.names:
            columns[name] = _thin(segment.floats(name) + (offset_ns if name in _TIMES else 0))
    columns["writer"] = np.broadcast_to(np.int64(writer), segment.rows)
    return columns


def _thin(column: Any) -> Any:  # noqa: ANN401  whichever array type came in
    """One number instead of many, where they are all the same."""
    is_one_number = len(column) > 0 and bool((column == column[0]).all())
    return np.broadcast_to(column[0], len(column)) if is_one_number else column


def for_export(segment: Segment, writer: WriterLog, wall_zero_ns: int) -> pa.Table:
    """A file's rows on the run's clock, with the wall clock and who wrote them."""
    table = segment.table()
    for number, name in enumerate(table.column_names):
        column = table[name]
        if pa.types.is_dictionary(column.type):
            table = table.set_column(number, name, column.cast(pa.string()))
        elif name in _TIMES and writer.offset_ns:
            table = table.set_column(number, name, pc.add(column, writer.offset_ns))
    when = pc.add(table["t_ns" if "t_ns" in table.column_names else "start_ns"], wall_zero_ns)
    table = table.append_column("time", when.cast(pa.timestamp("ns", "UTC")))
    return table.append_column("writer", pa.array([writer.header["writer"]] * len(table)))


def joined_steps(
    parts: list[dict[str, Any]], *, few: int = FEW_STEPS
) -> dict[str, FloatArray | TimeArray]:
    """Columns of steps one after the other. The parts are used up.

    Column by column, so that no more than one of them is there twice.
    """
    rows = [len(part["start_ns"]) for part in parts]
    names = [*COLUMN_KINDS["steps"], "writer"]
    return {name: _joined([part.pop(name, None) for part in parts], rows, few) for name in names}


def _joined(parts: list[Any], rows: list[int], few: int) -> Any:  # noqa: ANN401  of any array type
    """Parts of so many rows one after the other, NaN where one is absent.

    Half of the columns are never told, others always the same: one number, and not millions.
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


def joined(pieces: list[Series]) -> Series:
    """Pieces of one device's column as one, in order of time."""
    return joined_once(pieces, {})


def joined_once(pieces: list[Series], known: dict[tuple[int, ...], _Times]) -> Series:
    """The same, where columns that share the times of their pieces share them joined as well."""
    key = tuple(id(piece.t_ns) for piece in pieces)
    if key not in known:
        known[key] = _times(pieces)
    t_ns, order = known[key]
    values = (
        pieces[0].values if len(pieces) == 1 else np.concatenate([piece.values for piece in pieces])
    )
    return Series(t_ns, values if order is None else values[order])


def _times(pieces: list[Series]) -> _Times:
    """The times of all pieces in order, and which order that is; None if they were in it."""
    t_ns = pieces[0].t_ns if len(pieces) == 1 else np.concatenate([piece.t_ns for piece in pieces])
    if not np.any(t_ns[1:] < t_ns[:-1]):
        return t_ns, None
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], order
