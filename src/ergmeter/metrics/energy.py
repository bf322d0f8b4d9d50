"""What the run drew: joules, watts, joules per token; of which devices, and how it is known.

Counter differences come first and integrated power second; one device is never half the one and
half the other, and a sum over devices says which was which. What a lost or silent device drew is
not guessed: the sum is then absent, with the part that is known in its reason.

The boundary is whole boards: accelerators where there are any, else CPU packages and DRAM. What the
rest of the node drew is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Alias, Metric
from ergmeter.metrics.gauges import ACCELERATORS, why_absent
from ergmeter.metrics.kept import kept
from ergmeter.metrics.power import (
    RAPL_REFRESH_S,
    REFRESH_S,
    Energy,
    EnergyCurve,
    counter_curve,
    power_curve,
)
from ergmeter.metrics.shape import span_shape
from ergmeter.metrics.tokens import label_of, steps_of, tokens
from ergmeter.metrics.unseen import need_all, need_devices
from ergmeter.records import Reading, Window, weakest
from ergmeter.units import J_PER_WH, NS_PER_S, duration, number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.records import Basis, Device

COUNTER = "energy counter"
_LATEST = "curves of the device that was asked of last"
DRAW = "power draw (on recent chips an average of about a second)"
_BASIS: dict[str, Basis] = {COUNTER: "measured"}
_HINT = "a GPU with its driver, or readable RAPL counters, would provide it (see `erg doctor`)"
_APART_S = 4.0  # of a counter's readings: a refresh is a fortieth of that
_ROUNDING = 1e-9  # of a mean that is as high as the highest reading
_CPUS = ("rapl", "grace", "apple")


@dataclass(frozen=True, slots=True)
class Drawn:
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


@kept
def device_drawn(evidence: Evidence, device: Device) -> Drawn:
    """What one device drew in the window. Raises NotMeasurable with the device and the reason."""
    curves = _curves(evidence, device)
    integral = curves.integral
    try:
        if curves.counter is None:
            raise NotMeasurable(curves.why_no_counter)
        return Drawn(curves.counter.over(evidence.span), COUNTER)
    except NotMeasurable as error:
        why_no_counter = str(error)
    try:
        if integral is None:
            raise NotMeasurable(curves.why_no_integral)
        averaged = device.facts.get("power_field") == "draw"
        way = f"{DRAW}, integrated" if averaged else "instant power, integrated"
        return Drawn(integral.over(evidence.span), way, why_no_counter)
    except NotMeasurable as error:
        marks = [mark for mark in evidence.run.marks if mark.name == "device_lost"]
        lost = [mark.detail for mark in marks if device.id in mark.detail]
        reasons = "; ".join(dict.fromkeys([*lost, why_no_counter, str(error)]))
        raise NotMeasurable(f"{device.name} [{device.id}]: {reasons}") from error


def curve_of(evidence: Evidence, device: Device) -> tuple[EnergyCurve, Basis]:
    """A device's energy over time, by its counter or else by its power, and how it is known."""
    curves = _curves(evidence, device)
    if curves.counter is not None:
        return curves.counter, _BASIS[COUNTER]
    if curves.integral is None:
        whys = f"{curves.why_no_counter}; {curves.why_no_integral}"
        raise NotMeasurable(f"{device.name} [{device.id}]: {whys}")
    return curves.integral, "derived"


def _curves(evidence: Evidence, device: Device) -> _Curves:
    """Of the device that is looked at just now they stay: several ask for them in turn."""
    known = evidence.drawn.get(_LATEST)
    if not isinstance(known, _Curves) or known.of != device.id:
        integral, why_no_integral = _integral(evidence, device)
        counter, why_no_counter = None, ""
        try:
            counter = _shaped_counter(evidence, device, integral)
        except NotMeasurable as error:
            why_no_counter = str(error)
        known = _Curves(device.id, integral, why_no_integral, counter, why_no_counter)
        evidence.drawn[_LATEST] = known
    return known


@kept
def counter_and_integral(evidence: Evidence, device: Device) -> tuple[float, float]:
    """What a device drew by its counter, and by its instant power alone.

    From one refresh of the counter to another, as far apart as there are: between its readings
    nobody but the power says when it was drawn.
    """
    if device.facts.get("power_field") == "draw":
        raise NotMeasurable("its power is an average of about a second: no check on its counter")
    curves = _curves(evidence, device)
    integral = curves.integral
    if integral is None:
        raise NotMeasurable(curves.why_no_integral)
    counter = _counter(evidence, device)
    inside = (counter.t_ns >= integral.t_ns[0]) & (counter.t_ns <= integral.t_ns[-1])
    t_ns, joules = counter.t_ns[inside], counter.joules[inside]
    if len(t_ns) < 2 or (apart_s := float(t_ns[-1] - t_ns[0]) / NS_PER_S) < _APART_S:
        seen = f"{duration(apart_s)} apart" if len(t_ns) > 1 else "once"
        raise NotMeasurable(f"its counter was seen {seen}, and refreshes ten times a second")
    return float(joules[-1] - joules[0]), integral.over(Window(int(t_ns[0]), int(t_ns[-1]))).joules


def _integral(evidence: Evidence, device: Device) -> tuple[EnergyCurve | None, str]:
    power = evidence.series("power_w").get(device.id)
    if power is None or len(power.t_ns) < 2:
        return None, why_absent(device, "power_w") or "no power reading either"
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
        raise NotMeasurable(why_absent(device, "energy_j") or "it has no energy counter")
    refresh_s = REFRESH_S if device.kind == "gpu" else RAPL_REFRESH_S
    return counter_curve(
        counter.t_ns, counter.values, shape=shape, lag_s=lag_s, refresh_s=refresh_s
    )


def boundary(evidence: Evidence) -> list[Device]:
    """The devices whose energy is the run's: accelerators, else CPU packages and DRAM."""
    devices = _once(evidence.devices("gpu") or evidence.devices("cpu", "dram"))
    if not devices:
        why = evidence.why_no_device("energy sensor", *dict.fromkeys((*ACCELERATORS, *_CPUS)))
        raise NotMeasurable(why if evidence.is_imported else f"{why}; {_HINT}")
    shared = [one for one in evidence.shared_devices if one.id in {d.id for d in devices}]
    if shared:
        raise NotMeasurable(
            f"other programs computed on {', '.join(one.id for one in shared)} too (see the mark"
            " device_shared): what the board drew for each can't be told apart"
        )
    if evidence.has_company:
        raise NotMeasurable(
            "another training of the same command was at work at the same time: what the devices"
            " drew for each can't be told apart; measure them in commands of their own"
        )
    return devices


def _once(devices: list[Device]) -> list[Device]:
    """Without the second die of a board, say, whose counter is the first one's."""
    ids = {device.id for device in devices}
    return [one for one in devices if one.facts.get("energy_counted_in") not in ids]


def total(evidence: Evidence, devices: list[Device]) -> Reading:
    """The sum over devices, or the reason why there is none and the part that is known."""
    devices = _once(devices)
    drawn: list[Drawn] = []
    reasons = []
    for device in devices:
        try:
            drawn.append(device_drawn(evidence, device))
        except NotMeasurable as error:
            reasons.append(str(error))
    joules = sum(one.energy.joules for one in drawn)
    if reasons:
        known = f" ({number_of(len(drawn), 'other device')} drew {joules:.1f} J)" if drawn else ""
        raise NotMeasurable("; ".join(reasons) + known)
    ways = sorted({one.way for one in drawn})
    remarks = sorted({one.remark for one in drawn if one.remark and one.way != COUNTER})
    note = (
        f"{_names(devices)}, {_scope(devices)}; {' and '.join(ways)}"
        + (f" ({'; '.join(remarks)})" if remarks else "")
        + f"; interval from the readings at both ends; {evidence.window_note}"
    )
    basis = weakest(*(_BASIS.get(one.way, "derived") for one in drawn))
    low_j, high_j = (sum(getattr(d.energy, edge) for d in drawn) for edge in ("low_j", "high_j"))
    return Reading(joules, "J", basis, low_j, high_j, note)


def _scope(devices: list[Device]) -> str:
    """What of a machine the sensors see, where they say; else all of the board or package."""
    said = dict.fromkeys(str(one.facts.get("scope", "")) for one in devices)
    return ", ".join(one for one in said if one) or "whole boards"


def _names(devices: list[Device]) -> str:
    names = [device.name for device in devices]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def run_j(evidence: Evidence) -> Reading:
    """Energy of the window."""
    return total(evidence, boundary(evidence))


def _of_kind(evidence: Evidence, kind: str, what: str, *probes: str) -> Reading:
    devices = evidence.devices(kind)
    if not devices:
        raise NotMeasurable(evidence.why_no_device(what, *probes))
    return total(evidence, devices)


def accelerator_j(evidence: Evidence) -> Reading:
    """Energy of the accelerators."""
    return _of_kind(evidence, "gpu", "accelerator", *ACCELERATORS)


def module_j(evidence: Evidence) -> Reading:
    """Energy of modules and whole machines, which hold devices that are counted elsewhere."""
    return _of_kind(evidence, "module", "meter of a module or a machine", "grace", "apple")


def cpu_j(evidence: Evidence) -> Reading:
    """Energy of the CPU packages."""
    return _of_kind(evidence, "cpu", "CPU energy counter", *_CPUS)


def dram_j(evidence: Evidence) -> Reading:
    """Energy of the memory."""
    return _of_kind(evidence, "dram", "DRAM energy counter", "rapl", "apple")


def device_j(evidence: Evidence, device: Device) -> Reading:
    """Energy of one device."""
    return total(evidence, [device])


def _scaled(reading: Reading, factor: float, unit: str, note: str = "") -> Reading:
    low, high = (None if b is None else b * factor for b in (reading.low, reading.high))
    together = "; ".join(part for part in (note, reading.note) if part)
    return Reading(reading.value * factor, unit, reading.basis, low, high, together)


def mean_w(evidence: Evidence) -> Reading:
    """Energy of the window over its length."""
    return _scaled(run_j(evidence), 1 / evidence.span.duration_s, "W")


def device_mean_w(evidence: Evidence, device: Device) -> Reading:
    """Energy of one device over the length of the window."""
    return _scaled(device_j(evidence, device), 1 / evidence.span.duration_s, "W")


@kept
def device_peak_w(evidence: Evidence, device: Device) -> Reading:
    """The highest power reading of one device in the window.

    In a short window no reading may be as high as the energy says that the mean was.
    """
    power = evidence.series("power_w").get(device.id)
    if power is None:
        raise NotMeasurable(f"{device.name} [{device.id}] gives no power reading")
    inside = (power.t_ns >= evidence.span.start_ns) & (power.t_ns <= evidence.span.end_ns)
    if not inside.any():
        raise NotMeasurable(f"no power reading of {device.name} [{device.id}] in the window")
    highest_w, count = float(power.values[inside].max()), int(inside.sum())
    readings = number_of(count, "reading")
    note = f"highest of {readings}; shorter peaks are not seen"
    try:
        mean = device_mean_w(evidence, device)
    except NotMeasurable:
        return Reading(highest_w, "W", "measured", note=note)
    if mean.value <= highest_w * (1 + _ROUNDING):
        return Reading(max(highest_w, mean.value), "W", "measured", note=note)
    said = f"{highest_w:.4g} W is the highest of {readings}, and {mean.value:.4g} W the mean"
    if mean.low is None or mean.low > highest_w:
        raise NotMeasurable(f"{device.name} [{device.id}]: {said}: the readings missed the peak")
    note = f"the mean power, which a peak is no less than: {said}, within its interval"
    return Reading(mean.value, "W", weakest("derived", mean.basis), note=note)


def peak_w(evidence: Evidence) -> Reading:
    """The sum of the devices' highest readings: an upper bound where there are several."""
    peaks = [device_peak_w(evidence, device) for device in boundary(evidence)]
    several = f"sum of {len(peaks)} devices' own peaks, an upper bound; " if len(peaks) > 1 else ""
    basis = weakest(*(peak.basis for peak in peaks))
    # Of the one that is known least, where they differ.
    note = next(peak.note for peak in peaks if peak.basis == basis)
    return Reading(sum(peak.value for peak in peaks), "W", basis, note=several + note)


def wh(evidence: Evidence) -> Reading:
    """Energy of the window in watt-hours."""
    return _scaled(run_j(evidence), 1 / J_PER_WH, "Wh")


def joules_per_token(evidence: Evidence) -> Reading:
    """Energy over tokens of the same window."""
    need_all(evidence)
    need_devices(evidence)
    amounts, label, basis = tokens(evidence)
    reading = _scaled(
        run_j(evidence), 1 / float(amounts.sum()), "J/token", label_of(evidence, label)
    )
    return _weakened(reading, basis)


def joules_per_10k_tokens(evidence: Evidence) -> Reading:
    """Energy over tokens of the same window, for ten thousand."""
    return _scaled(joules_per_token(evidence), 10_000, "J")


def joules_per_step(evidence: Evidence) -> Reading:
    """Energy over steps of the same window."""
    need_devices(evidence)
    reading = _scaled(run_j(evidence), 1 / steps_of(evidence), "J/step")
    return _weakened(reading, evidence.steps_basis)


def _weakened(reading: Reading, basis: Basis) -> Reading:
    return Reading(
        reading.value,
        reading.unit,
        weakest(reading.basis, basis),
        reading.low,
        reading.high,
        reading.note,
    )


_SENSOR = ("an energy counter or power readings",)
_DRAWS = ("gpu", "cpu", "dram", "module")
_SFT_PLAY = "SFT-Play"

METRICS = [
    Metric(
        "energy.run_j",
        "energy",
        "J",
        "lower",
        "counter at the window's end - at its start, else integral of instant power; summed over"
        " accelerators, or over CPU packages and DRAM where there is no accelerator",
        _SENSOR,
        run_j,
        per_device=device_j,
        kinds=_DRAWS,
        aliases=(Alias("energy_J", _SFT_PLAY, "energy after the warm-up", "J"),),
    ),
    Metric(
        "energy.joules_per_token",
        "energy per token",
        "J/token",
        "lower",
        "energy.run_j / tokens.total",
        (*_SENSOR, "steps with tokens"),
        joules_per_token,
        aliases=(
            Alias(
                "J_per_token",
                _SFT_PLAY,
                "energy over tokens of the same window; the"
                " original divided by tokens of the whole run",
                "J/token",
            ),
        ),
    ),
    Metric(
        "energy.joules_per_10k_tokens",
        "energy per 10k tokens",
        "J",
        "lower",
        "10 000 x energy.joules_per_token",
        (*_SENSOR, "steps with tokens"),
        joules_per_10k_tokens,
        aliases=(Alias("E10k_J", _SFT_PLAY, "energy of ten thousand tokens", "J"),),
    ),
    Metric(
        "energy.joules_per_step",
        "energy per step",
        "J/step",
        "lower",
        "energy.run_j / steps.count",
        (*_SENSOR, "steps"),
        joules_per_step,
    ),
    Metric(
        "energy.mean_w",
        "mean power",
        "W",
        "neither",
        "energy.run_j / window",
        _SENSOR,
        mean_w,
        per_device=device_mean_w,
        kinds=_DRAWS,
        aliases=(
            Alias(
                "AEC",
                "EfficientLLM",
                "average energy consumption, which is a power: energy of"
                " the run's own devices over the window",
                "W",
            ),
            Alias("avg_power_W", _SFT_PLAY, "mean power after the warm-up", "W"),
        ),
    ),
    Metric(
        "energy.peak_w",
        "peak power",
        "W",
        "neither",
        "highest power reading in the window",
        ("power readings",),
        peak_w,
        per_device=device_peak_w,
        kinds=("gpu",),
        aliases=(Alias("peak_power_W", _SFT_PLAY, "highest power reading", "W"),),
    ),
    Metric("energy.wh", "energy", "Wh", "lower", "energy.run_j / 3600", _SENSOR, wh),
    Metric(
        "energy.accelerator_j",
        "accelerator energy",
        "J",
        "lower",
        "as energy.run_j, over accelerators",
        ("an accelerator",),
        accelerator_j,
    ),
    Metric(
        "energy.cpu_j",
        "CPU package energy",
        "J",
        "lower",
        "as energy.run_j, over CPU packages",
        ("RAPL",),
        cpu_j,
    ),
    Metric(
        "energy.dram_j",
        "DRAM energy",
        "J",
        "lower",
        "as energy.run_j, over DRAM domains",
        ("RAPL",),
        dram_j,
    ),
    Metric(
        "energy.module_j",
        "module energy",
        "J",
        "lower",
        "as energy.run_j, over modules (Grace) or the machine (Apple): with what is in them, so it"
        " is part of no sum",
        ("a meter of a module",),
        module_j,
    ),
]
