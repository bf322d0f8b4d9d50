"""The rows of a table in TOML, checked field by field: ours and a user's.

The trap: a row that is nearly right. A misspelt type would silently leave its peak out, a name in
two rows would make the answer depend on their order. Either is an error that names file, row,
field and value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ergmeter.errors import FormatError
from ergmeter.hardware.spec import (
    LEAST_PEAK_FLOPS_PER_S,
    MOST_PEAK_FLOPS_PER_S,
    DeviceSpec,
)
from ergmeter.records import DTYPES

_FLOP_PER_TFLOP = 1e12
_BYTES_PER_GB = 1e9
_BYTES_PER_GIB = 2**30
_BYTES_PER_MIB = 2**20


def folded(name: str) -> str:
    """A name as it is compared: without case, with single spaces, and nothing else."""
    return " ".join(name.split()).casefold()


def read_rows(document: dict[str, Any], path: str) -> tuple[dict[str, DeviceSpec], dict[str, str]]:
    """Rows by key, and every folded name with the key of its row. FormatError names the fault."""
    rows: dict[str, DeviceSpec] = {}
    names: dict[str, str] = {}
    for key, fields in document.items():
        if not isinstance(fields, dict):
            raise FormatError(f"{path}: {key} = {fields!r} stands outside a row; rows are [tables]")
        row = rows[key] = _row(key, fields, f"{path}: [{key}]")
        for name in {folded(name) for name in (key, row.name, *row.driver_names, *row.aliases)}:
            if names.setdefault(name, key) != key:
                raise FormatError(f"{path}: [{key}] and [{names[name]}] both claim {name!r}")
    return rows, names


# The fields of a row with the type of each, and those that a user's row may not leave out.
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
    peaks = _peaks(fields["peak_tflop_per_s"], f"{where} peak_tflop_per_s")
    memory = _scaled(fields.get("memory_gib"), _BYTES_PER_GIB)
    there = _scaled(fields.get("driver_memory_mib"), _BYTES_PER_MIB)
    return DeviceSpec(
        key=key,
        name=fields["name"],
        vendor=fields.get("vendor", "other"),
        driver_names=tuple(fields.get("driver_names", ())),
        aliases=tuple(fields.get("aliases", ())),
        peak_flops_per_s=peaks,
        bandwidth_bytes_per_s=_scaled(fields.get("bandwidth_gb_per_s"), _BYTES_PER_GB),
        memory_bytes=None if memory is None else round(memory),
        tdp_w=_scaled(fields.get("tdp_w"), 1.0),
        source=fields["source"],
        checked=fields.get("checked", ""),
        confirmed=fields.get("confirmed", ""),
        note=fields.get("note", ""),
        lacks=_lacks(fields.get("lacks", ()), peaks, f"{where} lacks"),
        driver_memory_bytes=None if there is None else round(there),
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


def _peaks(given: dict[str, Any], where: str) -> dict[str, float]:
    peaks = {}
    for dtype, value in given.items():
        if dtype not in DTYPES:
            raise FormatError(f"{where} has no type {dtype!r}; it may have {', '.join(DTYPES)}")
        peak = _positive(value, f"{where}.{dtype}") * _FLOP_PER_TFLOP
        if not LEAST_PEAK_FLOPS_PER_S <= peak <= MOST_PEAK_FLOPS_PER_S:
            raise FormatError(f"{where}.{dtype} is {value!r}; that many TFLOP/s is no device's")
        peaks[dtype] = peak
    return peaks


def _lacks(given: Sequence[str], peaks: Mapping[str, float], where: str) -> tuple[str, ...]:
    for dtype in given:
        if dtype not in DTYPES:
            raise FormatError(f"{where} has no type {dtype!r}; it may have {', '.join(DTYPES)}")
        if dtype in peaks:
            raise FormatError(f"{where} names {dtype!r}, which has a peak in the same row")
    return tuple(given)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
