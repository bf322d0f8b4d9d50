"""Which GPUs does the measured program compute on, how much of their memory is its own, and who
else is there?

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
from collections.abc import Callable, Collection, Mapping, Sequence

import psutil

PERIOD_S = 1.0
# Finding descendants asks every process on the machine for its parent: so often, and when somebody
# is seen who was not known.
TREE_PERIOD_S = 5.0
# These serve whoever computes, and compute nothing themselves.
_SERVANTS = ("nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "dcgm")


class UsageWatch:
    """Asks now and then who computes on a GPU."""

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        self._pid = _launcher(pid) if _ranks_here(environment) > 1 else pid
        self._due_s = 0.0
        self._seen: set[str] = set()
        self._shared: set[str] = set()
        self._ours: set[int] = set()
        self._others: set[int] = set()
        self._tree_due_s = 0.0

    def changes(
        self, gpus: Sequence[tuple[str, Callable[[], Collection[int]]]]
    ) -> tuple[list[str], dict[str, str]]:
        """Of these GPUs (id, and how to ask for its processes), those seen in use just now; and
        those of ours on which somebody else was seen, with who. Each is told once."""
        if time.monotonic() < self._due_s:
            return [], {}
        self._due_s = time.monotonic() + PERIOD_S
        on_gpus = {gpu: set(pids()) for gpu, pids in gpus}
        self._know({pid for pids in on_gpus.values() for pid in pids})
        used = [gpu for gpu, pids in on_gpus.items() if pids & self._ours and gpu not in self._seen]
        self._seen.update(used)
        settled = [gpu for gpu in on_gpus if gpu in self._seen and gpu not in self._shared]
        others = {gpu: _named(on_gpus[gpu] - self._ours) for gpu in settled}
        shared = {gpu: names for gpu, names in others.items() if names}
        self._shared.update(shared)
        return used, shared

    def own_bytes(self, held: Mapping[str, Mapping[int, int | None]]) -> dict[str, int]:
        """Of what processes hold on each GPU, the program's part, as far as they are all known."""
        own = {gpu: [held[gpu][pid] for pid in held[gpu] if pid in self._ours] for gpu in held}
        # A sum without one of them is not the program's.
        known = {gpu: [one for one in every if one is not None] for gpu, every in own.items()}
        return {
            gpu: sum(every) for gpu, every in known.items() if every and len(every) == len(own[gpu])
        }

    def _know(self, pids: set[int]) -> None:
        """Tell ours from the others, looking at the machine's processes only where that is due."""
        is_due = time.monotonic() >= self._tree_due_s
        if not pids or not (is_due or pids - self._ours - self._others):
            return
        self._tree_due_s = time.monotonic() + TREE_PERIOD_S
        self._ours = self._tree()
        self._others = pids - self._ours

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
