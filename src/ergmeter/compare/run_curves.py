"""Curves of the compared runs over steps, tokens or time.

Power is the sum of all devices, and absent where one of them was not read. Memory is that of the
fullest device, as in `erg compare`. Tokens are those of all ranks. A run without a curve has the
reason, not a line at 0.

All three axes count from the start of the run's first step, warm-up included. Counting from the end
of the warm-up would shift the losses of runs with different warm-ups. Time between steps, such as
an evaluation, counts as time but not as a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Literal, get_args

import numpy as np

from ergmeter.compare.entry import Entry, Group
from ergmeter.errors import ErgmeterError, NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.metrics.definitions.throughput import need_speed
from ergmeter.metrics.definitions.tokens import WHICH_TOKENS, need_all_rows, steps_in, tokens
from ergmeter.metrics.device_energy import boundary
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import highest_of, readings, sampled, why_absent
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Basis, Device, FloatArray, Missing, or_missing
from ergmeter.runlog.reader import Run
from ergmeter.runlog.segments import Series
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = get_args(Axis)


class RunProgress:
    """Steps, tokens and time of a run since the start of its first step."""

    def __init__(self, evidence: Evidence) -> None:
        """Raises NotMeasurable for a run without steps."""
        self._evidence = evidence
        self.zero_ns = evidence.work.lowest("start_ns")
        self.end_ns = evidence.work.highest("end_ns")

    def at(self, axis: Axis, t_s: FloatArray) -> FloatArray:
        """The position on an axis at these times, in seconds since the first step began.

        Interpolated within a step. NotMeasurable if the run lacks the counts.
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
        made, lanes = np.zeros(len(t_s)), evidence.work.lanes
        by_lane = np.split(amounts, np.cumsum([len(lane) for lane in lanes])[:-1])
        for lane, own in zip(lanes, by_lane, strict=True):
            made += self._made(lane, own, t_s)
        return made

    def seconds(self, t_ns: FloatArray) -> FloatArray:
        """Seconds since the first step began, from the run's clock."""
        return (t_ns - self.zero_ns) / NS_PER_S

    def _made(self, lane: Steps, amounts: FloatArray, t_s: FloatArray) -> FloatArray:
        """A rank's cumulative amount (steps or tokens) at these times."""
        edges_ns = np.stack([lane["start_ns"], lane["end_ns"]], axis=1).ravel()
        # Printed lines may overlap; the cumulated amount never falls.
        edges_s = np.maximum.accumulate(self.seconds(edges_ns))
        so_far = np.repeat(np.insert(np.cumsum(amounts), 0, 0.0), 2)[1:-1]
        return np.interp(t_s, edges_s, so_far)


Curve = Literal["tokens_per_s", "step_s", "loss", "power_w", "device_bytes", "host_bytes"]
CURVES: tuple[Curve, ...] = get_args(Curve)
# How many a chart can distinguish: groups by colour, repeats by dashes; and lines in all.
GROUPS, REPEATS, LINES = 8, 6, 12
_POINTS = 2400  # points of a curve over all runs
_MOST = 600  # points of one run
NO_DIRECTORY = "a ledger's row has no steps and no samples: name the run's directory"


@dataclass(frozen=True)
class RunCurve:
    """A curve of a run in a bounded number of points, extremes included.

    `x`: the positions of the points, for each axis that the run has. A NaN value breaks the line.
    """

    x: Mapping[Axis, FloatArray]
    values: FloatArray
    readings: int
    basis: Basis
    note: str = ""

    @property
    def is_bounded(self) -> bool:
        """True if some readings were left out."""
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
        """The last position on an axis; None if the run does not have it."""
        return float(self.x[axis].max()) if axis in self.x else None


@dataclass(frozen=True)
class RunCurves:
    """A run of a comparison: its group, its curves, and the axes it lacks."""

    group: int  # its index among the groups of the comparison
    repeat: int
    source: str
    curves: Mapping[Curve, RunCurve | Missing]
    lacking: Mapping[Axis, str]


@dataclass(frozen=True)
class ComparedCurves:
    """Curves of the runs shown; `left_out`: runs over the limit, `without`: without a directory."""

    runs: tuple[RunCurves, ...]
    left_out: int
    without: int

    @property
    def curves(self) -> tuple[Curve, ...]:
        """The curves to show: those that some run has.

        Step time only if some run has no tokens/s; host memory only without device memory.
        """
        had = {
            curve: [isinstance(run.curves[curve], RunCurve) for run in self.runs]
            for curve in CURVES
        }
        hidden = {"step_s"} if all(had["tokens_per_s"]) else set()
        hidden |= {"host_bytes"} if any(had["device_bytes"]) else set()
        return tuple(curve for curve in CURVES if any(had[curve]) and curve not in hidden)


def compared_curves(groups: Sequence[Group], settings: Settings | None = None) -> ComparedCurves:
    """The curves of some runs of each group."""
    with_directory = [
        [entry for entry in group.entries if entry.run is not None] for group in groups
    ]
    chosen = _chosen(with_directory)
    points = min(_MOST, _POINTS // max(1, len(chosen)))
    runs = tuple(
        _run_curves(with_directory[group][repeat], group, repeat, settings, points=points)
        for group, repeat in chosen
    )
    with_one = sum(map(len, with_directory))
    may_have_one = sum(entry.kind != "analysis" for group in groups for entry in group.entries)
    return ComparedCurves(runs, with_one - len(runs), may_have_one - with_one)


def _chosen(by_group: list[list[Entry]]) -> list[tuple[int, int]]:
    """Group and repeat of the runs to show: first runs of all groups, then second ones."""
    places = [(group, own) for group, own in enumerate(by_group) if own][:GROUPS]
    each = [[(group, repeat) for repeat in range(len(own))][:REPEATS] for group, own in places]
    in_turn = [pair for pair in chain.from_iterable(zip_longest(*each)) if pair is not None]
    return sorted(in_turn[:LINES])


def _run_curves(
    entry: Entry, group: int, repeat: int, settings: Settings | None, *, points: int
) -> RunCurves:
    assert entry.run is not None
    try:
        run = Run.open(entry.run)
        run = run if entry.training is None else run.training(entry.training)
        evidence = evidence_of(run, settings)
        progress = RunProgress(evidence)
    except ErgmeterError as error:
        nothing = dict.fromkeys(CURVES, Missing(str(error)))
        return RunCurves(group, repeat, entry.source, nothing, {})
    starts = {axis: or_missing(progress.at, axis, np.zeros(1)) for axis in AXES}
    lacking = {axis: at.reason for axis, at in starts.items() if isinstance(at, Missing)}
    axes = tuple(axis for axis in AXES if axis not in lacking)
    curves = {
        curve: or_missing(_run_curve, evidence, progress, curve, axes, points=points)
        for curve in CURVES
    }
    return RunCurves(group, repeat, entry.source, curves, lacking)


def _run_curve(
    evidence: Evidence, progress: RunProgress, curve: Curve, axes: Sequence[Axis], *, points: int
) -> RunCurve:
    series, basis, note = _SERIES[curve](evidence, progress)
    inside = _inside(series, progress)
    line = timeline.bounded_series(inside, zero_ns=progress.zero_ns, points=points)
    t_s, values = line.t_s, line.values
    if curve in _OF_STEPS:  # no breaks between steps
        is_reading = np.isfinite(values)
        t_s, values = t_s[is_reading], values[is_reading]
    x = {axis: progress.at(axis, t_s) for axis in axes}
    return RunCurve(x, values, line.readings, basis, note)


def _inside(series: Series, progress: RunProgress) -> Series:
    """The readings from the start of the first step to the end of the last."""
    first = int(np.searchsorted(series.t_ns, progress.zero_ns))
    last = int(np.searchsorted(series.t_ns, progress.end_ns, side="right"))
    part = Series(series.t_ns[first:last], series.values[first:last])
    if not np.isfinite(part.values).any():
        raise NotMeasurable(
            "no reading between the start of the first step and the end of the last"
        )
    return part


_CurveSeries = tuple[Series, "Basis", str]


def _tokens_per_s(evidence: Evidence, progress: RunProgress) -> _CurveSeries:
    """Tokens of all ranks since the end of the previous step, over that time.

    Evaluation, checkpoints and pauses are not part of that time.
    """
    need_speed(evidence)
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


def _step_s(evidence: Evidence, _progress: RunProgress) -> _CurveSeries:
    way = "from one printed line" if evidence.from_output else "from each step's end"
    return timeline.step_series(evidence), evidence.steps_basis, f"{way} to the next"


def _loss(evidence: Evidence, _progress: RunProgress) -> _CurveSeries:
    series, is_printed = timeline.loss_series(evidence)
    return series, "reported", "as printed: no step has a loss" if is_printed else ""


def _power_w(evidence: Evidence, _progress: RunProgress) -> _CurveSeries:
    """The total power of the devices that the run's energy includes."""
    powers = [_power_of(evidence, device) for device in boundary(evidence)]
    is_rate = any(by_counter for _, by_counter in powers)
    notes = ["from an energy counter: the mean since the previous reading"] if is_rate else []
    if len(powers) == 1:
        return powers[0][0], "derived" if is_rate else "measured", "".join(notes)
    notes.insert(0, f"sum of {len(powers)} devices, at the times of the most often read one")
    return _sum([series for series, _ in powers]), "derived", "; ".join(notes)


def _power_of(evidence: Evidence, device: Device) -> tuple[Series, bool]:
    """A device's power, and whether it is derived from its energy counter."""
    power = evidence.series("power_w").get(device.id)
    if power is not None and np.isfinite(power.values).any():
        return power, False
    counter = evidence.series("energy_j").get(device.id)
    if counter is None or len(counter.t_ns) < 2:
        unread = "no power reading, and no two readings of its energy counter"
        why = why_absent(device, "power_w") or unread
    else:
        grown = timeline.rate(counter)
        if np.isfinite(grown.values).any():
            return grown, True
        why = "its energy counter never grew"
    raise NotMeasurable(f"no power of {device.name} [{device.id}]: {why}")


def _sum(parts: list[Series]) -> Series:
    """The sum at the times of the series with the most readings, others interpolated.

    NaN where one of them has a gap.
    """
    t_ns = max(parts, key=lambda part: len(part.t_ns)).t_ns
    total = np.zeros(len(t_ns))
    for part in parts:
        is_reading = np.isfinite(part.values)
        own_ns, values = part.t_ns[is_reading], part.values[is_reading]
        after = np.searchsorted(own_ns, t_ns).clip(1, len(own_ns) - 1)
        apart_ns = own_ns[after] - own_ns[after - 1]
        is_known = (t_ns >= own_ns[0]) & (t_ns <= own_ns[-1])
        is_known &= apart_ns <= timeline.longest_ns(own_ns)
        total += np.where(is_known, np.interp(t_ns, own_ns, values), np.nan)
    return Series(t_ns, total)


def _memory(evidence: Evidence, _progress: RunProgress, *, kind: str, note: str) -> _CurveSeries:
    """Memory of the fullest device of a kind."""
    devices = sampled(evidence, kind)
    fullest = max(devices, key=lambda device: highest_of(evidence, "memory_bytes", device))
    of = f"of {fullest.id}, the fullest of {len(devices)}; " if len(devices) > 1 else ""
    return readings(evidence, "memory_bytes", fullest), "measured", f"{of}{note}"


_SERIES: dict[Curve, Callable[[Evidence, RunProgress], _CurveSeries]] = {
    "tokens_per_s": _tokens_per_s,
    "step_s": _step_s,
    "loss": _loss,
    "power_w": _power_w,
    "device_bytes": partial(_memory, kind="gpu", note="in use by all programs"),
    "host_bytes": partial(_memory, kind="process", note="resident, children included"),
}
_OF_STEPS = ("tokens_per_s", "step_s", "loss")
