"""Counts the FLOPs of the module calls of one training step, from their shapes alone.

`skeleton` serialises the calls without weights or data. `count` runs them on empty tensors: in
another process through `ergmeter.flops.counted.remote`, or in this one after its last step.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ergmeter.errors import ErgmeterError, NotMeasurable
from ergmeter.flops.counted import remote
from ergmeter.flops.counted.count import RAISED, counted_call, isolated, scalar_of, why_not_run
from ergmeter.flops.counted.meta_model import ModuleCall, make_runnable
from ergmeter.flops.counted.op_totals import CallFlops, CountedStep
from ergmeter.flops.counted.skeleton import loads

_CURE = "give its FLOPs to the Meter (flops=), from a configuration like it (`erg flops`)"
# Products of positions with each other: they grow with the length of a sequence.
_PAIRS = ("attention", "attn", "aten::bmm", "aten::baddbmm")

_SDPA = "scaled_dot_product_attention"
_attention = nn.functional.scaled_dot_product_attention


def count(request: remote.CountRequest) -> list[list[CallFlops]]:
    """Return the FLOPs of each call, by group; for a call that can't be counted, the error."""
    results = []
    for number, data in enumerate(request.groups):
        error = request.errors.get(number)
        if error is None:
            try:
                results.append(_count_group(data))
                continue
            except ErgmeterError as failure:
                error = str(failure)
        results.append([CallFlops(error=error)] * request.sizes[number])
    return results


def main(path: str) -> None:
    """Count the request in this folder; the entry point of the counting process."""
    folder = Path(path)
    about, groups = remote.files(folder)
    errors = {int(number): why for number, why in about["errors"].items()}
    remote.answer(folder, count(remote.CountRequest(groups, errors, tuple(about["sizes"]))))


def _count_group(data: bytes) -> list[CallFlops]:
    with isolated(), _OnCpu(), ExitStack() as stack:
        stack.callback(setattr, nn.functional, _SDPA, _attention)
        setattr(nn.functional, _SDPA, _attention_without_dropout)
        try:
            calls: list[ModuleCall] = loads(data)
        except Exception as error:  # unpickling runs the user's own code
            what = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:200]
            raise NotMeasurable(f"the model can't be made again elsewhere: {what}") from error
        assumptions = make_runnable(calls[0].module)
        return [_count_call(call, assumptions) for call in calls]


def _count_call(call: ModuleCall, assumptions: tuple[str, ...]) -> CallFlops:
    try:
        return _flops_of(call, *_run(call), assumptions)
    except RAISED as error:
        return CallFlops(error=why_not_run(error, cure=_CURE))
    except ErgmeterError as error:
        return CallFlops(error=str(error))


def _run(call: ModuleCall) -> tuple[CountedStep, bool]:
    """Count the forward pass of a call and its backward pass if the recorded call had one.

    Also returns whether there was a backward pass.
    """
    model = call.module
    if model.training != call.training:
        model.train(call.training)
    parameters = list(model.parameters())
    has_grad = call.has_grad
    if len(parameters) == len(call.trained):
        for parameter, is_trained in zip(parameters, call.trained, strict=True):
            # Without gradients torch takes fused short cuts that have no rule.
            wanted = is_trained or not has_grad
            parameter.requires_grad_(wanted and parameter.is_floating_point())
    loss = scalar_of if has_grad and call.is_walked_back else None
    counted = counted_call(model, call.args, call.kwargs, loss=loss)
    for parameter in parameters:
        parameter.grad = None
    return counted


def _flops_of(
    call: ModuleCall, counted: CountedStep, is_back: bool, assumptions: tuple[str, ...]
) -> CallFlops:
    needed, spared = counted.needed, counted.spared
    pairs = [cost for (_, name), cost in counted.rows.items() if any(p in name for p in _PAIRS)]
    pairs_forward = sum(cost.forward for cost in pairs) - spared.forward
    pairs_backward = sum(cost.backward for cost in pairs) - spared.backward
    again = needed.forward if call.is_recomputed and is_back else 0.0
    return CallFlops(
        needed.forward,
        needed.backward,
        needed.recomputed + again,
        pairs_forward,
        pairs_backward,
        counted.not_counted,
        assumptions,
        pairs_masked=spared.forward + spared.backward,
    )


def _attention_without_dropout(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
    """Call sdpa with dropout 0, so that it stays one kernel: the CPU has none with dropout."""
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return _attention(*args, **kwargs)


class _OnCpu(TorchFunctionMode):
    """Replaces devices in torch calls by the CPU, where the copy of the model is."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a torch function with its device argument replaced by the CPU."""
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "cpu"}
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "to":
            args = tuple("cpu" if _is_device(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _is_device(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, torch.device | int | str) and not isinstance(value, bool)
