"""The roofline of a run: is it bound by arithmetic or by memory bandwidth?

A device reaches at most the lower of its peak and arithmetic intensity (FLOP/B) times bandwidth
(Williams, Waterman, Patterson 2009). Bytes are measured by hardware counters (dram_frac of the peak
bandwidth), not estimated. Without that counter, the FLOPs of a step or a peak there is no roofline.
FLOPs are the model's, so recomputation makes a run appear too low and too far left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.compute import FLOPS_PER_S, MFU, need_possible, run_results
from ergmeter.metrics.definitions.peaks import Peak, table_peak
from ergmeter.metrics.definitions.utilization import ACTIVITY_METRICS as ACTIVITY
from ergmeter.metrics.evidence.samples import ACCELERATORS
from ergmeter.records import Missing, Reading

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence

_NO_BYTES = "no counter of the bytes that device memory moved"


@dataclass(frozen=True, slots=True)
class Roofline:
    """The mean device of a run under its roofline."""

    peak: Peak
    bandwidth_bytes_per_s: float
    flops_per_s: float
    bytes_per_s: float
    note: str

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity of the run."""
        return self.flops_per_s / self.bytes_per_s

    @property
    def ridge_flops_per_byte(self) -> float:
        """The intensity from which on the peak is the limit."""
        return self.peak.flops_per_s / self.bandwidth_bytes_per_s

    @property
    def roof_flops_per_s(self) -> float:
        """The attainable FLOP/s at the run's intensity."""
        return min(self.peak.flops_per_s, self.flops_per_byte * self.bandwidth_bytes_per_s)

    @property
    def roof_frac(self) -> float:
        """Achieved over attainable FLOP/s."""
        return self.flops_per_s / self.roof_flops_per_s

    @property
    def bound_by(self) -> str:
        """The limit at the run's intensity: arithmetic or memory."""
        is_right = self.flops_per_byte >= self.ridge_flops_per_byte
        return "arithmetic" if is_right else "memory"


def roofline(evidence: Evidence) -> Roofline:
    """The roofline of a run. NotMeasurable says what is missing."""
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
    note = f"bytes by hardware counters; work: {work.note}; roof: {peak.text}"
    return Roofline(peak, peak.bandwidth_bytes_per_s, work.value, bytes_per_s, note)


def _moved(evidence: Evidence) -> Reading:
    if not evidence.devices("gpu"):
        why = evidence.why_no_device("accelerator", *ACCELERATORS)
        raise NotMeasurable(f"{_NO_BYTES}: {why}")
    metric = next(candidate for candidate in ACTIVITY if candidate.key == "activity.dram_frac")
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
