"""Runs the server: binds, says where it is, and serves until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import signal
import socket
import sys
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from ergmeter.errors import UsageError
from ergmeter.views.serve.app import web_app
from ergmeter.views.serve.folder import Folder
from ergmeter.views.serve.guard import LOOPBACK, Access

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and who may come."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def access(self) -> Access:
        """With a token where others can reach it, made if none was given."""
        token = self.token
        if token is not None and len(token) < _SHORTEST_TOKEN:
            raise UsageError(f"the token has {len(token)} characters; {_SHORTEST_TOKEN} at least")
        if token is None and not self.is_loopback:
            token = secrets.token_urlsafe(24)
        return Access(frozenset({*LOOPBACK, *self._names()}), token)

    def _names(self) -> set[str]:
        """The names it is known by: what it was bound to; of "any address" this host's names."""
        if self.host in ("0.0.0.0", "::"):
            name = socket.gethostname().lower()
            return {name, socket.getfqdn().lower(), *_addresses(name)}
        return {self.host.lower()}


def serve(
    directory: Path,
    address: Address,
    *,
    say: Callable[[str], None],
    is_to_open: bool = False,
) -> None:
    """Serve a directory until it is told to stop."""
    folder = Folder(directory)
    access = address.access()
    listening = _bound(address)
    port = listening.getsockname()[1]
    where = f"http://{_in_url(address.host)}:{port}/"
    say(f"{folder.root.name}/ at {where}" + (f"?token={access.token}" if access.token else ""))
    if access.token and not address.is_loopback:
        say("the token is in the address, and goes over the network as it is: no TLS here")
    config = uvicorn.Config(
        web_app(folder, access),
        http="h11",
        ws="none",
        proxy_headers=False,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=1000,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=32 * 1024,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    if is_to_open:
        webbrowser.open(where + (f"?token={access.token}" if access.token else ""))
    sys.stdout.flush()
    # Told to stop, it stops, and what it started with it: the default would end just this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line says more than that pages were open when it was told to stop."""
    kind = record.exc_info[0] if record.exc_info else None
    is_stop = kind is not None and issubclass(kind, asyncio.CancelledError)
    return not is_stop and not record.getMessage().startswith("Cancel ")


def _bound(address: Address) -> socket.socket:
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(512)  # who comes before we are ready waits, and is not turned away
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"can't listen on {address.host} port {address.port}: {why}") from error
    return bound


def _in_url(host: str) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def _addresses(name: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except OSError:
        return set()
