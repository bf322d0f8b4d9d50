"""What all requests share: the folder, the workers, what is kept, who watches.

The trap: a page that waits for the longest run there is. A question about a long run goes into a
lane of its own, and its page does not wait for the answer.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ergmeter.errors import ErgmeterError
from ergmeter.views.serve.listing import RunListing
from ergmeter.views.serve.pool import LIVE, SOON, Pool
from ergmeter.views.serve.tail import Tails

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ergmeter.views.serve.folder import Folder, ServedItem
    from ergmeter.views.serve.pool import Lane

# -- kept ------------------------------------------------------------------------------------------
# What was read of a run, kept until its files change.
#
# The trap: a run that is being written changes with every look, and its summary takes longer the
# longer it is. So an answer about a run whose files have moved on is given again for ten times as
# long as it took to make: a tenth of a core at most is spent on each, however many ask.


_MOST_BYTES = 64 * 2**20
_PATIENCE = 10.0  # times what it took
_SHORTEST_S = 1.0


@dataclass(frozen=True, slots=True)
class _Answer:
    stamp: str
    body: bytes
    made_s: float
    took_s: float

    def is_due(self, stamp: str) -> bool:
        """Whether it is to be made again."""
        age_s = time.monotonic() - self.made_s
        return stamp != self.stamp and age_s > max(_SHORTEST_S, _PATIENCE * self.took_s)


class AnswerCache:
    """Answers by question, the least used let go. A question that is being answered is joined."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._asked: dict[str, asyncio.Task[bytes]] = {}
        self._bytes = 0
        self._most_bytes = most_bytes

    @property
    def size_bytes(self) -> int:
        """What the answers take."""
        return self._bytes

    async def answer(
        self, question: str, stamp: str, make: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """What was said to this question, or is said now: the first time, or where it is due."""
        known = self.known(question, stamp)
        if known is not None:
            return known
        if question not in self._asked:
            task = asyncio.ensure_future(self._made(question, stamp, make))
            self._asked[question] = task
            task.add_done_callback(lambda done: self._done(question, done))
        # Who goes away must not take the answer with him: others may wait for the same.
        return await asyncio.shield(self._asked[question])

    def known(self, question: str, stamp: str) -> bytes | None:
        """What was said to this question, if that still holds."""
        kept = self._answers.get(question)
        if kept is None:
            return None
        self._answers.move_to_end(question)
        return None if kept.is_due(stamp) else kept.body

    async def _made(self, question: str, stamp: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        began_s = time.monotonic()
        body = await make()
        now_s = time.monotonic()
        self._forget(question)
        self._answers[question] = _Answer(stamp, body, now_s, now_s - began_s)
        self._bytes += len(body)
        while self._bytes > self._most_bytes and len(self._answers) > 1:
            self._forget(next(iter(self._answers)))
        return body

    def _forget(self, question: str) -> None:
        old = self._answers.pop(question, None)
        self._bytes -= len(old.body) if old else 0

    def _done(self, question: str, task: asyncio.Task[bytes]) -> None:
        self._asked.pop(question, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it; nobody may have waited


# -- desk ------------------------------------------------------------------------------------------


_LONG_BYTES = 20 * 10**6  # a million samples or so: a second to read
_SOON_BYTES = 300 * 10**6  # thirty million or so: seconds for one column of them


@dataclass
class Desk:
    """One per app."""

    folder: Folder
    pool: Pool = field(default_factory=Pool)
    kept: AnswerCache = field(default_factory=AnswerCache)

    def __post_init__(self) -> None:
        self.listing = RunListing(self.folder, self.read)
        self.tails = Tails(self.folder)

    async def read(
        self,
        what: str,
        place: ServedItem,
        *arguments: object,
        state: str = "",
        lane: Lane | None = None,
    ) -> bytes:
        """What `work` says of a place, kept while its files stay as they are."""
        stamp = await asyncio.to_thread(self.folder.stamp, place)
        question = _question(what, place, *arguments, state=state)
        root = str(self.folder.root)
        chosen = lane or self.lane(place)

        async def make() -> bytes:
            return await self.pool.ask(what, str(place.path), root, *arguments, lane=chosen)

        return await self.kept.answer(question, stamp, make)

    async def charts(self, place: ServedItem, only: list[str]) -> bytes:
        """Charts over time; all of them, or just some. Those that are there soon wait for none of
        the rest: the page of a long run shows them first."""
        await asyncio.to_thread(self.folder.stamp, place)
        is_soon = only and SOON.issuperset(only) and self.folder.size_bytes(place) < _SOON_BYTES
        return await self.read("charts", place, only, lane="short" if is_soon else None)

    def lane(self, place: ServedItem) -> Lane:
        """Whether reading all of it takes long."""
        return "long" if self.folder.size_bytes(place) > _LONG_BYTES else "short"

    async def compared(
        self, places: list[ServedItem], group_by: list[str], *, anyway: bool
    ) -> bytes:
        """What a comparison of runs says."""
        stamps = [await asyncio.to_thread(self.folder.stamp, place) for place in places]
        question = f"compared {[place.id for place in places]} {group_by} {anyway}"
        lane: Lane = "long" if any(self.lane(place) == "long" for place in places) else "short"
        paths, root = [str(place.path) for place in places], str(self.folder.root)
        return await self.kept.answer(
            question,
            " ".join(stamps),
            lambda: self.pool.ask("compared", paths, root, group_by, anyway, lane=lane),
        )

    async def report(self, place: ServedItem) -> bytes:
        """The report of a run in the state that it is in."""
        return await self.read("report", place, state=await self.state(place))

    async def report_soon(self, place: ServedItem, *, within_s: float) -> bytes | None:
        """The report, if the run has ended and it is there in so short a time. It is made on; that
        of a long run is not begun here, but when its page has asked for what comes first."""
        state = await self.state(place)
        if state == "running":
            return None
        if self.lane(place) == "long":
            stamp = await asyncio.to_thread(self.folder.stamp, place)
            return self.kept.known(_question("report", place, state=state), stamp)
        try:
            making = asyncio.ensure_future(self.report(place))
            return await asyncio.wait_for(asyncio.shield(making), within_s)
        except asyncio.TimeoutError:
            return None

    async def state(self, place: ServedItem) -> str:
        """How a run is doing. FormatError if it is gone or leads out of the directory."""
        await asyncio.to_thread(self.folder.stamp, place)
        live = await asyncio.to_thread(importlib.import_module, LIVE)
        return str(await asyncio.to_thread(live.status, str(place.path)))

    async def library(self) -> bytes:
        """The charting library, made once."""
        return await self.kept.answer("library", "", lambda: self.pool.ask("library", lane="long"))

    def start(self) -> None:
        """Begin to read behind the pages, and to load what the first page of a run needs."""
        self.listing.start()
        self._preparing = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        await asyncio.to_thread(importlib.import_module, LIVE)
        with suppress(ErgmeterError):  # who asks for it is told
            await asyncio.gather(self.pool.ask("ready"), self.library())

    def stop(self) -> None:
        """End all that was begun."""
        self.listing.stop()
        self._preparing.cancel()
        self.pool.close()


def _question(what: str, place: ServedItem, *arguments: object, state: str = "") -> str:
    return f"{what} {place.id} {state} {arguments}"
