"""What did the devices do, by a log of `nvidia-smi --query-gpu=timestamp,... --format=csv -l 1`?

It makes a run of readings and no steps: what the boards drew is their power, integrated. Two traps.
`power.draw` is an average of about a second on recent chips, as NVML's reading of that name is, and
is told apart from `power.draw.instant`. And timestamps are local time without a zone: where the
clock falls back, as at the end of summer time, another run begins, since nobody knows how long it
took; where it leaps ahead there is a gap in the readings.

A reading is of all devices. At the end of a log that was cut some are missing, and one that may be
cut within a number can't be told from a whole one; it is then left out for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

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
_UNNAMED = "no column tells devices apart (uuid, index): all readings are taken for one device's"
_SEVERAL = (
    "its readings come in bunches, as those of several devices, and no column tells them apart: log"
    " with --query-gpu=timestamp,index,..."
)
_NO_POWER = "the log has no column of power: log with --query-gpu=timestamp,index,power.draw,..."
_FIRST = 64  # readings that are looked at to tell one device from several
_SOME = 8  # so that one reading that came late does not look like it


class NvidiaSmiImporter:
    """Logs of nvidia-smi, at any interval, of any columns of which one is the time.

    `devices` are those seen so far, by id.
    """

    name = "nvidia_smi"
    looks_for = "the header of `nvidia-smi --query-gpu=timestamp,... --format=csv`"
    is_live = False  # it is no program's that is measured

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}

    def recognises(self, head: Sequence[str]) -> bool:
        """Say whether one of these lines is a header with a column that is read."""
        found = [header(text.strip()) for text in head]
        return any(one and not set(_FIGURES).isdisjoint(one.names) for one in found)

    def words(self, recognised: str) -> Words | None:
        """Those of which a header has one; from there on every line."""
        return None if recognised else Words(_WORDS)

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield the readings of all devices, and what is to be known of them."""
        log = CsvLog()
        rows = log.rows(line.text for line in lines)
        first = list(islice(rows, _FIRST))
        if log.header is None:
            return
        if "timestamp" not in log.header.names:
            raise FormatError(
                "a log of nvidia-smi without times: log with --query-gpu=timestamp,..."
            )
        told = [Mark(0, "assumed", _LOCAL), Mark(0, "output_unrecognised", _NO_STEPS)]
        if first and key_of(log.header.names) is None:
            _check_single(first)
            told.append(Mark(0, "assumed", _UNNAMED))
        yield from told
        last_ns: dict[str, int] = {}
        for reading in _whole(chain(first, rows)):
            for device, row in reading.items():
                sample = self._sample(device, row)
                if sample is None or sample.t_ns == last_ns.get(device):
                    continue
                if sample.t_ns < last_ns.get(device, 0):
                    yield Mark(sample.t_ns, "restarted", "timestamps fall back")
                    yield from told
                    last_ns.clear()
                last_ns[device] = sample.t_ns
                yield sample

    def _sample(self, device: str, row: Row) -> Sample | None:
        """One device's part of a reading; None where the row has no time."""
        t_ns = stamp_ns(row.cells.get("timestamp", ""))
        if t_ns is None:
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


def _whole(rows: Iterable[Row]) -> Iterator[dict[str, Row]]:
    """The rows of each reading, by device. The last is left out if it may be cut."""
    before = 0
    reading: dict[str, Row] = {}
    row: Row | None = None
    for row in rows:
        key = key_of(row.cells)
        device = row.cells[key] if key else row.cells.get("name", "0")
        device = f"GPU {device}" if device.isdigit() else device
        if device in reading:
            yield reading
            before, reading = len(reading), {}
        reading[device] = row
    if row is not None and len(reading) >= before and row.is_surely_whole:
        yield reading


def _check_single(rows: Sequence[Row]) -> None:
    """Refuse what can't be one device's: readings that are by turns near and far apart."""
    stamps = [stamp_ns(row.cells["timestamp"]) for row in rows]
    gaps = np.diff(np.array([one for one in stamps if one is not None], dtype=np.int64))
    if len(gaps) < _SOME:
        return
    near_ns, far_ns = np.quantile(gaps, [0.3, 0.95], method="lower")
    if 4 * near_ns < far_ns:
        raise FormatError(f"a log of nvidia-smi of several devices: {_SEVERAL}")


def _mask(text: str) -> int | None:
    """Reasons why clocks are held down: NVML's own bits, in hexadecimal."""
    try:
        return int(text, 16) if text.startswith("0x") else None
    except ValueError:
        return None
