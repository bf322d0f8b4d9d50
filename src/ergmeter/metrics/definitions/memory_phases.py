"""Which phase needs the memory: training steps, evaluation or checkpoints.

The trap: taking a high-water mark for a phase's own. The allocator's mark only ever rises, so after
a training step of 40 GB it says 40 GB all through an evaluation that needs 5. What a phase held is
therefore what was read in it; and where the mark rose between two readings with no other phase in
between, that mark, which no reading can miss. (The first mark rose nowhere: what it says may be
from before anything was measured.) Where the mark stood higher while the phase was on, its peak
lies between what is known and that mark, and the figure says so.

An instant belongs to one phase, as for energy: checkpoint before evaluation before data before
training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.allocator import allocators
from ergmeter.metrics.evidence.device_cache import asked_of, cached_per_device
from ergmeter.metrics.evidence.gauges import readings, sampled
from ergmeter.records import PHASES, Reading
from ergmeter.units import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device, TimeArray

Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

_ORDER = ("checkpoint", "eval", "data", "train")
_WORDS = {"train": "training steps", "eval": "evaluation", "checkpoint": "checkpoints"}


class _Spans:
    """When the rank that told the most was in some phases: ranks work in step."""

    def __init__(self, evidence: Evidence, *phases: str) -> None:
        rows = evidence.all_steps.longest
        numbers = [PHASES.index(phase) for phase in phases]
        own = rows.where(np.isin(rows["phase"], numbers))
        order = np.argsort(own["start_ns"], kind="stable")
        self.starts_ns = own["start_ns"][order]
        self.reached_ns = np.maximum.accumulate(own["end_ns"][order])  # by any that began so far

    def touch(self, since_ns: TimeArray, until_ns: TimeArray) -> Mask:
        """Whether any of them was on at some time between these."""
        last = np.searchsorted(self.starts_ns, until_ns, side="right") - 1
        began = last >= 0
        if not began.any():
            return np.zeros(len(until_ns), dtype=bool)
        return began & (self.reached_ns[last] >= since_ns)


@cached_per_device
def _spans(evidence: Evidence, *phases: str) -> _Spans:
    return _Spans(evidence, *phases)


def _during(evidence: Evidence, phase: str, t_ns: TimeArray) -> Mask:
    """Which of these instants belong to a phase. Raises NotMeasurable if it never was on."""
    own = _spans(evidence, phase)
    if not len(own.starts_ns):
        raise NotMeasurable(f"no {phase} span was recorded")
    if evidence.from_output:
        raise NotMeasurable("printed lines do not say when a phase began: a Meter does")
    before = _spans(evidence, *_ORDER[: _ORDER.index(phase)])
    mask = own.touch(t_ns, t_ns) & ~before.touch(t_ns, t_ns)
    if not mask.any():
        raise NotMeasurable(f"no reading fell into {_WORDS[phase]}")
    return mask


def _highest(found: dict[str, Reading]) -> Reading:
    most = max(found, key=lambda device: found[device].value)
    of = f"of {most}, the fullest of {len(found)}; " if len(found) > 1 else ""
    one = found[most]
    # Another device may have had more, where it is known less well.
    bounds = [other.high for other in found.values() if other.high is not None]
    high = max((bound for bound in bounds if bound > one.value), default=None)
    low = None if high is None else one.value
    return Reading(one.value, "B", "measured", low, high, f"{of}{one.note}; whole run")


def _on_device(phase: str) -> Callable[[Evidence], Reading]:
    @asked_of("gpu")
    def of_one(evidence: Evidence, device: Device) -> Reading:
        series = readings(evidence, "memory_bytes", device)
        held = series.values[_during(evidence, phase, series.t_ns)]
        note = (
            f"the highest of {number_of(len(held), 'reading')} in {_WORDS[phase]}, in use by all"
            " programs; what was held between two readings is not in it"
        )
        return Reading(float(held.max()), "B", "measured", note=note)

    def compute(evidence: Evidence) -> Reading:
        return _highest({d.id: of_one(evidence, d) for d in sampled(evidence, "gpu")})

    return compute


def _in_allocator(phase: str) -> Callable[[Evidence], Reading]:
    @asked_of("allocator")
    def of_one(evidence: Evidence, device: Device) -> Reading:
        held = readings(evidence, "allocated_bytes", device)
        marks = readings(evidence, "allocated_peak_bytes", device)
        during = _during(evidence, phase, held.t_ns)
        read = float(held.values[during].max())
        risen, most = _marked(evidence, phase, marks.t_ns, marks.values)
        known = max(read, risen)
        if risen >= known:
            note = f"the allocator's own mark, which rose to it in {_WORDS[phase]}"
        else:
            note = f"the highest of {number_of(int(during.sum()), 'reading')} in {_WORDS[phase]}"
        if known >= most:
            return Reading(known, "B", "measured", note=note)
        note += (
            "; between two readings it may have been more, up to the allocator's mark then, which"
            " something else had set"
        )
        return Reading(known, "B", "measured", known, most, note)

    def compute(evidence: Evidence) -> Reading:
        return _highest({d.id: of_one(evidence, d) for d in allocators(evidence)})

    return compute


def _marked(
    evidence: Evidence,
    phase: str,
    t_ns: TimeArray,
    marks: Any,  # noqa: ANN401  floats
) -> tuple[float, float]:
    """The highest that the mark rose to while just this phase was on, 0 if it never did; and the
    highest that it was, at the latest, when the phase was on."""
    since_ns = np.concatenate(([0], t_ns[:-1]))
    own = _Spans(evidence, phase).touch(since_ns, t_ns)
    others = _Spans(evidence, *(other for other in _ORDER if other != phase))
    alone = own & ~others.touch(since_ns, t_ns)
    rose = alone & (np.diff(marks, prepend=marks[:1]) > 0)
    return float(marks[rose].max(initial=0.0)), float(marks[own].max(initial=0.0))


_NEEDS = ("spans of a Meter or an integration",)

METRICS = [
    *(
        Metric(
            f"memory.device_{phase}_peak_bytes",
            f"device memory in {words}, peak",
            "B",
            "lower",
            f"highest reading of memory in use on any one device at an instant of a {phase} span",
            ("an accelerator", *_NEEDS),
            _on_device(phase),
        )
        for phase, words in _WORDS.items()
    ),
    *(
        Metric(
            f"memory.allocator_{phase}_peak_bytes",
            f"allocator in {words}, peak",
            "B",
            "lower",
            f"the higher of: highest reading of tensor memory at an instant of a {phase} span;"
            f" the allocator's mark where it rose between two readings and only {phase} was on",
            ("a Meter in a torch program on CUDA", *_NEEDS),
            _in_allocator(phase),
        )
        for phase, words in _WORDS.items()
    ),
]
