"""Measures any torch loop with one line: plain, Accelerate, Fabric, DeepSpeed, FSDP, Megatron.

    watched = watch(model, optimizer, warmup_steps=3)
    for batch in loader:
        ...
    print(watched.summary().readings["throughput.tokens_per_s"])

Steps are detected where the optimizer steps, tokens where the model is called. Evaluation, data
loading and checkpoints are timed where torch does them. The loop is unchanged and never waits for a
device; `integrations/torch/steps.py` has the rules. The loss is not visible: pass it to
`watched.logged(loss=...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ergmeter.errors import UsageError
from ergmeter.integrations.torch import patches
from ergmeter.integrations.torch.steps import Loop
from ergmeter.integrations.training import LastRun, Training
from ergmeter.meter import Meter
from ergmeter.records import Summary

_MOST_WRAPPED = 5


@dataclass(eq=False, repr=False)
class Watched(LastRun):
    """A watched loop, until `close` or the end of the program."""

    _loop: Loop
    _training: Training
    _is_closed: bool = False

    def logged(self, **values: Any) -> None:  # noqa: ANN401
        """Add loss, learning_rate, grad_norm to the last step. Tensors are not waited for."""
        self._training.logged(values)

    def mark(self, name: str, detail: str = "") -> None:
        """Mark this instant in the run. `watched.mark("warmup_end")` ends the warm-up here."""
        self._training.mark(name, detail)

    def _last_meter(self) -> Meter:
        self._meter = self._training.meter or self._meter
        if self._meter is None and self._loop.off and not self._is_closed:
            raise UsageError("a later `watch` replaced this one before any step: use the later one")
        if self._meter is None:
            raise UsageError("no optimizer has stepped since `watch`, so there is no run yet")
        return self._meter

    def close(self) -> None:
        """Stop watching, and close the run."""
        self._is_closed = True
        self._meter = self._training.meter or self._meter
        self._loop.stop()

    def summary(self) -> Summary:
        """Every metric of the run so far. The loop may go on."""
        if self._training.meter is not None:
            self._training.catch_up()
        return super().summary()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def watch(model: Any = None, optimizer: Any = None, **options: Any) -> Watched:  # noqa: ANN401
    """Measure the loop that is about to run in this process; `options` are a Meter's.

    `model` is the module that the loop calls, wrapped or not, and `optimizer` the one that steps.
    Left out, both are found when the first optimizer made after this line has stepped.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module; got a {type(model).__name__}")
    steps = _stepping(optimizer)
    training = Training(**options)
    for other in tuple(patches.loops):  # the hook of `erg record`, or a loop that is over
        other.stop()
    trainings = [training]
    loop = Loop(lambda: trainings.pop() if trainings else None, root=model)
    loop.start(*([] if steps is None else [steps.register_step_post_hook]))
    if steps is not None and model is None:
        loop.optimizer_made(steps)
    return Watched(loop, training)


def _stepping(optimizer: Any) -> Any:  # noqa: ANN401
    """The torch optimizer inside a wrapper of Accelerate, Fabric or DeepSpeed."""
    inmost = optimizer
    for _ in range(_MOST_WRAPPED):
        inner = getattr(inmost, "optimizer", None)
        if inner is None:
            break
        inmost = inner
    if inmost is None or isinstance(inmost, torch.optim.Optimizer):
        return inmost
    raise UsageError(f"optimizer must be a torch optimizer; got a {type(optimizer).__name__}")
