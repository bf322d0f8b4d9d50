"""Checks whether the process that writes a run is still alive.

A writer hands over at least once a second, so files that have not changed for a while mean that it
is gone or stuck. On the writer's own host the process is looked up as well. Its start time
distinguishes it from a later process with the same number.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

# Twenty missed hand-overs: a file system that hides an append for longer than this (NFS caches
# attributes for up to 60 s, by default 3 to 30 s) makes a live run look cut off for that long.
STALE_S = 20.0


def boot_id() -> str | None:
    """The id of this boot of this machine; None where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def started_s(pid: int) -> float | None:
    """When a process started, by the system's clock; None if there is no such process."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # it was renamed just now, so its writer lives
        return time.time()


def is_alive(directory: Path, header: dict[str, Any]) -> bool:
    """True if the writer of this directory is still running."""
    newest_s = max((_changed_s(path) for path in directory.iterdir()), default=0.0)
    if time.time() - newest_s > STALE_S:
        return False
    if header.get("boot_id") != boot_id() or boot_id() is None:
        return True  # another host, or a container that can't say: the files are all we can see
    try:
        return _same_process(int(header["pid"]), float(header["pid_started_s"]))
    except (KeyError, TypeError, ValueError):
        return True


def _same_process(pid: int, expected_s: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - expected_s) < 1.0 and (
            process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
