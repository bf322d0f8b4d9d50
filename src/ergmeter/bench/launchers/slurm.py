"""Runs cells as jobs of SLURM, through submitit: one job array for each number of nodes and GPUs.

Each cell's job is written beside it (`job`): the array's unique name before it is submitted, and
its id afterwards. A restarted driver takes over jobs that are still queued and submits none twice.
The result of a cell is read from the shared directory, since many clusters have no accounting. A
job that is preempted or requeued runs its cell again. A cell on several nodes has a task on each.
"""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ergmeter.bench.execute import state
from ergmeter.bench.execute.launching import LaunchOptions, PendingCells, check_nodes, runner_words
from ergmeter.bench.execute.process import runner_log
from ergmeter.bench.plan.cells import Cell
from ergmeter.errors import PluginError

try:
    import submitit
except ImportError as error:
    raise ImportError(f"{error}; pip install 'ergmeter[bench-slurm]'") from error

_DAY_MIN = 24 * 60
# Extra time for the start and end of a job. Also, submitit takes a preemption within a job's last
# ten minutes for the end of its time, and does not requeue it.
_SPARE_MIN = 11
_MOST_IN_ARRAY = 1000  # SLURM's MaxArraySize is 1001 unless a cluster sets it otherwise
_END_S = 90.0  # SLURM itself waits 30 s between asking and killing
_LOOK_S = 2.0  # between two queries: the controller is shared
_SILENT_S = 300.0  # the controller may be restarted while its jobs go on
_ASK_S = 60.0
_TIME_IS_UP = "its job's time was up; give the scenario a timeout, or timeout_min to the launcher"


class SlurmTask:
    """The function that a job runs; a preempted or requeued job runs it again."""

    def __call__(self, directory: str, nodes: int) -> int:
        """Run the cell in `directory`, or this node's part of it."""
        names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        token = ".".join(os.environ.get(name, "0") for name in names)
        number = int(os.environ.get("SLURM_NODEID", "0"))
        words = runner_words(directory, number=number, nodes=nodes, token=token)
        is_time_up = False
        with runner_log(Path(directory), number).open("ab") as log:
            runner = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            return runner.wait()
        except submitit.core.utils.UncompletedJobError:
            is_time_up = True
            raise
        finally:  # submitit raises, also after it has requeued the job
            runner.terminate()
            runner.wait()
            if is_time_up:
                with suppress(OSError):  # the directory may be gone
                    _tell_time_was_up(Path(directory))

    def checkpoint(self, directory: str, nodes: int) -> submitit.helpers.DelayedSubmission:
        """Return what to submit after a preemption: the same call, which runs the cell anew."""
        return submitit.helpers.DelayedSubmission(self, directory, nodes)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A job in SLURM's queue: its state and its name."""

    state: str
    name: str


class SlurmLauncher:
    """Runs cells as SLURM jobs. `options.given`: submitit's parameters, such as partition."""

    name = "slurm"
    waits = False

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._jobs: dict[int, str] = {}  # by the cell's index
        self._places = PendingCells(set(), set())
        self._asked_s = -math.inf
        self._answered_s = -math.inf

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:  # noqa: ARG002
        """Raise for cells that are not one training, and if SLURM can't be reached from here."""
        for cell in cells:
            check_nodes(cell)
        _queue()

    def take_over(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Find the queued jobs of these cells, so that they can be followed and cancelled."""
        queued = _queue()
        self._answered_s = time.monotonic()
        jobs = {cell.index: _job_of(directory, queued) for cell, directory in cells}
        self._jobs |= {index: job for index, job in jobs.items() if job}

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Submit the cells that have not ended and have no job, an array for each size of job."""
        self.take_over(cells)
        arrays: dict[tuple[int, int], list[tuple[Cell, Path]]] = {}
        for cell, directory in cells:
            # The state is read after the queue: a job of an earlier driver may just have ended.
            if cell.index not in self._jobs and not state.read(directory).is_final:
                arrays.setdefault((cell.nodes, cell.num_gpus), []).append((cell, directory))
        for members in arrays.values():
            for start in range(0, len(members), _MOST_IN_ARRAY):
                try:
                    self._submit_array(members[start : start + _MOST_IN_ARRAY])
                except PluginError as error:
                    if not self._jobs:
                        raise
                    raise PluginError(
                        f"{error}; the jobs of {len(self._jobs)} cells are in the queue and run on:"
                        " --resume takes them over and submits the rest"
                    ) from error

    def poll(self) -> PendingCells:
        """Return which cells wait and which run, by SLURM's queue."""
        now_s = time.monotonic()
        if now_s - self._asked_s < _LOOK_S:
            return self._places
        self._asked_s = now_s
        try:
            queued = _queue()
        except PluginError:
            if now_s - self._answered_s > _SILENT_S:
                raise
            return self._places
        states = {index: queued[job].state for index, job in self._jobs.items() if job in queued}
        self._jobs = {index: self._jobs[index] for index in states}
        running = {index for index, word in states.items() if word in ("RUNNING", "COMPLETING")}
        self._places = PendingCells(set(states) - running, running)
        self._answered_s = now_s
        return self._places

    def cancel(self) -> None:
        """Cancel the jobs, and wait until they have left the queue."""
        left = set(self._jobs.values())
        until_s = time.monotonic() + _END_S
        is_told = False
        while left and time.monotonic() < until_s:
            with suppress(PluginError):  # a job just ended, or no answer: try again
                left &= set(_queue())
                if left and not is_told:
                    _asked("scancel", *sorted(left))
                    is_told = True
            if left:
                time.sleep(0.5)
        if left and not is_told:
            raise PluginError(f"SLURM did not cancel {', '.join(sorted(left))}: scancel them")

    def _submit_array(self, members: Sequence[tuple[Cell, Path]]) -> None:
        asked = self._parameters([cell for cell, _ in members])
        for number, (_, directory) in enumerate(members):
            (directory / state.JOB).write_text(f"{asked['name']} {number}", encoding="utf-8")
        try:
            folder = members[0][1].parent / "slurm"
            # By default submitit repeats a job that exceeds its time three times.
            executor = submitit.AutoExecutor(
                folder=folder, cluster="slurm", slurm_max_num_timeout=0
            )
            executor.update_parameters(**asked)
            jobs = executor.map_array(
                SlurmTask(),
                [str(directory) for _, directory in members],
                [cell.nodes for cell, _ in members],
            )
        except (RuntimeError, ValueError, NameError, submitit.core.utils.FailedJobError) as error:
            raise PluginError(f"SLURM did not take the cells: {error}") from error
        for (cell, directory), job in zip(members, jobs, strict=True):
            (directory / state.JOB).write_text(str(job.job_id), encoding="utf-8")
            self._jobs[cell.index] = str(job.job_id)

    def _parameters(self, cells: Sequence[Cell]) -> dict[str, object]:
        """Return submitit's parameters for an array of cells of one size."""
        timeouts_s = [cell.timeout_s for cell in cells if cell.timeout_s is not None]
        minutes = _DAY_MIN
        if len(timeouts_s) == len(cells):
            minutes = math.ceil(max(timeouts_s) / 60) + _SPARE_MIN
        asked: dict[str, object] = {
            "name": "erg-bench", "timeout_min": minutes, "gpus_per_node": cells[0].num_gpus,
            "nodes": cells[0].nodes, "tasks_per_node": 1,
            "slurm_array_parallelism": self._options.jobs,
            "slurm_additional_parameters": {"requeue": True}, **_parsed(self._options.given),
        }  # fmt: skip
        asked["name"] = f"{str(asked['name']).replace(' ', '-')}-{secrets.token_hex(4)}"
        if not asked["gpus_per_node"]:
            del asked["gpus_per_node"]
        return asked


def _tell_time_was_up(directory: Path) -> None:
    """Give the reason of a cancelled cell, that its job's time was up: its runner saw a signal."""
    with state.claimed(directory) as is_ours:
        cell_state = state.read(directory)
        if is_ours and cell_state.status == "cancelled":
            state.write(directory, replace(cell_state, reason=_TIME_IS_UP))


def _queue() -> dict[str, _Queued]:
    """The user's queued and running jobs by id, with each task of an array on its own."""
    lines = _asked("squeue", "--me", "--noheader", "--array", "--format=%i %T %j")
    parts = (line.strip().split(maxsplit=2) for line in lines.splitlines() if line.strip())
    return {part[0]: _Queued(part[1], part[2] if len(part) > 2 else "") for part in parts}


def _job_of(directory: Path, queued: Mapping[str, _Queued]) -> str | None:
    """The id of a cell's job, if it is queued; found by the array's name if no id was stored."""
    try:
        words = (directory / state.JOB).read_text(encoding="utf-8").split()
    except OSError:
        return None
    if len(words) == 1:
        return words[0] if words[0] in queued else None
    named = {job: [entry.name, job.partition("_")[2] or "0"] for job, entry in queued.items()}
    return next((job for job, name_and_number in named.items() if name_and_number == words), None)


def _parsed(options: Mapping[str, str]) -> dict[str, object]:
    """Return the options with whole numbers as int, as submitit needs them."""
    return {name: int(text) if text.isdecimal() else text for name, text in options.items()}


def _asked(*words: str) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=_ASK_S,
            start_new_session=True,  # a second Ctrl-C is not for them
        )  # fmt: skip
    except FileNotFoundError as error:
        raise PluginError(f"{words[0]} was not found: is this a machine with SLURM?") from error
    except subprocess.TimeoutExpired as error:
        raise PluginError(f"{words[0]} did not answer within {_ASK_S:.0f} s") from error
    if done.returncode:
        raise PluginError(f"{words[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
