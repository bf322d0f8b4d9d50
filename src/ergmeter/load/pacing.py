"""Decides when the next request is sent: closed loop or open loop.

A closed loop (N requests at a time) asks less often just when the server is slow, so its latencies
look good: this is called coordinated omission. It answers "how much can this server do with N
users". An open loop (a rate of Poisson arrivals) sends on schedule, however many requests are under
way. It counts latency from the scheduled time, so that the wait of a late request counts.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from ergmeter.load.answer import Answer
from ergmeter.load.client import Client, Connection
from ergmeter.units import NS_PER_S

AFTER_FAILURE_S = 0.1  # a refusing server must not get a thousand requests a second
_CONNECT_AHEAD_S = 0.25


@dataclass(frozen=True, slots=True)
class LevelLength:
    """How long a level lasts: a number of requests, a number of seconds, or whichever is first."""

    requests: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: `concurrency` requests at a time; the next is sent when one has ended."""

    concurrency: int

    @property
    def label(self) -> str:
        """The pace as shown in tables."""
        return f"{self.concurrency} at a time"

    @property
    def clock(self) -> str:
        """The description of when latency starts to count."""
        return f"closed loop, {self.label}: from a request's sending, on an open connection"

    @property
    def short(self) -> str:
        """The pace as part of a run's name."""
        return f"c{self.concurrency}"

    @property
    def usual_warmup(self) -> int:
        """The default number of warm-up requests, which do not count."""
        return self.concurrency

    @property
    def usual_length(self) -> LevelLength:
        """The default length of a level."""
        return LevelLength(requests=max(20, 10 * self.concurrency))

    async def send(self, sending: Sending, extent: LevelLength, *, first: int) -> None:
        """Send requests, numbered from `first`, by `concurrency` workers with a connection each."""
        numbers = itertools.islice(itertools.count(first), extent.requests)
        until_s = time.monotonic() + extent.duration_s if extent.duration_s is not None else None

        async def work() -> None:
            own: Connection | None = None
            for number in numbers:
                if until_s is not None and time.monotonic() >= until_s:
                    break
                answer = Answer(number)
                own = await sending.ask(answer, own)
                if answer.failure:
                    await asyncio.sleep(AFTER_FAILURE_S)
            if own is not None:
                own.close()

        await asyncio.gather(*(work() for _ in range(self.concurrency)))


@dataclass(frozen=True, slots=True)
class Open:
    """An open loop: `rate_per_s` requests a second on average, with Poisson arrivals."""

    rate_per_s: float
    seed: int = 0
    usual_warmup: ClassVar = 4
    usual_length: ClassVar = LevelLength(duration_s=30.0)

    @property
    def label(self) -> str:
        """The pace as shown in tables."""
        return f"{self.rate_per_s:g}/s"

    @property
    def clock(self) -> str:
        """The description of when latency starts to count."""
        return f"open loop, {self.label}, Poisson: from the scheduled time of sending"

    @property
    def short(self) -> str:
        """The pace as part of a run's name."""
        return f"r{self.rate_per_s:g}"

    async def send(self, sending: Sending, extent: LevelLength, *, first: int) -> None:
        """Send requests, numbered from `first`, at their scheduled times."""
        began_ns = time.monotonic_ns() + round(_CONNECT_AHEAD_S * NS_PER_S)

        async def send_one(number: int, due_ns: int) -> None:
            connection = await sending.ask(Answer(number, due_ns=due_ns))
            if connection is not None:
                connection.close()

        tasks = set()
        for number, due_s in enumerate(self.arrivals_s(extent), first):
            due_ns = began_ns + round(due_s * NS_PER_S)
            await _until(due_ns - round(_CONNECT_AHEAD_S * NS_PER_S))
            tasks.add(asyncio.create_task(send_one(number, due_ns)))
        await asyncio.gather(*tasks)

    def arrivals_s(self, extent: LevelLength) -> Iterator[float]:
        """Yield when requests are due, in seconds from the start of the level."""
        dice = random.Random(self.seed)
        due_s = 0.0
        for _ in itertools.islice(itertools.count(), extent.requests):
            if extent.duration_s is not None and due_s >= extent.duration_s:
                return
            yield due_s
            due_s += dice.expovariate(self.rate_per_s)


@dataclass(slots=True)
class Sending:
    """Sends requests and passes each settled answer to `on_settled`."""

    client: Client
    request: Callable[[int], bytes]
    on_settled: Callable[[Answer], None]
    pending: dict[int, Answer] = field(default_factory=dict)  # by number: not settled yet

    async def ask(self, answer: Answer, own: Connection | None = None) -> Connection | None:
        """Send a request when due, on `own` if that is open; return the connection used."""
        self.pending[answer.number] = answer
        request = self.request(answer.number)
        connection = await self.client.connected(answer, own=own)
        try:
            await _until(answer.due_ns)
            if connection is None:  # an open loop connects before the request is due
                answer.end_ns = max(answer.end_ns, answer.due_ns)
            else:
                await self.client.ask(connection, request, answer)
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        del self.pending[answer.number]
        self.on_settled(answer)
        return connection

    def in_flight(self, t_ns: int) -> list[Answer]:
        """Requests that were offered by this time and are not settled."""
        return [request for request in self.pending.values() if 0 < request.offered_ns <= t_ns]


async def _until(t_ns: int) -> None:
    left_s = (t_ns - time.monotonic_ns()) / NS_PER_S
    if left_s > 0:
        await asyncio.sleep(left_s)
