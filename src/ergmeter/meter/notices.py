"""Tells of alerts: on the console, by a command, by a webhook. Nobody waits for any of them.

Two traps shaped it. A text that came out of a run must never reach a shell: the command is split
into words once, as it was typed, and what is put in for `{alert}` stays within its word; the same
is in its environment. And a server that is down is no reason to hold up a training: there is one
thread for all of it, a few seconds for each try, and a failure is a mark in the run.
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
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ergmeter.errors import UsageError
from ergmeter.meter.run_plan import say
from ergmeter.records import Mark

if TYPE_CHECKING:
    from collections.abc import Callable

WEBHOOK_S = 5.0
COMMAND_S = 30.0
END_S = 5.0  # that the end of a program waits for what is still to be told
_MAX_WAITING = 100
_FIELDS = ("alert", "rule", "kind", "value", "threshold", "unit", "about", "run")


@dataclass(frozen=True, slots=True)
class Ways:
    """How alerts are told of, beside the mark in the run."""

    console: bool = True
    command: tuple[str, ...] = ()  # words, with {alert} and the like in them
    webhook: str | None = None


def ways(*, command: str | None = None, webhook: str | None = None, console: bool = True) -> Ways:
    """As a user gives them. UsageError for what could not work when it is needed."""
    return Ways(console, _words(command) if command is not None else (), _address(webhook))


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
        fields = [one[1:] for word in words for one in string.Formatter().parse(word)]
    except ValueError as error:
        raise UsageError(f"the alert command {command!r} can't be read: {error}") from error
    for name, form, conversion in fields:
        if name is not None and name not in _FIELDS:
            raise UsageError(
                f"the alert command {command!r} has {{{name}}}; there are"
                f" {', '.join(f'{{{one}}}' for one in _FIELDS)}"
            )
        if form or conversion:  # of a text, which may be empty: most would fail when it is needed
            raise UsageError(
                f"the alert command {command!r} has a format in {{{name}}}; it is put in as a text,"
                f" so give {{{name}}} alone"
            )
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"no such command for alerts: {command!r} is not an executable on PATH")
    return words


def _address(webhook: str | None) -> str | None:
    if webhook is None:
        return None
    try:
        parts = urlsplit(webhook)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_good = False
    if not is_good:
        raise UsageError(f"a webhook is an http:// or https:// address; got {webhook!r}")
    return webhook


class Notices:
    """The thread that tells. It begins with the first alert and ends with the run."""

    def __init__(self, ways: Ways, *, mark: Callable[[Mark], None]) -> None:
        self._ways = ways
        self._mark = mark
        self._waiting: deque[dict[str, Any]] = deque()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def tell(self, alert: dict[str, Any]) -> None:
        """On the console at once; the rest behind our back."""
        if self._ways.console:
            say(f"alert: {alert['text']}")
        if not self._ways.command and self._ways.webhook is None:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self._failed(f"left out: {_MAX_WAITING} others were waiting to be sent")
        self._waiting.append(alert)
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="ergmeter-tell", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Nothing more will come. Wait for what is under way, not for long."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():
                self._failed("had not been told when the program ended")

    def _loop(self) -> None:
        while self._waiting or not self._ending.is_set():
            if not self._waiting:
                self._wake.wait()
                self._wake.clear()
                continue
            alert = self._waiting.popleft()
            for way, tell in (("webhook", self._post), ("command", self._call)):
                try:
                    tell(alert)
                except Exception as error:  # noqa: BLE001  the next one is told all the same
                    # Just its kind: its text may hold an address, and so a key.
                    self._failed(f"{way}: {type(error).__name__}")

    def _post(self, alert: dict[str, Any]) -> None:
        address = self._ways.webhook
        if address is None:
            return
        body = json.dumps(alert, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "ergmeter"}
        request = urllib.request.Request(address, body, headers)
        try:
            with urllib.request.build_opener(_Stay).open(request, timeout=WEBHOOK_S):
                pass
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Of an address its host alone: the rest of it is often the key.
            host = urlsplit(address).hostname
            self._failed(f"webhook at {host}: {_error_text(error)}")

    def _call(self, alert: dict[str, Any]) -> None:
        if not self._ways.command:
            return
        said = {"alert": alert["text"], **{n: str(alert.get(n, "")) for n in _FIELDS[1:]}}
        # A text may hold anything; a word of a command line holds no NUL.
        said = {name: text.replace("\0", "") for name, text in said.items()}
        words = [word.format_map(said) for word in self._ways.command]
        variables = {f"ERGMETER_{name.upper()}": text for name, text in said.items()}
        variables["ERGMETER_ALERT_RUN"] = variables.pop("ERGMETER_RUN")  # that one has a meaning
        try:
            code = _ran(words, {**os.environ, **variables})
        except (OSError, ValueError) as error:  # ValueError: a text that is no text for the system
            self._failed(f"command {words[0]}: {error}")
        else:
            if code != 0:
                self._failed(f"command {words[0]}: {code}")

    def _failed(self, why: str) -> None:
        self._mark(Mark(time.monotonic_ns(), "alert_failed", why[:1000]))


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: what is sent on is a GET, without the alert."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """None: it is not followed."""


def _error_text(error: Exception) -> str:
    """What failed. An error about the address itself has the address in it."""
    name = type(error).__name__
    if isinstance(error, urllib.error.HTTPError):  # its own text may name where it was sent on to
        phrase = http.client.responses.get(error.code, "")
        return f"{name}: HTTP Error {error.code}: {phrase}".rstrip(": ")
    return f"{name}: {error}" if isinstance(error, OSError) else name


def _ran(words: list[str], environment: dict[str, str]) -> int | str:
    """The exit code of a command, or what became of it.

    Spawned, and not by `subprocess`: `erg record` has signals blocked, which the command of a user
    would inherit.
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
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return f"exit code {code}" if code else 0
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return f"had not ended after {COMMAND_S:g} s, and was killed"
