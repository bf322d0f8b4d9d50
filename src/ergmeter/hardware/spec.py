"""One device and its peaks, and a peak as a user writes it.

The trap: a number without its type or its unit. "The peak" of an H100 is 67, 494.5, 989.5 or 1979
TFLOP/s; 989.5 typed where FLOP/s are meant gives an MFU of ten to the fourteen percent. A type
without a number is one of two things: the device has no units for it, or nobody says how fast they
are. Only the second is unknown.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.records import DTYPES

if TYPE_CHECKING:
    from ergmeter.records import Basis

BUILT_IN = "built in"

# No accelerator of the last fifteen years is below the first or, so far, above the second. What
# lies outside is a peak in the wrong unit.
LEAST_PEAK_FLOPS_PER_S = 1e9
MOST_PEAK_FLOPS_PER_S = 1e17


class NoUnits(NotMeasurable):
    """A type that a device does not compute in: its peak is not unknown, there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device as its maker describes it. What the maker does not say is absent."""

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
    confirmed: str = ""  # what its peak was held against that day
    note: str = ""
    lacks: tuple[
        str, ...
    ] = ()  # types that it has no units for; the rest of the absent are unknown
    # What the driver shows of it: less than nominal where the check bits of ECC are in it.
    driver_memory_bytes: int | None = None
    driver_memory_source: str = ""
    origin: str = BUILT_IN  # or the user's file, or "derived"
    basis: Basis = "reported"

    def peak(self, dtype: str) -> float:
        """The peak of a type in FLOP/s; NotMeasurable where the row has none."""
        if dtype not in DTYPES:
            raise UsageError(f"no type {dtype!r}; the table has {', '.join(DTYPES)}")
        found = self.peak_flops_per_s.get(dtype)
        has = ", ".join(self.peak_flops_per_s) or "none at all"
        if dtype in self.lacks:
            raise NoUnits(
                f"no {dtype} peak: {self.name} has no {dtype} units; pass the type it computes in"
                f" (its table row has {has})"
            )
        if found is None:
            raise NotMeasurable(
                f"{self.name} has no {dtype} rate in the hardware table; it has {has}"
            )
        return found

    @property
    def short_source(self) -> str:
        """Who says so, and when it was looked at, without the address: `erg peaks` has that."""
        name = re.sub(r",?\s*https?://[^\s;]+", "", self.source)
        return f"{name}, checked {self.checked}" if self.checked else name

    @property
    def memory_there(self) -> tuple[int, str] | None:
        """The bytes that a program finds, and who says so in short; None where nobody does."""
        if self.driver_memory_bytes is not None:
            return self.driver_memory_bytes, f"by {self.driver_memory_source.partition(' (')[0]}"
        if self.memory_bytes is not None:
            return self.memory_bytes, "nominal; a driver can report some 6 % less"
        return None


def parse_peak(text: str) -> float:
    """A peak as people write it, in FLOP/s: 989.5e12, 989.5T, "989.5 TFLOP/s", 2.25 PFLOPS."""
    found = re.fullmatch(
        r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([gtp]?)(?:(?:flop|op)s?(?:/s)?)?",
        text.strip(),
        re.IGNORECASE,
    )
    if found is None:
        raise UsageError(f"{text!r} is no peak; write it as 989.5e12, 989.5T or '989.5 TFLOP/s'")
    value = float(found[1]) * {"": 1.0, "g": 1e9, "t": 1e12, "p": 1e15}[found[2].lower()]
    if not LEAST_PEAK_FLOPS_PER_S <= value <= MOST_PEAK_FLOPS_PER_S:
        raise UsageError(
            f"a peak of {value:g} FLOP/s ({text!r}) is no device's; is the unit missing, as in"
            " 989.5T? It is the peak of one device, not of all"
        )
    return value
