"""Follows a run while it is written: its new rows as columns, on one clock, in order.

Steps are written every half second, samples every second, and ranks write independently. Rows
judged as they arrive would put a step before its readings. So `look` returns two sets: all new
rows, for display; and rows old enough that no earlier row is still to come, for alerts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ergmeter.metrics.live.alert_judge import AlertRows
from ergmeter.records import Device
from ergmeter.runlog.arrays import as_numpy
from ergmeter.runlog.follow import Follower, header_of
from ergmeter.runlog.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ergmeter.runlog.follow import StreamRows

# Columns of samples and steps that are judged or shown.
SAMPLED = (
    *("power_w", "energy_j", "memory_bytes", "process_bytes", "allocated_bytes"),
    *("temperature_c", "throttled", "busy_frac"),
)
STEPPED = (
    "index",
    "steps",
    "tokens_computed",
    "tokens_real",
    "samples",
    "loss",
    "grad_norm",
    "rank",
)
_MAY_BE_NAN = ("loss", "grad_norm")
_OUTPUT = "output"  # the stream of steps from a program's output


class RunFollower:
    """Follows a run, or one writer of it."""

    def __init__(self, run: Path, *, only: str | None = None) -> None:
        self.run = run
        self.headers: dict[str, dict[str, Any]] = {}
        self.devices: dict[str, Device] = {}
        self._only = only
        self._follower = Follower(run, only=only, columns=SAMPLED)
        self._read_by: dict[str, str] = {}  # device: the writer whose readings count
        self._has_meter_steps = False  # printed steps are then duplicates
        self._waiting = AlertRows(0)

    def look(self, *, is_last: bool = False) -> tuple[AlertRows, AlertRows, bool]:
        """All new rows; rows that can be judged now; and whether there is more to read."""
        look = self._follower.look(is_last=is_last)
        self._learn({part.writer for part in look.parts})
        new = self._rows(look.parts, look.until_ns)
        self._waiting = _joined(self._waiting, new)
        ready, self._waiting = _split(self._waiting, look.until_ns)
        return new, ready, look.is_behind

    @property
    def start_ns(self) -> int | None:
        """The start of the first writer, on the run's clock."""
        offsets = self._follower.offsets_ns
        began = [_clock(h)[0] + offsets.get(w, 0) for w, h in self.headers.items()]
        return min(began, default=None)

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
        for writer in sorted(w for w in names if not w.startswith(".")):
            if self._only in (None, writer):
                self._take_header(writer)
        self._align()

    def _learn(self, writers: Iterable[str]) -> None:
        unknown = [writer for writer in writers if writer not in self.headers]
        for writer in unknown:
            self._take_header(writer)
        if unknown:
            self._align()

    def _take_header(self, writer: str) -> None:
        header = header_of(self.run / writer)
        if header is None or "clock" not in header:
            return
        self.headers[writer] = header
        for entry in header.get("devices") or ():
            if entry["id"] not in self.devices:
                names = ("id", "kind", "name", "probe", "facts")
                self.devices[entry["id"]] = Device(**{n: entry[n] for n in names if n in entry})

    def _align(self) -> None:
        """Put all writers on the clock of the first one, as `Run.open` does."""
        order = sorted(self.headers, key=lambda writer: _clock(self.headers[writer])[1])
        zero_ns: dict[str, int] = {}
        for writer in order:
            monotonic_ns, wall_ns = _clock(self.headers[writer])
            header = self.headers[writer]
            host = str(header.get("boot_id") or header.get("host"))
            zero_ns.setdefault(host, wall_ns - monotonic_ns)
            offset_ns = zero_ns[host] - next(iter(zero_ns.values()))
            self._follower.offsets_ns[writer] = offset_ns

    def _rows(self, parts: Iterable[StreamRows], until_ns: int) -> AlertRows:
        rows = AlertRows(until_ns)
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
            rows = _joined(rows, AlertRows(until_ns, steps, printed=columns if is_printed else {}))
        return rows

    def _add_samples(self, rows: AlertRows, segment: Segment, writer: str, shift_ns: int) -> None:
        columns = [name for name in segment.names if name in SAMPLED]
        columns_read = segment.columns_by_device(columns, shift_ns=shift_ns)
        for column, device, t_ns, values in columns_read:
            if device not in self.devices:
                self._take_header(writer)  # it is rewritten when a device is added
            if self._read_by.setdefault(device, writer) == writer:
                by_device = rows.samples.setdefault(column, {})
                by_device[device] = _in_order(by_device.get(device), (t_ns, values))


def _clock(header: dict[str, Any]) -> tuple[int, int]:
    clock = header["clock"]
    return int(clock["monotonic_ns"]), int(clock["wall_ns"])


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
    valid = pc.is_valid(segment.table([name])[name])
    return as_numpy(valid.cast(pa.int8())).astype(bool)


def _in_order(before: tuple[Any, Any] | None, new: tuple[Any, Any]) -> tuple[Any, Any]:
    t_ns, values = new
    if before is not None:
        t_ns, values = np.concatenate([before[0], t_ns]), np.concatenate([before[1], values])
    if np.any(t_ns[1:] < t_ns[:-1]):
        order = np.argsort(t_ns, kind="stable")
        t_ns, values = t_ns[order], values[order]
    return t_ns, values


def _joined(first: AlertRows, second: AlertRows) -> AlertRows:
    both = AlertRows(
        second.until_ns,
        _joined_steps(first.steps, second.steps),
        {n: dict(d) for n, d in first.samples.items()},
        _joined_steps(first.printed, second.printed),
    )
    for column, devices in second.samples.items():
        by_device = both.samples.setdefault(column, {})
        for device, readings in devices.items():
            by_device[device] = _in_order(by_device.get(device), readings)
    return both


def _joined_steps(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for writer, new in second.items():
        before = both.get(writer)
        if before is not None:
            new = {name: np.concatenate([before[name], new[name]]) for name in new}
            order = np.argsort(new["end_ns"], kind="stable")
            new = {name: column[order] for name, column in new.items()}
        both[writer] = new
    return both


def _split(rows: AlertRows, until_ns: int) -> tuple[AlertRows, AlertRows]:
    """The rows up to a time, and the rest."""
    early, late = AlertRows(until_ns), AlertRows(until_ns)
    early.steps, late.steps = _split_steps(rows.steps, until_ns)
    early.printed, late.printed = _split_steps(rows.printed, until_ns)
    for column, devices in rows.samples.items():
        for device, (t_ns, values) in devices.items():
            cut = int(np.searchsorted(t_ns, until_ns, side="right"))
            if cut:
                early.samples.setdefault(column, {})[device] = (t_ns[:cut], values[:cut])
            if cut < len(t_ns):
                late.samples.setdefault(column, {})[device] = (t_ns[cut:], values[cut:])
    return early, late


def _split_steps(
    by_writer: Mapping[str, Any], until_ns: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    early: dict[str, Any] = {}
    late: dict[str, Any] = {}
    for writer, steps in by_writer.items():
        cut = int(np.searchsorted(steps["end_ns"], until_ns, side="right"))
        for into, part in ((early, slice(0, cut)), (late, slice(cut, None))):
            taken = {name: column[part] for name, column in steps.items()}
            if len(taken["end_ns"]):
                into[writer] = taken
    return early, late
