"""Does a program run slower with a Meter around it? Steps of 1 ms and of 100 us, with and without.

This machine's speed drifts by more than the effect. So short blocks of steps with a Meter
and without follow each other closely, and what counts is the ratio within each pair. Two processes
may also differ by a few per cent for no reason (where their memory lies), so the processes are
started anew several times, the interval is over those starts, and a second bare process against the
first shows what this bench calls a difference where there is none.

The Meter is real: default probes on a scripted GPU, its threads reading and writing all the while.
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

HEADER = ("step", "against bare", "bare us", "us", "ratio", "95 % interval", "added us", "pairs")
TOOLS = ("bare", "bare again", "metered")
STEPS_US = (1000, 100)
BLOCK_S = 0.1
PAIRS = 20
STARTS = 6

Loop = Callable[[int, int], float]  # turns of a step and steps in, seconds a step out


def turns_for(step_us: float) -> int:
    """How many turns of the busy loop take about so long here."""
    taken = []
    for _ in range(50):
        before = time.perf_counter()
        busy(1000)
        taken.append(time.perf_counter() - before)
    return max(1, round(1000 * step_us * 1e-6 / statistics.median(taken)))


def busy(turns: int) -> int:
    """Compute, as a step would."""
    total = 0
    for turn in range(turns):
        total += turn
    return total


@contextmanager
def bare() -> Iterator[Loop]:
    """A loop without a Meter."""

    def loop(turns: int, steps: int) -> float:
        before = time.perf_counter()
        for _ in range(steps):
            busy(turns)
        return (time.perf_counter() - before) / steps

    yield loop


@contextmanager
def metered() -> Iterator[Loop]:
    """A loop with one."""
    from ergmeter.meter import Meter

    with tempfile.TemporaryDirectory() as folder, Meter(Path(folder) / "run") as meter:

        def loop(turns: int, steps: int) -> float:
            before = time.perf_counter()
            for _ in range(steps):
                with meter.step(tokens=8192, samples=8):
                    busy(turns)
            return (time.perf_counter() - before) / steps

        yield loop


Blocks = dict[tuple[int, str], list[float]]  # seconds a step, by length of step and tool


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the processes several times; each time, blocks in turns."""
    starts = [started(arguments.rounds or PAIRS) for _ in range(STARTS)]
    rows = []
    for step_us in STEPS_US:
        rows += [compared(starts, step_us, tool) for tool in TOOLS[1:]]
    note = (
        f"{STARTS} starts of the processes; blocks of {BLOCK_S:g} s. Medians over pairs of"
        " neighbouring blocks; the interval is a\nbootstrap over starts."
    )
    tables.show("Steps with a Meter and without", HEADER, rows, note=note)
    return {"starts": [{f"{us} {tool}": s for (us, tool), s in one.items()} for one in starts]}


def started(pairs: int) -> Blocks:
    """One start of all processes, and so many blocks of each."""
    blocks: Blocks = {(step_us, tool): [] for step_us in STEPS_US for tool in TOOLS}
    turns = {step_us: turns_for(step_us) for step_us in STEPS_US}
    with workers.machine() as machine, ExitStack() as stack:
        environment = machine.environment(Script([Gpu(power_w=300.0, energy_read_ms=3.0)]))
        made = {tool: stack.enter_context(Worker(__file__, tool, environment)) for tool in TOOLS}
        for worker in made.values():
            worker.answer()
        for number in range(-2, pairs):
            for step_us in STEPS_US:
                for tool in TOOLS if number % 2 else reversed(TOOLS):
                    steps = round(BLOCK_S * 1e6 / step_us)
                    taken = made[tool].ask(turns=turns[step_us], steps=steps)
                    if number >= 0:  # the first blocks load what is loaded at the first step
                        blocks[step_us, tool].append(taken)
    return blocks


def compared(starts: list[Blocks], step_us: int, tool: str) -> tuple[object, ...]:
    """One row: this tool against the bare loop."""
    ratios, added, plain, other = [], [], [], []
    for blocks in starts:
        base, mine = blocks[step_us, "bare"], blocks[step_us, tool]
        ratios.append([m / b for m, b in zip(mine, base, strict=True)])
        added += [m - b for m, b in zip(mine, base, strict=True)]
        plain += base
        other += mine
    low, high = tables.median_interval([statistics.median(each) for each in ratios])
    ratio = statistics.median(value for each in ratios for value in each)
    return (
        f"{step_us} us",
        tool,
        statistics.median(plain) * 1e6,
        statistics.median(other) * 1e6,
        f"{ratio:.4f}",
        f"{low:.4f} to {high:.4f}",
        f"{statistics.median(added) * 1e6:.2f}",
        len(added),
    )


def main() -> None:
    """Entry point."""
    parser = tables.parser(__doc__)
    parser.add_argument("--worker", choices=TOOLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        tool = metered() if arguments.worker == "metered" else bare()
        workers.serve(tool, lambda loop, asked: loop(asked["turns"], asked["steps"]))
    else:
        tables.run(bench, arguments)


if __name__ == "__main__":
    main()
