"""Which GPUs does the measured program compute on?

The trap: on a node with eight GPUs a program that uses one would be billed for all eight. NVML
knows the processes that have a context on each GPU; ours are the measured process and its
descendants. Where a launcher started several ranks on this node, one of them reads the GPUs for
all, and the others are its siblings: there the launcher and its descendants are ours. In a
container NVML may speak of process numbers that mean nothing there: then nobody is recognised, and
every GPU the program can see counts, which the summary says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import psutil

PERIOD_S = 1.0


class UsageWatch:
    """Asks now and then who computes on a GPU, until the measured program was seen on each."""

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        self._pid = _launcher(pid) if _ranks_here(environment) > 1 else pid
        self._due_s = 0.0
        self._seen: set[str] = set()

    def newly_used(self, gpus: Sequence[tuple[str, Callable[[], Sequence[int]]]]) -> list[str]:
        """Of these GPUs (id, and how to ask for its processes), those seen in use just now."""
        unseen = [(gpu, processes) for gpu, processes in gpus if gpu not in self._seen]
        if not unseen or time.monotonic() < self._due_s:
            return []
        self._due_s = time.monotonic() + PERIOD_S
        on_gpus = {gpu: set(processes()) for gpu, processes in unseen}
        if not any(on_gpus.values()):
            return []
        ours = self._tree()
        found = [gpu for gpu, pids in on_gpus.items() if pids & ours]
        self._seen.update(found)
        return found

    def _tree(self) -> set[int]:
        try:
            children = psutil.Process(self._pid).children(recursive=True)
        except psutil.Error:
            return {self._pid}
        return {self._pid, *(child.pid for child in children)}


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
