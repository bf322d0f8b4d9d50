"""Watches the run that is being written, and raises alerts: a mark each, a notice, a stop.

The trap: an alarm in the way of the training. It reads the run's own files as they grow, on a
thread of its own (`runlog.follow`: what is new, and no more), so that the training thread and the
thread that reads devices do nothing for it; and what it says is what `erg watch` says of the same
run a week later, as both ask the same judge.

Each rank judges its own share. What is the same for all of them, the pace and the clock, only the
first tells of. Energy and cost are not: the devices of a node are read by whichever of its ranks
came first, and no other rank knows of them. Nor is a loss: who watches all ranks tells of the first
that is lost, and marks each. Ranks with an alarm each agree on the same by a claim (`claim`): of a
node the first whose loss is lost tells, with its rank, and holds the claim until it is back. It is
not let go at the end of the run: another rank, which ends a little later, would tell it again.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError
from ergmeter.meter.device_claim import DeviceClaim
from ergmeter.meter.notices import Notices, Ways, ways
from ergmeter.meter.run_plan import say
from ergmeter.metrics.alerts.rules import NAN, AlertRule, all_parsed, check_prices, classes_parsed
from ergmeter.records import Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ergmeter.metrics.alerts.judge import Alert, AlertRows, Judge
    from ergmeter.metrics.live.follow import Following
    from ergmeter.runlog.settings import Settings

EVERY_S = 1.0
_STOP_S = 5.0
_SOME_STEPS = 100  # after which a rule that nothing was seen for is told of


@dataclass(frozen=True, slots=True)
class AlertPlan:
    """What to be alarmed by, whom to tell, and what to stop for."""

    rules: tuple[AlertRule, ...] = ()
    stop_on: tuple[str, ...] = ()
    ways: Ways = field(default_factory=Ways)

    def as_json(self) -> dict[str, Any]:
        """For the head of a writer's share."""
        return {"rules": [rule.text for rule in self.rules], "stop_on": list(self.stop_on)}


def planned_alerts(
    alerts: str | Iterable[str],
    *,
    stop_on: str | Iterable[str] = (),
    command: str | None = None,
    webhook: str | None = None,
    settings: Settings,
) -> AlertPlan:
    """As a user gives them. UsageError for what is wrong with them, before anything starts."""
    rules, stops = all_parsed(alerts), classes_parsed(stop_on)
    check_prices(rules, settings)
    for word in stops:
        if not any(rule.kind == word for rule in rules):
            raise UsageError(
                f"nothing to stop on for {word!r}: no alert of that kind was asked for"
            )
    if (command is not None or webhook is not None) and not rules:
        raise UsageError("a command or a webhook for alerts, and no alert to tell of; give one")
    return AlertPlan(rules, stops, ways(command=command, webhook=webhook))


class Alarm:
    """Judges a run while it is written. `should_stop` says that it had better end."""

    def __init__(
        self,
        plan: AlertPlan,
        run: Path,
        *,
        settings: Settings,
        mark: Callable[[Mark], None],
        only: str | None = None,
        is_first: Callable[[], bool] = lambda: True,
        rank: Callable[[], int | None] = lambda: None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """`only`: the writer whose share is judged; left out, all of the run. `rank`: whose that is
        among several ranks with an alarm each. `on_stop` hears once that the run should stop."""
        self.should_stop = False
        self._plan = plan
        self._run = run
        self._settings = settings
        self._mark = mark
        self._only = only
        self._is_first = is_first
        self._rank = rank
        self._on_stop = on_stop
        self._notices = Notices(plan.ways, mark=mark)
        self._followed: tuple[Following, Judge] | None = None
        self._lost: dict[str, set[str]] = {}  # by rule, the writers whose loss is none now
        self._claims: dict[str, DeviceClaim] = {}  # by rule, to tell of a loss for this node
        weakref.finalize(self, _release, self._claims)  # held so long, they are no leak
        self._spans: dict[str, tuple[int, int]] = {}  # by writer, from its first step to its last
        self._steps = 0
        self._unjudged: set[str] = set()  # rules of which it was said that nothing is seen for them
        self._failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ergmeter-alarm", daemon=True)
        self.cpu_s = 0.0

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self, flush: Callable[[], None]) -> None:
        """Judge what came last, once it is handed over, and see the notices out."""
        self._stopping.set()
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            flush()
            before_s = time.thread_time()  # of the thread that closes, beside its own
            self._guarded(partial(self._look, is_last=True))
            self.cpu_s += time.thread_time() - before_s
        if self._followed is not None:
            self._followed[0].close()
        self._notices.end()

    def _loop(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._guarded(self._look)
            self.cpu_s = time.thread_time()

    def _guarded(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:  # noqa: BLE001  our failure is a mark, not the training's end
            if not self._failed:
                self._failed = True
                said = f"{type(error).__name__}: {error}"[:1000]
                self._mark(Mark(time.monotonic_ns(), "alarm_failed", said))

    def _look(self, *, is_last: bool = False) -> None:
        following, judge = self._followed or self._begun()
        is_behind = True
        while is_behind:
            _, ready, is_behind = following.look(is_last=is_last)
            self._note_spans(ready)
            for alert in judge.feed(ready):
                self._raised(alert, may_stop=not is_last)
            self._steps += sum(len(steps["end_ns"]) for steps in ready.steps.values())
        untold = judge.untold if self._steps >= _SOME_STEPS else judge.hopeless
        self._say_unjudged(judge.unjudged if is_last else untold, is_last=is_last)

    def _note_spans(self, rows: AlertRows) -> None:
        for writer, steps in rows.steps.items():
            start_ns, end_ns = int(steps["start_ns"].min()), int(steps["end_ns"].max())
            first_ns, last_ns = self._spans.get(writer, (start_ns, end_ns))
            self._spans[writer] = (min(first_ns, start_ns), max(last_ns, end_ns))

    def _begun(self) -> tuple[Following, Judge]:
        from ergmeter.metrics.alerts.judge import Judge  # noqa: PLC0415  numpy and pyarrow
        from ergmeter.metrics.live.follow import Following  # noqa: PLC0415

        following = Following(self._run, only=self._only)
        following.learn()
        judge = Judge(
            self._plan.rules,
            devices=following.devices,
            settings=self._settings,
            start_ns=following.start_ns,
        )
        self._followed = (following, judge)
        return self._followed

    def _say_unjudged(self, unjudged: dict[str, str], *, is_last: bool) -> None:
        """A rule that can't fire must not look like one that did not: once a line, and a mark."""
        for rule, lacks in unjudged.items() if self._is_first() else ():
            if rule not in self._unjudged:
                self._unjudged.add(rule)
                say(f"alert {rule!r} is not judged{'' if is_last else ' so far'}: {lacks}")
            if is_last:
                self._mark(Mark(time.monotonic_ns(), "alert_unjudged", f"{rule}: {lacks}"[:1000]))

    def _raised(self, alert: Alert, *, may_stop: bool) -> None:
        name = "alert_over" if alert.is_over else "alert"
        self._mark(Mark(alert.t_ns, name, alert.text[:1000]))
        is_news = self._is_news(alert)
        if alert.is_over:
            return
        if is_news:
            told = {**alert.as_json(), "text": self._with_rank(alert)}
            self._notices.tell({**told, "run": str(self._run), "pid": os.getpid()})
        if may_stop and alert.rule.kind in self._plan.stop_on and not self.should_stop:
            self.should_stop = True
            self._mark(Mark(time.monotonic_ns(), "stop_asked", alert.text[:1000]))
            if self._on_stop is not None:
                self._on_stop()

    def _is_news(self, alert: Alert) -> bool:
        """Whether it is told of here: not what the first rank tells, nor a loss beside another."""
        if alert.rule.kind != NAN:
            return self._is_first() or not alert.rule.is_of_all_ranks
        lost = self._lost.setdefault(alert.rule.text, set())
        if alert.is_over:
            lost.discard(alert.about)
            if alert.rule.text in self._claims:
                self._claims[alert.rule.text].release()
            return False
        # One that had taken its last step when this one took its first is of a training before.
        began_ns, _ = self._spans.get(alert.about, (0, 0))
        lost -= {one for one in lost if self._spans.get(one, (0, began_ns))[1] < began_ns}
        lost.add(alert.about)
        return len(lost) == 1 and self._tells_for_node(alert.rule)

    def _tells_for_node(self, rule: AlertRule) -> bool:
        """Whether no other rank of this node has told of a loss that is lost."""
        if self._rank() is None:
            return True
        whose = ("alert", str(self._run.resolve()), rule.text)
        return self._claims.setdefault(rule.text, DeviceClaim(*whose)).take()

    def _with_rank(self, alert: Alert) -> str:
        """Its text; of a loss that is one rank's among several, with the rank."""
        rank = self._rank() if alert.rule.kind == NAN else None
        return alert.text if rank is None else f"{alert.text} (rank {rank})"


def _release(claims: dict[str, DeviceClaim]) -> None:
    for claim in claims.values():
        claim.release()
