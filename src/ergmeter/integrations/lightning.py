"""A callback that measures Lightning's Trainer.

    Trainer(callbacks=[ErgmeterCallback()])

`on_train_batch_end` is not the end of a step: with gradient accumulation it ends a micro-batch, so
steps are counted by the Trainer's `global_step`. Reading the Trainer's logged values waits for the
device if one of them is in the progress bar. So the loss is the module's return value, passed on
while still on its device. Only for a module that returns none are logged values read, once a
second.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

from ergmeter.errors import PluginError
from ergmeter.integrations.guard import Guarded, Stopping, guarded
from ergmeter.integrations.torch.patches import Waits
from ergmeter.integrations.torch.roots import lightning_precision
from ergmeter.integrations.training import Training, TrainingCallback, failure
from ergmeter.meter import Meter
from ergmeter.units import NS_PER_S

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")  # the same, under its older name
_ASKED_EVERY_NS = NS_PER_S
_ON_EACH_STEP = "_step"  # Lightning appends it to names that it logs by epoch too


def _callback_class() -> Any:  # noqa: ANN401
    """The Callback class of the Lightning that is loaded, else of the installed one."""
    loaded = [name for name in _LIBRARIES if name in sys.modules]
    for name in (*loaded, *_LIBRARIES):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise PluginError("Lightning is not installed here; pip install lightning")


_Callback: Any = _callback_class()


class ErgmeterCallback(TrainingCallback, Guarded, _Callback):
    """Records each `fit` of a Trainer. If a Trainer has several, only the first records."""

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        meter: Meter | None = None,
        **options: Any,  # noqa: ANN401  as Meter takes them
    ) -> None:
        """`meter` is used if given, else one that measures already, else one made of `options`."""
        options = options if out is None else {"out": out, **options}
        self._arguments: tuple[Meter | None, dict[str, Any]] = (meter, options)
        self._next = Training(meter, **options)  # at once: a wrong option is refused here
        self._prepare(looks_on=bool(options.get("looks_on")))
        self._agreed = 0  # the step after which ranks have asked each other
        self._clear()

    def _clear(self) -> None:
        self._training = None
        self._steps = 0
        self._eval_ns = 0
        self._loss: Any = None  # sum over the micro-batches of the step under way
        self._losses = 0  # number of losses in that sum
        self._rate: float | None = None
        self._waits: Waits | None = None
        self._last_metrics: dict[str, Any] = {}
        self._asked_ns = 0
        self._counts_tokens = True
        self._comes_late = False  # the module reads the loader itself: its batch is known later

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, from which a spawned process makes the callback again."""
        meter, options = self._arguments
        return partial(type(self), meter=meter, **options), ()

    # -- life -----------------------------------------------------------------------------------

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401, ARG002
        """Begin the training: the process group exists, and any checkpoint is restored."""
        self._clear()
        self._stopping = Stopping(self._arguments[0], self._next.own)
        first = next(
            callback for callback in trainer.callbacks if isinstance(callback, ErgmeterCallback)
        )
        if first is not self:
            return
        meter, options = self._arguments
        training, self._next = self._next, Training(meter, **options)
        self._training = training
        self._steps = trainer.global_step
        training.begin(trainer.strategy.model, first_step=trainer.global_step)
        training.products_in(lightning_precision(trainer.precision))
        self._begun(training)
        training.total_steps(_steps_planned(trainer))
        self._counts_tokens = _has_its_own_batches(trainer)
        if not self._counts_tokens:
            training.mark("tokens_not_counted", "ranks share their batches (tensor parallel, ...)")
        _time_checkpoints(trainer, training)
        self._waits = Waits(training, lambda: bool(trainer.training))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401, ARG002
        """End the training."""
        self._end(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ANN401, ARG002
        """End the training, which has failed or was interrupted."""
        self._end(trainer, failure(exception))

    def _end(self, trainer: Any, ended: str | None) -> None:  # noqa: ANN401
        """End the training and restore the Trainer, whatever failed before."""
        training, self._training = self._training, None
        if training is None:
            return
        trainer.__dict__.pop("save_checkpoint", None)
        if self._waits is not None:
            self._waits.close()
        training.step_cancelled()
        self._end_training(training, ended)

    # -- steps ----------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Any, _module: Any, batch: Any, *_index: int) -> None:  # noqa: ANN401
        """Begin a step, or go on with it: a micro-batch is on the model's device."""
        training = self._training
        if training is None:
            return
        training.step_begin()
        self._comes_late = self._comes_late or batch is None
        if not self._comes_late:
            training.batch(batch if self._counts_tokens else None)
        if trainer.optimizers:  # now: its schedule goes on before the batch's end
            self._rate = trainer.optimizers[0].param_groups[0].get("lr")

    def on_train_batch_end(self, trainer: Any, _module: Any, *passed: Any) -> None:  # noqa: ANN401
        """End a micro-batch, and the step if the optimizer has stepped."""
        outputs, batch, _index = passed
        self._batch_end(trainer, outputs, batch)
        # Not guarded, as ranks that train together must all come by here.
        if trainer.global_step != self._agreed:
            self._agreed = trainer.global_step
            if self._stopping.is_due(self._meter, self._agreed):
                trainer.should_stop = True

    @guarded
    def _batch_end(self, trainer: Any, outputs: Any, batch: Any) -> None:  # noqa: ANN401
        training = self._training
        if training is None:
            return
        if self._comes_late:
            training.batch(batch if self._counts_tokens else None)
        self._add_loss(outputs)
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        training.step_end(learning_rate=self._rate)
        if self._loss is None:
            training.logged(self._newly_logged(trainer))
        else:
            # Lightning divides each by accumulate_grad_batches; an epoch may end with fewer.
            short = trainer.accumulate_grad_batches / self._losses
            training.logged({"loss": self._loss if short == 1 else self._loss * short})
        self._loss, self._losses = None, 0

    def _add_loss(self, outputs: Any) -> None:  # noqa: ANN401
        """Add a micro-batch's loss: the step's is their mean."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:
            self._losses += 1
            self._loss = loss if self._loss is None else self._loss + loss

    def _newly_logged(self, trainer: Any) -> dict[str, Any]:  # noqa: ANN401
        now_ns = time.monotonic_ns()
        if now_ns - self._asked_ns < _ASKED_EVERY_NS:
            return {}
        self._asked_ns = now_ns
        metrics = dict(trainer.callback_metrics)
        new = {
            name: value
            for name, value in metrics.items()
            if not _is_same(value, self._last_metrics.get(name))
        }
        self._last_metrics = metrics  # kept, so that no new number is put where an old one was
        return {name.removesuffix(_ON_EACH_STEP): value for name, value in new.items()}

    # -- what is no step --------------------------------------------------------------------------

    @guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401, ARG002
        """Store when an evaluation begins."""
        self._eval_ns = time.monotonic_ns()

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401, ARG002
        """Record an evaluation that ends; the sanity check's precedes the training."""
        if self._training is not None:
            self._training.phase_over("eval", self._eval_ns)
        elif self.looks_on:
            self.outside("eval", self._eval_ns)

    on_test_start, on_test_end = on_validation_start, on_validation_end


def _steps_planned(trainer: Any) -> float:  # noqa: ANN401
    """The planned number of steps; infinity where only time or the user ends it."""
    if trainer.max_steps >= 0:
        return float(trainer.max_steps)
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        return float("inf")
    batches = float(trainer.num_training_batches)
    return (
        math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs
        if math.isfinite(batches)
        else batches
    )


def _is_same(value: Any, other: Any) -> bool:  # noqa: ANN401
    """True if both tensors share memory: Lightning returns a new object at each read."""
    return other is not None and value.data_ptr() == other.data_ptr()


def _has_its_own_batches(trainer: Any) -> bool:  # noqa: ANN401
    """True if each rank trains on rows of its own: as many data replicas as ranks."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return bool(sampler.get("num_replicas", trainer.world_size) == trainer.world_size)


def _time_checkpoints(trainer: Any, training: Training) -> None:  # noqa: ANN401
    """Time `save_checkpoint`, which writes all checkpoints: no hook is called at its end."""
    save = trainer.save_checkpoint

    @wraps(save)
    def saved(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        with training.phase("checkpoint"):
            return save(*arguments, **options)

    trainer.save_checkpoint = saved
