"""Does each tool get the joules of a window right, on a GPU whose true power is known?

Neither load nor windows are constant. On a constant load every method agrees,
and a window of a whole number of refreshes hides that a counter was read between them. So the
scripted GPU draws 600 W for 0.43 s, then 150 W for 0.30 s, over and over, and each window's length
is drawn from 20 % around the one named, its start from a quarter of a second. The counter refreshes
every 100 ms and takes 3 ms to read, as an H200's. The truth is the integral of the curve from the
moment the window was open to the moment it was asked to close, for all tools alike.

Zeus and CodeCarbon subtract the counter as it reads. Ergmeter reads it as often as 0.2 % of a core
allows, on an H200 about every 1.7 s, and spreads its joules as power says; "cheap counter" is
ergmeter where the counter can be read at 10 Hz. It is the only one that gives an interval: "inside"
says in how many windows the truth lay in it.
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

import numpy as np

import tables
import workers
from workers import Gpu, Script, Worker

HEADER = (
    *("window", "tool", "median error %", "mean error %", "worst error %"),
    *("ratio of means", "0 J", "n", "inside"),
)
# Seconds, and how many a round.
WINDOWS = ((5.0, 1), (1.0, 4), (0.2, 10), (0.05, 10))
HIGH_S, LOW_S = 0.43, 0.30
KWH_J = 3.6e6
# A counter reading on an H200 takes 4 ms of CPU or more; ergmeter gives it 0.2 % of a core. The
# scripted counter costs no CPU, so the readings between are left out afterwards.
COUNTER_S = 1.7


Told = tuple[float, float | None, float | None]  # joules, and the interval where there is one


class Tool(Protocol):
    """Something that tells the joules of a window, at once or when all is over."""

    def begin(self) -> None:
        """Open a window."""

    def end(self) -> float | None:
        """Close it; its joules, unless they come later."""

    def later(self, windows: list[tuple[int, int]]) -> list[Told]:
        """The joules of windows that were closed before."""


class Ergmeter:
    """A Meter; each window is a step."""

    def __init__(self, run: Path, *, counter_s: float) -> None:
        from ergmeter.meter import Meter

        self._meter = Meter(run).start()
        self._counter_s = counter_s

    def begin(self) -> None:
        """Open a step."""
        self._span = self._meter.step(tokens=1)
        self._span.__enter__()

    def end(self) -> float | None:
        """Close it."""
        self._span.__exit__(None, None, None)
        return None

    def later(self, windows: list[tuple[int, int]]) -> list[Told]:
        """From the run, as a report would."""
        from ergmeter.metrics.device_energy import counter_curve, power_curve
        from ergmeter.records import Window
        from ergmeter.runlog.reader import Run

        self._meter.close()
        run = Run.open(self._meter.path)
        (counter,) = run.series("energy_j").values()
        (power,) = run.series("power_w").values()
        ticks = range(int(counter.t_ns[0]), int(counter.t_ns[-1]), round(self._counter_s * 1e9))
        kept = np.unique([*np.searchsorted(counter.t_ns, ticks), len(counter.t_ns) - 1])
        shape = power_curve(power.t_ns, power.values)
        curve = counter_curve(counter.t_ns[kept], counter.values[kept], shape=shape)
        found = [curve.over(Window(start, end)) for start, end in windows]
        return [(energy.joules, energy.low_j, energy.high_j) for energy in found]


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

    def later(self, windows: list[tuple[int, int]]) -> list[Told]:
        """Nothing: all was said at once."""
        raise NotImplementedError(windows)


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

    def later(self, windows: list[tuple[int, int]]) -> list[Told]:
        """Nothing: all was said at once."""
        raise NotImplementedError(windows)


LABELS = {
    "ergmeter": "ergmeter",
    "ergmeter_10hz": "ergmeter, cheap counter",
    "zeus": "Zeus",
    "codecarbon": "CodeCarbon",
}
TOOLS = tuple(LABELS)


@contextmanager
def opened(name: str) -> Iterator[Tool]:
    """A tool by its name."""
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith("ergmeter"):
            counter_s = COUNTER_S if name == "ergmeter" else 0.1
            yield Ergmeter(Path(folder) / "run", counter_s=counter_s)
        else:
            yield Zeus() if name == "zeus" else CodeCarbon()


def measured(tool: Tool, asked: dict[str, Any]) -> list[tuple[int, int, Told]]:
    """Windows of the lengths asked for: when each was open, and what the tool tells of it."""
    dice = random.Random(asked["seed"])
    windows: list[tuple[int, int]] = []
    told: list[Told] = []
    for length_s in asked["lengths_s"]:
        time.sleep(dice.uniform(0.05, 0.25))
        tool.begin()
        start_ns = time.monotonic_ns()
        time.sleep(length_s * dice.uniform(0.8, 1.2))
        end_ns = time.monotonic_ns()
        joules = tool.end()
        windows.append((start_ns, end_ns))
        if joules is not None:
            told.append((joules, None, None))
    told = told or tool.later(windows)
    return [(*window, one) for window, one in zip(windows, told, strict=True)]


def curve(seconds: float) -> list[tuple[float, float]]:
    """The bursts: up to 600 W, and down to 150 W."""
    points: list[tuple[float, float]] = []
    up_s = 0.0
    while up_s < seconds:
        down_s = up_s + HIGH_S
        points += [(up_s, 150.0), (up_s, 600.0), (down_s, 600.0), (down_s, 150.0)]
        up_s = down_s + LOW_S
    return points


Windows = list[tuple[float, int, int, Told]]  # length asked for, start, end, and what was told


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """All tools measure their own windows at the same time, on the same GPU; several starts."""
    rounds = arguments.rounds or 6
    lengths = [length_s for length_s, n in WINDOWS for _ in range(n)]
    gpu = Gpu(power_w=curve(rounds * (30 + 2 * sum(lengths))), energy_read_ms=3.0)
    epoch_ns = time.monotonic_ns()
    errors: dict[tuple[str, float], list[float]] = {}
    inside: dict[tuple[str, float], int] = {}
    with workers.machine() as machine:
        environment = machine.environment(Script([gpu], epoch_ns=epoch_ns))
        for seed in range(rounds):
            for tool, windows in started(environment, lengths, seed).items():
                for length_s, start_ns, end_ns, (joules, low, high) in windows:
                    truth = gpu.joules((start_ns - epoch_ns) / 1e9, (end_ns - epoch_ns) / 1e9)
                    errors.setdefault((tool, length_s), []).append((joules / truth - 1) * 100)
                    if low is not None and high is not None:
                        held = low <= truth <= high
                        inside[tool, length_s] = inside.get((tool, length_s), 0) + held
    return shown(errors, inside)


def started(environment: dict[str, str], lengths: list[float], seed: int) -> dict[str, Windows]:
    """One start of every tool: when a tool's ticks fall against the refreshes is chance."""
    with ExitStack() as stack:
        made = [stack.enter_context(Worker(__file__, tool, environment)) for tool in TOOLS]
        for worker in made:
            worker.answer()
        for number, worker in enumerate(made):
            worker.tell(lengths_s=lengths, seed=seed * len(made) + number)
        told = {worker.tool: worker.answer() for worker in made}
    return {
        tool: [(length_s, *one) for length_s, one in zip(lengths, found, strict=True)]
        for tool, found in told.items()
    }


def shown(
    errors: dict[tuple[str, float], list[float]], inside: dict[tuple[str, float], int]
) -> dict[str, Any]:
    """Print the table; give the errors."""
    rows = []
    for length_s, _ in WINDOWS:
        ours = statistics.fmean(map(abs, errors["ergmeter", length_s]))
        for tool in TOOLS:
            mine = errors[tool, length_s]
            sizes = [abs(error) for error in mine]
            median, mean, worst = (
                statistics.median(sizes),
                statistics.fmean(sizes),
                max(mine, key=abs),
            )
            zeros = sum(error == -100 for error in mine)
            rows.append(
                (
                    f"{length_s:g} s",
                    LABELS[tool],
                    f"{median:.2f}",
                    f"{mean:.2f}",
                    f"{worst:+.1f}",
                    f"{mean / ours:.1f}",
                    zeros,
                    len(mine),
                    inside.get((tool, length_s)),
                )
            )
    note = (
        "Error: joules told over the true integral, less 1; median and mean are of its size. The"
        " ratio is of means, to ergmeter's."
    )
    title = "Joules of a window against the truth, bursts on a scripted GPU"
    tables.show(title, HEADER, rows, note=note)
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
