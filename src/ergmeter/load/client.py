"""Sends requests to a server and measures the client's own cost, which must stay small.

A busy client's own waiting would count as the server's. One thread with one event loop takes bytes
in and notes the time before it parses them; nothing is written or printed there. The loop's cost is
measured: its CPU time, and how late it woke (`Pulse`).

Connections are opened before the clock of a request starts, so TTFT includes no handshake; the
handshake's time is stored beside it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from ergmeter.errors import UsageError
from ergmeter.load.answer import Answer
from ergmeter.units import NS_PER_S

# Addresses. Devices are read only where the server's name resolves to this machine; otherwise
# J/token would be of the client's idle GPU. A tunnel on a local port looks like a local server:
# use `--no-energy` for that.


Endpoint = Literal["chat", "completions"]
_PATHS: dict[str, str] = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address that requests are sent to."""

    host: str
    port: int
    path: str
    is_tls: bool

    @property
    def authority(self) -> str:
        """The value of the Host header: host, and port unless it is the default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.is_tls else 80
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The full URL."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"


def address(url: str, endpoint: Endpoint) -> ServerAddress:
    """The endpoint's address below a base URL, with or without /v1. UsageError if invalid."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not a URL ({error}); give http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not a server's URL; give http://HOST:PORT or https://HOST")
    if parts.username or parts.password:
        raise UsageError("the password in the URL would be stored in the run; use --api-key-env")
    if not url.isascii() or any(character.isspace() for character in url):
        raise UsageError(f"{url!r} is not a URL: percent-encode blanks and non-ASCII, as in %20")
    is_tls = parts.scheme == "https"
    path = _path(parts.path, endpoint) + (f"?{parts.query}" if parts.query else "")
    return ServerAddress(parts.hostname, port or (443 if is_tls else 80), path, is_tls)


def _path(path: str, endpoint: Endpoint) -> str:
    path = path.rstrip("/")
    if path.endswith(_PATHS[endpoint]):
        return path
    if any(path.endswith(other) for other in _PATHS.values()):
        raise UsageError(f"the URL ends in {path!r}, but --endpoint is {endpoint}; make them agree")
    return f"{path or '/v1'}{_PATHS[endpoint]}"


def why_remote(host: str) -> str:
    """Why a server's devices can't be read here; empty if its name resolves to this machine."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{host} has no address ({error.strerror or error})"
    addresses = {str(entry[4][0]).partition("%")[0] for entry in infos}
    own = _own_addresses()
    foreign = sorted(
        a for a in addresses if not ipaddress.ip_address(a).is_loopback and a not in own
    )
    if not foreign:
        return ""
    return f"the server is not on this machine ({host} is {', '.join(foreign)})"


def _own_addresses() -> set[str]:
    import psutil  # noqa: PLC0415

    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


_PULSE_S = 0.02


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """Address, headers and timeout of requests. `timeout_s`: the longest wait for any bytes."""

    address: ServerAddress
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 60.0

    def request(self, body: dict[str, Any]) -> bytes:
        """Return a POST request with this body as bytes."""
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
        """True if another request can be sent on this connection."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when bytes have been received."""
        t_ns = time.monotonic_ns()
        self._heard_ns = t_ns
        if self._answer is not None and self._answer.received(data, t_ns):
            self._end(t_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed."""
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
                answer.fail("timeout", f"nothing received for {timeout_s:g} s")
                self._end(time.monotonic_ns())
                break
            await asyncio.wait([self._done], timeout=timeout_s - silent_s)
        if answer.failure or not answer.response.keeps_alive:
            self.close()

    def close(self) -> None:
        """Close the connection."""
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
        """Return `own` if it is open, else a new connection; None if that fails (see `answer`)."""
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
    """Measures how late the event loop wakes and its CPU time: a busy client distorts results."""

    lags_s: list[float] = field(default_factory=list)
    _began_s: float = 0.0
    _cpu_began_s: float = 0.0

    async def beat(self) -> None:
        """Measure lags until cancelled."""
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
        """The q-quantile of the lags."""
        ordered = sorted(self.lags_s) or [0.0]
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
