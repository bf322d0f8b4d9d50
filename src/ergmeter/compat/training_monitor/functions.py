"""A profiler-based MFU monitor's functions and its class, under their names, with right answers.

    mfu = calculate_mfu_with_profiler(model, batch_size=4, seq_length=512, step_time=0.1)

    monitor = TrainingMonitor("./outputs", config, flops_profile_freq=500, model=model)
    monitor.log_step(step, epoch, loss, grad_norm, learning_rate, attention_mask)

What such monitors do, a forward pass under torch.profiler, counts a third of a training step at
best and with CUDA activities alone nothing at all, leaves the model in eval mode, takes an A100's
peak for what it does not know and cuts off at 1. Here the model is not run: its FLOPs are counted
from its configuration or, where there is none, on tensors without memory. What is not known is nan,
with one warning, and never 0. So MFU is known at every step, and a "profiled" step is one that is
printed. docs/migrating-from-training-monitor.md has the rest.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ergmeter.errors import ErgmeterError, NotMeasurable, UsageError
from ergmeter.flops.counted.count import count
from ergmeter.flops.live import model_work
from ergmeter.metrics.definitions.compute import table_peak

if TYPE_CHECKING:
    from torch import nn

    from ergmeter.compat.training_monitor.monitor import TrainingMonitor

__all__ = ["TrainingMonitor", "calculate_mfu_with_profiler", "get_gpu_peak_flops", "knowledge"]

_known: WeakKeyDictionary[nn.Module, _ModelFacts] = WeakKeyDictionary()
_warned: set[str] = set()
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # fp32 says nothing of the products


def calculate_mfu_with_profiler(
    model: nn.Module,
    batch_size: int,
    seq_length: int,
    step_time: float,
    *,
    dtype: str | None = None,
) -> float:
    """MFU of a training step of `batch_size` sequences on one device, in `step_time` seconds.

    nan where the FLOPs or the device's peak are not known; above 1 if an input is wrong. `dtype` is
    what products are computed in (bf16, fp16, tf32, fp32, ...): that of the weights if not given;
    of fp32 weights it can't be seen, so bf16 as under autocast is assumed, with one warning.
    """
    if not math.isfinite(step_time) or step_time <= 0:
        raise UsageError(f"step_time must be seconds above 0; got {step_time!r}")
    if batch_size < 1 or seq_length < 1:
        raise UsageError(
            f"batch_size and seq_length must be 1 or more; got {batch_size!r} and {seq_length!r}"
        )
    known = knowledge(model)
    try:
        flops = batch_size * known.sequence_flops(model, seq_length)
    except ErgmeterError as error:
        return _unknown(f"no MFU: {error}")
    peak = get_gpu_peak_flops(dtype=dtype or known.dtype or "bf16")
    if dtype is None and known.dtype is None and not math.isnan(peak):
        _warn_once(
            "weights in fp32: products are taken to be in bf16, as under autocast; pass dtype="
        )
    return flops / step_time / peak


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


class _ModelFacts:
    """FLOPs of one sequence by its length, as long as as much of the model is trained as now.

    Walking through a model's modules takes a millisecond, so its parameters are kept. Whoever adds
    an adapter freezes what was there: that is seen too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._trained = self._now_trained()
        self._flops: dict[int, float] = {}
        kept = {parameter.dtype for parameter in self._parameters}
        self.dtype = next((_SHORT[one] for one in _SHORT if one in kept), None)

    def sequence_flops(self, model: nn.Module, seq_length: int) -> float:
        """Counted at the first call for a length."""
        if seq_length not in self._flops:
            self._flops[seq_length] = _counted(model, seq_length)
        return self._flops[seq_length]

    def token_flops(self, model: nn.Module, length: float) -> float:
        """Of a token in sequences of this length, between the powers of two next to it.

        A line between those is exact where attention sees all that is before it: FLOPs of a token
        grow linearly then. So few lengths are ever counted, whatever lengths a training has.
        """
        below = 1 << math.floor(math.log2(max(1.0, length)))
        low = self.sequence_flops(model, below) / below
        if length <= below:
            return low
        try:
            high = self.sequence_flops(model, 2 * below) / (2 * below)
        except ErgmeterError:  # more positions than the model has
            exact = round(length)
            return self.sequence_flops(model, exact) / exact
        return low + (high - low) * (length - below) / below

    def is_current(self) -> bool:
        """Whether nothing was frozen or thawed since."""
        return self._now_trained() == self._trained

    def _now_trained(self) -> int:
        return sum([parameter.requires_grad for parameter in self._parameters])


def knowledge(model: nn.Module) -> _ModelFacts:
    """What is kept of a model: its FLOPs by length, and the type of its weights."""
    known = _known.get(model)
    if known is None or not known.is_current():
        known = _known[model] = _ModelFacts(model)
    return known


def _counted(model: nn.Module, seq_length: int) -> float:
    try:
        return model_work(model, seq_length)[0].chosen.model_per_step
    except ErgmeterError:  # no configuration, or a family that is not known: run it
        return count(model, batch_size=1, seq_len=seq_length).needed.model


def _unknown(why: str) -> float:
    _warn_once(why)
    return math.nan


def _warn_once(said: str) -> None:
    if said not in _warned:
        _warned.add(said)
        warnings.warn(said, stacklevel=4)


def __getattr__(name: str) -> object:
    """The class, from the module that stands on these functions."""
    if name != "TrainingMonitor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ergmeter.compat.training_monitor.monitor import TrainingMonitor  # noqa: PLC0415  as above

    return TrainingMonitor
