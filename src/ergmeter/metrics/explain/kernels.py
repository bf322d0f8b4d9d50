"""The blocks of time in which the device had kernels: clock, empty multiprocessors, other kernels.

The ladder goes down from the time with a kernel to the FLOPs that are known of. A rung that is
below the one after it contradicts it, and is left out: what lay on both of its sides is one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.profile import profiles
from ergmeter.metrics.explain.block import ACHIEVED, KERNELS, Fact, LossBlock, percent
from ergmeter.metrics.explain.device import ceiling
from ergmeter.records import weakest
from ergmeter.units import HZ_PER_MHZ, scaled

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.device import Rungs
    from ergmeter.metrics.explain.flops import Achieved
    from ergmeter.records import Basis

# -- explain beside --------------------------------------------------------------------------------
# What a profiler saw of communication and copies that nothing was computed beside.
#
# The trap: NVLink and PCIe traffic as a cost. Bytes that move beside a computation cost no time, so
# traffic alone makes no block; the time that collectives stood alone, in profiled steps, does.


_PARTS = {
    "communication": ("communication_alone_s", "communication, not hidden"),
    "copies": ("copy_alone_s", "copies, not hidden"),
}
_KEYS = {
    "communication": "profile.communication_alone_frac",
    "copies": "profile.copy_alone_frac",
}


@dataclass(frozen=True)
class Beside:
    """The blocks, and their sum."""

    blocks: tuple[LossBlock, ...]

    @property
    def share_frac(self) -> float:
        """All of them."""
        return sum(one.share_frac for one in self.blocks)


def beside(evidence: Evidence, level: float) -> Beside | None:
    """Of the profiled steps' time with a kernel, the share that communicated alone x `level`."""
    try:
        found = profiles(evidence)
    except NotMeasurable:
        return None
    at_work_s = sum(float(one["window_s"]) - float(one["idle_s"]) for one in found)
    if at_work_s <= 0:
        return None
    blocks = []
    for key, (column, title) in _PARTS.items():
        share = sum(float(one[column]) for one in found) / at_work_s
        if share > 0:
            fact = Fact(_KEYS[key], f"{percent(share)} of profiled time with a kernel")
            why = "as in the profiled steps, of which the others are taken to be like"
            blocks.append(LossBlock(key, title, share * level, "derived", (fact,), why))
    return Beside(tuple(blocks)) if blocks else None


# -- explain kernels -------------------------------------------------------------------------------


TOP, CLOCK, SM, TENSOR, CEILING, HARDWARE = "top", "clock", "sm", "tensor", "ceiling", "hardware"

# By the rung below and, where it matters, the one above: what lies between them.
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
    (CEILING, TENSOR): (
        "uncounted",
        "products beyond the count",
        "parts of tiles, masked attention, products computed again that nobody told of",
    ),
    (HARDWARE, CEILING): (
        "ceiling",
        "matmul ceiling",
        "what the best products lose too, as `erg calibrate` saw them on this device",
    ),
    (HARDWARE, TENSOR): (
        "uncounted",
        "tensor pipes beyond the count",
        "parts of tiles, masked attention, products computed again that nobody told of",
    ),
}
_ONE = (
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
    """A level of the ladder, and what says so."""

    key: str
    share_frac: float
    basis: Basis
    facts: tuple[Fact, ...] = ()


def kernel_blocks(
    evidence: Evidence, seen: Rungs, got: Achieved | None, level: float
) -> tuple[tuple[LossBlock, ...], LossBlock]:
    """What lies between `level`, the time with a kernel, and what was achieved; and that."""
    ladder = _ladder(evidence, seen, got, level)
    found = [_between(upper, lower, seen) for upper, lower in _pairs(ladder)]
    split = _beside(tuple(found), beside(evidence, level * (seen.clock_ratio or 1.0)))
    again, reached = _beyond(got, ladder[-1], seen)
    return (*split, *again), reached


def _pairs(ladder: list[Rung]) -> list[tuple[Rung, Rung]]:
    return [
        (upper, lower) for upper, lower in pairwise(ladder) if upper.share_frac != lower.share_frac
    ]


def _ladder(evidence: Evidence, seen: Rungs, got: Achieved | None, level: float) -> list[Rung]:
    ratio = seen.clock_ratio
    scale = 1.0 if ratio is None else ratio
    basis = seen.basis if seen.busy_frac is not None else evidence.steps_basis
    rungs = [Rung(TOP, level, basis)]
    # Without anything to hold against the peak a clock above its own says nothing.
    if ratio is not None and (ratio < 1 or got is not None or seen.tensor_frac is not None):
        rungs.append(Rung(CLOCK, level * scale, weakest("derived", seen.basis), _clock_facts(seen)))
    for key, share in ((SM, seen.sm_frac), (TENSOR, seen.tensor_frac)):
        if share is not None and share <= level:
            of = "multiprocessors" if key == SM else "cycles"
            fact = seen.said(f"activity.{key}_frac", share, of)
            rungs.append(Rung(key, share * scale, seen.basis, (fact,)))
    if got is None:
        return _falling(rungs)
    last = Rung(HARDWARE, got.hardware_frac, got.mfu.basis, _counted(got))
    most = min(one.share_frac for one in rungs if one.key != TENSOR)
    best = ceiling(evidence, seen, got.hardware_frac)
    if best is not None and best.needed_frac <= most:
        rungs.append(Rung(CEILING, best.needed_frac, best.basis, (best.fact,)))
    return _falling([*rungs, last])


def _falling(rungs: list[Rung]) -> list[Rung]:
    """Without rungs that are below a later one. The clock may lift all of them above the top."""
    kept = [rungs[-1]]
    for one in reversed(rungs[:-1]):
        if one.key == TOP or one.share_frac >= kept[0].share_frac:
            kept.insert(0, one)
    return kept


def _between(upper: Rung, lower: Rung, seen: Rungs) -> LossBlock:
    lost = upper.share_frac - lower.share_frac
    basis = weakest("derived", upper.basis, lower.basis)
    facts = tuple(dict.fromkeys((*upper.facts, *lower.facts)))
    if lower.key == CLOCK:
        return _clock(lost, basis, seen)
    one = _UNSEEN if seen.busy_frac is None else _ONE
    key, title, why = _BETWEEN.get((lower.key, upper.key)) or _BETWEEN.get((lower.key, "")) or one
    if upper.key == CLOCK:
        facts = lower.facts
    if lower.key == TENSOR and seen.dram_frac is not None:
        facts = (*facts, seen.said("activity.dram_frac", seen.dram_frac, "bandwidth"))
    if lower.key == TENSOR:
        facts = (*facts, *_link_facts(seen))
    if seen.clock_ratio is None and lower.key == HARDWARE and upper.key != CEILING:
        why += "; and a clock below the peak's, if it was"
    return LossBlock(key, title, lost, basis, facts, why)


def _link_facts(seen: Rungs) -> tuple[Fact, ...]:
    """Traffic, which says that something moved and not that anybody waited for it."""
    return tuple(
        Fact(f"activity.{column}", f"{scaled(rate, 'B/s')} a device")
        for column, rate in seen.link_bytes_per_s.items()
        if rate > 0
    )


def _clock_facts(seen: Rungs) -> tuple[Fact, ...]:
    if seen.clock_hz is None or seen.peak_clock_hz is None:
        return ()
    said = f"{seen.clock_hz / HZ_PER_MHZ:.0f} MHz, the peak is at"
    facts = [Fact("utilization.clock_hz", f"{said} {seen.peak_clock_hz / HZ_PER_MHZ:.0f}")]
    if seen.clock_high_hz is not None and seen.clock_high_hz > _HIGHER * seen.clock_hz:
        highest = f"{seen.clock_high_hz / HZ_PER_MHZ:.0f} MHz was seen at most"
        facts.append(Fact("utilization.clock_hz", highest))
    if seen.capped_frac:
        said = f"at the power limit in {100 * seen.capped_frac:.0f} % of readings"
        facts.append(Fact("utilization.throttled_frac", said))
    if seen.heat_frac:
        said = f"throttled by heat in {100 * seen.heat_frac:.0f} % of readings"
        facts.append(Fact("utilization.throttled_frac", said))
    if seen.brake_frac:
        said = f"slowed down or braked by the hardware in {100 * seen.brake_frac:.0f} % of readings"
        facts.append(Fact("utilization.throttled_frac", said))
    return tuple(facts)


def _holder(seen: Rungs) -> str:
    """What held the clock down. Heat and brakes before the limit, at which any GPU at work is."""
    heat, brake = seen.heat_frac or 0.0, seen.brake_frac or 0.0
    if heat or brake:
        return "by heat" if heat >= brake else "by a hardware slowdown or power brake"
    return "by the power limit" if seen.capped_frac else "nothing says what held it down"


def _clock(lost: float, basis: Basis, seen: Rungs) -> LossBlock:
    if lost < 0:
        title = "clock above the peak's: gain"
        why = "the peak is given for a clock that the device exceeded"
    else:
        title = "clock below the peak's"
        why = _holder(seen)
    return LossBlock("clock", title, lost, basis, _clock_facts(seen), why)


def _beside(found: tuple[LossBlock, ...], known: Beside | None) -> tuple[LossBlock, ...]:
    """With communication and copies in blocks of their own, out of what does not multiply."""
    if known is None:
        return found
    whose = ("empty_sms", "not_multiplying") if _has(found, "not_multiplying") else (KERNELS,)
    theirs = [one for one in found if one.key in whose]
    left = sum(one.share_frac for one in theirs) - known.share_frac
    if not theirs or left < 0:
        return found
    last = theirs[-1]
    facts = tuple(dict.fromkeys(fact for one in theirs for fact in one.facts))
    title = last.title if len(theirs) == 1 else "other kernels"
    rest = LossBlock(last.key, title, left, weakest(*(t.basis for t in theirs)), facts, last.why)
    place = found.index(theirs[0])
    others = [one for one in found if one not in theirs]
    return (*others[:place], *known.blocks, rest, *others[place:])


def _has(found: tuple[LossBlock, ...], key: str) -> bool:
    return any(one.key == key for one in found)


def _counted(got: Achieved) -> tuple[Fact, ...]:
    return (Fact("utilization.mfu_frac", percent(got.mfu.value)),)


_ENDS = {
    TOP: ("time with a kernel", "utilization.busy_frac"),
    CLOCK: ("time with a kernel, at its clock", "utilization.busy_frac"),
    SM: ("multiprocessors at work", "activity.sm_frac"),
    TENSOR: ("tensor pipes at work", "activity.tensor_frac"),
}


def _beyond(
    got: Achieved | None, last: Rung, seen: Rungs
) -> tuple[tuple[LossBlock, ...], LossBlock]:
    """What was computed twice or on padding, and what was achieved."""
    if got is None:
        title, key = _ENDS[last.key]
        if last.key in (TOP, CLOCK) and seen.busy_frac is None:
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
        ACHIEVED, "the model's FLOPs (MFU)", got.mfu.value, got.mfu.basis, _counted(got), why
    )
