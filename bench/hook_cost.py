"""What does the hook of `erg record` cost a loop that knows nothing of it, per optimizer step?

Two processes run the same tiny training, one bare and one with the hook, in turns of a second; a
step takes about 100 us, which no real one does, so that microseconds can be seen. The
machine's speed may drift by more than that. So every round gives one difference of neighbours, and
the median of those is the cost: of the clock, of the training thread's own CPU time, which others
on the machine change little, and of all threads', with what is written behind the loop's back.

    python bench/hook_cost.py [--rounds 15] [--beside ../older/src]

`--beside` adds the hook of another source tree to the same rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tables

HEADER = (
    *("loop", "hook of", "of", "bare us", "with hook us", "cost us (median of pairs)"),
    *("25 % to 75 %", "n"),
)
CLOCKS = ("the clock", "its thread's CPU", "all threads' CPU")
LOOPS = {
    "model(ids)": "one tensor of ids",
    "model(ids, targets)": "and targets, which are counted",
    "DataLoader, model(ids)": "and a data wait for each step",
}
TURN_S = 0.7


class Child:
    """A process that trains for a while when it is told to."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "child"], env={**os.environ, **environment}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def turn(self, loop: str, steps: int) -> list[float]:
        """Seconds per step of so many steps, by each clock."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([loop, steps]) + "\n")
        self._process.stdin.flush()
        return [lasted_s / steps for lasted_s in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        """Let it end by itself."""
        self._process.communicate(timeout=60)


def child() -> None:
    """Train as told on standard input."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, 4))

        def forward(self, ids: torch.Tensor, *_targets: torch.Tensor) -> torch.Tensor:
            return self.weight[ids].sum()

    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 16, (2, 3))
    for line in sys.stdin:
        loop, steps = json.loads(line)
        given: Any = (ids, ids) if "targets" in loop else (ids,)
        batches: Any = range(steps)
        if "DataLoader" in loop:
            rows: Any = ids.repeat(steps, 1)
            batches = iter(DataLoader(rows, batch_size=2))
        clocks = (time.perf_counter, time.thread_time, time.process_time)
        starts_s = [clock() for clock in clocks]
        for _ in batches:
            loss = model(*given)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        lasted_s = [clock() - start_s for clock, start_s in zip(clocks, starts_s, strict=True)]
        print(json.dumps(lasted_s), flush=True)


def hooked(run: Path, source: Path) -> dict[str, str]:
    """The environment that `erg record` of a source tree gives the program."""
    code = "import json, os; from ergmeter.recorder import hook; print(json.dumps("
    code += "hook.environment(os.environ)))"
    found = subprocess.check_output(
        [sys.executable, "-c", code], env=tables.of_version(source), text=True
    )
    return {**json.loads(found), "ERGMETER_RUN": str(run)}


def main() -> None:
    """Print the table."""
    from ergmeter.recorder import hook
    from ergmeter.runlog.identity import run_header
    from ergmeter.runlog.writer import create_run

    options = tables.with_beside(tables.parser(__doc__)).parse_args()
    rounds = options.rounds or 15
    sources = {"this version": Path(__file__).parents[1] / "src"}
    if options.beside:
        sources[str(options.beside)] = options.beside.resolve()
    rows, numbers = [], {}
    with tempfile.TemporaryDirectory() as folder:
        bare, watched = Child({}), {}
        for number, (name, source) in enumerate(sources.items()):
            run = create_run(Path(folder) / f"run{number}", run_header("bench", []))
            (run / hook.FOLDER).mkdir()  # as the recorder leaves it for as long as it is there
            watched[name] = Child(hooked(run, source))
        for loop, what in LOOPS.items():
            steps = max(100, round(TURN_S / bare.turn(loop, 200)[1]))
            for one in watched.values():
                one.turn(loop, steps)
            turns: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in watched}
            for _ in range(rounds):
                without = bare.turn(loop, steps)
                for name, one in watched.items():
                    turns[name].append((without, one.turn(loop, steps)))
            for name, pairs in turns.items():
                for number, clock in enumerate(CLOCKS):
                    sides = [(1e6 * one[number], 1e6 * other[number]) for one, other in pairs]
                    costs = [with_it - without for without, with_it in sides]
                    ends = " to ".join(f"{tables.quantile(costs, q):.1f}" for q in (0.25, 0.75))
                    least = [f"{min(side):.1f}" for side in zip(*sides, strict=True)]
                    cost = f"{statistics.median(costs):.1f}"
                    rows.append((f"{loop}: {what}", name, clock, *least, cost, ends, rounds))
                    numbers[f"{loop}, {name}, {clock}"] = {"cost_us": costs}
        for one in (bare, *watched.values()):
            one.close()
    tables.show("The hook's cost per optimizer step", HEADER, rows, note=tables.machine())
    tables.save(options.json, numbers)


if __name__ == "__main__":
    child() if sys.argv[1:] == ["child"] else main()
