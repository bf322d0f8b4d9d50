"""Losses on the device: kernels, clock, power limit, SMs and tensor cores active, matmul ceiling.

A datasheet's peak is at one clock (1830 MHz on an H200, whose clock goes up to 1980), and tensor
core activity is per cycle. If the clock of the peak is unknown there is no clock block; its share
stays in the other blocks.

The matmul ceiling is the best rate in the calibration of the run's header. It is scaled to the
run's clock if both are known: a calibration runs at the power limit, with a lower clock than most
runs.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.table import candidates
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.definitions.achievable import achievable_of_peak_frac
from ergmeter.metrics.definitions.utilization import process_cores
from ergmeter.metrics.evidence.samples import (
    begins_ns_of,
    inside,
    mean,
    mean_activity,
    or_none,
    or_noted,
    readings,
    sampled,
    throttled_share,
)
from ergmeter.metrics.explain.time import Fact, TimeSplit, percent
from ergmeter.metrics.phases import Spans, covered_until_s
from ergmeter.records import THROTTLE_BRAKE, THROTTLE_HEAT, THROTTLE_POWER_CAP, Reading
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
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
        """A share as evidence; the text says if evaluation and checkpoints are left out."""
        besides = "" if self.basis == "measured" else ", in training"
        return Fact(key, f"{percent(share_frac)} of {of}{besides}")

    def without_peak(self, why: str) -> DeviceActivity:
        """A copy without the peak's clock."""
        absent = {**self.absent, "peak_clock_hz": why}
        return replace(self, peak_clock_hz=None, absent=absent)

    @property
    def clock_ratio(self) -> float | None:
        """The mean clock over the peak's clock."""
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
        _links(evidence, devices),
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
    activity, _, _ = mean_activity(evidence, column, device, most=1.0)
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
    """NVML's utilisation in place of counters, if the window is long enough."""
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
    """The mean clock of readings within steps, and the highest of all."""
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
    """Share of readings throttled for one of these reasons."""
    return sum(throttled_share(evidence, device, mask) for device in devices) / len(devices)


def _links(evidence: Evidence, devices: list[Device]) -> dict[str, float]:
    """NVLink and PCIe traffic of a device by column, if counters have it."""
    rates = {}
    for column in _LINKS:
        with suppress(NotMeasurable):
            each = [mean_activity(evidence, column, device, most=math.inf)[0] for device in devices]
            rates[column] = sum(each) / len(each)
    return rates


def peak_clock_hz(evidence: Evidence, devices: list[Device]) -> float:
    """The clock at which the datasheet's peak is reached."""
    if evidence.settings.peak_flops_per_s is not None:
        raise NotMeasurable("the peak was declared, and its clock was not")
    dtype = evidence.settings.dtype
    if dtype in _NOT_ON_TENSOR_CORES:
        raise NotMeasurable(f"the peak of {dtype} is at another clock than that of 16 bits")
    names = {evidence.settings.device or device.name for device in devices}
    try:
        (spec,) = {spec.key: spec for name in names for spec in candidates(name)}.values()
    except (NotMeasurable, ValueError):
        raise NotMeasurable("which clock the peak is at is not known") from None
    per_cycle, peak = _FLOPS_PER_CYCLE.get(spec.key), spec.peak_flops_per_s.get("bf16")
    if per_cycle is None or peak is None:
        raise NotMeasurable(f"no source for the clock that the peak of {spec.name} is at")
    return peak / per_cycle


# Measured by ergmeter's authors on one such device, 2026-11-15: a hint, not used in any metric.
_ELSEWHERE = {"NVIDIA H200": "another H200 held about 80 % of its bf16 peak in products of 8192^3"}


def why_no_ceiling(evidence: Evidence) -> str:
    """The reason why there is no ceiling, with a hint from other devices; or empty."""
    try:
        achievable_of_peak_frac(evidence)
    except NotMeasurable as error:
        names = {device.name for device in evidence.devices("gpu")}
        hints = [f"; {hint}" for name, hint in _ELSEWHERE.items() if name in names]
        return f"{error}{''.join(hints)}"
    return ""
