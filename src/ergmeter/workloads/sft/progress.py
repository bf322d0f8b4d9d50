"""A trainer callback that reports progress and stops the training on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ergmeter.integrations.guard import any_rank

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training."""

    step: int
    steps: int
    loss: float | None


class Teller(TrainerCallback):
    """Reports every step, and stops the training if `should_stop` returns True."""

    def __init__(
        self,
        tell: Callable[[TrainingProgress], None],
        begun: Callable[[], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._tell, self._begun, self._should_stop = tell, begun, should_stop
        self._loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Calls `begun` once model and optimizer exist."""
        self._begun()

    def on_log(
        self,
        args: Any,  # noqa: ANN401, ARG002
        state: Any,  # noqa: ANN401, ARG002
        control: Any,  # noqa: ANN401, ARG002
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> None:
        """Stores the last logged loss."""
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:  # noqa: ANN401, ARG002
        """Reports progress and stops if requested."""
        self._tell(TrainingProgress(state.global_step, state.max_steps, self._loss))
        if self._all_stop(args, state):
            control.should_training_stop = True
        return control

    def _all_stop(self, args: Any, state: Any) -> bool:  # noqa: ANN401
        """Ranks stop at the same step, or one would wait for the others for ever.

        They ask each other where a loss is logged, since they wait for each other there anyway.
        """
        if args.world_size == 1:
            return self._should_stop()
        if state.global_step % max(1, int(args.logging_steps)):
            return False
        return any_rank(self._should_stop(), args.device)
