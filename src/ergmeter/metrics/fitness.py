"""Is a measurement fit to be compared with another? What disturbed it, and what that did to it.

Two traps shaped it. A verdict without a figure: "throttled" alone says nothing, so each finding has
what was seen and how much of the result hangs on it. And silence that is taken for health: a check
that could not be made is named with its reason, and where a decisive one could not, the
verdict is that nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.drawn import counter_and_integral
from ergmeter.metrics.explain_blocks import percent
from ergmeter.metrics.explain_time import NAMED, slow_rows, time_split
from ergmeter.metrics.explain_waits import TITLES
from ergmeter.metrics.gauges import inside, mean, readings, sampled
from ergmeter.metrics.kept import asked_of
from ergmeter.metrics.stragglers import STRAGGLING_FRAC, pace_of_ranks
from ergmeter.metrics.throughput import pace
from ergmeter.metrics.unseen import why_not_all
from ergmeter.records import PHASES
from ergmeter.runlog.reader import CUT_OFF
from ergmeter.units import HZ_PER_MHZ, NS_PER_S, duration, number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence import Evidence
    from ergmeter.records import Device

Weight = Literal["serious", "minor"]
"""Serious: another run of the same would give other figures. Minor: what they hang on, or waste."""

Verdict = Literal["fit", "not fit", "not known"]

# Without one of these nobody can say "fit": long enough, steady enough, and a clock that nothing
# held down. Each can spoil a comparison by itself, and no other check sees it. Company is none of
# them: a container hides it from every program in it, and what it does shows in the noise.
DECISIVE = ("window", "noise", "throttling")

# NVML's clocks-event reasons, by bit.
_POWER_CAP = 0x4
_HEAT = 0x20 | 0x40
_BRAKE = 0x8 | 0x80  # a fall to half the clock and less: heat or power, by the board's own hand
_LEAST_FRAC = 0.01  # of the readings
_CAPPED_FRAC = 0.05
_CLOCK_FRAC = 0.05  # between the 5th and the 95th percentile
_WARMING_C = 5.0
_SHORT_S = 5.0
_FEW_STEPS = 10
_NOISY_FRAC = 0.05  # half the interval, over the rate
_WAITS_FRAC = 0.02  # of the window
_GAP_S = 1.0
_GAP_INTERVALS = 10
_LOW_LOAD_FRAC = 0.5
_DISAGREE_FRAC = 0.05
_GROWTH_FRAC = 0.01  # from one quarter of the window to the next, of what was held at first
_LEFT = "figures that need it are absent, or of what was left"
_CHECK_FAILED = "the check failed"
_LOST = (
    "steps_dropped",
    "rows_dropped",
    "samples_dropped",
    "handover_failed",
    "probe_failed",
    "device_lost",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a comparison would trip over."""

    check: str
    weight: Weight
    seen: str
    effect: str


@dataclass(frozen=True, slots=True)
class Fitness:
    """What all checks came to. `unchecked`: those that could not be made, with the reason."""

    findings: tuple[Finding, ...]
    unchecked: dict[str, str]
    window: str

    @property
    def verdict(self) -> Verdict:
        """Not fit where something serious was found; fit only if every decisive check was made."""
        if any(one.weight == "serious" for one in self.findings):
            return "not fit"
        return "not known" if self.undecided else "fit"

    @property
    def is_fit(self) -> bool:
        """Whether it is known to be fit."""
        return self.verdict == "fit"

    @property
    def undecided(self) -> tuple[str, ...]:
        """The decisive checks that could not be made."""
        return tuple(name for name in DECISIVE if name in self.unchecked)

    @property
    def passed(self) -> tuple[str, ...]:
        """The checks that were made and found nothing."""
        found = {one.check for one in self.findings}
        return tuple(name for name in CHECKS if name not in found | self.unchecked.keys())

    @property
    def said(self) -> str:
        """The verdict, and how many of the checks it rests on."""
        without, whole = len(self.unchecked), len(CHECKS)
        if self.verdict == "not known":
            which = ", ".join(name.replace("_", " ") for name in self.undecided)
            failed = sum(why.startswith(_CHECK_FAILED) for why in self.unchecked.values())
            parts = (
                [f"{without - failed} of {whole} checks had no data"] if without > failed else []
            )
            parts += [f"{failed} of {whole} checks failed"] if failed else []
            return f"not known: {' and '.join(parts)}, {which} among them"
        word = "fit to be compared" if self.is_fit else "not fit to be compared"
        return f"{word} ({whole - without} of {whole} checks made)"


def fitness(evidence: Evidence) -> Fitness:
    """Make every check. The serious findings come first."""
    findings: list[Finding] = []
    unchecked: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            findings += check(evidence)
        except NotMeasurable as error:
            unchecked[name] = str(error)
        except Exception as error:  # noqa: BLE001  a card is shown, whatever is wrong with a check
            unchecked[name] = f"{_CHECK_FAILED}: {type(error).__name__}: {error}"
    ordered = sorted(findings, key=lambda one: one.weight != "serious")
    return Fitness(tuple(ordered), unchecked, _window_note(evidence))


def _window_note(evidence: Evidence) -> str:
    try:
        return evidence.window_note
    except NotMeasurable as error:
        return str(error)


# -- the record -------------------------------------------------------------------------------


def _record(evidence: Evidence) -> list[Finding]:
    found = []
    if evidence.run.status == CUT_OFF:
        several = len(evidence.run.writers) > 1
        effect = "the window ends at its last hand-over" + (", or its others' last steps" * several)
        found.append(Finding("record", "serious", "the run was cut off", effect))
    lost = [mark for mark in evidence.run.marks if mark.name in _LOST]
    if lost:
        seen = f"part of the record is missing: {lost[0].name.replace('_', ' ')}: {lost[0].detail}"
        found.append(Finding("record", "serious", seen, _LEFT))
    found += [Finding("record", "serious", said, _LEFT) for said in evidence.run.verified()]
    if not found and not evidence.has_work:
        effect = "what there is to compare is the whole command: its time, energy and memory"
        found.append(Finding("record", "minor", evidence.several or "no steps were seen", effect))
    return found


def _ranks(evidence: Evidence) -> list[Finding]:
    """Ranks that told no steps, whose tokens nobody else tells."""
    why = why_not_all(evidence)
    effect = "tokens are those of the others, and nothing sets them against all devices"
    return [Finding("ranks", "serious", why, effect)] if why else []


def _company(evidence: Evidence) -> list[Finding]:
    if not any(mark.name == "device_used" for mark in evidence.run.marks):
        sampled(evidence, "gpu")
        raise NotMeasurable("which processes compute on the GPU could not be seen")
    return [
        Finding(
            "company",
            "serious",
            f"another program computed on a GPU of this run: {mark.detail}",
            "its time, memory and energy are not this run's alone",
        )
        for mark in evidence.run.marks
        if mark.name == "device_shared"
    ]


# -- the window -------------------------------------------------------------------------------


def _window(evidence: Evidence) -> list[Finding]:
    lasted_s, rows = evidence.window.duration_s, evidence.counted
    if evidence.trains:
        steps, what = max(len(lane) for lane in rows.lanes), "step"
    else:  # a request is up to two rows
        phases = (
            np.bincount(lane["phase"].astype(int), minlength=len(PHASES)) for lane in rows.lanes
        )
        steps, what = int(np.max(sum(phases))), "request"
    if lasted_s >= _SHORT_S and steps >= _FEW_STEPS:
        return []
    seen = f"the window is {duration(lasted_s)} long, with {number_of(steps, what)}"
    enough = f"{_SHORT_S:g} s and {number_of(_FEW_STEPS, what)} or more"
    effect = f"too short to tell chance from speed: measure {enough}"
    return [Finding("window", "serious", seen, effect)]


def _warm_up(evidence: Evidence) -> list[Finding]:
    """Steps at the beginning that are slower than the rest."""
    _only_steps(evidence)
    lane, split = evidence.counted.longest, time_split(evidence)
    if len(lane) < _FEW_STEPS:
        raise NotMeasurable(
            f"{number_of(len(lane), 'step')}: too few to tell a beginning from the rest"
        )
    rows = slow_rows(split.left_s)
    if not rows:
        return []
    usual_s = float(np.median(split.left_s))
    early_s = split.left_s[:rows]
    share = float((early_s - usual_s).sum()) / split.whole_s
    slow = int(np.nan_to_num(lane["steps"][:rows], nan=1.0).sum())  # a printed line may be of ten
    which = "the first counted step is" if slow == 1 else f"the first {slow} counted steps are"
    seen = f"{which} up to {early_s.max() / usual_s:.1f} times as slow as the median"
    steps = int(evidence.warmup()[0]) + slow  # an option counts from the run's beginning
    what = "it" if slow == 1 else "them"
    effect = f"beyond it {percent(share)} of the time: --warmup-steps {steps} leaves {what} out"
    return [Finding("warm_up", "serious", seen, effect)]


def _noise(evidence: Evidence) -> list[Finding]:
    rate = pace(evidence)
    if rate.low is None or rate.high is None:
        raise NotMeasurable("too few steps for an interval")
    half = (rate.high - rate.low) / 2 / rate.value
    if half <= _NOISY_FRAC:
        return []
    effect = f"differences below {100 * half:.0f} % say nothing: measure longer"
    return [
        Finding("noise", "serious", f"steps per second are known to ± {100 * half:.0f} %", effect)
    ]


def _stalls(evidence: Evidence) -> list[Finding]:
    """Steps that took much longer than the others, without what is named and the beginning."""
    _only_steps(evidence)
    split = time_split(evidence)
    if "stalls" in split.absent:
        raise NotMeasurable(split.absent["stalls"])
    if split.frac("stalls") <= _WAITS_FRAC:
        return []
    seen = (
        f"{split.counts['stalls']} of {len(split.left_s)} steps took twice the median or more,"
        f" up to {duration(split.longest_s['stalls'])} beyond it"
    )
    took = f"{percent(split.frac('stalls'))} of the time"
    effect = (
        f"{took}: look for what stops the steps, as data, checkpoints or logging without a name"
    )
    return [Finding("stalls", "minor", seen, effect)]


def _pauses(evidence: Evidence) -> list[Finding]:
    """Checkpoints, evaluation and waits for data: what is named, and no stall for that."""
    _only_steps(evidence)
    split = time_split(evidence)
    effect = "it is in the time of the window: compare runs that have as much of it"
    found = []
    for part in NAMED:
        if split.frac(part) <= _WAITS_FRAC:
            continue
        times = number_of(split.counts[part], "time")
        took = f"{percent(split.frac(part))} of the window ({duration(split.parts_s[part])}"
        found.append(Finding("pauses", "minor", f"{TITLES[part]} took {took}, {times})", effect))
    return found


def _stragglers(evidence: Evidence) -> list[Finding]:
    """A rank that the others wait for, or that falls behind them."""
    if len(evidence.counted.lanes) < 2:
        return []
    worst = pace_of_ranks(evidence).straggler()
    if worst.by_frac <= STRAGGLING_FRAC:
        return []
    effect = (
        f"{percent(worst.by_frac)} of each step: look at its data loading, its host and its GPU"
    )
    return [Finding("stragglers", "minor", worst.said, effect)]


# -- the devices: of each what was found, which stays when its readings have gone --------------


@asked_of("gpu")
def _gaps(evidence: Evidence, device: Device) -> list[Finding]:
    t_ns = readings(evidence, "power_w", device).t_ns
    within = t_ns[inside(evidence, t_ns)]
    edges = np.concatenate(([evidence.span.start_ns], within, [evidence.span.end_ns]))
    between_s = np.diff(edges) / NS_PER_S
    longest_s, usual_s = float(between_s.max()), float(np.median(between_s))
    if longest_s <= max(_GAP_S, _GAP_INTERVALS * usual_s):
        return []
    seen = f"{_named(evidence, device)} was not read for {duration(longest_s)}"
    share = longest_s / evidence.span.duration_s
    effect = f"what it drew in {percent(share)} of the window is known as a sum at best"
    return [Finding("gaps", "serious", seen, effect)]


@asked_of("gpu")
def _throttling(evidence: Evidence, device: Device) -> list[Finding]:
    found = []
    series = readings(evidence, "throttled", device)
    bits = series.values[inside(evidence, series.t_ns)].astype(np.int64)
    for what, mask in (("heat", _HEAT), ("a hardware slowdown", _BRAKE)):
        share = float(((bits & mask) != 0).mean())
        if share > _LEAST_FRAC:
            often = f"in {100 * share:.0f} % of the readings"
            seen = f"{_named(evidence, device)}: held down by {what} {often}"
            effect = f"it is slower than the same chip when cooled{_clocks(evidence, device)}"
            found.append(Finding("throttling", "serious", seen, effect))
    capped = float(((bits & _POWER_CAP) != 0).mean())
    if capped > _CAPPED_FRAC:
        limit_w = device.facts.get("power_limit_w")
        which = f"limit of {limit_w:.0f} W" if limit_w else "limit"
        often = f"in {100 * capped:.0f} % of the readings"
        seen = f"{_named(evidence, device)}: at its power {which} {often}"
        effect = f"the limit sets the speed: compare at the same one{_clocks(evidence, device)}"
        found.append(Finding("throttling", "minor", seen, effect))
    return found


def _clocks(evidence: Evidence, device: Device) -> str:
    try:
        series = readings(evidence, "clock_hz", device)
    except NotMeasurable:
        return ""
    usual = float(np.median(series.values[inside(evidence, series.t_ns)]))
    return f"; clock {usual / HZ_PER_MHZ:.0f} MHz (median)"


@asked_of("gpu")
def _clock(evidence: Evidence, device: Device) -> list[Finding]:
    series = readings(evidence, "clock_hz", device)
    low, high = np.percentile(series.values[inside(evidence, series.t_ns)], (5, 95))
    moved = float((high - low) / high) if high else 0.0
    if moved <= _CLOCK_FRAC:
        return []
    mhz = f"{low / HZ_PER_MHZ:.0f} and {high / HZ_PER_MHZ:.0f} MHz"
    seen = f"{_named(evidence, device)}: the clock moved between {mhz}"
    return [
        Finding("clock", "minor", seen, f"the speed moves with it, by up to {100 * moved:.0f} %")
    ]


@asked_of("gpu")
def _temperature(evidence: Evidence, device: Device) -> list[Finding]:
    series = readings(evidence, "temperature_c", device)
    values = series.values[inside(evidence, series.t_ns)]
    first, most = float(values[0]), float(values.max())
    if most - first < _WARMING_C:
        return []
    seen = f"{_named(evidence, device)}: warmed from {first:.0f} to {most:.0f} °C in the window"
    effect = "a warm chip draws more and clocks lower: begin when it is warm (--warmup-s)"
    return [Finding("temperature", "minor", seen, effect)]


@asked_of("gpu")
def _load(evidence: Evidence, device: Device) -> list[Finding]:
    busy = mean(evidence, "busy_frac", device)
    if busy >= _LOW_LOAD_FRAC:
        return []
    seen = f"{_named(evidence, device)}: at work in {100 * busy:.0f} % of the time"
    effect = "the time is made elsewhere: its figures say little about the device"
    return [Finding("load", "minor", seen, effect)]


@asked_of("gpu")
def _counter(evidence: Evidence, device: Device) -> list[Finding]:
    """A device's energy counter against the integral of its instant power."""
    counter_j, integral_j = counter_and_integral(evidence, device)
    apart = integral_j / counter_j - 1
    if abs(apart) <= _DISAGREE_FRAC:
        return []
    than = f"{100 * abs(apart):.0f} % {'more' if apart > 0 else 'less'} than its counter says"
    seen = f"{_named(evidence, device)}: integrated power is {than}"
    effect = "one of its two sensors is wrong: energy is the counter's"
    return [Finding("counter", "serious", seen, effect)]


@asked_of("gpu", "process")
def _growth(evidence: Evidence, device: Device) -> list[Finding]:
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
    return [Finding("memory", "minor", seen, "a longer run may end for want of it")]


def _memory(evidence: Evidence) -> list[Finding]:
    return _each(evidence, [*evidence.devices("gpu"), *evidence.devices("process")], _growth)


def _only_steps(evidence: Evidence) -> None:
    if not evidence.has_work:
        raise NotMeasurable(evidence.several or "no steps were seen")
    if not evidence.trains:
        raise NotMeasurable("requests differ in length, so that none is slow by itself")
    if evidence.from_output:
        raise NotMeasurable("printed lines stand for several steps each")


def _named(evidence: Evidence, device: Device) -> str:
    """A device by its name; and which one it is, where there are several of that name."""
    alike = [one for one in evidence.devices(device.kind) if one.name == device.name]
    return device.name if len(alike) < 2 else f"{device.name} [{device.id}]"


def _of_gpus(
    check: Callable[[Evidence, Device], list[Finding]],
) -> Callable[[Evidence], list[Finding]]:
    def checked(evidence: Evidence) -> list[Finding]:
        return _each(evidence, sampled(evidence, "gpu"), check)

    return checked


def _each(
    evidence: Evidence,
    devices: list[Device],
    check: Callable[[Evidence, Device], list[Finding]],
) -> list[Finding]:
    """What is found of each device; that one can't be checked hides nothing of the others."""
    found: list[Finding] = []
    reasons: list[str] = []
    for device in devices:
        try:
            found += check(evidence, device)
        except NotMeasurable as error:
            reasons.append(str(error))
    if reasons and len(reasons) == len(devices):
        raise NotMeasurable(reasons[0])
    name = check.__name__.strip("_").replace("growth", "memory")
    unseen = "a fault of its own would not show"
    return found + [Finding(name, "minor", f"not checked: {why}", unseen) for why in reasons]


CHECKS: dict[str, Callable[[Evidence], list[Finding]]] = {
    "ranks": _ranks,
    "record": _record,
    "window": _window,
    "warm_up": _warm_up,
    "noise": _noise,
    "company": _company,
    "gaps": _of_gpus(_gaps),
    "throttling": _of_gpus(_throttling),
    "counter": _of_gpus(_counter),
    "clock": _of_gpus(_clock),
    "temperature": _of_gpus(_temperature),
    "stalls": _stalls,
    "pauses": _pauses,
    "stragglers": _stragglers,
    "load": _of_gpus(_load),
    "memory": _memory,
}
