"""Commands and environments that cells start with, secrets in them, and the launcher protocol.

`accelerate launch --num_processes 2` on a machine without GPUs starts one rank without a warning,
so torchrun starts the ranks there. A program without `{run}` in its command is recorded. Ranks of
several nodes meet statically (--node-rank, --master-addr): torchrun's c10d numbers nodes as it
likes and restarts a failed rank.

Secrets of a scenario's `environment` are written as "(hidden)" in plan.json and cell.json. The
driver passes their values to its children in variables with a prefix. Numbers, booleans and names
of settings (MAX_TOKENS) are no secrets: hidden, two cells would have one id.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import pynvml

from ergmeter.bench.plan.cells import RUN, Cell
from ergmeter.errors import UsageError
from ergmeter.runlog.identity import redacted

_Item = TypeVar("_Item")
HIDDEN = "(hidden)"
HIDDEN_PREFIX = "ERGMETER_HIDDEN_"
# TOKENIZERS_PARALLELISM and GIT_AUTHOR_NAME are no secrets.
_KEY = re.compile(r"key|token(?!i[sz])|auth(?!or(?!i[sz]))|session", re.IGNORECASE)
_PASSWORD = re.compile(r"secret|passw|passphrase|cred|cookie", re.IGNORECASE)
_NOT_SECRET = re.compile(r"[\d.eE+-]{1,12}|true|false|yes|no|none|\{\w+\}", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")  # user and password
# Arguments such as `pad_token` and `label_key` are no secrets: only names that mean a key alone.
_ARGUMENT = re.compile(
    r"(?:^|[._-])(?:hub|hf|access|auth|api|bearer|private|secret)[_-]?(?:token|key)$|(?:^|\.)token$"
    r"|secret|passw|passphrase|credential",
    re.IGNORECASE,
)

# Prefixes of issued keys: Hugging Face, GitHub, GitLab, AWS, Slack; and `sk-` of OpenAI and others,
# which other names begin with too, but without so long a random part.
_ISSUED = re.compile(
    r"\b(?:(hf_|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abpr]-)(?=[\w-]*\d)[\w-]{12,}"
    r"|(sk-)[\w-]*?(?=[A-Za-z]*\d)[A-Za-z\d]{16,})"
)
# An option or a variable with its value, unless the value is a shell variable.
_ASSIGNMENT = re.compile(
    r"(?<!\S)(--?[A-Za-z_][\w.-]*(?:=| (?!-))|[A-Z_][A-Z\d_]*=)(?=([^\s$]\S*))"
)


def is_secret(name: str, value: str = "") -> bool:
    """True if a variable must not be stored: by its name, or as an address with a password."""
    return _is_named(name, value) or bool(_IN_ADDRESS.search(value))


def _is_named(name: str, value: str) -> bool:
    return bool(_PASSWORD.search(name) or (_KEY.search(name) and not _NOT_SECRET.fullmatch(value)))


def masked(name: str, value: str) -> str:
    """Return a variable's value with secrets masked."""
    return "***" if _is_named(name, value) else _IN_ADDRESS.sub("***@", value)


def secret_complaints(settings: Mapping[str, Any], *, within: str = "") -> Iterator[str]:
    """Yield a message for each setting that looks like a secret: plan and tables store settings."""
    for key, value in settings.items():
        name = f"{within}{key}"
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            if isinstance(part, dict):
                yield from secret_complaints(part, within=f"{name}.")
        texts = [part for part in parts if isinstance(part, str) and part]
        if _ARGUMENT.search(name) and any(not _NOT_SECRET.fullmatch(text) for text in texts):
            yield (
                f"{name} is a key, and settings are written down in the plan and in every table:"
                " give it as a variable under `environment`"
            )


def secrets_in_command(words: Iterable[str]) -> Iterator[str]:
    """Yield the beginning, never all, of each part of a command that looks like a key."""
    text = " ".join(" ".join(words).split())  # a word may be a line for a shell
    for named, value in _ASSIGNMENT.findall(text):
        name = named[:-1].lstrip("-")
        is_key = _ARGUMENT.search(name) if named.startswith("-") else _is_named(name, value)
        if is_key and not _NOT_SECRET.fullmatch(value):
            yield f"{named}..."
    yield from (f"{issued[1] or issued[2]}..." for issued in _ISSUED.finditer(text))
    if _IN_ADDRESS.search(text):
        yield "an address with a password"


def secret_warning(words: Iterable[str], *, scenario: str) -> str:
    """The warning about secrets in a scenario's command; empty if there are none."""
    issued = dict.fromkeys(secrets_in_command(words))
    if not issued:
        return ""
    return (
        f"scenario {scenario!r}: {', '.join(issued)} in its command looks like a key, and commands"
        " are written down in the plan: give it as a variable under `environment`"
    )


def secret_variables(environment: Mapping[str, str], *, scenario: str) -> dict[str, str]:
    """Return a scenario's keys, by the names of the variables that pass them to its cells."""
    keys = {name: value for name, value in environment.items() if is_secret(name, value)}
    return {_hidden_variable(scenario, name): value for name, value in keys.items()}


def own_environment(cell: Cell, around: Mapping[str, str]) -> dict[str, str]:
    """Return a cell's own variables; hidden keys get their values from the environment `around`."""
    variables = dict(cell.environment)
    for name in [name for name, value in variables.items() if value == HIDDEN]:
        handed_on = around.get(_hidden_variable(cell.scenario, name), around.get(name))
        if handed_on is None:
            raise UsageError(
                f"{name} of scenario {cell.scenario!r} is a key, which the plan does not store,"
                f" and this process does not have it: set {name} where cells start"
            )
        variables[name] = handed_on
    return variables


def _hidden_variable(scenario: str, name: str) -> str:
    """Name the variable that passes on a key; scenarios may have different keys of one name."""
    return f"{HIDDEN_PREFIX}{hashlib.sha256(scenario.encode()).hexdigest()[:8]}_{name}"


# Set around the bench, these would make a cell part of another run or of another job's ranks.
_NOT_INHERITED = (
    *("ERGMETER_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)


@dataclass(frozen=True, slots=True)
class PendingCells:
    """The indexes of a launcher's cells that have not ended: waiting to start, and running.

    `rests_s`: how long no cell starts because devices cool down; else 0.
    """

    waiting: set[int]
    running: set[int]
    rests_s: float = 0.0


class Launcher(Protocol):
    """Runs cells, each by `ergmeter.bench.execute.runner`, and reports which have not ended.

    Constructed with LaunchOptions. A cell's outcome is in its status.json and nowhere else.
    """

    name: str
    waits: bool  # starts nothing until cells that an earlier driver started have ended

    def check(self, cells: Sequence[Cell], *, own: Collection[int] = ()) -> None:
        """Raise UsageError if cells can't run here, before anything is created or started.

        `own`: PIDs of cells that an earlier driver left running.
        """

    def take_over(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Also track these cells, which an earlier driver started, if the launcher can."""

    def submit(self, cells: Sequence[tuple[Cell, Path]]) -> None:
        """Queue these cells: they start in this order when there is room."""

    def poll(self) -> PendingCells:
        """Start the cells that can start; return those that have not ended."""

    def cancel(self) -> None:
        """Stop the running cells and drop the waiting ones; return when all have ended."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The user's options for launchers; a launcher uses those that apply to it."""

    jobs: int = 1
    cool_down_s: float = 0.0
    allow_busy: bool = False
    given: Mapping[str, str] = field(default_factory=dict)  # a scheduler's own options


@dataclass(frozen=True, slots=True)
class NodeOfCell:
    """Which of a cell's nodes this is, and the address at which the ranks of all nodes meet."""

    number: int
    nodes: int
    address: str = "NODE0"  # a placeholder to print until the address is known
    port: int = 0
    token: str = "cell"  # unique to this launch

    @property
    def suffix(self) -> str:
        """The suffix of this node's file names; empty if the cell has a single node."""
        return f".node{self.number}" if self.nodes > 1 else ""


@dataclass(frozen=True, slots=True)
class Start:
    """What it takes to start a cell: its command, its environment and the files it reads."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    own: Mapping[str, str]  # variables of `environment` that the scenario sets
    files: Mapping[str, str]
    remark: str = ""  # a comment in the script that repeats the cell


def check_nodes(cell: Cell) -> None:
    """Raise UsageError if a cell of several nodes would not be one training in one run."""
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
    """Return the command, environment and files that start this node's part of a cell."""
    check_nodes(cell)
    node = node or NodeOfCell(0, cell.nodes)
    node = replace(node, port=node.port or free_port())
    filled = cell.filled(directory, port=node.port)
    words = [*_ranks(filled, node, has_gpus=has_gpus), *filled.command]
    if cell.command[1:4] == ("-m", "ergmeter", "train"):  # the bench checks it itself
        words.append("--anyway")
    if not _names_run(cell):
        run = str(directory / "run")
        words = [sys.executable, "-m", "ergmeter", "record", "--quiet", "--out", run, "--", *words]
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    own = own_environment(filled, inherited)
    inherited = {
        name: value for name, value in inherited.items() if not name.startswith(HIDDEN_PREFIX)
    }
    remark = ""
    if cell.nodes > 1:
        remark = f"node {node.number} of {cell.nodes}: each starts its own, all at the same time"
    return Start(tuple(words), {**inherited, **own}, own, dict(filled.files), remark)


def runner_words(directory: str, *, number: int = 0, nodes: int = 1, token: str = "") -> list[str]:
    """Return the command that a launcher starts for a cell, or for node `number` of it.

    `token`: the same for all nodes of one launch.
    """
    module = "ergmeter.bench.execute.node_worker" if number else "ergmeter.bench.execute.runner"
    words = [sys.executable, "-m", module, directory]
    words += ["--meeting", token] if nodes > 1 else []
    return [*words, "--node", str(number)] if number else words


def free_port() -> int:
    """Return a free port: cells that run at the same time must not share one."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _ranks(cell: Cell, node: NodeOfCell, *, has_gpus: bool) -> list[str]:
    """Return the words that start a cell's ranks, to put before the command of a rank.

    It ends with `--`: argparse would take a rank's `--r` for a short form of torchrun's --rdzv-id.
    """
    if cell.launch == "plain":
        return []
    # The ranks of fms-hf-tuning have a torch and an accelerate of their own.
    python = cell.command[0] if cell.is_of_fms else sys.executable
    if cell.launch == "accelerate" and has_gpus:
        return [
            *(python, "-m", "accelerate.commands.launch"),
            *(f"--num_processes={cell.num_gpus * cell.nodes}", f"--main_process_port={node.port}"),
            *(_machines(cell, node) if cell.nodes > 1 else ()),
            *cell.launch_options,
            *("--no_python", "--"),
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
        *(python, "-m", "torch.distributed.run", *meet),
        f"--nproc-per-node={cell.num_gpus}",
        *options,
        *("--no-python", "--"),
    ]


def _machines(cell: Cell, node: NodeOfCell) -> list[str]:
    """accelerate's options for several nodes.

    With one GPU per node, accelerate runs a separate training on each node, unless --multi_gpu or a
    configuration file says otherwise.
    """
    return [
        *(f"--num_machines={cell.nodes}", f"--machine_rank={node.number}"),
        *(f"--main_process_ip={node.address}", "--rdzv_backend=static"),
        *(() if cell.launch_options else ("--multi_gpu",)),
    ]


# Prefixes of variables that change how a training runs. Other variables are not stored: they may
# hold anything.
_TELLING = (
    *("CUDA", "NCCL", "GLOO", "NVIDIA", "ROCR", "HIP", "HSA", "XLA", "NEURON", "OMP", "MKL", "KMP"),
    *("TORCH", "PYTORCH", "TRANSFORMERS", "TOKENIZERS", "ACCELERATE", "ACCELERATION", "FSDP"),
    *("BNB", "UNSLOTH", "TRITON", "ERGMETER", "SLURM_JOB", "SLURM_NNODES", "WORLD_SIZE", "RANK"),
    *("LOCAL_RANK", "MASTER_", "HF_HOME", "HF_HUB_OFFLINE", "PYTHONPATH", "PYTHONHASHSEED"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
)


def noted(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, sorted by name, with secrets masked."""
    return {name: masked(name, value) for name, value in sorted(variables.items())}


def launch_environment(how: Start) -> dict[str, str]:
    """The variables that the scenario sets or that change how a cell runs, with secrets masked."""
    there = how.environment.items()
    return noted({n: v for n, v in there if n in how.own or n.startswith(_TELLING)})


# What launchers and schedulers set for each cell: which devices it has, how many threads.
_PLACED = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("ZE_AFFINITY_MASK", "NEURON_RT_VISIBLE_CORES"),
)


def script(how: Start, *, where: Path) -> str:
    """The command as a shell script, to run the cell again by hand.

    A key is not exported: its placeholder would replace the real value in the user's shell.
    """
    placed = {name: how.environment[name] for name in _PLACED if name in how.environment}
    exports = [
        f"# set {name} yourself: it is a key, which is not written down"
        if is_secret(name, value)
        else f"export {name}={shlex.quote(value)}"
        for name, value in sorted({**placed, **how.own}.items())
    ]
    lines = [f"cd {shlex.quote(str(where))}", *exports, f"exec {shlex.join(redacted(how.words))}"]
    remarks = [f"# {how.remark}"] if how.remark else []
    return "\n".join(["#!/bin/sh", *remarks, *lines]) + "\n"


def command_line(how: Start) -> str:
    """Return the scenario's variables and the command in one line, with secrets masked."""
    own = [f"{name}={shlex.quote(value)}" for name, value in sorted(noted(how.own).items())]
    return " ".join([*own, shlex.join(redacted(how.words))])


COOL_DOWN_S = 15.0


def cool_down_s(asked_s: float | None) -> float:
    """The pause between two cells: `asked_s`, else 15 s if this machine has GPUs, else none."""
    if asked_s is not None:
        return asked_s
    return COOL_DOWN_S if gpus_here() else 0.0


def nvml_list(query: Callable[[], list[_Item]]) -> list[_Item]:
    """Return the list that an NVML query returns; empty if NVML fails."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return query()
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def gpus_here() -> list[str]:
    """The GPUs that a process of ours may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU.

    The variable is used as it is; if it is not set, the result is all GPUs that NVML counts.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        gpus = [gpu.strip() for gpu in listed.split(",") if gpu.strip()]
        return [] if gpus == ["-1"] else gpus
    return nvml_list(lambda: [str(index) for index in range(pynvml.nvmlDeviceGetCount())])


def dry_run_gpus(cells: Iterable[Cell], *, on_gpus: bool) -> tuple[bool, list[str]]:
    """Return whether a dry run shows commands as with GPUs, and a note if that differs from here.

    `on_gpus`: the user gave a number of GPUs; otherwise commands are shown as on this machine.
    """
    has_gpus = bool(gpus_here())
    note = "shown as with GPUs; this machine has none, so torchrun would start the ranks here"
    differs = on_gpus and not has_gpus and any(cell.launch == "accelerate" for cell in cells)
    return has_gpus or on_gpus, [note] if differs else []


def strangers(gpus: Sequence[str], *, own: Collection[int] = ()) -> list[str]:
    """Other processes on these GPUs by NVML, each as "process 123 (python) on GPU 0"."""

    def name(pid: int) -> str:
        try:
            return str(psutil.Process(pid).name())
        except psutil.Error:
            return "of another container or user"

    return nvml_list(
        lambda: [
            f"process {process.pid} ({name(process.pid)}) on GPU {gpu}"
            for gpu in gpus
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(gpu))
            if process.pid not in own
        ]
    )


def _handle(gpu: str) -> object:
    if gpu.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return pynvml.nvmlDeviceGetHandleByUUID(gpu)
