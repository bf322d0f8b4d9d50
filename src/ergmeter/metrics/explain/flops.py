"""The achieved MFU, FLOPs of recomputation and padding, and the count against tensor cores.

Frozen weights are a remark and no block. Under LoRA the backward pass computes no gradients of
frozen weights, so a token needs about 4 FLOPs a weight instead of 6. At the same tokens/s MFU is a
third lower, but no time is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.definitions.compute import (
    ALL_WORK,
    FLOPS_PER_S,
    HFU,
    MFU,
    flops_per_token,
    need_possible,
    run_results,
)
from ergmeter.metrics.definitions.tokens import padding_frac, positions_per_token
from ergmeter.metrics.evidence.samples import (
    begins_ns_of,
    mean_activity,
    or_none,
    readings,
    sampled,
)
from ergmeter.metrics.explain.device import clock_hz, peak_clock_hz
from ergmeter.records import Missing, Reading
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device, Flops

# This convention is two thirds of the FLOPs of training every weight, with causal attention as in
# `exact`. It is counted only for runs with adapters.
_OF_ADAPTERS, _ITS_PART = "automodel-lora", 2 / 3
_EXACT = "exact"
_NO_RECOMPUTATION = "no recomputation"
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
    is_printed: bool = False  # printed by the program

    @property
    def hardware_frac(self) -> float:
        """All known FLOPs as a share of the peak."""
        return self.mfu.value + (self.recomputed_frac or 0.0) + (self.padding_frac or 0.0)


@dataclass(frozen=True)
class FrozenWeights:
    """FLOPs of a token with frozen weights, and if every weight were trained."""

    flops_per_token: float
    trained_flops_per_token: float
    mfu_if_trained_frac: float

    @property
    def ratio(self) -> float:
        """FLOPs with frozen weights over those with all weights trained."""
        return self.flops_per_token / self.trained_flops_per_token


def achieved(evidence: Evidence) -> Achieved:
    """MFU, recomputation and padding. NotMeasurable says what is missing."""
    try:
        mfu = run_results(evidence)[MFU]
    except NotMeasurable as error:
        mfu = Missing(str(error))
    else:
        need_possible(evidence, MFU, HFU)
    if isinstance(mfu, Missing):
        return Achieved(_printed(evidence, mfu.reason), None, None, False, is_printed=True)
    chosen = evidence.flops[0]
    is_assumed = any(assumption.startswith(_NO_RECOMPUTATION) for assumption in chosen.assumptions)
    again = None
    if chosen.hardware_per_step is not None:
        again = mfu.value * (chosen.hardware_per_step / chosen.model_per_step - 1)
    padding, why = _padding(evidence, chosen, mfu.value)
    padded = 1 - 1 / positions_per_token(evidence)
    return Achieved(mfu, again, padding, is_assumed, why, padded)


def peak_text(note: str) -> str:
    """The peak that an MFU is a share of, from its note: the value with its source in brackets."""
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


def frozen_weights(evidence: Evidence) -> FrozenWeights | None:
    """FLOPs of a run with adapters if every weight were trained.

    None if the run has no adapters or one of the counts is absent.
    """
    by_name = {flops.convention: flops for flops in evidence.flops}
    if _OF_ADAPTERS not in by_name or _EXACT not in by_name:
        return None
    results = run_results(evidence)
    mfu, each = results[MFU], results[FLOPS_PER_S]
    if not isinstance(mfu, Reading) or not isinstance(each, Reading):
        return None
    own = flops_per_token(by_name[_EXACT])
    trained = flops_per_token(by_name[_OF_ADAPTERS]) / _ITS_PART
    chosen = flops_per_token(evidence.flops[0])
    return FrozenWeights(own, trained, mfu.value * trained / chosen) if own < trained else None


# The count against the tensor cores. The GPU's own counters and the count are independent
# measurements of nearly the same work, so each checks the other. A count that is far below the
# tensor cores' activity has missed products (an output head inside the loss, another model,
# generation). A count above it claims products that were never computed: the tokens, the peak or
# the number of devices is wrong.
#
# Activity is per cycle and a peak is at one clock, so activity is scaled by the clock that ran. The
# ratio has the uncertainty of both sides; with a poor counter window there is no verdict at all.

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
    counted = _all_work(evidence)
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
    if least <= 0:
        raise NotMeasurable(
            "the counted FLOPs may be anything from 0 % of the peak up, as one step is much longer"
            " than the others: too uncertain to be checked"
        )
    return TensorCoreRatio(
        value * scale / counted.value,
        low * scale / most,
        high * scale / least,
        counted.value,
        value * scale,
    )


def _all_work(evidence: Evidence) -> Reading:
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
    contradiction = or_none(flop_count_contradiction, evidence)
    return ["; ".join(contradiction)] if contradiction else []
