"""What do `erg bench` and `erg gate` take with 500, 5 000 and 20 000 cells: time and memory?

Cells are not made up: the plan is made of a file of scenarios, the directories are
those that `erg bench run` prepares, and each finished cell has a status, results of the Trainer and
a run of 60 steps by the real writer. The run's files are the same in all cells (hard links), which
costs a reader as much as others would. Nothing is trained, and making the cells is not timed.

Every command is a process of its own and tells its own peak: what `wait4` says of a child is never
less than what its parent held when it was started. A runner keeps a row in each cell that it ends;
"report, no rows" is of a directory where all of them are gone, so that every run is read again.
The gate and the comparison are of the directory with itself. `--beside SRC` calls another version's
commands in turns with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tables
from ergmeter.bench.execute import driver, results_directory, state
from ergmeter.bench.execute.outcome import CellOutcome
from ergmeter.bench.execute.state import Process
from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.plan.plan import plan
from ergmeter.records import Device, Mark, Sample, Step
from ergmeter.runlog.identity import run_header, writer_header
from ergmeter.runlog.writer import Writer, create_run

CELLS = (500, 5_000, 20_000)
STEPS, STEP_NS = 60, 250_000_000
GIB = 2**30
HEADER = ("command", "cells", "wall s", "range s", "ms a cell", "peak RSS MB", "RSS to smallest")
# The peak of this program alone, in kB, at its end.
CALLED = """
import sys
from ergmeter.cli.main import main
try:
    main(sys.argv[2:])
finally:
    with open("/proc/self/status") as status, open(sys.argv[1], "w") as told:
        told.write(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
SCENARIOS = """
command: erg train
axes: {{effective_batch_size: [4], num_gpus: [1], packing: [false], max_seq_len: [128]}}
repeats: 5
scenarios:
  - name: lora
    framework_config: [null]
    arguments: {{peft_method: lora, r: 8, max_steps: 60, model_name_or_path: [builtin:tiny]}}
    axes: {{learning_rate: [{rates}]}}
"""


def finished(folder: Path, number: int) -> Path:
    """A directory of results with so many cells, all of them ended; one of 50 failed."""
    folder.mkdir(parents=True)
    rates = ", ".join(f"{1e-6 * one:.6f}" for one in range(1, number // 5 + 1))
    (folder / "scenarios.yaml").write_text(SCENARIOS.format(rates=rates))
    run = a_run(folder / "run")
    out = folder / "results"
    made = results_directory.opened(out, plan(folder / "scenarios.yaml"))
    assert len(made.cells) == number
    driver.prepare(out, made)
    for cell in made.cells:
        end(state.directory_of(out, cell), cell, run)
    return out


def end(directory: Path, cell: Cell, run: Path) -> None:
    """Leave behind what a runner leaves."""
    begun = state.read(directory).begun(Process.of(os.getpid()))
    is_lost = cell.index % 50 == 7
    lost = CellOutcome("oom", "rank 0: torch.OutOfMemoryError: CUDA out of memory. Tried 2.00 GiB.")
    state.write(
        directory, begun.ended(lost if is_lost else CellOutcome("ok"), exit_code=int(is_lost))
    )
    said = {
        **{name: str(value) for name, value in cell.settings.items()},
        "train_runtime": 15.0, "train_loss": 2.5, "train_samples_per_second": 16.0,
        "train_steps_per_second": 4.0, "train_tokens_per_second": 2000.0 + cell.index,
        "num_gpus": 1, "repeat": cell.repeat, "status": "oom" if is_lost else "ok",
    }  # fmt: skip
    (directory / "results.json").write_text(json.dumps(said, indent=4))
    (directory / "stdout").write_text("loss\n" * 60)
    (directory / "stderr").touch()
    for path in sorted(run.rglob("*")):
        there = directory / "run" / path.relative_to(run)
        if path.is_dir():
            there.mkdir(parents=True)
        else:
            there.parent.mkdir(exist_ok=True)
            there.hardlink_to(path)


def a_run(path: Path) -> Path:
    """A short training on one GPU."""
    gpu = Device("GPU-0", "gpu", "NVIDIA H200", "nvml", {"power_field": "instant"})
    run = create_run(path, run_header("cell", ["train.py"]))
    header = writer_header("meter")
    start_ns = int(header["clock"]["monotonic_ns"])
    writer = Writer(run, header=header, devices=[gpu])
    writer.write("steps", list(steps(start_ns)))
    ticks = range(0, STEPS * STEP_NS, STEP_NS // 2)
    samples = [
        Sample(start_ns + at, gpu.id, power_w=600.0, energy_j=at * 6e-7, memory_bytes=memory)
        for at, memory in zip(ticks, [GIB] + [20 * GIB] * len(ticks), strict=False)
    ]
    writer.write("samples", samples, stream="nvml")
    writer.mark(Mark(start_ns + STEPS * STEP_NS, "closed"))
    writer.close()
    return run


def steps(start_ns: int) -> Iterator[Step]:
    """Side by side."""
    for index in range(STEPS):
        at = start_ns + index * STEP_NS
        yield Step(at, at + STEP_NS, index=index, tokens_computed=512, tokens_real=400, samples=4)


def timed(words: Sequence[object], beside: Path | None = None) -> tuple[float, float]:
    """Wall seconds and peak resident MB of a command."""
    environment = tables.of_version(beside) if beside else None
    with tempfile.NamedTemporaryFile("r") as told:
        call = [sys.executable, "-c", CALLED, told.name, *map(str, words)]
        before = time.perf_counter()
        subprocess.run(call, stdout=subprocess.DEVNULL, check=True, env=environment)
        took_s = time.perf_counter() - before
        return took_s, int(told.read()) * 1024 / 1e6


def commands(out: Path, turn: int) -> dict[str, tuple[object, ...]]:
    """What is timed, in this order."""
    files = out.parent / f"exported-{turn}"
    every = (
        "--export",
        files / "all.parquet",
        "--export",
        files / "all.csv",
        "--fms",
        files,
        "--force",
    )
    return {
        "bench plan": ("bench", "plan", out.parent / "scenarios.yaml"),
        "bench list": ("bench", "list", out),
        "bench report": ("bench", "report", out),
        "bench report, all files": ("bench", "report", out, *every),
        "bench compare": ("bench", "compare", out, out),
        "gate": ("gate", out, out),
    }


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the cells, then call the commands in turns."""
    seen: dict[str, dict[int, list[tuple[float, float]]]] = {}
    versions: dict[str, Path | None] = {"": None}
    if arguments.beside:
        versions["other version: "] = arguments.beside
    with tempfile.TemporaryDirectory(prefix="ergmeter-bench-scale-") as folder:
        # Cells of their own for each version: it reads the rows that it has written.
        made = [
            (number, version, finished(Path(folder, f"{number}-{len(version)}"), number))
            for number in arguments.cells
            for version in versions
        ]
        for number, version, out in made:
            first = timed(("bench", "report", out), versions[version])
            seen.setdefault(f"{version}bench report, no rows", {})[number] = [first]
        for turn in range(arguments.rounds or 3):
            for number, version, out in made:
                for name, words in commands(out, turn).items():
                    taken = seen.setdefault(version + name, {}).setdefault(number, [])
                    taken.append(timed(words, versions[version]))
        return shown(seen)  # before so many files are removed, which takes its time


def shown(seen: dict[str, dict[int, list[tuple[float, float]]]]) -> dict[str, Any]:
    """Print the table; give the numbers."""
    rows: list[tuple[object, ...]] = []
    for name, by_number in seen.items():
        smallest = statistics.median(mb for _, mb in by_number[min(by_number)])
        for number, runs in by_number.items():
            wall_s = statistics.median(took_s for took_s, _ in runs)
            mb = statistics.median(mb for _, mb in runs)
            rows.append(
                (
                    name,
                    str(number),
                    f"{wall_s:.2f}",
                    tables.spread([took_s for took_s, _ in runs]),
                    f"{wall_s / number * 1e3:.2f}",
                    f"{mb:.0f}",
                    f"{mb / smallest:.2f}",
                )
            )
    note = (
        "`erg COMMAND`, whole processes, medians. Without rows every cell's run is read,"
        " which is timed once;\nthe others find the rows. All files: Parquet, CSV, FMS's."
    )
    tables.show("A bench of many cells", HEADER, rows, note=note)
    return {
        name: {str(number): runs for number, runs in by_number.items()}
        for name, by_number in seen.items()
    }


def main() -> None:
    """Entry point."""
    parser = tables.with_beside(tables.parser(__doc__))
    parser.add_argument("--cells", type=int, nargs="+", default=CELLS, help="how many; by fives")
    tables.run(bench, parser.parse_args())


if __name__ == "__main__":
    main()
