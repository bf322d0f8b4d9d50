"""What does the report of a large training take: 1 024 ranks on 128 nodes, one hour?

Records are as hard to read as real ones: every rank has its own directory and
its own files, turned into segments every 15 minutes as the writer does it, with the streams and the
periods that are the defaults: on each node one rank reads eight GPUs (power ten times a second, the
gauges once, the counters every 24 s) and the node, and every rank its process, its allocator and
its own cost. That is 47 million samples in 19 000 files. Writing is not timed.

Steps are synchronous: all ranks end a step together, when the last has come. One rank, whose number
is known here and is looked for in the report, comes 0.3 s late to each. `erg report --json` is a
process of its own, so its peak memory is that of the process and not of this bench.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tables
from ergmeter.records import Device, Mark
from ergmeter.runlog import format as fmt
from ergmeter.runlog.identity import run_header, writer_header
from ergmeter.runlog.writer import Writer, create_run, to_parquet

S = 10**9
GPUS = 8
STEP_S = 2.0
LATE_S = 0.3  # that one rank comes to each step
SEGMENT_S = 900
TOKENS = 8192
ZERO_NS = time.monotonic_ns()  # when the training begins, on every node's clock
ERG = Path(sys.executable).parent / "erg"
HEADER = (
    *("ranks", "nodes", "hours", "M samples", "files", "MB on disk"),
    *("wall s", "CPU s", "peak RSS MB", "the late rank"),
)


class Shape:
    """How large, and who is late."""

    def __init__(self, nodes: int, hours: float) -> None:
        self.nodes = nodes
        self.seconds = round(hours * 3600)
        self.ranks = nodes * GPUS
        self.late = self.ranks // 2 + 5

    def ends_s(self) -> Any:  # noqa: ANN401  an array
        """When each step ends, for all."""
        return (np.arange(int(self.seconds / STEP_S)) + 1) * STEP_S


def written(path: Path, shape: Shape) -> Path:
    """Write the run, rank by rank."""
    run = create_run(path, run_header("scale", ["bench/ranks_scale.py"]))
    for rank in range(shape.ranks):
        write_rank(run, shape, rank)
    return run


def write_rank(run: Path, shape: Shape, rank: int) -> None:
    """One rank's directory, through the real writer."""
    node, local = divmod(rank, GPUS)
    dice = np.random.default_rng(rank)
    header = writer_header("meter")
    name = f"node-{node:03d}-{10_000 + rank}-{rank:04x}"
    header |= {"writer": name, "host": f"node-{node:03d}", "boot_id": f"boot-{node:03d}"}
    header |= {"world": shape.ranks, "settings": {}}
    # Hosts agree on the time of day to some milliseconds, as NTP has it.
    skew_ns = int(np.random.default_rng(node).normal(0, 3e6))
    header["clock"] = {"monotonic_ns": ZERO_NS, "wall_ns": 1_800_000_000 * S + skew_ns}
    own = [
        Device(
            f"ergmeter:{name}", "self", "ergmeter's own threads", "self", {"counted": "threads"}
        ),
        Device(f"process:{name}", "process", "train.py", "process", {}),
        Device(f"allocator:{name}", "allocator", "torch", "allocator", {}),
    ]
    gpus = [] if local else [
        Device(f"GPU-{node:04x}{g:04x}-5c21-4d0e-9b1a-7f3a00000000", "gpu", "NVIDIA H200", "nvml",
               {"power_field": "instant", "memory_total_bytes": 150_754_820_096})
        for g in range(GPUS)
    ]  # fmt: skip
    host = [] if local else [Device(f"node:{node:03d}", "node", f"node-{node:03d}", "node", {})]
    writer = Writer(run, header=header, devices=[*own, *gpus, *host])
    for first_s in range(0, shape.seconds, SEGMENT_S):
        last_s = min(first_s + SEGMENT_S, shape.seconds)
        put(writer, "steps", "", steps(shape, rank, dice, first_s, last_s))
        put(writer, "samples", "self", own_cost(own[0], first_s, last_s), as_parquet=False)
        put(writer, "samples", "process", process(own[1], dice, first_s, last_s))
        put(writer, "samples", "allocator", allocator(own[2], dice, first_s, last_s))
        if gpus:
            put(writer, "samples", "nvml", nvml(gpus, dice, first_s, last_s))
            put(writer, "samples", "node", whole_node(host[0], dice, first_s, last_s))
    for gpu in gpus:
        writer.mark(Mark(ZERO_NS, "device_used", gpu.id))
    writer.mark(Mark(ZERO_NS + (shape.seconds + 2) * S, "closed"))
    writer.close()


def put(
    writer: Writer, table: str, stream: str, columns: dict[str, Any], *, as_parquet: bool = True
) -> None:
    """One segment, as the writer leaves it: a stream first, Parquet where that has grown large."""
    texts = {name: list(one[1]) for name, one in columns.items() if isinstance(one, tuple)}
    present = {name: texts.get(name, [0]) for name in columns}
    segment = writer._segment_for(table, stream, present)
    made = []
    for field in segment.schema:
        column = columns[field.name]
        if isinstance(column, tuple):
            made.append(pa.DictionaryArray.from_arrays(pa.array(column[0], pa.int16()), column[1]))
        else:
            made.append(pa.array(column, field.type, from_pandas=True))
    batch = pa.RecordBatch.from_arrays(made, schema=segment.schema)
    for first in range(0, len(batch), len(batch) if as_parquet else 1):  # a row a hand-over
        segment.append(batch.slice(first, None if as_parquet else 1))
    path = segment.path
    writer._roll(table, stream)
    if as_parquet and path.exists():
        to_parquet(path)


def every(period_s: float, first_s: float, last_s: float) -> Any:  # noqa: ANN401
    """Ticks; of the first segment from a little before the training, of the last beyond its end."""
    return ZERO_NS + (np.arange(first_s - period_s, last_s + period_s, period_s) * S).astype(int)


def one(device: Device, rows: int) -> tuple[Any, list[str]]:
    """A text column of one device."""
    return np.zeros(rows, dtype=np.int16), [device.id]


def steps(shape: Shape, rank: int, dice: Any, first_s: int, last_s: int) -> dict[str, Any]:  # noqa: ANN401
    """All end together; who is late begins late."""
    ends_s = shape.ends_s()
    ends_s = ends_s[(ends_s > first_s) & (ends_s <= last_s)]
    before_s = 0.02 + (LATE_S if rank == shape.late else 0.0)
    n = len(ends_s)
    starts_s = ends_s - STEP_S + before_s + dice.exponential(0.002, n)
    return {
        "start_ns": ZERO_NS + (starts_s * S).astype(int),
        "end_ns": ZERO_NS + ((ends_s + dice.normal(0, 1e-4, n)) * S).astype(int),
        "index": (ends_s / STEP_S).round().astype(int) - 1,
        "steps": np.ones(n, dtype=int),
        "phase": (np.zeros(n, dtype=np.int16), ["train"]),
        "tokens_computed": np.full(n, TOKENS),
        "samples": np.full(n, 2),
        "micro_steps": np.ones(n, dtype=int),
        "loss": dice.normal(3, 0.1, n),
        "rank": np.full(n, rank),
    }


def own_cost(device: Device, first_s: int, last_s: int) -> dict[str, Any]:
    """What ergmeter's own threads cost."""
    t_ns = every(4.0, first_s, last_s)
    return {"t_ns": t_ns, "device": one(device, len(t_ns)), "cpu_s": (t_ns - ZERO_NS) / S * 0.002}


def process(device: Device, dice: Any, first_s: int, last_s: int) -> dict[str, Any]:  # noqa: ANN401
    """A process."""
    t_ns = every(2.0, first_s, last_s)
    return {
        "t_ns": t_ns,
        "device": one(device, len(t_ns)),
        "memory_bytes": dice.integers(10_000, 10_100, len(t_ns)) * 2**20,
        "cpu_s": (t_ns - ZERO_NS) / S * 1.1,
    }


def allocator(device: Device, dice: Any, first_s: int, last_s: int) -> dict[str, Any]:  # noqa: ANN401
    """Torch's allocator."""
    t_ns = every(0.5, first_s, last_s)
    held = dice.integers(60_000, 70_000, len(t_ns)) * 2**20
    return {
        "t_ns": t_ns,
        "device": one(device, len(t_ns)),
        "allocated_bytes": held,
        "reserved_bytes": held + 2**30,
    }


def whole_node(device: Device, dice: Any, first_s: int, last_s: int) -> dict[str, Any]:  # noqa: ANN401
    """A host."""
    t_ns = every(3.0, first_s, last_s)
    return {
        "t_ns": t_ns,
        "device": one(device, len(t_ns)),
        "busy_frac": dice.uniform(0.2, 0.3, len(t_ns)),
        "memory_bytes": dice.integers(200_000, 201_000, len(t_ns)) * 2**20,
    }


def nvml(gpus: list[Device], dice: Any, first_s: int, last_s: int) -> dict[str, Any]:  # noqa: ANN401
    """Power of all at every tick, the gauges at every tenth, the counters at every 240th."""
    ticks = np.arange(first_s * 10 - 10, last_s * 10 + 10)
    n = len(ticks)
    power_w = 600 + 60 * np.sin(ticks / 10.0)[:, None] + dice.normal(0, 5, (n, GPUS))
    full = np.repeat((ticks % 10 == 0)[:, None], GPUS, axis=1)
    t_ns = np.repeat((ZERO_NS + ticks * (S // 10))[:, None], GPUS, axis=1)
    codes = np.repeat(np.arange(GPUS)[None, :], n, axis=0)

    def gauge(values: Any) -> Any:  # noqa: ANN401
        return np.where(full, values, np.nan).ravel()

    rows = {
        "t_ns": t_ns.ravel(),
        "device": codes.ravel(),
        "power_w": power_w.ravel(),
        "power_average_w": gauge(power_w),
        "memory_bytes": gauge(dice.integers(100_000, 100_100, (n, GPUS)) * 2.0**20),
        "busy_frac": gauge(dice.integers(90, 101, (n, GPUS)) / 100),
        "clock_hz": gauge(dice.integers(1900, 1980, (n, GPUS)) * 1e6),
        "temperature_c": gauge(dice.integers(55, 60, (n, GPUS)).astype(float)),
        "throttled": gauge(np.zeros((n, GPUS))),
    }
    counted = ticks[ticks % 240 == 0]
    counted = np.unique(np.append(counted, ticks[-1]))
    m = len(counted)
    at = {
        "t_ns": np.repeat(ZERO_NS + counted * (S // 10) + 24_000_000, GPUS),
        "device": np.tile(np.arange(GPUS), m),
        "energy_j": np.repeat(joules(counted / 10.0 + 0.024), GPUS),
    }
    order = np.argsort(np.concatenate([rows["t_ns"], at["t_ns"]]), kind="stable")
    nothing = np.full(m * GPUS, np.nan)
    columns: dict[str, Any] = {}
    for name in [*rows, "energy_j"]:
        above = rows.get(name, np.full(n * GPUS, np.nan))
        columns[name] = np.concatenate([above, at.get(name, nothing)])[order]
    columns["device"] = (columns["device"].astype(np.int16), [gpu.id for gpu in gpus])
    return columns


def joules(t_s: Any) -> Any:  # noqa: ANN401
    """What a GPU has drawn up to a time: the integral of 600 + 60 sin(t)."""
    return 1e6 + 600 * t_s + 60 * (1 - np.cos(t_s))


def reported(run: Path) -> tuple[float, float, float, dict[str, Any]]:
    """Wall and CPU seconds and peak resident MB of `erg report RUN --json`, and what it says."""
    before = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([str(ERG), "report", str(run), "--json"], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - before
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"erg report ended with {process.returncode}")
        out.seek(0)
        found = json.load(out)
    return took_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6, found


def checked(found: dict[str, Any], shape: Shape) -> str:
    """Hold the report against what was written; who it found to be late."""
    readings = found["readings"]
    first_s, last_s = 0.02, float(shape.ends_s()[-1])
    truth = {
        "tokens.total": shape.ranks * len(shape.ends_s()) * TOKENS,
        "energy.run_j": shape.ranks * float(joules(last_s) - joules(first_s)),
        "steps.count": len(shape.ends_s()),
    }
    for key, value in truth.items():
        if abs(readings[key]["value"] / value - 1) > 0.001:
            raise RuntimeError(f"{key}: {readings[key]['value']} is not {value}")
    said = str(readings["ranks.spread_frac"]["note"])
    return "found" if said.startswith(f"rank {shape.late} ") else said


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write each run, report it, remove it."""
    rows = []
    numbers: dict[str, Any] = {}
    for nodes, hours in arguments.shape:
        shape = Shape(int(nodes), hours)
        with tempfile.TemporaryDirectory(prefix="ergmeter-ranks-", dir=arguments.folder) as folder:
            run = written(Path(folder) / "run", shape)
            took = min((reported(run) for _ in range(arguments.rounds or 1)), key=lambda t: t[0])
            files = [file for file in run.rglob("*") if file.is_file()]
            mb = sum(file.stat().st_size for file in files) / 1e6
        wall_s, cpu_s, rss_mb, found = took
        samples = samples_of(shape)
        rows.append((f"{shape.ranks}", f"{shape.nodes}", f"{hours:g}", f"{samples / 1e6:.1f}",
                     len(files), f"{mb:.0f}", f"{wall_s:.1f}", f"{cpu_s:.1f}", f"{rss_mb:.0f}",
                     checked(found, shape)))  # fmt: skip
        numbers[f"{shape.ranks}x{hours:g}h"] = {"wall_s": wall_s, "cpu_s": cpu_s, "rss_mb": rss_mb}
    tables.show("A report of a large training", HEADER, rows)
    return numbers


def samples_of(shape: Shape) -> int:
    """Rows of samples, about: GPUs at 10 Hz and their counters, then what every rank reads."""
    each = 10 + 1 / 24 + 1 / 4 + 1 / 2 + 2
    return round(shape.seconds * (shape.ranks * each + shape.nodes / 3))


def main() -> None:
    """Entry point."""
    parser = tables.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where to write the runs")
    parser.add_argument(
        "--shape", type=lambda text: tuple(map(float, text.split("x"))), nargs="+",
        default=[(16, 1.0), (128, 0.25), (128, 1.0)], metavar="NODESxHOURS",
    )  # fmt: skip
    tables.run(bench, parser.parse_args())


if __name__ == "__main__":
    assert fmt.SEGMENT_AGE_S == SEGMENT_S
    main()
