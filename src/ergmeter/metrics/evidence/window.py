"""The time that a run's metrics are over: a list of intervals, and what was cut out between them.

The headline is the pace of training. Evaluation, checkpoints and named pauses are cut out of the
window; waits for data and stalls stay in. Tokens, joules and counters all use the same intervals.

A GPU runs behind the host: when the host begins to save, steps that it queued are still being
computed. A cut therefore begins when that work is known to be done: at the end of the last step by
the device's clock, or where the host had a result of it. Where neither is known, the device may
have trained during the whole span. Up to 1 % of the window such spans are cut and widen the
interval; above that they stay in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.metrics.energy.energy_curve import merged
from ergmeter.records import PHASES, Window
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ergmeter.metrics.evidence.steps import Mask, Steps
    from ergmeter.records import FloatArray, TimeArray

TRAINING, WHOLE, REQUESTS, WATCHED = "training", "whole", "requests", "watched"
# From the end of a declared warm-up to the last step, nothing cut: rows stored without a kind.
UNBROKEN = "unbroken"

CUT_PHASES = ("eval", "checkpoint", "idle")
UNCERTAIN_FRAC = 0.01  # of the window, up to which spans of uncertain beginning are cut

_NAMES = {"eval": "evaluation", "checkpoint": "checkpoints", "idle": "pauses"}
_TRAIN = PHASES.index("train")
_NONE: TimeArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class WindowCut:
    """What was left out of the window, or could have been, under one name."""

    phase: str
    spans: int
    seconds: float

    def __str__(self) -> str:
        return f"{duration(self.seconds)} of {_NAMES[self.phase]}"


@dataclass(frozen=True)
class TrainingWindow:
    """Intervals in order that do not touch, of one kind, with what was cut out between them."""

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
        """The length of all intervals together."""
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
        """The time of the window that has passed at each instant. It stands still in a cut."""
        edges = np.column_stack((self.starts_ns, self.ends_ns)).ravel()
        lengths = np.column_stack((np.zeros_like(self.starts_ns), self.ends_ns - self.starts_ns))
        passed = np.cumsum(lengths.ravel())
        instants: Any = np.asarray(t_ns)
        place = np.clip(np.searchsorted(edges, instants, side="right") - 1, 0, len(edges) - 1)
        within = np.where(place % 2 == 0, instants - edges[place], 0)  # after a start: inside
        return np.asarray(passed[place] + np.maximum(within, 0), dtype=np.int64)

    def contains(self, t_ns: TimeArray | FloatArray) -> Mask:
        """Which instants lie in the window, its edges included."""
        instants: Any = np.asarray(t_ns)
        place = np.searchsorted(self.starts_ns, instants, side="right") - 1
        return np.asarray((place >= 0) & (instants <= self.ends_ns[np.maximum(place, 0)]))

    def clipped(self, starts: TimeArray, ends: TimeArray) -> tuple[TimeArray, TimeArray]:
        """The parts of these spans that lie in the window."""
        starts, ends = merged(starts.astype(np.int64), ends.astype(np.int64))
        return intersected((starts, ends), (self.starts_ns, self.ends_ns))

    def periods_s(self, lane: Steps, start_ns: int) -> FloatArray:
        """The time that each row of a rank took, with the gap before it and without cuts.

        From the end of one row to the end of the next, the first from `start_ns` on.
        """
        ends = np.maximum.accumulate(lane["end_ns"])
        passed = self.elapsed_ns(np.append(start_ns, ends))
        return np.asarray(np.diff(passed) / NS_PER_S, dtype=np.float64)


def intersected(
    one: tuple[TimeArray, TimeArray], other: tuple[TimeArray, TimeArray]
) -> tuple[TimeArray, TimeArray]:
    """The time that is in both of two lists of spans. Spans of each list must not overlap."""
    edges = np.unique(np.concatenate([*one, *other]))
    if len(edges) < 2:
        return _NONE, _NONE
    begins = edges[:-1]
    inside = np.ones(len(begins), dtype=bool)
    for starts, ends in (one, other):
        place = np.searchsorted(starts, begins, side="right") - 1
        inside &= (place >= 0) & (begins < (ends[np.maximum(place, 0)] if len(ends) else 0))
    return merged(begins[inside], edges[1:][inside])


def without(window: Window, starts: TimeArray, ends: TimeArray) -> tuple[TimeArray, TimeArray]:
    """What is left of a window without these spans."""
    starts, ends = merged(starts, ends)
    begins = np.append(window.start_ns, np.clip(ends, window.start_ns, window.end_ns))
    finishes = np.append(np.clip(starts, window.start_ns, window.end_ns), window.end_ns)
    some = finishes > begins
    return begins[some], finishes[some]


def without_named(outer: Window, all_steps: Steps) -> TrainingWindow:
    """The same without any span that has another name and overlaps no step, however uncertain."""
    spans = _spans(all_steps, outer, printed=False, on_gpu=False)
    out = spans.where(spans.is_cut)
    return TrainingWindow(TRAINING, *without(outer, out.begin_ns, out.end_ns))


def _named(lane: Steps) -> Steps:
    """A rank's spans that are no training."""
    return lane.where(np.isin(lane["phase"], [PHASES.index(phase) for phase in CUT_PHASES]))


def _naming_lane(all_steps: Steps) -> Steps:
    """The rank with the most time in such spans: often rank 0 alone saves and evaluates."""

    def named_ns(lane: Steps) -> float:
        rows = _named(lane)
        return float((rows["end_ns"] - rows["start_ns"]).sum())

    return max(all_steps.lanes, key=named_ns)


def training_window(
    kind: str, outer: Window, all_steps: Steps, *, printed: bool, on_gpu: bool
) -> TrainingWindow:
    """The window from `outer.start_ns` to `outer.end_ns` without what is no training.

    `printed`: rows are printed lines; one with a loss shows that its step was done. `on_gpu`: the
    host's clock alone does not show it.
    """
    spans = _spans(all_steps, outer, printed=printed, on_gpu=on_gpu)
    cut, known = spans.is_cut, spans.is_known
    remarks: list[str] = []
    beside = spans.where(spans.is_beside)
    remarks += [f"{one} overlaps training steps, and is in the window" for one in beside.tally()]
    uncertain_ns = int((spans.end_ns - spans.begin_ns)[cut & ~known].sum())
    left_ns = outer.end_ns - outer.start_ns - spans.where(cut).union_ns()
    if uncertain_ns > UNCERTAIN_FRAC * left_ns:
        remarks += [
            f"{one} is in the window: when the GPU had done the steps before it is not known"
            for one in spans.where(cut & ~known).tally()
        ]
        cut &= known
    out = spans.where(cut)
    starts, ends = without(outer, out.begin_ns, out.end_ns)
    unsure = out.where(~out.is_known)
    uncertain = merged(unsure.begin_ns, unsure.end_ns)
    return TrainingWindow(kind, starts, ends, out.tally(), uncertain, tuple(remarks))


@dataclass(frozen=True)
class _Spans:
    """Spans that are no training, each with where its cut begins and ends."""

    phase: TimeArray
    begin_ns: TimeArray
    end_ns: TimeArray
    is_known: Mask  # that the work before it was done when the cut begins
    is_beside: Mask  # that training went on meanwhile

    @property
    def is_cut(self) -> Mask:
        return np.asarray(~self.is_beside & (self.end_ns > self.begin_ns))

    def where(self, mask: Mask) -> _Spans:
        return _Spans(
            self.phase[mask],
            self.begin_ns[mask],
            self.end_ns[mask],
            self.is_known[mask],
            self.is_beside[mask],
        )

    def union_ns(self) -> int:
        starts, ends = merged(self.begin_ns, self.end_ns)
        return int((ends - starts).sum())

    def tally(self) -> tuple[WindowCut, ...]:
        """The time under each name. An instant in several spans belongs to the first."""
        return tuple(self._tally())

    def _tally(self) -> Iterator[WindowCut]:
        before = 0
        for place, phase in enumerate(CUT_PHASES):
            wanted = [PHASES.index(one) for one in CUT_PHASES[: place + 1]]
            own = self.where(self.phase == PHASES.index(phase))
            upto = self.where(np.isin(self.phase, wanted)).union_ns()
            if len(own.phase) and upto > before:
                yield WindowCut(phase, len(own.phase), (upto - before) / NS_PER_S)
            before = upto


def _spans(all_steps: Steps, outer: Window, *, printed: bool, on_gpu: bool) -> _Spans:
    """Of one rank, as ranks work in step. Each is checked against the steps of all."""
    lane = _naming_lane(all_steps)
    rows = _named(lane)
    near = (rows["end_ns"] > outer.start_ns) & (rows["start_ns"] < outer.end_ns)
    rows = rows.where(np.asarray(near))
    if not len(rows):
        nothing = np.empty(0, dtype=bool)
        return _Spans(_NONE, _NONE, _NONE, nothing, nothing)
    start_ns, end_ns = rows["start_ns"].astype(np.int64), rows["end_ns"].astype(np.int64)
    host = _host_times(rows)
    train = lane.where(lane["phase"] == _TRAIN)
    begin_ns, finish_ns = host[0].copy(), np.maximum(end_ns, host[1])
    begin_ns, finish_ns, is_beside, by_device = _against(
        train, host, begin_ns, finish_ns, is_own=True
    )
    known = by_device | (not on_gpu)
    if printed and len(train):
        known |= _is_synchronised(train, start_ns)
    for other in _other_lanes(all_steps, lane):
        steps = other.where(other["phase"] == _TRAIN)
        begin_ns, finish_ns, beside, _ = _against(steps, host, begin_ns, finish_ns, is_own=False)
        is_beside |= beside
    begin_ns, finish_ns = (
        np.clip(np.where(is_beside, own, found), outer.start_ns, outer.end_ns)
        for own, found in zip(host, (begin_ns, finish_ns), strict=True)
    )
    phase = rows["phase"].astype(np.int64)
    return _Spans(phase, begin_ns, finish_ns, np.asarray(known), is_beside)


def _other_lanes(all_steps: Steps, lane: Steps) -> Iterator[Steps]:
    own = lane["lane"][0]
    return (one for one in all_steps.lanes if len(one) and one["lane"][0] != own)


def _host_times(rows: Steps) -> tuple[TimeArray, TimeArray]:
    """When the host began and ended each row, also where the device's times are its times."""
    found = []
    for edge in ("start_ns", "end_ns"):
        host, own = rows[f"host_{edge}"], rows[edge]
        found.append(np.where(np.isnan(host), own, host).astype(np.int64))
    return found[0], found[1]


def _is_synchronised(train: Steps, begin_ns: TimeArray) -> Mask:
    """Whether the line before each span printed a loss, which the host must have had by then."""
    place = np.searchsorted(train["end_ns"], begin_ns, side="right") - 1
    has_loss = ~np.isnan(train["loss"])
    return np.asarray((place < 0) | has_loss[np.maximum(place, 0)])


def _against(
    train: Steps,
    host: tuple[TimeArray, TimeArray],
    begin_ns: TimeArray,
    finish_ns: TimeArray,
    *,
    is_own: bool,
) -> tuple[TimeArray, TimeArray, Mask, Mask]:
    """The cuts as one rank's steps allow them, whether it trained meanwhile, and whether the end of
    the step before each is by the device's clock."""
    count = len(begin_ns)
    if not len(train):
        return begin_ns, finish_ns, np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
    order = np.argsort(_host_times(train)[0], kind="stable")
    train = train.where(order)
    steps_from, steps_to = _host_times(train)
    done_ns = np.maximum.accumulate(train["end_ns"].astype(np.int64))
    from_ns, to_ns = host
    # Steps that the host began before the span: all of them are to be done.
    begun = np.searchsorted(steps_from, from_ns, side="left")
    last = np.maximum(begun - 1, 0)
    has_before = begun > 0
    encloses = has_before & (steps_to[last] > to_ns)
    begin_ns = np.where(has_before & ~encloses, np.maximum(begin_ns, done_ns[last]), begin_ns)
    # The first that it began within the span, or after.
    following = np.minimum(begun, len(train) - 1)
    is_within = (begun < len(train)) & (steps_from[following] < to_ns)
    beside = is_within & (steps_to[following] <= to_ns)
    if is_own:
        beside |= encloses
        finish_ns = np.where(is_within, np.minimum(finish_ns, steps_from[following]), finish_ns)
    by_device = ~has_before | ~np.isnan(train["host_end_ns"])[last]
    return begin_ns, finish_ns, np.asarray(beside), np.asarray(by_device)


def in_words(cuts: Sequence[WindowCut]) -> str:
    """`, without 8.1 s of evaluation and 2.3 s of checkpoints`; "" where nothing was cut."""
    return f", without {' and '.join(map(str, cuts))}" if cuts else ""
