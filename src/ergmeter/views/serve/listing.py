"""The list of runs: there at once, its figures as they are read.

The trap: five hundred summaries before the first line. A scan gives names and dates; the figures
come behind the page, one run at a time, the shortest first, and stay until a run's files change.
Nothing is read while nobody looks.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from typing import TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError
from ergmeter.runlog import format as fmt
from ergmeter.views.serve.pool import LIVE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ergmeter.views.serve.folder import Folder, ServedItem

_ROUND_S = 1.0
_INTEREST_S = 30.0  # how long a page that asked is taken to be looking
_LARGEST_HEADER_BYTES = 2**20
_HEADER_FIELDS = ("name", "created", "command")
_RUNNING = "running"


class RunListing:
    """What is known of every run so far."""

    def __init__(self, folder: Folder, read: Callable[..., Awaitable[bytes]]) -> None:
        self._folder = folder
        self._read_of = read
        self._rows: dict[str, dict[str, Any]] = {}
        self._stamps: dict[str, str] = {}
        self._heads: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._asked_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read behind the page."""
        self._task = asyncio.create_task(self._fill())

    def stop(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()

    async def rows(self) -> dict[str, Any]:
        """Every run with what is known of it; `pending` says how many are still to be read."""
        self._asked_s = time.monotonic()
        places = await asyncio.to_thread(self._folder.places, "run")
        rows = await asyncio.to_thread(lambda: [self.row(place) for place in places])
        pending = sum(1 for row in rows if row["is_pending"])
        return {"runs": rows, "pending": pending, "left_out": self._folder.left_out}

    async def row_read(self, place: ServedItem) -> dict[str, Any]:
        """One run with its figures, which are read now if they are not those of its files."""
        if await self._is_due(place):
            await self._read(place)
        return await asyncio.to_thread(self.row, place)

    def row(self, place: ServedItem) -> dict[str, Any]:
        """What is known of one run."""
        known = self._rows.get(place.id)
        base = {"id": place.id, "name": place.name, "bench": place.bench}
        if known is None:
            return {**base, **self._head(place), "is_pending": True}
        return {**base, **known, "is_pending": False}

    def _head(self, place: ServedItem) -> dict[str, Any]:
        """What the run's own header says, which is read in no time; nothing where it is damaged."""
        file_of = place.path / fmt.RUN_FILE
        head: dict[str, Any] = {}
        try:
            status = file_of.stat()
        except OSError:
            return head
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)  # of another run it is another
        kept = self._heads.get(place.id)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        try:
            with file_of.open("rb") as file:
                said = json.loads(file.read(_LARGEST_HEADER_BYTES))
            if isinstance(said, dict):
                head = {name: said.get(name) for name in _HEADER_FIELDS}
                head["title"] = str(head.pop("name") or place.name)
        except (OSError, ValueError, RecursionError):
            pass
        self._heads[place.id] = stamp, head
        return head

    async def _fill(self) -> None:
        while True:
            if time.monotonic() - self._asked_s < _INTEREST_S:
                # A round that fails is not the last one.
                await asyncio.gather(self._round(), return_exceptions=True)
            await asyncio.sleep(_ROUND_S)

    async def _round(self) -> None:
        places = await asyncio.to_thread(self._folder.places, "run")
        self._forget({place.id for place in places})
        due = [place for place in places if await self._is_due(place)]
        # The short ones first: a long one would keep them all waiting.
        for place in sorted(due, key=self._folder.size_bytes):
            # Whatever a run does to its reader, the others are listed.
            (failure,) = await asyncio.gather(self._read(place), return_exceptions=True)
            if failure is not None:
                self._rows[place.id] = self._unreadable(place, repr(failure))

    async def _is_due(self, place: ServedItem) -> bool:
        """Whether there is something new to read of a run; what is quickly told is told here."""
        known = self._rows.get(place.id)
        try:
            stamp = await asyncio.to_thread(self._folder.stamp, place)
            if known is not None and known.get("status") == _RUNNING:
                live = await asyncio.to_thread(importlib.import_module, LIVE)
                state = await asyncio.to_thread(live.status, str(place.path))
                self._rows[place.id] = {**known, "status": state}
        except ErgmeterError as error:
            self._rows[place.id] = self._unreadable(place, str(error))
            self._stamps.pop(place.id, None)  # to be read when it can be, be it as it was before
            return False
        return known is None or self._stamps.get(place.id) != stamp

    async def _read(self, place: ServedItem) -> None:
        try:
            # Also of one that can't be read: it is tried again when its files change.
            self._stamps[place.id] = stamp = await asyncio.to_thread(self._folder.stamp, place)
            state = str(self._rows.get(place.id, {}).get("status"))
            # One that has ended since is asked about anew, however lately it was read. So is one
            # whose files changed after its end: an answer from before would stay for good.
            asked = state if state == _RUNNING else f"{state} {stamp}"
            row = json.loads(await self._read_of("row", place, state=asked))
            if self._stamps.get(place.id) != stamp:  # another has read it since
                return
            self._rows[place.id] = row
            if row["status"] == _RUNNING:
                self._stamps.pop(place.id, None)
        except ErgmeterError as error:
            self._rows[place.id] = self._unreadable(place, str(error))

    def _unreadable(self, place: ServedItem, why: str) -> dict[str, Any]:
        said = self._folder.shown(why)
        return {**self._head(place), "status": "unreadable", "why": said, "readings": {}}

    def _forget(self, present: set[str]) -> None:
        for kept in (self._rows, self._stamps, self._heads):
            for id in kept.keys() - present:
                kept.pop(id, None)
