"""Wraps optimizer creation, evaluation mode, data loaders and checkpoint writers of torch.

Optimizer steps need no wrapper: torch has a hook for them (see `steps`).

Wrapping `torch.save` alone is not enough. Most checkpoints are safetensors; the small torch.save of
the arguments beside them would report 0.0 s for a checkpoint of a minute. Each wrapper is installed
once per process and informs the loops that are watched at that time.
"""

from __future__ import annotations

import io
import os
import sys
import time
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from ergmeter.integrations.torch.calls import stop_recording
from ergmeter.integrations.torch.roots import without_wrapper

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ergmeter.integrations.torch.steps import Loop
    from ergmeter.integrations.training import Training

loops: list[Loop] = []
SAVES = {
    "torch": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save", "save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model"),
    "lightning.fabric.fabric": ("Fabric.save",),
    "lightning_fabric.fabric": ("Fabric.save",),
    "deepspeed": ("DeepSpeedEngine.save_checkpoint",),
}
# Modules that may have copied such a function into their own namespace on import.
_HOLD_NAMES = (
    *("transformers.", "accelerate.", "peft.", "deepspeed.", "diffusers."),
    *("lightning.", "lightning_fabric.", "pytorch_lightning."),
)
_wrapped: set[str] = set()


_waits: list[Waits] = []


class Waits:
    """Times a training's waits for data, where a framework reports everything else."""

    def __init__(self, training: Training, trains: Callable[[], bool]) -> None:
        """`trains` returns whether a batch is for training; waits on other threads do not count."""
        self._training = training
        self._trains = trains
        self._thread = get_ident()
        patch_torch()
        _waits.append(self)

    def fetched(self, start_ns: int) -> None:
        """Record the wait for a batch, from `start_ns` until now."""
        if get_ident() == self._thread and self._trains():
            self._training.phase_over("data", start_ns)

    def close(self) -> None:
        """Stop timing."""
        if self in _waits:
            _waits.remove(self)


def patch_torch() -> None:
    """Wrap evaluation mode, data loaders, checkpoint writers and new optimizers, once."""
    if "torch" in _wrapped:
        return
    _wrapped.add("torch")
    module, optimizer = torch.nn.Module, torch.optim.Optimizer
    module.train = _reporting(module.train, _mode_set)  # type: ignore[method-assign]
    optimizer.__init__ = _reporting(optimizer.__init__, _optimizer_made)  # type: ignore[method-assign]
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    iterator.__next__ = _timing_fetch(iterator.__next__)  # type: ignore[method-assign]
    module._replicate_for_data_parallel = _unwrapping_replicate(module._replicate_for_data_parallel)  # type: ignore[method-assign]
    for name in SAVES:
        if name in sys.modules:
            patch_saves(name, sys.modules[name])
    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """In a forked child: drop what belongs to the parent."""
    _waits.clear()
    stop_recording()
    for loop in loops:
        loop.forked()


def patch_saves(name: str, module: ModuleType) -> None:
    """Time the checkpoint writers of this module. A save inside another counts once.

    A module that imports torch is still empty when torch has been imported: whatever it does not
    define yet is wrapped once it has been executed.
    """
    for path in SAVES[name]:
        owner, _, method = path.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        save = getattr(holder, method, None)
        if save is not None and f"{name}.{path}" not in _wrapped:
            _wrapped.add(f"{name}.{path}")
            _replace(holder, method, save, _timed_save(save))


def _replace(holder: Any, name: str, save: Any, timed: Any) -> None:  # noqa: ANN401
    setattr(holder, name, timed)
    home = getattr(save, "__module__", None)  # where pickle looks for it
    # Iterate over copies: another thread may be importing, and a dict that grows meanwhile raises,
    # even in list().
    loaded = sys.modules.copy().items()
    others = [other for key, other in loaded if key.startswith(_HOLD_NAMES) or key == home]
    for other in others:
        for attribute, value in getattr(other, "__dict__", {}).copy().items():
            if value is save:
                setattr(other, attribute, timed)


def _reporting(original: Callable[..., Any], report: Callable[[Any], None]) -> Callable[..., Any]:
    """Wrap a method: when it has returned, its object is passed to `report`.

    The wrapper reads no clock, which would break the graph of a compiled function that calls it.
    """

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = original(self, *args, **kwargs)
        report(self)
        return result

    return call


def _timing_fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a data loader's `__next__`: report when it was called, once it has returned."""

    @wraps(original)
    def call(self: Any) -> Any:  # noqa: ANN401
        start_ns = time.monotonic_ns()
        batch = original(self)
        _batch_fetched(start_ns)
        return batch

    return call


def _mode_set(module: Any) -> None:  # noqa: ANN401
    for loop in loops:
        loop.mode(module, training=module.training)


def _optimizer_made(optimizer: Any) -> None:  # noqa: ANN401
    for loop in loops:
        loop.optimizer_made(optimizer)


def _batch_fetched(start_ns: int) -> None:
    for loop in loops:
        loop.fetched(start_ns)
    for waits in _waits:
        waits.fetched(start_ns)


def _unwrapping_replicate(replicate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(replicate)
    def call(self: Any) -> Any:  # noqa: ANN401
        return without_wrapper(replicate(self))

    return call


def _timed_save(save: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(save)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if any(isinstance(arg, io.BytesIO) for arg in args):  # in memory: no checkpoint
            return save(*args, **kwargs)
        starts_ns = [(loop, loop.saves()) for loop in loops]
        try:
            return save(*args, **kwargs)
        finally:
            for loop, start_ns in starts_ns:
                loop.saved(start_ns)

    return call
