"""Meter, the Python API. It owns the sampler, the writer and the hand-over between them.

    with Meter(warmup_steps=3) as meter:
        for batch in loader:
            with meter.step(tokens=batch.numel(), samples=len(batch)):
                train(batch)
    print(meter.summary().readings["throughput.tokens_per_s"])

The training thread pays for two timestamps and an append: no lock, no collective, no device
synchronisation. Another thread writes to disk twice a second, so a killed process loses about half
a second. `run_plan` makes or joins the run before the first step.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError
from ergmeter.meter import active_meters
from ergmeter.meter.alert_watch import Alarm, planned_alerts
from ergmeter.meter.clock import ON_DEVICE, moment
from ergmeter.meter.pending_steps import step_values
from ergmeter.meter.run_plan import (
    Around,
    Budget,
    Progress,
    RunPlan,
    listed,
    os_error_text,
    print_notice,
    probe_names,
)
from ergmeter.meter.sink_feed import EVERY_S, Feed, planned
from ergmeter.records import PHASES, Flops, Mark, Phase, Record, Reported, Step, StepValues, Summary
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ergmeter.meter.handover import HandOver
    from ergmeter.ports import Sink


# What a mark may hold: a name, a path, a sentence.
_MARK_CHARACTERS = 1000


class Meter:
    """Measures this process, from `start` to `close`, into one run directory."""

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        name: str | None = None,
        settings: Settings | None = None,
        probes: Iterable[str] | None = None,
        probe_options: Mapping[str, Mapping[str, Any]] | None = None,
        rank: int | None = None,
        budget: Budget | None = None,
        flops: Flops | Sequence[Flops] = (),
        model: object = None,
        seq_len: int | None = None,
        sinks: Iterable[str | tuple[str, Mapping[str, Any]] | Sink] = (),
        sinks_every_s: float = EVERY_S,
        alerts: Iterable[str] = (),
        stop_on: str | Iterable[str] = (),
        alert_command: str | None = None,
        alert_webhook: str | None = None,
        around: Around | None = None,
        looks_on: bool = False,
        **declared: Any,  # noqa: ANN401  the fields of Settings, checked there
    ) -> None:
        """Prepare a run; nothing is measured before `start`.

        `out` is the run directory to make. Left out, it is made under `runs/`, or, inside a command
        under `erg record`, that command's run is joined. `declared` takes the fields of `Settings`
        directly: warmup_steps, warmup_s, warmup="auto", parameters, grid_g_per_kwh, pue, ...
        `model` and `seq_len` give MFU: a torch model of transformers (with or without PEFT), its
        configuration, or the path of a config.json. If its FLOPs can't be counted, the run has the
        reason. `sinks` receive the metrics during the run ("tensorboard", ("csv", {"path": ...}),
        ...), every `sinks_every_s` seconds, from rank 0 for all ranks. A sink can't slow or stop a
        training. `alerts` are rules ("tokens_per_s < -20%", "loss nan", ...). An alert becomes a
        mark in the run and a line on standard error, and is sent to `alert_command` and
        `alert_webhook`. For the kinds in `stop_on` ("budget,nan") `should_stop` becomes true.
        `around` measures another process from outside, as `erg record` does. `looks_on` is for that
        command's hook in a program: such a Meter ends when the user's own Meter starts.
        """
        settings_found = Settings.declared(settings, declared)
        counted, no_flops = Flops.checked(flops), ""
        if model is not None:
            from ergmeter.flops.live import live_flops  # noqa: PLC0415  only for those who ask

            counted, settings_found, no_flops = live_flops(model, seq_len, settings_found)
        self.plan = RunPlan(
            name=name or Path(sys.argv[0] or "python").stem or "python",
            settings=settings_found,
            out=Path(out) if out is not None else None,
            probes=probe_names(probes),
            probe_options=probe_options or {},
            rank=rank,
            budget=budget,
            flops=counted,
            no_flops=no_flops,
            around=around,
            alerts=planned_alerts(
                (*listed("alerts", alerts), *(budget.rules if budget else ())),
                stop_on=stop_on,
                command=alert_command,
                webhook=alert_webhook,
                settings=settings_found,
            ),
        )
        if not sinks_every_s > 0:
            raise UsageError(f"sinks_every_s must be seconds above 0; got {sinks_every_s!r}")
        self.looks_on = looks_on
        self._sinks = planned(sinks)
        self._sinks_every_s = sinks_every_s
        self._feed: Feed | None = None
        self._alarm: Alarm | None = None
        self.on_stop: Callable[[], None] | None = None  # called when an alert asks to stop
        self._path: Path | None = None
        self._handover: HandOver | None = None
        self._pid: int | None = None  # the process that measures
        self._in_fork: Lock | None = None  # in a forked child, until it has a writer of its own
        self._spans: dict[int, StepSpan] = {}
        self._ends_ns: dict[int, int] = {}
        self._numbers = {phase: itertools.count() for phase in PHASES}
        self._started_ns = 0
        self._append: Callable[[StepValues], None] = self._not_started

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> Meter:
        """Make the run and begin to measure."""
        if self._path is not None:
            raise UsageError(
                f"this Meter has been started already (run {self._path}); make another"
            )
        if not self.looks_on:
            active_meters.make_way()
        others = active_meters.meters()
        if others:
            raise UsageError(
                f"another Meter is measuring in this process (run {others[0].path});"
                " close it first: two would both claim the same energy"
            )
        self._begin(self.plan.begun(only_joins=self.looks_on))
        return self

    def close(self, ended: str | None = None, *, ended_ns: int | None = None) -> None:
        """Stop measuring and close the run. `ended` is its status, "finished" if left out.

        `ended_ns`: when it ended, if that was before now.
        """
        if self._in_fork is not None:  # a forked child that never stepped: the run is its parent's
            self._in_fork = None
            self._append = self._closed
        handover = self._handover
        if handover is None or os.getpid() != self._pid:
            return
        self._append = self._closed
        last = partial(self._last, handover, ended or "finished")
        ended_ns = ended_ns or monotonic_ns()
        handover.stop(Mark(ended_ns, "ended", ended) if ended else None, last=last)
        # Not earlier: if the line above is interrupted, a second close must finish its work.
        self._handover = None
        active_meters.discard(self)

    def __enter__(self) -> Meter:
        return self.start()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        kind = type(error).__name__
        what = f"{kind}: {error}" if str(error) else kind
        self.close(None if error is None else f"failed ({what[:300]})")

    # -- what a loop calls ----------------------------------------------------------------------

    def step(
        self,
        tokens: int | None = None,
        *,
        samples: int | None = None,
        tokens_real: int | None = None,
        tokens_loss: int | None = None,
    ) -> StepSpan:
        """A training step, to be used with `with`. `tokens` counts padding, `tokens_real` not."""
        return StepSpan(self, "train", tokens, samples, tokens_real, tokens_loss)

    def phase(
        self,
        phase: Phase,
        *,
        tokens: int | None = None,
        samples: int | None = None,
        tokens_real: int | None = None,
    ) -> StepSpan:
        """A span outside training steps: evaluation, a checkpoint, waiting for data, decoding."""
        if phase not in PHASES:
            raise UsageError(f"unknown phase {phase!r}; choose one of {', '.join(PHASES)}")
        return StepSpan(self, phase, tokens, samples, tokens_real)

    def step_begin(self) -> None:
        """Begin a step here, not where the last one ended. `step_end` ends it."""
        self._ends_ns[get_ident()] = moment()

    def step_end(
        self,
        tokens: int | None = None,
        *,
        samples: int | None = None,
        tokens_real: int | None = None,
        tokens_loss: int | None = None,
        micro_steps: int = 1,
        loss: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        """End a step that began where the last one ended (or at `start`, or at `step_begin`)."""
        end_ns = moment()
        thread = get_ident()
        if thread in self._spans:
            raise UsageError("step_end was called inside `with meter.step()`, which ends by itself")
        start_ns = self._ends_ns.get(thread, self._started_ns)
        self._ends_ns[thread] = end_ns
        number = next(self._numbers["train"])
        values: StepValues = (
            start_ns, end_ns, number, 1, "train",
            tokens, tokens_real, tokens_loss, samples, micro_steps,
            loss, learning_rate, grad_norm, 0, None, None,
        )  # fmt: skip
        self._append(values)

    def mark(self, name: str, detail: str = "") -> None:
        """Mark this instant in the run. `meter.mark("warmup_end")` ends the warm-up here."""
        t_ns = monotonic_ns()
        handover = self._handover or self._share_of_fork()
        if handover is not None:
            texts = (str(text)[:_MARK_CHARACTERS] for text in (name, detail))
            handover.marks.append(Mark(t_ns, *texts))

    def record(self, record: Record) -> None:
        """Store a record that was made elsewhere, such as a step parsed from a program's output."""
        handover = self._handover or self._share_of_fork()
        if handover is None:
            raise UsageError("not measuring: call record() between start() and close()")
        if isinstance(record, Step):
            handover.steps.append(step_values(record))
        elif isinstance(record, Reported):
            handover.reported.append(record)
        elif isinstance(record, Mark):
            handover.marks.append(record)
        else:
            raise UsageError(f"record() takes Step, Mark or Reported; got {type(record).__name__}")

    def watch(self, pid: int) -> None:
        """Measure the process `pid`, which was just started, and its children."""
        if self._handover is not None:
            self._handover.add(self.plan.watched(self.path, pid))

    def describe(self, model: object, *, seq_len: int | None) -> None:
        """Add the trained model to the run: its FLOPs, parameters and dtype.

        Like `Meter(model=...)`, but at any time and from any thread: a framework may have no model
        before the first batch. If FLOPs can't be counted, the run has the reason.
        """
        from ergmeter.flops.live import live_flops  # noqa: PLC0415  only for those who ask

        flops, model_settings, no_flops = live_flops(model, seq_len, self.plan.settings)
        self._revise(settings=model_settings, flops=flops, no_flops=no_flops)

    def _revise(self, **changes: Any) -> None:  # noqa: ANN401  fields of RunPlan
        """Change the plan while the run is measured, and write its settings and FLOPs again."""
        self.plan = replace(self.plan, **changes)
        self._header(**self.plan.facts())

    def _header(self, **facts: Any) -> None:  # noqa: ANN401  parts of the writer's header
        """Add facts to the header of this process's part of the run, while it is measured."""
        if self._handover is not None:
            self._handover.describe(**facts)

    def explain(self, unavailable: Mapping[str, str]) -> None:
        """Store why some probes are not read here: reasons by the probe's name."""
        self._header(unavailable=unavailable)

    def workload(self, facts: Mapping[str, object]) -> None:
        """Store what is trained and how (backend, optimizer, ...), for comparisons of runs."""
        self._header(workload=dict(facts))

    def continue_from(self, step: int) -> None:
        """Number the next training step `step`: a resumed training has done those before."""
        self._numbers["train"] = itertools.count(step)

    # -- what comes of it -----------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The run directory."""
        if self._path is None:
            raise UsageError("the Meter has not been started, so there is no run yet")
        return self._path

    @property
    def should_stop(self) -> bool:
        """True from the first alert of a kind in `stop_on` until the end.

        Other ranks may differ: if ranks train together, let them agree before one of them ends.
        """
        return self._alarm is not None and self._alarm.should_stop

    def progress(self) -> Progress:
        """How much of the budget this rank has done, and the time that the rest will take."""
        budget = self.plan.budget
        if budget is None or not budget.has_goal:
            raise UsageError("no budget was declared: Meter(budget=Budget(tokens=...))")
        handover = self._handover
        if handover is None:
            raise UsageError("not measuring: call progress() between start() and close()")
        handover.collect()
        pending = handover.pending
        done: float = pending.tokens if budget.unit == "tokens" else pending.train_steps
        if budget.unit == "FLOPs":
            if not self.plan.flops:
                raise UsageError("a budget in FLOPs needs Meter(model=...) or Meter(flops=...)")
            flops = self.plan.flops[0]
            done *= flops.model_per_step
            if flops.tokens_per_step and pending.tokens:  # steps differ in size
                done = pending.tokens * flops.model_per_step / flops.tokens_per_step
        elapsed_s = ((pending.last_ns or 0) - (pending.first_ns or 0)) / NS_PER_S
        left = max(0.0, budget.total - done)
        eta_s = left * elapsed_s / done if done > 0 and elapsed_s > 0 else None
        return Progress(done, budget.total, budget.unit, eta_s)

    def summary(self) -> Summary:
        """Every metric of the run so far."""
        from ergmeter.metrics.summarize import summarize  # noqa: PLC0415  loads numpy and pyarrow
        from ergmeter.runlog.reader import Run  # noqa: PLC0415

        if self._handover is not None:
            self._handover.flush()
        return summarize(Run.open(self.path))

    # -- inside ---------------------------------------------------------------------------------

    def _begin(self, handover: HandOver) -> None:
        self._handover = handover
        self._path = handover.run
        self._pid = os.getpid()
        active_meters.add(self)
        handover.start()
        if self._sinks:
            self._feed = Feed(
                self._sinks, handover, name=self.plan.name, every_s=self._sinks_every_s
            )
            self._feed.start()
        self._start_alarm(handover)
        self._started_ns = monotonic_ns()
        # Bound once: the training thread looks nothing up on its way to the queue.
        self._append = handover.steps.append

    def _start_alarm(self, handover: HandOver) -> None:
        plan, around = self.plan.alerts, self.plan.around
        if plan is not None and plan.rules:
            self._alarm = Alarm(
                plan,
                handover.run,
                settings=self.plan.settings,
                mark=handover.marks.append,
                # Under `erg record` the command's processes write the steps: judge all writers.
                only=None if around else handover.writer_id,
                is_first=lambda: handover.rank == 0,
                # Where other ranks have a Meter of their own beside this one.
                rank=lambda: handover.rank if handover.has_others and not around else None,
                on_stop=lambda: self.on_stop() if self.on_stop is not None else None,
            )
            handover.costs.append(partial(getattr, self._alarm, "cpu_s"))
            self._alarm.start()

    def _last(self, handover: HandOver, ended: str) -> None:
        """Judge the last alerts and send the last update, before the files are closed."""
        if self._alarm is not None:
            self._alarm.stop(handover.flush)
        if self._feed is not None:
            self._feed.stop(ended)

    def _not_started(self, _step: StepValues) -> None:
        raise UsageError("the Meter has not been started; use `with Meter() as meter:`")

    def _closed(self, _step: StepValues) -> None:
        raise UsageError(f"the Meter is closed (run {self.path}); a step after its end has no run")

    def _unheard(self, _step: StepValues) -> None:
        """Drop a step: this forked child can't write to the run, and has printed that."""

    def _forked(self) -> None:
        """In a forked child: drop the parent's threads and files. The next record begins anew."""
        self._handover = None
        self._feed = None  # the parent feeds the sinks
        self._sinks = ()
        self._alarm = None  # the parent judges the alerts
        self.plan = replace(self.plan, alerts=None)
        self._in_fork = Lock()
        self._spans = {}
        self._ends_ns = {}
        self._started_ns = monotonic_ns()
        self._append = self._first_after_fork

    def _first_after_fork(self, step: StepValues) -> None:
        self._share_of_fork()
        self._append(step)

    def _share_of_fork(self) -> HandOver | None:
        """In a forked child at its first record: begin a writer of its own. Else return None."""
        lock = self._in_fork
        if lock is None:
            return None
        with lock:
            if self._handover is None:
                try:
                    self._begin(self.plan.forked(self.path))
                except OSError as error:
                    message = f"the run {self.path} can't be written by a forked process"
                    print_notice(f"{message} ({os_error_text(error)})")
                    self._append = self._unheard
                self._in_fork = None
        return self._handover


# One open step. This is our only code on the training thread. Entering takes a timestamp last and
# leaving takes one first, so our cost lies outside the step.


@dataclass(slots=True, eq=False, repr=False)
class StepSpan:
    """A step between its start and its end. Set its attributes at any time before the end."""

    _meter: Meter
    phase: str
    tokens: int | None
    samples: int | None
    tokens_real: int | None
    tokens_loss: int | None = None
    micro_steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    _thread: int = field(init=False)
    _start_ns: int = field(init=False)

    def micro_step(
        self,
        tokens: int | None = None,
        *,
        samples: int | None = None,
        tokens_real: int | None = None,
        tokens_loss: int | None = None,
    ) -> None:
        """Count a micro-batch of gradient accumulation. Its tokens add to the step's."""
        self.micro_steps += 1
        self.tokens = _plus(self.tokens, tokens)
        self.samples = _plus(self.samples, samples)
        self.tokens_real = _plus(self.tokens_real, tokens_real)
        self.tokens_loss = _plus(self.tokens_loss, tokens_loss)

    def __enter__(self) -> StepSpan:
        spans = self._meter._spans
        thread = get_ident()
        if thread in spans:
            raise UsageError(
                f"a {self.phase} span was opened inside an open {spans[thread].phase} span;"
                " close the first before the second (gradient accumulation: span.micro_step)"
            )
        spans[thread] = self
        self._thread = thread
        self._start_ns = moment() if self.phase in ON_DEVICE else monotonic_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        end_ns = moment() if self.phase in ON_DEVICE else monotonic_ns()
        meter = self._meter
        thread = self._thread  # a generator may be closed on another thread than it was entered on
        meter._spans.pop(thread, None)
        meter._ends_ns[thread] = end_ns
        if kind is None:
            number = next(meter._numbers[self.phase])
            values: StepValues = (
                self._start_ns, end_ns, number, 1, self.phase,
                self.tokens, self.tokens_real, self.tokens_loss, self.samples,
                self.micro_steps or 1,
                self.loss, self.learning_rate, self.grad_norm, 0, None, None,
            )  # fmt: skip
            meter._append(values)
        else:
            meter.mark("step_failed", f"{self.phase}: {kind.__name__}")


def _plus(total: int | None, more: int | None) -> int | None:
    if more is None:
        return total
    return more if total is None else total + more
