"""Does each tool get the joules of a window right, on a GPU whose true power is known?

The trap: a constant load. On it every method agrees; training is bursts. The scripted GPU draws 600 W
for 0.6 s, then 150 W for 0.4 s, over and over; its counter refreshes every 100 ms and takes 3 ms to
read, as an H200's. The truth is the integral of that curve from the moment the window was open to
the moment it was asked to close, the same for all. Windows begin at random phases.

Zeus and CodeCarbon subtract the counter as it reads; ergmeter interpolates it after the fact.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import tables
import workers
from workers import Gpu, Script, Worker

HEADER = ("window s", "tool", "median error %", "worst error %", "0 J", "n", "median ratio")
# Seconds, and how many a round.
WINDOWS = ((5.0, 1), (1.0, 3), (0.2, 8))
KWH_J = 3.6e6


class Tool(Protocol):
    """Something that tells the joules of a window, at once or when all is over."""

    def begin(self) -> None:
        """Open a window."""

    def end(self) -> float | None:
        """Close it; its joules, unless they come later."""

    def later(self, windows: list[tuple[int, int]]) -> list[float]:
        """The joules of windows that were closed before."""


class Ergmeter:
    """A Meter; each window is a step."""

    def __init__(self, run: Path) -> None:
        from ergmeter.meter import Meter

        self._meter = Meter(run).start()

    def begin(self) -> None:
        """Open a step."""
        self._span = self._meter.step(tokens=1)
        self._span.__enter__()

    def end(self) -> float | None:
        """Close it."""
        self._span.__exit__(None, None, None)
        return None

    def later(self, windows: list[tuple[int, int]]) -> list[float]:
        """From the run, as a report would."""
        from ergmeter.metrics.power import counter_curve
        from ergmeter.records import Window
        from ergmeter.runlog.reader import Run

        self._meter.close()
        (counter,) = Run.open(self._meter.path).series("energy_j").values()
        curve = counter_curve(counter.t_ns, counter.values)
        return [curve.over(Window(start, end)).joules for start, end in windows]


class Zeus:
    """Windows of Zeus."""

    def __init__(self) -> None:
        from zeus.monitor import ZeusMonitor

        self._monitor = ZeusMonitor(gpu_indices=[0])

    def begin(self) -> None:
        """Open a window."""
        self._monitor.begin_window("window", sync_execution=False)

    def end(self) -> float | None:
        """Close it."""
        return float(self._monitor.end_window("window", sync_execution=False).total_energy)

    def later(self, windows: list[tuple[int, int]]) -> list[float]:
        """Nothing: all was said at once."""
        return [0.0 for _ in windows]


class CodeCarbon:
    """Tasks of CodeCarbon; of its result, only what it says of GPUs."""

    def __init__(self) -> None:
        from codecarbon import OfflineEmissionsTracker

        self._tracker = OfflineEmissionsTracker(
            country_iso_code="FRA", save_to_file=False, log_level="error", allow_multiple_runs=True
        )

    def begin(self) -> None:
        """Open a task."""
        self._tracker.start_task("window")

    def end(self) -> float | None:
        """Close it."""
        return float(self._tracker.stop_task("window").gpu_energy) * KWH_J

    def later(self, windows: list[tuple[int, int]]) -> list[float]:
        """Nothing: all was said at once."""
        return [0.0 for _ in windows]


TOOLS = ("ergmeter", "zeus", "codecarbon")
LABELS = {"ergmeter": "ergmeter", "zeus": "Zeus", "codecarbon": "CodeCarbon"}


@contextmanager
def opened(name: str) -> Iterator[Tool]:
    """A tool by its name."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "ergmeter":
            yield Ergmeter(Path(folder) / "run")
        else:
            yield Zeus() if name == "zeus" else CodeCarbon()


def measured(tool: Tool, asked: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Windows of the lengths asked for: when each was open, and the joules the tool gives it."""
    dice = random.Random(asked["seed"])
    windows, joules = [], []
    for length_s in asked["lengths_s"]:
        time.sleep(dice.uniform(0.05, 0.25))
        tool.begin()
        start_ns = time.monotonic_ns()
        time.sleep(length_s)
        end_ns = time.monotonic_ns()
        joules.append(tool.end())
        windows.append((start_ns, end_ns))
    if None in joules:
        joules = list(tool.later(windows))
    return [(*window, one or 0.0) for window, one in zip(windows, joules, strict=True)]


def curve(seconds: float) -> list[tuple[float, float]]:
    """The bursts: 600 W for 0.6 s, 150 W for 0.4 s."""
    points = []
    for second in range(int(seconds)):
        points += [(second, 150.0), (second, 600.0), (second + 0.6, 600.0), (second + 0.6, 150.0)]
    return [(float(t), watts) for t, watts in points]


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """All tools measure their own windows at the same time, on the same GPU."""
    rounds = arguments.rounds or 6
    lengths = [length_s for _ in range(rounds) for length_s, n in WINDOWS for _ in range(n)]
    gpu = Gpu(power_w=curve(60 + 2 * sum(lengths)), energy_read_ms=3.0)
    epoch_ns = time.monotonic_ns()
    with workers.machine() as machine, ExitStack() as stack:
        environment = machine.environment(Script([gpu], epoch_ns=epoch_ns))
        made = [stack.enter_context(Worker(__file__, tool, environment)) for tool in TOOLS]
        for worker in made:
            worker.answer()
        for seed, worker in enumerate(made):
            worker.tell(lengths_s=lengths, seed=seed)
        found = {worker.tool: worker.answer() for worker in made}
    errors: dict[tuple[str, float], list[float]] = {}
    for tool, windows in found.items():
        for length_s, (start_ns, end_ns, joules) in zip(lengths, windows, strict=True):
            truth = gpu.joules((start_ns - epoch_ns) / 1e9, (end_ns - epoch_ns) / 1e9)
            errors.setdefault((tool, length_s), []).append((joules / truth - 1) * 100)
    return shown(errors)


def shown(errors: dict[tuple[str, float], list[float]]) -> dict[str, Any]:
    """Print the table; give the errors."""
    rows = []
    for length_s, _ in WINDOWS:
        ours = statistics.median(map(abs, errors["ergmeter", length_s]))
        for tool in TOOLS:
            mine = errors[tool, length_s]
            median, worst = statistics.median(map(abs, mine)), max(mine, key=abs)
            zeros = sum(error == -100 for error in mine)
            rows.append(
                (f"{length_s:g}", LABELS[tool], f"{median:.2f}", f"{worst:+.1f}", zeros, len(mine))
                + (f"{median / ours:.1f}",)
            )
    note = "Error: joules told over the true integral, less 1; the median is of its size."
    tables.show("Joules of a window against the truth, bursts on a scripted GPU", HEADER, rows, note=note)
    return {f"{tool} {length_s:g} s": list(found) for (tool, length_s), found in errors.items()}


def main() -> None:
    """Entry point."""
    parser = tables.parser(__doc__)
    parser.add_argument("--worker", choices=TOOLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        workers.serve(opened(arguments.worker), measured)
    else:
        tables.run(bench, arguments)


if __name__ == "__main__":
    main()
