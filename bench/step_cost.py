"""What does it cost the training thread to mark one step, next to the peers?

A tight loop of nothing but steps is the kindest place to be measured in, with everything
in the cache. So all are also called with a millisecond of other work before each call, which is the
dearer figure and the one that a training loop sees.

Zeus reads the energy counter at both ends of a window, on the calling thread; CodeCarbon reads
every sensor and waits for its threads. Both are what their documentation has for a step or a task.
Windows are opened without device synchronisation, so what is timed is the instrument alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tables
import workers
from workers import Gpu, Script, Worker

Call = Callable[[], None]
HEADER = ("call", "between calls", "median us", "p99 us", "ratio to meter.step", "n")

# Tool, what the table calls it, calls a round.
ROWS = (
    ("nothing", "an empty function (the timer)", 1000),
    ("step", "ergmeter: with meter.step()", 1000),
    ("step_end", "ergmeter: meter.step_end()", 1000),
    ("beside_step", "other version: with meter.step()", 1000),
    ("beside_step_end", "other version: meter.step_end()", 1000),
    ("zeus", "Zeus: begin_window, end_window", 20),
    ("codecarbon", "CodeCarbon: start_task, stop_task", 2),
)
BESIDE = ("beside_step", "beside_step_end")  # only with --beside
# Seconds of other work before each call, and at most so many calls a round then.
APART = ((0.0, "nothing", 1000), (0.001, "1 ms of work", 50))


@contextmanager
def ergmeter_step() -> Iterator[Call]:
    """A step as a span."""
    from ergmeter.meter import Meter

    with tempfile.TemporaryDirectory() as folder, Meter(Path(folder) / "run") as meter:

        def call() -> None:
            with meter.step(tokens=8192, samples=8):
                pass

        yield call


@contextmanager
def ergmeter_step_end() -> Iterator[Call]:
    """A step as one call at its end."""
    from ergmeter.meter import Meter

    with tempfile.TemporaryDirectory() as folder, Meter(Path(folder) / "run") as meter:
        yield lambda: meter.step_end(tokens=8192, samples=8)


@contextmanager
def zeus() -> Iterator[Call]:
    """A window of Zeus."""
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=[0])

    def call() -> None:
        monitor.begin_window("step", sync_execution=False)
        monitor.end_window("step", sync_execution=False)

    yield call


@contextmanager
def codecarbon() -> Iterator[Call]:
    """A task of CodeCarbon."""
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        country_iso_code="FRA", save_to_file=False, log_level="error", allow_multiple_runs=True
    )

    def call() -> None:
        tracker.start_task("step")
        tracker.stop_task("step")

    yield call


@contextmanager
def nothing() -> Iterator[Call]:
    """What timing alone costs."""
    yield lambda: None


TOOLS = {
    "nothing": nothing,
    "step": ergmeter_step,
    "step_end": ergmeter_step_end,
    "zeus": zeus,
    "codecarbon": codecarbon,
}


def timed_ns(call: Call, calls: int, apart_s: float) -> list[int]:
    """How long each of so many calls took."""
    clock = time.perf_counter_ns
    taken = []
    for _ in range(calls):
        work(apart_s)
        before_ns = clock()
        call()
        taken.append(clock() - before_ns)
    return taken


def work(seconds: float) -> None:
    """Compute for so long, on other data than an instrument's."""
    until = time.perf_counter() + seconds
    while seconds and time.perf_counter() < until:
        sum(range(1000))


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every tool on a counter that answers at once and on one that is as slow as an H200's."""
    return {
        f"energy_read_{read_ms:g}_ms": compared(read_ms, arguments.rounds or 30, arguments.beside)
        for read_ms in (0.0, 3.0)
    }


def compared(read_ms: float, count: int, beside: Path | None) -> list[dict[str, Any]]:
    """Print the table for one counter; give its rows."""
    rows = []
    taken = rounds(read_ms, count, beside)
    for apart_s, between, _ in APART:
        ours = statistics.median(taken["step", apart_s])
        for tool, label, _ in ROWS:
            if (tool, apart_s) not in taken:
                continue
            ns = taken[tool, apart_s]
            median, p99 = statistics.median(ns), tables.quantile(ns, 0.99)
            ratio = f"{median / ours:,.2f}" if median < 10 * ours else f"{median / ours:,.0f}"
            rows.append((label, between, median / 1e3, p99 / 1e3, ratio, len(ns)))
    title = f"Cost of marking one step; 1 GPU, {read_ms:g} ms to read its energy counter"
    tables.show(title, HEADER, rows)
    names = ("call", "between_calls", "median_us", "p99_us", "ratio_to_step", "n")
    return [dict(zip(names, row, strict=True)) for row in rows]


def rounds(read_ms: float, count: int, beside: Path | None) -> dict[tuple[str, float], list[int]]:
    """Nanoseconds of every call, by tool and by the work between calls. The tools take turns."""
    taken: dict[tuple[str, float], list[int]] = {}
    with workers.machine() as machine, ExitStack() as stack:
        here = machine.environment(Script([Gpu(power_w=300.0, energy_read_ms=read_ms)]))
        environments = dict.fromkeys(TOOLS, here)
        if beside:
            there = {**here, "PYTHONPATH": tables.of_version(beside)["PYTHONPATH"]}
            environments |= dict.fromkeys(BESIDE, there)
        started = {
            tool: stack.enter_context(Worker(__file__, tool.removeprefix("beside_"), environment))
            for tool, environment in environments.items()
        }
        for worker in started.values():
            worker.answer()
            worker.ask(calls=2, apart_s=0.0)  # what is loaded at the first call is not counted
        for _ in range(count):
            for apart_s, _, most in APART:
                for tool, _, calls in ROWS:
                    if tool not in started:
                        continue
                    ns = started[tool].ask(calls=min(calls, most), apart_s=apart_s)
                    taken.setdefault((tool, apart_s), []).extend(ns)
    return taken


def main() -> None:
    """Entry point."""
    parser = tables.with_beside(tables.parser(__doc__))
    parser.add_argument("--worker", choices=TOOLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        workers.serve(TOOLS[arguments.worker](), lambda call, asked: timed_ns(call, **asked))
    else:
        tables.run(bench, arguments)


if __name__ == "__main__":
    main()
