"""Feeds the sinks with the run's recent metrics, without delaying training.

Each sink runs on its own thread behind its own queue, its imports and its opening included, because
a tracker's server may be down. A refused update is retried with growing delays. Beyond a bound the
oldest are dropped, and the run records what happened to which sink. At the end of the program the
sinks have a few seconds to deliver the rest.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ergmeter import registry
from ergmeter.errors import ErgmeterError, NotMeasurable, PluginError, UsageError
from ergmeter.meter.handover import FirstFailure, QueueThread
from ergmeter.meter.run_plan import listed, print_notice
from ergmeter.ports import DeclaredSink, Sink, SinkRequest, Update
from ergmeter.records import Mark
from ergmeter.sinks.shared.updates import checked_options, missing_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ergmeter.meter.handover import HandOver
    from ergmeter.runlog.reader import Run

EVERY_S = 10.0
# One hour of updates at 10 s, so that a server may restart without a loss.
MAX_WAITING = 360
# How long the end of a program waits for its sinks, all of them together.
STOP_S = 10.0
_RETRY_LAST_S = 0.5
_RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """A sink by name with its options, or a sink object."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    made: Sink | None = None


def planned(sinks: Iterable[str | tuple[str, Mapping[str, Any]] | Sink]) -> tuple[SinkPlan, ...]:
    """Parses the user's sinks: names, names with options, objects. Raises UsageError."""
    plans = tuple(_plan(sink) for sink in listed("sinks", sinks))
    for plan in plans:
        if plan.made is None:
            registry.check_name("sinks", "sink", plan.name)
        declared = _declared(plan)
        if declared is not None:
            checked_options(declared, plan.options)
    return plans


def _declared(plan: SinkPlan) -> type[DeclaredSink] | None:
    """The class of a sink that declares its options and its library, else None."""
    try:
        sink = registry.load("sinks", plan.name) if plan.made is None else None
    except PluginError:  # reported when the sink is opened
        return None
    return sink if isinstance(sink, type) and issubclass(sink, DeclaredSink) else None


def _plan(declared: object) -> SinkPlan:
    match declared:
        case str():
            return _parsed(declared)
        case (str(name), dict(options)):
            return SinkPlan(name, options)
        case Sink():
            return SinkPlan(declared.name, made=declared)
    raise UsageError(
        f"a sink is NAME, NAME:OPTION=VALUE, (name, options) or a Sink; got {declared!r}"
    )


def _parsed(text: str) -> SinkPlan:
    """NAME:OPTION=VALUE,... as a name and its options; a value is YAML, so 9400 is a number."""
    import yaml  # noqa: PLC0415  only sinks with options need it

    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise UsageError(
                f"sink {text}: {part!r} is not OPTION=VALUE; give NAME:OPTION=VALUE,OPTION=VALUE"
            )
        options[option] = yaml.safe_load(value)
    return SinkPlan(name, options)


class _Outlet(QueueThread):
    """One sink, its queue and its thread."""

    def __init__(self, plan: SinkPlan, request: SinkRequest, mark: Callable[[Mark], None]) -> None:
        super().__init__(f"ergmeter-sink-{plan.name}", MAX_WAITING)
        self._plan = plan
        self._request = request
        self._mark = mark
        self._gone = False  # given up for good
        self._failures = 0
        self._dropped = 0
        self._thread.start()

    def offer(self, update: Update) -> None:
        if not self._gone:
            self._dropped += self._queue(update)

    def join(self, until_s: float) -> None:
        """Wait for the thread until `until_s`, and mark how many updates were not sent."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        left = len(self._waiting) + self._dropped
        if self._thread.is_alive() and not self._gone:
            self._gone = True
            self._say("sink_failed", f"had not finished when the program ended; {left} not sent")
        elif left and not self._gone:
            self._say("sink_failed", f"{left} updates were not sent")

    def _run(self) -> None:
        sink = self._opened()
        if sink is None:
            return
        for _ in self._turns():
            if not self._deliver(sink):
                return
        self._close(sink)

    def _opened(self) -> Sink | None:
        if self._plan.made is not None:
            return self._plan.made
        while True:
            try:
                made: Sink | None = registry.load("sinks", self._plan.name)(self._request)
            except Exception as error:  # noqa: BLE001  anybody's library; training goes on
                if not self._may_retry(error):
                    return None
            else:
                return made

    def _deliver(self, sink: Sink) -> bool:
        """Sends the oldest update to the sink. False if the sink will never accept one again."""
        update = self._waiting[0]
        try:
            sink.write(update)
        except Exception as error:  # noqa: BLE001  anybody's library; training goes on
            return self._may_retry(error)
        if self._waiting and self._waiting[0] is update:
            self._waiting.popleft()
        if self._failures:
            lost = f", {self._dropped} updates were lost" if self._dropped else ""
            self._say("sink_recovered", f"after {self._failures} failures{lost}")
            self._failures = self._dropped = 0
        return True

    def _may_retry(self, error: Exception) -> bool:
        """Marks the error and waits a while. False if a retry is useless."""
        is_ours = isinstance(error, ErgmeterError)
        message = str(error) if is_ours else f"{type(error).__name__}: {error}"
        if isinstance(error, UsageError | PluginError):
            self._gone = True
            self._say("sink_failed", message)
            return False
        if not self._failures:
            self._say("sink_failed", f"{message}; trying again")
        if self._ending.wait(_RETRY_S[min(self._failures, len(_RETRY_S) - 1)]):
            time.sleep(_RETRY_LAST_S)  # as often as the end of the program leaves time for
        self._failures += 1
        return not self._gone

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001  anybody's library
            self._say("sink_failed", f"{type(error).__name__}: {error}; while closing")

    def _say(self, name: str, what: str) -> None:
        self._mark(Mark(time.monotonic_ns(), name, f"{self._plan.name}: {what}"[:1000]))


class Feed:
    """Makes updates of the run's metrics and queues them for each sink, on its own thread."""

    def __init__(
        self, plans: tuple[SinkPlan, ...], handover: HandOver, *, name: str, every_s: float
    ) -> None:
        self._handover = handover
        self._run = handover.run
        self._every_s = every_s
        self._guarded = FirstFailure(handover.marks.append, "sink_failed", "no updates: ")
        self._plans = plans
        self._name = name
        self._outlets: list[_Outlet] = []
        self._since_ns = 0
        self._ended = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ergmeter-feed", daemon=True)
        self._cpu_s = 0.0
        handover.costs.append(lambda: self._cpu_s)

    def start(self) -> None:
        """Start the thread. Print a notice for each sink whose library is not installed."""
        for plan in self._plans:
            declared = _declared(plan)
            message = missing_library(declared) if declared is not None else ""
            if message and self._is_first:
                print_notice(f"nothing goes to the sink {plan.name!r}: {message}")
        self._thread.start()

    def stop(self, ended: str) -> None:
        """Send a last update and the whole run's metrics; wait up to STOP_S for the sinks."""
        self._ended = ended
        until_s = time.monotonic() + STOP_S
        self._stopping.set()
        self._thread.join(STOP_S)
        for outlet in self._outlets:
            outlet.end()
        for outlet in self._outlets:
            outlet.join(until_s)

    def _loop(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._feed(is_last=False)
        self._feed(is_last=True)

    @property
    def _is_first(self) -> bool:
        """True on rank 0, which feeds the sinks for all ranks."""
        return self._handover.rank == 0

    def _feed(self, *, is_last: bool) -> None:
        if not self._is_first:
            return
        updates: list[Update] = []
        self._guarded(self._add_newest, updates)
        if is_last:
            self._guarded(self._add_final, updates)
        if updates and not self._outlets:  # by the first step it is known which rank this is
            outlets = []
            for plan in self._plans:
                request = SinkRequest(str(self._run), self._name, dict(plan.options))
                outlets.append(_Outlet(plan, request, self._handover.marks.append))
            self._outlets = outlets
        for update in updates:
            for outlet in self._outlets:
                outlet.offer(update)
        self._cpu_s = time.thread_time()

    def _add_newest(self, updates: list[Update]) -> None:
        """Adds the metrics since the last update, if a step has ended since."""
        from ergmeter.metrics.live.recent_window import recent  # noqa: PLC0415  numpy and pyarrow

        self._handover.flush()
        with suppress(NotMeasurable):
            newest = recent(self._newest_training(), since_ns=self._since_ns)
            self._since_ns = newest.window.end_ns
            updates.append(newest)

    def _add_final(self, updates: list[Update]) -> None:
        """Adds the whole run's metrics, if it has a step, with the status that it will end with."""
        from ergmeter.metrics.live.recent_window import whole_run_update  # noqa: PLC0415

        with suppress(NotMeasurable):
            update = whole_run_update(self._newest_training())
            summary = replace(update.summary, status=self._ended)
            updates.append(replace(update, summary=summary))

    def _newest_training(self) -> Run:
        """The run, or the last of several trainings in it."""
        from ergmeter.runlog.reader import Run  # noqa: PLC0415  numpy and pyarrow

        run = Run.open(self._run)
        several = len(run.trainings)
        return run.training(several) if several > 1 else run
