"""How much of a core does watching the GPUs take, while the program itself does nothing?

Wall time misleads: the counter of an H200 takes 3 ms to read, but the reader may sleep meanwhile;
what counts is CPU time, of all threads and child processes, less what an idle interpreter uses.

The scripted library sleeps where a driver may also compute; that part is in none of these figures.
Being woken again is: on a virtual machine a sleep of 3 ms costs about as much CPU as reading all
the rest of a GPU, so one case has a counter that answers at once.

The peers read less: CodeCarbon once a second, Zeus's power monitor only power, each domain from a
process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

import tables
import workers
from workers import Gpu, Script, Worker

SLICE_S = 5.0
SLICES = 4
HEADER = ("watching", "GPUs", "counter ms", "% of a core", "slices", "ratio", "threads, ms/s")


@contextmanager
def idle() -> Iterator[None]:
    """Nothing at all."""
    yield


@contextmanager
def ergmeter() -> Iterator[None]:
    """A Meter with its default probes: GPUs at 10 Hz, this process and the node at 1 Hz."""
    from ergmeter.meter import Meter

    with tempfile.TemporaryDirectory() as folder, Meter(Path(folder) / "run"):
        yield


@contextmanager
def ergmeter_nvml() -> Iterator[None]:
    """A Meter that reads only GPUs."""
    from ergmeter.meter import Meter

    with tempfile.TemporaryDirectory() as folder, Meter(Path(folder) / "run", probes=["nvml"]):
        yield


@contextmanager
def zeus_power() -> Iterator[None]:
    """Zeus's power monitor at ergmeter's rate; ZeusMonitor itself reads at a window's ends only."""
    from zeus.monitor.power import PowerMonitor

    monitor = PowerMonitor(update_period=0.1)
    yield
    monitor.stop()


@contextmanager
def codecarbon() -> Iterator[None]:
    """CodeCarbon's tracker, once a second."""
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        country_iso_code="FRA",
        measure_power_secs=1,
        save_to_file=False,
        log_level="error",
        allow_multiple_runs=True,
    )
    tracker.start()
    yield
    tracker.stop()


Tool = Callable[[], AbstractContextManager[None]]
TOOLS: dict[str, tuple[str, Tool]] = {
    "idle": ("an idle interpreter", idle),
    "ergmeter": ("ergmeter: Meter, 10 Hz", ergmeter),
    "ergmeter_nvml": ("ergmeter: Meter, 10 Hz, GPUs only", ergmeter_nvml),
    "zeus_power": ("Zeus: PowerMonitor, 10 Hz", zeus_power),
    "codecarbon": ("CodeCarbon: tracker, 1 Hz", codecarbon),
}
# Tool, GPUs, milliseconds to read a counter.
CASES = (
    ("idle", 1, 3),
    ("ergmeter", 1, 3),
    ("ergmeter", 8, 3),
    ("ergmeter", 8, 0),
    ("ergmeter_nvml", 8, 3),
    ("zeus_power", 1, 3),
    ("zeus_power", 8, 3),
    ("codecarbon", 1, 3),
    ("codecarbon", 8, 3),
)
OURS = CASES.index(("ergmeter", 8, 3))


def cpu_s() -> dict[str, float]:
    """CPU seconds so far: of each thread of this process by name, and of its children."""
    spent = {}
    for thread in threading.enumerate():
        stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
        spent[thread.name] = int(stat.split()[0]) / 1e9
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    ended = psutil.Process().cpu_times()
    spent["children"] = sum(t.user + t.system for t in times)
    spent["children"] += ended.children_user + ended.children_system
    return {"all": time.process_time() + spent["children"], **spent}


def watched(_tool: None, asked: dict[str, Any]) -> dict[str, float]:
    """CPU seconds a second over a slice in which this process does nothing but be watched."""
    before, begin = cpu_s(), time.perf_counter()
    time.sleep(asked["seconds"])
    after, took_s = cpu_s(), time.perf_counter() - begin
    return {name: (after[name] - before.get(name, 0.0)) / took_s for name in after}


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Watch idle processes at the same time, each with its own tool."""
    slices: list[list[dict[str, float]]] = [[] for _ in CASES]
    with workers.machine() as machine, ExitStack() as stack:
        started = []
        for tool, gpus, read_ms in CASES:
            script = Script([Gpu(power_w=300.0, energy_read_ms=read_ms)] * gpus)
            worker = Worker(__file__, tool, machine.environment(script))
            started.append(stack.enter_context(worker))
            worker.answer()  # one after the other: Zeus gives its processes 10 s to start
        time.sleep(2.0)  # what the tools do only once has been done
        for _ in range(arguments.rounds or SLICES):
            for worker in started:
                worker.tell(seconds=SLICE_S)
            for worker, seen in zip(started, slices, strict=True):
                seen.append(worker.answer())
    return shown(slices)


def shown(slices: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Print the table; give its numbers."""
    medians = [statistics.median(each["all"] for each in seen) for seen in slices]
    bare = medians[0]
    rows = []
    for (tool, gpus, read_ms), seen, share in zip(CASES, slices, medians, strict=True):
        ratio = (share - bare) / (medians[OURS] - bare)
        rows.append(
            (
                TOOLS[tool][0],
                gpus,
                read_ms,
                f"{share * 100:.2f}",
                tables.spread([each["all"] * 100 for each in seen]),
                f"{ratio:.2f}",
                threads(seen),
            )
        )
    note = (
        f"Medians of {len(slices[0])} slices of {SLICE_S:g} s, all tools at the same time. The"
        " ratio is to ergmeter with 8 GPUs\nand a 3 ms counter, the idle interpreter subtracted."
    )
    tables.show("CPU share of watching idle processes", HEADER, rows, note=note)
    return {
        f"{tool}_{gpus}_gpus_{read_ms}_ms": {"median_frac": share, "slices": seen}
        for (tool, gpus, read_ms), seen, share in zip(CASES, slices, medians, strict=True)
    }


def threads(seen: list[dict[str, float]]) -> str:
    """What each thread used, in CPU milliseconds a second, where it is worth mentioning."""
    names = {name for each in seen for name in each} - {"all", "MainThread"}
    found = {name: statistics.median(each.get(name, 0.0) for each in seen) for name in names}
    ranked = sorted(found.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share * 1e3:.1f}" for name, share in ranked if share > 1e-4) or "-"


def main() -> None:
    """Entry point."""
    parser = tables.parser(__doc__)
    parser.add_argument("--worker", choices=TOOLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        workers.serve(TOOLS[arguments.worker][1](), watched)
    else:
        tables.run(bench, arguments)


if __name__ == "__main__":
    main()
