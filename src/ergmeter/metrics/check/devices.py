"""The checks of each device: was it read, held down, warm, busy, and do its sensors agree?

Of each device what was found is kept, so that it stays when its readings have gone from memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.check.finding import CheckFinding
from ergmeter.metrics.energy.device_energy import counter_and_integral
from ergmeter.metrics.evidence.device_cache import asked_of
from ergmeter.metrics.evidence.gauges import inside, mean, readings, sampled
from ergmeter.metrics.explain.block import percent
from ergmeter.units import HZ_PER_MHZ, NS_PER_S, duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.check.finding import Check
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device

# NVML's clocks-event reasons, by bit.
_POWER_CAP = 0x4
_HEAT = 0x20 | 0x40
_BRAKE = 0x8 | 0x80  # a fall to half the clock and less: heat or power, by the board's own hand
_LEAST_FRAC = 0.01  # of the readings
_CAPPED_FRAC = 0.05
_CLOCK_FRAC = 0.05  # between the 5th and the 95th percentile
_WARMING_C = 5.0
_GAP_S = 1.0
_GAP_INTERVALS = 10
_LOW_LOAD_FRAC = 0.5
_DISAGREE_FRAC = 0.05
_GROWTH_FRAC = 0.01  # from one quarter of the window to the next, of what was held at first


@asked_of("gpu")
def _gaps(evidence: Evidence, device: Device) -> list[CheckFinding]:
    t_ns = readings(evidence, "power_w", device).t_ns
    within = t_ns[inside(evidence, t_ns)]
    edges = np.concatenate(([evidence.span.start_ns], within, [evidence.span.end_ns]))
    between_s = np.diff(evidence.span.elapsed_ns(edges)) / NS_PER_S  # a cut is no gap
    longest_s, usual_s = float(between_s.max()), float(np.median(between_s))
    if longest_s <= max(_GAP_S, _GAP_INTERVALS * usual_s):
        return []
    seen = f"{_named(evidence, device)} was not read for {duration(longest_s)}"
    share = longest_s / evidence.span.duration_s
    effect = f"its power is unknown for {percent(share)} of the window, its energy at best a total"
    return [CheckFinding("gaps", "serious", seen, effect)]


@asked_of("gpu")
def _throttling(evidence: Evidence, device: Device) -> list[CheckFinding]:
    found = []
    series = readings(evidence, "throttled", device)
    bits = series.values[inside(evidence, series.t_ns)].astype(np.int64)
    for what, mask, otherwise in (
        ("heat", _HEAT, "the same chip when cooled"),
        ("a hardware slowdown", _BRAKE, "the same chip with enough power and cooling"),
    ):
        share = float(((bits & mask) != 0).mean())
        if share > _LEAST_FRAC:
            often = f"in {100 * share:.0f} % of the readings"
            seen = f"{_named(evidence, device)}: throttled by {what} {often}"
            effect = f"it is slower than {otherwise}{_clocks(evidence, device)}"
            found.append(CheckFinding("throttling", "serious", seen, effect))
    capped = float(((bits & _POWER_CAP) != 0).mean())
    if capped > _CAPPED_FRAC:
        limit_w = device.facts.get("power_limit_w")
        which = f"limit of {limit_w:.0f} W" if limit_w else "limit"
        often = f"in {100 * capped:.0f} % of the readings"
        seen = f"{_named(evidence, device)}: at its power {which} {often}"
        effect = f"the limit sets the speed: compare at the same limit{_clocks(evidence, device)}"
        found.append(CheckFinding("throttling", "minor", seen, effect))
    return found


def _clocks(evidence: Evidence, device: Device) -> str:
    try:
        series = readings(evidence, "clock_hz", device)
    except NotMeasurable:
        return ""
    usual = float(np.median(series.values[inside(evidence, series.t_ns)]))
    return f"; clock {usual / HZ_PER_MHZ:.0f} MHz (median)"


@asked_of("gpu")
def _clock(evidence: Evidence, device: Device) -> list[CheckFinding]:
    series = readings(evidence, "clock_hz", device)
    low, high = np.percentile(series.values[inside(evidence, series.t_ns)], (5, 95))
    moved = float((high - low) / high) if high else 0.0
    if moved <= _CLOCK_FRAC:
        return []
    mhz = f"{low / HZ_PER_MHZ:.0f} and {high / HZ_PER_MHZ:.0f} MHz"
    seen = f"{_named(evidence, device)}: the clock moved between {mhz}"
    return [
        CheckFinding(
            "clock", "minor", seen, f"the speed varies with it, by up to {100 * moved:.0f} %"
        )
    ]


@asked_of("gpu")
def _temperature(evidence: Evidence, device: Device) -> list[CheckFinding]:
    series = readings(evidence, "temperature_c", device)
    values = series.values[inside(evidence, series.t_ns)]
    first, most = float(values[0]), float(values.max())
    if most - first < _WARMING_C:
        return []
    seen = f"{_named(evidence, device)}: warmed from {first:.0f} to {most:.0f} °C in the window"
    effect = "a warm chip draws more and clocks lower: leave the warming out with --warmup-s"
    return [CheckFinding("temperature", "minor", seen, effect)]


@asked_of("gpu")
def _load(evidence: Evidence, device: Device) -> list[CheckFinding]:
    busy = mean(evidence, "busy_frac", device)
    if busy >= _LOW_LOAD_FRAC:
        return []
    seen = f"{_named(evidence, device)}: busy {100 * busy:.0f} % of the time"
    effect = "the rest of the program sets the speed: the run says little about the device"
    return [CheckFinding("load", "minor", seen, effect)]


@asked_of("gpu")
def _counter(evidence: Evidence, device: Device) -> list[CheckFinding]:
    """A device's energy counter against the integral of its instant power."""
    counter_j, integral_j = counter_and_integral(evidence, device)
    apart = integral_j / counter_j - 1
    if abs(apart) <= _DISAGREE_FRAC:
        return []
    than = f"{100 * abs(apart):.0f} % {'more' if apart > 0 else 'less'} than its counter says"
    seen = f"{_named(evidence, device)}: integrated power is {than}"
    effect = "a sensor is off, or power was read too seldom; energy is the counter's"
    return [CheckFinding("counter", "serious", seen, effect)]


@asked_of("gpu", "process")
def _growth(evidence: Evidence, device: Device) -> list[CheckFinding]:
    """Memory that grows from each quarter of the window to the next."""
    series = readings(evidence, "memory_bytes", device)
    values = series.values[inside(evidence, series.t_ns)]
    if len(values) < 8:
        return []
    quarters = np.array([np.median(part) for part in np.array_split(values, 4)])
    if not (np.diff(quarters) > _GROWTH_FRAC * quarters[0]).all():
        return []
    grown = (quarters[3] - quarters[0]) / 1e9
    seen = f"{_named(evidence, device)}: memory only grows, by {grown:.2g} GB in the window"
    return [CheckFinding("memory", "minor", seen, "a longer run may run out of memory")]


def _memory(evidence: Evidence) -> list[CheckFinding]:
    """Growth between training steps. Importing, compiling and start-up always add memory."""
    if not evidence.has_work or not evidence.trains:
        raise NotMeasurable("no training steps were seen, and memory always grows at start-up")
    return _each(evidence, [*evidence.devices("gpu"), *evidence.devices("process")], _growth)


def _named(evidence: Evidence, device: Device) -> str:
    """A device by its name; and which one it is, where there are several of that name."""
    alike = [one for one in evidence.devices(device.kind) if one.name == device.name]
    return device.name if len(alike) < 2 else f"{device.name} [{device.id}]"


def _of_device(evidence: Evidence, device: Device, reason: str) -> str:
    """A reason with the device it is of, unless it names it."""
    return reason if device.name in reason else f"{_named(evidence, device)}: {reason}"


def _of_gpus(check: Callable[[Evidence, Device], list[CheckFinding]]) -> Check:
    def checked(evidence: Evidence) -> list[CheckFinding]:
        return _each(evidence, sampled(evidence, "gpu"), check)

    return checked


def _each(
    evidence: Evidence,
    devices: list[Device],
    check: Callable[[Evidence, Device], list[CheckFinding]],
) -> list[CheckFinding]:
    """What is found of each device; that one can't be checked hides nothing of the others."""
    found: list[CheckFinding] = []
    reasons: list[str] = []
    for device in devices:
        try:
            found += check(evidence, device)
        except NotMeasurable as error:
            reasons.append(_of_device(evidence, device, str(error)))
    if reasons and len(reasons) == len(devices):
        raise NotMeasurable(reasons[0])
    name = check.__name__.strip("_").replace("growth", "memory")
    unseen = "a problem of this device would not show"
    return found + [CheckFinding(name, "minor", f"not checked: {why}", unseen) for why in reasons]


CHECKS: dict[str, Check] = {
    "gaps": _of_gpus(_gaps),
    "throttling": _of_gpus(_throttling),
    "counter": _of_gpus(_counter),
    "clock": _of_gpus(_clock),
    "temperature": _of_gpus(_temperature),
    "load": _of_gpus(_load),
    "memory": _memory,
}
