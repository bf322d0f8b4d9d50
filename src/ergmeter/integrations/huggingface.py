"""A callback that measures transformers' Trainer, and what is built on it (TRL).

    trainer = Trainer(..., callbacks=[ErgmeterCallback(warmup_steps=3)])

Callbacks never receive a batch, and collators and forward hooks also see prefetched, evaluated and
traced ones. So the callback finds the trainer among the callers of `on_train_begin` and counts what
it passes to `training_step`, on this object alone and until its training ends. The Trainer logs a
loss as the mean since the last log: it is stored with the step it was logged at, and a mark in the
run says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import monotonic_ns
from traceback import walk_stack
from typing import Any

from transformers import TrainerCallback

from ergmeter.errors import UsageError
from ergmeter.integrations.guard import Stopping
from ergmeter.integrations.training import Training, TrainingCallback, failure
from ergmeter.meter import Meter
from ergmeter.records import Phase
from ergmeter.runlog.process_group import framework_layout

# Methods of a trainer that are timed outside of steps. A nested call belongs to the outer one:
# `evaluate` calls itself for several sets, and a checkpoint saves the model.
_PHASES: dict[str, Phase] = {
    "get_batch_samples": "data",
    "evaluate": "eval",
    "_save_checkpoint": "checkpoint",
    "save_model": "checkpoint",
}
_LOGGED = ("loss", "grad_norm", "learning_rate")
# The Trainer's arguments for the precision of matrix products, the shortest type first.
_DTYPES = ("bf16", "fp16", "tf32")


class ErgmeterCallback(TrainingCallback, TrainerCallback):
    """Measures every training of a Trainer: in a run of its own, or in that of `erg record`."""

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        meter: Meter | None = None,
        **options: Any,  # noqa: ANN401  as Meter takes them
    ) -> None:
        """`options` are those of `Meter`: name, warmup_steps, sinks, dtype, note, ...; and
        `profile_steps`, the number of steps to run torch's profiler for.

        `meter` is a Meter to use, started or not; it has its own options, so give no others.
        """
        if meter is not None and (out is not None or options):
            raise UsageError("give meter=, or out= and options for a new Meter, not both")
        # Wrong options raise now, not once the model is loaded.
        self._asked = meter or Training(out=out, **options).own
        self._prepare(looks_on=bool(options.get("looks_on")))
        self._out = out
        self._chosen_meter = meter
        self._options = options
        self._trainings = 0
        self._trainer: Any = None
        self._state: object = None
        self._replaced: dict[str, Any] = {}
        self._generates: Any = None
        self._is_inside = False
        self._micro_steps = 0
        self._counts_tokens = True

    # -- events of the Trainer --------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Begin the training, which may resume from a checkpoint."""
        self._stopping = Stopping(self._asked)
        try:
            self._begin(args, state, kwargs.get("model"))
        except Exception as error:  # noqa: BLE001  never break training
            self._over(f"not measured ({type(error).__name__}: {error})")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Begin a step: its batches have been fetched."""
        if self._training is not None:
            self._training.step_begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """End a step: the optimizer has stepped."""
        if self._training is not None:
            self._training.step_end(micro_steps=self._micro_steps or None)
            self._micro_steps = 0
        if self._stopping.is_due(self._meter, state.global_step):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Store the logged loss of the last steps; logs of evaluations have none."""
        logs = kwargs.get("logs")
        if self._training is not None and logs and "loss" in logs:
            self._training.logged({name: logs[name] for name in _LOGGED if name in logs})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """End the training."""
        self._over()

    # -- inside -----------------------------------------------------------------------------------

    def _begin(self, args: Any, state: Any, model: object) -> None:  # noqa: ANN401
        trainer = _trainer_around(self)
        if state is self._state or not _tells(self, trainer):
            return  # added twice: once is enough
        self._over("failed (another training began before its end)")
        self._state, self._trainer = state, trainer
        self._training = self._another()
        self._training.begin(model, first_step=state.global_step)
        if self._training.meter is None:
            return  # another callback records this training
        self._begun(self._training)
        self._training.products_in(next((n for n in _DTYPES if getattr(args, n, None)), None))
        self._micro_steps = 0
        self._training.total_steps(getattr(state, "max_steps", 0))
        if args.logging_strategy != "steps" or state.logging_steps != 1:
            self._training.mark("loss_is_mean", "of the steps since the last one it was logged at")
        self._watch(self._training)

    def _another(self) -> Training:
        self._trainings += 1
        if self._chosen_meter is not None:
            return Training(self._chosen_meter)
        out = self._out
        if out is not None and self._trainings > 1:
            out = f"{out}-{self._trainings}"
        return Training(out=out, **self._options)

    def _watch(self, training: Training) -> None:
        """Wrap the trainer's own methods, on this object alone."""
        trainer = self._trainer
        if trainer is None:
            training.mark("tokens_not_counted", "the Trainer that calls this callback isn't found")
            return
        self._counts_tokens = not _ranks_share_batches(trainer) or _is_laid_out(trainer, training)
        if not self._counts_tokens:
            training.mark(
                "tokens_not_counted",
                "ranks share their batches (tensor, context, ...), which is unknown: pass layout=",
            )
        if _size_of(trainer, "cp_size") > 1 and training.meter is not None:
            # On context-parallel ranks `training_step` cuts the batch after we have counted it.
            # Sequence parallelism (Ulysses) cuts it in its data loader, before.
            training.meter._header(whole_sequences=True)
        self._replace("training_step", self._counted(trainer.training_step))
        self._generates = _counting_generation(trainer, self._training)
        for name, phase in _PHASES.items():
            if hasattr(trainer, name):
                self._replace(name, self._timed(getattr(trainer, name), phase))

    def _replace(self, name: str, ours: Callable[..., Any]) -> None:
        self._replaced[name] = (ours, vars(self._trainer).get(name))
        setattr(self._trainer, name, ours)

    def _over(self, ended: str | None = None) -> None:
        """End the training, and restore the trainer's methods."""
        training, self._training = self._training, None
        for name, (ours, before) in self._replaced.items():
            if vars(self._trainer).get(name) is not ours:
                continue  # wrapped by other code; ours does nothing from now on
            if before is None:
                delattr(self._trainer, name)
            else:
                setattr(self._trainer, name, before)
        self._replaced = {}
        if self._generates is not None:
            self._generates.remove()
            self._generates = None
        self._trainer = None
        if training is not None:
            if ended is not None:
                training.mark("training_failed", ended)
            self._end_training(training, ended)

    def _counted(self, called: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(called)
        def training_step(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            if self._training is not None:
                inputs = named.get("inputs", args[1] if len(args) > 1 else None)
                self._micro_steps += 1
                self._training.batch(inputs if self._counts_tokens else None)
            return self._passed_on(called, *args, **named)

        return training_step

    def _timed(self, called: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
        @wraps(called)
        def call(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            if self._is_inside or self._training is None:
                return called(*args, **named)
            self._is_inside = True
            start_ns = monotonic_ns()
            try:
                result = self._passed_on(called, *args, **named)
            finally:
                self._is_inside = False
            if self._training is not None:
                self._training.phase_over(phase, start_ns)
            return result

        return call

    def _passed_on(self, called: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401
        """Call the trainer's method. An exception ends the training: a Trainer handles none."""
        try:
            return called(*args, **named)
        except BaseException as error:  # the program's own, passed on: also when it is interrupted
            self._over(failure(error))
            raise


def _counting_generation(trainer: Any, training: Training | None) -> Any:  # noqa: ANN401
    """Count what the trained model generates, where its trainer generates (GRPO, RLOO)."""
    model, meter = trainer.model, training.meter if training is not None else None
    if meter is None or not hasattr(trainer, "num_generations") or not hasattr(model, "generate"):
        return None
    from ergmeter.integrations.generate import GeneratedTokens  # noqa: PLC0415

    return GeneratedTokens(model, meter)


def _trainer_around(callback: TrainerCallback) -> Any:  # noqa: ANN401  a Trainer, or None
    """The trainer among our callers that has this callback: callbacks are not passed it."""
    for frame, _line in walk_stack(sys._getframe(1)):
        caller = frame.f_locals.get("self")
        callbacks = getattr(getattr(caller, "callback_handler", None), "callbacks", ())
        if any(other is callback for other in callbacks):
            return caller
    return None


def _tells(callback: ErgmeterCallback, trainer: Any) -> bool:  # noqa: ANN401
    """True if this callback is the one that records: the first one that the user added."""
    if trainer is None:
        return True
    ours = [c for c in trainer.callback_handler.callbacks if isinstance(c, ErgmeterCallback)]
    asked = [other for other in ours if not other.looks_on]
    return (asked or ours)[0] is callback


def _is_laid_out(trainer: Any, training: Training) -> bool:  # noqa: ANN401
    """True if the ranks with equal batches are known, so that a reader counts them once."""
    declared = training.meter is not None and training.meter.plan.settings.layout is not None
    return declared or "at" in (framework_layout(trainer.model) or {})


def _ranks_share_batches(trainer: Any) -> bool:  # noqa: ANN401
    """True if several ranks are given the same tokens, which a sum would count twice."""
    return trainer.get_tp_size() > 1 or _size_of(trainer, "non_data_parallel_size") > 1


def _size_of(trainer: Any, name: str) -> int:  # noqa: ANN401
    """One size of Accelerate's parallelism; 1 where it has none."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return int(getattr(config, name, None) or 1)
