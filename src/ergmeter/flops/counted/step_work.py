"""The FLOPs of a training step, put together from its recorded calls and what each was counted at.

The record is plain data, so that whoever has the counts can finish the work: the program itself, or
the recorder around it once the program is gone. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.flops.counted.op_totals import CallFlops
from ergmeter.records import Flops, WorkPart

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL, OTHER, GENERATION = "model", "other models", "generation"
_COUNTED = "the calls of one training step, run again without weights or data"
_ATTENTION = "attention: "  # begins the line that names its pairs, which notes show
_MASKED = "pairs that is_causal hides are left out, all others counted"
_ALL_PAIRS = "every pair, as no kernel is told is_causal"
_ALIKE_FRAC = 0.01


@dataclass(frozen=True)
class RecordedCall:
    """What is known of a call before it is counted."""

    module: str  # its class
    part: str  # model, other models
    times: int = 1
    graph_flops: tuple[float, float] | None = None  # forward, backward: by the autograd graph
    is_loss: bool = False  # that is given labels


@dataclass(frozen=True)
class StepRecord:
    """One step as it was recorded, without the FLOPs of its calls."""

    groups: tuple[tuple[RecordedCall, ...], ...] = ()  # calls to be counted, by module
    tokens: int | None = None  # of the step, as its integration counts them
    samples: int | None = None
    length: float = 0.0  # of a sequence, on the average of tokens
    outside_forward: float = 0.0  # products outside of modules
    outside_backward: float = 0.0
    not_counted: tuple[str, ...] = ()  # products of the trained models that nobody could count
    assumptions: tuple[str, ...] = ()
    analytic: tuple[Flops, ...] = ()  # of the largest model, where its configuration is known
    is_head_on_labels: bool = False  # in that count: the head is applied to labelled positions
    positions: float | None = None  # that it was called with in the step, where that is known
    generated: dict[str, int] = field(default_factory=dict)  # positions with a cache, by class
    parameters: int | None = None
    dtype: str | None = None
    reason: str = ""  # why it was not counted from a configuration

    def as_json(self) -> dict[str, Any]:
        """As it is stored beside a request."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> StepRecord:
        """What `as_json` gave."""
        groups = tuple(tuple(RecordedCall(**c) for c in group) for group in stored["groups"])
        analytic = tuple(Flops.from_json(one) for one in stored["analytic"])
        texts = {name: tuple(stored[name]) for name in ("not_counted", "assumptions")}
        return cls(**{**stored, **texts, "groups": groups, "analytic": analytic})


@dataclass(frozen=True)
class Lengths:
    """Sequences as they were in all steps; attention costs by the average."""

    length: float = 0.0
    is_padded: bool = False
    # Labelled positions of a token, by those of the recorded step: what only they need costs so.
    labelled_ratio: float = 1.0
    labelled_frac: float = 0.0  # of all real tokens; 0: unknown, or no part of the count goes by it


def step_flops(
    record: StepRecord,
    counts: Sequence[Sequence[CallFlops]],
    lengths: Lengths | None = None,
) -> tuple[Flops, ...]:
    """The FLOPs of a step under each convention. NotMeasurable says why there are none."""
    lengths = lengths or Lengths()
    record = _with_all_labels(record, lengths.labelled_ratio)
    trained, others = _by_part(record, counts)
    if record.analytic:
        return tuple(_completed(one, record, trained, others) for one in record.analytic)
    failed = [one.error for _, one in trained if one.error]
    if not trained and not record.outside_forward:
        raise NotMeasurable(record.reason or _nothing_seen(record))
    if failed and all(one.error for _, one in trained):
        raise NotMeasurable(failed[0])
    return (_counted(record, trained, others, lengths),)


def _with_all_labels(record: StepRecord, ratio: float) -> StepRecord:
    """The recorded step as if it had the labelled positions of an average one."""
    if ratio == 1.0:
        return record
    groups = tuple(
        tuple(_scaled(call, ratio) if call.is_loss else call for call in group)
        for group in record.groups
    )
    said = f"labelled positions are those of all steps, {ratio:.3f} times the recorded step's"
    return replace(
        record,
        groups=groups,
        outside_forward=record.outside_forward * ratio,
        outside_backward=record.outside_backward * ratio,
        assumptions=(*record.assumptions, said),
    )


def _scaled(call: RecordedCall, ratio: float) -> RecordedCall:
    if call.graph_flops is None:
        return call
    forward, backward = call.graph_flops
    return replace(call, graph_flops=(forward * ratio, backward * ratio))


def _nothing_seen(record: StepRecord) -> str:
    if record.not_counted:
        return f"what the step multiplies can't be counted: {', '.join(record.not_counted)}"
    return "no call of a module with gradients was seen in the step that was recorded"


_Counted = list[tuple["RecordedCall", "CallFlops"]]


def _by_part(
    record: StepRecord, counts: Sequence[Sequence[CallFlops]]
) -> tuple[_Counted, _Counted]:
    pairs = [
        (call, _by_graph(call, flops.error) if flops.error and call.graph_flops else flops)
        for calls, found in zip(record.groups, counts, strict=True)
        for call, flops in zip(calls, found, strict=True)
    ]
    return [p for p in pairs if p[0].part == MODEL], [p for p in pairs if p[0].part != MODEL]


def _by_graph(call: RecordedCall, error: str) -> CallFlops:
    """A call that can't be run without its data, as it was in the recorded step."""
    forward, backward = call.graph_flops or (0.0, 0.0)
    why = error.partition(";")[0]  # without what to do about it
    said = f"given: the products of {call.module} in one step's autograd graph ({why})"
    return CallFlops(forward, backward, assumptions=(said,))


def _counted(record: StepRecord, trained: _Counted, others: _Counted, lengths: Lengths) -> Flops:
    good = [(call, one) for call, one in trained if not one.error]
    forward = sum(c.times * one.forward for c, one in good) + record.outside_forward
    backward = sum(c.times * one.backward for c, one in good) + record.outside_backward
    again = sum(c.times * one.recomputed for c, one in good)
    pairs = sum(c.times * (one.pairs_forward + one.pairs_backward) for c, one in good)
    model = forward + backward
    alone = None
    if record.tokens:
        alone = (model + again - pairs) / record.tokens
        if lengths.length and record.length:
            ratio = lengths.length / record.length
            if abs(ratio - 1) > _ALIKE_FRAC:
                model += pairs * (ratio - 1)
    failed = tuple(f"{call.module} ({one.error})" for call, one in trained if one.error)
    return Flops(
        model_per_step=model,
        convention="counted",
        engine="counted",
        hardware_per_step=model + again,
        hardware_per_padding=alone if lengths.is_padded else None,
        tokens_per_step=record.tokens,
        samples_per_step=record.samples,
        assumptions=(_COUNTED, *_pairs_said(good), *_count_notes(record, trained)),
        other_work=_other_work(record, others, model and forward / model, model, scale=1.0),
        not_counted=(*record.not_counted, *_unknown(trained), *failed),
    )


def _pairs_said(good: _Counted) -> tuple[str, ...]:
    """Which pairs of attention are in the count; nothing where there is none."""
    if any(one.pairs_masked for _, one in good):
        return (f"{_ATTENTION}{_MASKED}",)
    return (f"{_ATTENTION}{_ALL_PAIRS}",) if any(one.pairs_forward for _, one in good) else ()


def _completed(analytic: Flops, record: StepRecord, trained: _Counted, others: _Counted) -> Flops:
    """A count from a configuration, with what the step computes beside that model's forward."""
    good = [(call, one) for call, one in trained if not one.error]
    extra = record.outside_forward + record.outside_backward
    extra += sum(c.times * (one.forward + one.backward) for c, one in good)
    again = sum(c.times * one.recomputed for c, one in good)
    scale, calls = 1.0, 1.0
    if record.tokens and analytic.tokens_per_step:
        scale = analytic.tokens_per_step / record.tokens
        if record.positions:  # a model called twice on a batch costs twice its tokens
            calls = record.positions / record.tokens
    model = analytic.model_per_step * calls + extra * scale
    hardware = analytic.hardware_per_step
    if hardware is not None:
        hardware = hardware * calls + (extra + again) * scale
    failed = tuple(f"{call.module} ({one.error})" for call, one in trained if one.error)
    return replace(
        analytic,
        model_per_step=model,
        hardware_per_step=hardware,
        assumptions=(*analytic.assumptions, *_count_notes(record, trained)),
        other_work=_other_work(record, others, 1 / 3, model / scale, scale=scale),
        not_counted=(*record.not_counted, *_unknown(trained), *failed),
    )


def _other_work(
    record: StepRecord, others: _Counted, forward_frac: float, model: float, *, scale: float
) -> tuple[WorkPart, ...]:
    parts = []
    if others:
        names = ", ".join(dict.fromkeys(call.module for call, _ in others))
        failed = [f"{call.module}: {one.error}" for call, one in others if one.error]
        total = sum(c.times * (one.forward + one.backward + one.recomputed) for c, one in others)
        note = f"{names}; not counted: {failed[0]}" if failed else names
        parts.append(WorkPart(OTHER, None if failed else total * scale, note))
    if record.generated:
        names, positions = ", ".join(record.generated), sum(record.generated.values())
        note = f"{names}: {positions:,} positions with a cache, each as in a forward pass"
        per_position = forward_frac * model / record.tokens if record.tokens else None
        flops = None if per_position is None else positions * per_position * scale
        parts.append(WorkPart(GENERATION, flops, note))
    return tuple(parts)


def _count_notes(record: StepRecord, trained: _Counted) -> tuple[str, ...]:
    own = [line for _, one in trained for line in one.assumptions]
    said = [*record.assumptions, *own]
    if record.outside_forward and not record.analytic and not trained:
        said.append("all products are outside of modules, as the autograd graph has them")
    return tuple(dict.fromkeys(said))


def _unknown(trained: _Counted) -> tuple[str, ...]:
    lines = [line for _, one in trained for line in one.not_counted]
    return tuple(dict.fromkeys(line.removeprefix("not counted: ") for line in lines))
