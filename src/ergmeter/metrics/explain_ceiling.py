"""How much of the peak would the same products need at the best rate this device was seen to hold?

From the calibration in the run's own header, put on the run's clock where both clocks are known: a
calibration is a steady load at the power limit, whose clock is below most runs'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.achievable import OF_PEAK, achievable_of_peak_frac, calibration_of
from ergmeter.metrics.explain_blocks import Fact, percent
from ergmeter.records import weakest
from ergmeter.units import HZ_PER_MHZ

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.metrics.explain_device import Rungs
    from ergmeter.records import Basis


# Measured by ergmeter's authors on one such device, 2026-11-15: a hint, and no input of a figure.
_ELSEWHERE = {"NVIDIA H200": "another H200 held about 80 % of its bf16 peak in products of 8192^3"}


@dataclass(frozen=True)
class Ceiling:
    """What the products that were computed need at best, as a share of the peak."""

    needed_frac: float
    basis: Basis
    fact: Fact


def ceiling(evidence: Evidence, seen: Rungs, hardware_frac: float) -> Ceiling | None:
    """None without a calibration of this device in this type."""
    try:
        held = achievable_of_peak_frac(evidence)
        clock_hz = _clock_hz(evidence)
    except NotMeasurable:
        return None
    rate, said = held.value, f"products held {percent(held.value)} of the peak"
    if clock_hz is not None and seen.peak_clock_hz is not None and seen.clock_hz is not None:
        rate *= seen.peak_clock_hz / clock_hz
        said += f" at {clock_hz / HZ_PER_MHZ:.0f} MHz, {percent(rate)} of what that clock allows"
    return Ceiling(hardware_frac / rate, weakest("derived", held.basis), Fact(OF_PEAK, said))


def why_no_ceiling(evidence: Evidence) -> str:
    """Why there is none; empty if there is. What another device held is told and not used."""
    try:
        achievable_of_peak_frac(evidence)
    except NotMeasurable as error:
        names = {device.name for device in evidence.devices("gpu")}
        held = [f"; {said}" for name, said in _ELSEWHERE.items() if name in names]
        return f"{error}{''.join(held)}"
    return ""


def _clock_hz(evidence: Evidence) -> float | None:
    """The mean clock while products were calibrated; None where one of the devices had none."""
    dtype = evidence.settings.dtype or "fp32"
    devices = evidence.devices("gpu")
    clocks = [calibration_of(device).matmul[dtype].clock_hz for device in devices]
    known = [clock for clock in clocks if clock is not None]
    return sum(known) / len(known) if known and len(known) == len(clocks) else None
