"""Blocks of the time with a kernel: clock, empty SMs, non-matmul kernels, communication.

A ladder of rungs goes down from the time with a kernel to the known FLOPs. A rung below a later one
contradicts it and is left out; the blocks on both sides of it become one.

NVLink and PCIe traffic alone makes no block: it costs no time beside a computation. Only exposed
communication in profiled steps does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ergmeter.metrics.definitions.achievable import OF_PEAK, achievable_of_peak_frac, calibration_of
from ergmeter.metrics.definitions.profile import profiles
from ergmeter.metrics.evidence.samples import or_none
from ergmeter.metrics.explain.time import ACHIEVED, KERNELS, Fact, LossBlock, percent
from ergmeter.records import Basis, weakest
from ergmeter.units import HZ_PER_MHZ, scaled

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.device import DeviceActivity
    from ergmeter.metrics.explain.flops import Achieved

# By the key of the block: the part of a profile, and the title.
_EXPOSED = {
    "communication": ("communication_alone", "communication, not hidden"),
    "copies": ("copy_alone", "copies, not hidden"),
}


def exposed_communication(evidence: Evidence, level: float) -> tuple[LossBlock, ...]:
    """Exposed communication and copies: their share of profiled time with a kernel x `level`."""
    profiled = or_none(profiles, evidence) or []
    at_work_s = sum(float(profile["window_s"]) - float(profile["idle_s"]) for profile in profiled)
    if at_work_s <= 0:
        return ()
    blocks = []
    for key, (part, title) in _EXPOSED.items():
        share = sum(float(profile[f"{part}_s"]) for profile in profiled) / at_work_s
        if share > 0:
            fact = Fact(f"profile.{part}_frac", f"{percent(share)} of profiled time with a kernel")
            why = "as in the profiled steps, of which the others are taken to be like"
            blocks.append(LossBlock(key, title, share * level, "derived", (fact,), why))
    return tuple(blocks)


TOP, CLOCK, SM, TENSOR, CEILING, HARDWARE = "top", "clock", "sm", "tensor", "ceiling", "hardware"

_UNCOUNTED = "parts of tiles, masked attention, products computed again that nobody told of"
# Key, title and reason of the block between two rungs, by the lower and (optional) upper rung.
_BETWEEN = {
    (SM, ""): (
        "empty_sms",
        "multiprocessors without work",
        "kernels that fill few of them, and the ends of kernels",
    ),
    (TENSOR, SM): (
        "not_multiplying",
        "at work, but not multiplying",
        "element-wise kernels, softmax, norms, copies, the optimizer, waits for memory",
    ),
    (TENSOR, ""): (
        "not_multiplying",
        "kernels that do not multiply",
        "element-wise kernels, copies, the optimizer, empty multiprocessors",
    ),
    (CEILING, TENSOR): ("uncounted", "products beyond the count", _UNCOUNTED),
    (HARDWARE, CEILING): (
        "ceiling",
        "matmul ceiling",
        "what the best products lose too, as `erg calibrate` saw them on this device",
    ),
    (HARDWARE, TENSOR): ("uncounted", "tensor pipes beyond the count", _UNCOUNTED),
}
_ONE_BLOCK = (
    KERNELS,
    "kernels, not told apart",
    "other kernels, slow products, small kernels: hardware counters would tell",
)


_HIGHER = 1.02
_UNSEEN = (
    KERNELS,
    "all else, not told apart",
    "idle time, other kernels, slow products: no counter says what the device did",
)


@dataclass(frozen=True)
class Rung:
    """A level of the ladder with its evidence."""

    key: str
    share_frac: float
    basis: Basis
    facts: tuple[Fact, ...] = ()


def kernel_blocks(
    evidence: Evidence, activity: DeviceActivity, got: Achieved | None, level: float
) -> tuple[tuple[LossBlock, ...], LossBlock]:
    """The blocks between `level`, the time with a kernel, and MFU; and the block of MFU."""
    ladder = _ladder(evidence, activity, got, level)
    blocks = tuple(
        _between(upper, lower, activity)
        for upper, lower in pairwise(ladder)
        if upper.share_frac != lower.share_frac
    )
    exposed = exposed_communication(evidence, level * (activity.clock_ratio or 1.0))
    again, reached = _beyond(got, ladder[-1], activity)
    return (*_split_exposed(blocks, exposed), *again), reached


def _ladder(
    evidence: Evidence, activity: DeviceActivity, got: Achieved | None, level: float
) -> list[Rung]:
    ratio = activity.clock_ratio
    scale = 1.0 if ratio is None else ratio
    basis = activity.basis if activity.busy_frac is not None else evidence.steps_basis
    rungs = [Rung(TOP, level, basis)]
    # Without FLOPs or tensor core activity a clock above the peak's has no meaning.
    if ratio is not None and (ratio < 1 or got is not None or activity.tensor_frac is not None):
        rungs.append(
            Rung(CLOCK, level * scale, weakest("derived", activity.basis), _clock_facts(activity))
        )
    for key, share in ((SM, activity.sm_frac), (TENSOR, activity.tensor_frac)):
        if share is not None and share <= level:
            of = "multiprocessors" if key == SM else "cycles"
            fact = activity.fact(f"activity.{key}_frac", share, of)
            rungs.append(Rung(key, share * scale, activity.basis, (fact,)))
    if got is None:
        return _falling(rungs)
    last = Rung(HARDWARE, got.hardware_frac, got.mfu.basis, (got.fact,))
    most = min(rung.share_frac for rung in rungs if rung.key != TENSOR)
    best = or_none(_ceiling, evidence, activity, got.hardware_frac)
    if best is not None and best.share_frac <= most:
        rungs.append(best)
    return _falling([*rungs, last])


def _ceiling(evidence: Evidence, activity: DeviceActivity, hardware_frac: float) -> Rung:
    """The share of the peak that the matmuls need at the calibrated rate of this device."""
    calibrated = achievable_of_peak_frac(evidence)
    clock_hz = _calibration_clock_hz(evidence)
    rate, text = calibrated.value, f"products held {percent(calibrated.value)} of the peak"
    if clock_hz and activity.clock_ratio is not None and activity.peak_clock_hz is not None:
        rate *= activity.peak_clock_hz / clock_hz
        text += f" at {clock_hz / HZ_PER_MHZ:.0f} MHz, {percent(rate)} of what that clock allows"
    basis = weakest("derived", calibrated.basis)
    return Rung(CEILING, hardware_frac / rate, basis, (Fact(OF_PEAK, text),))


def _calibration_clock_hz(evidence: Evidence) -> float | None:
    """The mean clock of the calibrations; None if one of the devices has none."""
    dtype = evidence.settings.dtype or "fp32"
    clocks_hz = [calibration_of(d).matmul[dtype].clock_hz for d in evidence.devices("gpu")]
    known_hz = [clock for clock in clocks_hz if clock is not None]
    return sum(known_hz) / len(known_hz) if known_hz and len(known_hz) == len(clocks_hz) else None


def _falling(rungs: list[Rung]) -> list[Rung]:
    """Rungs without those below a later one. A high clock may lift rungs above the top."""
    falling = [rungs[-1]]
    for rung in reversed(rungs[:-1]):
        if rung.key == TOP or rung.share_frac >= falling[0].share_frac:
            falling.insert(0, rung)
    return falling


def _between(upper: Rung, lower: Rung, activity: DeviceActivity) -> LossBlock:
    lost = upper.share_frac - lower.share_frac
    basis = weakest("derived", upper.basis, lower.basis)
    facts = tuple(dict.fromkeys((*upper.facts, *lower.facts)))
    if lower.key == CLOCK:
        return _clock(lost, basis, activity)
    default = _UNSEEN if activity.busy_frac is None else _ONE_BLOCK
    key, title, why = (
        _BETWEEN.get((lower.key, upper.key)) or _BETWEEN.get((lower.key, "")) or default
    )
    if upper.key == CLOCK:
        facts = lower.facts
    if lower.key == TENSOR:
        facts = (*facts, *_traffic_facts(activity))
    if activity.clock_ratio is None and lower.key == HARDWARE and upper.key != CEILING:
        why += "; and a clock below the peak's, if it was"
    return LossBlock(key, title, lost, basis, facts, why)


def _traffic_facts(activity: DeviceActivity) -> list[Fact]:
    """Memory and link traffic as evidence; it does not show that anything waited for it."""
    facts = []
    if activity.dram_frac is not None:
        facts.append(activity.fact("activity.dram_frac", activity.dram_frac, "bandwidth"))
    return facts + [
        Fact(f"activity.{column}", f"{scaled(rate, 'B/s')} a device")
        for column, rate in activity.link_bytes_per_s.items()
        if rate > 0
    ]


def _clock_facts(activity: DeviceActivity) -> tuple[Fact, ...]:
    if activity.clock_hz is None or activity.peak_clock_hz is None:
        return ()
    text = f"{activity.clock_hz / HZ_PER_MHZ:.0f} MHz, the peak is at"
    facts = [Fact("utilization.clock_hz", f"{text} {activity.peak_clock_hz / HZ_PER_MHZ:.0f}")]
    if activity.clock_high_hz is not None and activity.clock_high_hz > _HIGHER * activity.clock_hz:
        highest = f"{activity.clock_high_hz / HZ_PER_MHZ:.0f} MHz was seen at most"
        facts.append(Fact("utilization.clock_hz", highest))
    facts += [
        Fact("utilization.throttled_frac", f"{how} in {100 * share:.0f} % of readings")
        for how, share in (
            ("at the power limit", activity.capped_frac),
            ("throttled by heat", activity.heat_frac),
            ("slowed down or braked by the hardware", activity.brake_frac),
        )
        if share
    ]
    return tuple(facts)


def _holder(activity: DeviceActivity) -> str:
    """Why the clock was low. Heat and brakes come before the power limit, which is common."""
    heat, brake = activity.heat_frac or 0.0, activity.brake_frac or 0.0
    if heat or brake:
        return "by heat" if heat >= brake else "by a hardware slowdown or power brake"
    return "by the power limit" if activity.capped_frac else "nothing says what held it down"


def _clock(lost: float, basis: Basis, activity: DeviceActivity) -> LossBlock:
    if lost < 0:
        title = "clock above the peak's: gain"
        why = "the peak is given for a clock that the device exceeded"
    else:
        title = "clock below the peak's"
        why = _holder(activity)
    return LossBlock("clock", title, lost, basis, _clock_facts(activity), why)


def _split_exposed(
    blocks: tuple[LossBlock, ...], exposed: tuple[LossBlock, ...]
) -> tuple[LossBlock, ...]:
    """The blocks with exposed communication and copies split off non-matmul kernels."""
    if not exposed:
        return blocks
    is_split = any(block.key == "not_multiplying" for block in blocks)
    whose = ("empty_sms", "not_multiplying") if is_split else (KERNELS,)
    theirs = [block for block in blocks if block.key in whose]
    left = sum(block.share_frac for block in theirs) - sum(block.share_frac for block in exposed)
    if not theirs or left < 0:
        return blocks
    last = theirs[-1]
    facts = tuple(dict.fromkeys(fact for block in theirs for fact in block.facts))
    title = last.title if len(theirs) == 1 else "other kernels"
    rest = LossBlock(last.key, title, left, weakest(*(t.basis for t in theirs)), facts, last.why)
    first = blocks.index(theirs[0])
    others = [block for block in blocks if block not in theirs]
    return (*others[:first], *exposed, rest, *others[first:])


_ENDS = {
    TOP: "time with a kernel",
    CLOCK: "time with a kernel, at its clock",
    SM: "multiprocessors at work",
    TENSOR: "tensor pipes at work",
}


def _beyond(
    got: Achieved | None, last: Rung, activity: DeviceActivity
) -> tuple[tuple[LossBlock, ...], LossBlock]:
    """The blocks of recomputation and padding, and the block of MFU."""
    if got is None:
        title, key = _ENDS[last.key], "utilization.busy_frac"  # other rungs have facts
        if last.key in (TOP, CLOCK) and activity.busy_frac is None:
            title, key = "time inside ordinary steps", "time.in_step_s"
        facts = last.facts or (Fact(key, percent(last.share_frac)),)
        why = "as far as it can be followed without FLOPs"
        return (), LossBlock(ACHIEVED, title, last.share_frac, last.basis, facts, why)
    blocks = []
    if got.recomputed_frac:
        fact = Fact("utilization.hfu_frac", f"{percent(got.hardware_frac)}, padding included")
        why = "activations computed again in the backward pass"
        share = got.recomputed_frac
        blocks.append(LossBlock("recomputed", "recomputation", share, got.mfu.basis, (fact,), why))
    if got.padding_frac:
        fact = Fact("tokens.padding_frac", f"{percent(got.padded_frac)} of positions hold no token")
        why = "rows of a batch that are shorter than the longest"
        blocks.append(
            LossBlock("padding", "padding", got.padding_frac, got.mfu.basis, (fact,), why)
        )
    why = got.mfu.note if got.is_printed else got.mfu.note.partition("; ")[0]
    return tuple(blocks), LossBlock(
        ACHIEVED, "the model's FLOPs (MFU)", got.mfu.value, got.mfu.basis, (got.fact,), why
    )
