"""The rates that `erg calibrate` measured on a device, and the files they are stored in.

A rate depends on the power limit, the driver and other processes on the GPU. So a calibration
belongs to one device id and has its date and conditions. Each run copies it into its header, so a
later calibration does not change finished runs.

There is one JSON file per device, in the folder ERGMETER_CALIBRATION or, by default, in the user's
data folder. A file is replaced atomically.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ergmeter.atomic_write import write_text
from ergmeter.errors import FormatError, UsageError
from ergmeter.records import Device
from ergmeter.units import significant

FOLDER_VARIABLE = "ERGMETER_CALIBRATION"
FORMAT = "ergmeter-calibration"
VERSION = 1
STEADY_FRAC = 0.02
# Kinds of devices that may have a calibration: an accelerator, and the node for its CPU.
_KINDS = ("gpu", "node")


@dataclasses.dataclass(frozen=True, slots=True)
class CalibratedRate:
    """A rate sustained over a time window: work over time, and the conditions.

    `median`, `low` (5th percentile) and `high` (95th) are of the timed blocks in the window. Clock,
    power and temperature are None if they could not be read.
    """

    value: float
    unit: str  # FLOP/s, or B/s
    median: float
    low: float
    high: float
    blocks: int
    window_s: float
    warmup_s: float
    drift_frac: float  # second half of the window compared with the first
    of: str  # the sizes of matrices or buffers
    burst: float  # the best short block, before heat and the power limit lower the rate
    burst_s: float
    burst_of: str
    clock_hz: float | None = None
    clock_low_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None  # at the end
    limited: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by throttle reason

    @property
    def is_steady(self) -> bool:
        """True if the rate did not drift within its window."""
        return abs(self.drift_frac) <= STEADY_FRAC


@dataclasses.dataclass(frozen=True, slots=True)
class Idle:
    """Power of the idle device with a context open on it."""

    power_w: float  # mean of the power sensor
    low_w: float
    high_w: float
    window_s: float
    counter_w: float | None = None  # from the energy counter, over whole refreshes of it
    clock_hz: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refresh:
    """The refresh period of a sensor."""

    period_s: float
    low_s: float
    high_s: float
    changes: int
    resolution_s: float  # time between two reads: the precision of the period


@dataclasses.dataclass(slots=True)
class Calibration:
    """All measurements of one device, filled step by step: an interrupt keeps the finished ones."""

    device: str  # its id
    kind: str
    name: str
    measured: str  # when, in UTC
    conditions: dict[str, Any]  # library versions, driver, power limit, threads
    matmul: dict[str, CalibratedRate] = dataclasses.field(default_factory=dict)  # by type
    # By access pattern.
    bandwidth: dict[str, CalibratedRate] = dataclasses.field(default_factory=dict)
    idle: Idle | None = None
    refresh: dict[str, Refresh] = dataclasses.field(default_factory=dict)  # by sensor
    sweep: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)  # missing, with the reason
    remarks: list[str] = dataclasses.field(default_factory=list)
    took_s: float = 0.0
    quick: bool = False
    interrupted: bool = False

    def as_json(self, *, with_sweep: bool = True) -> dict[str, Any]:
        """Return the JSON document of a calibration file; a run's header leaves out the sweep."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        if not with_sweep:
            del document["sweep"]
        return document

    @property
    def text(self) -> str:
        """The date and conditions as text for a note."""
        conditions = self.conditions
        limit = conditions.get("power_limit_w")
        parts = [f"calibrated {self.measured[:10]}", f"torch {conditions.get('torch', '?')}"]
        if "driver" in conditions:
            parts.append(f"driver {conditions['driver']}")
        if limit is not None:
            parts.append(f"power limit {significant(limit)} W")
        if "threads" in conditions:
            parts.append(f"{conditions['threads']} threads")
        if self.quick:
            parts.append("quick")
        return ", ".join(parts)


def read_document(document: object, where: str) -> Calibration:
    """Return the calibration in a JSON document; `where` is its source, for errors."""
    cure = "remove it, or run `erg calibrate` again"
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{where} is no calibration: {cure}")
    if document.get("version") != VERSION:
        raise FormatError(
            f"{where} has format version {document.get('version')!r}, and this ergmeter reads"
            f" version {VERSION}: {cure}"
        )
    try:
        fields = {k: v for k, v in document.items() if k not in ("format", "version")}
        for table, kind in (
            ("matmul", CalibratedRate),
            ("bandwidth", CalibratedRate),
            ("refresh", Refresh),
        ):
            fields[table] = {name: kind(**row) for name, row in fields.get(table, {}).items()}
        if fields.get("idle") is not None:
            fields["idle"] = Idle(**fields["idle"])
        return Calibration(**fields)
    except (TypeError, AttributeError) as error:
        raise FormatError(
            f"{where} does not have the fields of a calibration ({error}): {cure}"
        ) from None


def default_folder() -> Path | None:
    """Return the folder of calibrations; None for a user without a home directory."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    try:
        root = Path(data) if data else Path("~/.local/share").expanduser()
    except RuntimeError:
        return None
    return root / "ergmeter" / "calibration"


def calibration_path(device: str, folder: Path) -> Path:
    """Return the path of a device's calibration in `folder`."""
    return folder / (re.sub(r"[^A-Za-z0-9._-]", "_", device) + ".json")


def load_calibration(device: str, *, folder: Path | None = None) -> Calibration | None:
    """Return a device's stored calibration, or None. FormatError or OSError if unreadable."""
    folder = folder or default_folder()
    if folder is None:
        return None
    path = calibration_path(device, folder)
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FormatError(
            f"{path} is not JSON ({error}): remove it, or run `erg calibrate` again"
        ) from error
    calibration = read_document(document, str(path))
    return calibration if calibration.device == device else None


def save_calibration(calibration: Calibration, *, folder: Path | None = None) -> Path:
    """Store a calibration in place of the device's earlier one; return its path."""
    folder = folder or default_folder()
    if folder is None:
        raise UsageError(
            f"this user has no home directory to store the calibration in: pass --out FOLDER, or"
            f" set {FOLDER_VARIABLE}"
        )
    path = calibration_path(calibration.device, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(calibration.as_json(), indent=1, allow_nan=False) + "\n")
    return path


def attach(devices: Iterable[Device]) -> None:
    """Add the stored calibration of each device to its facts, for the run's header."""
    for device in devices:
        if device.kind not in _KINDS or "calibration" in device.facts:
            continue
        try:
            calibration = load_calibration(device.id)
        except (OSError, FormatError) as error:
            device.facts["no_calibration"] = str(error)
            continue
        if calibration is not None:
            device.facts["calibration"] = calibration.as_json(with_sweep=False)
