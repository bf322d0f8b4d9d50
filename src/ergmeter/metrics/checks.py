"""Checks whether throttling, power limits, noise or stalls make a run unfit to compare.

Each finding has an observation with numbers and its effect on the results. A check that could not
be made is listed with its reason. Without a decisive check the verdict is "not known".

Stalls, gaps and the slow start are computed as in `erg explain`, so a named pause is not a stall.
Findings of single devices are cached, as their readings may be freed from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.compute import ALL_WORK, of_run
from ergmeter.metrics.definitions.throughput import pace
from ergmeter.metrics.definitions.timing import STRAGGLING_FRAC, pace_of_ranks
from ergmeter.metrics.definitions.utilization import other_programs
from ergmeter.metrics.device_energy import counter_and_integral
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.ranks import is_declared, why_not_all
from ergmeter.metrics.evidence.samples import (
    begins_ns_of,
    cached_for_kinds,
    inside,
    mean,
    mean_activity,
    readings,
    sampled,
    throttled_share,
    window_values,
)
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.explain.device import clock_hz, peak_clock_hz
from ergmeter.metrics.explain.time import NAMED, TITLES, time_split
from ergmeter.metrics.phases import slow_rows
from ergmeter.records import THROTTLE_BRAKE, THROTTLE_HEAT, THROTTLE_POWER_CAP, Device, or_none
from ergmeter.runlog.format import dropped_steps
from ergmeter.runlog.reader import CUT_OFF
from ergmeter.units import HZ_PER_MHZ, NS_PER_S, duration, number_of, percent

Weight = Literal["serious", "minor"]
# Serious: a repeat would give other results. Minor: waste, or a condition that results depend on.


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Something that makes a run less comparable."""

    check: str  # set by `fitness`
    weight: Weight
    seen: str
    effect: str


def _serious(seen: str, effect: str) -> list[CheckFinding]:
    return [CheckFinding("", "serious", seen, effect)]


def _minor(seen: str, effect: str) -> list[CheckFinding]:
    return [CheckFinding("", "minor", seen, effect)]


Check: TypeAlias = "Callable[[Evidence], Iterable[CheckFinding]]"


# -- checks of devices

_LEAST_FRAC = 0.01  # of the readings
_CAPPED_FRAC = 0.05
_CLOCK_FRAC = 0.05  # between the 5th and the 95th percentile
_WARMING_C = 5.0
_GAP_S = 1.0
_GAP_INTERVALS = 10
_LOW_LOAD_FRAC = 0.5
_DISAGREE_FRAC = 0.05
_GROWTH_FRAC = 0.01  # from one quarter of the window to the next, of the memory at first


@cached_for_kinds("gpu")
def _gaps(evidence: Evidence, device: Device) -> list[CheckFinding]:
    t_ns = readings(evidence, "power_w", device).t_ns
    within = t_ns[inside(evidence, t_ns)]
    edges = np.concatenate(([evidence.span.start_ns], within, [evidence.span.end_ns]))
    between_s = np.diff(evidence.span.elapsed_ns(edges)) / NS_PER_S  # a cut is no gap
    longest_s, usual_s = float(between_s.max()), float(np.median(between_s))
    if longest_s <= max(_GAP_S, _GAP_INTERVALS * usual_s):
        return []
    observation = f"{_named(evidence, device)} was not read for {duration(longest_s)}"
    share = longest_s / evidence.span.duration_s
    effect = f"its power is unknown for {percent(share)} of the window, its energy at best a total"
    return _serious(observation, effect)


@cached_for_kinds("gpu")
def _throttling(evidence: Evidence, device: Device) -> list[CheckFinding]:
    findings: list[CheckFinding] = []
    for what, mask, otherwise in (
        ("heat", THROTTLE_HEAT, "the same chip when cooled"),
        ("a hardware slowdown", THROTTLE_BRAKE, "the same chip with enough power and cooling"),
    ):
        share = throttled_share(evidence, device, mask)
        if share > _LEAST_FRAC:
            often = f"in {100 * share:.0f} % of the readings"
            observation = f"{_named(evidence, device)}: throttled by {what} {often}"
            effect = f"it is slower than {otherwise}{_clocks(evidence, device)}"
            findings += _serious(observation, effect)
    capped = throttled_share(evidence, device, THROTTLE_POWER_CAP)
    if capped > _CAPPED_FRAC:
        limit_w = device.facts.get("power_limit_w")
        which = f"limit of {limit_w:.0f} W" if limit_w else "limit"
        often = f"in {100 * capped:.0f} % of the readings"
        observation = f"{_named(evidence, device)}: at its power {which} {often}"
        effect = f"the limit sets the speed: compare at the same limit{_clocks(evidence, device)}"
        findings += _minor(observation, effect)
    return findings


def _clocks(evidence: Evidence, device: Device) -> str:
    clocks_hz = or_none(window_values, evidence, "clock_hz", device)
    if clocks_hz is None:
        return ""
    return f"; clock {float(np.median(clocks_hz)) / HZ_PER_MHZ:.0f} MHz (median)"


@cached_for_kinds("gpu")
def _clock(evidence: Evidence, device: Device) -> list[CheckFinding]:
    low, high = np.percentile(window_values(evidence, "clock_hz", device), (5, 95))
    moved = float((high - low) / high) if high else 0.0
    if moved <= _CLOCK_FRAC:
        return []
    mhz = f"{low / HZ_PER_MHZ:.0f} and {high / HZ_PER_MHZ:.0f} MHz"
    observation = f"{_named(evidence, device)}: the clock moved between {mhz}"
    return _minor(observation, f"the speed varies with it, by up to {100 * moved:.0f} %")


@cached_for_kinds("gpu")
def _temperature(evidence: Evidence, device: Device) -> list[CheckFinding]:
    values = window_values(evidence, "temperature_c", device)
    first, most = float(values[0]), float(values.max())
    if most - first < _WARMING_C:
        return []
    observation = (
        f"{_named(evidence, device)}: warmed from {first:.0f} to {most:.0f} °C in the window"
    )
    effect = "a warm chip draws more and clocks lower: leave the warming out with --warmup-s"
    return _minor(observation, effect)


@cached_for_kinds("gpu")
def _load(evidence: Evidence, device: Device) -> list[CheckFinding]:
    busy = mean(evidence, "busy_frac", device)
    if busy >= _LOW_LOAD_FRAC:
        return []
    observation = f"{_named(evidence, device)}: busy {100 * busy:.0f} % of the time"
    effect = "the rest of the program sets the speed: the run says little about the device"
    return _minor(observation, effect)


@cached_for_kinds("gpu")
def _counter(evidence: Evidence, device: Device) -> list[CheckFinding]:
    """Compare a device's energy counter with the integral of its instant power."""
    counter_j, integral_j = counter_and_integral(evidence, device)
    apart = integral_j / counter_j - 1
    if abs(apart) <= _DISAGREE_FRAC:
        return []
    than = f"{100 * abs(apart):.0f} % {'more' if apart > 0 else 'less'} than its counter says"
    observation = f"{_named(evidence, device)}: integrated power is {than}"
    effect = "a sensor is off, or power was read too seldom; the reported energy is the counter's"
    return _serious(observation, effect)


@cached_for_kinds("gpu", "process")
def _growth(evidence: Evidence, device: Device) -> list[CheckFinding]:
    """A finding if memory grows in every quarter of the window."""
    values = window_values(evidence, "memory_bytes", device)
    if len(values) < 8:
        return []
    quarters = np.array([np.median(part) for part in np.array_split(values, 4)])
    if not (np.diff(quarters) > _GROWTH_FRAC * quarters[0]).all():
        return []
    grown = (quarters[3] - quarters[0]) / 1e9
    observation = f"{_named(evidence, device)}: memory only grows, by {grown:.2g} GB in the window"
    return _minor(observation, "a longer run may run out of memory")


def _memory(evidence: Evidence) -> Iterator[CheckFinding]:
    """Findings of memory growth during training; at start-up memory always grows."""
    if not evidence.has_work or not evidence.trains:
        raise NotMeasurable("no training steps were seen, and memory always grows at start-up")
    return _each(evidence, [*evidence.devices("gpu"), *evidence.devices("process")], _growth)


def _named(evidence: Evidence, device: Device) -> str:
    """A device's name, with its id if several devices have that name."""
    alike = [other for other in evidence.devices(device.kind) if other.name == device.name]
    return device.name if len(alike) < 2 else f"{device.name} [{device.id}]"


def _of_gpus(check: Callable[[Evidence, Device], list[CheckFinding]]) -> Check:
    return lambda evidence: _each(evidence, sampled(evidence, "gpu"), check)


def _each(
    evidence: Evidence,
    devices: list[Device],
    check: Callable[[Evidence, Device], list[CheckFinding]],
) -> Iterator[CheckFinding]:
    """The findings of all devices. NotMeasurable only if no device could be checked."""
    reasons: list[str] = []
    for device in devices:
        try:
            yield from check(evidence, device)
        except NotMeasurable as error:
            reason = str(error)
            is_named = device.name in reason
            reasons.append(reason if is_named else f"{_named(evidence, device)}: {reason}")
    if reasons and len(reasons) == len(devices):
        raise NotMeasurable(reasons[0])
    for why in reasons:
        yield from _minor(f"not checked: {why}", "a problem of this device would not show")


# -- checks of the record and of the window

_SHORT_S = 5.0
_FEW_STEPS = 10
_NOISY_FRAC = 0.05  # half the interval, over the rate
_WAITS_FRAC = 0.02  # of the window
_LEFT = "metrics that need it are absent, or cover only what is left"
_MERGED = "totals and rates are exact; a step's time is the mean over its row"
_LOST = ("rows_dropped", "samples_dropped", "handover_failed", "probe_failed", "device_lost")


def _record(evidence: Evidence) -> list[CheckFinding]:
    findings: list[CheckFinding] = []
    if evidence.run.status == CUT_OFF:
        effect = "the window ends with the last records that were written"
        findings += _serious("the run was cut off", effect)
    lost = [f"{dropped}" for dropped in dropped_steps(evidence.run)]
    others = [mark for mark in evidence.run.marks if mark.name in _LOST]
    lost += [f"{mark.name.replace('_', ' ')}: {mark.detail}" for mark in others[:1]]
    for loss in lost:
        findings += _serious(f"part of the record is missing: {loss}", _LEFT)
    for mark in evidence.run.marks:
        if mark.name == "steps_merged":
            findings += _minor(mark.detail, _MERGED)
    for problem in evidence.run.verified():
        findings += _serious(problem, _LEFT)
    if not findings and not evidence.has_work:
        effect = "only the whole run can be compared: its time, energy and memory"
        findings += _minor(evidence.no_work, effect)
    return findings


def _ranks(evidence: Evidence) -> list[CheckFinding]:
    """A finding if some ranks have no steps: their tokens are unknown."""
    why = why_not_all(evidence)
    effect = "tokens are of the other ranks only: metrics per device or per joule are absent"
    if is_declared(evidence):
        effect = "tokens are those declared, not counted on every rank"
    return _serious(why, effect) if why else []


def _company(evidence: Evidence) -> Iterator[CheckFinding]:
    own = {device.id for device in sampled(evidence, "gpu")}
    marks = [mark for mark in evidence.run.marks if mark.detail.partition(" ")[0] in own]
    if not any(mark.name == "device_used" for mark in marks):
        raise NotMeasurable("the processes on the GPU could not be identified")
    for mark in marks:
        if mark.name == "device_shared":
            observation = f"another program computed on a GPU of this run: {mark.detail}"
            yield from _serious(observation, "time, memory and energy are not this run's alone")


def _window(evidence: Evidence) -> list[CheckFinding]:
    lasted_s, rows = evidence.window.duration_s, evidence.counted
    if evidence.trains:
        lane = max(rows.lanes, key=len)
        steps, what = len(lane), _name_of_rows(evidence, lane)
    else:  # a request is up to two rows
        steps, what = int(np.bincount(rows["phase"].astype(int)).max()), "request"
    if lasted_s >= _SHORT_S and steps >= _FEW_STEPS:
        return []
    made, enough = number_of(steps, what), []
    observation = f"{made} in {duration(lasted_s)}"
    if lasted_s < _SHORT_S:
        observation = f"the window is {duration(lasted_s)} long, with {made}"
        enough.append(f"{_SHORT_S:g} s")
    if steps < _FEW_STEPS:
        enough.append(number_of(_FEW_STEPS, what))
    effect = f"too little to separate speed from chance: measure {' and '.join(enough)} or more"
    return _serious(observation, effect)


def _warm_up(evidence: Evidence) -> list[CheckFinding]:
    """A finding if the first counted steps are slower than the rest."""
    _only_equal_rows(evidence)
    if evidence.is_whole_run:
        raise NotMeasurable("a whole run includes its warm-up")
    lane, split = evidence.counted.longest, time_split(evidence)
    if len(lane) < _FEW_STEPS:
        raise NotMeasurable(
            f"{number_of(len(lane), _name_of_rows(evidence, lane))}: too few to tell a slow"
            " beginning from the rest"
        )
    rows = slow_rows(split.left_s)
    if not rows:
        return []
    usual_s = float(np.median(split.left_s))
    early_s = split.left_s[:rows]
    share = float((early_s - usual_s).sum()) / split.whole_s
    slow = int(np.nan_to_num(lane["steps"][:rows], nan=1.0).sum())  # a printed line may be of ten
    which = "the first counted step is" if slow == 1 else f"the first {slow} counted steps are"
    observation = f"{which} up to {early_s.max() / usual_s:.1f} times as slow as the median"
    they, them = ("it costs", "it") if slow == 1 else ("they cost", "them")
    option = _without_first(evidence, lane, rows, slow)
    effect = f"{they} {percent(share)} of the time: {option} leaves {them} out"
    return _serious(observation, effect)


def _without_first(evidence: Evidence, lane: Steps, rows: int, steps: int) -> str:
    """The command-line option that leaves out the first rows of the window."""
    if evidence.settings.steps_range is None:  # the option counts from the run's beginning
        return f"--warmup-steps {int(evidence.warmup()[0]) + steps}"
    first, last = evidence.settings.steps_range
    number = lane["index"][rows]
    start = first + steps if np.isnan(number) else int(number)
    return f"--window {start}:{'' if last is None else last}"


def _noise(evidence: Evidence) -> list[CheckFinding]:
    rate = pace(evidence)
    if rate.low is None or rate.high is None:
        if evidence.is_whole_run:
            raise NotMeasurable("no interval over a whole run: it includes start-up and pauses")
        rows = evidence.counted
        made = number_of(len(rows), _name_of_rows(evidence, rows))
        raise NotMeasurable(f"{made}: too few for an interval, which needs {_FEW_STEPS}")
    half = (rate.high - rate.low) / 2 / rate.value
    if half <= _NOISY_FRAC:
        return []
    effect = f"differences below {100 * half:.0f} % may be chance: measure longer"
    return _serious(f"steps per second are known to ± {100 * half:.0f} %", effect)


def _stalls(evidence: Evidence) -> list[CheckFinding]:
    """A finding if stalls take too much time: steps far above the median, for no named reason."""
    _only_equal_rows(evidence)
    split = time_split(evidence)
    if "stalls" in split.absent:
        raise NotMeasurable(split.absent["stalls"])
    if split.frac("stalls") <= _WAITS_FRAC:
        return []
    observation = (
        f"{split.counts['stalls']} of {len(split.left_s)} steps took twice the median or more,"
        f" up to {duration(split.longest_s['stalls'])} beyond it"
    )
    took = f"{percent(split.frac('stalls'))} of the time"
    effect = (
        f"{took}: find what delays these steps: data loading, checkpoints or logging that is not"
        " a phase of its own"
    )
    if others := or_none(other_programs, evidence):
        effect = f"{took}: {others}, which may have stopped the steps: measure on a quiet machine"
    return _minor(observation, effect)


def _pauses(evidence: Evidence) -> Iterator[CheckFinding]:
    """A finding for each of checkpoints, evaluation and data loading that takes much time."""
    _only_training(evidence)
    split = time_split(evidence)
    effect = "it is part of the window: compare runs that spend as much on it"
    for part in NAMED:
        if split.frac(part) > _WAITS_FRAC:
            times = number_of(split.counts[part], "time")
            took = f"{percent(split.frac(part))} of the window ({duration(split.parts_s[part])}"
            yield from _minor(f"{TITLES[part]} took {took}, {times})", effect)


def _stragglers(evidence: Evidence) -> list[CheckFinding]:
    """A finding if the other ranks wait for a slow one."""
    if len(evidence.counted.lanes) < 2:
        return []
    worst = pace_of_ranks(evidence).straggler()
    if worst.by_frac <= STRAGGLING_FRAC:
        return []
    effect = (
        f"{percent(worst.by_frac)} of each step: look at its data loading, its host and its GPU"
    )
    return _minor(worst.text, effect)


def _only_training(evidence: Evidence) -> None:
    if not evidence.has_work:
        raise NotMeasurable(evidence.no_work)
    if not evidence.trains:
        raise NotMeasurable("requests differ in length: a long one is not a stall")


def _only_equal_rows(evidence: Evidence) -> None:
    """Raise NotMeasurable if rows cover different numbers of steps, or an unknown number."""
    _only_training(evidence)
    for lane in evidence.counted.lanes:
        steps = lane["steps"]
        rows = f"{_name_of_rows(evidence, lane)}s"
        if np.isnan(steps).any():
            raise NotMeasurable(f"{rows} do not state how many steps they cover")
        if steps.min() < steps.max():
            raise NotMeasurable(f"{rows} cover different numbers of steps")


def _name_of_rows(evidence: Evidence, lane: Steps) -> str:
    """The noun for a row of recorded steps: "step", "printed line" or "row"."""
    if (lane["steps"] == 1).all():
        return "step"
    return "printed line" if evidence.from_output else "row"


# -- the FLOP count against the tensor cores

# The GPU's own counters and the count are independent
# measurements of nearly the same work, so each checks the other. A count that is far below the
# tensor cores' activity has missed products (an output head inside the loss, another model,
# generation). A count above it claims products that were never computed: the tokens, the peak or
# the number of devices is wrong.
#
# Activity is per cycle and a peak is at one clock, so activity is scaled by the clock that ran. The
# ratio has the uncertainty of both sides; with a poor counter window there is no verdict at all.

# Products may run outside the tensor cores below this activity, and then nothing can be compared.
ON_TENSOR_CORES_FRAC = 0.05
SHORT_S = 5.0
LEAST_COVERED_FRAC = 0.8
# Tensor-core work over counted FLOPs. Tiles that are not full, masked pairs that a kernel computes
# all the same and scores that fused attention recomputes explain up to about 1.2: an H200 read 1.02
# for a full fine-tuning whose count is exact, 1.68 for one whose output head was not counted.
UNCOUNTED = 1.25
# Even at the edge of its interval the ratio must be beyond this, in either direction.
EXPLAINED = 1.1


@dataclass(frozen=True, slots=True)
class TensorCoreRatio:
    """Tensor-core work / counted FLOPs, with the interval from the uncertainty of both."""

    value: float
    low: float
    high: float
    counted_frac: float  # of the peak
    active_frac: float  # of the peak, at the clock that ran

    @property
    def is_uncounted_work(self) -> bool:
        """True if tensor cores did more work than the FLOP count and kernel overhead explain."""
        return self.value >= UNCOUNTED and self.low > EXPLAINED

    @property
    def is_overcounted(self) -> bool:
        """True if more FLOPs were counted than the tensor cores can have computed."""
        return self.value < 1 / EXPLAINED and self.high < 1 / EXPLAINED


def tensor_core_ratio(evidence: Evidence) -> TensorCoreRatio:
    """Tensor-core work of the window over the FLOPs counted for it.

    Raises NotMeasurable if either is absent, or the counters cover too little of the window.
    """
    counted = of_run(evidence, ALL_WORK)
    if counted.impossible:
        raise NotMeasurable(f"the counted FLOPs are impossible: {counted.impossible}")
    devices = sampled(evidence, "gpu")
    if evidence.span.duration_s < SHORT_S:
        raise NotMeasurable(
            f"the window is {duration(evidence.span.duration_s)}: counters over less than"
            f" {SHORT_S:g} s are too coarse to check the FLOP count"
        )
    for device in devices:
        _need_coverage(evidence, device)
    means = [mean_activity(evidence, "tensor_frac", device, most=1.0) for device in devices]
    value, low, high = (sum(parts) / len(means) for parts in zip(*means, strict=True))
    if value < ON_TENSOR_CORES_FRAC:
        raise NotMeasurable(
            f"tensor cores were active {100 * value:.1f} % of the time, too little to check the"
            " FLOP count: matmuls may run outside them"
        )
    scale = clock_hz(evidence, devices, None)[0] / peak_clock_hz(evidence, devices)
    least = counted.value if counted.low is None else counted.low
    most = counted.value if counted.high is None else counted.high
    if least <= 0:
        raise NotMeasurable(
            "the counted FLOPs may be anything from 0 % of the peak up, as steps differ too much in"
            " length: too uncertain to be checked"
        )
    return TensorCoreRatio(
        value * scale / counted.value,
        low * scale / most,
        high * scale / least,
        counted.value,
        value * scale,
    )


def _need_coverage(evidence: Evidence, device: Device) -> None:
    """Raise NotMeasurable unless the device's hardware counters cover most of the window."""
    series = readings(evidence, "tensor_frac", device)
    window = evidence.span
    begins_ns, ends_ns = evidence.window.clipped(
        begins_ns_of(evidence, device, series.t_ns), series.t_ns
    )
    covered_s = float((ends_ns - begins_ns).sum()) / NS_PER_S
    if covered_s < LEAST_COVERED_FRAC * window.duration_s:
        raise NotMeasurable(
            f"the counters of {device.name} cover {duration(covered_s)} of a window of"
            f" {duration(window.duration_s)}"
        )


def flop_count_contradiction(evidence: Evidence) -> tuple[str, str] | None:
    """Return how tensor cores and counted FLOPs differ, and the effect on MFU; None if they agree.

    Raises NotMeasurable if the two can't be compared.
    """
    ratio = tensor_core_ratio(evidence)
    interval = f"({ratio.low:.2f} to {ratio.high:.2f})"
    shares = (
        f"{100 * ratio.active_frac:.1f} % of the peak by hardware counters,"
        f" {100 * ratio.counted_frac:.1f} % counted"
    )
    effect = ""
    if ratio.is_uncounted_work:
        effect = _what_is_uncounted(evidence)
    elif ratio.is_overcounted:
        effect = "MFU is too high: check the model, its tokens, the peak and the number of devices"
    observation = (
        f"the tensor cores did {ratio.value:.2f} times {interval} the counted FLOPs: {shares}"
    )
    return (observation, effect) if effect else None


def _what_is_uncounted(evidence: Evidence) -> str:
    """Name the work that the FLOP count lacks. MFU itself counts only the trained model."""
    others = evidence.flops[0].other_work
    names = [part.name for part in others or () if part.flops is None]
    if names:
        return f"work beside the trained model was not counted: {', '.join(names)}"
    if others is None:
        return (
            "MFU may be too low: products were not counted, such as a head inside the loss, or"
            " another model or generation ran beside the trained model"
        )
    return "MFU is too low: products were not counted, such as a head inside the loss"


def flop_count_contradictions(evidence: Evidence) -> list[str]:
    """A sentence if tensor cores and counted FLOPs contradict each other; else an empty list."""
    contradiction = or_none(flop_count_contradiction, evidence)
    return ["; ".join(contradiction)] if contradiction else []


def check_flop_count(evidence: Evidence) -> list[CheckFinding]:
    """A finding if the counted FLOPs and the tensor cores contradict each other."""
    contradiction = flop_count_contradiction(evidence)
    return _serious(*contradiction) if contradiction else []


# -- the verdict

Verdict = Literal["fit", "not fit", "not known"]

# "Fit" needs all of these: long enough, steady enough, not throttled. Each of these faults can
# spoil a comparison, and no other check finds it. Other processes on the GPU are not among them: a
# container hides them,
# and their effect shows in the noise.
DECISIVE = ("window", "noise", "throttling")

_CHECK_FAILED = "the check failed"


@dataclass(frozen=True, slots=True)
class Fitness:
    """The result of all checks. `unchecked`: checks that could not be made, with reasons."""

    findings: tuple[CheckFinding, ...]
    unchecked: dict[str, str]
    window: str

    @property
    def verdict(self) -> Verdict:
        """Not fit with a serious finding; fit only if every decisive check was made."""
        if any(finding.weight == "serious" for finding in self.findings):
            return "not fit"
        return "not known" if self.undecided else "fit"

    @property
    def is_fit(self) -> bool:
        """True if the run is known to be fit to be compared."""
        return self.verdict == "fit"

    @property
    def undecided(self) -> tuple[str, ...]:
        """The decisive checks that could not be made."""
        return tuple(name for name in DECISIVE if name in self.unchecked)

    @property
    def passed(self) -> tuple[str, ...]:
        """The checks that were made and found nothing."""
        with_findings = {finding.check for finding in self.findings}
        return tuple(name for name in CHECKS if name not in with_findings | self.unchecked.keys())

    @property
    def text(self) -> str:
        """The verdict as text, with the number of checks made."""
        without, total = len(self.unchecked), len(CHECKS)
        if self.verdict == "not known":
            which = ", ".join(name.replace("_", " ") for name in self.undecided)
            failed = sum(why.startswith(_CHECK_FAILED) for why in self.unchecked.values())
            outcomes = {"could not be made": without - failed, "failed": failed}
            parts = [f"{n} of {total} checks {what}" for what, n in outcomes.items() if n]
            return f"not known: {' and '.join(parts)}, {which} among them"
        word = "fit to be compared" if self.is_fit else "not fit to be compared"
        return f"{word} ({total - without} of {total} checks made)"


def fitness(evidence: Evidence) -> Fitness:
    """Run every check. Serious findings come first."""
    findings: list[CheckFinding] = []
    unchecked: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            findings += [replace(finding, check=name) for finding in check(evidence)]
        except NotMeasurable as error:
            unchecked[name] = str(error)
        except Exception as error:  # noqa: BLE001  a card is shown, whatever is wrong with a check
            unchecked[name] = f"{_CHECK_FAILED}: {type(error).__name__}: {error}"
    ordered = sorted(findings, key=lambda finding: finding.weight != "serious")
    return Fitness(tuple(ordered), unchecked, evidence.window_or_reason)


# In the order in which findings are listed.
CHECKS: dict[str, Check] = {
    "ranks": _ranks,
    "record": _record,
    "window": _window,
    "warm_up": _warm_up,
    "noise": _noise,
    "company": _company,
    "gaps": _of_gpus(_gaps),
    "throttling": _of_gpus(_throttling),
    "flop_count": check_flop_count,
    "counter": _of_gpus(_counter),
    "clock": _of_gpus(_clock),
    "temperature": _of_gpus(_temperature),
    "stalls": _stalls,
    "pauses": _pauses,
    "stragglers": _stragglers,
    "load": _of_gpus(_load),
    "memory": _memory,
}
