"""A Trainer's callback that reports progress, and ends a training on a signal or a time limit.

The first SIGINT or SIGTERM lets the step in progress end, unless that takes longer than the grace.
A step can be one call into C for minutes, in which no signal handler of Python runs. So signals are
also written to a socket (`signal.set_wakeup_fd`), and a thread reads it. To end a step, the thread
saves, closes the run and leaves the process; the main thread never returns from the step.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

import torch
from transformers import TrainerCallback

from ergmeter.integrations.guard import any_rank
from ergmeter.units import duration

LONGEST_S = 6 * 3600.0  # of all trainings of a command
WARM_UP_S = 300.0  # at most, within a first step
_TIMED = 3  # first steps, of which the shortest is the estimate for all
_LOOK_S = 0.5
_OPTIMIZER_S = 5.0  # for the optimizer's step to end: weights that change are not saved
_FINISHING = "finishing this step and saving; a second signal ends it at once"
_TOO_LONG = (
    "the whole training would take more than 6 h: {}; take fewer steps (train.max_steps), a smaller"
    " model or a GPU, or --anyway"
)

# A forked worker of a data loader would write its own signals to our socket.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def note(text: str) -> None:
    """Prints a line on standard error at once, from any thread."""
    sys.stderr.write(f"[train] {text}\n")
    sys.stderr.flush()


class TrainingWatch(TrainerCallback):
    """Reports every step, and decides when a training ends early."""

    def __init__(
        self,
        tell: Callable[..., None] = lambda *_progress: None,
        anyway: bool = False,
        grace_s: float = 60.0,
        series: tuple[int, float] = (1, 0.0),
    ) -> None:
        """`tell` gets the step, the number of steps and the last loss.

        `series`: how often this training is still to run in a series, this time included, and the
        seconds that the series' other trainings take, as far as measured.
        """
        self._tell, self._anyway, self._grace_s = tell, anyway, grace_s
        self._times, self._others_s = series
        self.begun: Callable[[], None] = lambda: None
        self.by: int | None = None  # the first signal
        self.reason = ""  # why the training can't finish
        self._is_watching = False
        self._weights = threading.RLock()  # held while they change, and when they are saved
        self._durations: list[float] = []  # of the first steps
        self._step_began_s, self._due_s = 0.0, math.inf  # when the step in progress is ended

    def on_signal(self, number: int, _frame: object) -> None:
        """Ends the process, unless a training is watched: then the thread handles the signal."""
        if not self._is_watching:
            raise SystemExit(128 + number)

    @contextmanager
    def watches(self, end_now: Callable[[bool], int]) -> Iterator[None]:
        """Watches a training. `end_now(may_save)` ends it within a step; returns the exit code."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(target=self._watch, args=(reader, end_now), daemon=True)
        thread.start()
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False
            signal.set_wakeup_fd(before)
            writer.close()
            thread.join()  # once it has read every signal that came

    def ends(self) -> None:
        """Removes the time limits when the training is over, and takes the weights' lock."""
        self._weights.acquire()
        self._grace_s = self._due_s = math.inf

    def _watch(self, reader: socket.socket, end_now: Callable[[bool], int]) -> None:
        with reader:
            while True:
                if select.select([reader], [], [], _LOOK_S)[0]:
                    number = int.from_bytes(reader.recv(1), "big")
                    if not number:  # the writer is closed
                        return
                    if number in (signal.SIGINT, signal.SIGTERM):
                        self._signalled(number)
                if self._due_s <= monotonic():
                    self._end(end_now)

    def _end(self, end_now: Callable[[bool], int]) -> None:
        """Ends the process, unless the first step or the training has just ended by itself."""
        weights = self._weights
        may_save = weights.acquire(timeout=_OPTIMIZER_S)
        if self._due_s > monotonic():
            if may_save:
                weights.release()
            return
        if not may_save:  # another lock for the main thread to stop at, after the optimizer's step
            self._weights = threading.RLock()
            self._weights.acquire()
        if self.by is None:
            elapsed = duration(self._elapsed_s())
            self.refuse(_TOO_LONG.format(f"its first step took {elapsed} so far"))
        code = 1
        try:
            code = end_now(may_save)
        finally:
            os._exit(code)

    def _signalled(self, number: int) -> None:
        """Sets when the step in progress is ended: at once, or after the grace."""
        left_s = min(self._durations, default=0.0) - self._elapsed_s()
        is_over = self.by is not None or left_s > self._grace_s
        wait_s = 0.0 if is_over else self._grace_s
        note(_FINISHING if wait_s else "ending this step")
        self.by, self._due_s = self.by or number, monotonic() + wait_s

    def _elapsed_s(self) -> float:
        return monotonic() - self._step_began_s

    def refuse(self, reason: str) -> None:
        """Stores why the training must end; with `anyway`, only prints that as a warning."""
        if self._anyway:
            note(f"Warning: {reason}")
        else:
            self.reason = reason

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Calls `begun` once model and optimizer exist."""
        self.begun()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Limits the first step to its share of LONGEST_S, plus WARM_UP_S."""
        self._step_began_s = monotonic()
        is_first = not self._durations and self.by is None and state.is_world_process_zero
        if is_first and not self._anyway:
            steps = self._times * max(1, state.max_steps - state.global_step)
            self._due_s = monotonic() + WARM_UP_S + max(0.0, LONGEST_S - self._others_s) / steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Takes the weights' lock until the step's end. Blocks for ever if the process ends."""
        self._weights.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:  # noqa: ANN401, ARG002
        """Reports progress, and stops if requested or if all steps would take too long."""
        if self.by is None:
            self._due_s = math.inf
        with suppress(RuntimeError):  # it was not acquired
            self._weights.release()
        if len(self._durations) < _TIMED:
            self._judge(state)
        losses = (entry["loss"] for entry in reversed(state.log_history) if "loss" in entry)
        self._tell(state.global_step, state.max_steps, next(losses, None))
        if self._all_stop(args, state):
            control.should_training_stop = True
        return control

    def _judge(self, state: Any) -> None:  # noqa: ANN401
        """Estimates the time of all steps by the shortest of the first ones."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._durations.append(self._elapsed_s())
        step_s, left = min(self._durations), state.max_steps - state.global_step
        total_s = self._others_s + self._times * (_TIMED + left) * step_s
        is_judged = len(self._durations) == _TIMED and left and state.is_world_process_zero
        if is_judged and total_s > LONGEST_S:
            times = f" x {self._times} trainings" if self._times > 1 else ""
            text = f"{duration(total_s)}, by {duration(step_s)} a step (the shortest of the first"
            self.refuse(_TOO_LONG.format(f"{text} {_TIMED}) x {_TIMED + left} steps{times}"))

    def _all_stop(self, args: Any, state: Any) -> bool:  # noqa: ANN401
        """True if all ranks stop at this step. One that stopped alone would leave others waiting.

        They ask each other where a loss is logged, since they wait for each other there anyway.
        """
        is_asked = self.by is not None or bool(self.reason)
        if args.world_size == 1:
            return is_asked
        if state.global_step % max(1, int(args.logging_steps)):
            return False
        is_voted = any_rank(is_asked, args.device)
        if is_voted and not is_asked:
            self.reason = "another rank stopped"
        return is_voted
