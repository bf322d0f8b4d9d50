"""Turns a recorded step into plain data: the trained model's calls, and what is to be counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING
from weakref import ref

import torch

from ergmeter.errors import ErgmeterError, UsageError
from ergmeter.flops.counted.meta_model import ModuleCall, TensorSpec, ids_shape, unwrapped
from ergmeter.flops.counted.remote import MODEL, OTHER, RecordedCall, StepRecord
from ergmeter.flops.counted.unsharded import sizes, unsharded_parameters
from ergmeter.flops.live import dtype_of, model_work
from ergmeter.units import listed_by

if TYPE_CHECKING:
    from torch import nn

    from ergmeter.flops.analytic import PartFlops
    from ergmeter.integrations.torch.calls import StepCalls
    from ergmeter.integrations.unsettled_steps import StepAmounts
    from ergmeter.records import Flops

_KEPT_LOGITS = ("logits_to_keep", "num_logits_to_keep")
# TRL's trainers compute log-probabilities in tiles of the head, and again in backward; where Triton
# works, only for labelled positions.
_FUSED_HEAD = "fused_lm_head"
_TRITON = ("cuda", "xpu")
_EXACT = "exact"
_UNCALLED = "no call of the model with gradients was seen in the first steps"
_UNSEEN = "no call of the model was seen: a step is taken to be one pass over its tokens"


# Counts FLOPs for a sequence length and a labelled share of the tokens (0: unknown).
Reread = Callable[[float, float], "tuple[Flops, ...]"]


@dataclass(frozen=True)
class _Head:
    """The positions that the output head is applied to."""

    share: float = 1.0
    is_on_labels: bool = False  # labelled positions alone
    is_repeated: bool = False  # computed again in backward
    reason: str = ""


def recorded_step(
    step: StepCalls, amounts: StepAmounts, model: object = None, loss: object = None
) -> tuple[StepRecord, list[list[ModuleCall]], Reread | None]:
    """Return a step's record, the calls that must be run to be counted (by module), and a recount.

    The recount counts the largest model again for another sequence length; None unless it was
    counted from its configuration. If no call was seen, as in a step that is compiled as a whole,
    `model` is counted from its configuration. `loss` is the module whose labels are counted.
    """
    trained, others = step.trained, step.others
    modules = _modules(trained)
    unseen: tuple[str, ...] = ()
    if not modules and not step.outside.forward and isinstance(model, torch.nn.Module):
        modules, unseen = [model], (_UNSEEN,)
    analytic: tuple[Flops, ...] = ()
    reason, dtype, positions, reread, head = "", None, None, None, _Head()
    unsharded = [step.outer.get(id(module), module) for module in modules]
    parameters = unsharded_parameters(torch.nn.ModuleList(unsharded))
    if modules:
        primary = [call for call in trained if call.module is modules[0]]
        try:
            head = _head(primary)
            reread = _configured(unsharded[0], head, amounts)
            analytic = reread(amounts.length, 0.0)
        except ErgmeterError as error:
            reread, reason = None, f"{_UNCALLED}; {error}" if unseen else ""
        dtype = dtype_of(parameters)
        if analytic:
            positions = _positions(primary, amounts)
            trained = [call for call in trained if call.module is not modules[0]]
    calls = [(call, MODEL) for call in trained] + [(call, OTHER) for call in others]
    groups = listed_by((id(call.module), (call, part)) for call, part in calls)
    outside = step.outside
    lost = (f"{name} x {times}" for name, times in (outside.unknown + step.not_recorded).items())
    counts = sizes(parameters) if parameters else None
    record = StepRecord(
        groups=tuple(
            tuple(
                RecordedCall(
                    _name(call.module), part, call.times, call.graph_flops, call.module is loss
                )
                for call, part in group
            )
            for group in groups.values()
        ),
        tokens=amounts.tokens,
        samples=amounts.samples,
        length=amounts.length,
        outside_forward=outside.forward,
        outside_backward=outside.backward,
        not_counted=tuple(lost),
        assumptions=(*unseen, *outside.assumptions),
        analytic=analytic,
        positions=positions,
        is_head_on_labels=bool(analytic) and head.is_on_labels,
        generated={_name(module): n for module, n in step.generated.values()},
        parameters=None if counts is None else counts[0] or None,
        dtype=dtype,
        reason=reason if not trained and not outside.forward else "",
    )
    return record, [[call for call, _ in group] for group in groups.values()], reread


def _modules(calls: Sequence[ModuleCall]) -> list[nn.Module]:
    """Each module of these calls, the largest first."""
    modules = {id(call.module): call.module for call in calls}
    return sorted(modules.values(), key=lambda module: -sum(p.numel() for p in module.parameters()))


def _configured(primary: nn.Module, head: _Head, amounts: StepAmounts) -> Reread:
    """Return a function that counts a transformers model from its configuration, with `head`."""
    if not amounts.tokens:
        raise UsageError("the step has no token count")
    model = ref(primary)

    def count(length: float, labelled_frac: float) -> tuple[Flops, ...]:
        module = model()
        if module is None:
            return ()
        work, _ = model_work(module, max(1, round(length)))
        flops, cost = tuple(work.flops.values()), work.parts.get("head")
        if cost is None or not head.reason:
            return flops
        is_known = head.is_on_labels and labelled_frac
        applied = replace(head, share=labelled_frac) if is_known else head
        return tuple(
            _with_head(entry, cost, applied) if entry.convention == _EXACT else entry
            for entry in flops
        )

    return count


def _with_head(flops: Flops, cost: PartFlops, head: _Head) -> Flops:
    """Return `flops` with the head's cost reduced to the positions that it is applied to."""
    hardware, padding = flops.hardware_per_step, flops.hardware_per_padding
    less = cost.model * (1 - head.share)
    again = cost.forward if head.is_repeated else 0.0
    if padding is not None and flops.tokens_per_step:
        padding += (-cost.model if head.is_on_labels else again) / flops.tokens_per_step
    assumption = f"the head is applied to {head.share:.1%} of the positions ({head.reason})"
    return replace(
        flops,
        model_per_step=flops.model_per_step - less,
        hardware_per_step=None if hardware is None else hardware - less + again * head.share,
        hardware_per_padding=padding,
        assumptions=(*flops.assumptions, assumption),
    )


def _head(calls: Sequence[ModuleCall]) -> _Head:
    """Return the share of positions for which these calls compute logits."""
    positions = total = 0
    is_fused = bool(calls) and all(call.kwargs.get(_FUSED_HEAD) is True for call in calls)
    for call in calls:
        shape = ids_shape(call)
        asked = next((call.kwargs[n] for n in _KEPT_LOGITS if call.kwargs.get(n)), None)
        if is_fused and shape is not None:
            asked = shape[1] - 1
        if shape is None or asked is None:
            return _Head()
        length = asked.shape[0] if isinstance(asked, TensorSpec) else asked
        positions += call.times * shape[0] * min(int(length), shape[1])
        total += call.times * shape[0] * shape[1]
    if not total:
        return _Head()
    if not is_fused:
        return _Head(positions / total, reason=_KEPT_LOGITS[0])
    parameter = next(calls[0].module.parameters(), None)
    is_on_labels = parameter is not None and parameter.device.type in _TRITON
    return _Head(positions / total, is_on_labels, is_repeated=True, reason=_FUSED_HEAD)


def _positions(calls: Sequence[ModuleCall], amounts: StepAmounts) -> float | None:
    """Positions over all calls, if the model passes over the step's tokens several times."""
    if not calls or getattr(getattr(calls[0].module, "config", None), "is_encoder_decoder", False):
        return None
    shapes = [(ids_shape(call), call.times) for call in calls]
    if not amounts.tokens or any(shape is None for shape, _ in shapes):
        return None
    total = sum(prod(shape) * times for shape, times in shapes if shape is not None)
    passes = round(total / amounts.tokens)
    is_whole = passes > 1 and abs(total / amounts.tokens - passes) < 0.05 * passes
    return float(passes * amounts.tokens) if is_whole else None


def _name(module: nn.Module) -> str:
    return type(unwrapped(module)).__name__
