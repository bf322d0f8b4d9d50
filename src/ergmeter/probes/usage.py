"""Finds the GPUs that the program uses, its share of their memory, and other processes there.

On a node with eight GPUs a program that uses one must not be charged for all eight. NVML lists the
processes with a context on each GPU; the program's are the measured process and its descendants.
Where a launcher started several ranks on this node, one rank reads the GPUs for all: there the
launcher and its descendants are the program's. In a container NVML may list process numbers of
another namespace; then none is recognised. On a GPU where the program was recognised, any other
process is another program, and the board's energy is not the program's alone.

A GPU without the program is *unused* only if that is certain (`UseStates`); otherwise its use is
*unknown*, and the summary says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

PERIOD_S = 1.0
# Finding descendants reads the parent of every process: at this interval, and when a process
# appears that is unknown.
TREE_PERIOD_S = 5.0
# Services of the driver, which compute nothing themselves.
_SERVANTS = ("nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "dcgm")
# The server of CUDA MPS, which appears as the process of all its clients.
_MPS_SERVER = "nvidia-cuda-mps"
# A CUDA context takes hundreds of megabytes (648 MB on an H200). Without one a GPU shows a few, the
# driver's own reserve not counted.
NO_CONTEXT_BYTES = 64 << 20
# A context that is being made takes memory in parts, of which one reading may see the first.
NEW_CONTEXT_BYTES = 16 << 20
# The link of the machine's first process namespace (PROC_PID_INIT_INO of Linux). Only there are the
# driver's process ids valid for us.
_FIRST_NAMESPACE = "pid:[4026531836]"

Use: TypeAlias = Literal["used", "unused", "unknown"]


class UsageWatch:
    """Periodically finds the processes that compute on GPUs."""

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        self._pid = _launcher(pid) if _ranks_here(environment) > 1 else pid
        self._due_s = 0.0
        self._used: set[str] = set()
        self._shared: set[str] = set()
        self._ours: set[int] = set()
        self._others: set[int] = set()
        self._tree_due_s = 0.0

    def changes(
        self, gpus: Sequence[tuple[str, Callable[[], Collection[int]]]], *, now: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """The GPUs newly used by the program, and newly shared GPUs with their other processes.

        `gpus`: ids, each with a function that lists the processes there. They are read every
        PERIOD_S, or at once if `now`.
        """
        if time.monotonic() < self._due_s and not now:
            return [], {}
        self._due_s = time.monotonic() + PERIOD_S
        on_gpus = {gpu: set(pids()) for gpu, pids in gpus}
        self._update_processes({pid for pids in on_gpus.values() for pid in pids})
        used = [gpu for gpu, pids in on_gpus.items() if pids & self._ours and gpu not in self._used]
        self._used.update(used)
        settled = [gpu for gpu in on_gpus if gpu in self._used and gpu not in self._shared]
        others = {gpu: ", ".join(_process_names(on_gpus[gpu] - self._ours)) for gpu in settled}
        shared = {gpu: names for gpu, names in others.items() if names}
        self._shared.update(shared)
        return used, shared

    @property
    def has_recognised(self) -> bool:
        """True if the program was seen on a GPU."""
        return bool(self._used)

    def are_ours(self, pids: set[int]) -> bool:
        """True if any of these is a process of the program."""
        self._update_processes(pids)
        return bool(pids & self._ours)

    def own_bytes(self, bytes_by_gpu: Mapping[str, Mapping[int, int | None]]) -> dict[str, int]:
        """The program's bytes on each GPU, if the bytes of all its processes there are known."""
        own = {}
        for gpu, by_pid in bytes_by_gpu.items():
            amounts = [amount for pid, amount in by_pid.items() if pid in self._ours]
            stated = [amount for amount in amounts if amount is not None]
            if stated and len(stated) == len(amounts):  # a sum without one is not the program's
                own[gpu] = sum(stated)
        return own

    def _update_processes(self, pids: set[int]) -> None:
        """Update which processes are the program's; lists the machine's only when due."""
        is_due = time.monotonic() >= self._tree_due_s
        if not pids or not (is_due or pids - self._ours - self._others):
            return
        self._tree_due_s = time.monotonic() + TREE_PERIOD_S
        self._ours |= self._tree()  # earlier ones stay: an orphan is no longer a descendant
        self._others = pids - self._ours

    def _tree(self) -> set[int]:
        try:
            children = psutil.Process(self._pid).children(recursive=True)
        except psutil.Error:
            return {self._pid}
        return {self._pid, *(child.pid for child in children)}


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """A driver's answer about one GPU at one moment. None: no answer."""

    computing: Collection[int] | None  # processes with a compute context
    drawing: Collection[int] | None  # and with a graphics context
    memory_bytes: int | None  # in use by all processes, without the driver's own reserve


class UseStates:
    """Decides for each GPU if the program has used it so far: used, unused or unknown.

    A GPU is unused if at every reading the driver listed its processes and none was the program's.
    A list of other processes is trusted if its process numbers are ours: the program was recognised
    on another GPU, or this is the machine's first process namespace. An empty list is trusted if
    too little memory is in use for any context, or the program was recognised on another GPU: in
    containers and in WSL a list may be empty although a process computes. Processes behind an MPS
    server can't be distinguished. When memory in use rises, the list is read at once, since a short
    context may lie between two readings.
    """

    def __init__(self, watch: UsageWatch) -> None:
        self._watch = watch
        self._states: dict[str, tuple[Use, str]] = {}
        self._used: set[str] = set()
        self._doubts: dict[str, str] = {}  # by GPU: reasons for doubt that remain
        self._unlisted: dict[str, str] = {}  # doubts that end if the program is seen on any GPU
        self._strange: dict[str, str] = {}  # these end too where the driver's process ids are valid
        self._is_first_namespace = _is_first_namespace()

    def changes(
        self,
        looks: Mapping[str, GpuUsage],
        used: Collection[str],
        rose: Mapping[str, int] | None = None,
    ) -> dict[str, tuple[Use, str]]:
        """The GPUs whose state has changed, each with its new state and reason.

        `used`: GPUs on which the program was seen computing. `rose`: GPUs whose memory in use has
        just risen, with the bytes that are in use now.
        """
        self._used.update(used)
        for gpu, look in looks.items():
            self._take(gpu, look)
            if rose and gpu in rose and not look.computing and not look.drawing:
                why = f"its memory in use rose to {rose[gpu] / 1e6:.0f} MB, by a process that had"
                self._doubts.setdefault(gpu, f"{why} ended before it could be listed")
        states = {gpu: self._state(gpu) for gpu in looks}
        changed = {gpu: state for gpu, state in states.items() if state != self._states.get(gpu)}
        self._states.update(changed)
        return changed

    def is_used(self, gpu: str) -> bool:
        """True if the program was seen on this GPU."""
        return gpu in self._used

    def _take(self, gpu: str, look: GpuUsage) -> None:
        if look.computing is None or look.drawing is None:
            self._doubts.setdefault(gpu, "the driver did not always list the processes on it")
            return
        pids = {*look.computing, *look.drawing}
        if self._watch.are_ours(pids):
            self._used.add(gpu)
        elif any(_is_mps_server(pid) for pid in pids):
            self._doubts.setdefault(gpu, "an MPS server computes on it for other processes")
        elif pids:
            why = f"{len(pids)} processes on it have ids that are not valid in this container"
            self._strange.setdefault(gpu, why)
        elif look.memory_bytes is None or look.memory_bytes >= NO_CONTEXT_BYTES:
            in_use = "how much of its memory is in use is unknown"
            if look.memory_bytes is not None:
                in_use = f"{look.memory_bytes / 1e6:.0f} MB of its memory is in use"
            self._unlisted.setdefault(gpu, f"the driver lists no process on it, and {in_use}")

    def _state(self, gpu: str) -> tuple[Use, str]:
        if gpu in self._used:
            return "used", "a process of the run was on it"
        doubt = self._doubts.get(gpu, "")
        if not self._used:  # else the lists are complete, and their process ids are valid here
            doubt = doubt or self._unlisted.get(gpu, "")
        if not (self._used or self._is_first_namespace):
            doubt = doubt or self._strange.get(gpu, "")
        return ("unknown", doubt) if doubt else ("unused", "no process of the run used it")


def _is_first_namespace() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:  # no Linux
        return False


def _is_mps_server(pid: int) -> bool:
    try:
        return psutil.Process(pid).name().startswith(_MPS_SERVER)
    except psutil.Error:
        return False


def _process_names(pids: set[int]) -> Iterator[str]:
    """Names of these processes, without the driver's own services."""
    for pid in sorted(pids):
        try:
            name = psutil.Process(pid).name()
        except psutil.NoSuchProcess:
            continue  # it has just ended
        except psutil.Error:
            name = "?"
        if not name.startswith(_SERVANTS):
            yield f"{name} ({pid})"


def _ranks_here(environment: Mapping[str, str]) -> int:
    """Ranks that a launcher (torchrun, accelerate) started on this node."""
    ranks = environment.get("LOCAL_WORLD_SIZE", "")
    return int(ranks) if ranks.isdecimal() else 1


def _launcher(pid: int) -> int:
    """The process id of a rank's parent; the rank's own if the parent can't be found."""
    try:
        return psutil.Process(pid).ppid() or pid  # 0: it is outside this container
    except psutil.Error:
        return pid
