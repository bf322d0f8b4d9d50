"""What did a device draw, over time and in the window, and how is that known?

The trap: two sensors that disagree. A counter says how much and seldom when, power says when and is
an average on some chips; so the counter comes first, shaped by the steps or the power between its
readings, and power alone only where there is none. One device is never half the one and half the
other. Whose energy is the run's is told here too: accelerators, else CPU packages and DRAM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.energy.counter_interpolation import span_shape
from ergmeter.metrics.energy.energy_curve import (
    RAPL_REFRESH_S,
    REFRESH_S,
    Energy,
    EnergyCurve,
    counter_curve,
    power_curve,
)
from ergmeter.metrics.evidence.device_cache import BOUNDARY, asked_of, cached_per_device
from ergmeter.metrics.evidence.gauges import ACCELERATORS, why_absent
from ergmeter.records import Window
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.window import TrainingWindow
    from ergmeter.records import Basis, Device

COUNTER = "energy counter"
DRAW = "power draw (on recent chips an average of about a second)"
BASIS: dict[str, Basis] = {COUNTER: "measured"}  # by the way it was found; else derived
_LATEST = "curves of the device that was asked of last"
_HINT = "a GPU with its driver, or readable RAPL counters, would provide it (see `erg doctor`)"
_HINT_CPU = "readable RAPL counters would provide it (see `erg doctor`)"
_APART_S = 4.0  # of a counter's readings: a refresh is a fortieth of that
CPUS = ("rapl", "grace", "apple")


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """A device's energy in the window and the way it was found."""

    energy: Energy
    way: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class _Curves:
    """A device's energy over time by its power and by its counter, or why there is none."""

    of: str
    integral: EnergyCurve | None
    why_no_integral: str
    counter: EnergyCurve | None
    why_no_counter: str


@cached_per_device
def device_drawn(evidence: Evidence, device: Device) -> DeviceEnergy:
    """What one device drew in the window. Raises NotMeasurable with the device and the reason."""
    curves = _curves(evidence, device)
    integral = curves.integral
    try:
        if curves.counter is None:
            raise NotMeasurable(curves.why_no_counter)
        return DeviceEnergy(_over(curves.counter, evidence.span), COUNTER)
    except NotMeasurable as error:
        why_no_counter = str(error)
    try:
        if integral is None:
            raise NotMeasurable(curves.why_no_integral)
        averaged = device.facts.get("power_field") == "draw"
        way = f"{DRAW}, integrated" if averaged else "instant power, integrated"
        return DeviceEnergy(_over(integral, evidence.span), way, why_no_counter)
    except NotMeasurable as error:
        reasons = "; ".join(dict.fromkeys([*evidence.lost(device), why_no_counter, str(error)]))
        raise NotMeasurable(f"{device.name} [{device.id}]: {reasons}") from error


@asked_of(BOUNDARY)
def _drawn_in_whole_run(evidence: Evidence, device: Device) -> DeviceEnergy:
    """The same over the whole run, while the device's readings are in memory."""
    return device_drawn(evidence.whole_run, device)


def _over(curve: EnergyCurve, window: TrainingWindow) -> Energy:
    """The energy of a window. What uncertain cuts drew may be a part of it."""
    found = curve.over_all(window.starts_ns, window.ends_ns)
    if not len(window.uncertain[0]):
        return found
    more_j = float((curve.at(window.uncertain[1]) - curve.at(window.uncertain[0])).sum())
    return Energy(found.joules, found.low_j, found.high_j + more_j)


def curve_of(evidence: Evidence, device: Device) -> tuple[EnergyCurve, Basis]:
    """A device's energy over time, by its counter or else by its power, and how it is known."""
    curves = _curves(evidence, device)
    if curves.counter is not None:
        is_unknown = device in evidence.gpus("unknown")
        return curves.counter, "derived" if is_unknown else BASIS[COUNTER]
    if curves.integral is None:
        whys = f"{curves.why_no_counter}; {curves.why_no_integral}"
        raise NotMeasurable(f"{device.name} [{device.id}]: {whys}")
    return curves.integral, "derived"


def _curves(evidence: Evidence, device: Device) -> _Curves:
    """Of the device that is looked at just now they stay: several ask for them in turn."""
    known = evidence.curves.get(_LATEST)
    if not isinstance(known, _Curves) or known.of != device.id:
        integral, why_no_integral = _integral(evidence, device)
        counter, why_no_counter = None, ""
        try:
            counter = _shaped_counter(evidence, device, integral)
        except NotMeasurable as error:
            why_no_counter = str(error)
        known = _Curves(device.id, integral, why_no_integral, counter, why_no_counter)
        evidence.curves[_LATEST] = known
    return known


@cached_per_device
def counter_and_integral(evidence: Evidence, device: Device) -> tuple[float, float]:
    """What a device drew by its counter, and by its instant power alone.

    From one refresh of the counter to another, as far apart as there are: between its readings
    nobody but the power says when it was drawn.
    """
    if device.facts.get("power_field") == "draw":
        raise NotMeasurable(
            "its power readings are 1 s averages, too coarse to check its energy counter"
        )
    curves = _curves(evidence, device)
    integral = curves.integral
    if integral is None:
        raise NotMeasurable(curves.why_no_integral)
    counter = _counter(evidence, device)
    inside = (counter.t_ns >= integral.t_ns[0]) & (counter.t_ns <= integral.t_ns[-1])
    t_ns, joules = counter.t_ns[inside], counter.joules[inside]
    if len(t_ns) < 2 or (apart_s := float(t_ns[-1] - t_ns[0]) / NS_PER_S) < _APART_S:
        overlap = duration(apart_s) if len(t_ns) > 1 else "0 s"
        raise NotMeasurable(
            f"its energy counter and its power overlap for {overlap}; the check needs"
            f" {_APART_S:g} s"
        )
    return float(joules[-1] - joules[0]), integral.over(Window(int(t_ns[0]), int(t_ns[-1]))).joules


def _integral(evidence: Evidence, device: Device) -> tuple[EnergyCurve | None, str]:
    power = evidence.series("power_w").get(device.id)
    if power is None or len(power.t_ns) < 2:
        found = "no power reading" if power is None else "one power reading alone"
        return None, why_absent(device, "power_w") or found
    averaged = device.facts.get("power_field") == "draw"
    try:
        return power_curve(power.t_ns, power.values, slack_s=1.0 if averaged else REFRESH_S), ""
    except NotMeasurable as error:
        return None, str(error)


def _shaped_counter(
    evidence: Evidence, device: Device, integral: EnergyCurve | None
) -> EnergyCurve:
    """The counter, and between its readings the steps or else the power."""
    power = evidence.series("power_w").get(device.id)
    counter = evidence.series("energy_j").get(device.id)
    if integral is not None and power is not None and counter is not None and len(counter.t_ns) > 1:
        spans = span_shape(evidence, power, counter)
        if spans is not None:
            return _counter(evidence, device, spans, lag_s=0.0)
    return _counter(evidence, device, integral)


def _counter(
    evidence: Evidence,
    device: Device,
    shape: EnergyCurve | None = None,
    *,
    lag_s: float = REFRESH_S / 2,
) -> EnergyCurve:
    counter = evidence.series("energy_j").get(device.id)
    if counter is None:
        raise NotMeasurable(why_absent(device, "energy_j") or "no energy counter was read")
    refresh_s = REFRESH_S if device.kind == "gpu" else RAPL_REFRESH_S
    return counter_curve(
        counter.t_ns, counter.values, shape=shape, lag_s=lag_s, refresh_s=refresh_s
    )


def boundary(evidence: Evidence) -> list[Device]:
    """The devices whose energy is the run's: accelerators, else CPU packages and DRAM."""
    devices = counted_once(evidence.devices("gpu") or evidence.devices("cpu", "dram"))
    if not devices:
        why = evidence.why_no_device("energy sensor", *dict.fromkeys((*ACCELERATORS, *CPUS)))
        if evidence.is_imported:
            raise NotMeasurable(why)
        raise NotMeasurable(f"{why}; {_HINT_CPU if evidence.gpus('unused') else _HINT}")
    shared = [one for one in evidence.shared_devices if one.id in {d.id for d in devices}]
    if shared:
        raise NotMeasurable(
            f"other programs computed on {', '.join(one.id for one in shared)} too (see the mark"
            " device_shared): the energy of the board can't be split between them"
        )
    if evidence.has_company:
        raise NotMeasurable(
            "another training of the same command ran at the same time: the energy of the devices"
            " can't be split between them; measure each in its own command"
        )
    return devices


def counted_once(devices: list[Device]) -> list[Device]:
    """Without the second die of a board, say, whose counter is the first one's."""
    ids = {device.id for device in devices}
    return [one for one in devices if one.facts.get("energy_counted_in") not in ids]
