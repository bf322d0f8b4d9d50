"""A server whose every token has its time: what `erg load` must find is known beforehand.

It speaks just enough HTTP over real sockets. What a request gets is said by a `Script`; what the
server saw (how many requests at a time, their bodies) is kept for the test to look at.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: object) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}\n\n".encode()


def text_chunk(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


def plain(status: str, body: str, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


@dataclass
class Script:
    """How every request is answered: after `ttft_s` the first token, then one every `tpot_s`."""

    ttft_s: float = 0.02
    tpot_s: float = 0.005
    tokens: int = 5
    tokens_per_chunk: int = 1
    prompt_tokens: int = 11
    sends_usage: bool = True

    def __call__(self, number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        began_s = time.monotonic()
        send(HEAD)
        send(chunked(event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})))
        for first in range(0, self.tokens, self.tokens_per_chunk):
            # Each is due at its own time, so that one late sleep does not delay the rest.
            due_s = began_s + self.ttft_s + self.tpot_s * first
            time.sleep(max(0.0, due_s - time.monotonic()))
            held = min(self.tokens_per_chunk, self.tokens - first)
            send(chunked(event(text_chunk("word " * held))))
        self.finish(send)

    def finish(self, send: Callable[[bytes], None]) -> None:
        end: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        send(chunked(event(end)))
        if self.sends_usage:
            usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
            send(chunked(event({"choices": [], "usage": usage})))
        send(chunked(event("[DONE]")) + chunked(b""))


Answering = Callable[[int, dict[str, Any], Callable[[bytes], None]], None]


@dataclass
class Server:
    """Real sockets, one thread a connection."""

    script: Answering
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                while self.answer_one(connection, stream):
                    pass
            except (OSError, HangUpError):
                pass

    def answer_one(self, connection: socket.socket, stream: Any) -> bool:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = stream.readline()
            if not line:
                return False
            head += line
        lines = head.decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if "content-length" in line)
        body = json.loads(stream.read(length))
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(head.decode())
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            self.script(number, body, connection.sendall)
        finally:
            with self.lock:
                self.under_way -= 1
        return True


class HangUpError(Exception):
    """A script that raises it closes the connection then and there."""


@contextmanager
def serving(script: Answering) -> Iterator[Server]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = Server(script, url=f"http://127.0.0.1:{listening.getsockname()[1]}")
    threading.Thread(target=server.accept, args=(listening,), daemon=True).start()
    try:
        yield server
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
