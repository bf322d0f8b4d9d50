"""What does the report of a long run take: time, memory and disk, for 1, 3 and 10 million samples?

The run is not written in one piece: it goes through the real writer, in batches, which turns
segment after segment into Parquet as it would over days; only the hand-overs are larger than the
0.5 s of a live run, so that writing takes a minute and not a day. Writing is not timed.

Eight GPUs at 10 Hz, each tick a sample of gauges and one of the counter, as the NVML probe makes
them: ten million samples are 17 hours. `erg report --json` is a process of its own, so its peak
memory is that of the process and not of this bench.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tables
from ergmeter.records import Device, Mark
from ergmeter.runlog.identity import run_header, writer_header
from ergmeter.runlog.writer import Writer, create_run

MILLIONS = (1, 3, 10)
GPUS = 8
STEPS = 100_000
TICK_NS = 100_000_000
TICKS_A_BATCH = 8_000  # 128 000 rows; the writer closes a segment at 250 000
HEADER = (
    *("samples", "steps", "MB on disk", "wall s", "range s", "CPU s", "CPU to linear"),
    *("peak RSS MB", "RSS to linear"),
)
ERG = Path(sys.executable).parent / "erg"


def written(path: Path, samples: int) -> Path:
    """Write a run of so many samples of GPUs and 100 000 steps."""
    run = create_run(path, run_header("scale", ["bench/scale.py"]))
    ids = [f"GPU-{index:08x}-5c21-4d0e-9b1a-7f3a00000000" for index in range(GPUS)]
    devices = [Device(id, "gpu", "NVIDIA H200", "nvml", {"power_field": "instant"}) for id in ids]
    devices.append(Device("ergmeter", "self", "ergmeter's own threads", "self"))
    header = writer_header("meter")
    start_ns = int(header["clock"]["monotonic_ns"])
    writer = Writer(run, header=header, devices=devices)
    ticks = samples // (2 * GPUS)
    for first in range(0, ticks, TICKS_A_BATCH):
        numbers = np.arange(first, min(first + TICKS_A_BATCH, ticks))
        writer.write_columns("samples", gpu_columns(numbers, start_ns, ids), stream="nvml")
    end_ns = start_ns + ticks * TICK_NS
    writer.write_columns("steps", step_columns(start_ns + TICK_NS, end_ns - TICK_NS))
    own: dict[str, Any] = {"t_ns": [start_ns, end_ns], "cpu_s": [0.0, 1.0]}
    writer.write_columns("samples", own | {"device": ["ergmeter"] * 2}, stream="self")
    writer.mark(Mark(end_ns, "closed"))
    writer.close()
    return run


def gpu_columns(ticks: Any, start_ns: int, ids: list[str]) -> dict[str, Any]:  # noqa: ANN401
    """A gauge and a counter row for each GPU and tick, as columns."""
    dice = np.random.default_rng(int(ticks[0]))
    n = len(ticks)
    # Rows of a tick: the gauges of all GPUs, then their counters 24 ms later.
    t_ns = start_ns + ticks[:, None] * TICK_NS + np.array([0] * GPUS + [24_000_000] * GPUS)
    gauges = {
        "power_w": dice.normal(600, 50, (n, GPUS)).round(3),
        "power_average_w": dice.normal(600, 5, (n, GPUS)).round(3),
        "busy_frac": dice.integers(90, 101, (n, GPUS)) / 100,
        "clock_hz": dice.integers(1500, 1980, (n, GPUS)) * 1e6,
        "temperature_c": dice.integers(55, 60, (n, GPUS)).astype(float),
    }
    counts = {
        "memory_bytes": dice.integers(100_000, 100_100, (n, GPUS)) * 2**20,
        "throttled": np.zeros((n, GPUS), dtype=int),
    }
    energy = 60.0 * ticks[:, None] + dice.uniform(0, 30, (n, GPUS)).round(3)
    none = np.full((n, GPUS), None)
    columns = {"t_ns": t_ns.ravel().tolist(), "device": ids * 2 * n}
    for name, values in (gauges | counts).items():
        columns[name] = np.hstack([values.astype(object), none]).ravel().tolist()
    columns["energy_j"] = np.hstack([none, energy.astype(object)]).ravel().tolist()
    return columns


def step_columns(start_ns: int, end_ns: int) -> dict[str, Any]:
    """Steps side by side over the whole run."""
    edges = np.linspace(start_ns, end_ns, STEPS + 1).astype(np.int64)
    jitter = np.random.default_rng(0).integers(0, (edges[1] - edges[0]) // 10, STEPS)
    return {
        "start_ns": edges[:-1].tolist(),
        "end_ns": (edges[1:] - jitter).tolist(),
        "index": list(range(STEPS)),
        "steps": [1] * STEPS,
        "phase": ["train"] * STEPS,
        "tokens_computed": [8192] * STEPS,
        "tokens_real": [8000] * STEPS,
        "tokens_loss": [None] * STEPS,
        "samples": [8] * STEPS,
        "micro_steps": [1] * STEPS,
        "loss": np.linspace(9, 3, STEPS).tolist(),
        "learning_rate": [1e-4] * STEPS,
        "grad_norm": [1.0] * STEPS,
        "rank": [0] * STEPS,
    }


def reported(run: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds and peak resident MB of `erg report RUN --json`."""
    before = time.perf_counter()
    process = subprocess.Popen([str(ERG), "report", str(run), "--json"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - before
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"erg report ended with {process.returncode}")
    return took_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the runs, then report them in turns."""
    with tempfile.TemporaryDirectory(prefix="ergmeter-scale-") as folder:
        runs = {
            millions: written(Path(folder) / f"{millions}M", millions * 1_000_000)
            for millions in arguments.millions
        }
        seen: dict[int, list[tuple[float, float, float]]] = {millions: [] for millions in runs}
        for _ in range(arguments.rounds or 3):
            for millions, run in runs.items():
                seen[millions].append(reported(run))
        sizes = {
            millions: sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 1e6
            for millions, run in runs.items()
        }
    return shown(seen, sizes)


def shown(
    seen: dict[int, list[tuple[float, float, float]]], sizes: dict[int, float]
) -> dict[str, Any]:
    """Print the table; give the numbers."""
    rows: list[tuple[object, ...]] = []
    medians = {
        m: [statistics.median(column) for column in zip(*s, strict=True)] for m, s in seen.items()
    }
    smallest = min(seen)
    for millions, (wall_s, cpu_s, rss_mb) in medians.items():
        walls = [wall for wall, *_ in seen[millions]]
        linear = millions / smallest
        _, base_s, base_mb = medians[smallest]
        rows.append(
            (
                f"{millions} M",
                STEPS,
                f"{sizes[millions]:.0f}",
                f"{wall_s:.2f}",
                tables.spread(walls),
                f"{cpu_s:.2f}",
                f"{cpu_s / base_s / linear:.2f}",
                f"{rss_mb:.0f}",
                f"{rss_mb / base_mb / linear:.2f}",
            )
        )
    note = (
        "`erg report RUN --json`, medians. To linear: the ratio to the smallest run, over that of"
        " the samples;\nbelow 1 it grows more slowly than the run."
    )
    tables.show("A report of a long run", HEADER, rows, note=note)
    return {f"{m}M": {"runs": s, "mb_on_disk": sizes[m]} for m, s in seen.items()}


def main() -> None:
    """Entry point."""
    parser = tables.parser(__doc__)
    parser.add_argument(
        "--millions", type=int, nargs="+", default=MILLIONS, help="lengths, in million samples"
    )
    tables.run(bench, parser.parse_args())


if __name__ == "__main__":
    main()
