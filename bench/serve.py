"""Does `erg serve` stay quick: 500 runs listed, a run of ten million samples, 50 who watch one run?
And `erg compare`, of as many runs?

No server is asked in its own process: server, writer and those who ask are
processes apart, as they are in life, and share the cores. How late a step is shown is taken from
the run itself, once it has ended: the time at which an event, or the page in a browser, went from
20 steps to 27, less the time at which the 21st ended: of each update the oldest step, by the wall
clock. It has three parts: until the step was on disk, which is the writer's hand-over every half
second; until there was an event of it; and until a page showed it.

--minutes is another question: does memory stay where it is, with a run that is written and 50 who
watch it? Just that is asked then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
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
SIDES = ("a", "b")  # of which a comparison has one each
COMPARED = (2, 200, 500)
SAMPLES = 10_000_000
CLIENTS, WATCH_S = 50, 15.0
ERG = Path(sys.executable).parent / "erg"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WRITER = """
import sys, time
from ergmeter import Meter
with Meter(sys.argv[1], probes=["process"]) as meter:
    while True:
        with meter.step(tokens=100):
            time.sleep(0.1)
"""
# Each number of steps that the page shows, with the time at which it did.
NOTE_STEPS = """() => {
  window.shown = [];
  const note = () => {
    const said = Number((document.getElementById("step") || {}).textContent?.replaceAll(",", ""));
    if (said && said !== (shown.at(-1) || [0])[0]) shown.push([said, Date.now() / 1000]);
  };
  const changes = { childList: true, subtree: true };
  new MutationObserver(note).observe(document.getElementById("live"), changes);
  note();
}"""
Shown = list[tuple[int, float]]  # how many steps, and when (wall clock, s)


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

    def resident_mb(self) -> tuple[float, float]:
        """Of the server, and of its workers together."""
        own = psutil.Process(self.process.pid)
        workers = sum(one.memory_info().rss for one in own.children(recursive=True))
        return own.memory_info().rss / 1e6, workers / 1e6

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


def compared(root: Path) -> list[tables.Row]:
    """`erg compare` of two folders of runs, as a process of its own: figures and checks of each."""
    rows: list[tables.Row] = []
    for many in COMPARED:
        sides = [sorted((root / side).iterdir())[: many // 2] for side in SIDES]
        groups = [root.with_name(f"{many}-{side}") for side in SIDES]
        for group, runs in zip(groups, sides, strict=True):
            group.mkdir()
            for run in runs:
                shutil.copytree(run, group / run.name)
        before, began_s = psutil.Process().cpu_times(), time.perf_counter()
        subprocess.run([ERG, "compare", *groups], check=True, stdout=subprocess.DEVNULL)
        took_s, after = time.perf_counter() - began_s, psutil.Process().cpu_times()
        cpu_s = after.children_user + after.children_system
        cpu_s -= before.children_user + before.children_system
        rows.append((many, took_s, cpu_s, 1e3 * cpu_s / many, os.getloadavg()[0]))
    return rows


def opened(root: Path) -> list[tables.Row]:
    """A long run, opened by the first who comes, from the list: what its page asks for, in turn.

    It comes into the directory when the server is ready, and is opened as soon as it is listed:
    before that the server has read nothing of it. (A server that starts over a directory begins to
    read what is in it, and its figures would be there already.)
    """
    written = scale.written(root.with_name("aside"), SAMPLES)
    reports_s = [scale.reported(written)[0]]
    server = Server(root)
    # A server that has been up for some seconds has it.
    library = re.search(r'data-charts="([^"]+)"', server.ask("/").decode())
    assert library
    server.ask(library[1])
    run = written.rename(root / "long")
    while not (listed_now := server.runs()["runs"]):
        time.sleep(0.05)
    assert listed_now[0]["is_pending"], "it has been read already: nothing to time"
    address = f"/run/{listed_now[0]['id']}"
    began_s = time.perf_counter()
    taken: list[tuple[str, float, int]] = []

    def ask(name: str, *paths: str) -> None:
        size = sum(len(server.ask(path)) for path in paths)
        taken.append((f"{name}, after", time.perf_counter() - began_s, size))

    def charts() -> None:
        ask("charts of the steps", f"/api{address}/charts?only=phases,steps,loss")
        ask("power of 8 GPUs", f"/api{address}/charts?only=power")

    ask("page", address)
    with ThreadPoolExecutor() as threads:
        drawing = threads.submit(charts)
        ask("headline figures", f"/api{address}/row")
        drawing.result()
    ask("whole report", f"{address}/report")
    for name, path in {
        "page, once read": address,
        "another column": f"/api{address}/series?columns=temperature_c",
    }.items():
        taken.append((f"{name}, in", *server.took(path)))
    server.stop()
    reports_s.append(scale.reported(run)[0])
    report_s = statistics.mean(reports_s)
    rows: list[tables.Row] = [(name, s, s / report_s, size / 1e3) for name, s, size in taken]
    said = f"`erg report --json`, before and after: {tables.spread(reports_s, 1)}"
    return [*rows, (said, report_s, 1.0, None)]


async def heard(address: str, run: str, seconds: float, shown: Shown) -> None:
    """Note how many steps there were in each event."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /api/run/{run}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            line = await asyncio.wait_for(reader.readline(), end_s - time.monotonic())
        except asyncio.TimeoutError:
            break
        if line.startswith(b"data: ") and (step := json.loads(line[6:])["step"]):
            shown.append((step, time.time()))
    writer.close()


def heard_by(clients: int, server: Server, run: str, seconds: float) -> list[Shown]:
    """What each of so many heard."""
    every: list[Shown] = [[] for _ in range(clients)]

    async def watch() -> None:
        await asyncio.gather(*(heard(server.address, run, seconds, shown) for shown in every))

    asyncio.run(watch())
    return every


def browsed(server: Server, run: str, seconds: float) -> list[Shown]:
    """What a page in a real browser showed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = browser.new_page()
        page.goto(f"{server.address}/run/{run}")
        page.evaluate(NOTE_STEPS)
        page.wait_for_timeout(seconds * 1000)
        shown: Shown = [(step, at_s) for step, at_s in page.evaluate("shown")]
        browser.close()
    return [shown]


def first_past(steps: int, shown: Shown) -> float | None:
    """When more than so many steps were first shown."""
    return next((at_s for step, at_s in shown if step > steps), None)


class Delays:
    """How long after its end the oldest new step of each update was shown, and what of it was
    until it was on disk, until there was an event, and until the page had it."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.parts_s: tuple[list[float], list[float], list[float]] = ([], [], [])

    def add(
        self, shown: Shown, ended_s: Sequence[float], on_disk: Shown, events: Shown | None
    ) -> None:
        """What one client was shown; `events`: what a page was told, of which it shows its own."""
        for (before, _), (step, at_s) in pairwise(shown):
            if step <= before:
                continue
            self.late_s.append(at_s - ended_s[before])
            disk_s = first_past(before, on_disk)
            event_s = first_past(before, events) if events else at_s
            if disk_s is not None and event_s is not None:
                times = (ended_s[before], disk_s, event_s, at_s)
                for part, (one, other) in zip(self.parts_s, pairwise(times), strict=True):
                    part.append(other - one)

    def median_parts_s(self, *, of_page: bool) -> list[float | None]:
        """Of each part the median; of what no page showed there is no third."""
        middle = [statistics.median(part) if part else None for part in self.parts_s]
        return middle if of_page else [*middle[:2], None]


class Live:
    """A server, and a run that is being written under it."""

    def __init__(self, root: Path) -> None:
        self.on_disk: Shown = []
        self.path = root / "live"
        self.server = Server(root)
        self.writing = subprocess.Popen([sys.executable, "-c", WRITER, str(self.path)])
        while not self.server.runs()["runs"]:
            time.sleep(0.1)
        self.run = self.server.runs()["runs"][0]["id"]
        self._is_over = threading.Event()
        self._noting = threading.Thread(target=self._note)
        self._noting.start()

    def _note(self) -> None:
        """Note how many steps are on disk, whenever the files have grown."""
        size = 0
        while not self._is_over.wait(0.01):
            at_s = time.time()
            now = sum(file.stat().st_size for file in self.path.glob("*/steps*"))
            if now != size:
                size = now
                self.on_disk.append((Run.open(self.path).count("steps"), at_s))

    def ended_s(self) -> Sequence[float]:
        """When each step ended, by the wall clock."""
        opened_run = Run.open(self.path)
        found: list[float] = (
            (opened_run.steps()["end_ns"] + opened_run.wall_zero_ns) / 1e9
        ).tolist()
        return found

    def stop(self) -> None:
        """End both."""
        self._is_over.set()
        self._noting.join()
        self.writing.kill()
        self.writing.wait()
        self.server.stop()


def followed(root: Path, seconds: float) -> list[tables.Row]:
    """A run that is being written, with one, many and a browser that watch."""
    live = Live(root)
    heard_by(1, live.server, live.run, 3.0)  # what is loaded with the first who watches
    page = "a page in chromium"
    ways: dict[str, Callable[[], list[Shown]]] = {
        "1 client": lambda: heard_by(1, live.server, live.run, seconds),
        f"{CLIENTS} clients": lambda: heard_by(CLIENTS, live.server, live.run, seconds),
        page: lambda: browsed(live.server, live.run, seconds),
    }
    if CHROMIUM is None:
        del ways[page]
    seen: dict[str, tuple[list[Shown], float, float]] = {}
    events: list[Shown] = []
    for name, watch in ways.items():
        cpu_s = live.server.cpu_s()
        with ThreadPoolExecutor(1) as beside:
            if name == page:  # what it is told, somebody else is told at the same time
                told = beside.submit(heard_by, 1, live.server, live.run, seconds + 5.0)
            every = watch()
            load = os.getloadavg()[0]
            seen[name] = every, (live.server.cpu_s() - cpu_s) / seconds, load
            if name == page:
                events = told.result()
    live.stop()
    ended_s = live.ended_s()
    rows: list[tables.Row] = []
    for name, (every, cores, load) in seen.items():
        found = Delays()
        for shown in every:
            found.add(shown, ended_s, live.on_disk, events[0] if name == page else None)
        late_s = found.late_s
        rate = sum(map(len, every)) / len(every) / seconds
        rows.append((name, rate, *found.median_parts_s(of_page=name == page),
                     statistics.median(late_s), tables.quantile(late_s, 0.99), max(late_s),
                     100 * cores, load))  # fmt: skip
    return rows


def endured(root: Path, minutes: float) -> list[tables.Row]:
    """Memory over time, with a run that is written, many who watch it and a page that asks.

    A look reads the writer's open file, which is closed after 15 minutes: less than that says
    nothing of an hour.
    """
    live = Live(root)
    is_over = threading.Event()

    def ask_as_a_page_does() -> None:
        while not is_over.wait(2.0):
            for path in ("/api/runs", f"/api/run/{live.run}", f"/api/run/{live.run}/charts"):
                live.server.ask(path)

    asking = threading.Thread(target=ask_as_a_page_does)
    asking.start()
    rows: list[tables.Row] = []
    between_s = max(10.0, 60.0 * minutes / 15)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 60 * minutes:
        cpu_s = live.server.cpu_s()
        every = heard_by(CLIENTS, live.server, live.run, between_s)  # who come and go, each time
        cores = (live.server.cpu_s() - cpu_s) / between_s
        after_min = (time.monotonic() - began_s) / 60
        steps = max(step for shown in every for step, _ in shown)
        load = os.getloadavg()[0]
        rows.append((f"{after_min:.1f}", steps, *live.server.resident_mb(), 100 * cores, load))
    is_over.set()
    asking.join()
    live.stop()
    return rows


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """All three, or just how memory goes."""
    with tempfile.TemporaryDirectory(prefix="ergmeter-serve-") as folder:
        places = [Path(folder) / name for name in ("many", "long", "live")]
        for place in places:
            place.mkdir()
        if arguments.minutes:
            return _shown_over_time(endured(places[2], arguments.minutes))
        for number in range(RUNS):
            short_run(places[0] / SIDES[number % 2] / f"run-{number:03d}")
        listing = listed(places[0])
        tables.show(f"{RUNS} runs", ("what", "s", "kB"), listing)
        comparing = compared(places[0])
        tables.show(
            "`erg compare` of two folders",
            ("runs", "s", "CPU s", "CPU ms a run", "load"),
            comparing,
            note="A process of its own, with its start.",
        )
        long = opened(places[1])
        tables.show(
            f"A run of {SAMPLES // 10**6} million samples, opened",
            ("what", "s", "to erg report", "kB"),
            long,
            note="After: since the page was asked for. In: by itself, then.",
        )
        live = followed(places[2], arguments.seconds)
    tables.show(
        "A run as it is written, 10 steps a second",
        (
            *("who", "updates/s each", "to disk s", "to event s", "to page s"),
            *("late s", "p99 s", "worst s", "CPU % of a core", "load"),
        ),
        live,
        note=f"{arguments.seconds:.0f} s each. Late: how long after its end a step was shown, of"
        " each update the oldest; before it the medians of its parts. To page: against another"
        " client that is told at the same time, so some milliseconds either way are nothing."
        + ("" if CHROMIUM else " No page: there is no chromium here."),
    )
    return {"list": listing, "compare": comparing, "long": long, "live": live}


def _shown_over_time(rows: list[tables.Row]) -> dict[str, Any]:
    head = ("minute", "steps", "server MB", "workers MB", "CPU % of a core", "load")
    tables.show(f"Memory, {CLIENTS} who watch a run of 10 steps a second", head, rows)
    return {"memory": rows}


if __name__ == "__main__":
    parser = tables.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=WATCH_S, help="how long each watch lasts")
    parser.add_argument("--minutes", type=float, default=0.0, help="watch memory for so long")
    tables.run(bench, parser.parse_args())
