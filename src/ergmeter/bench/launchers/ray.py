"""Cells as tasks of Ray, which places each where its GPUs are free.

The trap: a task that Ray runs with no GPU of its own, since nobody asked for one. A cell asks for
as many GPUs as it has; in a cluster without any it asks for as many CPUs as it has ranks. The
directory of results must be one that every node sees, and ergmeter be installed on all of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ergmeter.bench.cells import Cell
from ergmeter.bench.launching import Options, Places
from ergmeter.errors import PluginError, UsageError

try:
    import ray
except ImportError as error:
    raise ImportError(f"{error}; pip install 'ergmeter[bench-ray]'") from error
except KeyError as error:  # it loads amdsmi, if that is there, which does not expect to be alone
    raise ImportError(f"Ray does not load here: {error} is not there; remove amdsmi") from error

_END_S = 60.0  # longer than a runner gives its cell to end


def run_cell(directory: str, where: str) -> int:
    """What a task does: the runner is a process of its own, which outlives the task if it must."""
    runner = subprocess.Popen([sys.executable, "-m", "ergmeter.bench.runner", directory], cwd=where)
    try:
        return runner.wait()
    finally:  # Ray ends a task with a KeyboardInterrupt
        runner.terminate()
        runner.wait()


class RayLauncher:
    """Holds tasks by their references. `given`: address, of a cluster that is there."""

    name = "ray"
    waits = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._waiting: list[tuple[Cell, Path]] = []
        self._running: dict[int, Any] = {}
        try:
            ray.init(
                address=options.given.get("address"), ignore_reinit_error=True, log_to_driver=False
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise PluginError(f"Ray can't be reached: {error}") from error
        self._nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._has_gpus = any(node.get("GPU") for node in self._nodes)

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:  # noqa: ARG002
        """Refuse a cell that no node of the cluster has room for: Ray would wait for ever."""
        kind = "GPU" if self._has_gpus else "CPU"
        most = max((int(node.get(kind, 0)) for node in self._nodes), default=0)
        for cell in cells:
            if cell.nodes > 1:
                raise UsageError("the launcher `ray` starts cells of one node; leave nodes out")
            if cell.num_gpus > most:
                raise UsageError(
                    f"{cell.scenario} wants {cell.num_gpus} {kind}s and the largest node of this"
                    f" cluster has {most}; give fewer in --num-gpus"
                )

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Take these cells, to be handed to Ray in this order."""
        self._waiting += cells

    def poll(self) -> Places:
        """Hand over as many as may run at once; forget what has ended."""
        for index, task in list(self._running.items()):
            if ray.wait([task], timeout=0)[0]:
                del self._running[index]
        while self._waiting and len(self._running) < self._options.jobs:
            cell, directory = self._waiting.pop(0)
            share = {"num_gpus" if self._has_gpus else "num_cpus": cell.num_gpus}
            task = ray.remote(**share, max_retries=2)(run_cell)
            self._running[cell.index] = task.remote(str(directory), str(Path.cwd()))
        return Places({cell.index for cell, _ in self._waiting}, set(self._running))

    def cancel(self) -> None:
        """End the tasks and wait for them."""
        self._waiting.clear()
        for task in self._running.values():
            ray.cancel(task)
        for task in self._running.values():
            with suppress(ray.exceptions.RayError):
                ray.get(task, timeout=_END_S)
        self._running.clear()
