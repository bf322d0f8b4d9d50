"""Runs that are being watched: one look at each, for all who watch it.

The trap: a reader for each open page. Fifty pages of one run are fifty readers of its files, and
the training pays for it. Here a run is looked at as long as anybody watches, and what was seen is
handed to all; who is slow gets the newest and not the backlog.

A look by the clock alone comes on average half of its period after the rows that it finds. So the
files are asked for their sizes ten times a second, which costs next to nothing, and a look is made
when they have changed. How often, its processor time decides: by the time on the wall a busy
machine, where a step is late anyhow, would be looked at least.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError, FormatError
from ergmeter.views.serve.pool import LIVE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ergmeter.views.serve.folder import Folder, ServedItem
    from ergmeter.views.serve.live import LiveLook

_GLANCE_S = 0.1
_LOOK_S = 0.4  # a writer hands over every half second
# A look takes longer as the writer's open file grows, until that is closed after 15 minutes.
_PATIENCE = 9.0
_LONGEST_S = 1.2  # so that a step is on the page within 2 s, the writer's half second included
_ANYWAY_S = 1.2  # files that stay as they are: its writer may have died
_SLOW_S = 3.0  # of a run that is not going: it may be taken up again
MOST_LISTENERS = 512  # of each run that a stream has; more than twice as many as one may have
_NOTHING: dict[str, Any] = {"step": None, "readings": {}, "marks": []}


class TooManyError(ErgmeterError):
    """As many watch as there may."""


class TailListener:
    """Somebody who watches. Holds the newest that was seen of each run, and no more."""

    def __init__(self) -> None:
        self._newest: dict[str, bytes] = {}
        self._is_there = asyncio.Event()

    def hand(self, run: str, seen: bytes) -> None:
        """Give it something new of a run."""
        self._newest[run] = seen
        self._is_there.set()

    async def next(self, timeout_s: float) -> list[bytes]:
        """What is new; nothing, where nothing was for so long."""
        try:
            await asyncio.wait_for(self._is_there.wait(), timeout_s)
        except asyncio.TimeoutError:
            return []
        self._is_there.clear()
        newest, self._newest = self._newest, {}
        return list(newest.values())


class Tail:
    """The looks at one run."""

    def __init__(self, place: ServedItem, folder: Folder) -> None:
        self._place = place
        self._folder = folder
        self._task: asyncio.Task[None] | None = None
        self._seen: bytes | None = None
        self.listeners: set[TailListener] = set()
        self.looks = 0

    def add(self, listener: TailListener) -> None:
        """Begin to look, if nobody watched before."""
        self.listeners.add(listener)
        if self._seen is not None:
            listener.hand(self._place.id, self._seen)
        if self._task is None:
            self._task = asyncio.create_task(self._follow())

    def remove(self, listener: TailListener) -> None:
        """Stop looking when the last one goes."""
        self.listeners.discard(listener)
        if not self.listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(self) -> None:
        live = await asyncio.to_thread(importlib.import_module, LIVE)
        look = live.Look(str(self._place.path))
        while True:
            self.looks += 1
            began_s = time.monotonic()
            before = await asyncio.to_thread(self._stamp)
            state, seen, cpu_s = await self._now(look)
            if seen != self._seen:
                self._seen = seen
                for listener in self.listeners:
                    listener.hand(self._place.id, seen)
            if state != "running":
                await asyncio.sleep(_SLOW_S)
                continue
            due_s = began_s + min(max(_LOOK_S, _PATIENCE * cpu_s), _LONGEST_S)
            await asyncio.sleep(max(cpu_s, due_s - time.monotonic()))
            while time.monotonic() < began_s + _ANYWAY_S:
                if await asyncio.to_thread(self._stamp) != before:
                    break
                await asyncio.sleep(_GLANCE_S)

    async def _now(self, look: LiveLook) -> tuple[str, bytes, float]:
        """A look: the state, all that is told of it, and its processor time."""
        # One that fails, whatever of it did, must not be the last: a page would wait for ever.
        looking = asyncio.to_thread(self._looked, look)
        (found,) = await asyncio.gather(looking, return_exceptions=True)
        if not isinstance(found, BaseException):
            return found
        told = {**_NOTHING, "state": "unreadable", "why": f"looking at it failed: {found!r}"}
        return "unreadable", self._said(told), 0.0

    def _looked(self, look: LiveLook) -> tuple[str, bytes, float]:
        began_s = time.thread_time()
        told: dict[str, Any]
        try:
            self._folder.stamp(self._place)
        except FormatError as error:  # it is gone, or leads out of the directory by now
            state = "unreadable" if self._place.path.is_dir() else "gone"
            told = {**_NOTHING, "state": state, "why": str(error)}
        else:
            told = look.now()
        return told["state"], self._said(told), time.thread_time() - began_s

    def _said(self, told: dict[str, Any]) -> bytes:
        return self._folder.shown(json.dumps({"id": self._place.id, **told})).encode()

    def _stamp(self) -> str:
        """What changes with every hand-over; "" where there is none, which the look then tells."""
        try:
            return self._folder.stamp(self._place)
        except (FormatError, OSError):
            return ""


class Tails:
    """All runs that are watched now."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._tails: dict[str, Tail] = {}

    @property
    def watching(self) -> dict[str, int]:
        """How many watch each run."""
        return {id: len(tail.listeners) for id, tail in self._tails.items()}

    @asynccontextmanager
    async def watch(self, places: list[ServedItem]) -> AsyncIterator[TailListener]:
        """Watch runs as long as this is open. TooManyError where too many do already."""
        already = sum(self.watching.values())
        if already + len(places) > MOST_LISTENERS:
            raise TooManyError(
                f"{already} pages are watching already, and {MOST_LISTENERS} may: close some"
            )
        listener = TailListener()
        tails = [self._tails.setdefault(p.id, Tail(p, self._folder)) for p in places]
        for tail in tails:
            tail.add(listener)
        try:
            yield listener
        finally:
            for tail in tails:
                tail.remove(listener)
            self._tails = {id: tail for id, tail in self._tails.items() if tail.listeners}
