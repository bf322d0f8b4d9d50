"""Does `erg serve` stay quick: 500 runs listed, a run of ten million samples, 50 who watch one run?

The trap: a server that is asked in its own process. Here server, writer and those who ask are
processes apart, as they are in life, and share the cores. How old a step is when it arrives is
taken from the run itself: the time at which the event came, less the time at which the newest step
in it ended, by the wall clock. It holds the writer's own hand-over, which is every half second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

import scale
import tables
from ergmeter.records import Mark, Step
from ergmeter.runlog.identity import run_header, writer_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.writer import Writer, create_run

RUNS, STEPS_EACH = 500, 200
SAMPLES = 10_000_000
CLIENTS, WATCH_S = 50, 60.0
ERG = Path(sys.executable).parent / "erg"
WRITER = """
import sys, time
from ergmeter import Meter
with Meter(sys.argv[1], probes=["process"]) as meter:
    while True:
        with meter.step(tokens=100):
            time.sleep(0.1)
"""


class Server:
    """`erg serve` over a directory, as a process."""

    def __init__(self, root: Path) -> None:
        before = time.perf_counter()
        self.process = subprocess.Popen(
            [str(ERG), "serve", str(root)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.address = self.process.stdout.readline().split()[-1].rstrip("/")
        self.took("/")
        self.started_s = time.perf_counter() - before

    def ask(self, path: str) -> bytes:
        """What it says to this."""
        with urllib.request.urlopen(self.address + path, timeout=300) as answer:
            return bytes(answer.read())

    def took(self, path: str) -> tuple[float, int]:
        """Seconds and bytes of an answer."""
        before = time.perf_counter()
        size = len(self.ask(path))
        return time.perf_counter() - before, size

    def runs(self) -> dict[str, Any]:
        """The list."""
        found: dict[str, Any] = json.loads(self.ask("/api/runs"))
        return found

    def resident_mb(self) -> float:
        """Of the server and its workers."""
        own = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in (own, *own.children(recursive=True))) / 1e6

    def cpu_s(self) -> float:
        """The same of processor time."""
        own = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.communicate()


def short_run(path: Path) -> None:
    """A run of some steps, through the real writer."""
    run = create_run(path, run_header(path.name, ["bench/serve.py"]))
    header = writer_header("meter")
    at_ns = int(header["clock"]["monotonic_ns"])
    second_ns = 10**9
    writer = Writer(run, header=header, devices=[])
    writer.write(
        "steps",
        [
            Step(at_ns + i * second_ns, at_ns + (i + 1) * second_ns, index=i, tokens_real=1000)
            for i in range(STEPS_EACH)
        ],
    )
    writer.mark(Mark(at_ns + STEPS_EACH * second_ns, "closed"))
    writer.close()


def listed(root: Path) -> list[tables.Row]:
    """Many runs in the list."""
    for number in range(RUNS):
        short_run(root / f"run-{number:03d}")
    server = Server(root)
    before = time.perf_counter()
    first_s, size = server.took("/api/runs")
    while server.runs()["pending"]:
        time.sleep(0.2)
    all_s = time.perf_counter() - before
    again_s = statistics.median(server.took("/api/runs")[0] for _ in range(9))
    rows: list[tables.Row] = [
        ("start, to the first page", server.started_s, None),
        (f"list of {RUNS} runs, first", first_s, size / 1e3),
        ("list, all figures read", all_s, None),
        ("list, once read", again_s, len(server.ask("/api/runs")) / 1e3),
    ]
    server.stop()
    return rows


def opened(root: Path) -> list[tables.Row]:
    """A long run, opened by the first who comes."""
    scale.written(root / "long", SAMPLES)
    server = Server(root)
    run = server.runs()["runs"][0]["id"]
    asked = {
        "page, first time": f"/run/{run}",
        "chart of the steps": f"/api/run/{run}/charts?only=phases",
        "power of 8 GPUs": f"/api/run/{run}/series?columns=power_w",
        "whole report": f"/run/{run}/report",
        "page, once read": f"/run/{run}",
    }
    rows: list[tables.Row] = []
    for name, address in asked.items():
        seconds, size = server.took(address)
        rows.append((f"{SAMPLES // 10**6} M samples: {name}", seconds, size / 1e3))
    server.stop()
    return rows


async def watched(address: str, run: str, zero_ns: int, seconds: float) -> list[float]:
    """How old the newest step was in each event, in seconds."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /api/run/{run}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    ages: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            line = await asyncio.wait_for(reader.readline(), end_s - time.monotonic())
        except asyncio.TimeoutError:
            break
        if line.startswith(b"data: "):
            seen = json.loads(line[6:])
            if seen.get("lasted_s") is not None:
                ages.append((time.time_ns() - zero_ns) / 1e9 - seen["lasted_s"])
    writer.close()
    return ages


def followed(root: Path, seconds: float) -> tuple[list[tables.Row], list[tables.Row]]:
    """A run that is being written, with nobody, one and many who watch."""
    server = Server(root)
    writing = subprocess.Popen([sys.executable, "-c", WRITER, str(root / "live")])
    while not server.runs()["runs"]:
        time.sleep(0.1)
    run = server.runs()["runs"][0]["id"]
    opened_run = Run.open(root / "live")
    zero_ns = opened_run.wall_zero_ns + opened_run.start_ns

    async def watch(clients: int) -> list[list[float]]:
        every = (watched(server.address, run, zero_ns, seconds) for _ in range(clients))
        return await asyncio.gather(*every)

    asyncio.run(watch(1))  # what is loaded with the first who watches
    live: list[tables.Row] = []
    memory: list[tables.Row] = []
    for clients in (1, CLIENTS, CLIENTS):
        cpu_s, before_mb = server.cpu_s(), server.resident_mb()
        ages = [age for one in asyncio.run(watch(clients)) for age in one]
        cores = (server.cpu_s() - cpu_s) / seconds
        live.append((f"{clients} watching", len(ages) / clients / seconds, statistics.median(ages),
                     tables.quantile(ages, 0.99), max(ages), 100 * cores))  # fmt: skip
        memory.append((f"{clients} watching", before_mb, server.resident_mb()))
    writing.kill()
    writing.wait()
    server.stop()
    return live, memory


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """All three."""
    with tempfile.TemporaryDirectory(prefix="ergmeter-serve-") as folder:
        places = [Path(folder) / name for name in ("many", "long", "live")]
        for place in places:
            place.mkdir()
        answers = [*listed(places[0]), *opened(places[1])]
        tables.show("Answers", ("what", "s", "kB"), answers)
        live, memory = followed(places[2], arguments.seconds)
    tables.show(
        "A run as it is written, 10 steps a second",
        ("clients", "events/s each", "age s", "age p99 s", "age max s", "CPU % of a core"),
        live,
        note=f"{arguments.seconds:.0f} s each. Age: of the newest step, when its event arrives.",
    )
    tables.show(
        "Memory of the server and its workers", ("clients", "MB before", "MB after"), memory
    )
    return {"answers": answers, "live": live, "memory": memory}


if __name__ == "__main__":
    parser = tables.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=WATCH_S, help="how long each watch lasts")
    tables.run(bench, parser.parse_args())
