"""How did the runs of a comparison go, each over its steps, its tokens, its time?

The trap: a curve that stands for a run and is of something else. Of many devices the sum of what
they drew, and none where one of them said nothing; of memory that of the fullest device, which is
what `erg compare` has; of tokens those of all ranks. A run that has no curve has the reason, and
no line at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np

from ergmeter.errors import ErgmeterError, NotMeasurable
from ergmeter.metrics.breakdown import timeline
from ergmeter.metrics.definitions.tokens import WHICH_TOKENS, need_all_rows, steps_in, tokens
from ergmeter.metrics.energy.device_energy import boundary
from ergmeter.metrics.evidence.gauges import highest_of, readings, sampled, why_absent
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Missing
from ergmeter.runlog.reader import Run
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ergmeter.compare.entry import Entry
    from ergmeter.compare.grouping import Group
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import Basis, Device, FloatArray
    from ergmeter.runlog.settings import Settings

# -- progress --------------------------------------------------------------------------------------
# How far was a run at an instant: after how many steps, how many tokens, how much time?
#
# The trap: two runs laid side by side by the clock on the wall, or each from where its own warm-up
# ended. A loss after a million tokens is after all of them, so all three count from the start of
# the run's first step, be it warm-up or not. (The other way, from the counted window on, would
# shift losses of runs whose warm-ups differ.) What lies between steps, an evaluation say, takes
# time and is no step.


Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")


class RunProgress:
    """A run from the start of its first step to the end of its last."""

    def __init__(self, evidence: Evidence) -> None:
        """Raises NotMeasurable for a run without steps."""
        self._evidence = evidence
        self.zero_ns = evidence.work.lowest("start_ns")
        self.end_ns = evidence.work.highest("end_ns")

    def at(self, axis: Axis, t_s: FloatArray) -> FloatArray:
        """Where the run was at these instants, which are seconds since its first step began.

        Within a step it is on its way. Raises NotMeasurable where the run can't tell.
        """
        if axis == "time":
            return t_s
        evidence = self._evidence
        if not evidence.trains:
            raise NotMeasurable("an inference run has requests and no steps")
        need_all_rows(evidence)
        if axis == "step":
            lane = evidence.work.longest
            return self._made(lane, steps_in(lane), t_s)
        amounts, _, _ = tokens(evidence, evidence.work)
        made = np.zeros(len(t_s))
        for lane, own in zip(evidence.work.lanes, amounts, strict=True):
            made += self._made(lane, own, t_s)
        return made

    def seconds(self, t_ns: FloatArray) -> FloatArray:
        """Instants of the run's clock, since the first step began."""
        return (t_ns - self.zero_ns) / NS_PER_S

    def _made(self, lane: Steps, amounts: FloatArray, t_s: FloatArray) -> FloatArray:
        """What the rows of a rank had amounted to at these instants."""
        edges_ns = np.stack([lane["start_ns"], lane["end_ns"]], axis=1).ravel()
        # Printed lines may begin before the one before them ended; what is made stays made.
        edges_s = np.maximum.accumulate(self.seconds(edges_ns))
        so_far = np.repeat(np.insert(np.cumsum(amounts), 0, 0.0), 2)[1:-1]
        return np.interp(t_s, edges_s, so_far)


# -- courses ---------------------------------------------------------------------------------------


Curve = Literal["tokens_per_s", "step_s", "loss", "power_w", "device_bytes", "host_bytes"]
CURVES: tuple[Curve, ...] = (
    *("tokens_per_s", "step_s", "loss", "power_w", "device_bytes", "host_bytes"),
)
# What can be told apart: groups by their colour, repeats by their dashes; and lines in all.
GROUPS, REPEATS, LINES = 8, 6, 12
_POINTS = 2400  # of a curve, all runs together, whatever their length
_MOST = 600  # of one run
NO_DIRECTORY = "a ledger's row has no steps and no samples: name the run's directory"


@dataclass(frozen=True)
class Course:
    """A curve of a run in a bounded number of points, of which none beyond was left out.

    `x` says where each of them lies, on the axes that the run can tell. A NaN is a break.
    """

    x: Mapping[Axis, FloatArray]
    values: FloatArray
    readings: int
    basis: Basis
    note: str = ""

    @property
    def is_bounded(self) -> bool:
        """Whether some readings were left out."""
        return self.readings > int(np.isfinite(self.values).sum())

    @property
    def lowest(self) -> float:
        """The lowest reading."""
        return float(np.nanmin(self.values))

    @property
    def highest(self) -> float:
        """The highest reading."""
        return float(np.nanmax(self.values))

    @property
    def last(self) -> float:
        """The last reading."""
        return float(self.values[np.isfinite(self.values)][-1])

    def end(self, axis: Axis) -> float | None:
        """How far it reaches on an axis; None where the run can't tell."""
        return float(self.x[axis].max()) if axis in self.x else None


@dataclass(frozen=True)
class Traced:
    """A run of a comparison: whose it is, its curves, and on which axes it can't be laid."""

    group: int  # its place among those of the comparison
    repeat: int
    source: str
    curves: Mapping[Curve, Course | Missing]
    lacking: Mapping[Axis, str]


@dataclass(frozen=True)
class Courses:
    """The runs that are traced, and how many more there are: with a directory, and without one."""

    runs: tuple[Traced, ...]
    left_out: int
    without: int

    @property
    def curves(self) -> tuple[Curve, ...]:
        """What to show: what somebody has, step time only where tokens/s are not known of all, and
        of memory one, as that of a device and of its host are no two of a kind."""
        had = {
            curve: [isinstance(run.curves[curve], Course) for run in self.runs] for curve in CURVES
        }
        shown = [curve for curve in CURVES if any(had[curve])]
        if all(had["tokens_per_s"]) and "step_s" in shown:
            shown.remove("step_s")
        if "device_bytes" in shown and "host_bytes" in shown:
            shown.remove("host_bytes")
        return tuple(shown)


def courses(groups: Sequence[Group], settings: Settings | None = None) -> Courses:
    """The curves of some runs of each group."""
    known = [[entry for entry in group.entries if entry.run is not None] for group in groups]
    chosen = _chosen(known)
    points = min(_MOST, _POINTS // max(1, len(chosen)))
    runs = tuple(
        _traced(known[group][repeat], group, repeat, settings, points=points)
        for group, repeat in chosen
    )
    with_one = sum(map(len, known))
    everyone = sum(len(group.entries) for group in groups)
    return Courses(runs, with_one - len(runs), everyone - with_one)


def _chosen(known: list[list[Entry]]) -> list[tuple[int, int]]:
    """Which runs: the first of each of the first groups, then the second ones, so many in all."""
    places = [(group, own) for group, own in enumerate(known) if own][:GROUPS]
    each = [[(group, repeat) for repeat in range(len(own))][:REPEATS] for group, own in places]
    in_turn = [one for one in chain.from_iterable(zip_longest(*each)) if one is not None]
    return sorted(in_turn[:LINES])


def _traced(
    entry: Entry, group: int, repeat: int, settings: Settings | None, *, points: int
) -> Traced:
    assert entry.run is not None
    try:
        run = Run.open(entry.run)
        run = run if entry.training is None else run.training(entry.training)
        evidence = evidence_of(run, settings)
        progress = RunProgress(evidence)
    except ErgmeterError as error:
        nothing = dict.fromkeys(CURVES, Missing(str(error)))
        return Traced(group, repeat, entry.source, nothing, {})
    lacking: dict[Axis, str] = {}
    for axis in AXES:
        try:
            progress.at(axis, np.zeros(1))
        except NotMeasurable as error:
            lacking[axis] = str(error)
    axes = tuple(axis for axis in AXES if axis not in lacking)
    curves = {curve: _course(evidence, progress, curve, axes, points=points) for curve in CURVES}
    return Traced(group, repeat, entry.source, curves, lacking)


def _course(
    evidence: Evidence, progress: RunProgress, curve: Curve, axes: Sequence[Axis], *, points: int
) -> Course | Missing:
    try:
        series, basis, note = _SERIES[curve](evidence, progress)
        line = timeline.bounded(_inside(series, progress), zero_ns=progress.zero_ns, points=points)
    except NotMeasurable as error:
        return Missing(str(error))
    t_s, values = line.t_s, line.values
    if curve in _OF_STEPS:  # between two steps nothing was missed: no breaks
        whole = np.isfinite(values)
        t_s, values = t_s[whole], values[whole]
    x = {axis: progress.at(axis, t_s) for axis in axes}
    return Course(x, values, line.readings, basis, note)


def _inside(series: Series, progress: RunProgress) -> Series:
    """What lies between the start of the first step and the end of the last."""
    first = int(np.searchsorted(series.t_ns, progress.zero_ns))
    last = int(np.searchsorted(series.t_ns, progress.end_ns, side="right"))
    part = Series(series.t_ns[first:last], series.values[first:last])
    if not np.isfinite(part.values).any():
        raise NotMeasurable(
            "no reading between the start of the first step and the end of the last"
        )
    return part


_Told = tuple[Series, "Basis", str]


def _tokens_per_s(evidence: Evidence, progress: RunProgress) -> _Told:
    """Of each step, at its end: the tokens of all ranks since the end of the step before, over that
    time without evaluation, checkpoints and pauses."""
    _, label, basis = tokens(evidence, evidence.work)
    lane = evidence.work.longest
    lasted_s = evidence.all_periods_s(lane)
    edges_ns = np.append(lane["start_ns"][:1], lane["end_ns"])
    made = np.diff(progress.at("tokens", progress.seconds(edges_ns)))
    took = lasted_s > 0
    return (
        Series(lane["end_ns"].astype(np.int64)[took], made[took] / lasted_s[took]),
        basis,
        WHICH_TOKENS[label],
    )


def _step_s(evidence: Evidence, _progress: RunProgress) -> _Told:
    way = "from one printed line" if evidence.from_output else "from each step's end"
    return timeline.step_series(evidence), evidence.steps_basis, f"{way} to the next"


def _loss(evidence: Evidence, _progress: RunProgress) -> _Told:
    series, is_printed = timeline.loss_series(evidence)
    return series, "reported", "as printed: no step tells it" if is_printed else ""


def _power_w(evidence: Evidence, _progress: RunProgress) -> _Told:
    """What the devices drew together whose energy is the run's."""
    devices = boundary(evidence)
    told = [_power_of(evidence, device) for device in devices]
    is_rate = any(by_counter for _, by_counter in told)
    notes = ["by how a counter grew: the mean since the reading before"] if is_rate else []
    if len(told) == 1:
        return told[0][0], "derived" if is_rate else "measured", "".join(notes)
    notes.insert(0, f"sum of {len(told)} devices, when the one that is read most often was read")
    return _sum([series for series, _ in told]), "derived", "; ".join(notes)


def _power_of(evidence: Evidence, device: Device) -> tuple[Series, bool]:
    """Its power, and whether that is by its counter."""
    said = evidence.series("power_w").get(device.id)
    if said is not None and np.isfinite(said.values).any():
        return said, False
    counter = evidence.series("energy_j").get(device.id)
    if counter is None or len(counter.t_ns) < 2:
        why = (
            why_absent(device, "power_w")
            or "no power reading, and no two readings of its energy counter"
        )
        raise NotMeasurable(f"no power of {device.name} [{device.id}]: {why}")
    grown = timeline.rate(counter)
    if not np.isfinite(grown.values).any():
        raise NotMeasurable(
            f"no power of {device.name} [{device.id}]: its energy counter never grew"
        )
    return grown, True


def _sum(parts: list[Series]) -> Series:
    """All together at the times of the one that has the most, others straight between their
    readings; nothing where one of them was not read for a while."""
    t_ns = max(parts, key=lambda one: len(one.t_ns)).t_ns
    total = np.zeros(len(t_ns))
    for part in parts:
        told = np.isfinite(part.values)
        own_ns, values = part.t_ns[told], part.values[told]
        after = np.searchsorted(own_ns, t_ns).clip(1, len(own_ns) - 1)
        apart_ns = own_ns[after] - own_ns[after - 1]
        is_known = (t_ns >= own_ns[0]) & (t_ns <= own_ns[-1])
        is_known &= apart_ns <= timeline.longest_ns(own_ns)
        total += np.where(is_known, np.interp(t_ns, own_ns, values), np.nan)
    return Series(t_ns, total)


def _memory(evidence: Evidence, _progress: RunProgress, *, kind: str, note: str) -> _Told:
    """Of the fullest device of a kind."""
    devices = sampled(evidence, kind)
    fullest = max(devices, key=lambda one: highest_of(evidence, "memory_bytes", one))
    of = f"of {fullest.id}, the fullest of {len(devices)}; " if len(devices) > 1 else ""
    return readings(evidence, "memory_bytes", fullest), "measured", f"{of}{note}"


_SERIES: dict[Curve, Callable[[Evidence, RunProgress], _Told]] = {
    "tokens_per_s": _tokens_per_s,
    "step_s": _step_s,
    "loss": _loss,
    "power_w": _power_w,
    "device_bytes": partial(_memory, kind="gpu", note="in use by all programs"),
    "host_bytes": partial(_memory, kind="process", note="resident, children included"),
}
_OF_STEPS = ("tokens_per_s", "step_s", "loss")
