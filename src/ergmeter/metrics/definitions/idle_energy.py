"""What of the energy would have been drawn anyway: gross, idle and net.

The trap: an idle GPU without a program on it. It draws less than one that holds a context and
computes nothing (77 and 121 W on an H200), and only the second is what the run would have drawn had
it done nothing. So the baseline is watts with a live context: of idle spans of this very run, or of
the calibration of this very device; without either there is no net figure. A calibration in company
is none of idle, one under other conditions says so first, and a run that drew less than its idle
says that one of the two is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.achievable import calibration_of, differences
from ergmeter.metrics.definitions.energy import joules_per_token, run_j
from ergmeter.metrics.energy.device_energy import boundary, curve_of
from ergmeter.records import PHASES, Reading, weakest
from ergmeter.units import NS_PER_S, duration, scaled

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Basis, Device

# After a load a GPU takes about a second to come to rest, and its sensors a refresh more.
SETTLE_S = 1.5
_CALIBRATED = ("nvml", "dcgm")  # whose devices `erg calibrate` knows the sensors of
_CURE = "`with meter.phase('idle')` for some seconds of the run measures it"


def idle_w(evidence: Evidence) -> Reading:
    """Watts of the run's devices with a program on them that does nothing."""
    devices = boundary(evidence)
    ids = {device.id for device in devices}
    # What the second die of a board draws is in the readings of the first.
    own = [one for one in devices if one.facts.get("energy_counted_in") not in ids]
    each = [_device_idle(evidence, device) for device in own]
    value = sum(one[0] for one in each)
    notes = dict.fromkeys(one[1] for one in each)
    return Reading(value, "W", weakest(*(one[2] for one in each)), note="; ".join(notes))


def _device_idle(evidence: Evidence, device: Device) -> tuple[float, str, Basis]:
    try:
        return _in_the_run(evidence, device)
    except NotMeasurable as error:
        why = str(error)
    try:
        return _as_calibrated(device)
    except NotMeasurable as error:
        raise NotMeasurable(f"{device.name} [{device.id}]: {why} ({_CURE}), and {error}") from error


def _as_calibrated(device: Device) -> tuple[float, str, Basis]:
    """What it drew at rest when it was calibrated, with all that was otherwise then."""
    if "calibration" not in device.facts and device.probe not in _CALIBRATED:
        raise NotMeasurable("`erg calibrate` measures the idle power of NVIDIA GPUs alone")
    found = calibration_of(device)
    idle = found.idle
    watts = None if idle is None else idle.counter_w or idle.power_w
    if not watts:
        unasked = "it was interrupted" if found.interrupted else "it has none"
        reasons = (found.absent.get(part) for part in ("idle power", "sensors"))
        said = next(filter(None, reasons), unasked)
        raise NotMeasurable(f"the calibration of {device.id} has no idle power: {said}")
    if found.remarks:
        raise NotMeasurable(
            f"the calibration of {device.id} has {watts:.4g} W, not at rest: when calibrated,"
            f" {'; '.join(found.remarks)}; run `erg calibrate` while no other program runs"
        )
    note = "; ".join([*differences([(device, found)]), f"as {found.said}"])
    return float(watts), note, "measured"


def _in_the_run(evidence: Evidence, device: Device) -> tuple[float, str, Basis]:
    """The mean over idle spans, without the time a device takes to come to rest."""
    own = evidence.all_steps.where_each(lambda lane: lane["phase"] == PHASES.index("idle"))
    if not len(own):
        raise NotMeasurable("the run has no idle span")
    lane = own.longest
    start_ns = (lane["start_ns"] + SETTLE_S * NS_PER_S).astype(np.int64)
    end_ns = lane["end_ns"].astype(np.int64)
    long_enough = end_ns > start_ns
    if not long_enough.any():
        raise NotMeasurable(f"its idle spans are not longer than {duration(SETTLE_S)}")
    curve, basis = curve_of(evidence, device)
    start_ns, end_ns = start_ns[long_enough], end_ns[long_enough]
    joules, _, _ = curve.over_each(start_ns, end_ns)
    known = ~np.isnan(joules)
    if not known.any():
        raise NotMeasurable("the device's readings cover no idle span")
    lasted_s = float((end_ns - start_ns)[known].sum()) / NS_PER_S
    return float(joules[known].sum()) / lasted_s, f"{duration(lasted_s)} idle in this run", basis


def net_j(evidence: Evidence) -> Reading:
    """Energy beyond what the same devices would have drawn idle."""
    gross, idle = run_j(evidence), idle_w(evidence)
    base_j = idle.value * evidence.span.duration_s
    if gross.value < base_j:
        raise NotMeasurable(
            f"the run drew {scaled(gross.value, 'J')}, less than the {scaled(base_j, 'J')} that"
            f" idle devices would have drawn ({idle.value:.4g} W, {idle.note}): measure idle power"
            " again"
        )
    low, high = (None if edge is None else edge - base_j for edge in (gross.low, gross.high))
    note = f"gross {scaled(gross.value, 'J')}, idle {idle.value:.4g} W ({idle.note}); {gross.note}"
    basis = weakest("derived", gross.basis, idle.basis)
    return Reading(gross.value - base_j, "J", basis, low, high, note)


def net_joules_per_token(evidence: Evidence) -> Reading:
    """Net energy over tokens of the same window."""
    gross, net, whole = joules_per_token(evidence), net_j(evidence), run_j(evidence)
    scale = gross.value / whole.value
    low, high = (None if edge is None else edge * scale for edge in (net.low, net.high))
    basis = weakest(gross.basis, net.basis)
    return Reading(net.value * scale, "J/token", basis, low, high, net.note)


_NEEDS = ("an energy counter or power readings", "an idle span or a calibration")

METRICS = [
    Metric(
        "energy.idle_w",
        "idle power",
        "W",
        "neither",
        "mean power of the run's devices with a program on them that computes nothing",
        _NEEDS,
        idle_w,
    ),
    Metric(
        "energy.net_j",
        "net energy",
        "J",
        "lower",
        "energy.run_j - energy.idle_w x window",
        _NEEDS,
        net_j,
    ),
    Metric(
        "energy.net_joules_per_token",
        "net energy per token",
        "J/token",
        "lower",
        "energy.net_j / tokens.total",
        (*_NEEDS, "steps with tokens"),
        net_joules_per_token,
    ),
]
