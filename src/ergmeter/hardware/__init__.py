"""What could this device do at best? Its dense peak by type, from a table with sources.

The trap: a peak that belongs to another device. Tables matched by substring take an L40S for an
L4 and an H100 PCIe for an SXM (989 against 756), print the rate with sparsity, or fall back to an
A100 for what they do not know; every MFU is then wrong by a factor nobody sees. So a name is
matched whole, but for case and spaces: the driver's name, then an alias. A name that several
devices share stands for what they agree on, and for the rest is answered with the candidates; an
unknown one is answered with the nearest names. What else to pass is for whoever asked to say.

Rows are in hardware.toml beside this file. A user's own rows, in the same format, win. A CPU has
no row: its peak is worked out from its parts (cpu.py), and says what it assumed.
"""

from __future__ import annotations

from ergmeter.hardware.cpu import cpu_peak, cpu_peak_of
from ergmeter.hardware.spec import BUILT_IN, DeviceSpec, NoUnits, parse_peak
from ergmeter.hardware.table import (
    ambiguous_names,
    built_in_devices,
    candidates,
    devices,
    lookup,
    user_file,
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
    "user_file",
]
