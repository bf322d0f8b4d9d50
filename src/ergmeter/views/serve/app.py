"""The web application, and the server that runs it until it is stopped.

Command lines are visible to all users of a machine, so the token is not passed to the browser as an
argument. The browser opens a file that only this user can read, which leads to the address.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import sys
import tempfile
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ergmeter.errors import ErgmeterError, UsageError
from ergmeter.views.serve import api, pages
from ergmeter.views.serve.app_state import AppState, NotThereError
from ergmeter.views.serve.folder import Folder
from ergmeter.views.serve.guard import LOOPBACK, Access, Guard, ip_address, onward_page
from ergmeter.views.serve.pool import Pool
from ergmeter.views.serve.tail import TooManyError


def web_app(folder: Folder, access: Access | None = None, *, pool: Pool | None = None) -> Guard:
    """Return the ASGI application."""
    shared = AppState(folder, pool) if pool else AppState(folder)

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        shared.start()
        yield
        shared.stop()

    app = Starlette(
        routes=[*api.routes(), *pages.routes()],
        lifespan=life,
        exception_handlers={404: _not_found, 500: _failed, ErgmeterError: _refused},
    )
    app.state.shared = shared
    return Guard(app, access or Access())


async def _not_found(request: Request, _error: Exception) -> Response:
    return pages.error_page(request, 404, "There is nothing at this address")


async def _refused(request: Request, error: Exception) -> Response:
    codes = {NotThereError: 404, TooManyError: 503, UsageError: 400}
    code = next((code for kind, code in codes.items() if isinstance(error, kind)), 422)
    why = request.app.state.shared.folder.relative(str(error))
    if isinstance(error, NotThereError) and not request.url.path.startswith("/api/"):
        why = f"There is no {error.kind} at this address"
    return pages.error_page(request, code, why)


async def _failed(request: Request, _error: Exception) -> Response:
    # Errors are printed in the terminal; the response contains no details.
    return pages.error_page(request, 500, "erg serve failed to answer; see its terminal")


# The server process.


_SHORTEST_TOKEN = 16
# By IPv6 or not: an address reserved for documentation. Nothing is sent to it.
_ELSEWHERE = {False: (socket.AF_INET, "192.0.2.1"), True: (socket.AF_INET6, "2001:db8::1")}


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address to listen on, and the token visitors need."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        number = ip_address(self.host)
        return self.host == "localhost" or (number is not None and number.is_loopback)

    @property
    def is_any(self) -> bool:
        """True for the wildcard address."""
        number = ip_address(self.host)
        return number is not None and number.is_unspecified

    def access(self) -> Access:
        """Return host names and token; a token is generated if others can reach the server."""
        token = self.token
        if token is not None and len(token) < _SHORTEST_TOKEN:
            raise UsageError(f"the token has {len(token)} characters; it needs {_SHORTEST_TOKEN}")
        if token is None and not self.is_loopback:
            token = secrets.token_urlsafe(24)
        return Access(frozenset({*LOOPBACK, *self._names()}), token, by_number=self.is_any)

    def url(self, port: int) -> str:
        """Return the URL for a browser; for the wildcard address, that of this machine."""
        host = _own_number(self.host) if self.is_any else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def _names(self) -> set[str]:
        """Return the accepted host names."""
        if self.is_any:
            return {socket.gethostname().lower(), socket.getfqdn().lower()}
        return {self.host.lower()}


def serve(
    directory: Path, address: ListenAddress, *, say: Callable[[str], None], is_to_open: bool = False
) -> None:
    """Serve a directory until the process is stopped."""
    folder = Folder(directory)
    access = address.access()
    listening = _bound(address)
    where = address.url(listening.getsockname()[1])
    if access.token:
        where += f"?token={quote(access.token, safe='')}"
    say(f"{folder.root.name}/ at {where}")
    if access.token and not address.is_loopback:
        say("the token is in the address and is sent unencrypted: there is no TLS here")
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
    sys.stdout.flush()
    # On SIGTERM stop the workers too; the default would end only this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt), ExitStack() as until_stopped:
        if is_to_open and access.token:
            folder_of_ours = tempfile.TemporaryDirectory(prefix="erg-serve-")
            webbrowser.open(_onward(Path(until_stopped.enter_context(folder_of_ours)), where))
        elif is_to_open:
            webbrowser.open(where)
        uvicorn.Server(config).run(sockets=[listening])


def _onward(directory: Path, address: str) -> str:
    """Write a page that redirects to an address, readable by this user only."""
    page = directory / "open.html"
    page.touch(mode=0o600)
    page.write_text(onward_page(address), encoding="utf-8")
    return page.as_uri()


def _is_news(record: logging.LogRecord) -> bool:
    """True unless a log line only reports that pages were open at shutdown."""
    kind = record.exc_info[0] if record.exc_info else None
    is_stop = kind is not None and issubclass(kind, asyncio.CancelledError)
    return not is_stop and not record.getMessage().startswith("Cancel ")


def _bound(address: ListenAddress) -> socket.socket:
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(512)  # early requests wait instead of being refused
    except UnicodeError:  # of an empty part between two dots, or one that is too long
        raise UsageError(f"--host {address.host!r} is neither a host name nor an address") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"can't listen on {address.host} port {address.port}: {why}") from error
    return bound


def _own_number(host: str) -> str:
    """Return this machine's outward address, else loopback."""
    is_six = ":" in host
    for family, elsewhere in (_ELSEWHERE[is_six], _ELSEWHERE[False]):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((elsewhere, 9))
            return str(asked.getsockname()[0])
    return "::1" if is_six else "127.0.0.1"
