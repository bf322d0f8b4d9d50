"""Watches the run that is being written and raises alerts: a mark, a notice, a stop.

It reads the run's own files as they grow (`runlog.follow`), on its own thread. The training thread
and the sampler do nothing for it. `erg watch` gives the same alerts later, by the same judge.

Each rank judges its own records. Speed and time are the same for all ranks, so only the first rank
reports them. Energy and cost are reported by the rank that reads the node's devices. A loss that is
not finite is reported once a node, by the first rank that has it, through a claim (`DeviceClaim`).
The claim stays until the loss is finite again, and past the end of the run; otherwise a rank that
ends later would report it again.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import string
import subprocess
import threading
import time
import urllib.error
import urllib.request
import weakref
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ergmeter.errors import UsageError
from ergmeter.meter.handover import FirstFailure, QueueThread
from ergmeter.meter.run_plan import DeviceClaim, print_notice
from ergmeter.metrics.live.alert_rules import (
    NAN,
    AlertRule,
    check_prices,
    parse_rules,
    parse_stop_classes,
)
from ergmeter.records import Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ergmeter.metrics.live.alert_judge import Alert, Judge
    from ergmeter.metrics.live.follow import RunFollower
    from ergmeter.runlog.settings import Settings


# Notices of alerts: on the console, by a command, by a webhook. A text from a run never reaches a
# shell: the command is split into words once, and `{alert}` is filled in within its word and in
# the environment. One thread sends all notices, with a few seconds for each try, so a server that
# is down does not delay training. A failure is a mark in the run.


WEBHOOK_S = 5.0
COMMAND_S = 30.0
END_S = 5.0  # the longest that the end of a program waits for notices to be sent
_MAX_WAITING = 100
_FIELDS = ("alert", "rule", "kind", "value", "threshold", "unit", "about", "run")


@dataclass(frozen=True, slots=True)
class AlertPlan:
    """The rules, the kinds of alert that stop the run, and where alerts are sent to."""

    rules: tuple[AlertRule, ...] = ()
    stop_on: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # words, with {alert} and the like in them
    webhook: str | None = None


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
        fields = [field[1:] for word in words for field in string.Formatter().parse(word)]
    except ValueError as error:
        raise UsageError(f"the alert command {command!r} can't be read: {error}") from error
    for name, form, conversion in fields:
        if name is not None and name not in _FIELDS:
            raise UsageError(
                f"the alert command {command!r} has the unknown {{{name}}}; there are"
                f" {', '.join(f'{{{name}}}' for name in _FIELDS)}"
            )
        if form or conversion:  # of a text, which may be empty: most would fail when it is needed
            raise UsageError(
                f"the alert command {command!r} has a format in {{{name}}}; values are texts,"
                f" so give {{{name}}} alone"
            )
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"the alert command {command!r} is not an executable on PATH")
    return words


def _address(webhook: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(webhook)
        if parts.scheme in ("http", "https") and parts.hostname:
            return webhook
    raise UsageError(f"a webhook is an http:// or https:// address; got {webhook!r}")


class Notices(QueueThread):
    """The thread that sends notices, from the first alert to the end of the run."""

    def __init__(self, plan: AlertPlan, *, mark: Callable[[Mark], None]) -> None:
        super().__init__("ergmeter-tell", _MAX_WAITING)
        self._plan = plan
        self._mark = mark

    def tell(self, alert: dict[str, Any]) -> None:
        """Print an alert at once, and queue it for the command and the webhook."""
        print_notice(f"alert: {alert['text']}")
        if not self._plan.command and self._plan.webhook is None:
            return
        if self._queue(alert):
            self._failed(f"the oldest one was dropped: {_MAX_WAITING} were waiting to be sent")
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """End the thread. Wait up to END_S for the notices that are still to be sent."""
        super().end()
        if self._thread.ident is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():
                self._failed("it was not sent before the program ended")

    def _run(self) -> None:
        for _ in self._turns():
            alert = self._waiting.popleft()
            for way, tell in (("webhook", self._post), ("command", self._call)):
                try:
                    tell(alert)
                except Exception as error:  # noqa: BLE001  the next one is sent all the same
                    # Only its class: its text may contain an address, and so a key.
                    self._failed(f"{way}: {type(error).__name__}")

    def _post(self, alert: dict[str, Any]) -> None:
        address = self._plan.webhook
        if address is None:
            return
        body = json.dumps(alert, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "ergmeter"}
        request = urllib.request.Request(address, body, headers)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=WEBHOOK_S):
                pass
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Only the host of the address: the rest of it is often a key.
            host = urlsplit(address).hostname
            self._failed(f"webhook at {host}: {_error_text(error)}")

    def _call(self, alert: dict[str, Any]) -> None:
        if not self._plan.command:
            return
        alert_fields = {"alert": alert["text"], **{n: str(alert.get(n, "")) for n in _FIELDS[1:]}}
        # A text may hold anything; a word of a command line holds no NUL.
        alert_fields = {name: text.replace("\0", "") for name, text in alert_fields.items()}
        words = [word.format_map(alert_fields) for word in self._plan.command]
        variables = {f"ERGMETER_{name.upper()}": text for name, text in alert_fields.items()}
        variables["ERGMETER_ALERT_RUN"] = variables.pop("ERGMETER_RUN")  # that one has a meaning
        try:
            code = _run_command(words, {**os.environ, **variables})
        except (OSError, ValueError) as error:  # ValueError: a text that the system can't encode
            self._failed(f"command {words[0]}: {error}")
        else:
            if code != 0:
                self._failed(f"command {words[0]}: {code}")

    def _failed(self, why: str) -> None:
        self._mark(Mark(time.monotonic_ns(), "alert_failed", why[:1000]))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would follow it with a GET, without the alert."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Return None: the redirect is not followed."""


def _error_text(error: Exception) -> str:
    """The error's text, or only its class where the text may contain the webhook's address."""
    name = type(error).__name__
    if isinstance(error, urllib.error.HTTPError):  # its own text may contain a redirect's address
        phrase = http.client.responses.get(error.code, "")
        return f"{name}: HTTP Error {error.code}: {phrase}".rstrip(": ")
    return f"{name}: {error}" if isinstance(error, OSError) else name


def _run_command(words: list[str], environment: dict[str, str]) -> int | str:
    """Runs a command. Returns its exit code, or a text if it has none.

    It is not started by `subprocess`: `erg record` blocks signals, which the command would inherit.
    """
    if not hasattr(os, "posix_spawn"):  # Windows, where nobody blocks signals
        try:
            done = subprocess.run(
                words, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=COMMAND_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"had not ended after {COMMAND_S:g} s, and was killed"
        return done.returncode
    nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    program = shutil.which(words[0]) or words[0]
    pid = os.posix_spawn(program, words, environment, file_actions=nothing, setsigmask=())
    until_s = time.monotonic() + COMMAND_S
    while time.monotonic() < until_s:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            code = os.waitstatus_to_exitcode(status)
            return f"exit code {code}" if code else 0
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return f"had not ended after {COMMAND_S:g} s, and was killed"


EVERY_S = 1.0
_STOP_S = 5.0
_SOME_STEPS = 100  # after so many, rules without data are reported


def planned_alerts(
    alerts: str | Iterable[str],
    *,
    stop_on: str | Iterable[str] = (),
    command: str | None = None,
    webhook: str | None = None,
    settings: Settings,
) -> AlertPlan:
    """Parses the user's alerts. Raises UsageError before anything starts."""
    rules, stops = parse_rules(alerts), parse_stop_classes(stop_on)
    check_prices(rules, settings)
    for word in stops:
        if not any(rule.kind == word for rule in rules):
            raise UsageError(
                f"stop on {word!r} has no effect: no alert of that kind was given; add one"
            )
    if (command is not None or webhook is not None) and not rules:
        raise UsageError("an alert command or webhook is given, but no alert; add an alert")
    return AlertPlan(
        rules,
        stops,
        command=() if command is None else _words(command),
        webhook=None if webhook is None else _address(webhook),
    )


@dataclass(eq=False, repr=False)  # its webhook may hold a key
class Alarm:
    """Judges a run while it is written. An alert of a kind in `stop_on` sets `should_stop`.

    `only` is the writer whose records are judged; left out, the whole run is. `rank` returns this
    rank if several ranks have an alarm each. `on_stop` is called once, when the run should stop.
    """

    plan: AlertPlan
    run: Path
    _: KW_ONLY
    settings: Settings
    mark: Callable[[Mark], None]
    only: str | None = None
    is_first: Callable[[], bool] = lambda: True
    rank: Callable[[], int | None] = lambda: None
    on_stop: Callable[[], None] | None = None
    should_stop: bool = field(default=False, init=False)
    cpu_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._notices = Notices(self.plan, mark=self.mark)
        self._followed: tuple[RunFollower, Judge] | None = None
        self._lost: dict[str, set[str]] = {}  # by rule, the writers whose loss is not finite now
        self._claims: dict[str, DeviceClaim] = {}  # by rule, to report a loss for this node
        weakref.finalize(self, _release, self._claims)  # they are held as long as this object
        self._unjudged: set[str] = set()  # rules that were reported to have no data
        self._guarded = FirstFailure(self.mark, "alarm_failed")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ergmeter-alarm", daemon=True)

    def start(self) -> None:
        """Start the thread that judges the run."""
        self._thread.start()

    def stop(self, flush: Callable[[], None]) -> None:
        """Judge the last records, which `flush` writes, and wait for the notices to be sent."""
        self._stopping.set()
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            flush()
            before_s = time.thread_time()  # of the thread that closes, beside its own
            self._guarded(self._look, is_last=True)
            self.cpu_s += time.thread_time() - before_s
        if self._followed is not None:
            self._followed[0].close()
        self._notices.end()

    def _loop(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._guarded(self._look)
            self.cpu_s = time.thread_time()

    def _look(self, *, is_last: bool = False) -> None:
        following, judge = self._followed or self._begun()
        is_behind = True
        while is_behind:
            _, ready, is_behind = following.look(is_last=is_last)
            for alert in judge.feed(ready):
                self._raised(alert, may_stop=not is_last)
        untold = judge.untold if judge.totals.rows >= _SOME_STEPS else judge.hopeless
        self._say_unjudged(judge.unjudged if is_last else untold, is_last=is_last)

    def _begun(self) -> tuple[RunFollower, Judge]:
        from ergmeter.metrics.live.alert_judge import Judge  # noqa: PLC0415  numpy and pyarrow
        from ergmeter.metrics.live.follow import RunFollower  # noqa: PLC0415

        following = RunFollower(self.run, only=self.only)
        following.learn()
        judge = Judge(
            self.plan.rules,
            devices=following.devices,
            settings=self.settings,
            start_ns=following.start_ns,
        )
        self._followed = (following, judge)
        return self._followed

    def _say_unjudged(self, unjudged: dict[str, str], *, is_last: bool) -> None:
        """Reports, once, a rule that can't be judged in this run."""
        for rule, lacks in unjudged.items() if self.is_first() else ():
            if rule not in self._unjudged:
                self._unjudged.add(rule)
                print_notice(f"alert {rule!r} is not judged{'' if is_last else ' so far'}: {lacks}")
            if is_last:
                self.mark(Mark(time.monotonic_ns(), "alert_unjudged", f"{rule}: {lacks}"[:1000]))

    def _raised(self, alert: Alert, *, may_stop: bool) -> None:
        name = "alert_over" if alert.is_over else "alert"
        self.mark(Mark(alert.t_ns, name, alert.text[:1000]))
        is_news = self._is_news(alert)
        if alert.is_over:
            return
        if is_news:
            alert_json = {**alert.as_json(), "text": self._with_rank(alert)}
            self._notices.tell({**alert_json, "run": str(self.run), "pid": os.getpid()})
        if may_stop and alert.rule.kind in self.plan.stop_on and not self.should_stop:
            self.should_stop = True
            self.mark(Mark(time.monotonic_ns(), "stop_asked", alert.text[:1000]))
            if self.on_stop is not None:
                self.on_stop()

    def _is_news(self, alert: Alert) -> bool:
        """True if this rank reports the alert, and no other: the first rank, or one of a node."""
        if alert.rule.kind != NAN:
            return self.is_first() or not alert.rule.is_of_all_ranks
        lost = self._lost.setdefault(alert.rule.text, set())
        if alert.is_over:
            lost.discard(alert.about)
            if alert.rule.text in self._claims:
                self._claims[alert.rule.text].release()
            return False
        # A writer whose last step precedes this one's first belongs to an earlier training.
        spans = self._followed[1].totals.spans if self._followed else {}
        began_ns, _ = spans.get(alert.about, (0, 0))
        lost -= {writer for writer in lost if spans.get(writer, (0, began_ns))[1] < began_ns}
        lost.add(alert.about)
        return len(lost) == 1 and self._tells_for_node(alert.rule)

    def _tells_for_node(self, rule: AlertRule) -> bool:
        """True if no other rank of this node has reported a loss that is not finite."""
        if self.rank() is None:
            return True
        whose = ("alert", str(self.run.resolve()), rule.text)
        return self._claims.setdefault(rule.text, DeviceClaim(*whose)).take()

    def _with_rank(self, alert: Alert) -> str:
        """The alert's text, with the rank if it is about the loss of one of several ranks."""
        rank = self.rank() if alert.rule.kind == NAN else None
        return alert.text if rank is None else f"{alert.text} (rank {rank})"


def _release(claims: dict[str, DeviceClaim]) -> None:
    for claim in claims.values():
        claim.release()
