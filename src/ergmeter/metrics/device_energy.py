"""Energy of a device over time and in the window, by its counter or its power readings.

A counter gives the amount but seldom the time; power gives the time but on some chips only an
average. So the counter comes first, interpolated between its readings by the steps or the power,
and power alone is used where there is no counter. Never half of each. `boundary` gives the devices
whose energy is the run's: accelerators, else CPU packages and DRAM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.energy_curve import (
    RAPL_REFRESH_S,
    REFRESH_S,
    Energy,
    EnergyCurve,
    counter_curve,
    merged,
    power_curve,
)
from ergmeter.metrics.evidence.samples import (
    ACCELERATORS,
    BOUNDARY,
    cached_for_kinds,
    cached_result,
    why_absent,
)
from ergmeter.records import PHASES, Basis, Device, FloatArray, TimeArray, Window
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.metrics.evidence.window import TrainingWindow


# Interpolation between two readings of a counter. It is read every second or two. Instant power
# places the joules well for a steady load, but not for bursts: a sensor that samples a part of each
# 100 ms misses most of a 30 ms burst (on an H200 a quarter to three quarters of the energy went to
# the pauses). When the bursts were is known from the steps, and the sensor does see the level
# between them.
#
# So where a device was seen at rest around or between the steps, and lower than under load, the
# joules above that floor go to the steps. A step long enough to be read has a level of its own. Of
# steps without a pause the sensor gives the level, except at the edges. Short steps share the rest.

# A reading speaks of up to a refresh before it, and of the 20 ms the sensor looks for (measured on
# an H200: power lags the load by 70 ms on average, the counter by less than 10).
SEEN_AFTER_S = 0.2
_SPEAKS_OF_S = 0.12  # a reading: from so long ago to where the next one does
_LEAST_READINGS = 5
_LEAST_AT_REST = 3
_AT_REST_FRAC = 0.1  # between the 10th and the 90th percentile of a floor (1 % on an H200)
_MOST_ABOVE = 1.5  # that a step may draw of the highest reading
_NO_PAUSES_FRAC = 0.02  # of the time in steps
_LEAST_CONTRAST = 1.5  # of load to floor, or the spans say nothing that the sensor does not
# The counter itself follows the load this closely.
SPAN_SLACK_S = 0.02
_LOADS = tuple(PHASES.index(phase) for phase in ("train", "eval", "prefill", "decode"))


def span_shape(evidence: Evidence, power: Series, counter: Series) -> EnergyCurve | None:
    """A curve that rises with the steps; None where the sensor is the better guide."""
    spans = _loads(evidence)
    if spans is None:
        return None
    starts, ends, are_steps = spans
    first_ns, last_ns = int(counter.t_ns[0]), int(counter.t_ns[-1])
    inside = (starts >= first_ns) & (ends <= last_ns)
    starts, ends = starts[inside], ends[inside]
    if not len(starts):
        return None
    busy_s = (ends - starts) / NS_PER_S
    floor_w = _floor(power, starts, ends, float(busy_s.sum()))
    if floor_w is None:
        return None
    drawn_j = float(counter.values[-1] - counter.values[0])
    over_j = drawn_j - floor_w * ((last_ns - first_ns) / NS_PER_S - float(busy_s.sum()))
    levels_w = _levels(power, starts, ends)
    unseen = np.isnan(levels_w)
    if unseen.any():
        rest_j = over_j - float((levels_w * busy_s)[~unseen].sum())
        levels_w[unseen] = rest_j / float(busy_s[unseen].sum())
    if over_j / float(busy_s.sum()) < _LEAST_CONTRAST * floor_w or levels_w.min() <= floor_w:
        return None
    if levels_w.max() > _MOST_ABOVE * power.values.max():
        return None  # the device works on in what look like pauses: these are the host's times
    spread = ~unseen & (not are_steps)  # within one step it does not matter
    readings = _power_between(power, starts[spread], ends[spread])
    t_ns, watts = _stairs(starts, ends, levels_w, floor_w, readings)
    t_ns = np.concatenate([[first_ns - NS_PER_S], t_ns, [max(last_ns, int(t_ns[-1])) + NS_PER_S]])
    rises = np.diff(t_ns) / NS_PER_S * np.append(floor_w, watts)
    return EnergyCurve(
        t_ns.astype(np.int64),
        np.append(0.0, np.cumsum(rises)),
        refresh_s=SPAN_SLACK_S if are_steps else REFRESH_S,
        max_gap_s=float("inf"),
        seen_until_ns=int(t_ns[-1]),
    )


def _loads(evidence: Evidence) -> tuple[TimeArray, TimeArray, bool] | None:
    """Spans in which the rank with the most rows computed, and whether each is one step.

    None where only lines were printed.
    """
    rows = evidence.all_steps
    if not len(rows) or evidence.from_output:
        return None
    lane = rows.longest
    is_load = np.isin(lane["phase"], _LOADS)
    own, others = lane.where(is_load), lane.where(~is_load)
    if not len(own):
        return None
    starts, ends = merged(own.columns["start_ns"], own.columns["end_ns"])
    if _overlap(others, starts, ends):
        return None  # a wait for data in a step: the sensor says which of the two drew more
    return starts, ends, len(starts) == len(own)


def _overlap(rows: Steps, starts: TimeArray, ends: TimeArray) -> bool:
    """Whether a row lies in one of the spans, in part or as a whole."""
    before = np.searchsorted(starts, rows["end_ns"]) - 1  # the last span that begins before its end
    return bool((ends[np.clip(before, 0, None)] > rows["start_ns"])[before >= 0].any())


def _floor(power: Series, starts: TimeArray, ends: TimeArray, busy_s: float) -> float | None:
    """Watts in the pauses, by readings of pauses alone; None if these vary.

    Between the steps; where there is next to no time between them, before and after them all: a
    device without a context draws less than one that waits for its next step.
    """
    pauses_s = float((starts[1:] - ends[:-1]).sum()) / NS_PER_S
    after_ns = round(SEEN_AFTER_S * NS_PER_S)
    if pauses_s > _NO_PAUSES_FRAC * busy_s:
        least, at_rest = _LEAST_READINGS, _within(power.t_ns, ends[:-1] + after_ns, starts[1:])
    else:
        at_rest = (power.t_ns < starts[0]) | (power.t_ns >= ends[-1] + after_ns)
        least = _LEAST_AT_REST
    if int(at_rest.sum()) < least:
        return None
    low_w, floor_w, high_w = np.percentile(power.values[at_rest], [10, 50, 90])
    # A device at rest draws what it draws. Where it does not, there is more going on than steps.
    return float(floor_w) if high_w - low_w <= _AT_REST_FRAC * floor_w else None


def _levels(power: Series, starts: TimeArray, ends: TimeArray) -> FloatArray:
    """Watts of each step that is long enough to be seen; NaN of the others."""
    begin_ns = starts + round(SEEN_AFTER_S * NS_PER_S)
    first, last = np.searchsorted(power.t_ns, begin_ns), np.searchsorted(power.t_ns, ends)
    sums = np.append(0.0, np.cumsum(power.values))
    count = np.maximum(last - first, 0)
    levels = np.full(len(starts), np.nan)
    is_long = count >= _LEAST_READINGS
    levels[is_long] = (sums[last] - sums[first])[is_long] / count[is_long]
    return levels


def _within(
    t_ns: TimeArray, starts: TimeArray, ends: TimeArray
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    span = np.searchsorted(starts, t_ns, side="right") - 1
    is_within: np.ndarray[tuple[int], np.dtype[np.bool_]] = (span >= 0) & (
        t_ns < ends[np.clip(span, 0, None)]
    )
    return is_within


def _power_between(power: Series, starts: TimeArray, ends: TimeArray) -> Series:
    """The readings that speak of long steps alone, at the times of which they speak."""
    if not len(starts):
        return Series(starts, np.empty(0))
    inside = _within(power.t_ns, starts + round(SEEN_AFTER_S * NS_PER_S), ends)
    return Series(power.t_ns[inside] - round(_SPEAKS_OF_S * NS_PER_S), power.values[inside])


def _stairs(
    starts: TimeArray, ends: TimeArray, levels_w: FloatArray, floor_w: float, readings: Series
) -> tuple[TimeArray, FloatArray]:
    """From when on how many watts: a step's level, or what was seen in it, and then the floor."""
    first = np.searchsorted(readings.t_ns, starts)
    is_seen = first < np.searchsorted(readings.t_ns, ends)
    begins_w = levels_w.copy()
    begins_w[is_seen] = readings.values[first[is_seen]]
    t_ns = np.concatenate([starts, readings.t_ns, ends])
    watts = np.concatenate([begins_w, readings.values, np.full(len(ends), floor_w)])
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], watts[order]


# Energy of a device in the window.

COUNTER = "energy counter"
DRAW = "power draw (on recent chips an average of about a second)"
BASIS: dict[str, Basis] = {COUNTER: "measured"}  # by the way it was found; else derived
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
class DeviceCurves:
    """A device's energy over time by its power and by its counter, or why there is none."""

    device: str
    integral: EnergyCurve | None
    why_no_integral: str
    counter: EnergyCurve | None
    why_no_counter: str


@dataclass
class CurveCache:
    """The curves of the device in use. Those of all devices of a large run would fill memory."""

    latest: DeviceCurves | None = None


@cached_result
def device_drawn(evidence: Evidence, device: Device) -> DeviceEnergy:
    """Energy of one device in the window. Raises NotMeasurable with the device and the reason."""
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


@cached_for_kinds(BOUNDARY)
def _drawn_in_whole_run(evidence: Evidence, device: Device) -> DeviceEnergy:
    """Energy of one device in the whole run, computed while its samples are in memory."""
    return device_drawn(evidence.whole_run, device)


def _over(curve: EnergyCurve, window: TrainingWindow) -> Energy:
    """The energy of a window. What uncertain cuts drew may be a part of it."""
    energy = curve.over_all(window.starts_ns, window.ends_ns)
    if not len(window.uncertain[0]):
        return energy
    more_j = float((curve.at(window.uncertain[1]) - curve.at(window.uncertain[0])).sum())
    return Energy(energy.joules, energy.low_j, energy.high_j + more_j)


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


def _curves(evidence: Evidence, device: Device) -> DeviceCurves:
    """The curves of a device; those of the device in use are cached."""
    curves = evidence.curve_cache.latest
    if curves is None or curves.device != device.id:
        integral, why_no_integral = _integral(evidence, device)
        counter, why_no_counter = None, ""
        try:
            counter = _shaped_counter(evidence, device, integral)
        except NotMeasurable as error:
            why_no_counter = str(error)
        curves = DeviceCurves(device.id, integral, why_no_integral, counter, why_no_counter)
        evidence.curve_cache.latest = curves
    return curves


@cached_result
def counter_and_integral(evidence: Evidence, device: Device) -> tuple[float, float]:
    """Joules of a device by its counter, and by its instant power alone.

    From one refresh of the counter to another, as far apart as there are: between its readings
    only the power shows when it was drawn.
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
        reason = "no power reading" if power is None else "one power reading alone"
        return None, why_absent(device, "power_w") or reason
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
    shared = [device for device in evidence.shared_devices if device.id in {d.id for d in devices}]
    if shared:
        raise NotMeasurable(
            f"other programs computed on {', '.join(device.id for device in shared)} too (see the"
            " mark device_shared): the energy of the board can't be split between them"
        )
    if evidence.has_company:
        raise NotMeasurable(
            "another training of the same command ran at the same time: the energy of the devices"
            " can't be split between them; measure each in its own command"
        )
    return devices


def counted_once(devices: list[Device]) -> list[Device]:
    """The devices without those whose counter is another's, such as a board's second die."""
    ids = {device.id for device in devices}
    return [device for device in devices if device.facts.get("energy_counted_in") not in ids]
