"""The window of a run's metrics: a list of intervals, what was cut between them, and the warm-up.

The headline is the pace of training. Evaluation, checkpoints and named pauses are cut out of the
window; waits for data and stalls stay in. Tokens, joules and counters all use the same intervals.

A GPU runs behind the host: when the host begins to save, steps that it queued are still being
computed. A cut therefore begins when that work is known to be done: at the end of the last step by
the device's clock, or where the host had a result of it. Where neither is known, the device may
have trained during the whole span. Up to 1 % of the window such spans are cut and widen the
interval; above that they stay in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence.steps import Mask, Steps
from ergmeter.metrics.phases import merged, within
from ergmeter.records import PHASES, FloatArray, Mark, TimeArray, Window
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S, duration, number_of

# Warm-up. Compiling, autotuning and cold caches make the first steps slow. The rule leaves out
# leading steps that each take more than 1.5 times the median of the later ones (docs/concepts.md
# has its constants). MSER, which drops a prefix if the rest looks steadier, dropped 14 of 61 steps
# although one was slow. In a run with occasional slow steps, dropping a slow first step would make
# the run look faster: it stays if more than 5 % of the later steps are at least half as far above
# the median.
#
# All ranks share one instant, the latest that any of them needs. An option, a mark or profiled
# steps replace the rule.

# The rule's constants. docs/concepts.md gives the bias that they leave on stationary step times.
SLOW_FACTOR = 1.5  # times the median of the later steps
MOST_FRAC = 0.2  # of the steps that are looked at
MOST_STEPS = 50
LATER_SLOW_FRAC = 0.05  # of the later steps: with more slow ones, the run is slow throughout
AS_SLOW = 0.5  # a later step is slow if above the median by this share of the leading step's excess
FEW_STEPS = 5  # with fewer, only the first step can be warm-up
LOOKED_AT_STEPS = 250  # 50 are 20 % of them; later steps change nothing

BY_NUMBER = "none: the window is chosen by step numbers"
_RULES = {
    "warmup_end": "until the mark warmup_end",
    "profile_unread": "until the profiled steps were over",
}
_FEW = 5  # steps that must be left after the profiled ones,
_EARLY = 30  # if at most this many came before; else as many as came before


class SingleStep(NotMeasurable):
    """A training of one step, which may be all warm-up."""


@dataclass(frozen=True)
class CountedRows:
    """The rows after the warm-up, when their time begins, and the rule that ended the warm-up."""

    rows: Steps
    start_ns: int
    rule: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlowStart:
    """The result of the warm-up rule for a series of step times."""

    dropped: int  # steps
    slow: int  # leading steps above the factor, also beyond the most that may be dropped
    fast: int  # leading steps below the median by the same factor; they are not dropped


def slow_start(step_s: FloatArray) -> SlowStart:
    """Apply the warm-up rule: compare leading step times with those of the later steps."""
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
    """The number of leading steps that are far from the median, if few later steps are."""
    first = len(is_far) if is_far.all() else int(np.argmin(is_far))
    later_s = beyond_s[first:]
    if not first or not len(later_s):
        return 0
    often = [float((later_s >= AS_SLOW * own).mean()) for own in beyond_s[:first].tolist()]
    seldom = np.array(often) <= LATER_SLOW_FRAC
    return first if seldom.all() else int(np.argmin(seldom))


def ending(marks: Iterable[Mark], work: Steps, settings: Settings) -> Mark | None:
    """Return the mark that ends the warm-up: the user's last, else the end of profiled steps.

    Profiled steps are slower, and training waits until the trace is written, so they are not
    typical. They usually come early; if they come late, they stay in, or most of the run would be
    dropped. A warm-up declared by option ignores them.
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
    """Return the rows after the warm-up. Raises NotMeasurable, with the numbers, if none is left.

    `periods_s` returns the time of each row of a rank. If it is None no warm-up is detected: for
    requests, which differ in length, and where the whole window was asked for.
    """
    if settings.steps_range is not None:
        return _in_range(work, *settings.steps_range)
    if mark is not None:
        return _counted(
            work, lambda lane: lane["start_ns"] >= mark.t_ns, _RULES[mark.name], mark.t_ns
        )
    if (steps := settings.warmup_steps) is not None:
        return _counted(work, lambda lane: lane.steps_before >= steps, number_of(steps, "step"))
    if settings.warmup_s is not None:
        until_ns = settings.warmup_s * NS_PER_S
        rule = f"{settings.warmup_s:g} s"
        return _counted(work, lambda lane: lane["start_ns"] - lane["start_ns"][0] >= until_ns, rule)
    if periods_s is None:
        return CountedRows(work, work.lowest("start_ns"), "none declared")
    return _by_rule(work, periods_s)


def _by_rule(work: Steps, periods_s: Callable[[Steps], FloatArray]) -> CountedRows:
    ends: list[int] = []
    remarks: dict[str, None] = {}
    total = 0.0
    for lane in work.lanes:
        total = max(total, float(lane.step_counts.sum()))
        first = lane.where(np.arange(min(len(lane), LOOKED_AT_STEPS)))
        steps = np.maximum(first.step_counts, 1)
        each = steps.astype(int)
        start = slow_start(np.repeat(periods_s(first) / each, each))
        rows = int((np.cumsum(steps) <= start.dropped).sum())
        if rows:
            ends.append(int(first["end_ns"][:rows].max()))
        own_s = np.repeat((first["end_ns"] - first["start_ns"]) / NS_PER_S / each, each)
        remarks |= dict.fromkeys(_remarks(start, own_s, int(steps[:rows].sum())))
    if total < 2:
        raise SingleStep("1 step: it may be all warm-up, so there is no pace of training")
    rule = f"leading steps above {SLOW_FACTOR:g} times the later median"
    counted = _after(work, max(ends)) if ends else work
    if not ends or not len(counted):  # rows overlap: the first one ends after all others
        return CountedRows(work, work.lowest("start_ns"), rule, tuple(remarks))
    return CountedRows(counted, max(ends), rule, tuple(remarks))


def _remarks(start: SlowStart, own_s: FloatArray, dropped: int) -> list[str]:
    """Remarks on slow leading steps that are counted, and on unusually fast ones.

    `own_s`: each step from its start to its end, without the gap before it.
    """
    if start.slow > dropped:
        left = start.slow - dropped
        which = "1 more slow step" if left == 1 else f"{left} more slow steps"
        most = f"at most {MOST_FRAC:.0%} of the steps and {MOST_STEPS} are left out"
        if len(own_s) < FEW_STEPS:
            most = f"of fewer than {FEW_STEPS} steps only the first is left out"
        return [
            f"after {number_of(dropped, 'step')} of warm-up {which} at the beginning"
            f" {'is' if left == 1 else 'are'} counted: {most}"
            f" (--warmup-steps {start.slow} leaves them all out)"
        ]
    fast_s = float(np.median(own_s[: start.fast])) if start.fast else 0.0
    later_s = float(np.median(own_s[start.fast :]))
    if 0 < fast_s < later_s / SLOW_FACTOR:
        which = "the first step was" if start.fast == 1 else f"the first {start.fast} steps were"
        return [f"{which} {later_s / fast_s:.1f} times as fast as those after, and counted"]
    return []


def _in_range(work: Steps, first: int, last: int | None) -> CountedRows:
    """Return the rows with step numbers from `first` up to, not including, `last`."""

    def inside(lane: Steps) -> Mask:
        number = _numbers(lane)
        return np.asarray((number >= first) & (number < (np.inf if last is None else last)))

    def last_pass(lane: Steps) -> Mask:
        """If step numbers started again, as after a resume, only the last pass over the range."""
        passes = np.cumsum(np.diff(_numbers(lane), prepend=-np.inf) < 0)
        made = passes[inside(lane)]
        return np.asarray(passes == made.max()) if len(made) else np.zeros(len(lane), dtype=bool)

    rows = work.where_each(lambda lane: inside(lane) & last_pass(lane))
    name = f"{first}:{'' if last is None else last}"
    if not len(rows):
        numbers = [_numbers(lane) for lane in work.lanes]
        low, high = min(own.min() for own in numbers), max(own.max() for own in numbers)
        raise NotMeasurable(
            f"--window {name} holds no step: this run's steps are numbered {low:.0f} to {high:.0f}"
        )
    start_ns = _start_of(work, rows, lambda lane: (_numbers(lane) < first) & last_pass(lane))
    return CountedRows(rows, start_ns, BY_NUMBER)


def _numbers(lane: Steps) -> FloatArray:
    """Each row's step number; if one is unknown, the number of steps before each row."""
    index = lane["index"]
    return lane.steps_before if np.isnan(index).any() else index


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
    start_ns = _start_of(work, rows, lambda lane: lane.middle_ns < max(firsts))
    return CountedRows(rows, max(start_ns, at_least_ns), rule)


def _after(work: Steps, instant_ns: int) -> Steps:
    """The rows that lie mostly after an instant: ranks do not start a step at the same time."""
    return work.where_each(lambda lane: lane.middle_ns >= instant_ns)


def _start_of(work: Steps, rows: Steps, is_before: Callable[[Steps], Mask]) -> int:
    """When the time of `rows` begins: at the end of the last row before, else at their start."""
    before = work.where_each(is_before)
    return before.highest("end_ns") if len(before) else rows.lowest("start_ns")


def _why_none(lane: Steps, rule: str) -> str:
    lasted = duration((int(lane["end_ns"].max()) - int(lane["start_ns"][0])) / NS_PER_S)
    steps = int(lane.step_counts.sum())
    return (
        f"the run is shorter than its warm-up: {number_of(steps, 'step')} in {lasted},"
        f" warm-up {rule}"
    )


# The window and its cuts.

TRAINING, WHOLE_RUN, REQUESTS, WATCHED = "training", "whole", "requests", "watched"
# From the end of a declared warm-up to the last step, without cuts: for rows stored without a kind.
UNBROKEN = "unbroken"

CUT_PHASES = ("eval", "checkpoint", "idle")
UNCERTAIN_FRAC = 0.01  # of the window: spans with an uncertain beginning are cut up to this total

_NAMES = {"eval": "evaluation", "checkpoint": "checkpoints", "idle": "pauses"}
_NONE: TimeArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class WindowCut:
    """The time of one phase that was cut from the window, or that a remark says was not."""

    phase: str
    spans: int
    seconds: float

    def __str__(self) -> str:
        return f"{duration(self.seconds)} of {_NAMES[self.phase]}"


@dataclass(frozen=True)
class TrainingWindow:
    """The window: ordered intervals that do not touch, and the phases cut out between them."""

    kind: str  # training, whole, unbroken, "steps A:B"; requests, watched
    starts_ns: TimeArray
    ends_ns: TimeArray
    cuts: tuple[WindowCut, ...] = ()
    uncertain: tuple[TimeArray, TimeArray] = field(default=(_NONE, _NONE))  # of what was cut
    remarks: tuple[str, ...] = ()  # what stayed in, and why

    @classmethod
    def single(cls, kind: str, start_ns: int, end_ns: int) -> TrainingWindow:
        """A window without cuts."""
        return cls(kind, np.array([start_ns]), np.array([end_ns]))

    @property
    def start_ns(self) -> int:
        """The start of the first interval."""
        return int(self.starts_ns[0])

    @property
    def end_ns(self) -> int:
        """The end of the last interval."""
        return int(self.ends_ns[-1])

    @property
    def duration_s(self) -> float:
        """The total length of the intervals."""
        return int((self.ends_ns - self.starts_ns).sum()) / NS_PER_S

    @property
    def uncertain_s(self) -> float:
        """The time in cuts during which the device may have trained."""
        return int((self.uncertain[1] - self.uncertain[0]).sum()) / NS_PER_S

    @property
    def outer(self) -> Window:
        """From the start of the first interval to the end of the last, cuts included."""
        return Window(self.start_ns, self.end_ns)

    def elapsed_ns(self, t_ns: TimeArray | FloatArray) -> TimeArray:
        """Nanoseconds of the window that passed before each instant; cuts do not count."""
        edges = np.column_stack((self.starts_ns, self.ends_ns)).ravel()
        lengths = np.column_stack((np.zeros_like(self.starts_ns), self.ends_ns - self.starts_ns))
        passed = np.cumsum(lengths.ravel())
        instants: Any = np.asarray(t_ns)
        edge = np.clip(np.searchsorted(edges, instants, side="right") - 1, 0, len(edges) - 1)
        within = np.where(edge % 2 == 0, instants - edges[edge], 0)  # after a start: inside
        return np.asarray(passed[edge] + np.maximum(within, 0), dtype=np.int64)

    def contains(self, t_ns: TimeArray | FloatArray) -> Mask:
        """A mask of the instants that lie in the window, edges included."""
        instants: Any = np.asarray(t_ns)
        interval = np.searchsorted(self.starts_ns, instants, side="right") - 1
        return np.asarray((interval >= 0) & (instants <= self.ends_ns[np.maximum(interval, 0)]))

    def clipped(self, starts: TimeArray, ends: TimeArray) -> tuple[TimeArray, TimeArray]:
        """The parts of these spans that lie in the window."""
        starts, ends = merged(starts.astype(np.int64), ends.astype(np.int64))
        return intersected((starts, ends), (self.starts_ns, self.ends_ns))

    def periods_s(self, lane: Steps, start_ns: int) -> FloatArray:
        """Seconds of each row of a rank, with the gap before it and without cuts.

        From the end of one row to the end of the next; for the first row, from `start_ns`.
        """
        passed = self.elapsed_ns(np.append(start_ns, np.maximum.accumulate(lane["end_ns"])))
        return np.asarray(np.diff(passed) / NS_PER_S, dtype=np.float64)


def intersected(
    first: tuple[TimeArray, TimeArray], second: tuple[TimeArray, TimeArray]
) -> tuple[TimeArray, TimeArray]:
    """The time covered by both lists of spans. Spans within a list must not overlap."""
    edges = np.unique(np.concatenate([*first, *second]))
    if len(edges) < 2:
        return _NONE, _NONE
    begins = edges[:-1]
    inside = np.ones(len(begins), dtype=bool)
    for starts, ends in (first, second):
        inside &= within(begins, starts, ends)
    return merged(begins[inside], edges[1:][inside])


def without(window: Window, starts: TimeArray, ends: TimeArray) -> tuple[TimeArray, TimeArray]:
    """Return the starts and ends of what is left of a window without these spans."""
    starts, ends = merged(starts, ends)
    begins = np.append(window.start_ns, np.clip(ends, window.start_ns, window.end_ns))
    finishes = np.append(np.clip(starts, window.start_ns, window.end_ns), window.end_ns)
    some = finishes > begins
    return begins[some], finishes[some]


def without_named(outer: Window, all_steps: Steps) -> TrainingWindow:
    """The window without evaluation, checkpoints and pauses that overlap no step."""
    spans = _spans(all_steps, outer, printed=False, on_gpu=False)
    out = spans.where(spans.is_cut)
    return TrainingWindow(TRAINING, *without(outer, out.begin_ns, out.end_ns))


def _naming_lane(all_steps: Steps) -> Steps:
    """The rank with the most evaluation, checkpoint and idle time: often only rank 0 has any."""

    def named_ns(lane: Steps) -> float:
        rows = lane.of_phase(*CUT_PHASES)
        return float((rows["end_ns"] - rows["start_ns"]).sum())

    return max(all_steps.lanes, key=named_ns)


def training_window(
    kind: str, outer: Window, all_steps: Steps, *, printed: bool, on_gpu: bool
) -> TrainingWindow:
    """Return the window from `outer.start_ns` to `outer.end_ns`, with other phases cut out.

    `printed`: rows are printed lines; a printed loss proves that the GPU finished that step.
    `on_gpu`: the host's clock alone does not prove it.
    """
    spans = _spans(all_steps, outer, printed=printed, on_gpu=on_gpu)
    cut, is_done = spans.is_cut, spans.is_known
    remarks: list[str] = []
    beside = spans.where(spans.is_beside)
    remarks += [
        f"{cut_out} overlaps training steps, and is in the window" for cut_out in beside.tally()
    ]
    uncertain_ns = int((spans.end_ns - spans.begin_ns)[cut & ~is_done].sum())
    left_ns = outer.end_ns - outer.start_ns - spans.where(cut).union_ns()
    if uncertain_ns > UNCERTAIN_FRAC * left_ns:
        remarks += [
            f"{span} stays in the window: it is not known when the GPU finished the steps before"
            for span in spans.where(cut & ~is_done).tally()
        ]
        cut &= is_done
    out = spans.where(cut)
    starts, ends = without(outer, out.begin_ns, out.end_ns)
    unsure = out.where(~out.is_known)
    uncertain = merged(unsure.begin_ns, unsure.end_ns)
    return TrainingWindow(kind, starts, ends, out.tally(), uncertain, tuple(remarks))


@dataclass(frozen=True)
class _Spans:
    """Evaluation, checkpoint and idle spans, with the begin and end of the cut for each."""

    phase: TimeArray
    begin_ns: TimeArray
    end_ns: TimeArray
    is_known: Mask  # the GPU is known to have finished earlier steps when the cut begins
    is_beside: Mask  # training continued during the span

    @property
    def is_cut(self) -> Mask:
        return np.asarray(~self.is_beside & (self.end_ns > self.begin_ns))

    def where(self, mask: Mask) -> _Spans:
        return _Spans(*(getattr(self, column.name)[mask] for column in fields(self)))

    def union_ns(self) -> int:
        starts, ends = merged(self.begin_ns, self.end_ns)
        return int((ends - starts).sum())

    def tally(self) -> tuple[WindowCut, ...]:
        """The time of each phase. Time in several spans counts for the first of `CUT_PHASES`."""
        cuts, before_ns = [], 0
        numbers = [PHASES.index(phase) for phase in CUT_PHASES]
        for at, phase in enumerate(CUT_PHASES):
            spans = int((self.phase == numbers[at]).sum())
            upto_ns = self.where(np.isin(self.phase, numbers[: at + 1])).union_ns()
            if upto_ns > before_ns:
                cuts.append(WindowCut(phase, spans, (upto_ns - before_ns) / NS_PER_S))
            before_ns = upto_ns
        return tuple(cuts)


def _spans(all_steps: Steps, outer: Window, *, printed: bool, on_gpu: bool) -> _Spans:
    """The spans of one rank, as ranks work in step, fitted to the training steps of all ranks."""
    lane = _naming_lane(all_steps)
    rows = lane.of_phase(*CUT_PHASES)
    rows = rows.where((rows["end_ns"] > outer.start_ns) & (rows["start_ns"] < outer.end_ns))
    if not len(rows):
        nothing = np.empty(0, dtype=bool)
        return _Spans(_NONE, _NONE, _NONE, nothing, nothing)
    start_ns, end_ns = rows["start_ns"].astype(np.int64), rows["end_ns"].astype(np.int64)
    host = host_times(rows)
    train = lane.of_phase("train")
    begin_ns, finish_ns = host[0].copy(), np.maximum(end_ns, host[1])
    begin_ns, finish_ns, is_beside, by_device = _against(
        train, host, begin_ns, finish_ns, is_own=True
    )
    is_done = by_device | (not on_gpu)
    if printed and len(train):
        is_done |= _is_synchronised(train, start_ns)
    for other in _other_lanes(all_steps, lane):
        steps = other.of_phase("train")
        begin_ns, finish_ns, beside, _ = _against(steps, host, begin_ns, finish_ns, is_own=False)
        is_beside |= beside
    begin_ns, finish_ns = (
        np.clip(np.where(is_beside, own, edge), outer.start_ns, outer.end_ns)
        for own, edge in zip(host, (begin_ns, finish_ns), strict=True)
    )
    phase = rows["phase"].astype(np.int64)
    return _Spans(phase, begin_ns, finish_ns, np.asarray(is_done), is_beside)


def _other_lanes(all_steps: Steps, lane: Steps) -> Iterator[Steps]:
    own = lane["lane"][0]
    return (other for other in all_steps.lanes if len(other) and other["lane"][0] != own)


def host_times(rows: Steps) -> tuple[TimeArray, TimeArray]:
    """When the host began and ended each row, even if the row's times are the device's."""
    times = []
    for edge in ("start_ns", "end_ns"):
        host, own = rows[f"host_{edge}"], rows[edge]
        times.append(np.where(np.isnan(host), own, host).astype(np.int64))
    return times[0], times[1]


def _is_synchronised(train: Steps, begin_ns: TimeArray) -> Mask:
    """True where the line before a span printed a loss: the GPU had finished that step by then."""
    before = np.searchsorted(train["end_ns"], begin_ns, side="right") - 1
    has_loss = ~np.isnan(train["loss"])
    return np.asarray((before < 0) | has_loss[np.maximum(before, 0)])


def _against(
    train: Steps,
    host: tuple[TimeArray, TimeArray],
    begin_ns: TimeArray,
    finish_ns: TimeArray,
    *,
    is_own: bool,
) -> tuple[TimeArray, TimeArray, Mask, Mask]:
    """Fit cuts to one rank's training steps.

    Return the cuts' begins and ends, whether the rank trained during each span, and whether the
    end of the step before each is by the device's clock.
    """
    count = len(begin_ns)
    if not len(train):
        return begin_ns, finish_ns, np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
    train = train.where(np.argsort(host_times(train)[0], kind="stable"))
    steps_from, steps_to = host_times(train)
    done_ns = np.maximum.accumulate(train["end_ns"].astype(np.int64))
    from_ns, to_ns = host
    # Steps that the host began before the span: the cut begins when all of them are done.
    begun = np.searchsorted(steps_from, from_ns, side="left")
    last = np.maximum(begun - 1, 0)
    has_before = begun > 0
    encloses = has_before & (steps_to[last] > to_ns)
    begin_ns = np.where(has_before & ~encloses, np.maximum(begin_ns, done_ns[last]), begin_ns)
    # The first step that the host began within the span, or after it.
    following = np.minimum(begun, len(train) - 1)
    is_within = (begun < len(train)) & (steps_from[following] < to_ns)
    beside = is_within & (steps_to[following] <= to_ns)
    if is_own:
        beside |= encloses
        finish_ns = np.where(is_within, np.minimum(finish_ns, steps_from[following]), finish_ns)
    by_device = ~has_before | ~np.isnan(train["host_end_ns"])[last]
    return begin_ns, finish_ns, np.asarray(beside), np.asarray(by_device)


def cuts_text(cuts: Sequence[WindowCut]) -> str:
    """`, without 8.1 s of evaluation and 2.3 s of checkpoints`; "" where nothing was cut."""
    return f", without {' and '.join(map(str, cuts))}" if cuts else ""
