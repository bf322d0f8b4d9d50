"""Compares the counted FLOPs with what the tensor cores did, by the GPU's own counters.

The two are independent measurements of nearly the same work, so each checks the other. A count that
is far below the tensor cores' activity has missed products (an output head inside the loss, another
model, generation). A count above it claims products that were never computed: the tokens, the peak
or the number of devices is wrong.

Activity is per cycle and a peak is at one clock, so activity is scaled by the clock that ran. The
ratio has the uncertainty of both sides; with a poor counter window there is no verdict at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.compute import ALL_WORK, run_results
from ergmeter.metrics.evidence.samples import begins_ns_of, mean_activity, readings, sampled
from ergmeter.metrics.explain.device import clock_hz, peak_clock_hz
from ergmeter.records import Missing
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device, Reading

# Products may run outside the tensor cores below this activity, and then nothing can be compared.
ON_TENSOR_CORES_FRAC = 0.05
SHORT_S = 5.0
LEAST_COVERED_FRAC = 0.8
# Tensor-core work over counted FLOPs. Tiles that are not full, masked pairs that a kernel computes
# all the same and scores that fused attention recomputes explain up to about 1.2: an H200 read 1.02
# for a full fine-tuning whose count is exact, 1.68 for one whose output head was not counted.
UNCOUNTED = 1.25
# Even at the edge of its interval the ratio must be beyond this, in either direction.
EXPLAINED = 1.1


@dataclass(frozen=True, slots=True)
class TensorCoreRatio:
    """Tensor-core work over counted FLOPs, with the interval that both measurements allow."""

    value: float
    low: float
    high: float
    counted_frac: float  # of the peak
    active_frac: float  # of the peak, at the clock that ran

    @property
    def is_uncounted_work(self) -> bool:
        """True if the tensor cores did more than the count, masks and kernels can explain."""
        return self.value >= UNCOUNTED and self.low > EXPLAINED

    @property
    def is_overcounted(self) -> bool:
        """True if the count is more than the tensor cores can have computed."""
        return self.value < 1 / EXPLAINED and self.high < 1 / EXPLAINED


def tensor_core_ratio(evidence: Evidence) -> TensorCoreRatio:
    """Tensor-core work of the window over the FLOPs counted for it.

    NotMeasurable where one of the two is absent, or the counters cover too little of the window.
    """
    counted = _counted(evidence)
    if evidence.span.duration_s < SHORT_S:
        raise NotMeasurable(
            f"the window is {duration(evidence.span.duration_s)}: counters over less than"
            f" {SHORT_S:g} s are too coarse to check the FLOP count"
        )
    devices = sampled(evidence, "gpu")
    for device in devices:
        _need_coverage(evidence, device)
    means = [mean_activity(evidence, "tensor_frac", device, most=1.0) for device in devices]
    value, low, high = (sum(parts) / len(means) for parts in zip(*means, strict=True))
    if value < ON_TENSOR_CORES_FRAC:
        raise NotMeasurable(
            f"tensor cores were active {100 * value:.1f} % of the time, too little to check the"
            " FLOP count: matmuls may run outside them"
        )
    absent: dict[str, str] = {}
    ran_hz, _ = clock_hz(evidence, devices, None, absent)
    peak_hz = peak_clock_hz(evidence, devices, absent)
    if ran_hz is None or peak_hz is None:
        raise NotMeasurable(absent.get("clock_hz") or absent["peak_clock_hz"])
    scale = ran_hz / peak_hz
    least = counted.value if counted.low is None else counted.low
    most = counted.value if counted.high is None else counted.high
    return TensorCoreRatio(
        value * scale / counted.value,
        low * scale / most,
        high * scale / least,
        counted.value,
        value * scale,
    )


def _counted(evidence: Evidence) -> Reading:
    """All counted FLOPs as a share of the peak. NotMeasurable if absent or impossible."""
    reading = run_results(evidence)[ALL_WORK]
    if isinstance(reading, Missing):
        raise NotMeasurable(reading.reason)
    if reading.impossible:
        raise NotMeasurable(f"the counted FLOPs are impossible: {reading.impossible}")
    return reading


def _need_coverage(evidence: Evidence, device: Device) -> None:
    """NotMeasurable unless the counters cover most of the window."""
    series = readings(evidence, "tensor_frac", device)
    window = evidence.span
    begins_ns, ends_ns = evidence.window.clipped(
        begins_ns_of(evidence, device, series.t_ns), series.t_ns
    )
    covered_s = float((ends_ns - begins_ns).sum()) / NS_PER_S
    if covered_s < LEAST_COVERED_FRAC * window.duration_s:
        raise NotMeasurable(
            f"the counters of {device.name} cover {duration(covered_s)} of a window of"
            f" {duration(window.duration_s)}"
        )


def flop_count_contradiction(evidence: Evidence) -> tuple[str, str] | None:
    """How the tensor cores contradict the counted FLOPs, and the effect on MFU; None if they agree.

    NotMeasurable where the two can't be compared.
    """
    ratio = tensor_core_ratio(evidence)
    interval = f"({ratio.low:.2f} to {ratio.high:.2f})"
    shares = (
        f"{100 * ratio.active_frac:.1f} % of the peak by hardware counters,"
        f" {100 * ratio.counted_frac:.1f} % counted"
    )
    effect = ""
    if ratio.is_uncounted_work:
        effect = _what_is_uncounted(evidence)
    elif ratio.is_overcounted:
        effect = "MFU is too high: check the model, its tokens, the peak and the number of devices"
    observation = (
        f"the tensor cores did {ratio.value:.2f} times {interval} the counted FLOPs: {shares}"
    )
    return (observation, effect) if effect else None


def _what_is_uncounted(evidence: Evidence) -> str:
    """MFU is of the trained model alone: other models and generation are no part of it."""
    others = evidence.flops[0].other_work
    names = [part.name for part in others or () if part.flops is None]
    if names:
        return f"work beside the trained model was not counted: {', '.join(names)}"
    if others is None:
        return (
            "MFU may be too low: products were not counted, such as a head inside the loss, or"
            " another model or generation ran beside the trained model"
        )
    return "MFU is too low: products were not counted, such as a head inside the loss"


def flop_count_contradictions(evidence: Evidence) -> list[str]:
    """The contradiction as a sentence; none where the two agree or can't be compared."""
    try:
        contradiction = flop_count_contradiction(evidence)
    except NotMeasurable:
        return []
    return ["; ".join(contradiction)] if contradiction else []
