"""What did the devices do, by a log of `nvidia-smi --query-gpu=timestamp,... --format=csv -l 1`?

It makes a run of readings and no steps: what the boards drew is their power, integrated. Two traps.
`power.draw` is an average of about a second on recent chips, as NVML's reading of that name is, and
is told apart from `power.draw.instant`. And timestamps are local time without a zone: where the
clock falls back, as at the end of summer time, another run begins, since nobody knows how long it
took; where it leaps ahead there is a gap in the readings.

Another trap: several devices in a log that names none. No gap between two times tells them from
one that was read twice as often, so such a log is refused, unless the user says that it is of one.

A reading is of all devices. At the end of a log that was cut some are missing, and one that may be
cut within a number can't be told from a whole one; it is then left out for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ergmeter.errors import FormatError
from ergmeter.importers.logfile import Words
from ergmeter.importers.nvidia_smi_csv import CsvLog, Row, header, key_of
from ergmeter.importers.stamps import stamp_ns
from ergmeter.ports import Line
from ergmeter.records import Device, Mark, Record, Sample

_POWER = ("power.draw", "power.draw.instant", "power.draw.average")
_FIGURES = (*_POWER, "memory.used", "utilization.gpu", "clocks.current.sm", "temperature.gpu")
_WORDS = (b"power.draw", b"memory.used", b"utilization.gpu", b"clocks.", b"temperature.gpu")
_NO_STEPS = "no steps: a log of nvidia-smi has readings of devices, and nothing of what they did"
_LOCAL = "times are nvidia-smi's, local time of a machine whose zone is not known: read as UTC"
_SAID_TO_BE_ONE = "no column tells devices apart: all readings are one device's, as was said"
_UNNAMED = (
    "a log of nvidia-smi without a column that tells devices apart (uuid, index, pci.bus_id,"
    " serial): log with --query-gpu=timestamp,index,..., or say --one-device if it is of one"
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


class NvidiaSmiImporter:
    """Logs of nvidia-smi, at any interval, of any columns of which one is the time.

    `devices` are those seen so far, by id.
    """

    name = "nvidia_smi"
    looks_for = "the header of `nvidia-smi --query-gpu=timestamp,... --format=csv`"
    is_live = False  # it is no program's that is measured

    def __init__(self, one_device: bool = False) -> None:
        """`one_device`: the user says that it is of one, where no column tells."""
        self.devices: dict[str, Device] = {}
        self._is_one_device = one_device
        self._left_out = 0  # rows that are no readings
        self._why = ""  # of the first of them

    def recognises(self, head: Sequence[str]) -> bool:
        """Say whether one of these lines is a header with a column that is read."""
        found = [header(text.strip()) for text in head]
        return any(
            one
            and not set(_FIGURES).isdisjoint(one.names)
            and (one.is_its_own or "timestamp" in one.names)
            for one in found
        )

    def advice(self, head: Sequence[str]) -> str:
        """What to do with a log that begins so and in which nothing was recognised."""
        is_headless = any(
            "," in text and any(_CELL.fullmatch(cell.strip()) for cell in text.split(","))
            for text in head
        )
        return _HEADLESS if is_headless else ""

    def words(self, recognised: str) -> Words | None:
        """Those of which a header has one; from there on every line."""
        return None if recognised else Words(_WORDS)

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield the readings of all devices, and what is to be known of them."""
        log = CsvLog()
        told = [Mark(0, "assumed", _LOCAL), Mark(0, "output_unrecognised", _NO_STEPS)]
        last_ns: dict[str, int] = {}
        for reading in _whole(self._keyed(log, lines)):
            for device, row in reading.items():
                sample = self._sample(device, row)
                if sample is None or sample.t_ns == last_ns.get(device):
                    continue
                if sample.t_ns < last_ns.get(device, 0):
                    yield Mark(sample.t_ns, "restarted", "timestamps fall back")
                    last_ns.clear()
                if not last_ns:
                    yield from told
                    if key_of(row.cells) is None:
                        yield Mark(0, "assumed", _SAID_TO_BE_ONE)
                last_ns[device] = sample.t_ns
                yield sample
        if log.header is not None and not self.devices:
            raise FormatError(self._why_none(log))
        if self._left_out or log.skipped > log.readings:
            said = f"{self._left_out + log.skipped} of {log.lines} lines are no readings"
            yield Mark(0, "rows_dropped", f"{said}: {self._why or log.why_skipped}")

    def _keyed(self, log: CsvLog, lines: Iterable[Line]) -> Iterator[tuple[str, Row]]:
        """The rows, each with its device."""
        for row in log.rows(line.text for line in lines):
            key = key_of(row.cells)
            device = row.cells[key] if key else row.cells.get("name", "0")
            if "timestamp" not in row.cells:
                self._leave_out(f"line {log.lines} has no time")
            elif key is None and not self._is_one_device:
                self._leave_out(f"line {log.lines} names no device")
            elif not device or device.startswith("["):  # `[GPU is lost]`: nobody knows which
                self._leave_out(f"line {log.lines} has {key} {device!r}")
            else:
                yield (f"GPU {device}" if device.isdigit() else device), row

    def _leave_out(self, why: str) -> None:
        self._left_out += 1
        self._why = self._why or why

    def _why_none(self, log: CsvLog) -> str:
        """What to say of a log of which nothing was read."""
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
    """A device by its first reading. Its power is of one kind throughout."""
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
    known = {name: value for name, value in facts.items() if value is not None}
    return Device(device, "gpu", row.cells.get("name", "NVIDIA GPU"), "nvidia_smi", known)


def _whole(rows: Iterable[tuple[str, Row]]) -> Iterator[dict[str, Row]]:
    """The rows of each reading, by device. The last is left out if it may be cut."""
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
    """Reasons why clocks are held down: NVML's own bits, in hexadecimal."""
    try:
        mask = int(text, 16) if text.startswith("0x") else -1
    except ValueError:
        return None
    return mask if 0 <= mask < _MASKS else None
