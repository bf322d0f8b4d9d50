"""What did this very device reach when `erg calibrate` last tried it, and where is that kept?

The trap: a figure of another day. A card behind a lower power limit, with another driver or in
company reaches another rate, and nobody sees it in the number. So a calibration belongs to one
device by its identity, holds its date and conditions, and a run takes into its own header what was
found when it was recorded: calibrating again later changes no run that is over.

One JSON file a device, in a folder: where ERGMETER_CALIBRATION says, or else in the user's data
folder. It is replaced whole, so that a reader finds the old or the new one and never half of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError, UsageError
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ergmeter.records import Device

FOLDER_VARIABLE = "ERGMETER_CALIBRATION"
FORMAT = "ergmeter-calibration"
VERSION = 1
STEADY_FRAC = 0.02
# Whose facts take one in: an accelerator, and the node, which stands for its CPU.
_KINDS = ("gpu", "node")


@dataclasses.dataclass(frozen=True, slots=True)
class CalibratedRate:
    """A rate that was held for a window: work of the window over its time, and how it came about.

    `median`, `low` and `high` are of the blocks that the window was timed in, the latter two their
    5th and 95th percentile. What the device did meanwhile is absent where nothing could be asked.
    """

    value: float
    unit: str  # FLOP/s, or B/s
    median: float
    low: float
    high: float
    blocks: int
    window_s: float
    warmup_s: float
    drift_frac: float  # second half of the window against the first
    of: str  # the sizes it was reached with
    burst: float  # the best short block, before heat and the power limit are felt
    burst_s: float
    burst_of: str
    clock_hz: float | None = None
    clock_low_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None  # at the end
    limited: Mapping[str, float] = dataclasses.field(default_factory=dict)  # share of readings

    @property
    def is_steady(self) -> bool:
        """Whether it was the same at the end of its window as at the beginning."""
        return abs(self.drift_frac) <= STEADY_FRAC


@dataclasses.dataclass(frozen=True, slots=True)
class Idle:
    """What the device draws when it does nothing, with a context open on it."""

    power_w: float  # mean of the power sensor
    low_w: float
    high_w: float
    window_s: float
    counter_w: float | None = None  # by the energy counter over the same time, whole refreshes
    clock_hz: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refresh:
    """How often a sensor has something new to say."""

    period_s: float
    low_s: float
    high_s: float
    changes: int
    resolution_s: float  # between two looks: it is known no better


@dataclasses.dataclass(slots=True)
class Calibration:
    """All of it for one device. Filled as it is measured: an interrupt keeps what there is."""

    device: str  # its id
    kind: str
    name: str
    measured: str  # when, in UTC
    conditions: dict[str, Any]  # library versions, driver, power limit, threads
    matmul: dict[str, CalibratedRate] = dataclasses.field(default_factory=dict)  # by type
    bandwidth: dict[str, CalibratedRate] = dataclasses.field(
        default_factory=dict
    )  # by access pattern
    idle: Idle | None = None
    refresh: dict[str, Refresh] = dataclasses.field(default_factory=dict)  # by sensor
    sweep: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)  # what is not here, and why
    remarks: list[str] = dataclasses.field(default_factory=list)
    took_s: float = 0.0
    quick: bool = False
    interrupted: bool = False

    def as_json(self, *, whole: bool = True) -> dict[str, Any]:
        """For a file; without what only a reader of that file would miss, for a run's header."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        if not whole:
            del document["sweep"]
        return document

    @property
    def said(self) -> str:
        """Date and conditions in words, for a note."""
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
    """A calibration from JSON. FormatError names where it is from."""
    cure = "remove it, or run `erg calibrate` again"
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{where} is no calibration: {cure}")
    if document.get("version") != VERSION:
        raise FormatError(
            f"{where} is version {document.get('version')!r} of its format, and this ergmeter reads"
            f" version {VERSION}: {cure}"
        )
    try:
        fields = {k: v for k, v in document.items() if k not in ("format", "version")}
        for table, kind in (
            ("matmul", CalibratedRate),
            ("bandwidth", CalibratedRate),
            ("refresh", Refresh),
        ):
            fields[table] = {name: kind(**one) for name, one in fields.get(table, {}).items()}
        if fields.get("idle") is not None:
            fields["idle"] = Idle(**fields["idle"])
        return Calibration(**fields)
    except (TypeError, AttributeError) as error:
        raise FormatError(
            f"{where} has not the fields of a calibration ({error}): {cure}"
        ) from None


def default_folder() -> Path | None:
    """Where calibrations are kept; None for a user without a home."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    try:
        root = Path(data) if data else Path("~/.local/share").expanduser()
    except RuntimeError:
        return None
    return root / "ergmeter" / "calibration"


def file_of(device: str, folder: Path) -> Path:
    """The file of a device."""
    return folder / (re.sub(r"[^A-Za-z0-9._-]", "_", device) + ".json")


def stored(device: str, *, folder: Path | None = None) -> Calibration | None:
    """What is kept for a device, if anything. FormatError or OSError if it can't be read."""
    folder = folder or default_folder()
    if folder is None:
        return None
    path = file_of(device, folder)
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FormatError(
            f"{path} is not JSON ({error}): remove it, or run `erg calibrate` again"
        ) from error
    found = read_document(document, str(path))
    return found if found.device == device else None


def store(calibration: Calibration, *, folder: Path | None = None) -> Path:
    """Keep it, in place of an earlier one of the same device."""
    folder = folder or default_folder()
    if folder is None:
        raise UsageError(
            f"this user has no home directory to keep the calibration in: pass --out FOLDER, or set"
            f" {FOLDER_VARIABLE}"
        )
    path = file_of(calibration.device, folder)
    folder.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        staging.write_text(json.dumps(calibration.as_json(), indent=1, allow_nan=False) + "\n")
        staging.replace(path)
    except OSError:
        staging.unlink(missing_ok=True)
        raise
    return path


def attach(devices: Iterable[Device]) -> None:
    """Put what is kept for each device among its facts, so that a run has it in its header."""
    for device in devices:
        if device.kind not in _KINDS or "calibration" in device.facts:
            continue
        try:
            found = stored(device.id)
        except (OSError, FormatError) as error:
            device.facts["no_calibration"] = str(error)
            continue
        if found is not None:
            device.facts["calibration"] = found.as_json(whole=False)
