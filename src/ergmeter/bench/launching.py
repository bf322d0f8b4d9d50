"""With which words and in which environment does a cell start; and what a launcher is.

The trap: `accelerate launch --num_processes 2` on a machine without GPUs silently starts one rank,
and the cell is then of another configuration than its row says. There the ranks are torchrun's.
A program that is not told where to write its run (no `{run}` in its command) is recorded.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil
import pynvml

from ergmeter.bench.cells import RUN, Cell
from ergmeter.errors import UsageError
from ergmeter.runlog.identity import redacted

# Set around the bench, these would make a cell part of another run or of another job's ranks.
_NOT_INHERITED = (
    *("ERGMETER_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)


@dataclass(frozen=True, slots=True)
class Places:
    """The cells that a launcher still has, by index: not started yet, and started."""

    waiting: set[int]
    running: set[int]


class Launcher(Protocol):
    """Has cells run, each by `ergmeter.bench.runner`, and says which it still has.

    Constructed with Options. What became of a cell is in its status.json and nowhere else.
    """

    name: str
    waits: bool  # until cells that an earlier driver left running have ended: it can't place them

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:
        """Raise UsageError for what can't be run here, before anything is made or started.

        `own`: processes of cells that an earlier driver left running.
        """

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Take these cells, to be started in this order as there is room."""

    def poll(self) -> Places:
        """Start what can be started; where the cells are that it still has."""

    def cancel(self) -> None:
        """End what runs, forget what waits, and return when the cells have ended."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked of a launcher; each takes what concerns it."""

    jobs: int = 1
    cool_down_s: float = 0.0
    allow_busy: bool = False
    given: Mapping[str, str] = field(default_factory=dict)  # for a scheduler, by its own names


@dataclass(frozen=True, slots=True)
class Start:
    """All that starting a cell takes: its words, its environment, the files it reads."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    own: Mapping[str, str]  # what of the environment is the cell's own
    files: Mapping[str, str]


def start(cell: Cell, directory: Path, *, has_gpus: bool) -> Start:
    """How a cell starts on this machine."""
    port = _free_port()
    filled = cell.filled(directory, port=port)
    words = [*_ranks(filled, port, has_gpus=has_gpus), *filled.command]
    if not any(RUN in part for part in (*cell.command, *cell.files.values())):
        run = str(directory / "run")
        words = [sys.executable, "-m", "ergmeter", "record", "--quiet", "--out", run, "--", *words]
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    own = dict(filled.environment)
    return Start(tuple(words), {**kept, **own}, own, dict(filled.files))


def _free_port() -> int:
    """A port that nobody has now: cells that run at once must not meet at one."""
    with socket.socket() as one:
        one.bind(("", 0))
        port: int = one.getsockname()[1]
        return port


def _ranks(cell: Cell, port: int, *, has_gpus: bool) -> list[str]:
    """What starts the ranks of a cell, in front of what each of them runs."""
    if cell.launch == "plain":
        return []
    if cell.nodes > 1:
        raise UsageError(
            f"{cell.scenario}: a cell on {cell.nodes} nodes can't be started: cells are of one node"
        )
    if cell.launch == "accelerate" and has_gpus:
        return [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *(f"--num_processes={cell.num_gpus}", f"--main_process_port={port}"),
            *cell.launch_options,
            "--no_python",
        ]
    options = cell.launch_options if cell.launch == "torchrun" else ()
    # Standalone: a rendezvous on a port of its own, so that several cells do not meet.
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={cell.num_gpus}",
        *options,
        "--no-python",
    ]


# What changes how a training runs, by how the name begins. The rest of an environment is nobody's
# business: it may hold anything.
_TELLING = (
    *("CUDA", "NCCL", "GLOO", "NVIDIA", "ROCR", "HIP", "HSA", "XLA", "NEURON", "OMP", "MKL", "KMP"),
    *("TORCH", "PYTORCH", "TRANSFORMERS", "TOKENIZERS", "ACCELERATE", "ACCELERATION", "FSDP"),
    *("BNB", "UNSLOTH", "TRITON", "ERGMETER", "SLURM_JOB", "SLURM_NNODES", "WORLD_SIZE", "RANK"),
    *("LOCAL_RANK", "MASTER_", "HF_HOME", "HF_HUB_OFFLINE", "PYTHONPATH", "PYTHONHASHSEED"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
)
_KEY = re.compile(r"token|key|secret|passw|passphrase|cred|auth|cookie|session", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")  # who signs in, and how


def noted(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables as they may be written down: without the values that look like keys."""
    return {
        name: "***" if _KEY.search(name) else _IN_ADDRESS.sub("***@", value)
        for name, value in sorted(variables.items())
    }


def told(how: Start) -> dict[str, str]:
    """Of a cell's environment, what changes how it runs, and what its scenario sets."""
    there = how.environment.items()
    return noted({n: v for n, v in there if n in how.own or n.startswith(_TELLING)})


def script(how: Start, *, where: Path) -> str:
    """The command as a shell script, to run the cell again by hand."""
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in sorted(noted(how.own).items())
    ]
    kept = [f"cd {shlex.quote(str(where))}", *exports, f"exec {shlex.join(redacted(how.words))}"]
    return "\n".join(["#!/bin/sh", *kept]) + "\n"


def command_line(how: Start) -> str:
    """The same in one line, for people."""
    own = [f"{name}={shlex.quote(value)}" for name, value in sorted(noted(how.own).items())]
    return " ".join([*own, shlex.join(redacted(how.words))])


def gpus_here() -> list[str]:
    """The GPUs that a process of ours may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU.

    A list that is set is taken as it is; otherwise they are those that NVML counts.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        found = [one.strip() for one in listed.split(",") if one.strip()]
        return [] if found == ["-1"] else found
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def strangers(gpus: Sequence[str], *, own: Collection[int] = ()) -> list[str]:
    """Who else computes on these GPUs: "process 123 (python) on GPU 0", as NVML sees it."""

    def name(pid: int) -> str:
        try:
            return str(psutil.Process(pid).name())
        except psutil.Error:
            return "of another container or user"

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [
            f"process {one.pid} ({name(one.pid)}) on GPU {gpu}"
            for gpu in gpus
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(gpu))
            if one.pid not in own
        ]
    except pynvml.NVMLError:
        return []  # it can't be asked on this machine; then nothing is claimed of it
    finally:
        pynvml.nvmlShutdown()


def _handle(gpu: str) -> object:
    if gpu.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return pynvml.nvmlDeviceGetHandleByUUID(gpu)
