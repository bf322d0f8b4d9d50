"""A server that answers, refuses, errs, stalls, stays silent or dies by plan, with its own log.

A process of its own on 127.0.0.1: `python failing_server.py LOG PLAN`, where PLAN is JSON, one word
for each request by the number in its prompt ("request 7"). It prints its port. The first request is
the client's trial and is answered. Each line of the log is one request: when it was received, and
when it was settled by what the server itself saw: its last byte went out, or the client hung up.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops"
TOKENS = 3
SLOW_S = 0.6


def event(payload: object) -> bytes:
    data = f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


WORD = event({"choices": [{"index": 0, "delta": {"content": "word "}}]})
END = (
    event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    + event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": TOKENS}})
    + event("[DONE]")
    + b"0\r\n\r\n"
)


class FailingServer:
    def __init__(self, plan: list[str], log: TextIO) -> None:
        self.plan = plan
        self.log = log
        self.is_tried = False
        self.answers_left = plan.count("answer")
        self.all_answered = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.one(reader, writer):
                pass
        writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        received_ns = time.monotonic_ns()
        number = int(body["messages"][0]["content"].split()[1])
        if not self.is_tried:
            self.is_tried = True
            await self.answer(writer, 0.0)
            return True
        kind = self.plan[number]
        if kind == "die":  # not before the answers are out, however slow the machine is
            await self.all_answered.wait()
            os._exit(0)
        await self.act(kind, reader, writer)
        line: dict[str, Any] = {"number": number, "kind": kind, "received_ns": received_ns}
        self.log.write(json.dumps({**line, "settled_ns": time.monotonic_ns()}) + "\n")
        self.log.flush()
        self.answers_left -= kind == "answer"
        if not self.answers_left:
            self.all_answered.set()
        return kind in ("answer", "slow", "error")

    async def act(
        self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if kind in ("answer", "slow"):
            await self.answer(writer, SLOW_S if kind == "slow" else 0.01)
        elif kind == "error":
            writer.write(ERROR)
            await writer.drain()
        elif kind == "refuse":  # a reset, without a byte
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        else:  # stall after the first word, or silence: until the client hangs up
            if kind == "stall":
                writer.write(HEAD + WORD)
            with suppress(ConnectionError):
                await reader.read()

    async def answer(self, writer: asyncio.StreamWriter, after_s: float) -> None:
        writer.write(HEAD)
        await asyncio.sleep(after_s)
        writer.write(WORD * TOKENS + END)
        await writer.drain()


async def main(log: str, plan: str) -> None:
    with Path(log).open("w") as file:
        failing = FailingServer(json.loads(plan), file)
        server = await asyncio.start_server(failing.serve, "127.0.0.1", 0, backlog=64)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
