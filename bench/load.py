"""Is the client of `erg load` what is measured, or the server?

A server too quick to be real hides nothing, and one too slow hides everything. The server
here is a process of its own that sends each token at its time, whoever asks; so the ideal is known,
and what a client shows beyond it is the client's (and the machine's: the table's last column). The
same requests go through OpenAI's own client for Python in turns, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tables
from ergmeter.load import level, request_body
from ergmeter.load.client import Pulse, RequestTarget, address
from ergmeter.load.pacing import Closed, LevelLength
from ergmeter.load.request_body import MadeUp

TTFT_S, TPOT_S, TOKENS = 0.1, 0.01, 64
IDEAL_S = TTFT_S + (TOKENS - 1) * TPOT_S
CONCURRENCIES = (1, 4, 16, 64)
ROUNDS_EACH = 3  # requests that each worker makes

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
COMMON = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def event(payload: object) -> bytes:
    """An event of a stream, as an HTTP chunk."""
    text = payload if isinstance(payload, str) else json.dumps({**COMMON, **payload})  # type: ignore[dict-item]
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = event({"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
END = (
    event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    + event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": TOKENS,
                                      "total_tokens": 9 + TOKENS}})
    + event("[DONE]") + b"0\r\n\r\n"
)  # fmt: skip


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send each token at its time, on one connection after another request."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            began_s = loop.time()
            writer.write(HEAD)
            for number in range(TOKENS):
                await asyncio.sleep(began_s + TTFT_S + number * TPOT_S - loop.time())
                writer.write(TOKEN if number + 1 < TOKENS else TOKEN + END)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(port: Any) -> None:  # noqa: ANN401  a connection to tell the port through
    """The server's process."""

    async def forever() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


Taken = tuple[float, float, float, float]  # tokens/s, TTFT, TPOT, CPU share


def ours(url: str, at_once: int) -> Taken:
    """`erg load`, its writing of a run included."""
    asking = request_body.Asking(RequestTarget(address(url, "chat")), "chat", "m", {}, {})
    plan = level.LevelPlan(
        asking, MadeUp(16, TOKENS, 0), Closed(at_once), LevelLength(requests=ROUNDS_EACH * at_once),
        warmup=at_once, why_no_energy="not wanted",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        outcome = level.run(plan, out=Path(place) / "run", name="bench")
        lines = (outcome.run / level.REQUESTS_FILE).read_text().splitlines()
    rows = [json.loads(line) for line in lines][at_once:]
    window_s = (max(r["last_ns"] for r in rows) - min(r["sent_ns"] for r in rows)) / 1e9
    ttft = statistics.median((r["first_ns"] - r["sent_ns"]) / 1e9 for r in rows)
    tpot = statistics.median((r["last_ns"] - r["first_ns"]) / 1e9 / (TOKENS - 1) for r in rows)
    return len(rows) * TOKENS / window_s, ttft, tpot, outcome.cpu_frac


def openai_client(url: str, at_once: int) -> Taken:
    """The same requests through AsyncOpenAI, with nothing but the times kept."""
    from openai import AsyncOpenAI

    async def run() -> Taken:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await _asked(client, at_once)

    return asyncio.run(run())


async def _asked(client: Any, at_once: int) -> Taken:  # noqa: ANN401  openai's
    prompts = MadeUp(16, TOKENS, 0)

    async def one(number: int) -> list[float]:
        times = [time.monotonic()]
        stream = await client.chat.completions.create(
            model="m", messages=prompts.prompt(number).fields("chat")["messages"],
            max_tokens=TOKENS, stream=True,
        )  # fmt: skip
        times += [
            time.monotonic()
            async for chunk in stream
            if chunk.choices and chunk.choices[0].delta.content
        ]
        return times

    await asyncio.gather(*(one(-1 - n) for n in range(at_once)))  # the warm-up
    numbers = iter(range(ROUNDS_EACH * at_once))
    pulse = Pulse()
    beating = asyncio.create_task(pulse.beat())
    await asyncio.sleep(0)

    async def work() -> list[list[float]]:
        return [await one(number) for number in numbers]

    made = await asyncio.gather(*(work() for _ in range(at_once)))
    cpu = pulse.cpu_frac
    beating.cancel()
    rows = [times for own in made for times in own]
    window_s = max(t[-1] for t in rows) - min(t[0] for t in rows)
    ttft = statistics.median(t[1] - t[0] for t in rows)
    tpot = statistics.median((t[-1] - t[1]) / (TOKENS - 1) for t in rows)
    return len(rows) * TOKENS / window_s, ttft, tpot, cpu


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both clients in turns, at each number at a time."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    clients: dict[str, Callable[[str, int], Taken]] = {"erg load": ours, "openai": openai_client}
    taken: dict[tuple[str, int], list[Taken]] = {}
    for at_once in CONCURRENCIES * (arguments.rounds or 3):
        for name, client in clients.items():
            taken.setdefault((name, at_once), []).append(client(url, at_once))
    server.terminate()
    rows = []
    for (name, at_once), all_taken in sorted(taken.items(), key=lambda item: item[0][1]):
        rate, ttft, tpot, cpu = (
            statistics.median(column) for column in zip(*all_taken, strict=True)
        )
        ideal = at_once * TOKENS / IDEAL_S
        rows.append((f"{name}, {at_once} at a time", rate / ideal, ttft / TTFT_S, tpot / TPOT_S,
                     100 * cpu, 1e6 * cpu / rate))  # fmt: skip
    tables.show(
        "Clients beside the ideal",
        ("client", "tokens/s of ideal", "TTFT of ideal", "TPOT of ideal", "CPU % of a core",
         "us a token"),
        rows,
        note=f"A server that sends a token after {TTFT_S:g} s and one every {TPOT_S:g} s,"
        f" {TOKENS} in all; medians of {len(next(iter(taken.values())))} rounds in turns.",
    )  # fmt: skip
    return {"rows": rows}


if __name__ == "__main__":
    tables.run(bench, tables.parser(__doc__).parse_args())
