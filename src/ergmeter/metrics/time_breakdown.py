"""Time and energy of a whole run by part, and the distribution of its step times.

Each instant of the run belongs to exactly one part, so the parts add up to its duration to the
nanosecond. Time outside of all spans is a part of its own, `unknown`. Joules are those of the same
instants, as far as readings reach.

A step of more than twice the median has a stall: its time beyond the median, at its end. In the
first step that is warm-up. Named spans within a step do not count. A gap between steps has a stall
too, if a median step and the gap take more than twice the median period: the gap's time beyond the
median gap. `erg check` and `erg explain` use periods as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.device_energy import boundary, curve_of
from ergmeter.metrics.energy_curve import merged
from ergmeter.metrics.evidence.samples import cached_result, or_none
from ergmeter.metrics.phases import (
    PHASE_TITLES,
    PRECEDENCE,
    STALL,
    before,
    covered_until_s,
    joined,
    precedence,
    spans_of,
)
from ergmeter.metrics.timeline import seconds
from ergmeter.records import Basis, Device, FloatArray, TimeArray, weakest
from ergmeter.units import NS_PER_S, number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Mask
    from ergmeter.metrics.phases import Spans

# In display order.
PARTS = {
    "startup": "start-up",
    "warmup": "warm-up, compiling",
    **{phase: title for phase, title in PHASE_TITLES.items() if phase != "idle"},
    "stall": "stalls",
    "idle": PHASE_TITLES["idle"],
    "unknown": "not known",
    "end": "after the last span",
}


@dataclass(frozen=True, slots=True)
class TimePart:
    """One part of a run. `joules` is None if unknown."""

    name: str
    title: str
    seconds: float
    time_frac: float
    joules: float | None = None
    joules_frac: float | None = None


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """All parts of a run and their totals."""

    parts: tuple[TimePart, ...]
    whole_s: float
    whole_j: float | None
    why_no_joules: str
    joules_basis: Basis | None
    unread_s: float  # without energy readings
    note: str


@dataclass(frozen=True, slots=True)
class _Owned:
    """The run in adjacent pieces, and the part that owns each."""

    edges_ns: TimeArray  # one more than pieces
    owners: TimeArray  # of each piece, an index in PARTS

    def ns_of(self, part: int) -> int:
        return int(np.diff(self.edges_ns)[self.owners == part].sum())


@cached_result
def time_breakdown(evidence: Evidence) -> TimeBreakdown:
    """The parts of a run. NotMeasurable if it has no spans."""
    owned = _owned(evidence)
    names = list(PARTS)
    found_s = {name: owned.ns_of(names.index(name)) / NS_PER_S for name in names}
    joules, basis, why, unread_s = _joules(evidence, owned)
    whole_s = evidence.watched.duration_s
    whole_j = None if joules is None else sum(joules.values())
    parts = tuple(
        TimePart(
            name,
            title,
            found_s[name],
            found_s[name] / whole_s,
            None if joules is None else joules[name],
            joules[name] / whole_j if joules and whole_j else None,
        )
        for name, title in PARTS.items()
        if found_s[name] > 0
    )
    return TimeBreakdown(parts, whole_s, whole_j, why, basis, unread_s, _note(evidence))


def _note(evidence: Evidence) -> str:
    ranks = len(evidence.all_steps.lanes)
    whose = f"by the spans of the rank that told the most of {ranks}; " if ranks > 1 else ""
    lines = "a step lasts from one printed line to the next; " if evidence.from_output else ""
    others = "another training of this run is start-up or after the last span; "
    others = others if evidence.run.beside else ""
    return f"{whose}{lines}{others}each instant of the run's life belongs to one part"


@cached_result
def _owned(evidence: Evidence) -> _Owned:
    lane = evidence.all_steps.longest
    evidence.work  # noqa: B018  raises the reason if there are no steps
    life = evidence.watched
    layers = _layers(evidence)
    edges_ns = np.unique(
        np.concatenate(
            [[life.start_ns, life.end_ns], *(edge for _, pair in layers for edge in pair)]
        ).astype(np.int64)
    )
    edges_ns = edges_ns[(edges_ns >= life.start_ns) & (edges_ns <= life.end_ns)]
    names = list(PARTS)
    owners = np.full(len(edges_ns) - 1, names.index("unknown"))
    for name, (starts, ends) in reversed(layers):  # the first layer overrides the others
        owners[_covered(edges_ns, starts, ends)] = names.index(name)
    first_ns, last_ns = lane.lowest("start_ns"), lane.highest("end_ns")
    usual_ns, gap_ns = _training(evidence).usual_ns, _training(evidence).gap_ns
    is_long = usual_ns + np.diff(edges_ns) > STALL * (usual_ns + gap_ns)
    long = np.flatnonzero(is_long & (owners == names.index("unknown")))
    owners[long] = names.index("stall")
    if gap_ns:  # the median gap is no stall
        edges_ns = np.insert(edges_ns, long + 1, edges_ns[long] + gap_ns)
        owners = np.insert(owners, long, names.index("unknown"))
    owners[edges_ns[1:] <= first_ns] = names.index("startup")
    owners[edges_ns[:-1] >= last_ns] = names.index("end")
    return _Owned(edges_ns, owners)


def _layers(evidence: Evidence) -> list[tuple[str, Spans]]:
    """Spans by part, from the top layer down; warm-up and stalls are above training steps."""
    layers: list[tuple[str, Spans]] = []
    for phase in precedence(evidence):
        if phase == "train":
            layers += _beyond_plain(evidence)
        layers.append((phase, spans_of(evidence, phase)))
    return layers


def _beyond_plain(evidence: Evidence) -> list[tuple[str, Spans]]:
    """Spans of the warm-up, and of stalls at the ends of steps."""
    train = _training(evidence)
    layers = [("warmup", (train.starts[train.early], train.ends[train.early]))]
    slow = ~train.early & (train.own_ns > STALL * train.usual_ns)
    if not slow.any():
        return layers
    from_ns = _after_ns(train.starts, train.usual_ns, _named(evidence))
    is_first = np.arange(len(slow)) == 0
    for name, mask in (("warmup", slow & is_first), ("stall", slow & ~is_first)):
        layers.append((name, (from_ns[mask], train.ends[mask])))
    return layers


@dataclass(frozen=True, slots=True)
class _Training:
    """Training steps, and the medians of those that are counted."""

    starts: TimeArray
    ends: TimeArray
    early: Mask  # in the warm-up
    own_ns: FloatArray  # without named spans
    usual_ns: float  # infinite if no step is counted
    gap_ns: int  # unaccounted time between two steps


@cached_result
def _training(evidence: Evidence) -> _Training:
    starts, ends = spans_of(evidence, "train")
    window = or_none(lambda: evidence.window)  # None: no step is left after the warm-up
    counted_ns = int(ends.max(initial=0)) if window is None else window.start_ns
    early = (starts + ends) / 2 < counted_ns
    named_ns = np.rint(_covered_ns(_named(evidence), starts, ends))
    own_ns = np.asarray(ends - starts - named_ns, dtype=np.float64)
    usual_ns = float(np.median(own_ns[~early])) if (~early).any() else 0.0
    from_ns, to_ns = ends[~early][:-1], starts[~early][1:]
    gap_ns = 0.0
    if len(from_ns):
        others = [spans_of(evidence, phase) for phase in PRECEDENCE if phase != "train"]
        gap_ns = float(np.median(to_ns - from_ns - _covered_ns(others, from_ns, to_ns)))
    return _Training(starts, ends, early, own_ns, usual_ns or math.inf, max(0, round(gap_ns)))


def _named(evidence: Evidence) -> list[Spans]:
    """The spans of phases that take precedence over a training step."""
    return [spans_of(evidence, phase) for phase in before(evidence, "train")]


def _covered_ns(spans: list[Spans], from_ns: TimeArray, to_ns: TimeArray) -> FloatArray:
    return (covered_until_s(spans, to_ns) - covered_until_s(spans, from_ns)) * NS_PER_S


def _after_ns(starts: TimeArray, usual_ns: float, spans: list[Spans]) -> TimeArray:
    """The time at which each step had run for a median step, without named spans."""
    begins, ends = joined(spans)
    if not len(begins):
        return starts + round(usual_ns)
    held_ns = np.append(0, np.cumsum(ends - begins))
    begun = np.searchsorted(begins, starts, side="right")
    open_ns = np.where(begun > 0, np.maximum(0, ends[np.maximum(begun - 1, 0)] - starts), 0)
    # On a clock that stops during named spans.
    until = starts - held_ns[begun] + open_ns + round(usual_ns)
    passed = np.searchsorted(begins - held_ns[:-1], until, side="left")
    return np.asarray(until + held_ns[passed], dtype=np.int64)


def _covered(edges_ns: TimeArray, starts: TimeArray, ends: TimeArray) -> TimeArray:
    """Indices of the pieces that lie in one of these spans."""
    starts, ends = merged(starts, ends)
    begun = np.searchsorted(starts, edges_ns[:-1], side="right")
    over = np.searchsorted(ends, edges_ns[:-1], side="right")
    return np.flatnonzero(begun > over)


def _joules(
    evidence: Evidence, owned: _Owned
) -> tuple[dict[str, float] | None, Basis | None, str, float]:
    """Joules by part and their basis, or the reason why not; and the seconds without readings."""
    try:
        if evidence.from_output:
            raise NotMeasurable("printed lines do not say when a phase began: a Meter does")
        each = [_of_device(evidence, device, owned) for device in boundary(evidence)]
    except NotMeasurable as error:
        return None, None, str(error), 0.0
    by_piece = np.sum([device[0] for device in each], axis=0)
    joules = {name: float(by_piece[owned.owners == part].sum()) for part, name in enumerate(PARTS)}
    return joules, weakest(*(device[1] for device in each)), "", max(device[2] for device in each)


def _of_device(
    evidence: Evidence, device: Device, owned: _Owned
) -> tuple[FloatArray, Basis, float]:
    curve, basis = curve_of(evidence, device)
    # The first and last time the device was read.
    start_ns, end_ns = int(curve.t_ns[0]), max(int(curve.t_ns[-1]), curve.seen_until_ns)
    edges = np.clip(owned.edges_ns, start_ns, end_ns)
    whole_s = float(owned.edges_ns[-1] - owned.edges_ns[0]) / NS_PER_S
    read_s = float(edges[-1] - edges[0]) / NS_PER_S
    return np.diff(curve.at(edges)), basis, whole_s - read_s


BARS = 40
# The histogram reaches to three times the median: with one step of 40 s in it, all others would be
# in the first bar. Longer steps are counted in `beyond` and listed as outliers.
_REACH = 3.0
_MAX_OUTLIERS = 20


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step of more than twice the median."""

    index: int | None  # by its program's own count
    at_s: float  # since the run began
    took_s: float
    times: float  # multiple of the median


@dataclass(frozen=True)
class StepTimeDistribution:
    """A histogram of the counted step times."""

    edges_s: FloatArray
    counts: TimeArray
    median_s: float
    p95_s: float
    beyond: int  # steps that are longer than the last edge
    outliers: tuple[Outlier, ...]  # the longest first, up to a limit
    stalled: int  # steps of more than twice the median
    note: str


def step_time_distribution(evidence: Evidence) -> StepTimeDistribution:
    """Step times of the rank with the most counted steps. NotMeasurable if there are too few."""
    lane = evidence.counted.longest
    if not evidence.trains:
        raise NotMeasurable("an inference run has requests and no steps: see its latencies")
    if len(lane) < 3:
        raise NotMeasurable(f"{number_of(len(lane), 'counted step')}: too few for a distribution")
    times_s = evidence.periods_s(lane)
    times_s = times_s / np.maximum(np.nan_to_num(lane["steps"], nan=1.0), 1.0)
    median_s = float(np.median(times_s))
    reach_s = _REACH * median_s
    inside = times_s[times_s <= reach_s]
    counts, edges_s = np.histogram(inside, bins=_bars(len(inside)), range=_range(inside))
    slow = np.flatnonzero(times_s > STALL * median_s)
    slow = slow[np.argsort(-times_s[slow], kind="stable")]
    return StepTimeDistribution(
        edges_s,
        counts,
        median_s,
        float(np.percentile(times_s, 95)),
        len(times_s) - len(inside),
        tuple(_outlier(evidence, int(row), times_s, median_s) for row in slow[:_MAX_OUTLIERS]),
        len(slow),
        evidence.window_note,
    )


def _bars(steps: int) -> int:
    """The number of bars: twice the square root of the number of steps."""
    return min(BARS, 2 * math.isqrt(max(1, steps)))


def _range(times_s: FloatArray) -> tuple[float, float]:
    low, high = float(times_s.min()), float(times_s.max())
    # A bar needs some width even if all steps take the same time.
    return (low, high) if high > low else (low * 0.99, low * 1.01 or 1e-9)


def _outlier(evidence: Evidence, row: int, times_s: FloatArray, median_s: float) -> Outlier:
    lane = evidence.counted.longest
    index = float(lane["index"][row])
    took_s = float(times_s[row])
    return Outlier(
        None if np.isnan(index) else int(index),
        seconds(evidence, int(lane["start_ns"][row])),
        took_s,
        took_s / median_s,
    )
