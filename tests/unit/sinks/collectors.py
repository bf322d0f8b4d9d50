"""A local server that keeps what is sent to it: the gateway and the collector of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import NamedTuple


class Sent(NamedTuple):
    """One request."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


class Collector:
    """What has come in, and what is answered."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.status = 200
        self.url = ""


@contextmanager
def collector() -> Iterator[Collector]:
    """A server on a free port of this machine, until the end of the block."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def _take(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            kept.sent.append(Sent(self.command, self.path, body, headers))
            self.send_response(kept.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_PUT = do_POST = _take  # noqa: N815  the base class's names

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
