"""One training as every integration reports it to a Meter.

An integration calls this when its framework begins a step, passes a batch, evaluates or saves; it
computes nothing itself. The training thread pays for timestamps, shapes and, on a device, two small
reductions that are not waited for. An error in here becomes a mark in the run and ends the
recording, never the training.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError
from ergmeter.integrations.batches import Counts, count_samples, count_tokens
from ergmeter.integrations.guard import Guarded, Stopping, guarded
from ergmeter.integrations.model_description import Description
from ergmeter.integrations.unsettled_steps import Brief, UnsettledSteps, device_events
from ergmeter.meter import Meter, active_meters
from ergmeter.meter.clock import moment
from ergmeter.meter.run_plan import print_notice
from ergmeter.records import Mark, Phase, Step, Summary

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.integrations.profiling import Profile
    from ergmeter.integrations.torch.calls import StepRecorder
    from ergmeter.integrations.torch.roots import Root

_MOST_UNSETTLED = 1_000_000  # steps that wait for numbers of a device: then it does not answer
_MOST_EARLY = 64  # evaluations and saves before a training
_TOO_MANY = f"the device does not answer: {_MOST_UNSETTLED} steps wait for their numbers"


class Training(Guarded):
    """One training, from its first step to its last. Safe to call from any thread."""

    def __init__(
        self,
        meter: Meter | None = None,
        *,
        profile_steps: Any = 0,  # noqa: ANN401  checked here
        **options: Any,  # noqa: ANN401
    ) -> None:
        """`meter` is used if given, else one that measures already, else one made of `options`.

        `profile_steps`: run torch's profiler for so many steps, which makes them longer.
        """
        is_count = isinstance(profile_steps, int) and not isinstance(profile_steps, bool)
        if not is_count or profile_steps < 0:
            raise UsageError(f"profile_steps must be an integer, 0 or more; got {profile_steps!r}")
        self.own = Meter(**options) if meter is None else None
        # True for the hook of `erg record`: any other Meter or callback has priority.
        self._looks_on = self.own is not None and self.own.looks_on
        self._chosen_meter = meter
        self.meter: Meter | None = None
        self.failed = ""
        self._model: Description | None = None
        self._shifts = True
        self._start_ns: int | None = None
        self._counts: list[Counts] = []
        self._calls: Root | None = None
        self._unknown = False  # a micro-batch of this step without tokens: their sum isn't known
        self._unsettled = UnsettledSteps(self._pass_on)
        self._index = 0
        self._logged: dict[str, Any] = {}
        self._last: Step | None = None
        self._pid = 0
        self._rests = False  # its last step is done
        self.before_end: Callable[[], None] | None = None  # reports an evaluation in progress
        self._profile_steps = profile_steps
        self._profile: Profile | None = None

    # -- life -----------------------------------------------------------------------------------

    @guarded
    def begin(
        self, model: object = None, *, first_step: int = 0, recorder: StepRecorder | None = None
    ) -> None:
        """Begin the training, or resume it after `first_step` steps.

        `recorder`, if given, records the training's module calls already.
        """
        if self.meter is not None:
            return
        if not self._looks_on:
            active_meters.make_way()
        active_meters.end_resting()
        others = active_meters.meters()
        if others and self._looks_on:
            self.failed = "this process is measured already"
            return
        self.meter = self._chosen_meter or (others[0] if others else self.own)
        assert self.meter is not None
        if self.meter not in others:
            self.meter.start()
        self._pid = os.getpid()
        self._shifts = shifts_labels(model)
        self._model = Description(self.meter, model, recorder)
        self._index = first_step
        assert self.meter._handover is not None
        self.meter._handover.sources.append(self._settle)
        atexit.register(self._exit)
        if self._profile_steps:
            from ergmeter.integrations.profiling import Profile  # noqa: PLC0415  loads torch

            self._profile = Profile(self.meter, steps=self._profile_steps)
            self._profile.start()
        if self._looks_on:
            active_meters.gives_way(self._give_way)

    @guarded
    def trains(self, model: object) -> None:
        """Replace the model that `begin` was given."""
        self._shifts = shifts_labels(model)
        if self.meter is not None:
            if self._model is not None:
                self._model.drop()
            self._model = Description(self.meter, model)

    def end(self, ended: str | None = None, *, is_followed: bool = False) -> None:
        """End the training, and close the Meter if it was made here, whatever failed.

        `is_followed`: another training begins in this process, so do not wait for the FLOP count.
        """
        meter = self.meter
        if meter is None or os.getpid() != self._pid:  # in a forked child it is the parent's
            return
        if self.before_end is not None:
            self.before_end()
        atexit.unregister(self._exit)
        active_meters.keeps_way(self._give_way)
        if self._profile is not None:  # whatever failed
            self._profile.stop()
        self.catch_up(waits=not is_followed)
        handover = meter._handover
        if handover is not None and self._settle in handover.sources:
            handover.sources.remove(self._settle)
        self.meter = None
        if self._calls is not None:
            self._calls.detach()
        if meter is self.own:
            meter.close(ended)

    def rest(self) -> None:
        """After the last step: release the model, but stay open for a last evaluation or save.

        The run ends with the process, or when another training begins in it.
        """
        if self.failed or self.meter is None or self.meter is not self.own:
            self.end()
            return
        if self._profile is not None:
            self._profile.stop()
        self.catch_up()
        self._model = self._profile = None
        self._rests = True
        active_meters.rests(self.meter, self.end)

    # -- events of a framework --------------------------------------------------------------------

    @guarded
    def step_begin(self) -> None:
        """Begin a training step, unless one is in progress."""
        if self._start_ns is None:
            self._let_go()
            if self._model is not None and not self._model.is_settled:
                self._model.step_begun()
            self._start_ns = moment()

    @guarded
    def batch(self, batch: object) -> None:
        """Count a micro-batch of the step in progress, as the model receives it."""
        counts = count_tokens(batch, shifts=self._shifts) or count_samples(_values(batch))
        if counts is None:
            self._unknown = True
            self._look_at_calls(batch)
            return
        self._counts.append(counts)

    @guarded
    def step_end(
        self, *, micro_steps: int | None = None, learning_rate: float | None = None
    ) -> None:
        """End the step: the optimizer has stepped. Values logged later still belong to it."""
        end_ns = moment()
        if self._start_ns is None:
            return
        start_ns, self._start_ns = self._start_ns, None
        counts, self._counts = self._counts, []
        is_unknown, self._unknown = self._unknown, False
        if is_unknown and self._calls is not None:
            counts = self._calls.take_step()[1]
            is_unknown = not counts
        elif self._model is not None:
            counts = self._model.in_model_layout(counts)
        step = Step(
            start_ns,
            end_ns,
            self._index,
            micro_steps=micro_steps or max(1, len(counts)),
            learning_rate=learning_rate,
        )
        counts = [] if is_unknown else counts
        laters = [later for count in counts for later in count.laters]
        self._before(counts, is_paused=True)
        self._last = step
        self._append(step, counts, device_events(laters) if laters else None)

    def stepped(
        self,
        start_ns: int,
        end_ns: int,
        counts: list[Counts],
        micro_steps: int,
        after: Any = None,  # noqa: ANN401
    ) -> None:
        """Add a whole step, from an integration that detects steps itself.

        `after` is what `device_events` returned for counts on a device. This does as little as
        possible: loops of tiny steps pay for nothing else.
        """
        if self.failed and self.is_over():
            return
        model = self._model
        if self._logged or model is None or not model.is_settled:
            self._before(counts)
        self._append((start_ns, end_ns, self._index, micro_steps), counts, after)

    def _append(self, step: Brief, counts: list[Counts], after: Any) -> None:  # noqa: ANN401
        rows = self._unsettled.rows
        rows.append((step, counts, after))
        self._index += 1
        if self._profile is not None:
            self._profile.step()  # which never raises
        if len(rows) > _MOST_UNSETTLED:
            self.fail(OverflowError(_TOO_MANY))

    @guarded
    def extend(self, end_ns: int) -> None:
        """Extend the last step to `end_ns`: another optimizer has stepped for the same batch."""
        self._unsettled.extend(end_ns)

    @guarded
    def products_in(self, dtype: str | None) -> None:
        """Set the precision of matrix products, unless the Meter has one."""
        meter = self.meter
        if dtype is not None and meter is not None and meter.plan.settings.dtype is None:
            meter._revise(settings=replace(meter.plan.settings, dtype=dtype))

    @guarded
    def step_cancelled(self) -> None:
        """Drop the step in progress: it was not a training step."""
        self._start_ns = None
        self._counts = []
        self._unknown = False

    @guarded
    def logged(self, values: Mapping[str, Any]) -> None:
        """Add values that the framework logs to its last step: loss, learning rate, gradient norm.

        A number that is on a device is read when the step is written, not here.
        """
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number or getattr(value, "shape", None) == ():
                self._logged[str(name)] = value.detach() if hasattr(value, "detach") else value

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """A context for time outside training steps: eval, checkpoint, data."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.phase_over(phase, start_ns)

    @guarded
    def phase_over(self, phase: Phase, start_ns: int, *, end_ns: int | None = None) -> None:
        """Record a phase that began at `start_ns`."""
        end_ns = time.monotonic_ns() if end_ns is None else end_ns
        if self.meter is not None and end_ns > start_ns:
            self.meter.record(Step(start_ns, end_ns, phase=phase))

    @guarded
    def mark(self, name: str, detail: str = "") -> None:
        """Add a mark to the run at this instant."""
        if self.meter is not None:
            self.meter.mark(name, detail)

    @guarded
    def total_steps(self, number: float) -> None:
        """Set the planned number of steps, for the ETA; ignored where it is unknown."""
        if self.meter is not None and 0 < number < float("inf"):
            self.meter._header(total_steps=int(number))

    # -- inside -----------------------------------------------------------------------------------

    @guarded
    def catch_up(self, *, waits: bool = True) -> None:
        """Write everything so far to the run, FLOPs included; the training may go on."""
        self._let_go()
        self._settle(wait=True)
        if self._profile is not None:
            self._profile.read()
        if self._model is not None:
            self._model.finish(self._unsettled.sums, waits=waits)

    def _give_way(self) -> None:
        """End this training, because the user's own Meter starts."""
        self.end()
        self.failed = "the program has begun to measure itself"

    def _exit(self) -> None:
        """End the training at the program's exit, which may be due to an unhandled error."""
        error = None if self._rests else getattr(sys, "last_value", None)
        self.end(failure(error) if error is not None else None)
        active_meters.restore_interrupt()

    def _look_at_calls(self, batch: object) -> None:
        """Count the tokens of the model's calls, where a batch has none (prompts as text)."""
        model = self._model.model() if self._model is not None else None
        torch: Any = sys.modules.get("torch")
        if self._calls is None and batch is not None and torch is not None:
            if not isinstance(model, torch.nn.Module):
                return
            from ergmeter.integrations.torch.roots import tokens_of_calls  # noqa: PLC0415

            self._calls = tokens_of_calls(model)

    @guarded
    def _before(self, counts: list[Counts], *, is_paused: bool = False) -> None:
        """Complete the step before, and describe the model: called before a step is stored."""
        self._let_go()
        if self._model is not None:
            self._model.step_over(counts, is_paused=is_paused)

    def _let_go(self) -> None:
        """Complete the last step with the values logged since: the next step begins."""
        logged, self._logged = self._logged, {}
        last, self._last = self._last, None
        self._unsettled.complete(logged, last)

    def is_over(self) -> bool:
        """True after a failure; then the profiler is stopped, on the training's thread."""
        if self.failed and self._profile is not None:
            self._profile.let_go(self.failed)
        return bool(self.failed)

    def _settle(self, *, wait: bool = False) -> None:
        """Pass complete steps on to the Meter.

        Runs on the hand-over thread; at the end on the training thread, which may wait for numbers.
        """
        if os.getpid() == self._pid:
            self._unsettled.settle(wait=wait)

    def _pass_on(self, step: Step) -> None:
        assert self.meter is not None
        self.meter.record(step)

    def fail(self, error: Exception) -> None:
        """Write an exception of ergmeter's own as a mark, and stop recording this training."""
        self.failed = f"{type(error).__name__}: {error}"[:500]
        self.is_over()
        if self.meter is not None and self.meter._handover is not None:
            t_ns = time.monotonic_ns()
            self.meter._handover.marks.append(Mark(t_ns, "integration_failed", self.failed))
        elif not self._looks_on:  # there is no run to say it in
            print_notice(f"nothing is measured: {error}")


class LastRun:
    """Base class with the path and the summary of the last training's run."""

    _meter: Meter | None = None

    @property
    def path(self) -> Path:
        """The run of the last training that began in this process."""
        return self._last_meter().path

    def summary(self) -> Summary:
        """Every metric of the last training's run."""
        return self._last_meter().summary()

    def _last_meter(self) -> Meter:
        if self._meter is None:
            raise UsageError("no training has begun here, so there is no run yet")
        return self._meter


class TrainingCallback(LastRun):
    """Base class of framework callbacks: one training at a time, and phases outside of it."""

    def _prepare(self, *, looks_on: bool) -> None:
        """Set up the callback. `looks_on`: the hook of `erg record` added it, not the user."""
        self.looks_on = looks_on
        self._training: Training | None = None
        self._stopping = Stopping()
        self._early: deque[tuple[Phase, int, int]] = deque(maxlen=_MOST_EARLY)
        self._resting: Training | None = None

    def outside(self, phase: Phase, start_ns: int) -> None:
        """Record an evaluation or save that the framework made before or after a training."""
        if self._training is not None:
            return
        if self._resting is not None and self._resting.meter is not None:
            self._resting.phase_over(phase, start_ns)
        else:  # it goes to the next training that begins
            self._early.append((phase, start_ns, time.monotonic_ns()))

    def _begun(self, training: Training) -> None:
        """A training has begun: pass the phases before it on to it."""
        self._meter = training.meter
        while self._early:
            phase, start_ns, end_ns = self._early.popleft()
            training.phase_over(phase, start_ns, end_ns=end_ns)

    def _end_training(self, training: Training, ended: str | None) -> None:
        """End the training; under `erg record`, keep it open for a last evaluation or save."""
        if ended is None and self.looks_on:
            training.rest()
            self._resting = training
        else:
            training.end(ended)


def failure(error: BaseException) -> str:
    """The status of a run that ended with this error: "failed (ValueError: ...)"."""
    kind, what = type(error).__name__, " ".join(str(error).split())[:300]
    return f"failed ({kind}: {what})" if what else f"failed ({kind})"


def _values(batch: object) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def shifts_labels(model: object) -> bool:
    """True if the model compares each label with the position before it, as causal models do."""
    names = {kind.__name__ for part in _around(model) for kind in type(part).__mro__}
    aligned = ("MaskedLM", "Seq2Seq", "ConditionalGeneration", "TokenClassification")
    return not any(name.endswith(aligned) for name in names)


def _around(model: object) -> list[object]:
    """A model and the models that it wraps."""
    wrapped = [model]
    for name in ("module", "_orig_mod", "base_model", "model"):
        inner = getattr(wrapped[-1], name, None)
        if inner is not None and hasattr(inner, "parameters"):
            wrapped.append(inner)
    return wrapped
