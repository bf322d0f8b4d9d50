"""MFU and bandwidth against what `erg calibrate` measured on the same device.

MFU of the achievable = model FLOP/s of a device / FLOP/s that `erg calibrate` measured in the run's
dtype. It shows what is left to gain on this machine, while MFU compares with the datasheet.
(The "maximum achievable matmul FLOPS" of Stas Bekman's Machine Learning Engineering; an H200
reaches about 80 % of its datasheet in bf16.)

A run is compared with the calibration in its own header, which is of the very device it ran on,
never of another device of the same name. The note has the calibration's date and conditions, and
begins with those that differ from the run's (power limit, driver).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ergmeter.errors import FormatError, NotMeasurable
from ergmeter.hardware.calibration import CalibratedRate, Calibration, read_document
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.compute import (
    BANDWIDTH,
    FLOPS_PER_S,
    MFU,
    NO_BYTES,
    NO_DTYPE,
    need_possible,
    of_run,
)
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.records import Device, Reading, mapped, weakest
from ergmeter.units import scaled, significant

OF_ACHIEVABLE = "utilization.mfu_of_achievable_frac"
BANDWIDTH_OF_ACHIEVABLE = "utilization.bandwidth_of_achievable_frac"
ACHIEVABLE = "compute.achievable_flops_per_s_per_device"
OF_PEAK = "compute.achievable_of_peak_frac"

_CURE = "run `erg calibrate` on its machine, then record again"
_ABOVE = "faster than in the calibration: calibrate again, or an input of the MFU is wrong"
_ABOVE_PEAK = (
    "the calibration is faster than the peak: the peak or its dtype is wrong, or the clock was"
    " above the datasheet's"
)
# Conditions that rates depend on: the key in facts and conditions, its name, and its unit.
_HANGS_ON = {"power_limit_w": ("power limit", " W"), "driver": ("driver", "")}


def achievable_flops_per_s(evidence: Evidence) -> Reading:
    """FLOP/s that calibration measured on the run's devices in its dtype; mean over devices."""
    dtype = evidence.settings.dtype or ("" if evidence.devices("gpu") else "fp32")
    if not dtype:
        raise NotMeasurable(NO_DTYPE)
    return _mean(evidence, "matmul", dtype)


def mfu_of_achievable_frac(evidence: Evidence) -> Reading:
    """Model FLOP/s of a device over its calibrated FLOP/s."""
    each, achievable = of_run(evidence, FLOPS_PER_S), achievable_flops_per_s(evidence)
    need_possible(evidence, MFU)
    return _share(each, achievable)


def achievable_of_peak_frac(evidence: Evidence) -> Reading:
    """Calibrated FLOP/s over the datasheet peak: the highest MFU possible on this machine."""
    achievable, mfu = achievable_flops_per_s(evidence), of_run(evidence, MFU)
    need_possible(evidence, MFU)
    peak = of_run(evidence, FLOPS_PER_S).value / mfu.value
    note = f"of {scaled(peak, 'FLOP/s')}, the peak that {MFU} names; {achievable.note}"
    basis = weakest(achievable.basis, "derived")
    return mapped(achievable, lambda rate: rate / peak, unit="frac", basis=basis, note=note)


def bandwidth_of_achievable_frac(evidence: Evidence) -> Reading:
    """Bytes that the run must move per second / the calibrated memory bandwidth."""
    each = of_run(evidence, FLOPS_PER_S)  # first, as its reason names what the run lacks
    chosen = evidence.flops[0]
    if chosen.bytes_per_step is None:
        raise NotMeasurable(NO_BYTES.reason)
    need_possible(evidence, BANDWIDTH)
    per_flop = chosen.bytes_per_step / chosen.model_per_step
    moved = mapped(each, lambda rate: rate * per_flop)
    return _share(moved, _mean(evidence, "bandwidth", "read"))


def _share(rate: Reading, achievable: Reading) -> Reading:
    basis = weakest(rate.basis, achievable.basis)
    note = f"{achievable.note}; {rate.note}"
    return mapped(rate, lambda edge: edge / achievable.value, unit="frac", basis=basis, note=note)


def _mean(evidence: Evidence, table: str, name: str) -> Reading:
    """A calibrated rate, mean over the run's devices. NotMeasurable if one device has none."""
    devices = evidence.devices("gpu") or evidence.devices("node")
    if not devices:
        raise NotMeasurable(
            "no GPU and no host was sampled in this run, so there is no calibration"
        )
    calibrated = [(device, calibration_of(device)) for device in devices]
    rates = [_rate(device, calibration, table, name) for device, calibration in calibrated]
    count = len(rates)
    value, low, high = (
        sum(getattr(rate, field) for rate in rates) / count for field in ("value", "low", "high")
    )
    what = f"{name} products" if table == "matmul" else f"memory {name}"
    each = f", mean of {count} devices" if count > 1 else ""
    note = (
        f"of {scaled(value, rates[0].unit)} held in {what} for {significant(rates[0].window_s, 2)}"
        f" s{each} ({'; '.join(dict.fromkeys(calibration.text for _, calibration in calibrated))})"
    )
    caveats = list(differences(calibrated))
    caveats += [f"when calibrated, {remark}" for _, c in calibrated for remark in c.remarks]
    caveats += [
        f"the rate moved by {100 * rate.drift_frac:+.1f} % within its window"
        for rate in rates
        if not rate.is_steady
    ]
    return Reading(
        value, rates[0].unit, "measured", low, high, "; ".join([*dict.fromkeys(caveats), note])
    )


def calibration_of(device: Device) -> Calibration:
    """The calibration of this very device. Raises NotMeasurable if there is none."""
    where = f"{device.name} [{device.id}]"
    if "no_calibration" in device.facts:
        raise NotMeasurable(f"{device.facts['no_calibration']}")
    if "calibration" not in device.facts:
        raise NotMeasurable(f"{where} had no calibration when this was recorded: {_CURE}")
    try:
        return read_document(device.facts["calibration"], f"the calibration of {where}")
    except FormatError as error:
        raise NotMeasurable(str(error)) from error


def _rate(device: Device, calibration: Calibration, table: str, name: str) -> CalibratedRate:
    rates: dict[str, CalibratedRate] = getattr(calibration, table)
    if name in rates:
        return rates[name]
    what = f"{'matmul' if table == 'matmul' else 'memory'} {name}"
    if what in calibration.absent:
        why = calibration.absent[what]
    elif calibration.interrupted:
        why = "it was interrupted before that"
    else:
        why = f"it has {', '.join(rates) or 'none'}"
    raise NotMeasurable(f"the calibration of {device.name} has no {what}: {why}")


def differences(calibrated: list[tuple[Device, Calibration]]) -> Iterator[str]:
    """Yield a text for each condition that differs between calibration and run."""
    for device, calibration in calibrated:
        for fact, (word, unit) in _HANGS_ON.items():
            then, now = calibration.conditions.get(fact), device.facts.get(fact)
            if then is not None and now is not None and then != now:
                yield f"calibrated at {word} {then}{unit}, and this ran at {now}{unit}"


_NEEDS = ("the FLOPs of a step", "tokens", "a calibration")

_of_achievable = partial(
    Metric, unit="frac", direction="higher", upper_bound=1.0, above_bound=_ABOVE
)

METRICS = [
    _of_achievable(
        OF_ACHIEVABLE,
        "MFU of the achievable",
        formula="FLOPs of a token x tokens/s / (devices x FLOP/s held in `erg calibrate`, same"
        " type)",
        needs=_NEEDS,
        compute=mfu_of_achievable_frac,
        views="card 520 in compute; model card 110",
    ),
    Metric(
        ACHIEVABLE,
        "achievable FLOP/s per device",
        "FLOP/s",
        "higher",
        "products held for a window in `erg calibrate`, in the type computed in",
        ("a calibration",),
        achievable_flops_per_s,
    ),
    _of_achievable(
        OF_PEAK,
        "achievable of the peak",
        formula="FLOP/s held in `erg calibrate` / dense peak: the most that MFU can be on this"
        " machine",
        needs=(*_NEEDS, "a peak"),
        compute=achievable_of_peak_frac,
        above_bound=_ABOVE_PEAK,
    ),
    _of_achievable(
        BANDWIDTH_OF_ACHIEVABLE,
        "memory bandwidth of the achievable",
        formula="bytes that a token has to move x tokens/s / (devices x B/s read in `erg"
        " calibrate`)",
        needs=("the bytes of a decoding step", "tokens", "a calibration"),
        compute=bandwidth_of_achievable_frac,
    ),
]
