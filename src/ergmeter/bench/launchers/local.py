"""Runs cells on this machine, each on GPUs of its own as they become free.

A GPU rests for the cool-down after each cell, and is checked for other processes before the first.
Without GPUs `num_gpus` is a number of ranks on the CPU, and cells run one at a time unless more
are requested.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ergmeter.bench.execute.launching import (
    LaunchOptions,
    PendingCells,
    gpus_here,
    runner_words,
    strangers,
)
from ergmeter.bench.plan.cells import Cell
from ergmeter.errors import UsageError

_END_S = 60.0  # longer than a runner gives its cell to end


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    gpus: list[str]


class LocalLauncher:
    """Runs cells on this machine, and owns their runners."""

    name = "local"
    waits = True

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._gpus = gpus_here()
        self._rested_s = dict.fromkeys(self._gpus, 0.0)  # by GPU: when its cool-down is over
        self._next_s = 0.0  # when the cool-down is over, without GPUs
        self._waiting: list[tuple[Cell, Path]] = []
        self._running: list[_Running] = []

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:
        """Raise UsageError for a cell that this machine can't run, and for GPUs in use."""
        for cell in cells:
            if cell.nodes > 1:
                raise UsageError(
                    f"{cell.scenario} needs {cell.nodes} nodes, but the launcher `local` has one;"
                    " use --launcher slurm or ray, or leave nodes out"
                )
            if self._gpus and cell.num_gpus > len(self._gpus):
                raise UsageError(
                    f"{cell.scenario} needs {cell.num_gpus} GPUs, but this machine shows"
                    f" {len(self._gpus)} ({', '.join(self._gpus)}); give fewer in --num-gpus"
                )
        others = strangers(self._gpus, own=own) if cells else []
        if others and not self._options.allow_busy:
            raise UsageError(
                f"{others[0]} would be measured with the cells; end it, hide that GPU"
                " (CUDA_VISIBLE_DEVICES), or give --allow-busy"
            )

    def take_over(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Do nothing: runners of an earlier driver need no start, and are waited for."""

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Queue these cells, to be started in this order."""
        self._waiting += cells

    def poll(self) -> PendingCells:
        """Start the cells for which GPUs are free; return those that have not ended."""
        for ended in [ended for ended in self._running if ended.process.poll() is not None]:
            self._running.remove(ended)
            self._rest(ended)
        while self._waiting and self._start(*self._waiting[0]):
            self._waiting.pop(0)
        waiting = {cell.index for cell, _ in self._waiting}
        running = {task.cell.index for task in self._running}
        return PendingCells(waiting, running, self._rests_s() if waiting and not running else 0.0)

    def cancel(self) -> None:
        """Ask every runner to end its cell, and wait until all have."""
        self._waiting.clear()
        for task in self._running:
            task.process.terminate()
        for task in self._running:
            with suppress(subprocess.TimeoutExpired):
                task.process.wait(_END_S)
        self._running.clear()

    def _start(self, cell: Cell, directory: Path) -> bool:
        """Start a cell. False if no slot or not enough cool, free GPUs are available."""
        now_s = time.monotonic()
        if len(self._running) >= self._options.jobs or now_s < self._next_s:
            return False
        taken = {gpu for task in self._running for gpu in task.gpus}
        rested = [gpu for gpu in self._gpus if gpu not in taken and self._rested_s[gpu] <= now_s]
        if self._gpus and len(rested) < cell.num_gpus:
            return False
        own = rested[: cell.num_gpus]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}
        with (directory / "runner.log").open("ab") as log:
            process = subprocess.Popen(
                runner_words(str(directory)),
                env={**os.environ, **visible}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C is the driver's to pass on
            )  # fmt: skip
        self._running.append(_Running(cell, process, own))
        return True

    def _rests_s(self) -> float:
        """Seconds until enough GPUs for the next cell have cooled down."""
        wanted = self._waiting[0][0].num_gpus
        until_s = [self._next_s, *sorted(self._rested_s.values())[:wanted]]
        return max(0.0, max(until_s) - time.monotonic())

    def _rest(self, task: _Running) -> None:
        until_s = time.monotonic() + self._options.cool_down_s
        for gpu in task.gpus:
            self._rested_s[gpu] = until_s
        if not task.gpus:
            self._next_s = until_s
