"""Dense peak FLOP/s of a device in a dtype, with its source.

A name that several devices share has a peak only if they agree on it. If a device has no units for
a dtype there is no peak; the bf16 peak is then returned separately (`NoPeak.bf16`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.hardware.table import DeviceSpec, NoUnits, candidates, lookup
from ergmeter.records import DTYPES, Basis, Missing, or_none
from ergmeter.units import scaled

NARROW = ("fp8", "fp4", "int8")
"""Dtypes in which only matmuls are computed; all other work is in a wider dtype."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The dense peak of one device, with its source."""

    device: str
    dtype: str  # "" if the user gave a peak without a dtype
    flops_per_s: float
    source: str
    basis: Basis
    bf16_flops_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    bandwidth_source: str = ""

    @property
    def text(self) -> str:
        """The peak as text, with its source."""
        kind = f" dense {self.dtype}" if self.dtype else ""
        _, is_part, part = self.device.partition(", one ")  # of its two GCDs, NeuronCore, chip
        of = f" for one {part}" if is_part else ""
        return f"{scaled(self.flops_per_s, 'FLOP/s')}{kind}{of} ({self.source})"


@dataclass(frozen=True, slots=True)
class NoPeak(Missing):
    """The reason why there is no peak for a dtype, and so no MFU.

    The bf16 peak, with which such a job can be compared instead, may be known.
    """

    bf16: Peak | None = None
    dtype: str = ""


def table_peak(
    device: str, dtype: str, *, is_dtype_assumed: bool = False, otherwise: str = ""
) -> Peak:
    """The peak of a device by name. NotMeasurable if the table does not have it.

    If several devices share a name, they must have the same peak; the source then names them.
    `otherwise`: the caller's advice if there is no peak, such as "pass --peak".
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    try:
        specs = candidates(device)
        if len({spec.peak_flops_per_s.get(dtype) for spec in specs}) > 1:
            specs = (lookup(device),)  # which says that they differ
        flops_per_s = specs[0].peak(dtype)
    except NoUnits:
        raise
    except NotMeasurable as error:
        reason = f"{otherwise} ({error})" if otherwise else f"{error}"
        raise NotMeasurable(f"unknown peak: {reason}") from error
    source = _source(device, specs)
    return Peak(
        specs[0].name if len(specs) == 1 else device,
        dtype,
        flops_per_s,
        source + (f"; {dtype} is assumed, no type was given" if is_dtype_assumed else ""),
        "assumed" if is_dtype_assumed else specs[0].basis,
        agreed(spec.peak_flops_per_s.get("bf16") for spec in specs),
        agreed(spec.bandwidth_bytes_per_s for spec in specs),
        source,
    )


def _source(device: str, specs: Sequence[DeviceSpec]) -> str:
    """The source of a peak; for a name that several devices share, also their keys."""
    if len(specs) == 1:
        return specs[0].short_source
    keys = ", ".join(spec.key for spec in specs)
    return f"{specs[0].short_source}; {device} is any of {keys}, which agree on it"


def agreed(figures: Iterable[float | None]) -> float | None:
    """The value that all devices of a name share; None if they differ."""
    distinct = set(figures)
    return distinct.pop() if len(distinct) == 1 else None


def device_peak(device: str, dtype: str, *, is_dtype_assumed: bool = False) -> Peak | NoPeak:
    """The peak of a device, or the reason why there is none, with its bf16 peak if known."""
    try:
        return table_peak(device, dtype, is_dtype_assumed=is_dtype_assumed, otherwise="pass --peak")
    except NotMeasurable as error:
        reason = str(error)
    wide = or_none(table_peak, device, "bf16") if dtype in NARROW else None
    if wide is not None:
        reason += f"; if only weights are stored in {dtype}: --dtype bf16 --weights-dtype {dtype}"
    return NoPeak(reason, wide, dtype)


def declared_peak(
    flops_per_s: float, dtype: str | None, source: str | None, *, device: str | None = None
) -> Peak:
    """A peak that the user gave, with the memory bandwidth of the device if that is known."""
    specs = (or_none(candidates, device) if device else None) or ()
    return Peak(
        specs[0].name if len(specs) == 1 else device or "the device",
        dtype or "",
        flops_per_s,
        source or "given, source not stated",
        "reported" if source else "assumed",
        bandwidth_bytes_per_s=agreed(spec.bandwidth_bytes_per_s for spec in specs),
        bandwidth_source=_source(device, specs) if device and specs else "",
    )
