"""The achieved MFU, FLOPs of recomputation and padding, and the roofline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.definitions.compute import (
    FLOPS_PER_S,
    HFU,
    MFU,
    NO_RECOMPUTATION,
    assumed,
    flops_per_token,
    need_possible,
    of_run,
)
from ergmeter.metrics.definitions.peaks import Peak, table_peak
from ergmeter.metrics.definitions.throughput import need_speed
from ergmeter.metrics.definitions.tokens import padding_frac, positions_per_token
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import ACCELERATORS
from ergmeter.metrics.explain.time import Fact
from ergmeter.records import Flops, Missing, Reading, or_missing, or_none
from ergmeter.units import percent

NO_PADDING = "padding is not counted apart from tokens: pass tokens_real= to meter.step"


@dataclass(frozen=True)
class Achieved:
    """MFU, recomputation and padding as shares of the peak. None: unknown."""

    mfu: Reading
    recomputed_frac: float | None
    padding_frac: float | None
    is_recomputation_assumed: bool
    why_no_padding: str = ""
    padded_frac: float = 0.0  # of the positions that are computed
    is_printed: bool = False  # the MFU is the one that the program printed

    @property
    def fact(self) -> Fact:
        """MFU as evidence."""
        return Fact(MFU, percent(self.mfu.value))

    @property
    def hardware_frac(self) -> float:
        """All known FLOPs as a share of the peak."""
        return self.mfu.value + (self.recomputed_frac or 0.0) + (self.padding_frac or 0.0)


def achieved(evidence: Evidence) -> Achieved:
    """Return MFU, recomputation and padding. NotMeasurable if there is no MFU."""
    need_speed(evidence)  # an MFU from a speed given by hand is not of the window
    mfu = or_missing(of_run, evidence, MFU)
    if isinstance(mfu, Missing):
        return Achieved(_printed(evidence, mfu.reason), None, None, False, is_printed=True)
    need_possible(evidence, MFU, HFU)
    chosen = evidence.flops[0]
    is_assumed = bool(assumed(chosen, NO_RECOMPUTATION))
    again = None
    if chosen.hardware_per_step is not None:
        again = mfu.value * (chosen.hardware_per_step / chosen.model_per_step - 1)
    padding, why = _padding(evidence, chosen, mfu.value)
    padded = 1 - 1 / positions_per_token(evidence)
    return Achieved(mfu, again, padding, is_assumed, why, padded)


def peak_text(note: str) -> str:
    """Extract the peak from the note of an MFU: the value with its source in brackets."""
    _, has, rest = note.partition("; of ")
    depth = 0
    for index, letter in enumerate(rest if has else ""):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if (letter == ")" and not depth) or (letter == ";" and not depth):
            return rest[: index + (letter == ")")]
    return rest if has else ""


def _printed(evidence: Evidence, why: str) -> Reading:
    """The MFU that the program printed, mean over the lines of the window."""
    span = evidence.span
    values = [
        reported.value
        for reported in evidence.run.reported()
        if (reported.name, reported.unit) == ("mfu", "frac")
        and span.contains(np.array([reported.t_ns]))[0]
    ]
    if not values or not sum(values) > 0:
        raise NotMeasurable(why)
    note = f"as printed, mean of {len(values)} lines; of the peak that the program took"
    mean = Reading(sum(values) / len(values), "frac", "reported", min(values), max(values), note)
    metric = catalogue()[MFU]
    return metric.usable(metric.checked(mean))


def _padding(evidence: Evidence, chosen: Flops, mfu_frac: float) -> tuple[float | None, str]:
    beside = positions_per_token(evidence) - 1
    if not beside:
        is_known = or_none(padding_frac, evidence) is not None
        return (0.0, "") if is_known else (None, NO_PADDING)
    if chosen.hardware_per_padding is None:
        return None, "the FLOP count has no cost of a padding position (hardware_per_padding)"
    return mfu_frac * beside * chosen.hardware_per_padding / flops_per_token(chosen), ""


# The roofline. A device reaches at most the lower of its peak and arithmetic intensity (FLOP/B)
# times bandwidth (Williams, Waterman, Patterson 2009). Bytes are measured by hardware counters
# (dram_frac of the peak bandwidth), not estimated. Without that counter, the FLOPs of a step or a
# peak there is no roofline. FLOPs are the model's, so recomputation makes a run appear too low and
# too far left.

_NO_BYTES = "no hardware counter of device memory traffic"


@dataclass(frozen=True, slots=True)
class Roofline:
    """A run in the roofline model: the mean device's FLOP/s and bytes/s, and both limits."""

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
        """The lowest intensity at which the peak, not the bandwidth, is the limit."""
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
    """Return the roofline of a run. NotMeasurable names what is missing."""
    moved = _moved(evidence)
    work = of_run(evidence, FLOPS_PER_S)
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
    metric = catalogue()["activity.dram_frac"]
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
