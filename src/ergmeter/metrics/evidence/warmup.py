"""Which steps are warm-up: a slow beginning, by a rule that a live view can follow.

Compiling, autotuning and cold caches make the first steps slow. The rule leaves out leading steps
that each take more than 1.5 times the median of the later ones, and nothing else (docs/concepts.md
has it with its constants). Two traps. Dropping a prefix because it makes the rest look steadier
(MSER) dropped 14 of 61 steps where one was slow. And in a run whose steps are slow now and then,
dropping a first step just because it is slow makes the run look faster than it is: a step stays in
where more than 5 % of the later ones are at least half as far above the median.

All ranks share one instant, the latest that any of them needs. An option, a mark or profiled steps
take the rule's place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.units import NS_PER_S, duration, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ergmeter.metrics.evidence.steps import Mask, Steps
    from ergmeter.records import FloatArray, Mark
    from ergmeter.runlog.settings import Settings

# The rule. docs/concepts.md gives the bias that these leave on stationary step times.
SLOW_FACTOR = 1.5  # times the median of the later steps
MOST_FRAC = 0.2  # of the steps that are looked at
MOST_STEPS = 50
LATER_SLOW_FRAC = 0.05  # of the later steps, above which slow steps are this run's nature:
AS_SLOW = 0.5  # those that are above the median by this share of what the leading one is
FEW_STEPS = 5  # with fewer, only the first step can be warm-up
LOOKED_AT_STEPS = 250  # 50 are 20 % of them; later steps change nothing

BY_NUMBER = "none: the window is chosen by step numbers"
_RULES = {
    "warmup_end": "until the mark warmup_end",
    "profile_unread": "until the profiled steps were over",
}
_FEW = 5  # steps that must be left once the profile is over,
_EARLY = 30  # if it came so early; else as many as there were before


class SingleStep(NotMeasurable):
    """A training of one step: which may be all warm-up."""


@dataclass(frozen=True)
class CountedRows:
    """The rows that are counted, where their time begins, and by which rule."""

    rows: Steps
    start_ns: int
    rule: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlowStart:
    """What the rule finds at the beginning of a series of step times."""

    dropped: int  # steps
    slow: int  # leading steps above the factor: more than are dropped where there are too many
    fast: int  # leading steps as far below the median: they are counted


def slow_start(step_s: FloatArray) -> SlowStart:
    """How many leading steps are warm-up, by their times and those of the steps after them."""
    step_s = step_s[:LOOKED_AT_STEPS]
    total = len(step_s)
    if total < 2:
        return SlowStart(0, 0, 0)
    most = min(int(MOST_FRAC * total), MOST_STEPS) if total >= FEW_STEPS else 1
    usual_s = float(np.median(step_s[most:]))
    beyond_s = step_s - usual_s
    slow = _leading(step_s > SLOW_FACTOR * usual_s, beyond_s)
    fast = _leading(step_s < usual_s / SLOW_FACTOR, -beyond_s)
    return SlowStart(min(slow, most), slow, fast)


def _leading(is_far: Mask, beyond_s: FloatArray) -> int:
    """How many steps at the beginning are far from the usual, as few of the later ones are."""
    first = len(is_far) if is_far.all() else int(np.argmin(is_far))
    later_s = beyond_s[first:]
    if not first or not len(later_s):
        return 0
    often = [float((later_s >= AS_SLOW * own).mean()) for own in beyond_s[:first].tolist()]
    seldom = np.array(often) <= LATER_SLOW_FRAC
    return first if seldom.all() else int(np.argmin(seldom))


def ending(marks: Iterable[Mark], work: Steps, settings: Settings) -> Mark | None:
    """The mark that ends the warm-up: the user's last; else where profiled steps were over.

    A profiled step is slower, and the profiler holds the training up until its trace is written:
    neither is what the training is like. They come early unless somebody wants them late, and then
    most of the run is not thrown away for them. A declared warm-up is taken as it is declared.
    """
    ends = list(marks)
    users = [mark for mark in ends if mark.name == "warmup_end"]
    if users:
        return users[-1]
    profiled = [mark for mark in ends if mark.name == "profile_unread"]
    if not profiled or any(way is not None for way in settings.warmups):
        return None
    last = max(profiled, key=lambda mark: mark.t_ns)
    for lane in work.lanes:
        left = int((lane["start_ns"] >= last.t_ns).sum())
        before = len(lane) - left
        if left < (_FEW if before <= _EARLY else before):
            return None
    return last


def after_warmup(
    work: Steps,
    settings: Settings,
    mark: Mark | None,
    periods_s: Callable[[Steps], FloatArray] | None,
) -> CountedRows:
    """The rows that are counted. Raises NotMeasurable, with the numbers, if none is left.

    `periods_s` gives the time of each row of a rank; None for requests, which differ in length and
    have no warm-up of their own.
    """
    if settings.steps_range is not None:
        return _in_range(work, *settings.steps_range)
    if mark is not None:
        return _counted(
            work, lambda lane: lane["start_ns"] >= mark.t_ns, _RULES[mark.name], mark.t_ns
        )
    if settings.warmup_steps is not None:
        return _counted(work, _by_count(settings.warmup_steps), _declared(settings))
    if settings.warmup_s is not None:
        return _counted(work, _by_time(settings.warmup_s), _declared(settings))
    if periods_s is None:
        return CountedRows(work, work.lowest("start_ns"), "none declared")
    return _by_rule(work, periods_s)


def _by_rule(work: Steps, periods_s: Callable[[Steps], FloatArray]) -> CountedRows:
    ends: list[int] = []
    remarks: dict[str, None] = {}
    total = 0.0
    for lane in work.lanes:
        total = max(total, float(_steps(lane).sum()))
        first = lane.where(np.arange(min(len(lane), LOOKED_AT_STEPS)))
        steps = np.maximum(_steps(first), 1)
        each = steps.astype(int)
        step_s = np.repeat(periods_s(first) / each, each)
        found = slow_start(step_s)
        rows = int((np.cumsum(steps) <= found.dropped).sum())
        if rows:
            ends.append(int(first["end_ns"][:rows].max()))
        own_s = np.repeat((first["end_ns"] - first["start_ns"]) / NS_PER_S / each, each)
        remarks |= dict.fromkeys(_remarks(found, own_s, int(steps[:rows].sum())))
    if total < 2:
        raise SingleStep("1 step: it may be all warm-up, so there is no pace of training")
    rule = f"leading steps above {SLOW_FACTOR:g} times the later median"
    counted = _after(work, max(ends)) if ends else work
    if not ends or not len(counted):  # rows that overlap: the first ends after all others
        return CountedRows(work, work.lowest("start_ns"), rule, tuple(remarks))
    return CountedRows(counted, max(ends), rule, tuple(remarks))


def _remarks(found: SlowStart, own_s: FloatArray, dropped: int) -> list[str]:
    """`own_s`: each step from its start to its end. The first has no gap before it to carry."""
    if found.slow > dropped:
        left = found.slow - dropped
        which = "1 more slow step" if left == 1 else f"{left} more slow steps"
        most = f"at most {MOST_FRAC:.0%} of the steps and {MOST_STEPS} are left out"
        if len(own_s) < FEW_STEPS:
            most = f"of fewer than {FEW_STEPS} steps only the first is left out"
        return [
            f"after {number_of(dropped, 'step')} of warm-up {which} at the beginning"
            f" {'is' if left == 1 else 'are'} counted: {most}"
            f" (--warmup-steps {found.slow} leaves them all out)"
        ]
    fast_s = float(np.median(own_s[: found.fast])) if found.fast else 0.0
    later_s = float(np.median(own_s[found.fast :]))
    if 0 < fast_s < later_s / SLOW_FACTOR:
        which = "the first step was" if found.fast == 1 else f"the first {found.fast} steps were"
        return [f"{which} {later_s / fast_s:.1f} times as fast as those after, and counted"]
    return []


def _in_range(work: Steps, first: int, last: int | None) -> CountedRows:
    """Steps by their own numbers, the last not included."""

    def inside(lane: Steps) -> Mask:
        number = _numbers(lane)
        return np.asarray((number >= first) & (number < (np.inf if last is None else last)))

    def last_pass(lane: Steps) -> Mask:
        """Where numbers began again, as after a resume, the last time that they were made."""
        passes = np.cumsum(np.diff(_numbers(lane), prepend=-np.inf) < 0)
        made = passes[inside(lane)]
        return np.asarray(passes == made.max()) if len(made) else np.zeros(len(lane), dtype=bool)

    rows = work.where_each(lambda lane: inside(lane) & last_pass(lane))
    name = f"{first}:{'' if last is None else last}"
    if not len(rows):
        numbers = [_numbers(lane) for lane in work.lanes]
        low, high = min(one.min() for one in numbers), max(one.max() for one in numbers)
        raise NotMeasurable(
            f"--window {name} holds no step: this run's steps are numbered {low:.0f} to {high:.0f}"
        )
    start_ns = _start_of(work, rows, lambda lane: (_numbers(lane) < first) & last_pass(lane))
    return CountedRows(rows, start_ns, BY_NUMBER)


def _numbers(lane: Steps) -> FloatArray:
    """Each row's number; where there is none, how many steps came before it."""
    steps = _steps(lane)
    index = lane["index"]
    return np.cumsum(steps) - steps if np.isnan(index).any() else index


def _counted(
    work: Steps, asked: Callable[[Steps], Mask], rule: str, at_least_ns: int = 0
) -> CountedRows:
    firsts = []
    for lane in work.lanes:
        mask = asked(lane)
        if not mask.any():
            raise NotMeasurable(_why_none(lane, rule))
        firsts.append(int(lane["start_ns"][int(np.argmax(mask))]))
    rows = _after(work, max(firsts))
    start_ns = _start_of(work, rows, lambda lane: _middle(lane) < max(firsts))
    return CountedRows(rows, max(start_ns, at_least_ns), rule)


def _after(work: Steps, instant_ns: int) -> Steps:
    """Ranks start a step within a moment of each other: it counts if most of it lies after."""
    return work.where_each(lambda lane: _middle(lane) >= instant_ns)


def _start_of(work: Steps, rows: Steps, is_before: Callable[[Steps], Mask]) -> int:
    """The end of the last step that is not counted; else the start of the first."""
    before = work.where_each(is_before)
    return before.highest("end_ns") if len(before) else rows.lowest("start_ns")


def _middle(lane: Steps) -> FloatArray:
    return (lane["start_ns"] + lane["end_ns"]) / 2


def _steps(lane: Steps) -> FloatArray:
    return np.nan_to_num(lane["steps"], nan=1.0)


def _by_count(number: int) -> Callable[[Steps], Mask]:
    return lambda lane: np.asarray(np.cumsum(_steps(lane)) - _steps(lane) >= number)


def _by_time(seconds: float) -> Callable[[Steps], Mask]:
    return lambda lane: np.asarray(lane["start_ns"] - lane["start_ns"][0] >= seconds * NS_PER_S)


def _declared(settings: Settings) -> str:
    if settings.warmup_steps is not None:
        return number_of(settings.warmup_steps, "step")
    return f"{settings.warmup_s:g} s"


def _why_none(lane: Steps, rule: str) -> str:
    lasted = duration((int(lane["end_ns"].max()) - int(lane["start_ns"][0])) / NS_PER_S)
    steps = int(_steps(lane).sum())
    return (
        f"the run is shorter than its warm-up: {number_of(steps, 'step')} in {lasted},"
        f" warm-up {rule}"
    )
