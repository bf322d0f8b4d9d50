"""Cells as jobs of SLURM, through submitit: job arrays, one for each number of GPUs.

The trap: a driver that dies while its jobs wait in the queue. Started again, it would submit them a
second time. So each cell's job is written down beside it (`job`), and one that the queue still has
is taken over. What became of a cell is read from the shared directory, not from the accounting,
which many clusters do not keep. A job that is preempted and requeued finds its cell unfinished, and
runs it again.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ergmeter.bench.cells import Cell
from ergmeter.bench.launching import Options, Places
from ergmeter.errors import PluginError, UsageError

try:
    import submitit
except ImportError as error:
    raise ImportError(f"{error}; pip install 'ergmeter[bench-slurm]'") from error

JOB = "job"
_DAY_MIN = 24 * 60
_SPARE_MIN = 5  # for what comes before and after a cell within its job
_MOST_IN_ARRAY = 1000  # SLURM's MaxArraySize is 1001 unless a cluster sets it otherwise
_END_S = 90.0  # SLURM itself waits 30 s between asking and killing
_LOOK_S = 2.0  # the controller is everybody's


class Task:
    """What a job does. Requeued, by the scheduler or before its time is up, it does it again."""

    def __call__(self, directory: str) -> int:
        """Run the cell of that directory."""
        return subprocess.run(
            [sys.executable, "-m", "ergmeter.bench.runner", directory], check=False
        ).returncode

    def checkpoint(self, directory: str) -> submitit.helpers.DelayedSubmission:
        """What to submit when the job's time is up: the same, since a cell is not cut in two."""
        return submitit.helpers.DelayedSubmission(self, directory)


class SlurmLauncher:
    """Holds jobs by their ids. `given` are submitit's parameters: partition, cpus_per_task, ..."""

    name = "slurm"
    waits = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._jobs: dict[int, str] = {}  # by the cell's index
        self._places = Places(set(), set())
        self._looked_s = -math.inf

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:  # noqa: ARG002
        """Refuse what is not of one node, and a machine that is none of SLURM's."""
        if any(cell.nodes > 1 for cell in cells):
            raise UsageError("the launcher `slurm` starts cells of one node; leave nodes out")
        self._queue()

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Submit the cells that no job in the queue is for, an array for each number of GPUs."""
        queued = self._queue()
        arrays: dict[int, list[tuple[Cell, Path]]] = {}
        for cell, directory in cells:
            job = _job_of(directory)
            if job in queued:
                self._jobs[cell.index] = job
            else:
                arrays.setdefault(cell.num_gpus, []).append((cell, directory))
        for gpus, members in arrays.items():
            for start in range(0, len(members), _MOST_IN_ARRAY):
                self._submit_array(gpus, members[start : start + _MOST_IN_ARRAY])

    def poll(self) -> Places:
        """Where the cells are, by the queue."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return self._places
        queued = self._queue()
        held = {index: queued[job] for index, job in self._jobs.items() if job in queued}
        self._jobs = {index: self._jobs[index] for index in held}
        running = {index for index, word in held.items() if word in ("RUNNING", "COMPLETING")}
        self._places = Places(set(held) - running, running)
        self._looked_s = time.monotonic()
        return self._places

    def cancel(self) -> None:
        """Cancel the jobs, and wait until the queue has none of them."""
        if not self._jobs:
            return
        _asked("scancel", *self._jobs.values())
        until_s = time.monotonic() + _END_S
        while time.monotonic() < until_s and set(self._jobs.values()) & set(self._queue()):
            time.sleep(0.5)

    def _submit_array(self, gpus: int, members: Sequence[tuple[Cell, Path]]) -> None:
        folder = members[0][1].parent / "slurm"
        limits = [cell.timeout_s for cell, _ in members]
        known = [limit for limit in limits if limit is not None]
        minutes = math.ceil(max(known) / 60) + _SPARE_MIN if len(known) == len(limits) else _DAY_MIN
        asked: dict[str, object] = {
            "name": "erg-bench", "timeout_min": minutes, "gpus_per_node": gpus,
            "slurm_array_parallelism": self._options.jobs, **_parsed(self._options.given),
        }  # fmt: skip
        if not asked["gpus_per_node"]:
            del asked["gpus_per_node"]
        try:
            executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
            executor.update_parameters(**asked)
            jobs = executor.map_array(Task(), [str(directory) for _, directory in members])
        except (RuntimeError, ValueError, NameError, submitit.core.utils.FailedJobError) as error:
            raise PluginError(f"SLURM did not take the cells: {error}") from error
        for (cell, directory), job in zip(members, jobs, strict=True):
            (directory / JOB).write_text(str(job.job_id), encoding="utf-8")
            self._jobs[cell.index] = str(job.job_id)

    def _queue(self) -> dict[str, str]:
        """Our jobs that the controller has, each task of an array by itself, and their states."""
        said = _asked("squeue", "--me", "--noheader", "--array", "--format=%i %T")
        return dict(line.split()[:2] for line in said.splitlines() if " " in line.strip())


def _job_of(directory: Path) -> str:
    try:
        return (directory / JOB).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _parsed(given: Mapping[str, str]) -> dict[str, object]:
    """Options as submitit takes them: numbers as numbers."""
    return {name: int(text) if text.isdecimal() else text for name, text in given.items()}


def _asked(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PluginError(f"there is no {words[0]} here: is this a machine of SLURM?") from error
    if done.returncode:
        raise PluginError(f"{words[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
