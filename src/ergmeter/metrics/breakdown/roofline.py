"""Is a run bound by arithmetic or by memory? Where it stands under the roof of its device.

Work per byte (FLOP/B) times the bandwidth, or the peak, whichever is lower, is what a device can
reach (Williams, Waterman, Patterson 2009). The trap: bytes that somebody reckoned. Here they are
those that the hardware counted (dram_frac of the peak bandwidth); without such a counter, without
the FLOPs of a step or without a peak there is no roofline, and the reason says which is missing.
The work is the model's, so a run that computes things twice stands a little too low and left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.activity import METRICS as ACTIVITY
from ergmeter.metrics.definitions.compute import FLOPS_PER_S, MFU, need_possible, run_results
from ergmeter.metrics.definitions.peaks import table_peak
from ergmeter.metrics.evidence.gauges import ACCELERATORS
from ergmeter.records import Missing

if TYPE_CHECKING:
    from ergmeter.metrics.definitions.peaks import Peak
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Reading

_NO_BYTES = "no counter of the bytes that device memory moved"


@dataclass(frozen=True, slots=True)
class Roofline:
    """One device, as the mean of those of the run."""

    peak: Peak
    bandwidth_bytes_per_s: float
    flops_per_s: float
    bytes_per_s: float
    note: str

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity, as it was."""
        return self.flops_per_s / self.bytes_per_s

    @property
    def ridge_flops_per_byte(self) -> float:
        """From where on the peak is the roof."""
        return self.peak.flops_per_s / self.bandwidth_bytes_per_s

    @property
    def roof_flops_per_s(self) -> float:
        """What could be reached at the intensity it had."""
        return min(self.peak.flops_per_s, self.flops_per_byte * self.bandwidth_bytes_per_s)

    @property
    def roof_frac(self) -> float:
        """How much of that was reached."""
        return self.flops_per_s / self.roof_flops_per_s

    @property
    def bound_by(self) -> str:
        """Which part of the roof is above it."""
        is_right = self.flops_per_byte >= self.ridge_flops_per_byte
        return "arithmetic" if is_right else "memory"


def roofline(evidence: Evidence) -> Roofline:
    """Where a run stands. Raises NotMeasurable with what is missing."""
    moved = _moved(evidence)
    work = run_results(evidence)[FLOPS_PER_S]
    if isinstance(work, Missing):
        raise NotMeasurable(work.reason)
    need_possible(evidence, MFU)
    peak = _peak(evidence)
    if peak.bandwidth_bytes_per_s is None:
        raise NotMeasurable(
            f"the memory bandwidth of {peak.device} is not known: pass --device with an exact name"
            " of `erg peaks`"
        )
    bytes_per_s = moved.value * peak.bandwidth_bytes_per_s
    if bytes_per_s <= 0:
        raise NotMeasurable("the hardware counters read 0 bytes moved in device memory")
    note = f"bytes by hardware counters; work: {work.note}; roof: {peak.said}"
    return Roofline(peak, peak.bandwidth_bytes_per_s, work.value, bytes_per_s, note)


def _moved(evidence: Evidence) -> Reading:
    if not evidence.devices("gpu"):
        why = evidence.why_no_device("accelerator", *ACCELERATORS)
        raise NotMeasurable(f"{_NO_BYTES}: {why}")
    metric = next(one for one in ACTIVITY if one.key == "activity.dram_frac")
    try:
        return metric.usable(metric.reading(evidence))
    except NotMeasurable as error:
        raise NotMeasurable(f"{_NO_BYTES} ({error})") from None


def _peak(evidence: Evidence) -> Peak:
    names = sorted({device.name for device in evidence.devices("gpu")})
    named = evidence.settings.device or (names[0] if len(names) == 1 else None)
    if named is None:
        raise NotMeasurable(
            f"the devices differ ({', '.join(names)}), and each has its own roof: pass --device"
        )
    if evidence.settings.dtype is None:
        raise NotMeasurable("the data type of the matrix products is not known: pass --dtype")
    return table_peak(named, evidence.settings.dtype, otherwise="pass --device")
