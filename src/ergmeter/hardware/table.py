"""The table of devices and their peaks: reads rows from TOML, and looks up names.

A peak belongs to a data type: "the peak" of an H100 is 67, 494.5, 989.5 or 1979 TFLOP/s. If a type
has no number, either the device has no hardware units for it (`lacks`), or its rate is unknown.

A name matches as a whole, ignoring case and spaces: the driver's name, then an alias. Substring
matches take an L40S for an L4 and an H100 PCIe for an SXM (989 against 756 TFLOP/s), and every MFU
is then wrong. A name shared by several devices returns them all. An unknown name is an error that
lists the closest names.

Rows are in hardware.toml beside this file. A user's own rows, in the same format, take precedence.
A CPU has no row: its peak is derived (cpu.py), with the assumptions in its note.

Rows are checked field by field. A misspelt type would silently drop its peak, and a name in two
rows would make the result depend on their order, so both are errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ergmeter.atomic_write import read_toml, toml_beside
from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.records import DTYPES, Basis

USER_FILE_VARIABLE = "ERGMETER_HARDWARE"
BUILT_IN = "built in"

# No accelerator of the last fifteen years is outside these bounds: a peak outside has a wrong unit.
LEAST_PEAK_FLOPS_PER_S = 1e9
MOST_PEAK_FLOPS_PER_S = 1e17


class NoUnits(NotMeasurable):
    """The device has no hardware units for this data type, so there is no peak."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device's peaks, memory and power by its maker. Unpublished values are None or absent."""

    key: str
    name: str
    vendor: str
    driver_names: tuple[str, ...]
    aliases: tuple[str, ...]
    peak_flops_per_s: Mapping[str, float]  # by type, dense; operations per second for int8
    bandwidth_bytes_per_s: float | None
    memory_bytes: int | None
    tdp_w: float | None
    source: str
    checked: str  # the day the row was entered or last revised
    confirmed: str = ""  # what its peak was compared with that day
    note: str = ""
    lacks: tuple[str, ...] = ()  # types without units; other absent types are unknown
    # As the driver reports it: less than nominal if ECC bits take part of the memory.
    driver_memory_bytes: int | None = None
    driver_memory_source: str = ""
    origin: str = BUILT_IN  # or the user's file, or "derived"
    basis: Basis = "reported"

    def peak(self, dtype: str) -> float:
        """Return the peak of a data type in FLOP/s; NotMeasurable if the row has none."""
        if dtype not in DTYPES:
            raise UsageError(f"no type {dtype!r}; the table has {', '.join(DTYPES)}")
        peak = self.peak_flops_per_s.get(dtype)
        has = ", ".join(self.peak_flops_per_s) or "none at all"
        if dtype in self.lacks:
            raise NoUnits(
                f"no {dtype} peak: {self.name} has no {dtype} units; pass the type it computes in"
                f" (its table row has {has})"
            )
        if peak is None:
            raise NotMeasurable(
                f"{self.name} has no {dtype} rate in the hardware table; it has {has}"
            )
        return peak

    @property
    def short_source(self) -> str:
        """The source and the day it was checked, without its URL (`erg peaks` has that)."""
        name = re.sub(r",?\s*https?://[^\s;]+", "", self.source)
        return f"{name}, checked {self.checked}" if self.checked else name

    @property
    def memory_there(self) -> tuple[int, str] | None:
        """The memory a program sees, in bytes, with a short source; None if unknown."""
        if self.driver_memory_bytes is not None:
            return self.driver_memory_bytes, f"by {self.driver_memory_source.partition(' (')[0]}"
        if self.memory_bytes is not None:
            return self.memory_bytes, "nominal; a driver can report some 6 % less"
        return None


def parse_peak(text: str) -> float:
    """Parse a peak into FLOP/s: 989.5e12, 989.5T, "989.5 TFLOP/s" or 2.25 PFLOPS."""
    match = re.fullmatch(
        r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([gtp]?)(?:(?:flop|op)s?(?:/s)?)?",
        text.strip(),
        re.IGNORECASE,
    )
    if match is None:
        raise UsageError(f"{text!r} is not a peak; write 989.5e12, 989.5T or '989.5 TFLOP/s'")
    value = float(match[1]) * {"": 1.0, "g": 1e9, "t": 1e12, "p": 1e15}[match[2].lower()]
    if not LEAST_PEAK_FLOPS_PER_S <= value <= MOST_PEAK_FLOPS_PER_S:
        raise UsageError(
            f"no device has a peak of {value:g} FLOP/s ({text!r}); is the unit missing, as in"
            " 989.5T? Pass the peak of one device, not of all"
        )
    return value


_FLOP_PER_TFLOP = 1e12
_BYTES_PER_GB = 1e9
_BYTES_PER_GIB = 2**30
_BYTES_PER_MIB = 2**20


def fold_name(name: str) -> str:
    """Return a name for comparison: case folded, runs of spaces as one."""
    return " ".join(name.split()).casefold()


def read_rows(document: dict[str, Any], path: str) -> tuple[dict[str, DeviceSpec], dict[str, str]]:
    """Return rows by key, and the row key of each folded name; FormatError for an invalid row."""
    rows: dict[str, DeviceSpec] = {}
    names: dict[str, str] = {}
    for key, fields in document.items():
        if not isinstance(fields, dict):
            raise FormatError(f"{path}: {key} = {fields!r} is outside a row; rows are [tables]")
        row = rows[key] = _row(key, fields, f"{path}: [{key}]")
        for name in {fold_name(name) for name in (key, row.name, *row.driver_names, *row.aliases)}:
            if names.setdefault(name, key) != key:
                raise FormatError(f"{path}: [{key}] and [{names[name]}] both claim {name!r}")
    return rows, names


# The fields of a row with their types, and the required ones.
_FIELDS: dict[str, type] = {
    "name": str, "vendor": str, "driver_names": list, "aliases": list, "peak_tflop_per_s": dict,
    "bandwidth_gb_per_s": float, "memory_gib": float, "tdp_w": float, "source": str,
    "checked": str, "confirmed": str, "note": str, "lacks": list,
    "driver_memory_mib": float, "driver_memory_source": str,
}  # fmt: skip
_SPOKEN: dict[type, str] = {str: "a text", list: "a list of texts", dict: "a table of numbers"}
_REQUIRED = ("name", "peak_tflop_per_s", "source")


def _row(key: str, fields: dict[str, Any], where: str) -> DeviceSpec:
    for field, value in fields.items():
        if field not in _FIELDS:
            raise FormatError(f"{where} has no field {field!r}; it may have {', '.join(_FIELDS)}")
        _check(value, _FIELDS[field], f"{where} {field}")
    for field in _REQUIRED:
        if field not in fields:
            raise FormatError(f"{where} {field} is missing; a row needs {', '.join(_REQUIRED)}")
    peaks = dict(_peaks(fields["peak_tflop_per_s"], f"{where} peak_tflop_per_s"))
    memory, there = fields.get("memory_gib"), fields.get("driver_memory_mib")
    bandwidth, tdp_w = fields.get("bandwidth_gb_per_s"), fields.get("tdp_w")
    return DeviceSpec(
        key=key,
        name=fields["name"],
        vendor=fields.get("vendor", "other"),
        driver_names=tuple(fields.get("driver_names", ())),
        aliases=tuple(fields.get("aliases", ())),
        peak_flops_per_s=peaks,
        bandwidth_bytes_per_s=bandwidth and bandwidth * _BYTES_PER_GB,
        memory_bytes=memory and round(memory * _BYTES_PER_GIB),
        tdp_w=tdp_w and float(tdp_w),
        source=fields["source"],
        **{name: fields.get(name, "") for name in ("checked", "confirmed", "note")},
        lacks=_lacks(fields.get("lacks", ()), peaks, f"{where} lacks"),
        driver_memory_bytes=there and round(there * _BYTES_PER_MIB),
        driver_memory_source=fields.get("driver_memory_source", fields["source"]),
    )


def _check(value: object, kind: type, where: str) -> None:
    if kind is float:
        _positive(value, where)
    elif not isinstance(value, kind):
        raise FormatError(f"{where} is {value!r}; {_SPOKEN[kind]} is needed")
    elif kind is str and not value:
        raise FormatError(f"{where} is empty; a text is needed")
    elif isinstance(value, list) and not all(isinstance(item, str) and item for item in value):
        raise FormatError(f"{where} is {value!r}; a list of texts is needed")


def _positive(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"{where} is {value!r}; a number is needed")
    if not math.isfinite(value) or value <= 0:
        raise FormatError(f"{where} is {value!r}; a number above 0 is needed")
    return float(value)


def _peaks(table: dict[str, Any], where: str) -> Iterator[tuple[str, float]]:
    for dtype, value in table.items():
        _check_type(dtype, where)
        peak = _positive(value, f"{where}.{dtype}") * _FLOP_PER_TFLOP
        if not LEAST_PEAK_FLOPS_PER_S <= peak <= MOST_PEAK_FLOPS_PER_S:
            raise FormatError(f"{where}.{dtype} is {value!r} TFLOP/s; no device has such a peak")
        yield dtype, peak


def _lacks(names: Sequence[str], peaks: Mapping[str, float], where: str) -> tuple[str, ...]:
    for dtype in names:
        _check_type(dtype, where)
        if dtype in peaks:
            raise FormatError(f"{where} names {dtype!r}, which has a peak in the same row")
    return tuple(names)


def _check_type(dtype: str, where: str) -> None:
    if dtype not in DTYPES:
        raise FormatError(f"{where} has no type {dtype!r}; it may have {', '.join(DTYPES)}")


def lookup(name: str, *, extra: Path | None = None) -> DeviceSpec:
    """Return the device with this name; NotMeasurable if there is none, or several.

    The user's rows take precedence over built-in ones. `extra`: a file instead of the user's.
    """
    rows = candidates(name, extra=extra)
    if len(rows) > 1:
        keys = ", ".join(spec.key for spec in rows)
        raise NotMeasurable(
            f"{name!r} is the name of several devices with different peaks; name one of"
            f" them: {keys}"
        )
    return rows[0]


def candidates(name: str, *, extra: Path | None = None) -> tuple[DeviceSpec, ...]:
    """Return the devices with this name, several if they share it; NotMeasurable if none."""
    wanted = fold_name(name)
    users, built_in = _user_table(extra), _built_in()
    rows, names = {**built_in.rows, **users.rows}, {**built_in.names, **users.names}
    if wanted in names:
        return (rows[names[wanted]],)
    if wanted in built_in.ambiguous:
        return tuple(rows[key] for key in built_in.ambiguous[wanted])
    keys = {_letters(each): key for each, key in names.items()}
    near = near_names(_letters(wanted), keys, least_letters=2, cutoff=0.75)
    suggested = list(dict.fromkeys(keys[each] for each in near))[:_MOST_SUGGESTED]
    raise NotMeasurable(
        f"no row of the hardware table is named {name!r}; `erg peaks` lists them"
        f"{_question(suggested)}"
    )


def devices(*, extra: Path | None = None) -> list[DeviceSpec]:
    """Return all devices in the file's order; a user's row replaces the built-in of its key."""
    return list({**_built_in().rows, **_user_table(extra).rows}.values())


def built_in_devices() -> list[DeviceSpec]:
    """Return the built-in devices, without the user's."""
    return list(_built_in().rows.values())


def ambiguous_names() -> dict[str, tuple[str, ...]]:
    """Return the names that several devices share, with the keys of their rows."""
    return dict(_built_in().ambiguous)


def user_file() -> Path | None:
    """Return the path of the user's own device rows, or None."""
    named = os.environ.get(USER_FILE_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise UsageError(f"{USER_FILE_VARIABLE} is {named}, which is not a file")
        return Path(named)
    try:
        path = Path("~/.config/ergmeter/hardware.toml").expanduser()
    except RuntimeError:  # a container's user without a home has no rows there either
        return None
    return path if path.is_file() else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    rows: dict[str, DeviceSpec]
    names: dict[str, str]  # every folded name, to the key of its row
    ambiguous: dict[str, tuple[str, ...]]


_MOST_SUGGESTED = 5


def near_names(
    text: str, names: Collection[str], *, least_letters: int, cutoff: float
) -> list[str]:
    """Return the names that contain `text`, shortest first; else the two most similar names.

    A text of fewer than `least_letters` is not searched for inside names: too many would match.
    `cutoff` is difflib's.
    """
    holding = [name for name in names if text in name and len(text) >= least_letters]
    return sorted(holding, key=len) or difflib.get_close_matches(text, names, n=2, cutoff=cutoff)


def _letters(name: str) -> str:
    """Return letters and digits only: "rtx4090", "RTX-4090" and "RTX 4090" become equal."""
    return re.sub(r"[^a-z0-9]+", "", name.casefold())


def _question(keys: list[str]) -> str:
    if not keys:
        return ""
    *others, last = keys
    return f". Did you mean {', '.join(others)} or {last}?" if others else f". Did you mean {last}?"


@functools.cache
def _built_in() -> _Table:
    document = toml_beside(__file__, "hardware.toml")
    ambiguous = {fold_name(name): tuple(keys) for name, keys in document.pop("ambiguous").items()}
    rows, names = read_rows(document, "hardware.toml")
    return _Table(rows, names, ambiguous)


def _user_table(extra: Path | None) -> _Table:
    path = extra or user_file()
    if path is None:
        return _Table({}, {}, {})
    try:
        document = read_toml(path)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FormatError(f"{path} is not TOML: {error}") from error
    rows, names = read_rows(document, str(path))
    for key, row in rows.items():
        own = {name for name, of in names.items() if of == key}
        replaced = sorted({of for name, of in _built_in().names.items() if name in own})
        origin = f"row of {path}"
        if replaced:
            origin += f", in place of the built-in {', '.join(replaced)}"
        note = f"{row.note}; {origin}" if row.note else origin
        rows[key] = dataclasses.replace(row, note=note, origin=str(path))
    return _Table(rows, names, {})
