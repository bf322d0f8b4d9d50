"""Where the time of a whole run went, and where its joules went.

The trap: shares of different wholes, which add up to 93 % or to 112 %. Here each instant of the
run's life belongs to exactly one part, so that the parts add up to it to the nanosecond; what no
span accounts for has a part of its own, `unknown`, and is not spread over the others. Joules are
those of the same instants, as far as readings reach; the rest is said.

A step of more than twice the median is a stall by what it has beyond the median, both without the
spans in it that somebody named; which end of the step that is, its times do not say: it is taken
from its end. The first step's is warm-up. The other
way, to call the whole step a stall, would count work as waste. A gap that no span accounts for is a
stall too, by what it has beyond the median gap, where a usual step and the gap behind it take more
than twice the usual period: `erg check` and `erg explain` go by periods as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.energy.device_energy import boundary, curve_of
from ergmeter.metrics.energy.energy_curve import merged
from ergmeter.metrics.evidence.device_cache import cached_per_device
from ergmeter.metrics.explain.time import held_until_s
from ergmeter.records import PHASES, weakest
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.energy.energy_curve import EnergyCurve
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import Basis, Device, FloatArray, TimeArray

_Pieces: TypeAlias = "tuple[TimeArray, TimeArray]"

STALL = 2.0  # times the median step, as `erg check` has it

# In the order in which they are shown.
PARTS = {
    "startup": "start-up",
    "warmup": "warm-up, compiling",
    "data": "waiting for data",
    "train": "training steps",
    "prefill": "reading prompts",
    "decode": "writing answers",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
    "stall": "stalls",
    "idle": "idle spans",
    "unknown": "not known",
    "end": "after the last span",
}
# An instant in several spans belongs to the first of these, as `energy.train_j` and its like do.
_ORDER = ("checkpoint", "eval", "data", "prefill", "decode", "train", "idle")
_BY_DEVICE = ("checkpoint", "eval", "prefill", "decode", "train", "data", "idle")


@dataclass(frozen=True, slots=True)
class TimePart:
    """One part of the run's life. `joules` is None where they are not known."""

    name: str
    title: str
    seconds: float
    time_frac: float
    joules: float | None = None
    joules_frac: float | None = None


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """All parts, and the whole that they add up to."""

    parts: tuple[TimePart, ...]
    whole_s: float
    whole_j: float | None
    why_no_joules: str
    joules_basis: Basis | None
    unread_s: float  # of the run's life, in which no energy was read
    note: str


@dataclass(frozen=True, slots=True)
class _Owned:
    """The life of the run in pieces that touch, and the part each belongs to."""

    edges_ns: TimeArray  # one more than pieces
    owners: TimeArray  # of each piece, a place in PARTS

    def ns_of(self, place: int) -> int:
        return int(np.diff(self.edges_ns)[self.owners == place].sum())


@cached_per_device
def time_breakdown(evidence: Evidence) -> TimeBreakdown:
    """The parts of a run. Raises NotMeasurable where no span was told."""
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


@cached_per_device
def _owned(evidence: Evidence) -> _Owned:
    lane = evidence.all_steps.longest
    evidence.work  # noqa: B018  or the reason why there are no steps
    whole = evidence.watched
    layers = _layers(evidence, lane)
    edges_ns = np.unique(
        np.concatenate(
            [[whole.start_ns, whole.end_ns], *(edge for _, pair in layers for edge in pair)]
        ).astype(np.int64)
    )
    edges_ns = edges_ns[(edges_ns >= whole.start_ns) & (edges_ns <= whole.end_ns)]
    names = list(PARTS)
    owners = np.full(len(edges_ns) - 1, names.index("unknown"))
    for name, (starts, ends) in reversed(layers):  # the first of them has the last word
        owners[_covered(edges_ns, starts, ends)] = names.index(name)
    first_ns, last_ns = lane.lowest("start_ns"), lane.highest("end_ns")
    usual_ns, gap_ns = _usual_ns(evidence, lane), _usual_gap_ns(evidence, lane)
    is_long = usual_ns + np.diff(edges_ns) > STALL * (usual_ns + gap_ns)
    long = np.flatnonzero(is_long & (owners == names.index("unknown")))
    owners[long] = names.index("stall")
    if gap_ns:  # of which so much is no stall
        edges_ns = np.insert(edges_ns, long + 1, edges_ns[long] + gap_ns)
        owners = np.insert(owners, long, names.index("unknown"))
    owners[edges_ns[1:] <= first_ns] = names.index("startup")
    owners[edges_ns[:-1] >= last_ns] = names.index("end")
    return _Owned(edges_ns, owners)


def _layers(evidence: Evidence, lane: Steps) -> list[tuple[str, _Pieces]]:
    """What covers what: the spans of each phase, and within the training what is no plain step."""
    layers: list[tuple[str, _Pieces]] = []
    for phase in _order(lane):
        own = lane.where(lane["phase"] == PHASES.index(phase))
        starts, ends = own["start_ns"].astype(np.int64), own["end_ns"].astype(np.int64)
        if phase == "train" and len(own):
            layers += _beyond_plain(evidence, own)
        layers.append((phase, (starts, ends)))
    return layers


def _beyond_plain(evidence: Evidence, train: Steps) -> list[tuple[str, _Pieces]]:
    """The warm-up, and the ends of steps that took more than twice the median."""
    starts, ends = train["start_ns"].astype(np.int64), train["end_ns"].astype(np.int64)
    early = (starts + ends) / 2 < _counted_ns(evidence, train)
    found = [("warmup", (starts[early], ends[early]))]
    usual_ns = _usual_ns(evidence, train)
    spans = _named(evidence)
    slow = ~early & (_own_ns(train, spans) > STALL * usual_ns)
    if not slow.any():
        return found
    from_ns = _after_ns(starts, usual_ns, spans)
    is_first = np.arange(len(starts)) == 0
    for name, mask in (("warmup", slow & is_first), ("stall", slow & ~is_first)):
        found.append((name, (from_ns[mask], ends[mask])))
    return found


def _usual_ns(evidence: Evidence, lane: Steps) -> float:
    """The median training step that is counted; infinite where there is none to go by."""
    train = lane.where(lane["phase"] == PHASES.index("train"))
    if not len(train) or not evidence.trains:
        return float("inf")
    counted = (train["start_ns"] + train["end_ns"]) / 2 >= _counted_ns(evidence, train)
    times = _own_ns(train, _named(evidence))[counted]
    return float(np.median(times)) if len(times) and np.median(times) > 0 else float("inf")


def _usual_gap_ns(evidence: Evidence, lane: Steps) -> int:
    """The median time between counted training steps that no span accounts for."""
    is_train = lane["phase"] == PHASES.index("train")
    train = lane.where(is_train)
    if len(train):
        middle_ns = (train["start_ns"] + train["end_ns"]) / 2
        train = train.where(middle_ns >= _counted_ns(evidence, train))
    if len(train) < 2:
        return 0
    others = lane.where(~is_train)
    spans = [(others["start_ns"].astype(np.int64), others["end_ns"].astype(np.int64))]
    from_ns, to_ns = train["end_ns"].astype(np.int64)[:-1], train["start_ns"].astype(np.int64)[1:]
    named_s = held_until_s(spans, to_ns) - held_until_s(spans, from_ns)
    return max(0, round(float(np.median(to_ns - from_ns - named_s * NS_PER_S))))


def _named(evidence: Evidence) -> list[_Pieces]:
    """The spans that come before a training step where they lie in it."""
    lane = evidence.all_steps.longest
    order = _order(lane)
    found = []
    for phase in order[: order.index("train")]:
        own = lane.where(lane["phase"] == PHASES.index(phase))
        found.append((own["start_ns"].astype(np.int64), own["end_ns"].astype(np.int64)))
    return found


def _own_ns(train: Steps, spans: list[_Pieces]) -> FloatArray:
    """How long each step took without what was named in it."""
    starts, ends = train["start_ns"].astype(np.int64), train["end_ns"].astype(np.int64)
    named_s = held_until_s(spans, ends) - held_until_s(spans, starts)
    return np.asarray(ends - starts - np.rint(named_s * NS_PER_S), dtype=np.float64)


def _after_ns(starts: TimeArray, usual_ns: float, spans: list[_Pieces]) -> TimeArray:
    """When each step had worked for as long as is usual, what was named in it left out."""
    begins, ends = merged(*(np.concatenate([one[edge] for one in spans]) for edge in (0, 1)))
    if not len(begins):
        return starts + round(usual_ns)
    held_ns = np.append(0, np.cumsum(ends - begins))
    before = np.searchsorted(begins, starts, side="right")
    open_ns = np.where(before > 0, np.maximum(0, ends[np.maximum(before - 1, 0)] - starts), 0)
    # By a clock that stands still in what is named.
    until = starts - held_ns[before] + open_ns + round(usual_ns)
    passed = np.searchsorted(begins - held_ns[:-1], until, side="left")
    return np.asarray(until + held_ns[passed], dtype=np.int64)


def _order(lane: Steps) -> tuple[str, ...]:
    return _ORDER if np.isnan(lane["host_end_ns"]).all() else _BY_DEVICE


def _counted_ns(evidence: Evidence, train: Steps) -> int:
    try:
        return evidence.window.start_ns
    except NotMeasurable:  # no step is left after the warm-up
        return train.highest("end_ns")


def _covered(edges_ns: TimeArray, starts: TimeArray, ends: TimeArray) -> TimeArray:
    """The places of the pieces that lie in one of these spans."""
    starts, ends = merged(starts, ends)
    begun = np.searchsorted(starts, edges_ns[:-1], side="right")
    over = np.searchsorted(ends, edges_ns[:-1], side="right")
    return np.flatnonzero(begun > over)


def _joules(
    evidence: Evidence, owned: _Owned
) -> tuple[dict[str, float] | None, Basis | None, str, float]:
    """By part; how it is known; or why it is not; and the time in which nothing was read."""
    try:
        if evidence.from_output:
            raise NotMeasurable("printed lines do not say when a phase began: a Meter does")
        each = [_of_device(evidence, device, owned) for device in boundary(evidence)]
    except NotMeasurable as error:
        return None, None, str(error), 0.0
    by_piece = np.sum([one[0] for one in each], axis=0)
    found = {name: float(by_piece[owned.owners == place].sum()) for place, name in enumerate(PARTS)}
    return found, weakest(*(one[1] for one in each)), "", max(one[2] for one in each)


def _of_device(
    evidence: Evidence, device: Device, owned: _Owned
) -> tuple[FloatArray, Basis, float]:
    curve, basis = curve_of(evidence, device)
    start_ns, end_ns = _reach(curve)
    edges = np.clip(owned.edges_ns, start_ns, end_ns)
    whole_s = float(owned.edges_ns[-1] - owned.edges_ns[0]) / NS_PER_S
    read_s = float(edges[-1] - edges[0]) / NS_PER_S
    return np.diff(curve.at(edges)), basis, whole_s - read_s


def _reach(curve: EnergyCurve) -> tuple[int, int]:
    """From when to when the device was read."""
    return int(curve.t_ns[0]), max(int(curve.t_ns[-1]), curve.seen_until_ns)
