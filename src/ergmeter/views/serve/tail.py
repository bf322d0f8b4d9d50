"""Follows runs that are being written, with one reader for all viewers of a run.

A slow viewer gets the newest event, not the backlog. File sizes are checked ten times a second,
which is cheap, and the run is read when they change. The interval between reads depends on the CPU
time of a read: wall time would slow the view most on a busy machine.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ergmeter.errors import ErgmeterError, FormatError
from ergmeter.views.serve.pool import LIVE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ergmeter.views.serve.folder import Folder, ServedItem
    from ergmeter.views.serve.live import LiveLook

_GLANCE_S = 0.1
_LOOK_S = 0.4  # writers flush every half second
# A read takes longer as the writer's open file grows, until it is closed after 15 minutes.
_PATIENCE = 9.0
_LONGEST_S = 1.2  # so that a step is on the page within 2 s, the writer's half second included
_ANYWAY_S = 1.2  # unchanged files: the writer may have died
_SLOW_S = 3.0  # of a run that is not running: it may be resumed
MOST_LISTENERS = 512  # summed over streams and runs; more than twice the limit of one stream


class TooManyError(ErgmeterError):
    """The number of viewers has reached its limit."""


class TailListener:
    """A viewer. Stores only the newest event of each run."""

    def __init__(self) -> None:
        self._newest: dict[str, bytes] = {}
        self._is_there = asyncio.Event()

    def hand(self, run: str, event: bytes) -> None:
        """Store a new event of a run."""
        self._newest[run] = event
        self._is_there.set()

    async def next(self, timeout_s: float) -> list[bytes]:
        """Return the newest event of each run, empty after the timeout."""
        try:
            await asyncio.wait_for(self._is_there.wait(), timeout_s)
        except asyncio.TimeoutError:
            return []
        self._is_there.clear()
        newest, self._newest = self._newest, {}
        return list(newest.values())


class Tail:
    """Follows one run."""

    def __init__(self, item: ServedItem, folder: Folder) -> None:
        self._item = item
        self._folder = folder
        self._task: asyncio.Task[None] | None = None
        self._last_event: bytes | None = None
        self.listeners: set[TailListener] = set()
        self.looks = 0

    def add(self, listener: TailListener) -> None:
        """Add a viewer; the first one starts reading."""
        self.listeners.add(listener)
        if self._last_event is not None:
            listener.hand(self._item.id, self._last_event)
        if self._task is None:
            self._task = asyncio.create_task(self._follow())

    def remove(self, listener: TailListener) -> None:
        """Remove a viewer; the last one stops reading."""
        self.listeners.discard(listener)
        if not self.listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(self) -> None:
        live = await asyncio.to_thread(importlib.import_module, LIVE)
        look = live.LiveLook(str(self._item.path))
        while True:
            self.looks += 1
            began_s = time.monotonic()
            before = await asyncio.to_thread(self._stamp)
            state, event, cpu_s = await asyncio.to_thread(self._looked, look)
            if event != self._last_event:
                self._last_event = event
                for listener in self.listeners:
                    listener.hand(self._item.id, event)
            if state != "running":
                await asyncio.sleep(_SLOW_S)
                continue
            due_s = began_s + min(max(_LOOK_S, _PATIENCE * cpu_s), _LONGEST_S)
            await asyncio.sleep(max(cpu_s, due_s - time.monotonic()))
            while time.monotonic() < began_s + _ANYWAY_S:
                if await asyncio.to_thread(self._stamp) != before:
                    break
                await asyncio.sleep(_GLANCE_S)

    def _looked(self, look: LiveLook) -> tuple[str, bytes, float]:
        """Read the run once; return its state, the event and the CPU time."""
        began_s = time.thread_time()
        try:
            self._folder.stamp(self._item)  # refuses one that is gone or leads out of the directory
            event = look.now()
        except Exception as error:  # noqa: BLE001  else the loop ends, and pages wait forever
            event = look.failed(error)
        text = self._folder.relative(json.dumps({"id": self._item.id, **event}))
        return event["state"], text.encode(), time.thread_time() - began_s

    def _stamp(self) -> str:
        """Return the digest of the files; "" if the run is gone (the next read reports that)."""
        try:
            return self._folder.stamp(self._item)
        except (FormatError, OSError):
            return ""


class Tails:
    """All runs that are being viewed."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._tails: dict[str, Tail] = {}

    @property
    def watching(self) -> dict[str, int]:
        """Return the number of viewers of each run."""
        return {id: len(tail.listeners) for id, tail in self._tails.items()}

    @asynccontextmanager
    async def watch(self, items: list[ServedItem]) -> AsyncIterator[TailListener]:
        """Follow runs while the context is open. Raises TooManyError at the limit."""
        already = sum(self.watching.values())
        if already + len(items) > MOST_LISTENERS:
            raise TooManyError(
                f"{already} viewers already, and the limit is {MOST_LISTENERS}: close some pages"
            )
        listener = TailListener()
        tails = [self._tails.setdefault(p.id, Tail(p, self._folder)) for p in items]
        for tail in tails:
            tail.add(listener)
        try:
            yield listener
        finally:
            for tail in tails:
                tail.remove(listener)
            self._tails = {id: tail for id, tail in self._tails.items() if tail.listeners}
