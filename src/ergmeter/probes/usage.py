"""Which GPUs does the measured program compute on, and who else?

The trap: on a node with eight GPUs a program that uses one would be billed for all eight. NVML
knows the processes that have a context on each GPU; ours are the measured process and its
descendants. Where a launcher started several ranks on this node, one of them reads the GPUs for
all, and the others are its siblings: there the launcher and its descendants are ours. In a
container NVML may speak of process numbers that mean nothing there: then nobody is recognised, and
every GPU the program can see counts, which the summary says. On a GPU where the program was
recognised, whoever else computes is another program, and the board's energy is not the program's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import psutil

PERIOD_S = 1.0
SHARED_PERIOD_S = 5.0  # once the program was seen on every GPU
# These serve whoever computes, and compute nothing themselves.
_SERVANTS = ("nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "dcgm")


class UsageWatch:
    """Asks now and then who computes on a GPU."""

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        self._pid = _launcher(pid) if _ranks_here(environment) > 1 else pid
        self._due_s = 0.0
        self._seen: set[str] = set()
        self._shared: set[str] = set()

    def changes(
        self, gpus: Sequence[tuple[str, Callable[[], Sequence[int]]]]
    ) -> tuple[list[str], dict[str, str]]:
        """Of these GPUs (id, and how to ask for its processes), those seen in use just now; and
        those of ours on which somebody else was seen, with who."""
        if time.monotonic() < self._due_s:
            return [], {}
        every_used = all(gpu in self._seen for gpu, _ in gpus)
        self._due_s = time.monotonic() + (SHARED_PERIOD_S if every_used else PERIOD_S)
        on_gpus = {gpu: set(pids()) for gpu, pids in gpus if gpu not in self._shared}
        if not any(on_gpus.values()):
            return [], {}
        ours = self._tree()
        used = [gpu for gpu, pids in on_gpus.items() if gpu not in self._seen and pids & ours]
        self._seen.update(used)
        others = {gpu: _named(pids - ours) for gpu, pids in on_gpus.items() if gpu in self._seen}
        shared = {gpu: names for gpu, names in others.items() if names}
        self._shared.update(shared)
        return used, shared

    def _tree(self) -> set[int]:
        try:
            children = psutil.Process(self._pid).children(recursive=True)
        except psutil.Error:
            return {self._pid}
        return {self._pid, *(child.pid for child in children)}


def _named(pids: set[int]) -> str:
    """Who these processes are, but for the driver's own servants."""
    names = []
    for pid in sorted(pids):
        try:
            name = psutil.Process(pid).name()
        except psutil.NoSuchProcess:
            continue  # it has just ended
        except psutil.Error:
            name = "?"
        if not name.startswith(_SERVANTS):
            names.append(f"{name} ({pid})")
    return ", ".join(names)


def _ranks_here(environment: Mapping[str, str]) -> int:
    """How many ranks a launcher says it started on this node (torchrun's and accelerate's word)."""
    said = environment.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdecimal() else 1


def _launcher(pid: int) -> int:
    """The parent of a rank, asked while it lives; the rank itself where it can't be told."""
    try:
        return psutil.Process(pid).ppid() or pid  # 0: it is outside this container
    except psutil.Error:
        return pid
