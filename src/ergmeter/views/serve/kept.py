"""What was read of a run, kept until its files change.

The trap: a run that is being written changes with every look, and its summary takes longer the
longer it is. So an answer about a run whose files have moved on is given again for ten times as
long as it took to make: a tenth of a core at most is spent on each, however many ask.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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


class Kept:
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
