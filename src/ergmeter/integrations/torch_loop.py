"""One line for any torch loop: plain, Accelerate, Fabric, DeepSpeed, FSDP, Megatron-style.

    watched = watch(model, optimizer, warmup_steps=3)
    for batch in loader:
        ...
    print(watched.summary().readings["throughput.tokens_per_s"])

Steps are seen where the optimizer steps, tokens where the model is called, and what else takes time
where torch does it: the loop itself is not changed, and nothing waits for a device. What the rules
are is told in `torch_steps`. The loss is not seen: give it to `watched.logged(loss=...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ergmeter.errors import UsageError
from ergmeter.integrations.torch import patches
from ergmeter.integrations.torch.steps import Loop
from ergmeter.integrations.training import Training

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from ergmeter.records import Summary

_MOST_WRAPPED = 5


class Watched:
    """A loop that is watched, until `close` or the end of the program."""

    def __init__(self, loop: Loop, training: Training, handle: Any) -> None:  # noqa: ANN401
        self._loop = loop
        self._handle = handle
        self._training = training
        self._path: Path | None = None
        self._is_closed = False

    def logged(self, **values: Any) -> None:  # noqa: ANN401
        """Figures of the last step: loss, learning_rate, grad_norm. Tensors are not waited for."""
        self._training.logged(values)

    def mark(self, name: str, detail: str = "") -> None:
        """Name this instant. `watched.mark("warmup_end")` ends the warm-up here."""
        self._training.mark(name, detail)

    @property
    def path(self) -> Path:
        """The run directory, once there was a step."""
        meter = self._training.meter
        if meter is not None:
            self._path = meter.path
        if self._path is None and self._loop.off and not self._is_closed:
            raise UsageError("another `watch` took the place of this one before a step: use that")
        if self._path is None:
            raise UsageError("no optimizer has stepped since `watch`, so there is no run yet")
        return self._path

    def close(self) -> None:
        """Watch no longer, and close the run."""
        self._is_closed = True
        if self._training.meter is not None:
            self._path = self._training.meter.path
        self._handle.remove()
        if self._loop in patches.loops:
            patches.loops.remove(self._loop)
        self._loop.stop()

    def summary(self) -> Summary:
        """Every metric of the run so far. The loop may go on."""
        from ergmeter.metrics.summarize import summarize  # noqa: PLC0415  loads numpy and pyarrow
        from ergmeter.runlog.reader import Run  # noqa: PLC0415

        meter = self._training.meter
        if meter is None:
            return summarize(Run.open(self.path))
        self._training.catch_up()
        return meter.summary()

    def __enter__(self) -> Watched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def watch(model: Any = None, optimizer: Any = None, **options: Any) -> Watched:  # noqa: ANN401
    """Measure the loop that is about to run, in this process; `options` are a Meter's.

    `model` is what the loop calls, in whatever it is wrapped, and `optimizer` what steps; left out,
    both are found out when the first optimizer that was made after this line has stepped.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module; got a {type(model).__name__}")
    steps = _stepping(optimizer)
    training = Training(**options)
    for other in patches.loops:  # the hook of `erg record`, or a loop that is over
        other.stop()
    patches.loops.clear()
    trainings = [training]
    loop = Loop(lambda: trainings.pop() if trainings else None, root=model)
    patches.look_at_torch()
    patches.loops.append(loop)
    if steps is None:
        handle = register_optimizer_step_post_hook(loop.stepped)
    else:
        handle = steps.register_step_post_hook(loop.stepped)
    if steps is not None and model is None:
        loop.optimizer_made(steps)
    return Watched(loop, training, handle)


def _stepping(optimizer: Any) -> Any:  # noqa: ANN401
    """The optimizer of torch in what Accelerate, Fabric or DeepSpeed made of it."""
    found = optimizer
    for _ in range(_MOST_WRAPPED):
        inner = getattr(found, "optimizer", None)
        if inner is None:
            break
        found = inner
    if found is None or isinstance(found, torch.optim.Optimizer):
        return found
    raise UsageError(f"optimizer must be a torch optimizer; got a {type(optimizer).__name__}")
