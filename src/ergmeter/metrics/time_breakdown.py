"""Time and energy of a whole run by part, and the distribution of its step times.

Each instant of the run belongs to exactly one part, so the parts add up to its duration to the
nanosecond. Time outside of all spans is a part of its own, `unknown`. Joules are those of the same
instants, as far as readings reach.

Stalls are those of `erg explain` and `erg check` (`phases.beyond_median`). A stall is placed at the
end of the gap before its step, up to the time by which that gap exceeds the median gap; the rest is
placed at the end of the step. A slow beginning within the window is placed in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.device_energy import boundary, curve_of
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import cached_result
from ergmeter.metrics.phases import (
    PHASE_TITLES,
    PRECEDENCE,
    STALL,
    Spans,
    before,
    beyond_in_gap,
    beyond_median,
    covered_until_s,
    joined,
    merged,
    precedence,
    spans_of,
    why_no_stalls,
    within,
)
from ergmeter.metrics.timeline import seconds
from ergmeter.records import Basis, Device, FloatArray, TimeArray, or_none, weakest
from ergmeter.units import NS_PER_S, number_of

# In display order.
PARTS = {
    "startup": "start-up",
    "warmup": "warm-up, compiling",
    "slow_start": "a slow beginning",
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
    unread_s: float  # seconds without energy readings
    note: str


@cached_result
def time_breakdown(evidence: Evidence) -> TimeBreakdown:
    """Return the parts of a run. NotMeasurable if it has no spans."""
    edges_ns, owners = _owned(evidence)
    pieces_ns = np.diff(edges_ns)
    parts_s = {
        name: int(pieces_ns[owners == part].sum()) / NS_PER_S for part, name in enumerate(PARTS)
    }
    joules, basis, why, unread_s = _joules(evidence, edges_ns, owners)
    whole_s = evidence.watched.duration_s
    whole_j = None if joules is None else sum(joules.values())
    parts = tuple(
        TimePart(
            name,
            title,
            parts_s[name],
            parts_s[name] / whole_s,
            None if joules is None else joules[name],
            joules[name] / whole_j if joules and whole_j else None,
        )
        for name, title in PARTS.items()
        if parts_s[name] > 0
    )
    return TimeBreakdown(parts, whole_s, whole_j, why, basis, unread_s, _note(evidence))


def _note(evidence: Evidence) -> str:
    ranks = len(evidence.all_steps.lanes)
    whose = f"by the spans of the rank with the most spans of {ranks}; " if ranks > 1 else ""
    lines = "a step lasts from one printed line to the next; " if evidence.from_output else ""
    others = "another training of this run is start-up or after the last span; "
    others = others if evidence.run.beside else ""
    stalls = _slow(evidence).why_no_stalls
    stalls = f"; no stalls: {stalls}" if stalls else ""
    return f"{whose}{lines}{others}each instant of the run's life belongs to one part{stalls}"


@cached_result
def _owned(evidence: Evidence) -> tuple[TimeArray, TimeArray]:
    """Cut the run into pieces; return their edges, and each piece's part as an index in PARTS."""
    lane = evidence.all_steps.longest
    evidence.work  # noqa: B018  raises the reason if there are no steps
    life = evidence.watched
    layers = list(_layers(evidence))
    edges_ns = np.unique(
        np.concatenate(
            [[life.start_ns, life.end_ns], *(edge for _, pair in layers for edge in pair)]
        ).astype(np.int64)
    )
    edges_ns = edges_ns[(edges_ns >= life.start_ns) & (edges_ns <= life.end_ns)]
    names = list(PARTS)
    owners = np.full(len(edges_ns) - 1, names.index("unknown"))
    for name, (starts, ends) in reversed(layers):  # the first layer overrides the others
        owners[within(edges_ns[:-1], *merged(starts, ends))] = names.index(name)
    first_ns, last_ns = lane.lowest("start_ns"), lane.highest("end_ns")
    owners[edges_ns[1:] <= first_ns] = names.index("startup")
    owners[edges_ns[:-1] >= last_ns] = names.index("end")
    return edges_ns, owners


def _layers(evidence: Evidence) -> Iterator[tuple[str, Spans]]:
    """Yield (part, spans); an instant in several belongs to the first: warm-up before steps."""
    slow = _slow(evidence)
    for phase in precedence(evidence):
        if phase == "train":
            yield from slow.in_steps
        yield (phase, spans_of(evidence, phase))
    yield from slow.in_gaps


@dataclass(frozen=True, slots=True)
class _Slow:
    """Spans of warm-up, slow beginning and stalls: those within steps, and those between steps."""

    in_steps: list[tuple[str, Spans]]
    in_gaps: list[tuple[str, Spans]]
    why_no_stalls: str


@cached_result
def _slow(evidence: Evidence) -> _Slow:
    train = evidence.all_steps.longest.of_phase("train")
    starts, ends = train.columns["start_ns"], train.columns["end_ns"]
    early = np.zeros(len(train), dtype=bool)
    if evidence.settings.steps_range is None:  # steps that a user leaves out are no warm-up
        window = or_none(lambda: evidence.window)  # None: no step is left after the warm-up
        counted_ns = int(ends.max(initial=0)) if window is None else window.start_ns
        early = (starts + ends) / 2 < counted_ns
    in_steps = [("warmup", (starts[early], ends[early]))]
    if early.all():
        return _Slow(in_steps, [], "")
    why = why_no_stalls(train.where(~early), from_output=evidence.from_output)
    if why:
        return _Slow(in_steps, [], why)
    first_ns = ends[early].max() if early.any() else starts[0]
    starts, ends = starts[~early], ends[~early]
    edges_ns = np.maximum.accumulate(np.append(first_ns, ends))  # spans may overlap
    since, ends = edges_ns[:-1], edges_ns[1:]
    starts = np.clip(starts, since, ends)
    named = [spans_of(evidence, phase) for phase in before(evidence, "train")]
    others = [spans_of(evidence, phase) for phase in PRECEDENCE if phase != "train"]
    step_ns = ends - starts - _covered_ns(named, starts, ends)
    gap_ns = starts - since - _covered_ns(others, since, starts)
    in_gaps = []
    slow_start, stalls = beyond_median(step_ns + gap_ns)
    beyond = slow_start + stalls
    in_gap = beyond_in_gap(gap_ns, beyond)
    step_slow_ns = np.minimum(_after_ns(starts, step_ns - (beyond - in_gap), named), ends)
    gap_slow_ns = np.minimum(_after_ns(since, gap_ns - in_gap, others), starts)
    for name, is_slow in (("slow_start", slow_start > 0), ("stall", stalls > 0)):
        in_steps.append((name, (step_slow_ns[is_slow], ends[is_slow])))
        in_gaps.append((name, (gap_slow_ns[is_slow], starts[is_slow])))
    return _Slow(in_steps, in_gaps, "")


def _covered_ns(spans: list[Spans], from_ns: TimeArray, to_ns: TimeArray) -> FloatArray:
    return (covered_until_s(spans, to_ns) - covered_until_s(spans, from_ns)) * NS_PER_S


def _after_ns(starts: TimeArray, own_ns: FloatArray, spans: list[Spans]) -> TimeArray:
    """The time when `own_ns` have passed since each start, not counting these spans."""
    begins, ends = joined(spans)
    own = np.rint(own_ns).astype(np.int64)
    if not len(begins):
        return starts + own
    held_ns = np.append(0, np.cumsum(ends - begins))
    begun = np.searchsorted(begins, starts, side="right")
    open_ns = np.where(begun > 0, np.maximum(0, ends[np.maximum(begun - 1, 0)] - starts), 0)
    # On a clock that stops during these spans.
    until = starts - held_ns[begun] + open_ns + own
    passed = np.searchsorted(begins - held_ns[:-1], until, side="left")
    return np.asarray(until + held_ns[passed], dtype=np.int64)


def _joules(
    evidence: Evidence, edges_ns: TimeArray, owners: TimeArray
) -> tuple[dict[str, float] | None, Basis | None, str, float]:
    """Return joules by part, their basis, the reason if there are none, and seconds not read."""
    try:
        if evidence.from_output:
            raise NotMeasurable("printed lines do not show when a phase began; a Meter does")
        each = [_of_device(evidence, device, edges_ns) for device in boundary(evidence)]
    except NotMeasurable as error:
        return None, None, str(error), 0.0
    by_piece = np.sum([device[0] for device in each], axis=0)
    joules = {name: float(by_piece[owners == part].sum()) for part, name in enumerate(PARTS)}
    return joules, weakest(*(device[1] for device in each)), "", max(device[2] for device in each)


def _of_device(
    evidence: Evidence, device: Device, edges_ns: TimeArray
) -> tuple[FloatArray, Basis, float]:
    curve, basis = curve_of(evidence, device)
    # The first and last time the device was read.
    start_ns, end_ns = int(curve.t_ns[0]), max(int(curve.t_ns[-1]), curve.seen_until_ns)
    edges = np.clip(edges_ns, start_ns, end_ns)
    whole_s = float(edges_ns[-1] - edges_ns[0]) / NS_PER_S
    read_s = float(edges[-1] - edges[0]) / NS_PER_S
    return np.diff(curve.at(edges)), basis, whole_s - read_s


BARS = 40
# The histogram ends at three times the median: if it included a step of 40 s, all others would be
# in the first bar. Longer steps are counted in `beyond` and listed as outliers.
_REACH = 3.0
_MAX_OUTLIERS = 20


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step of more than twice the median."""

    index: int | None  # the step number by the program's count
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
    times_s = times_s / np.maximum(lane.step_counts, 1.0)
    median_s = float(np.median(times_s))
    inside = times_s[times_s <= _REACH * median_s]
    bars = min(BARS, 2 * math.isqrt(max(1, len(inside))))
    low_s, high_s = float(inside.min()), float(inside.max())
    if low_s == high_s:  # a bar needs some width even if all steps take the same time
        low_s, high_s = low_s * 0.99, low_s * 1.01 or 1e-9
    counts, edges_s = np.histogram(inside, bins=bars, range=(low_s, high_s))
    slow = np.flatnonzero(times_s > STALL * median_s)
    slow = slow[np.argsort(-times_s[slow], kind="stable")]
    outliers = tuple(
        Outlier(
            None if np.isnan(lane["index"][row]) else int(lane["index"][row]),
            seconds(evidence, int(lane["start_ns"][row])),
            float(times_s[row]),
            float(times_s[row]) / median_s,
        )
        for row in slow[:_MAX_OUTLIERS].tolist()
    )
    return StepTimeDistribution(
        edges_s,
        counts,
        median_s,
        float(np.percentile(times_s, 95)),
        len(times_s) - len(inside),
        outliers,
        len(slow),
        evidence.window_note,
    )
