"""Energy of single steps, of phases, and above the idle baseline.

A counter that refreshes ten times a second, read at both ends of a 20 ms step, shows 0 J four times
and 60 J the fifth. So a step's energy is the difference of the devices' energy curves between its
ends, and consecutive steps add up to the counter. The uncertainty of both ends is the step's
uncertainty; for a short step it is most of the value.

With several ranks, the steps of the rank with the most rows are used: all ranks make a step
together, with all devices. Requests have no such energy: they differ in length, and overlap.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.achievable import calibration_of, differences
from ergmeter.metrics.definitions.energy import joules_per_token, run_j
from ergmeter.metrics.definitions.tokens import need_all_rows
from ergmeter.metrics.device_energy import EnergyCurve, boundary, curve_of
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import BOUNDARY, cached_for_kinds, cached_result
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.metrics.phases import (
    PHASE_TITLES,
    PRECEDENCE,
    Spans,
    merged,
    precedence,
    spans_of,
    union_of,
)
from ergmeter.records import COLUMN_KINDS, Basis, Device, Reading, TimeArray, mapped, weakest
from ergmeter.stats.intervals import percentile
from ergmeter.units import NS_PER_S, duration, number_of, scaled

# Energy by phase (`metrics.phases`). The parts add up to the whole run.
#
# The sensor resolves time to one refresh. All edges may be off by half a refresh either way, which
# the interval includes. If spans and gaps are shorter than that, the sensor can't separate them:
# all the energy of the smaller one may belong to the other.


def _part_j(evidence: Evidence, phase: str) -> Reading:
    """The energy of a phase in the whole run."""
    if not len(spans_of(evidence, phase)[0]):
        raise NotMeasurable(f"no {phase} span was recorded")
    need_all_rows(evidence)
    each = [_device_part(evidence, device, phase) for device in _devices(evidence)]
    values, lows, highs, bases = zip(*each, strict=True)
    value, low, high = sum(values), sum(lows), sum(highs)
    note = f"{PHASE_TITLES[phase]}, whole run; {_how(evidence)}"
    return Reading(value, "J", weakest(*bases), min(low, value), max(high, value), note)


@cached_result
def _device_part(
    evidence: Evidence, device: Device, phase: str
) -> tuple[float, float, float, Basis]:
    """Return one device's energy in a phase, the lower and upper bound, and the basis."""
    order = precedence(evidence)
    rank = order.index(phase)
    before, upto = union_of(evidence, *order[:rank]), union_of(evidence, *order[: rank + 1])
    curve, basis = curve_of(evidence, device)
    reached = curve.spanned(*upto)
    recorded = [name for name in order[: rank + 1] if len(spans_of(evidence, name)[0])]
    if not reached.all():
        missed = int((~reached).sum())
        raise NotMeasurable(
            f"{device.name} [{device.id}]: its readings do not cover {missed} of {len(reached)}"
            f" spans ({', '.join(recorded)})"
        )
    half_ns = round(min(curve.refresh_s, 1.0) / 2 * NS_PER_S)
    value, *moved = (
        _joules(curve, upto, by_ns) - _joules(curve, before, by_ns)
        for by_ns in (0, -half_ns, -half_ns // 2, half_ns // 2, half_ns)
    )
    off = max(abs(shifted - value) for shifted in moved)
    off += sum(_unresolved_j(curve, spans, half_ns) for spans in (upto, before))
    return value, max(0.0, value - off), value + off, basis


def _rest_j(evidence: Evidence) -> Reading:
    """Energy outside of all recorded spans: start-up, pauses, the end of the run."""
    if not len(union_of(evidence, *PRECEDENCE)[0]):
        raise NotMeasurable("no span was recorded")
    need_all_rows(evidence)
    each = [_device_rest(evidence, device) for device in _devices(evidence)]
    values, bases = zip(*each, strict=True)
    note = f"outside of all spans, whole run; {_how(evidence)}"
    return Reading(sum(values), "J", weakest(*bases), note=note)


@cached_result
def _device_rest(evidence: Evidence, device: Device) -> tuple[float, Basis]:
    curve, basis = curve_of(evidence, device)
    # The life of the run, as far as the readings go.
    start_ns = max(evidence.watched.start_ns, int(curve.t_ns[0]))
    end_ns = max(start_ns, min(evidence.watched.end_ns, curve.seen_until_ns))
    starts, ends = (np.clip(edges, start_ns, end_ns) for edges in union_of(evidence, *PRECEDENCE))
    life_j = _joules(curve, (np.array([start_ns]), np.array([end_ns])))
    return life_j - _joules(curve, (starts, ends)), basis


@cached_for_kinds(BOUNDARY)
def _parts(evidence: Evidence, device: Device) -> None:
    """Compute and cache the energy of every phase while a device's samples are in memory."""
    if evidence.from_output:
        return
    for phase in PRECEDENCE:
        if len(spans_of(evidence, phase)[0]):
            _device_part(evidence, device, phase)
    if len(union_of(evidence, *PRECEDENCE)[0]):
        _device_rest(evidence, device)


def _how(evidence: Evidence) -> str:
    ranks = len(evidence.all_steps.lanes)
    whose = f"by the spans of the rank with the most spans of {ranks}; " if ranks > 1 else ""
    return f"{whose}each instant belongs to one phase: {', '.join(precedence(evidence))}"


def _devices(evidence: Evidence) -> list[Device]:
    if evidence.from_output:
        raise NotMeasurable("printed lines do not show when a phase began; a Meter does")
    return boundary(evidence)


def _unresolved_j(curve: EnergyCurve, spans: Spans, half_ns: int) -> float:
    """Joules that a sensor can't assign: those of gaps between spans shorter than a refresh."""
    starts, ends = merged(spans[0] - half_ns, spans[1] + half_ns)
    own_j = _joules(curve, spans)
    return min(own_j, _joules(curve, (starts + half_ns, ends - half_ns)) - own_j)


def _joules(curve: EnergyCurve, spans: Spans, by_ns: int = 0) -> float:
    """Joules of all spans, with the spans moved by `by_ns`."""
    starts, ends = (edges + by_ns for edges in spans)
    return float((curve.at(ends) - curve.at(starts)).sum()) if len(starts) else 0.0


_PHASE_NEEDS = ("an energy counter or power readings", "spans of a Meter or an integration")

PHASE_METRICS = [
    *(
        Metric(
            f"energy.{phase}_j",
            f"energy, {PHASE_TITLES[phase]}",
            "J",
            "lower" if phase != "train" else "neither",
            f"energy of the instants in a {phase} span and in none of a phase before it in:"
            f" {', '.join(PRECEDENCE)}; whole run",
            _PHASE_NEEDS,
            partial(_part_j, phase=phase),
        )
        for phase in ("train", "eval", "checkpoint", "data", "prefill", "decode", "idle")
    ),
    Metric(
        "energy.rest_j",
        "energy, outside of all spans",
        "J",
        "lower",
        "energy of the whole run - of all its spans",
        _PHASE_NEEDS,
        _rest_j,
    ),
]


# Idle and net energy. An idle GPU without a program uses less power than one with a live context
# (77 and 121 W on an H200). Only the second is the baseline of a run that computes nothing. So the
# baseline is watts with a live context, from idle spans of this run or from a calibration of this
# very device. Without either there is no net energy. A calibration made beside other programs is
# refused; if its conditions differ, a note says so. If a run used less than the idle baseline, the
# run's energy or the baseline is wrong.

# After a load a GPU takes about a second to come to rest, and its sensors a refresh more.
SETTLE_S = 1.5
_CALIBRATED = ("nvml", "dcgm")  # whose devices `erg calibrate` knows the sensors of
_CURE = "`with meter.phase('idle')` for some seconds of the run measures it"


def idle_w(evidence: Evidence) -> Reading:
    """Idle power of the run's devices: with a program on them that computes nothing."""
    each = [_device_idle(evidence, device) for device in boundary(evidence)]
    value = sum(watts[0] for watts in each)
    notes = dict.fromkeys(watts[1] for watts in each)
    return Reading(value, "W", weakest(*(watts[2] for watts in each)), note="; ".join(notes))


def _device_idle(evidence: Evidence, device: Device) -> tuple[float, str, Basis]:
    try:
        return _in_the_run(evidence, device)
    except NotMeasurable as error:
        why = str(error)
    try:
        return _as_calibrated(device)
    except NotMeasurable as error:
        raise NotMeasurable(f"{device.name} [{device.id}]: {why} ({_CURE}), and {error}") from error


def _as_calibrated(device: Device) -> tuple[float, str, Basis]:
    """Return a device's idle watts from its calibration, a note, and the basis."""
    if "calibration" not in device.facts and device.probe not in _CALIBRATED:
        raise NotMeasurable("`erg calibrate` measures idle power of NVIDIA GPUs only")
    calibration = calibration_of(device)
    idle = calibration.idle
    watts = None if idle is None else idle.counter_w or idle.power_w
    if not watts:
        unasked = "it was interrupted" if calibration.interrupted else "it has none"
        reasons = (calibration.absent.get(part) for part in ("idle power", "sensors"))
        reason = next(filter(None, reasons), unasked)
        raise NotMeasurable(f"the calibration of {device.id} has no idle power: {reason}")
    if calibration.remarks:
        raise NotMeasurable(
            f"the calibration of {device.id} has {watts:.4g} W, not at rest: when calibrated,"
            f" {'; '.join(calibration.remarks)}; run `erg calibrate` while no other program runs"
        )
    note = "; ".join([*differences([(device, calibration)]), f"as {calibration.text}"])
    return float(watts), note, "measured"


def _in_the_run(evidence: Evidence, device: Device) -> tuple[float, str, Basis]:
    """Return a device's idle watts from the run's idle spans, a note, and the basis.

    The first 1.5 s of each span are left out, as the device has yet to come to rest.
    """
    own = evidence.all_steps.of_phase("idle")
    if not len(own):
        raise NotMeasurable("the run has no idle span")
    lane = own.longest
    start_ns = (lane["start_ns"] + SETTLE_S * NS_PER_S).astype(np.int64)
    end_ns = lane["end_ns"].astype(np.int64)
    long_enough = end_ns > start_ns
    if not long_enough.any():
        raise NotMeasurable(f"no idle span is longer than {duration(SETTLE_S)}")
    curve, basis = curve_of(evidence, device)
    start_ns, end_ns = start_ns[long_enough], end_ns[long_enough]
    joules, _, _ = curve.over_each(start_ns, end_ns)
    is_covered = ~np.isnan(joules)
    if not is_covered.any():
        raise NotMeasurable("the device's readings cover no idle span")
    lasted_s = float((end_ns - start_ns)[is_covered].sum()) / NS_PER_S
    return (
        float(joules[is_covered].sum()) / lasted_s,
        f"{duration(lasted_s)} idle in this run",
        basis,
    )


def net_j(evidence: Evidence) -> Reading:
    """Energy of the window, minus what the same devices use when idle."""
    gross, idle = run_j(evidence), idle_w(evidence)
    base_j = idle.value * evidence.span.duration_s
    if gross.value < base_j:
        raise NotMeasurable(
            f"the run drew {scaled(gross.value, 'J')}, less than the {scaled(base_j, 'J')} that"
            f" idle devices would have drawn ({idle.value:.4g} W, {idle.note}): measure idle power"
            " again"
        )
    note = f"gross {scaled(gross.value, 'J')}, idle {idle.value:.4g} W ({idle.note}); {gross.note}"
    basis = weakest("derived", gross.basis, idle.basis)
    return mapped(gross, lambda joules: joules - base_j, basis=basis, note=note)


def net_joules_per_token(evidence: Evidence) -> Reading:
    """Net energy over tokens of the same window."""
    gross, net, total = joules_per_token(evidence), net_j(evidence), run_j(evidence)
    scale = gross.value / total.value
    basis = weakest(gross.basis, net.basis)
    return mapped(net, lambda joules: joules * scale, unit="J/token", basis=basis)


_IDLE_NEEDS = ("an energy counter or power readings", "an idle span or a calibration")

IDLE_METRICS = [
    Metric(
        "energy.idle_w",
        "idle power",
        "W",
        "neither",
        "mean power of the run's devices with a program on them that computes nothing",
        _IDLE_NEEDS,
        idle_w,
    ),
    Metric(
        "energy.net_j",
        "net energy",
        "J",
        "lower",
        "energy.run_j - energy.idle_w x window",
        _IDLE_NEEDS,
        net_j,
    ),
    Metric(
        "energy.net_joules_per_token",
        "net energy per token",
        "J/token",
        "lower",
        "energy.net_j / tokens.total",
        (*_IDLE_NEEDS, "steps with tokens"),
        net_joules_per_token,
    ),
]


# Energy of single steps.


class EachEnergy:
    """Joules of all devices in each span, with lower and upper bounds.

    Devices are added one by one: those of a large run would not fit in memory together.
    """

    def __init__(self, start_ns: TimeArray, end_ns: TimeArray) -> None:
        self._spans = start_ns, end_ns
        self._sums = np.zeros((3, len(start_ns)))
        self.joules, self.low_j, self.high_j = self._sums
        self.basis: Basis = "measured"

    def add(self, evidence: Evidence, device: Device) -> None:
        """Add a device's energy in each span."""
        curve, basis = curve_of(evidence, device)
        self._sums += np.stack(curve.over_each(*self._spans))
        self.basis = weakest(self.basis, basis)


def energy_of(evidence: Evidence, start_ns: TimeArray, end_ns: TimeArray) -> EachEnergy:
    """Energy of the run's devices in each of these spans; NaN for spans without readings."""
    each = EachEnergy(start_ns, end_ns)
    for device in boundary(evidence):
        each.add(evidence, device)
    return each


def steps_energy(evidence: Evidence) -> EachEnergy:
    """The energy of each counted step of the rank with the most rows."""
    each = _each_step(evidence)
    for device in boundary(evidence):
        _add_to_steps(evidence, device)
    return each


@cached_for_kinds(BOUNDARY)
def _add_to_steps(evidence: Evidence, device: Device) -> None:
    """Add a device's energy in each step; cached, so that it is added once."""
    _each_step(evidence).add(evidence, device)


@cached_result
def _each_step(evidence: Evidence) -> EachEnergy:
    lane = step_rows(evidence)
    return EachEnergy(lane.columns["start_ns"], lane.columns["end_ns"])


def step_rows(evidence: Evidence) -> Steps:
    """The steps whose energy is reported. Raises NotMeasurable if there are none."""
    rows = evidence.counted.longest  # or the reason why there are none
    if evidence.from_output:
        raise NotMeasurable("a printed line does not show when its step began; a Meter does")
    if not evidence.trains:
        raise NotMeasurable("no training steps: requests overlap, and differ in length")
    if (rows["steps"] > 1).any():
        raise NotMeasurable("a row holds several steps: a single step's energy is not known")
    return rows


def _quantile_j(evidence: Evidence, share: float) -> Reading:
    each = steps_energy(evidence)
    is_covered = ~np.isnan(each.joules)
    if not is_covered.any():
        raise NotMeasurable("the devices' readings cover no step")
    value, low, high = (
        percentile(joules[is_covered], share) for joules in (each.joules, each.low_j, each.high_j)
    )
    off = float(np.median((each.high_j - each.low_j)[is_covered])) / 2
    steps = number_of(int(is_covered.sum()), "step")
    how = f"each known to {off:.3g} J; from a step's start to its end"
    return Reading(value, "J", each.basis, low, high, f"{steps}, {how}")


_STEP_NEEDS = ("an energy counter or power readings", "steps of a Meter or an integration")

STEP_METRICS = [
    Metric(
        f"energy.step_{name}_j",
        f"energy of a step, {title}",
        "J",
        "lower",
        f"{title} over steps of the energy from a step's start to its end",
        _STEP_NEEDS,
        partial(_quantile_j, share=share),
    )
    for name, title, share in (("median", "median", 50), ("p95", "95th percentile", 95))
]


# The tables of a run for export, with the energy of each step.


def export_tables(evidence: Evidence) -> dict[str, pa.Table]:
    """The non-empty tables of a run by name, with all hosts on one clock as in the report."""
    tables = {name: evidence.run.to_arrow(name) for name in COLUMN_KINDS}
    tables = {name: table for name, table in tables.items() if table.num_columns}
    if "steps" in tables:
        tables["steps"] = _with_energy(evidence, tables["steps"])
    return tables


def _with_energy(evidence: Evidence, table: pa.Table) -> pa.Table:
    """The steps with the energy of all devices in each, as in the report.

    With several ranks only the one with the most steps has energy: otherwise a sum over the column
    would count each joule once per rank. Steps without energy in the report have none here.
    """
    try:
        lane = step_rows(evidence)
        start_ns, end_ns = (table[name].to_numpy() for name in ("start_ns", "end_ns"))
        each = energy_of(evidence, start_ns, end_ns)
    except NotMeasurable:
        return table
    numbers = np.unique(lane["writer"]).astype(int)
    writers = [evidence.run.writers[number].header["writer"] for number in numbers]
    is_own = pc.is_in(table["writer"], pa.array(writers)).to_numpy()
    columns = {"energy_j": each.joules, "energy_low_j": each.low_j, "energy_high_j": each.high_j}
    columns["energy_basis"] = np.full(len(is_own), each.basis)
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, mask=~is_own | np.isnan(each.joules)))
    return table
