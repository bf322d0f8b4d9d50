"""With which words and in which environment does a cell start; and what a launcher is.

The trap: `accelerate launch --num_processes 2` on a machine without GPUs silently starts one rank,
and the cell is then of another configuration than its row says. There the ranks are torchrun's.
A program that is not told where to write its run (no `{run}` in its command) is recorded.

Ranks of several nodes meet statically (--node-rank, --master-addr), not by torchrun's c10d: that
numbers the nodes as it likes, meets at whatever name a machine has for itself, and begins again
when a rank fails, which would be a second attempt that nobody wrote down.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import psutil
import pynvml

from ergmeter.bench.execute import secrets
from ergmeter.bench.plan.cells import RUN, Cell
from ergmeter.errors import UsageError
from ergmeter.runlog.identity import redacted

# Set around the bench, these would make a cell part of another run or of another job's ranks.
_NOT_INHERITED = (
    *("ERGMETER_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)


@dataclass(frozen=True, slots=True)
class PendingCells:
    """The cells that a launcher still has, by index: not started yet, and started.

    `rests_s`: for so long it starts none, since devices cool down; 0 where another reason holds.
    """

    waiting: set[int]
    running: set[int]
    rests_s: float = 0.0


class Launcher(Protocol):
    """Has cells run, each by `ergmeter.bench.execute.runner`, and says which it still has.

    Constructed with Options. What became of a cell is in its status.json and nowhere else.
    """

    name: str
    waits: bool  # until cells that an earlier driver left running have ended: it can't place them

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:
        """Raise UsageError for what can't be run here, before anything is made or started.

        `own`: processes of cells that an earlier driver left running.
        """

    def take_over(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Hold these cells too, which an earlier driver had started, where it can."""

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Take these cells, to be started in this order as there is room."""

    def poll(self) -> PendingCells:
        """Start what can be started; where the cells are that it still has."""

    def cancel(self) -> None:
        """End what runs, forget what waits, and return when the cells have ended."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the user asked of a launcher; each takes what concerns it."""

    jobs: int = 1
    cool_down_s: float = 0.0
    allow_busy: bool = False
    given: Mapping[str, str] = field(default_factory=dict)  # for a scheduler, by its own names


@dataclass(frozen=True, slots=True)
class NodeOfCell:
    """Which of a cell's nodes this is, and where the ranks of all of them meet."""

    number: int
    nodes: int
    address: str = "NODE0"  # until it is known, for people
    port: int = 0
    token: str = "cell"  # of this launch: no other has it

    def at(self, address: str, port: int) -> NodeOfCell:
        """The same, knowing where."""
        return replace(self, address=address, port=port)

    @property
    def suffix(self) -> str:
        """What the names of this node's files have; nothing where it is the only one."""
        return f".node{self.number}" if self.nodes > 1 else ""


@dataclass(frozen=True, slots=True)
class Start:
    """All that starting a cell takes: its words, its environment, the files it reads."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    own: Mapping[str, str]  # what of the environment is the cell's own
    files: Mapping[str, str]
    remark: str = ""  # for who repeats it by hand


def check_nodes(cell: Cell) -> None:
    """Refuse a cell of several nodes that would not be one training, or not be one run."""
    if cell.nodes < 2:
        return
    begins = f"{cell.scenario}: a cell on {cell.nodes} nodes"
    if cell.launch == "plain":
        raise UsageError(f"{begins} needs launch: torchrun or accelerate; it has plain")
    if not _names_run(cell):
        raise UsageError(
            f"{begins} needs {RUN} in its command: recorded on each node by itself it would be"
            f" {cell.nodes} runs, and its row would hold one node's energy"
        )


def _names_run(cell: Cell) -> bool:
    return any(RUN in part for part in (*cell.command, *cell.files.values()))


def start(cell: Cell, directory: Path, *, has_gpus: bool, node: NodeOfCell | None = None) -> Start:
    """How a cell starts on this machine, as one of its nodes."""
    check_nodes(cell)
    node = node or NodeOfCell(0, cell.nodes)
    node = replace(node, port=node.port or free_port())
    filled = cell.filled(directory, port=node.port)
    words = [*_ranks(filled, node, has_gpus=has_gpus), *filled.command]
    if not _names_run(cell):
        run = str(directory / "run")
        words = [sys.executable, "-m", "ergmeter", "record", "--quiet", "--out", run, "--", *words]
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    own = secrets.put(filled, kept)
    kept = {name: value for name, value in kept.items() if not name.startswith(secrets.PREFIX)}
    remark = ""
    if cell.nodes > 1:
        remark = f"node {node.number} of {cell.nodes}: each starts its own, all at the same time"
    return Start(tuple(words), {**kept, **own}, own, dict(filled.files), remark)


def runner_words(directory: str, *, number: int = 0, nodes: int = 1, token: str = "") -> list[str]:
    """What a launcher starts for a cell, or on each of its nodes with one token for all."""
    module = "ergmeter.bench.execute.node_worker" if number else "ergmeter.bench.execute.runner"
    words = [sys.executable, "-m", module, directory]
    words += ["--meeting", token] if nodes > 1 else []
    return [*words, "--node", str(number)] if number else words


def free_port() -> int:
    """A port that nobody has now: cells that run at once must not meet at one."""
    with socket.socket() as one:
        one.bind(("", 0))
        port: int = one.getsockname()[1]
        return port


def _ranks(cell: Cell, node: NodeOfCell, *, has_gpus: bool) -> list[str]:
    """What starts the ranks of a cell, in front of what each of them runs."""
    if cell.launch == "plain":
        return []
    if cell.launch == "accelerate" and has_gpus:
        return [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *(f"--num_processes={cell.num_gpus * cell.nodes}", f"--main_process_port={node.port}"),
            *(_machines(cell, node) if cell.nodes > 1 else ()),
            *cell.launch_options,
            "--no_python",
        ]
    options = cell.launch_options if cell.launch == "torchrun" else ()
    # Standalone: a rendezvous on a port of its own, so that several cells do not meet.
    meet = ["--standalone"]
    if cell.nodes > 1:
        meet = [
            *(f"--nnodes={cell.nodes}", f"--node-rank={node.number}", f"--rdzv-id={node.token}"),
            *(f"--master-addr={node.address}", f"--master-port={node.port}"),
        ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *meet),
        f"--nproc-per-node={cell.num_gpus}",
        *options,
        "--no-python",
    ]


def _machines(cell: Cell, node: NodeOfCell) -> list[str]:
    """What tells accelerate of several nodes.

    With one GPU on each it takes every node for a training of its own, unless it is told that there
    are several GPUs, or a configuration says how they train together.
    """
    return [
        *(f"--num_machines={cell.nodes}", f"--machine_rank={node.number}"),
        *(f"--main_process_ip={node.address}", "--rdzv_backend=static"),
        *(() if cell.launch_options else ("--multi_gpu",)),
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


def noted(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables as they may be written down: without the values that look like keys."""
    return {name: secrets.written(name, value) for name, value in sorted(variables.items())}


def launch_environment(how: Start) -> dict[str, str]:
    """Of a cell's environment, what changes how it runs, and what its scenario sets."""
    there = how.environment.items()
    return noted({n: v for n, v in there if n in how.own or n.startswith(_TELLING)})


# What launchers and schedulers set for each cell: which devices it has, how many threads.
_PLACED = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("ZE_AFFINITY_MASK", "NEURON_RT_VISIBLE_CORES"),
)


def script(how: Start, *, where: Path) -> str:
    """The command as a shell script, to run the cell again by hand.

    A key is not exported: what stands for it would take the place of the one that is set.
    """
    placed = {name: how.environment[name] for name in _PLACED if name in how.environment}
    exports = [
        f"# set {name} yourself: it is a key, which is not written down"
        if secrets.is_key(name, value)
        else f"export {name}={shlex.quote(value)}"
        for name, value in sorted({**placed, **how.own}.items())
    ]
    kept = [f"cd {shlex.quote(str(where))}", *exports, f"exec {shlex.join(redacted(how.words))}"]
    remarks = [f"# {how.remark}"] if how.remark else []
    return "\n".join(["#!/bin/sh", *remarks, *kept]) + "\n"


def command_line(how: Start) -> str:
    """The same in one line, for people."""
    own = [f"{name}={shlex.quote(value)}" for name, value in sorted(noted(how.own).items())]
    return " ".join([*own, shlex.join(redacted(how.words))])


COOL_DOWN_S = 15.0


def cool_down_s(asked_s: float | None) -> float:
    """How long devices rest between two cells: as asked, else so long where there are GPUs."""
    if asked_s is not None:
        return asked_s
    return COOL_DOWN_S if gpus_here() else 0.0


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
