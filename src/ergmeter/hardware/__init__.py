"""Dense peaks of devices by data type, from a table with sources.

A name matches as a whole, ignoring case and spaces: the driver's name, then an alias. Substring
matches take an L40S for an L4 and an H100 PCIe for an SXM (989 against 756 TFLOP/s), and every MFU
is then wrong. A name shared by several devices returns them all. An unknown name is an error that
lists the closest names.

Rows are in hardware.toml beside this file. A user's own rows, in the same format, win. A CPU has
no row: its peak is derived from its parts (cpu.py), with the assumptions in its note.
"""

from __future__ import annotations

from ergmeter.hardware.cpu import cpu_peak, cpu_peak_of
from ergmeter.hardware.table import (
    BUILT_IN,
    DeviceSpec,
    NoUnits,
    ambiguous_names,
    built_in_devices,
    candidates,
    devices,
    lookup,
    parse_peak,
)

__all__ = [
    "BUILT_IN",
    "DeviceSpec",
    "NoUnits",
    "ambiguous_names",
    "built_in_devices",
    "candidates",
    "cpu_peak",
    "cpu_peak_of",
    "devices",
    "lookup",
    "parse_peak",
]
