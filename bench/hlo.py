"""What does counting the MACs of a compiler's cache take, beside parsing every file whole?

A calculator is started, counts and ends, so a figure here is a whole
process, imports included, and its memory is the sum of the peaks of all its processes.

The plain way parses each file with XLA's full schema under upb and adds up the dots and the
kernels' `mac_count` over all computations. It does less than ours: it knows no loops, calls,
convolutions or branches. Both ways are in bench/hlo_worker.py. The cache and the single files are
made by bench/hlo_cache.py, once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import tables
from hlo_worker import paths_in

ROUNDS = 3
WORKER = Path(__file__).with_name("hlo_worker.py")
POLL_S = 0.05  # the kernel keeps the peaks; to ask it often would be a load of its own
UNCOMPILED = {"ERGMETER_COMPILED": "0"}
# name -> way, processes, environment
WAYS: dict[str, tuple[str, int, dict[str, str]]] = {
    "parsed whole, full schema": ("whole", 1, {}),
    "parsed whole, 2 processes": ("whole", 2, {}),
    "ergmeter, Python only": ("ours", 1, UNCOMPILED),
    "ergmeter, compiled": ("ours", 1, {}),
}
FILES = {
    "14 MB": "large.pb",
    "14 MB, compressed": "large.pb.gz",
    "419 MB of literals": "literals.pb",
}
HEADER = ("way", "wall s", "range s", "CPU s", "MB/s", "times as fast", "by CPU", "peak MB")


class Took(NamedTuple):
    """What one run of a way took and found."""

    wall_s: float
    cpu_s: float  # of its processes together
    peak_mb: float  # likewise
    macs: int


def measured(way: str, paths: Path) -> Took:
    """One run of a way, in a process of its own."""
    kind, processes, environment = WAYS[way]
    if caches := environment.get("XDG_CACHE_HOME"):  # an older version remembers files here
        shutil.rmtree(Path(caches) / "ergmeter" / "hlo", ignore_errors=True)
    command = [sys.executable, str(WORKER), kind, str(processes), str(paths)]
    before = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=said)
        peaks: dict[int, int] = {}
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peaks, done))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - before
        done.set()
        watcher.join()
        if processes == 1:  # of several, it would be the largest one's
            peaks[process.pid] = usage.ru_maxrss * 1024
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{way} ended with {process.returncode}")
        said.seek(0)
        macs = int(said.read())
    return Took(took_s, usage.ru_utime + usage.ru_stime, sum(peaks.values()) / 1e6, macs)


def _watch(pid: int, peaks: dict[int, int], done: threading.Event) -> None:
    """Keep the peak of each process of the tree, as the kernel tells it."""
    while not done.wait(POLL_S):
        try:
            root = psutil.Process(pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.Error:
            return
        for each in tree:
            try:
                status = Path(f"/proc/{each.pid}/status").read_text()
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    peaks[each.pid] = max(peaks.get(each.pid, 0), int(line.split()[1]) * 1024)


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """The cache by every way in turns, then each single file."""
    # In a process of its own: a child's peak begins with what its parent held when it was started.
    made = "import hlo_cache; print(hlo_cache.ready())"
    done = subprocess.run(
        [sys.executable, "-c", made], check=True, capture_output=True, text=True,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    folder = Path(done.stdout.splitlines()[-1])
    rounds = arguments.rounds or ROUNDS
    if arguments.beside:
        beside = {
            "PYTHONPATH": tables.of_version(arguments.beside)["PYTHONPATH"],
            "XDG_CACHE_HOME": tempfile.mkdtemp(prefix="caches-"),
        }
        WAYS["other version, compiled"] = ("ours", 1, beside)
        WAYS["other version, Python only"] = ("ours", 1, {**beside, **UNCOMPILED})
    numbers = {
        "cache": compared("A cache in Neuron's layout", folder / "cache", list(WAYS), rounds)
    }
    single = [way for way, (_, count, _) in WAYS.items() if count == 1]
    for title, name in FILES.items():
        numbers[name] = compared(f"One module: {title}", folder / name, single, rounds)
    return numbers


def compared(title: str, root: Path, ways: list[str], rounds: int) -> dict[str, Any]:
    """Count by these ways in turns; print the table; give the numbers."""
    paths = paths_in(root)
    size_mb = sum(path.stat().st_size for path in paths) / 1e6
    seen: dict[str, list[Took]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seen[way].append(measured(way, root))
    tables.show(title, HEADER, [row(seen, way, size_mb) for way in ways], note=note(seen))
    print(f"{len(paths)} files, {size_mb:.0f} MB.")
    return {"runs": seen, "mb": size_mb}


def row(seen: dict[str, list[Took]], way: str, size_mb: float) -> tuple[object, ...]:
    """A way's row; the first way is what the others are compared with."""
    base, own = next(iter(seen.values())), seen[way]
    walls = [took.wall_s for took in own]
    wall_s, base_s = statistics.median(walls), statistics.median(took.wall_s for took in base)
    cpu_s, base_cpu_s = (statistics.median(took.cpu_s for took in runs) for runs in (own, base))
    return (
        way,
        f"{wall_s:.2f}",
        tables.spread(walls),
        f"{cpu_s:.2f}",
        f"{size_mb / wall_s:.0f}",
        f"{base_s / wall_s:.1f}",
        f"{base_cpu_s / cpu_s:.1f}",
        f"{max(took.peak_mb for took in own):.0f}",
    )


def note(seen: dict[str, list[Took]]) -> str:
    """The MACs; ours must agree. The plain way takes a shared function once, so it finds less."""
    found = {kind: set[int]() for kind in ("whole", "ours")}
    for way, runs in seen.items():
        found["whole" if WAYS[way][0] == "whole" else "ours"] |= {took.macs for took in runs}
    if any(len(totals) != 1 for totals in found.values()):
        raise RuntimeError(f"runs do not agree: {found}")
    (whole,), (ours,) = found.values()
    return f"{ours:.6g} MACs by each of ours; parsed whole {whole / ours:.4%} of them."


def main() -> None:
    """Entry point."""
    tables.run(bench, tables.with_beside(tables.parser(__doc__)).parse_args())


if __name__ == "__main__":
    main()
