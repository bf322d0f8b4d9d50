"""Detects the steps of any torch loop from optimizer steps, model calls, data fetches and saves.

A step lasts from the first training forward of the model to the end of its optimizer's step. If a
GradScaler skips a step, its batches count with the next. Optimizers that step for the same
batch make one step: back to back, or in rounds as in a GAN, where a step ends when one of them
steps again. An optimizer of another model begins a new training if it steps twice while the others
rest, or if the others are gone. Evaluation lasts from `.eval()`, or the first forward without
gradients, to `.train()` or the next training forward.

A process may have several models, optimizers and trainings.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ergmeter.integrations.batches import Counts
from ergmeter.integrations.torch import patches
from ergmeter.integrations.torch.calls import StepRecorder, is_compiling
from ergmeter.integrations.torch.roots import (
    Discovery,
    LossLabels,
    Root,
    is_captured,
    parameters_of,
)
from ergmeter.integrations.training import Training
from ergmeter.meter.clock import moment

_EARLY_WAITS = 64
_NO_START = "no call of the model was seen: a step is timed from the end of the one before"
_CAPTURED = "steps captured in a CUDA graph are not seen when it is replayed: use a Meter for them"


def _say_nothing(*_step: object) -> None:
    """Stands in for `Training.stepped` while there is no training."""


def _nobody() -> None:
    """Stands in for the reference to the only optimizer where there is none, or several."""


@dataclass(frozen=True)
class OptimizerStep:
    """The step, or part of a step, that an optimizer ended."""

    start_ns: int | None  # None: no call of a model was seen
    end_ns: int
    counts: list[Counts]
    micro_steps: int
    after: Any = None


class Loop:
    """Turns a process's torch events into steps of trainings. Its methods never raise."""

    def __init__(
        self,
        make: Callable[[], Training | None],
        *,
        is_recorded_elsewhere: Callable[[], bool] = lambda: False,
        on_made: Callable[[], None] = lambda: None,
        root: nn.Module | None = None,
    ) -> None:
        """`make` returns the Training object for a training that begins; None ends the recording.

        `is_recorded_elsewhere` returns True while another integration records this process.
        `on_made` is called when the first optimizer is made. `root` is the model, where known.
        """
        self._make = make
        self._is_recorded_elsewhere = is_recorded_elsewhere
        self._on_made: Callable[[], None] | None = on_made
        self.discovery = Discovery(self)
        self.off = False
        self._declared_root = Root(root, self) if root is not None else None
        # Records the calls of the first steps, before the trained model is known.
        self._recorder: StepRecorder | None = None
        self._unresolved: WeakSet[Optimizer] = WeakSet()
        self._roots_of: WeakKeyDictionary[Optimizer, Root | None] = WeakKeyDictionary()
        self.optimizers_made = 0
        self._eval_end_ns = 0  # when the last forward of an evaluation returned
        self._waits: deque[tuple[int, int]] = deque(maxlen=_EARLY_WAITS)
        self._saving = 0
        self._handle: Any = None  # of the hook on steps
        self._without_training()
        if self._declared_root is not None:
            self._declared_root.attach()
            self._record()

    def _without_training(self) -> None:
        """Reset everything that belongs to one training."""
        self.training: Training | None = None
        self._labels: LossLabels | None = None  # of the loss module, where they are counted
        self._roots: list[Root] = []  # only the first root's tokens count
        self._root: Root | None = None  # the first of `_roots`
        self._members: WeakSet[Optimizer] = WeakSet()
        # The one member, if there is one: all but a few loops.
        self._only: Callable[[], Optimizer | None] = _nobody
        self._round: set[int] = set()
        # Optimizers of another model that may join the training or begin their own.
        self._newcomers: list[tuple[ref[Optimizer], OptimizerStep]] = []
        self._say: Callable[..., None] = _say_nothing
        self._logged: dict[str, Any] = {}  # logged within the step under way
        self._end_ns = 0
        self._thread = 0  # that trains
        self._marked: set[str] = set()
        self.eval_ns: int | None = None
        self._eval_fetch: tuple[int, int] | None = None

    # -- optimizers -------------------------------------------------------------------------------

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was made: inspect calls to find its model."""
        if self.off or self._declared_root is not None:
            return
        self._unresolved.add(optimizer)
        self.optimizers_made += 1
        self.look_out()

    def look_out(self) -> None:
        """Inspect calls from here on: an optimizer was made, or may have been before."""
        self.discovery.arm()
        if self.training is None:
            self._record()
        if self._on_made is not None:
            self._on_made()
            self._on_made = None

    def _record(self) -> None:
        if self._recorder is None:
            self._recorder = StepRecorder(LossLabels())
            self._recorder.arm()

    def _stop_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            if recorder.labels is not None:
                recorder.labels.detach()

    def stepped(self, optimizer: Optimizer, *_hooked: object) -> None:
        """Record the step of an optimizer, which has just ended."""
        if self.off or is_compiling():
            return
        end_ns = moment()
        root = self._root
        try:
            if is_captured():
                self._say_captured()
            elif (
                self._only() is optimizer
                and root is not None
                and root.start_ns is not None
                and not (root.unknown or root.aside or root.on_device is not None)
                and not (self._waits or self._logged or self._newcomers or self.discovery.armed)
                and self._labels is None
                and self.training is not None
                and not self.training.failed
            ):  # the usual step: only report it
                counts, root.counts = root.counts, []
                self._say(root.start_ns, end_ns, counts, len(counts))
                root.start_ns, self._end_ns = None, end_ns
            elif self.training is None and self._is_recorded_elsewhere():
                self._resolved(optimizer)
            else:
                self._stepped(optimizer, end_ns)
                self._thread = get_ident()
        except Exception as error:  # noqa: BLE001  never break training
            self.fail(error)

    def _stepped(self, optimizer: Optimizer, end_ns: int) -> None:
        training = self.training
        if training is not None and (training.failed or training.meter is None):
            self._let_go()  # it was ended because the user's own Meter began
            training = None
        if training is None and self._is_recorded_elsewhere():
            self._resolved(optimizer)
        elif training is None:
            self._begin(optimizer, [], end_ns)
        elif optimizer in self._members:
            self._member_stepped(optimizer, end_ns, training)
        else:
            self._other_stepped(optimizer, end_ns, training)

    def _member_stepped(self, optimizer: Optimizer, end_ns: int, training: Training) -> None:
        for newcomer, step in self._newcomers:  # they stepped between two steps of ours: one round
            training.extend(step.end_ns)
            self._join(newcomer())
            self._round.add(id(newcomer()))
        self._newcomers = []
        piece = self._piece(end_ns)
        if id(optimizer) in self._round or not self._round:
            self._round = {id(optimizer)}
            self._tell(piece)
        else:
            self._round.add(id(optimizer))
            self._end_ns = end_ns
            training.extend(end_ns)

    def _other_stepped(self, optimizer: Optimizer, end_ns: int, training: Training) -> None:
        root = self._root_of(optimizer)
        began_ns = root.start_ns if root is not None else None
        before = [step for newcomer, step in self._newcomers if newcomer() is optimizer]
        if before or not self._members:
            self._begin(optimizer, before, end_ns)
        elif root in self._roots or began_ns is None or began_ns < self._end_ns:
            self._join(optimizer)  # it trains the same model, or stepped for the same batch
            self._member_stepped(optimizer, end_ns, training)
        else:
            self._newcomers.append((ref(optimizer), self._piece(end_ns, root)))
            for other in self._roots:
                other.take_step()

    def _join(self, optimizer: Optimizer | None) -> None:
        if optimizer is None:
            return
        root = self._root_of(optimizer)
        if root is not None and root not in self._roots:
            root.active = True
            self._roots.append(root)
        self._members.add(optimizer)
        self._only = _nobody
        self.optimizers_made = max(self.optimizers_made, 2)  # they may be older than this loop

    def _root_of(self, optimizer: Optimizer) -> Root | None:
        """The root of the optimizer (the module it trains), searched for at its first step."""
        if optimizer in self._roots_of:
            return self._roots_of[optimizer]
        root = self._declared_root or self.discovery.root_of(optimizer)
        if root is None:
            trained = parameters_of(optimizer)
            root = next((other for other in self._roots if other.owned(trained)), None)
        self._roots_of[optimizer] = root
        if root is not None:
            root.attach()
            self.discovery.ignore(root)
        self._resolved(optimizer)
        return root

    def _resolved(self, optimizer: Optimizer) -> None:
        self._unresolved.discard(optimizer)
        if not self._unresolved:
            self.discovery.disarm()
            if self.training is None and self._is_recorded_elsewhere():
                self._stop_recording()  # another integration records this process

    # -- trainings --------------------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer, before: list[OptimizerStep], end_ns: int) -> None:
        """Begin a training whose first step has just ended."""
        root = self._root_of(optimizer)
        logged = self._logged if self.training is None else {}
        self.end(is_followed=True)
        training = self._make()
        if training is None:
            self._stop_recording()
            return
        self.training = training
        self._roots = [root] if root is not None else []
        self._root = root
        self._logged = logged
        self._say = training.stepped
        self._members = WeakSet([optimizer])
        self._only = ref(optimizer)
        self._round = {id(optimizer)}
        recorder = self._recorder_now()
        piece = self._piece(end_ns)
        if self._labels is not None and not self._labels.is_active:
            self._labels = None
        training.begin(root.module() if root is not None else None, recorder=recorder)
        training.products_in(root.dtype if root is not None else None)
        training.before_end = self._end_evaluation
        for start_ns, evaluated_ns in root.early_evals if root is not None else ():
            training.phase_over("eval", start_ns, end_ns=evaluated_ns)
        # Our set-up counts in this step, as in the program's own timing, not in a gap after it.
        for step in (*before, replace(piece, end_ns=moment())):
            self._tell(step)
        if root is not None:
            root.active = True

    def _recorder_now(self) -> StepRecorder:
        """Return the recorder of module calls for the training that begins, armed."""
        recorder, self._recorder = self._recorder or StepRecorder(LossLabels()), None
        recorder.is_evaluating = lambda: self.eval_ns is not None
        self._labels = recorder.labels
        recorder.arm()
        return recorder

    def end(self, *, is_followed: bool = False) -> None:
        """End the training. `is_followed`: another training begins in this process."""
        training = self.training
        self._end_evaluation()
        self._let_go()
        if training is not None:
            training.end(is_followed=is_followed)

    def start(self, register: Callable[[Any], Any] = register_optimizer_step_post_hook) -> None:
        """Begin to watch. `register`: registers a hook on the steps of optimizers."""
        patches.patch_torch()
        patches.loops.append(self)
        self._handle = register(self.stepped)

    def stop(self) -> None:
        """End the training, and stop watching the loop."""
        self.off = True
        if self in patches.loops:
            patches.loops.remove(self)
            self._handle.remove()
        self.discovery.disarm()
        self._stop_recording()
        self.end()
        self._detach()

    def _detach(self) -> None:
        for root in {self._declared_root, *self._roots, *self._roots_of.values()}:
            if root is not None:  # drop their counts
                root.detach()
                root.take_step()
        if self._labels is not None:
            self._labels.detach()

    def _let_go(self) -> None:
        if self._labels is not None:
            self._labels.detach()
        for root in self._roots:
            root.active = False
        self._without_training()

    def fail(self, error: Exception) -> None:
        """Mark an exception of ergmeter's own in the run, and stop watching the loop."""
        self.off = True
        self.discovery.disarm()
        self._stop_recording()
        if self.training is not None:
            self.training.fail(error)
        self._detach()
        self._roots = []

    def forked(self) -> None:
        """In a forked child: drop what belongs to the parent."""
        self._stop_recording()
        self._let_go()
        self._roots_of = WeakKeyDictionary()

    def _piece(self, end_ns: int, root: Root | None = None) -> OptimizerStep:
        """Return the optimizer step that ends now: what the roots computed since the last one."""
        first = root or (self._roots[0] if self._roots else None)
        if first is None:
            return OptimizerStep(None, end_ns, [], 1)
        start_ns, counts, micro_steps, after = first.take_step()
        if self._labels is not None and root is None:
            counts, after = self._labels.merged(counts, after)
        starts_ns = [start_ns] if start_ns is not None else []
        if root is None and len(self._roots) > 1:
            more = [other.take_step()[0] for other in self._roots[1:]]
            starts_ns += [other_ns for other_ns in more if other_ns is not None]
        return OptimizerStep(min(starts_ns, default=None), end_ns, counts, micro_steps, after)

    def _tell(self, piece: OptimizerStep) -> None:
        before_ns, self._end_ns = self._end_ns, piece.end_ns
        assert self.training is not None
        if self.discovery.armed:
            self.discovery.forget()
        while self._waits:
            start_ns, end_ns = self._waits.popleft()
            self.training.phase_over("data", start_ns, end_ns=end_ns)
        if piece.start_ns is None:
            self._mark_once("step_starts_not_seen", _NO_START)
        start_ns = piece.start_ns or before_ns
        if start_ns:  # else it is the first, whose duration is unknown
            self._say(start_ns, piece.end_ns, piece.counts, piece.micro_steps, piece.after)
        if self._logged:
            logged, self._logged = self._logged, {}
            self.training.logged(logged)

    def _say_captured(self) -> None:
        """Mark that a step was captured in a CUDA graph: its replays make no calls."""
        for root in self._roots:
            root.drop()
        self._mark_once("steps_in_cuda_graph", _CAPTURED)

    def _mark_once(self, name: str, detail: str) -> None:
        if name not in self._marked and self.training is not None:
            self._marked.add(name)
            self.training.mark(name, detail)

    # -- what else takes time ---------------------------------------------------------------------

    def trains(self, root: Root, now_ns: int) -> None:
        """End the evaluation in progress, if any: a root is called for a training step."""
        if self.eval_ns is not None and root in self._roots:
            fetch, self._eval_fetch = self._eval_fetch, None
            self._evaluated(fetch[0] if fetch else now_ns)
            if fetch and self.training is not None:
                self.training.phase_over("data", fetch[0], end_ns=fetch[1])

    def evaluates(self, root: Root, now_ns: int) -> None:
        """Begin an evaluation, unless one is in progress: a root is called outside training."""
        if self._roots and root is self._roots[0]:
            self._eval_fetch = None
            if self.eval_ns is None:
                self.eval_ns = now_ns
        elif self.training is None and not torch.is_grad_enabled():
            root.evaluates_early(now_ns)

    def evaluated(self, root: Root) -> None:
        """Store when a root's call outside training returned: the evaluation may end here."""
        if self.training is None:
            root.evaluated_early(time.monotonic_ns())
        elif self.eval_ns is not None and root in self._roots:
            self._eval_end_ns = time.monotonic_ns()

    def _end_evaluation(self) -> None:
        """End the evaluation that is in progress when a training ends."""
        if self.eval_ns is not None and self._eval_end_ns > self.eval_ns:
            self._evaluated(self._eval_end_ns)

    def evaluated_nothing(self) -> None:
        """Drop the evaluation in progress: its calls were training."""
        self.eval_ns = self._eval_fetch = None

    def mode(self, module: nn.Module, *, training: bool) -> None:
        """Begin an evaluation at the model's `.eval()`, and end it at its `.train()`."""
        if not self._roots or id(module) not in self._roots[0].parts or self.training is None:
            return
        now_ns = time.monotonic_ns()
        if not training and self.eval_ns is None and not self._roots[0].trains_in_eval:
            self.eval_ns = now_ns
        elif training and self.eval_ns is not None:
            self._evaluated(now_ns)

    def _evaluated(self, end_ns: int) -> None:
        start_ns, self.eval_ns = self.eval_ns, None
        self._eval_fetch = None
        if self._roots:
            self._roots[0].aside = None
        if self.training is not None and start_ns is not None:
            self.training.phase_over("eval", start_ns, end_ns=end_ns)

    def fetched(self, start_ns: int) -> None:
        """Record the wait for a batch, from `start_ns` until now."""
        end_ns = time.monotonic_ns()
        if self._is_elsewhere():
            return
        if self.eval_ns is not None:
            self._eval_fetch = (start_ns, end_ns)
        elif self.training is not None and not self._unresolved:
            self.training.phase_over("data", start_ns, end_ns=end_ns)
        else:  # the next optimizer's step decides which training it belongs to
            self._waits.append((start_ns, end_ns))

    def _is_elsewhere(self) -> bool:
        """True on a thread that does not train: the training does not wait for it."""
        return self._thread != 0 and self._thread != get_ident()

    def saves(self) -> int | None:
        """Begin a checkpoint; return its start, or None on a thread that does not train."""
        if self._is_elsewhere():
            return None
        self._saving += 1
        return time.monotonic_ns()

    def saved(self, start_ns: int | None) -> None:
        """End a checkpoint that `saves` began. A nested one counts with the outer one."""
        if start_ns is None:
            return
        self._saving -= 1
        training = self.training
        if self._saving or training is None:
            return
        if self.eval_ns is not None:  # between two parts of an evaluation
            if start_ns > self.eval_ns:
                training.phase_over("eval", self.eval_ns, end_ns=start_ns)
            self.eval_ns = time.monotonic_ns()
        training.phase_over("checkpoint", start_ns)

    def logged(self, values: dict[str, Any]) -> None:
        """Add values that the program logs to the step in progress, else to the last one."""
        if self.off or (self.training is None and not self._unresolved):
            return
        if self.eval_ns is not None:  # metrics of an evaluation, whatever their names
            return
        if self.training is None or (self._root is not None and self._root.start_ns is not None):
            self._logged.update(values)
        else:
            self.training.logged(values)
