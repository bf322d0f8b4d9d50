"""Runs cells as tasks of Ray, which places each where its GPUs are free.

A cell requests as many GPUs as it has, or in a cluster without GPUs as many CPUs as it has ranks.
A cell on several nodes requests all of them at once (a placement group with a bundle on each):
one by one, two such cells could each hold half of what the other needs. Every node needs ergmeter
and the directory of results.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ergmeter.bench.execute.launching import (
    HIDDEN_PREFIX,
    LaunchOptions,
    PendingCells,
    check_nodes,
    runner_words,
)
from ergmeter.bench.execute.process import ENDS_WITH_RUNNER, runner_log
from ergmeter.bench.plan.cells import Cell
from ergmeter.errors import PluginError, UsageError

try:
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(f"{error}; pip install 'ergmeter[bench-ray]'") from error
except KeyError as error:  # Ray imports amdsmi, if installed, which fails without AMD's libraries
    raise ImportError(f"Ray does not load here: {error} is not there; remove amdsmi") from error

_END_S = 60.0  # longer than a runner gives its cell to end
_TRIES = 3  # attempts at a cell whose node or worker was lost


def run_cell(words: Sequence[str], where: str, keys: Mapping[str, str], log: str) -> int:
    """Run a cell's runner as a process of its own; terminate it if Ray cancels this task.

    `keys`: secret variables, which Ray's workers do not get with the driver's environment.
    """
    # Ray kills what a worker started with it.
    environment = {**os.environ, **keys, ENDS_WITH_RUNNER: "1"}
    with Path(log).open("ab") as output:
        runner = subprocess.Popen(words, cwd=where, env=environment, stdout=output, stderr=output)
    try:
        return runner.wait()
    finally:  # Ray ends a task with a KeyboardInterrupt
        runner.terminate()
        runner.wait()


@dataclass
class _RunningTask:
    """A cell that was given to Ray, with a task for each of its nodes."""

    cell: Cell
    directory: Path
    tasks: list[Any]
    group: Any = None
    tries: int = 1

    def was_lost(self) -> bool:
        """True if Ray lost a task with its worker or node; False if the cell itself failed."""
        try:
            ray.get(self.tasks, timeout=0)
        except ray.exceptions.RayError as error:
            with (self.directory / "runner.log").open("a", encoding="utf-8") as log:
                log.write(f"Ray: {error}\n")
            return True
        return False


class RayLauncher:
    """Runs cells as Ray tasks. `options.given["address"]`: a running cluster to connect to."""

    name = "ray"
    waits = True  # for cells of an earlier driver to end: Ray takes their GPUs for free

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._waiting: list[tuple[Cell, Path]] = []
        self._tasks: list[_RunningTask] = []
        try:
            ray.init(
                address=options.given.get("address"), ignore_reinit_error=True, log_to_driver=False
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise PluginError(f"Ray can't be reached: {error}") from error
        self._nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._has_gpus = any(node.get("GPU") for node in self._nodes)

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:  # noqa: ARG002
        """Raise UsageError for a cell too large for the cluster: Ray would wait for ever."""
        kind = "GPU" if self._has_gpus else "CPU"
        sizes = [int(node.get(kind, 0)) for node in self._nodes]
        for cell in cells:
            check_nodes(cell)
            if sum(size >= cell.num_gpus for size in sizes) < cell.nodes:
                on = f" on each of {cell.nodes} nodes" if cell.nodes > 1 else ""
                raise UsageError(
                    f"{cell.scenario} needs {cell.num_gpus} {kind}s{on}, but the nodes of this"
                    f" cluster have {', '.join(map(str, sizes))}; give fewer in --num-gpus"
                )

    def take_over(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Do nothing: tasks end with their driver, and runners that outlive it are waited for."""

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Queue these cells, to be given to Ray in this order."""
        self._waiting += cells

    def poll(self) -> PendingCells:
        """Start as many cells as may run at once; drop those that have ended."""
        for ended in [ended for ended in self._tasks if self._has_ended(ended)]:
            self._tasks.remove(ended)
            if ended.was_lost() and ended.tries < _TRIES:
                self._start(ended.cell, ended.directory, tries=ended.tries + 1)
        while self._waiting and len(self._tasks) < self._options.jobs:
            self._start(*self._waiting.pop(0))
        running = {started.cell.index for started in self._tasks}
        return PendingCells({cell.index for cell, _ in self._waiting}, running)

    def cancel(self) -> None:
        """End the tasks and wait for them."""
        self._waiting.clear()
        tasks = [task for started in self._tasks for task in started.tasks]
        for task in tasks:
            ray.cancel(task)
        for task in tasks:
            with suppress(ray.exceptions.RayError):
                ray.get(task, timeout=_END_S)
        for started in self._tasks:
            self._release(started)
        self._tasks.clear()

    def _start(self, cell: Cell, directory: Path, *, tries: int = 1) -> None:
        share, bundle = _asked_for(cell, has_gpus=self._has_gpus)
        group = None
        if cell.nodes > 1:
            group = placement_group([bundle] * cell.nodes, strategy="STRICT_SPREAD")
        token = secrets.token_hex(6)
        keys = {name: value for name, value in os.environ.items() if name.startswith(HIDDEN_PREFIX)}
        running = _RunningTask(cell, directory, [], group, tries)
        self._tasks.append(running)  # before its tasks are: whatever happens, they can be cancelled
        for number in range(cell.nodes):
            if group is not None:
                share["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                )
            words = runner_words(str(directory), number=number, nodes=cell.nodes, token=token)
            log = str(runner_log(directory, number))
            try:
                task = ray.remote(**share)(run_cell).remote(words, str(Path.cwd()), keys, log)
            except ValueError as error:
                self.cancel()
                raise PluginError(f"Ray did not take {cell.scenario}: {error}") from error
            running.tasks.append(task)

    def _has_ended(self, started: _RunningTask) -> bool:
        done, _ = ray.wait(started.tasks, num_returns=len(started.tasks), timeout=0)
        if len(done) < len(started.tasks):
            return False
        self._release(started)
        return True

    def _release(self, started: _RunningTask) -> None:
        if started.group is not None:
            remove_placement_group(started.group)


def _asked_for(cell: Cell, *, has_gpus: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the resources that a node's task requests from Ray, and a bundle that fits it.

    A task with GPUs also requests a CPU, and would wait for ever in a bundle without one.
    """
    if not has_gpus:
        return {"num_cpus": cell.num_gpus, "max_retries": 0}, {"CPU": cell.num_gpus}
    share = {"num_cpus": 1, "num_gpus": cell.num_gpus, "max_retries": 0}
    return share, {"CPU": 1, "GPU": cell.num_gpus}
