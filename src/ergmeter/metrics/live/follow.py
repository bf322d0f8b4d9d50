"""Follows a run while it is written: its new rows as columns, on one clock, in order.

Steps are written every half second, samples every second, and ranks write independently. If rows
were judged as they arrive, a step would precede its readings. So `look` returns two sets: all new
rows, for display; and rows so old that all earlier rows have arrived, for alerts.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ergmeter.errors import FormatError
from ergmeter.metrics.live.rows import LiveRows, in_order, joined_rows, split_rows
from ergmeter.records import Device
from ergmeter.runlog.arrays import as_numpy
from ergmeter.runlog.follow import Follower, StreamRows
from ergmeter.runlog.format import WRITER_FILE, WriterLog, on_one_clock, writer_header
from ergmeter.runlog.segments import Segment

# The columns of samples and steps that alerts and live views use.
SAMPLED = (
    *("power_w", "energy_j", "memory_bytes", "process_bytes", "allocated_bytes"),
    *("temperature_c", "throttled", "busy_frac"),
)
STEPPED = (
    *("index", "steps", "tokens_computed", "tokens_real", "samples", "loss", "grad_norm"),
    "rank",
)
_MAY_BE_NAN = ("loss", "grad_norm")
_OUTPUT = "output"  # the stream of steps from a program's output


class RunFollower:
    """Follows a run, or one writer of it."""

    def __init__(self, run: Path, *, only: str | None = None) -> None:
        self.run = run
        self.writers: dict[str, WriterLog] = {}  # in the order in which they began
        self.devices: dict[str, Device] = {}
        self._only = only
        self._follower = Follower(run, only=only, columns=SAMPLED)
        self._read_by: dict[str, str] = {}  # device: the writer whose readings count
        self._has_meter_steps = False  # printed steps are then duplicates
        self._waiting = LiveRows(0)

    def look(self, *, is_last: bool = False) -> tuple[LiveRows, LiveRows, bool]:
        """Return all new rows, the rows ready to be judged, and True if there is more to read."""
        look = self._follower.look(is_last=is_last)
        unknown = {part.writer for part in look.parts} - self.writers.keys()
        if unknown:
            self._learn(unknown)
        new = self._rows(look.parts, look.until_ns)
        self._waiting = joined_rows(self._waiting, new)
        ready, self._waiting = split_rows(self._waiting, look.until_ns)
        return new, ready, look.is_behind

    @property
    def start_ns(self) -> int | None:
        """The start of the first writer, on the run's clock."""
        return min((writer.start_ns for writer in self.writers.values()), default=None)

    @property
    def headers(self) -> list[dict[str, Any]]:
        """The headers of the writers."""
        return [writer.header for writer in self.writers.values()]

    @property
    def newest_ns(self) -> int:
        """The time of the newest row."""
        return self._follower.newest_ns

    def close(self) -> None:
        """Close the run's files."""
        self._follower.close()

    def learn(self) -> None:
        """Read the headers and devices of all writers."""
        names = (p.parent.name for p in self.run.glob("*/writer.json"))
        writers = sorted(name for name in names if not name.startswith("."))
        self._learn(writer for writer in writers if self._only in (None, writer))

    def _learn(self, writers: Iterable[str]) -> None:
        """Read the headers of these writers, and put all on one clock as `Run.open` does."""
        for writer in writers:
            self._take_header(writer)
        aligned = on_one_clock(self.writers.values())
        self.writers = {writer.directory.name: writer for writer in aligned}
        self._follower.offsets_ns |= {n: w.offset_ns for n, w in self.writers.items()}

    def _take_header(self, writer: str) -> None:
        with suppress(FormatError):  # it is being written
            header = writer_header(self.run / writer / WRITER_FILE, [])
            offset_ns = self._follower.offsets_ns.get(writer, 0)
            self.writers[writer] = WriterLog(self.run / writer, header, (), offset_ns)
            for device in self.writers[writer].devices:
                self.devices.setdefault(device.id, device)

    def _rows(self, parts: Iterable[StreamRows], until_ns: int) -> LiveRows:
        rows = LiveRows(until_ns)
        parts = list(parts)
        self._has_meter_steps |= any(p.table == "steps" and p.stream != _OUTPUT for p in parts)
        for part in parts:
            names = tuple(part.rows.column_names)
            segment = Segment(Path(), part.stream, part.rows.num_rows, names, part.rows)
            shift_ns = self._follower.offsets_ns.get(part.writer, 0)
            if part.table == "samples":
                self._add_samples(rows, segment, part.writer, shift_ns)
                continue
            columns = {part.writer: _steps(segment, shift_ns)}
            is_printed = part.stream == _OUTPUT
            steps = {} if is_printed and self._has_meter_steps else columns
            printed = columns if is_printed else {}
            rows = joined_rows(rows, LiveRows(until_ns, steps, printed=printed))
        return rows

    def _add_samples(self, rows: LiveRows, segment: Segment, writer: str, shift_ns: int) -> None:
        columns = [name for name in segment.names if name in SAMPLED]
        columns_read = segment.columns_by_device(columns, shift_ns=shift_ns)
        for column, device, t_ns, values in columns_read:
            if device not in self.devices:
                self._take_header(writer)  # it is rewritten when a device is added
            if self._read_by.setdefault(device, writer) == writer:
                by_device = rows.samples.setdefault(column, {})
                by_device[device] = in_order(by_device.get(device), (t_ns, values))


def _steps(segment: Segment, shift_ns: int) -> dict[str, Any]:
    columns: dict[str, Any] = {name: segment.floats(name) for name in STEPPED}
    columns["start_ns"] = segment.integers("start_ns") + shift_ns
    columns["end_ns"] = segment.integers("end_ns") + shift_ns
    columns["phase"] = segment.phases("phase")
    for name in _MAY_BE_NAN:  # a recorded NaN is not an absent value
        columns[f"{name}_told"] = _present(segment, name)
    order = np.argsort(columns["end_ns"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def _present(segment: Segment, name: str) -> Any:  # noqa: ANN401  an array of bool
    if name not in segment.names:
        return np.zeros(segment.rows, dtype=bool)
    return as_numpy(pc.is_valid(segment.table([name])[name]).cast(pa.int8())).astype(bool)
