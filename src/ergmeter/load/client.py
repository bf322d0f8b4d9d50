"""How is a request sent, without the client being what is measured?

The trap: a client that is busy. Its own waiting would be read as the server's. One thread with one
event loop takes bytes in and notes the time before it looks at them; nothing is written or printed
there. What the loop cost is measured: its CPU time, and how late it woke (`Pulse`).

Connections are opened before the clock of a request starts, so that TTFT holds no handshake; how
long the handshake took is kept beside it. The other defensible way, from before the connection, is
what a first visitor sees, and depends on the network more than on the server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.load.address import ServerAddress
    from ergmeter.load.answer import Answer

_PULSE_S = 0.02


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """Where requests go, and what goes with each: headers, and how long silence is borne."""

    address: ServerAddress
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 60.0

    def request(self, body: dict[str, Any]) -> bytes:
        """The bytes of a request."""
        payload = json.dumps(body).encode()
        lines = [
            f"POST {self.address.path} HTTP/1.1",
            f"Host: {self.address.authority}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "User-Agent: ergmeter",
            f"Content-Length: {len(payload)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + payload


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._heard_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        t_ns = time.monotonic_ns()
        self._heard_ns = t_ns
        if self._answer is not None and self._answer.received(data, t_ns):
            self._end(t_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is closed."""
        self._transport = None
        if self._answer is not None:
            if exc is not None:
                self._answer.fail("connection lost", str(exc))
            self._answer.closed()
            self._end(time.monotonic_ns())

    async def send(self, request: bytes, answer: Answer, *, timeout_s: float) -> None:
        """Send a request and wait for the end of its answer."""
        answer.sent_ns = self._heard_ns = time.monotonic_ns()
        answer.due_ns = answer.due_ns or answer.sent_ns
        if self._transport is None:  # opened ahead of time, and closed by the server since
            answer.fail("connection lost", "the server closed it before the request was sent")
            answer.end_ns = answer.sent_ns
            return
        self._answer = answer
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        # One timer for each stretch of silence, and none for each chunk.
        while not self._done.done():
            silent_s = (time.monotonic_ns() - self._heard_ns) / NS_PER_S
            if silent_s >= timeout_s:
                answer.fail("timeout", f"nothing came for {timeout_s:g} s")
                self._end(time.monotonic_ns())
                break
            await asyncio.wait([self._done], timeout=timeout_s - silent_s)
        if answer.failure or not answer.response.keeps_alive:
            self.close()

    def close(self) -> None:
        """Let go of it."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _end(self, t_ns: int) -> None:
        if self._answer is not None and self._done is not None:
            self._answer.end_ns = t_ns
            self._answer = None
            if not self._done.done():
                self._done.set_result(None)


@dataclass
class Client:
    """Sends requests to one target."""

    target: RequestTarget
    in_flight: int = 0
    most_in_flight: int = 0
    _tls: ssl.SSLContext | None = field(init=False)

    def __post_init__(self) -> None:
        self._tls = ssl.create_default_context() if self.target.address.is_tls else None

    async def connected(
        self, answer: Answer, *, own: Connection | None = None
    ) -> Connection | None:
        """An open connection: the caller's own if it still is; None, and the reason, if none."""
        if own is not None and own.is_open:
            return own
        loop = asyncio.get_running_loop()
        before_ns = answer.sent_ns = time.monotonic_ns()
        address = self.target.address
        try:
            _, made = await asyncio.wait_for(
                loop.create_connection(Connection, address.host, address.port, ssl=self._tls),
                self.target.timeout_s,
            )
        except (OSError, asyncio.TimeoutError) as error:
            answer.fail("no connection", _why(error, self.target.timeout_s))
            answer.due_ns = answer.due_ns or before_ns
            answer.end_ns = time.monotonic_ns()
            return None
        answer.connect_s = (time.monotonic_ns() - before_ns) / NS_PER_S
        return made

    async def ask(self, connection: Connection, request: bytes, answer: Answer) -> None:
        """Send one request and wait for the end of its answer."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await connection.send(request, answer, timeout_s=self.target.timeout_s)
        finally:
            self.in_flight -= 1


def _why(error: Exception, timeout_s: float) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"no connection within {timeout_s:g} s"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return getattr(error, "strerror", None) or str(error)


@dataclass
class Pulse:
    """How late the event loop wakes, and what its thread costs: is the client the bottleneck?"""

    lags_s: list[float] = field(default_factory=list)
    _began_s: float = 0.0
    _cpu_began_s: float = 0.0

    async def beat(self) -> None:
        """Until it is cancelled."""
        self._began_s, self._cpu_began_s = time.monotonic(), time.thread_time()
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_PULSE_S)
            self.lags_s.append(max(0.0, time.monotonic() - before_s - _PULSE_S))

    @property
    def cpu_frac(self) -> float:
        """Share of one core that this thread took since the pulse began."""
        lasted_s = time.monotonic() - self._began_s
        return (time.thread_time() - self._cpu_began_s) / lasted_s if lasted_s > 0 else 0.0

    def lag_s(self, q: float) -> float:
        """The lag that a share q of the beats stayed below."""
        ordered = sorted(self.lags_s) or [0.0]
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
