"""Losses on the device: clock, SMs and tensor cores active, communication, matmul ceiling.

A datasheet's peak is at one clock (1830 MHz on an H200, whose clock goes up to 1980), and tensor
core activity is per cycle. If the clock of the peak is unknown there is no block "clock"; its
share stays in the other blocks.

The matmul ceiling is the best rate in the calibration of the run's header. It is scaled to the
run's clock if both are known: a calibration runs at the power limit, with a lower clock than most
runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.table import candidates
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.definitions.achievable import OF_PEAK, achievable_of_peak_frac, calibration_of
from ergmeter.metrics.definitions.profile import profiles
from ergmeter.metrics.definitions.utilization import process_cores
from ergmeter.metrics.evidence.samples import (
    begins_ns_of,
    inside,
    mean,
    mean_activity,
    readings,
    sampled,
    throttled_share,
)
from ergmeter.metrics.explain.time import ACHIEVED, KERNELS, Fact, LossBlock, TimeSplit
from ergmeter.metrics.phases import Spans, covered_until_s
from ergmeter.records import (
    THROTTLE_BRAKE,
    THROTTLE_HEAT,
    THROTTLE_POWER_CAP,
    Reading,
    or_none,
    or_noted,
    weakest,
)
from ergmeter.units import HZ_PER_MHZ, NS_PER_S, percent, scaled

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.flops import Achieved
    from ergmeter.records import Basis, Device, FloatArray

# SMs x dense 16-bit FLOPs of each per cycle. Sources, all checked 2026-11-16:
# * NVIDIA's developer forum, citing the white papers of A100 and H100
#   (forums.developer.nvidia.com/t/244727, 2023-03-03): 256 FMA a cycle in each of the 4 tensor
#   cores of an A100's multiprocessor, 2048 FLOP; 108 of them reach 312 TFLOP/s at 1410 MHz, the
#   card's boost clock; twice that a cycle on Hopper; an H100 PCIe has 114, and its 756 TFLOP/s are
#   at 1620 MHz, the boost clock for tensor cores (H100 white paper, table 3), not at its 1755 MHz;
# * of the H100 SXM 132 and 1830 MHz, 1980 for other work (glennklockwood.com, processors/h100 and
#   peak-FLOPS, citing the H100 white paper): 989.4 TFLOP/s;
# * an H200 SXM is the same chip with other memory (the same page), with the same peaks in its
#   datasheet; no document of the maker's was found that states its clock.
# Other cards are left out. Of Blackwell (B200, GB200) tables of others state a tensor clock of 1860
# and 2060 MHz, and no document of the maker's was found that does; of Ada, GeForce, the NVL cards
# and the GH200 none was found with both FLOPs a cycle and the clock of the peak.
_FLOPS_PER_CYCLE = {
    "a100-sxm-40gb": 108 * 2048,
    "a100-sxm-80gb": 108 * 2048,
    "a100-pcie-40gb": 108 * 2048,
    "a100-pcie-80gb": 108 * 2048,
    "h100-sxm": 132 * 4096,
    "h100-pcie": 114 * 4096,
    "h200-sxm": 132 * 4096,
}
_NOT_ON_TENSOR_CORES = ("fp32", "fp64")
_LINKS = ("nvlink_sent_bytes_per_s", "pcie_received_bytes_per_s")
_BY_DRIVER = "utilization.busy_frac"
_LONG_S = 5.0  # the driver's utilisation lags by up to a second
_WIDEST_FRAC = 0.2  # widest usable interval of an activity


@dataclass(frozen=True)
class DeviceActivity:
    """Activity as shares of the window, mean over devices; None if not counted (see `absent`)."""

    busy_frac: float | None = None
    busy_key: str = ""
    sm_frac: float | None = None
    tensor_frac: float | None = None
    dram_frac: float | None = None
    clock_hz: float | None = None
    clock_high_hz: float | None = None  # the highest reading
    peak_clock_hz: float | None = None
    capped_frac: float | None = None  # of the readings
    heat_frac: float | None = None
    brake_frac: float | None = None
    cores: float | None = None  # CPU cores busy
    link_bytes_per_s: dict[str, float] = field(default_factory=dict)  # by column, of each device
    basis: Basis = "measured"
    absent: dict[str, str] = field(default_factory=dict)

    def fact(self, key: str, share_frac: float, of: str) -> Fact:
        """Evidence from a share, such as "63 % of SMs"; "in training" if other phases are out."""
        besides = "" if self.basis == "measured" else ", in training"
        return Fact(key, f"{percent(share_frac)} of {of}{besides}")

    @property
    def clock_ratio(self) -> float | None:
        """The mean clock / the clock at which the datasheet's peak is reached."""
        if self.clock_hz is None or self.peak_clock_hz is None:
            return None
        return self.clock_hz / self.peak_clock_hz


def device_activity(evidence: Evidence, split: TimeSplit | None) -> DeviceActivity:
    """Activity of the devices in the window, without evaluation and checkpoints."""
    try:
        devices = sampled(evidence, "gpu")
    except NotMeasurable as error:
        return DeviceActivity(absent={"device": str(error)})
    aside = {phase: split.spans[phase] for phase in ("eval", "checkpoint")} if split else {}
    if not any(len(starts) for starts, _ in aside.values()):
        aside = {}
    absent: dict[str, str] = {}

    def over(column: str) -> float | None:
        return or_noted(absent, column, _training_share, evidence, column, devices, aside)

    busy, key = over("graphics_frac"), "activity.graphics_frac"
    if busy is None:
        key = _BY_DRIVER
        busy = or_noted(absent, "busy_frac", _by_driver, evidence, devices, is_whole=not aside)
    clock, highest = or_noted(absent, "clock_hz", clock_hz, evidence, devices, split) or (None,) * 2
    capped, heat, brake = (
        or_noted(absent, "throttled", _throttled, evidence, devices, mask)
        for mask in (THROTTLE_POWER_CAP, THROTTLE_HEAT, THROTTLE_BRAKE)
    )
    cores = or_none(process_cores, evidence)
    return DeviceActivity(
        busy,
        key,
        over("sm_frac"),
        over("tensor_frac"),
        over("dram_frac"),
        clock,
        highest,
        or_noted(absent, "peak_clock_hz", peak_clock_hz, evidence, devices),
        capped,
        heat,
        brake,
        None if cores is None else cores.value,
        dict(_links(evidence, devices)),
        "derived" if aside else "measured",
        absent,
    )


def _training_share(
    evidence: Evidence, column: str, devices: list[Device], aside: dict[str, Spans]
) -> float:
    """Activity of training as a share of the window, mean over devices."""
    shares = [_share(evidence, column, device, aside) for device in devices]
    return _possible(f"activity.{column}", sum(shares) / len(shares))


def _share(evidence: Evidence, column: str, device: Device, aside: dict[str, Spans]) -> float:
    """Activity of training as a share of the window.

    A reading is a mean over seconds that may include part of a checkpoint or evaluation. No kernel
    runs during a checkpoint, so the activity belongs to the rest; evaluation gets its share of it.
    """
    activity, low, high = mean_activity(evidence, column, device, most=1.0)
    if high - low > _WIDEST_FRAC:
        raise NotMeasurable(
            "the hardware counters were read too seldom for so short a window: activity may be"
            f" {percent(low)} to {percent(high)}; let the run last longer"
        )
    if not aside:
        return activity
    window, series = evidence.span, readings(evidence, column, device)
    begins_ns, ends_ns = begins_ns_of(evidence, device, series.t_ns), series.t_ns

    def without(spans: list[Spans]) -> FloatArray:
        held_s = covered_until_s(spans, ends_ns) - covered_until_s(spans, begins_ns)
        return np.asarray(np.maximum(0.0, lengths_s - held_s), dtype=np.float64)

    lengths_s = (window.elapsed_ns(ends_ns) - window.elapsed_ns(begins_ns)) / NS_PER_S
    own_s, kernels_s = without([*aside.values()]), without([aside["checkpoint"]])
    own_frac = own_s / np.where(kernels_s > 0, kernels_s, 1.0)
    done_s = np.minimum(series.values * lengths_s * own_frac, own_s)
    return float(done_s.sum() / lengths_s.sum())


def _possible(key: str, share: float) -> float:
    """The share. NotMeasurable if it is above the metric's bound."""
    metric = catalogue()[key]
    return metric.usable(metric.checked(Reading(share, "frac", "measured"))).value


def _by_driver(evidence: Evidence, devices: list[Device], *, is_whole: bool) -> float:
    """NVML's utilisation, for devices without counters. NotMeasurable in a short window."""
    share = sum(mean(evidence, "busy_frac", device) for device in devices) / len(devices)
    if evidence.span.duration_s < _LONG_S:
        raise NotMeasurable(
            "the driver's utilisation lags by up to a second, too much for a window below"
            f" {_LONG_S:g} s"
        )
    if not is_whole:
        raise NotMeasurable(
            "the driver's utilisation does not separate training from evaluation and checkpoints"
            " in the window"
        )
    return _possible(_BY_DRIVER, share)


def clock_hz(
    evidence: Evidence, devices: list[Device], split: TimeSplit | None
) -> tuple[float, float]:
    """Return the mean clock within steps, mean over devices, and the highest reading of all."""
    means, highest = [], 0.0
    for device in devices:
        series = readings(evidence, "clock_hz", device)
        in_window = inside(evidence, series.t_ns)
        values, t_ns = series.values[in_window], series.t_ns[in_window]
        highest = max(highest, float(series.values.max()))
        if split is not None and not evidence.from_output:
            lane = evidence.counted.longest
            row = np.searchsorted(lane.columns["start_ns"], t_ns, side="right") - 1
            working = (row >= 0) & (t_ns <= lane.columns["end_ns"][np.maximum(row, 0)])
            values = values[working] if working.any() else values
        means.append(float(values.mean()))
    return sum(means) / len(means), highest


def _throttled(evidence: Evidence, devices: list[Device], mask: int) -> float:
    """Share of readings throttled for one of the reasons in `mask`, mean over devices."""
    return sum(throttled_share(evidence, device, mask) for device in devices) / len(devices)


def _links(evidence: Evidence, devices: list[Device]) -> Iterator[tuple[str, float]]:
    """NVLink and PCIe traffic by column, mean over devices, if counters have it."""
    for column in _LINKS:
        with suppress(NotMeasurable):
            each = [mean_activity(evidence, column, device, most=math.inf)[0] for device in devices]
            yield column, sum(each) / len(each)


def peak_clock_hz(evidence: Evidence, devices: list[Device]) -> float:
    """The clock at which the datasheet's peak is reached."""
    if evidence.settings.peak_flops_per_s is not None:
        raise NotMeasurable("the peak was declared without its clock")
    dtype = evidence.settings.dtype
    if dtype in _NOT_ON_TENSOR_CORES:
        raise NotMeasurable(f"the peak of {dtype} is at another clock than the 16-bit peak")
    names = {evidence.settings.device or device.name for device in devices}
    try:
        (spec,) = {spec.key: spec for name in names for spec in candidates(name)}.values()
    except (NotMeasurable, ValueError):
        raise NotMeasurable("the clock of the datasheet's peak is unknown") from None
    per_cycle, peak = _FLOPS_PER_CYCLE.get(spec.key), spec.peak_flops_per_s.get("bf16")
    if per_cycle is None or peak is None:
        raise NotMeasurable(f"no source for the clock of the peak of {spec.name}")
    return peak / per_cycle


# Blocks of the time with a kernel: clock, empty SMs, non-matmul kernels, communication.
#
# A ladder of rungs goes down from the time with a kernel to the known FLOPs; a block is the gap
# between two rungs. A rung below a later one contradicts it and is left out, which merges the
# blocks on both sides.
#
# NVLink and PCIe traffic alone makes no block: hidden behind computation it costs no time. Only
# exposed communication in profiled steps makes one.

# For each block: its part of the profile, and its title.
_EXPOSED = {
    "communication": ("communication_alone", "communication, not hidden"),
    "copies": ("copy_alone", "copies, not hidden"),
}


def exposed_communication(evidence: Evidence, level: float) -> Iterator[LossBlock]:
    """Exposed communication and copies: their share of profiled time with a kernel x `level`."""
    profiled = or_none(profiles, evidence.run) or []
    at_work_s = sum(float(profile["window_s"]) - float(profile["idle_s"]) for profile in profiled)
    if at_work_s <= 0:
        return
    for key, (part, title) in _EXPOSED.items():
        share = sum(float(profile[f"{part}_s"]) for profile in profiled) / at_work_s
        if share > 0:
            fact = Fact(f"profile.{part}_frac", f"{percent(share)} of profiled time with a kernel")
            why = "measured in the profiled steps; other steps are assumed to be similar"
            yield LossBlock(key, title, share * level, "derived", (fact,), why)


TOP, CLOCK, SM, TENSOR, CEILING, HARDWARE = "top", "clock", "sm", "tensor", "ceiling", "hardware"

_UNCOUNTED = "parts of tiles, masked attention, recomputed products that were not declared"
# Key, title and reason of the block between two rungs, by the lower and (optional) upper rung.
_BETWEEN = {
    (SM, ""): (
        "empty_sms",
        "idle SMs",
        "kernels that fill few of them, and the ends of kernels",
    ),
    (TENSOR, SM): (
        "not_multiplying",
        "non-matmul kernels",
        "element-wise kernels, softmax, norms, copies, the optimizer, waits for memory",
    ),
    (TENSOR, ""): (
        "not_multiplying",
        "kernels that do not multiply",
        "element-wise kernels, copies, the optimizer, idle SMs",
    ),
    (CEILING, TENSOR): ("uncounted", "products beyond the count", _UNCOUNTED),
    (HARDWARE, CEILING): (
        "ceiling",
        "matmul ceiling",
        "what even the best matmuls lose, as `erg calibrate` measured on this device",
    ),
    (HARDWARE, TENSOR): ("uncounted", "uncounted tensor-core work", _UNCOUNTED),
}
_ONE_BLOCK = (
    KERNELS,
    "kernels, unattributed",
    "other kernels, slow products, small kernels: hardware counters would separate them",
)


_HIGHER = 1.02
_UNSEEN = (
    KERNELS,
    "unattributed",
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
    """Return the blocks from `level`, the time with a kernel, down to MFU, and the MFU block."""
    ladder = _ladder(evidence, activity, got, level)
    blocks = tuple(
        _between(upper, lower, activity)
        for upper, lower in pairwise(ladder)
        if upper.share_frac != lower.share_frac
    )
    exposed = tuple(exposed_communication(evidence, level * (activity.clock_ratio or 1.0)))
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
        clock_basis = weakest("derived", activity.basis)
        rungs.append(Rung(CLOCK, level * scale, clock_basis, tuple(_clock_facts(activity))))
    for key, share in ((SM, activity.sm_frac), (TENSOR, activity.tensor_frac)):
        if share is not None and share <= level:
            of = "SMs" if key == SM else "cycles"
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
    """The rung of the matmul ceiling: the share of time that matmuls need at calibrated speed."""
    calibrated = achievable_of_peak_frac(evidence)
    clock_hz = _calibration_clock_hz(evidence)
    rate, text = calibrated.value, f"matmuls reached {percent(calibrated.value)} of the peak"
    if clock_hz and activity.clock_ratio is not None and activity.peak_clock_hz is not None:
        rate *= activity.peak_clock_hz / clock_hz
        text += f" at {clock_hz / HZ_PER_MHZ:.0f} MHz, {percent(rate)} of what that clock allows"
    basis = weakest("derived", calibrated.basis)
    return Rung(CEILING, hardware_frac / rate, basis, (Fact(OF_PEAK, text),))


def _calibration_clock_hz(evidence: Evidence) -> float | None:
    """The mean clock during calibration, over devices; None if it is unknown for one."""
    dtype = evidence.settings.dtype or "fp32"
    clocks_hz = [calibration_of(d).matmul[dtype].clock_hz for d in evidence.devices("gpu")]
    known_hz = [clock for clock in clocks_hz if clock is not None]
    return sum(known_hz) / len(known_hz) if known_hz and len(known_hz) == len(clocks_hz) else None


def _falling(rungs: list[Rung]) -> list[Rung]:
    """Leave out rungs that are below a later one. A high clock may lift rungs above the top."""
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


def _traffic_facts(activity: DeviceActivity) -> Iterator[Fact]:
    """Memory and link traffic as evidence; it does not show that anything waited for it."""
    if activity.dram_frac is not None:
        yield activity.fact("activity.dram_frac", activity.dram_frac, "bandwidth")
    for column, rate in activity.link_bytes_per_s.items():
        if rate > 0:
            yield Fact(f"activity.{column}", f"{scaled(rate, 'B/s')} a device")


def _clock_facts(activity: DeviceActivity) -> Iterator[Fact]:
    if activity.clock_hz is None or activity.peak_clock_hz is None:
        return
    text = f"{activity.clock_hz / HZ_PER_MHZ:.0f} MHz, the peak is at"
    yield Fact("utilization.clock_hz", f"{text} {activity.peak_clock_hz / HZ_PER_MHZ:.0f}")
    if activity.clock_high_hz is not None and activity.clock_high_hz > _HIGHER * activity.clock_hz:
        highest = f"{activity.clock_high_hz / HZ_PER_MHZ:.0f} MHz was seen at most"
        yield Fact("utilization.clock_hz", highest)
    yield from (
        Fact("utilization.throttled_frac", f"{how} in {100 * share:.0f} % of readings")
        for how, share in (
            ("at the power limit", activity.capped_frac),
            ("throttled by heat", activity.heat_frac),
            ("slowed down or braked by the hardware", activity.brake_frac),
        )
        if share
    )


def _holder(activity: DeviceActivity) -> str:
    """Why the clock was low. Heat and brakes are named before the power limit, which is common."""
    heat, brake = activity.heat_frac or 0.0, activity.brake_frac or 0.0
    if heat or brake:
        return "by heat" if heat >= brake else "by a hardware slowdown or power brake"
    return "by the power limit" if activity.capped_frac else "no reason was recorded"


def _clock(lost: float, basis: Basis, activity: DeviceActivity) -> LossBlock:
    if lost < 0:
        title = "clock above the peak's: gain"
        why = "the peak is given for a clock that the device exceeded"
    else:
        title = "clock below the peak's"
        why = _holder(activity)
    return LossBlock("clock", title, lost, basis, tuple(_clock_facts(activity)), why)


def _split_exposed(
    blocks: tuple[LossBlock, ...], exposed: tuple[LossBlock, ...]
) -> tuple[LossBlock, ...]:
    """Split exposed communication and copies off the block of non-matmul kernels."""
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
    SM: "SMs active",
    TENSOR: "tensor cores active",
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
