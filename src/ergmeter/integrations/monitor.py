"""The two functions of profiler-based MFU monitors, under their names, with a right answer.

    mfu = calculate_mfu_with_profiler(model, batch_size=4, seq_length=512, step_time=0.1)

What such monitors do, a forward pass under torch.profiler, counts a third of a training step at
best and with CUDA activities alone nothing at all, leaves the model in eval mode, takes an A100's
peak for what it does not know and cuts off at 1. Here the model is not run: its FLOPs are counted
from its configuration or, where there is none, on tensors without memory. What is not known is nan,
with one warning, and never 0.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ergmeter.errors import ErgmeterError, NotMeasurable, UsageError
from ergmeter.flops.counted import count
from ergmeter.flops.live import model_work
from ergmeter.metrics.compute import table_peak

if TYPE_CHECKING:
    from torch import nn

# FLOPs of one sequence, by its length and by how much of the model is trained.
_known: WeakKeyDictionary[nn.Module, dict[tuple[int, int], float]] = WeakKeyDictionary()
_warned: set[str] = set()


def calculate_mfu_with_profiler(
    model: nn.Module, batch_size: int, seq_length: int, step_time: float
) -> float:
    """MFU of a training step of `batch_size` sequences on one device, in `step_time` seconds.

    nan where the FLOPs or the device's peak are not known; above 1 if an input is wrong.
    """
    if not math.isfinite(step_time) or step_time <= 0:
        raise UsageError(f"step_time must be seconds above 0; got {step_time!r}")
    if batch_size < 1 or seq_length < 1:
        raise UsageError(
            f"batch_size and seq_length must be 1 or more; got {batch_size!r} and {seq_length!r}"
        )
    try:
        flops = batch_size * _sequence_flops(model, seq_length)
    except ErgmeterError as error:
        return _unknown(f"no MFU: {error}")
    return flops / step_time / get_gpu_peak_flops(dtype=_dtype(model))


def get_gpu_peak_flops(device: int | str | None = None, *, dtype: str = "bf16") -> float:
    """Dense peak of a GPU in FLOP/s, by its driver's name; nan where it is not known."""
    try:
        if device is None or isinstance(device, int):
            if not torch.cuda.is_available():
                raise NotMeasurable("there is no CUDA device here whose peak could be looked up")
            device = torch.cuda.get_device_name(device)
        return table_peak(device, dtype).flops_per_s
    except ErgmeterError as error:
        return _unknown(str(error))


def _sequence_flops(model: nn.Module, seq_length: int) -> float:
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    known = _known.setdefault(model, {})
    key = (seq_length, trained)
    if key not in known:
        known[key] = _counted(model, seq_length)
    return known[key]


def _counted(model: nn.Module, seq_length: int) -> float:
    try:
        return model_work(model, seq_length)[0].chosen.model_per_step
    except ErgmeterError:  # no configuration, or a family that is not known: run it
        return count(model, batch_size=1, seq_len=seq_length).model


def _dtype(model: nn.Module) -> str:
    """What the products are in: the weights' type; of fp32 weights, as under autocast, bf16."""
    types = {parameter.dtype for parameter in model.parameters()}
    return "fp16" if torch.float16 in types and torch.bfloat16 not in types else "bf16"


def _unknown(why: str) -> float:
    if why not in _warned:
        _warned.add(why)
        warnings.warn(why, stacklevel=3)
    return math.nan
