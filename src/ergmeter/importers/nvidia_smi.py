"""Reads logs of `nvidia-smi --query-gpu=timestamp,... --format=csv -l 1` as samples, without steps.

- `power.draw` is an average over about a second on recent chips, as in NVML. It is stored apart
  from `power.draw.instant`.
- Timestamps are local time without a zone. Where the clock falls back, another run begins, because
  the elapsed time is unknown. Where it leaps forward there is a gap in the samples.
- A log of several devices that names none is refused, unless the user declares that it is of one.
  It looks the same as one device read more often.
- At the end of a log that was cut, some devices are missing and a number may be cut short. That
  last reading is left out for all devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ergmeter.errors import FormatError
from ergmeter.importers.engine.timestamps import stamp_ns
from ergmeter.ports import Importer, Line, LineHints
from ergmeter.records import Device, Mark, Record, Sample

# Lines of `nvidia-smi --query-gpu=... --format=csv`. Columns are whatever was asked for. Units
# are in the header, and in the cells unless `nounits` was given. `[N/A]` and `[Not Supported]`
# are missing values, not 0. Driver messages, repeated headers and a cut last line may come
# between rows. Some programs quote cells or end each line with a comma.


# Names that stand in a header, by what may be asked for them as well.
_ALIASES = {
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id",
    "clocks.sm": "clocks.current.sm",
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
}  # fmt: skip
# What is read of a log, and the unit of a cell where neither it nor the header names one.
UNITS = {
    "power.draw": "W", "power.draw.instant": "W", "power.draw.average": "W",
    "enforced.power.limit": "W", "power.limit": "W", "memory.used": "MiB", "memory.total": "MiB",
    "utilization.gpu": "%", "clocks.current.sm": "MHz", "temperature.gpu": "C",
}  # fmt: skip
KEYS = ("uuid", "index", "pci.bus_id", "serial")  # what tells devices apart, the best first
_OTHERS = ("timestamp", "name", "driver_version", "clocks_event_reasons.active")
_COLUMNS = {*UNITS, *KEYS, *_OTHERS}
_SCALES = {
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "W": 1.0, "mW": 1e-3,
    "%": 0.01, "MHz": 1e6, "C": 1.0,
}  # fmt: skip
_TITLE = re.compile(r"[a-z][A-Za-z0-9_.]*(?: \[[^\]]*\])?")
_FIGURE = re.compile(r"(\d+(?:\.\d+)?)(?: *([A-Za-z%]+))?")
_AROUND = ' \t\n\r\f\v"'
_MOST = 2.0**63  # what is as large is damage, and no column of a run holds it


@dataclass(frozen=True, slots=True)
class Header:
    """A header line of the log: the names of the columns and their units."""

    names: tuple[str, ...]
    units: Mapping[str, str]
    is_its_own: bool  # every title may be nvidia-smi's


@dataclass(frozen=True, slots=True)
class Row:
    """One reading of one device."""

    cells: Mapping[str, str]  # by column name, as printed
    units: Mapping[str, str]

    def figure(self, name: str) -> float | None:
        """A cell in bytes, watts, hertz or as a share; None where there is no reading."""
        match = _FIGURE.fullmatch(self.cells.get(name, ""))
        if match is None:
            return None
        unit = match[2] or self.units.get(name) or UNITS[name]
        value = float(match[1]) * _SCALES[unit] if unit in _SCALES else _MOST
        return value if value < _MOST else None

    @property
    def is_surely_whole(self) -> bool:
        """True if the row is certainly not cut off: its last cell ends with its unit."""
        name, cell = list(self.cells.items())[-1]
        unit = self.units.get(name)
        return bool(unit) and cell.endswith(f" {unit}")


class CsvLog:
    """Reads the lines of a log once. `header` is the latest one; `names` are the columns of all
    headers so far."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.names: set[str] = set()
        self.lines = 0
        self.readings = 0
        self.first = ""  # of its lines, for a message
        self.skipped = 0  # lines that are no readings
        self.why_skipped = ""  # the first of them below a header

    def rows(self, lines: Iterable[str]) -> Iterator[Row]:
        """Yield the readings, a row for each line that is not a header."""
        for self.lines, line in enumerate(lines, start=1):
            text = line.strip()
            if not text:
                continue
            self.first = self.first or text
            cells = _split(text)
            columns = _header(cells)
            if columns is not None:
                self.header = columns
                self.names.update(columns.names)
                continue
            if self.header is None or not self._fits(cells, self.header):
                self.skipped += 1
                continue
            self.readings += 1
            yield Row(dict(zip(self.header.names, cells, strict=True)), self.header.units)

    def _fits(self, cells: list[str], header: Header) -> bool:
        """True if a line has a cell for each column, ignoring a comma at its end."""
        if len(cells) == len(header.names) + 1 and not cells[-1]:
            cells.pop()
        if len(cells) == len(header.names):
            return True
        count = len(header.names)
        self.why_skipped = self.why_skipped or (
            f"line {self.lines} has {len(cells)} cell{'s'[: len(cells) != 1]}, its header {count}"
        )
        return False


def _header(cells: Sequence[str]) -> Header | None:
    """Parse a header line; None if it is none. A header has a known column among names that
    nvidia-smi may print, or a measured column among any titles."""
    cells = cells if cells[-1] else cells[:-1]
    titles = [cell.partition(" [") for cell in cells]
    columns = [(_ALIASES.get(name, name), unit.removesuffix("]")) for name, _, unit in titles]
    names = tuple(name for name, _ in columns)
    if _COLUMNS.isdisjoint(names):
        return None
    is_its_own = all(_TITLE.fullmatch(cell) for cell in cells)
    if not is_its_own and UNITS.keys().isdisjoint(names):
        return None
    return Header(names, dict(columns), is_its_own)


def key_of(names: Iterable[str]) -> str | None:
    """The column that tells devices apart; None if there is none."""
    there = set(names)
    return next((name for name in KEYS if name in there), None)


def _split(line: str) -> list[str]:
    """Split a line into cells; nvidia-smi prints no comma within a cell."""
    return [cell.strip(_AROUND) for cell in line.split(",")]


_POWER = ("power.draw", "power.draw.instant", "power.draw.average")
_FIGURES = (*_POWER, "memory.used", "utilization.gpu", "clocks.current.sm", "temperature.gpu")
_WORDS = (b"power.draw", b"memory.used", b"utilization.gpu", b"clocks.", b"temperature.gpu")
_NO_STEPS = "no steps: a log of nvidia-smi has readings of devices, and nothing of what they did"
_LOCAL = "times are nvidia-smi's, local time of a machine whose zone is not known: read as UTC"
_SAID_TO_BE_ONE = "no column names the device: all readings are of one device (--one-device)"
_UNNAMED = (
    "a log of nvidia-smi without a column that tells devices apart (uuid, index, pci.bus_id,"
    " serial): log with --query-gpu=timestamp,index,..., or give --one-device if there is only one"
)
_NO_TIMES = (
    "a log of nvidia-smi without times: log with --query-gpu=timestamp,...; --format NAME reads"
    " what else is in it"
)
_NO_POWER = "the log has no column of power: log with --query-gpu=timestamp,index,power.draw,..."
_LATEST_NS = 2**63  # in 2262
_MASKS = 2**53  # a column of a run is read as floats; NVML's own reasons have a dozen bits
_HEADLESS = (
    "it looks like readings of nvidia-smi without their header: log with --format=csv, without"
    " noheader, or put the line of titles before them"
)
# The first cell or some other of a reading, as nothing else writes it.
_CELL = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}|\d+(\.\d+)? (MiB|%|W|MHz)")


class NvidiaSmiImporter(Importer):
    """Reads logs of nvidia-smi at any interval, with any columns if one is the time.

    `devices`: the devices found so far, by id.
    """

    name = "nvidia_smi"
    looks_for = "the header of `nvidia-smi --query-gpu=timestamp,... --format=csv`"
    order = 100  # a training may have run nvidia-smi
    options = ("one_device",)
    is_live = False  # it is no program's that is measured

    def __init__(self, one_device: bool = False) -> None:
        """`one_device`: the user declares one device, where no column names it."""
        self.devices: dict[str, Device] = {}
        self._is_one_device = one_device
        self._left_out = 0  # rows that are no readings
        self._why = ""  # of the first of them

    def recognises(self, head: Sequence[str]) -> bool:
        """True if one of these lines is a header with a column that is read."""
        headers = [_header(_split(text.strip())) for text in head]
        return any(
            columns
            and not set(_FIGURES).isdisjoint(columns.names)
            and (columns.is_its_own or "timestamp" in columns.names)
            for columns in headers
        )

    def advice(self, head: Sequence[str]) -> str:
        """A hint for a log with this beginning in which nothing was recognised."""
        is_headless = any(
            "," in text and any(_CELL.fullmatch(cell.strip()) for cell in text.split(","))
            for text in head
        )
        return _HEADLESS if is_headless else ""

    def words(self, recognised: str) -> LineHints | None:
        """The byte strings to find a header by; None, for every line, once there was a header."""
        return None if recognised else LineHints(_WORDS)

    def sampled_devices(self) -> Sequence[Device]:
        """The devices seen so far."""
        return list(self.devices.values())

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yields the samples of all devices, with marks about assumptions."""
        log = CsvLog()
        marks = [Mark(0, "assumed", _LOCAL), Mark(0, "output_unrecognised", _NO_STEPS)]
        last_ns: dict[str, int] = {}
        for reading in _complete_readings(self._keyed(log, lines)):
            for device, row in reading.items():
                sample = self._sample(device, row)
                if sample is None or sample.t_ns == last_ns.get(device):
                    continue
                if sample.t_ns < last_ns.get(device, 0):
                    yield Mark(sample.t_ns, "restarted", "timestamps fall back")
                    last_ns.clear()
                if not last_ns:
                    yield from marks
                    if key_of(row.cells) is None:
                        yield Mark(0, "assumed", _SAID_TO_BE_ONE)
                last_ns[device] = sample.t_ns
                yield sample
        if log.header is not None and not self.devices:
            raise FormatError(self._why_none(log))
        if self._left_out or log.skipped > log.readings:
            message = f"{self._left_out + log.skipped} of {log.lines} lines are no readings"
            yield Mark(0, "rows_dropped", f"{message}: {self._why or log.why_skipped}")

    def _keyed(self, log: CsvLog, lines: Iterable[Line]) -> Iterator[tuple[str, Row]]:
        """The rows, each with its device."""
        for row in log.rows(line.text for line in lines):
            key = key_of(row.cells)
            device = row.cells[key] if key else row.cells.get("name", "0")
            if "timestamp" not in row.cells:
                self._leave_out(f"line {log.lines} has no time")
            elif key is None and not self._is_one_device:
                self._leave_out(f"line {log.lines} names no device")
            elif not device or device.startswith("["):  # `[GPU is lost]`: it does not say which
                self._leave_out(f"line {log.lines} has {key} {device!r}")
            else:
                yield (f"GPU {device}" if device.isdigit() else device), row

    def _leave_out(self, why: str) -> None:
        self._left_out += 1
        self._why = self._why or why

    def _why_none(self, log: CsvLog) -> str:
        """The message for a log without any reading."""
        if "timestamp" not in log.names:
            return _NO_TIMES
        if key_of(log.names) is None and not self._is_one_device:
            return _UNNAMED
        lines = f"{log.lines} line{'s'[: log.lines != 1]}"
        why = self._why or log.why_skipped or ("the last may be cut" if log.readings else "")
        return f"a log of nvidia-smi of {lines}, none a reading" + (f": {why}" if why else "")

    def _sample(self, device: str, row: Row) -> Sample | None:
        """One device's part of a reading; None where the row has no time."""
        t_ns = stamp_ns(row.cells["timestamp"])
        if t_ns is None or not 0 < t_ns < _LATEST_NS:
            self._leave_out(f"the time {row.cells['timestamp']!r} can't be read")
            return None
        draw_w, instant_w, average_w, memory_bytes, busy_frac, clock_hz, temperature_c = (
            row.figure(name) for name in _FIGURES
        )
        averaged_w = draw_w if average_w is None else average_w
        if device not in self.devices:
            self.devices[device] = _device(device, row)
        is_instant = self.devices[device].facts["power_field"] == "instant"
        return Sample(
            t_ns,
            device,
            power_w=instant_w if is_instant else averaged_w,
            power_average_w=averaged_w,
            memory_bytes=None if memory_bytes is None else round(memory_bytes),
            busy_frac=busy_frac,
            clock_hz=clock_hz,
            temperature_c=temperature_c,
            throttled=_mask(row.cells.get("clocks_event_reasons.active", "")),
        )


def _device(device: str, row: Row) -> Device:
    """Describe a device by its first reading, which also decides which power column is used."""
    facts: dict[str, Any] = {
        "power_field": "draw" if row.figure("power.draw.instant") is None else "instant",
        "power_limit_w": row.figure("enforced.power.limit") or row.figure("power.limit"),
        "memory_total_bytes": row.figure("memory.total"),
        "driver": row.cells.get("driver_version"),
        "pci_bus_id": row.cells.get("pci.bus_id"),
        "index": row.cells.get("index"),
        "absent": {
            "the log of nvidia-smi has no energy counter": ["energy_j"],
            **({} if any(name in row.cells for name in _POWER) else {_NO_POWER: ["power_w"]}),
        },
    }
    facts_read = {name: value for name, value in facts.items() if value is not None}
    return Device(device, "gpu", row.cells.get("name", "NVIDIA GPU"), "nvidia_smi", facts_read)


def _complete_readings(rows: Iterable[tuple[str, Row]]) -> Iterator[dict[str, Row]]:
    """Yield each reading's rows by device; the last reading is left out if it may be cut off."""
    before = 0
    reading: dict[str, Row] = {}
    row: Row | None = None
    for device, row in rows:
        if device in reading:
            yield reading
            before, reading = len(reading), {}
        reading[device] = row
    if row is not None and len(reading) >= before and row.is_surely_whole:
        yield reading


def _mask(text: str) -> int | None:
    """Reasons why clocks are throttled: NVML's own bits, in hexadecimal."""
    try:
        mask = int(text, 16) if text.startswith("0x") else -1
    except ValueError:
        return None
    return mask if 0 <= mask < _MASKS else None
