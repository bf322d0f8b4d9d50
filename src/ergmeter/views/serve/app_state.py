"""State shared by all requests: folder, workers, answer cache, list of runs.

Long runs have their own queue, so that other pages do not wait for them. The list of runs appears
at once with names and dates. Metrics are read in the background while somebody views the list,
shortest runs first, and cached until the files change.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ergmeter.errors import ErgmeterError, FormatError
from ergmeter.runlog import format as fmt
from ergmeter.views.serve.folder import Folder, Kind, ServedItem
from ergmeter.views.serve.pool import LIVE, SOON, Lane, Pool
from ergmeter.views.serve.tail import Tails

# List of runs.


_ROUND_S = 1.0
_INTEREST_S = 30.0  # a page counts as open this long after its last request
_MAX_HEADER_BYTES = 1 << 20
_HEADER_FIELDS = ("created", "command")
_RUNNING = "running"


class RunListing:
    """The list of runs with the metrics read so far."""

    def __init__(self, folder: Folder, read: Callable[..., Awaitable[bytes]]) -> None:
        self._folder = folder
        self._read_of = read
        self._rows: dict[str, dict[str, Any]] = {}
        self._stamps: dict[str, str] = {}
        self._asked_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start reading in the background."""
        self._task = asyncio.create_task(self._fill())

    def stop(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()

    async def rows(self) -> dict[str, Any]:
        """Return all runs; `pending` is the number still to be read."""
        self._asked_s = time.monotonic()
        items = await asyncio.to_thread(self._folder.items, "run")
        rows = await asyncio.to_thread(lambda: [self.row(item) for item in items])
        pending = sum(1 for row in rows if row["is_pending"])
        return {"runs": rows, "pending": pending, "left_out": self._folder.left_out}

    async def row_read(self, item: ServedItem) -> dict[str, Any]:
        """Return one run with its metrics, read now if outdated."""
        if await self._is_due(item):
            await self._read(item)
        return await asyncio.to_thread(self.row, item)

    def row(self, item: ServedItem) -> dict[str, Any]:
        """Return the row of one run: its cached metrics, or its header while they are pending."""
        cached = self._rows.get(item.id)
        base = {"id": item.id, "name": item.name, "bench": item.bench}
        if cached is None:
            return {**base, **self._head(item), "is_pending": True}
        return {**base, **cached, "is_pending": False}

    def _head(self, item: ServedItem) -> dict[str, Any]:
        """Return the run's header fields, empty if it is damaged."""
        file = item.path / fmt.RUN_FILE
        try:
            status = file.stat()
        except OSError:
            return {}
        # The stamp makes the cache miss if another run replaced this one.
        return _header(file, item.name, (status.st_ino, status.st_size, status.st_mtime_ns))

    async def _fill(self) -> None:
        while True:
            if time.monotonic() - self._asked_s < _INTEREST_S:
                # A failed round must not end the loop.
                await asyncio.gather(self._round(), return_exceptions=True)
            await asyncio.sleep(_ROUND_S)

    async def _round(self) -> None:
        items = await asyncio.to_thread(self._folder.items, "run")
        self._forget({item.id for item in items})
        due = [item for item in items if await self._is_due(item)]
        # Short runs first: a long one would delay all others.
        for item in sorted(due, key=self._folder.size_bytes):
            # A run that breaks its reader must not hide the others.
            (failure,) = await asyncio.gather(self._read(item), return_exceptions=True)
            if failure is not None:
                self._rows[item.id] = self._unreadable(item, repr(failure))

    async def _is_due(self, item: ServedItem) -> bool:
        """True if a run must be read again; a changed status alone is updated here."""
        cached = self._rows.get(item.id)
        try:
            stamp = await asyncio.to_thread(self._folder.stamp, item)
            if cached is not None and cached.get("status") == _RUNNING:
                self._rows[item.id] = {**cached, "status": await _status(item)}
        except ErgmeterError as error:
            self._rows[item.id] = self._unreadable(item, str(error))
            self._stamps.pop(item.id, None)  # read it again once it is readable, even if unchanged
            return False
        return cached is None or self._stamps.get(item.id) != stamp

    async def _read(self, item: ServedItem) -> None:
        try:
            # Also for unreadable runs: they are retried when their files change.
            self._stamps[item.id] = stamp = await asyncio.to_thread(self._folder.stamp, item)
            state = str(self._rows.get(item.id, {}).get("status"))
            # A run that has ended since is read anew, however recently it was read. So is a run
            # whose files changed after its end: an answer from before would stay for good.
            asked = state if state == _RUNNING else f"{state} {stamp}"
            row = json.loads(await self._read_of("row", item, state=asked))
            if self._stamps.get(item.id) != stamp:  # another request has read it since
                return
            self._rows[item.id] = row
            if row["status"] == _RUNNING:
                self._stamps.pop(item.id, None)
        except ErgmeterError as error:
            self._rows[item.id] = self._unreadable(item, str(error))

    def _unreadable(self, item: ServedItem, why: str) -> dict[str, Any]:
        reason = self._folder.relative(why)
        return {**self._head(item), "status": "unreadable", "why": reason, "readings": {}}

    def _forget(self, present: set[str]) -> None:
        for known in (self._rows, self._stamps):
            for id in known.keys() - present:
                known.pop(id, None)


@lru_cache(maxsize=10_000)
def _header(path: Path, name: str, _stamp: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a header that the list shows, empty if it is damaged."""
    try:
        header = fmt.json_object(path, max_bytes=_MAX_HEADER_BYTES)
    except FormatError:
        return {}
    fields = {field: header.get(field) for field in _HEADER_FIELDS}
    return {**fields, "title": str(header.get("name") or name)}


# Answer cache. A run that is being written changes all the time, and its summary takes longer as it
# grows. An outdated answer is therefore reused for ten times as long as it took to make: this
# limits each question to a tenth of a core.


_MOST_BYTES = 64 * 2**20
_PATIENCE = 10.0  # times the time that an answer took
_SHORTEST_S = 1.0


@dataclass(frozen=True, slots=True)
class _Answer:
    stamp: str
    body: bytes
    made_s: float
    took_s: float

    def is_due(self, stamp: str) -> bool:
        """True if the answer must be made again."""
        age_s = time.monotonic() - self.made_s
        return stamp != self.stamp and age_s > max(_SHORTEST_S, _PATIENCE * self.took_s)


class AnswerCache:
    """Answers by question, least recently used dropped first. Equal questions share one task."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._asked: dict[str, asyncio.Task[bytes]] = {}
        self.size_bytes = 0
        self._most_bytes = most_bytes

    async def answer(
        self, question: str, stamp: str, make: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """Return the cached answer, or make one if there is none or it is due."""
        cached = self.cached(question, stamp)
        if cached is not None:
            return cached
        if question not in self._asked:
            task = asyncio.ensure_future(self._made(question, stamp, make))
            self._asked[question] = task
            task.add_done_callback(lambda done: self._done(question, done))
        # A cancelled request must not cancel the task: others may wait for it.
        return await asyncio.shield(self._asked[question])

    def cached(self, question: str, stamp: str) -> bytes | None:
        """Return the answer if it is still valid."""
        cached = self._answers.get(question)
        if cached is None:
            return None
        self._answers.move_to_end(question)
        return None if cached.is_due(stamp) else cached.body

    async def _made(self, question: str, stamp: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        began_s = time.monotonic()
        body = await make()
        now_s = time.monotonic()
        self._forget(question)
        self._answers[question] = _Answer(stamp, body, now_s, now_s - began_s)
        self.size_bytes += len(body)
        while self.size_bytes > self._most_bytes and len(self._answers) > 1:
            self._forget(next(iter(self._answers)))
        return body

    def _forget(self, question: str) -> None:
        old = self._answers.pop(question, None)
        self.size_bytes -= len(old.body) if old else 0

    def _done(self, question: str, task: asyncio.Task[bytes]) -> None:
        self._asked.pop(question, None)
        if not task.cancelled():
            task.exception()  # waiters receive it; there may be none


class NotThereError(FormatError):
    """There is no item of this kind with this id."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"no {kind} {id[:20]!r} here")
        self.kind = kind


_LONG_BYTES = 20 * 10**6  # a million samples or so: a second to read
_SOON_BYTES = 300 * 10**6  # thirty million or so: seconds for one column of them


@dataclass
class AppState:
    """The state of one app."""

    folder: Folder
    pool: Pool = field(default_factory=Pool)
    answers: AnswerCache = field(default_factory=AnswerCache)

    def __post_init__(self) -> None:
        self.listing = RunListing(self.folder, self.read)
        self.tails = Tails(self.folder)

    async def item(self, id: str, kind: Kind) -> ServedItem:
        """Return the item with this id. Raises NotThereError if none of this kind has it."""
        item = await asyncio.to_thread(self.folder.item, id, kind)
        if item is None:
            raise NotThereError(kind, id)
        return item

    async def read(
        self,
        what: str,
        item: ServedItem | list[ServedItem],
        *arguments: object,
        state: str = "",
        lane: Lane | None = None,
    ) -> bytes:
        """Return an answer of `responses` about an item or several, cached until files change."""
        items = item if isinstance(item, list) else [item]
        stamps = [await asyncio.to_thread(self.folder.stamp, each) for each in items]
        paths, root = [str(each.path) for each in items], str(self.folder.root)
        about = paths if isinstance(item, list) else paths[0]
        is_long = any(self.lane(each) == "long" for each in items)
        chosen = lane or ("long" if is_long else "short")
        return await self.answers.answer(
            _question(what, items, *arguments, state=state),
            " ".join(stamps),
            lambda: self.pool.ask(what, about, root, *arguments, lane=chosen),
        )

    async def charts(self, item: ServedItem, only: list[str]) -> bytes:
        """Return all or some charts over time.

        Quick charts do not wait for the others: the page of a long run shows them first.
        """
        await asyncio.to_thread(self.folder.stamp, item)
        is_soon = only and SOON.issuperset(only) and self.folder.size_bytes(item) < _SOON_BYTES
        return await self.read("charts", item, only, lane="short" if is_soon else None)

    def lane(self, item: ServedItem) -> Lane:
        """Return the queue: long if reading the whole item takes long."""
        return "long" if self.folder.size_bytes(item) > _LONG_BYTES else "short"

    async def report(self, item: ServedItem) -> bytes:
        """Return the report of a run in its current state."""
        return await self.read("report", item, state=await self.state(item))

    async def report_soon(self, item: ServedItem, *, within_s: float) -> bytes | None:
        """Return the report if the run has ended and it is ready within `within_s`, else None.

        Computing it continues. For a long run it is not started here, but after its page has
        requested the quick charts.
        """
        state = await self.state(item)
        if state == "running":
            return None
        if self.lane(item) == "long":
            stamp = await asyncio.to_thread(self.folder.stamp, item)
            return self.answers.cached(_question("report", [item], state=state), stamp)
        try:
            making = asyncio.ensure_future(self.report(item))
            return await asyncio.wait_for(asyncio.shield(making), within_s)
        except asyncio.TimeoutError:
            return None

    async def state(self, item: ServedItem) -> str:
        """Return the status of a run. Raises FormatError if it is gone or outside."""
        await asyncio.to_thread(self.folder.stamp, item)
        return await _status(item)

    async def library(self) -> bytes:
        """Return the charting library, made once."""
        return await self.answers.answer(
            "library", "", lambda: self.pool.ask("library", lane="long")
        )

    def start(self) -> None:
        """Start background reading, and load what the first run page needs."""
        self.listing.start()
        self._preparing = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        await asyncio.to_thread(importlib.import_module, LIVE)
        with suppress(ErgmeterError):  # a later request gets the error
            await asyncio.gather(self.pool.ask("ready"), self.library())

    def stop(self) -> None:
        """Stop all background work."""
        self.listing.stop()
        self._preparing.cancel()
        self.pool.close()


async def _status(item: ServedItem) -> str:
    live = await asyncio.to_thread(importlib.import_module, LIVE)
    return str(await asyncio.to_thread(live.status, str(item.path)))


def _question(what: str, items: list[ServedItem], *arguments: object, state: str = "") -> str:
    return f"{what} {[item.id for item in items]} {state} {arguments}"
