"""Where the energy went: training steps, evaluation, checkpoints, waiting for data, the rest.

The trap: counting a joule twice. A wait for data may lie inside a step, a checkpoint inside an
evaluation. So each instant belongs to one of them, the first in this order: checkpoint, evaluation,
data, prompts, answers, training, idle; and the parts add up to the whole run exactly. Where steps
are timed by the device, training comes before data: a wait of the host that the device does not
notice costs nothing.

When joules were drawn is known to a refresh of the sensor and no better. All edges of a part may be
off by the same, half a refresh either way: how much that moves it is in its interval. And where
spans and the gaps between them are shorter than that, as those of steps and waits for data are, the
sensor says nothing of which drew more: all that the smaller of the two has may be the other's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.tokens import need_all_rows
from ergmeter.metrics.energy.device_energy import boundary, curve_of
from ergmeter.metrics.energy.energy_curve import merged
from ergmeter.metrics.evidence.device_cache import BOUNDARY, asked_of, cached_per_device
from ergmeter.records import PHASES, Reading, weakest
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.energy.energy_curve import EnergyCurve
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Basis, Device, TimeArray

Spans: TypeAlias = "tuple[TimeArray, TimeArray]"

_ORDER = ("checkpoint", "eval", "data", "prefill", "decode", "train", "idle")
_WORDS = {
    "train": "training steps",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
    "data": "waiting for data",
    "prefill": "reading prompts",
    "decode": "writing answers",
    "idle": "idle spans",
}


def _part_j(evidence: Evidence, phase: str) -> Reading:
    """The energy of the instants that belong to a phase."""
    if not len(_spans(evidence, phase)[0]):
        raise NotMeasurable(f"no {phase} span was recorded")
    need_all_rows(evidence)
    each = [_device_part(evidence, device, phase) for device in _devices(evidence)]
    values, lows, highs, bases = zip(*each, strict=True)
    value, low, high = sum(values), sum(lows), sum(highs)
    note = f"{_WORDS[phase]}, whole run; {_how(evidence)}"
    return Reading(value, "J", weakest(*bases), min(low, value), max(high, value), note)


@cached_per_device
def _device_part(
    evidence: Evidence, device: Device, phase: str
) -> tuple[float, float, float, Basis]:
    """Of one device: the energy, the least and the most that it may be, and how it is known."""
    order = _order(evidence)
    place = order.index(phase)
    before, upto = _union(evidence, *order[:place]), _union(evidence, *order[: place + 1])
    curve, basis = curve_of(evidence, device)
    reached = curve.spanned(*upto)
    known = [name for name in order[: place + 1] if len(_spans(evidence, name)[0])]
    if not reached.all():
        missed = int((~reached).sum())
        raise NotMeasurable(
            f"{device.name} [{device.id}]: its readings do not cover {missed} of {len(reached)}"
            f" spans ({', '.join(known)})"
        )
    half_ns = _half_refresh_ns(curve)
    value, *moved = (
        _joules(curve, _moved(upto, by_ns)) - _joules(curve, _moved(before, by_ns))
        for by_ns in (0, -half_ns, -half_ns // 2, half_ns // 2, half_ns)
    )
    off = max(abs(one - value) for one in moved)
    off += sum(_unresolved_j(curve, spans, half_ns) for spans in (upto, before))
    return value, max(0.0, value - off), value + off, basis


def _rest_j(evidence: Evidence) -> Reading:
    """What was drawn in no span of any phase: start-up, pauses, the end."""
    if not len(_union(evidence, *_ORDER)[0]):
        raise NotMeasurable("no span was recorded")
    need_all_rows(evidence)
    each = [_device_rest(evidence, device) for device in _devices(evidence)]
    values, bases = zip(*each, strict=True)
    note = f"outside of all spans, whole run; {_how(evidence)}"
    return Reading(sum(values), "J", weakest(*bases), note=note)


@cached_per_device
def _device_rest(evidence: Evidence, device: Device) -> tuple[float, Basis]:
    curve, basis = curve_of(evidence, device)
    whole = _run_span(evidence, curve)
    spans = _clipped(_union(evidence, *_ORDER), whole)
    return _joules(curve, whole) - _joules(curve, spans), basis


@asked_of(BOUNDARY)
def _parts(evidence: Evidence, device: Device) -> None:
    """All that is asked here."""
    if evidence.from_output:
        return
    for phase in _ORDER:
        if len(_spans(evidence, phase)[0]):
            _device_part(evidence, device, phase)
    if len(_union(evidence, *_ORDER)[0]):
        _device_rest(evidence, device)


def _how(evidence: Evidence) -> str:
    ranks = len(evidence.all_steps.lanes)
    whose = f"by the spans of the rank that told the most of {ranks}; " if ranks > 1 else ""
    return f"{whose}each instant belongs to one phase: {', '.join(_order(evidence))}"


@cached_per_device
def _order(evidence: Evidence) -> tuple[str, ...]:
    """Which phase an instant belongs to: the first of these that holds it."""
    rows = evidence.all_steps.longest
    if len(rows) and not np.isnan(rows["host_end_ns"]).all():
        return ("checkpoint", "eval", "prefill", "decode", "train", "data", "idle")
    return _ORDER


def _devices(evidence: Evidence) -> list[Device]:
    if evidence.from_output:
        raise NotMeasurable("printed lines do not say when a phase began: a Meter does")
    return boundary(evidence)


@cached_per_device
def _spans(evidence: Evidence, phase: str) -> Spans:
    """Of the rank that told the most: they work in step, and which device is whose is not known."""
    lane = evidence.all_steps.longest
    own = lane.where(lane["phase"] == PHASES.index(phase)) if len(lane) else lane
    return own.columns["start_ns"], own.columns["end_ns"]


@cached_per_device
def _union(evidence: Evidence, *phases: str) -> Spans:
    """The time that belongs to any of these, as spans that do not touch."""
    each = [_spans(evidence, phase) for phase in phases]
    starts = np.concatenate([one[0] for one in each]) if each else np.array([], dtype=np.int64)
    ends = np.concatenate([one[1] for one in each]) if each else np.array([], dtype=np.int64)
    return merged(starts, ends)


def _moved(spans: Spans, by_ns: int) -> Spans:
    starts, ends = spans
    return starts + by_ns, ends + by_ns


def _unresolved_j(curve: EnergyCurve, spans: Spans, half_ns: int) -> float:
    """What may be of the spans or of the gaps between them, of gaps shorter than a refresh."""
    starts, ends = merged(spans[0] - half_ns, spans[1] + half_ns)
    own_j = _joules(curve, spans)
    return min(own_j, _joules(curve, (starts + half_ns, ends - half_ns)) - own_j)


def _clipped(spans: Spans, whole: Spans) -> Spans:
    starts, ends = (np.clip(edge, whole[0][0], whole[1][0]) for edge in spans)
    return starts, ends


def _run_span(evidence: Evidence, curve: EnergyCurve) -> Spans:
    """The life of the run, as far as the readings go."""
    start_ns = max(evidence.watched.start_ns, int(curve.t_ns[0]))
    end_ns = min(evidence.watched.end_ns, curve.seen_until_ns)
    return np.array([start_ns]), np.array([max(start_ns, end_ns)])


def _joules(curve: EnergyCurve, spans: Spans) -> float:
    starts, ends = spans
    return float((curve.at(ends) - curve.at(starts)).sum()) if len(starts) else 0.0


def _half_refresh_ns(curve: EnergyCurve) -> int:
    return round(min(curve.refresh_s, 1.0) / 2 * NS_PER_S)


def _of(phase: str) -> Callable[[Evidence], Reading]:
    def compute(evidence: Evidence) -> Reading:
        return _part_j(evidence, phase)

    return compute


_NEEDS = ("an energy counter or power readings", "spans of a Meter or an integration")

METRICS = [
    *(
        Metric(
            f"energy.{phase}_j",
            f"energy, {_WORDS[phase]}",
            "J",
            "lower" if phase != "train" else "neither",
            f"energy of the instants in a {phase} span and in none of a phase before it in:"
            f" {', '.join(_ORDER)}; whole run",
            _NEEDS,
            _of(phase),
        )
        for phase in ("train", "eval", "checkpoint", "data", "prefill", "decode", "idle")
    ),
    Metric(
        "energy.rest_j",
        "energy, outside of all spans",
        "J",
        "lower",
        "energy of the whole run - of all its spans",
        _NEEDS,
        _rest_j,
    ),
]
