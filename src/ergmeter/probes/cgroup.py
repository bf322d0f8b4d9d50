"""How much memory and how many cores may a process use at most? From its control groups.

The trap: looking at its own cgroup only. A limit set further up, by a container or a batch system,
holds for all below it, and in a container the way up may be mounted under another name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# cgroup v1 says "unlimited" as the largest long, rounded down to a page.
UNLIMITED_BYTES = 1 << 62


def cgroup_limits(pid: int, proc: Path = Path("/proc")) -> tuple[int | None, float | None]:
    """Give the bytes and the cores that the process's cgroups allow; None where unlimited.

    A limit holds for all below it, so the tightest one on the way up counts.
    """
    memory_bytes: list[int] = []
    cores: list[float] = []
    try:
        for cgroup in _cgroups(pid, proc):
            limit = _words(cgroup, "memory.max") or _words(cgroup, "memory.limit_in_bytes")
            if limit and limit[0] != "max" and int(limit[0]) < UNLIMITED_BYTES:
                memory_bytes.append(int(limit[0]))
            quota = _words(cgroup, "cpu.max")
            quota = quota or _words(cgroup, "cpu.cfs_quota_us", "cpu.cfs_period_us")
            if quota and quota[0] not in ("max", "-1"):
                cores.append(int(quota[0]) / int(quota[1]))
    except (OSError, ValueError):  # no cgroups here, or not as the kernel documents them
        return None, None
    return min(memory_bytes, default=None), min(cores, default=None)


def _cgroups(pid: int, proc: Path) -> Iterator[Path]:
    """Yield the folder of each cgroup the process is in, and of those above it; v1 and v2."""
    own: dict[str, str] = {}
    for line in (proc / str(pid) / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)  # v2's line names no controller
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        root, mount = place.split()[3:5]
        file_system, *_, options = kind.split()
        mounted = {"cgroup2": [""], "cgroup": options.split(",")}.get(file_system, [])
        for path in {own[controller] for controller in mounted if controller in own}:
            # In a container the mount may show only the cgroup itself, under its name outside.
            inside = Path(path).relative_to(root).parts if Path(path).is_relative_to(root) else ()
            yield from (Path(mount, *inside[:depth]) for depth in range(len(inside) + 1))


def _words(cgroup: Path, *names: str) -> list[str]:
    """Read these files of a cgroup; nothing where one of them does not exist."""
    try:
        return " ".join((cgroup / name).read_text() for name in names).split()
    except OSError:
        return []
