"""What a run and its writers say of themselves, as it stands on disk, checked.

A header may be of a later version, or somebody else's file: what is needed of it is looked at here,
once, and what is wrong with it is said with its path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.records import Device
from ergmeter.runlog import format as fmt

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.records import Mark

_DEVICE_FIELDS = {field.name for field in fields(Device)}


@dataclass(frozen=True)
class WriterLog:
    """One writer's directory: header and marks. `offset_ns` takes its clock to the run's."""

    directory: Path
    header: dict[str, Any]
    marks: tuple[Mark, ...]
    offset_ns: int = 0

    @property
    def closed(self) -> bool:
        """Whether the writer said it was done."""
        return any(mark.name == "closed" for mark in self.marks)

    @property
    def clock_of(self) -> str:
        """Whose monotonic clock it reads: the processes of a host share one, to the nanosecond."""
        return str(self.header.get("boot_id") or self.header.get("host"))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices this writer sampled."""
        # A later version may say more of a device than this one knows.
        return tuple(
            Device(**{name: value for name, value in device.items() if name in _DEVICE_FIELDS})
            for device in self.header["devices"]
        )


def training_of(writer: WriterLog) -> str | None:
    """The training that a writer told of, if it said so."""
    training = writer.header.get("training")
    return str(training["id"]) if isinstance(training, dict) and "id" in training else None


def run_header(path: Path) -> dict[str, Any]:
    """Of a run's directory. FormatError where it is none."""
    if path.name.endswith(fmt.PACKED) and path.is_file():
        raise FormatError(f"{path} is packed; `erg runs unpack {path}` makes a run of it")
    if not path.is_dir():
        what = "is a file, not a run directory" if path.exists() else "does not exist"
        raise FormatError(f"{path} {what}; `erg list` shows the runs there are")
    if not (path / fmt.RUN_FILE).exists():
        inside = sorted(p.parent.name for p in path.glob(f"*/{fmt.RUN_FILE}"))
        names = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        hint = f"; it holds {len(inside)} run{'s'[: len(inside) > 1]}: {names}" if inside else ""
        raise FormatError(f"{path} is not a run: it has no {fmt.RUN_FILE}{hint}")
    header = _json_object(path / fmt.RUN_FILE)
    if header.get("format") != fmt.FORMAT:
        raise FormatError(
            f"{path / fmt.RUN_FILE}: not a run of ergmeter's (format {header.get('format')!r})"
        )
    version = header.get("version")
    if not isinstance(version, int) or version > fmt.VERSION:
        raise FormatError(
            f"{path}: run format {version!r} is not one this ergmeter reads (up to {fmt.VERSION});"
            " upgrade ergmeter to open it"
        )
    return header


def writer_header(path: Path) -> dict[str, Any]:
    """Of a writer's directory."""
    header = _json_object(path)
    try:
        clock = header["clock"]
        header["clock"] = {n: int(clock[n]) for n in ("monotonic_ns", "wall_ns")}
        if clock.get("error_s") is not None:
            header["clock"]["error_s"] = float(clock["error_s"])
        for name in ("settings", "unavailable"):
            header[name] = dict(header.get(name) or {})
        header["devices"] = list(header.get("devices") or [])
        for device in header["devices"]:
            if not {"id", "kind", "name", "probe"} <= device.keys():
                raise ValueError(f"a device without its name: {device}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: not a writer's header ({error})") from error
    return header


def _json_object(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: not JSON ({error})") from error
    except OSError as error:
        raise FormatError(f"{path}: can't be read ({error.strerror})") from error
    if not isinstance(parsed, dict):
        raise FormatError(f"{path}: holds a {type(parsed).__name__}, not an object")
    return parsed
