"""Makes the headers of a run and of a writer: which process writes, where and when.

A command line may contain a key; such values are masked.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ergmeter.runlog.process_group import agreed_word, boot_id, launcher_world_size, started_s
from ergmeter.version import __version__

_SECRET = re.compile(
    r"(api[-_]?key|secret|passw(or)?d|credential|(auth|access|hf|hub|bearer)[-_]?token)",
    re.IGNORECASE,
)
_UNSYNCHRONISED = 5  # adjtimex's TIME_ERROR
_JOB_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    *("PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE"),
)


def launched_group() -> str | None:
    """An id shared by the ranks of one launch only; None for a single process.

    It only serves to find the common run directory. The rank comes from the framework, later.
    """
    if launcher_world_size() < 2:
        return agreed_word("ergmeter/run")  # spawned ranks have no launcher's environment
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    parts = [os.environ.get(name, "") for name in (*names, *_JOB_VARIABLES)]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", ""):
        # One node: the launcher's process distinguishes launches with the same address.
        parts += [str(boot_id()), str(os.getppid()), str(started_s(os.getppid()))]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def new_run_path(name: str, parent: Path = Path("runs"), *, group: str | None = None) -> Path:
    """The default path of a run, such as runs/2026-11-20-train-7f3a."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:40] or "run"
    today = datetime.now(timezone.utc).astimezone().date().isoformat()
    while True:
        path = parent / f"{today}-{slug}-{(group or secrets.token_hex(2))[:4]}"
        if group is not None or not path.exists():
            return path


def run_header(name: str, command: Sequence[str], *, group: str | None = None) -> dict[str, Any]:
    """The header of a run, written once at its creation."""
    return {
        "group": group,
        "id": secrets.token_hex(8),
        "name": name,
        "created": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "command": list(redacted(command)),
        "directory": str(Path.cwd()),
        "ergmeter": __version__,
        "job": {name: os.environ[name] for name in _JOB_VARIABLES if name in os.environ},
    }


def job_of(declared: str | None, header: dict[str, Any]) -> str | None:
    """The id of the job that a run is part of; None if there is none.

    It is the declared one, else the scheduler's, which survives a requeue, else torchrun's.
    """
    if declared:
        return declared
    variables = header.get("job")
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"):
        job_id = variables.get(name) if isinstance(variables, dict) else None
        if job_id and job_id != "none":  # torchrun's id of a launch without a name
            return str(job_id)
    return None


def writer_header(source: str) -> dict[str, Any]:
    """The header of a writer. `source` is "meter", "recorder" (`erg record`) or "import"."""
    host, pid = socket.gethostname(), os.getpid()
    return {
        "writer": f"{host}-{pid}-{secrets.token_hex(4)}",
        "source": source,
        "host": host,
        "boot_id": boot_id(),
        "pid": pid,
        "pid_started_s": started_s(pid),
        "clock": {**clock_pair(), "error_s": clock_error_s()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
    }


def redacted(command: Sequence[str]) -> Iterator[str]:
    """A command line with `***` for values that look like secrets."""
    hide_next = False
    for word in command:
        flag, equals, _ = word.partition("=")
        secret = bool(_SECRET.search(flag))
        if hide_next:
            yield "***"
        elif secret and equals:
            yield f"{flag}=***"
        else:
            yield word
        hide_next = secret and not equals and word.startswith("-") and not hide_next


def clock_pair() -> dict[str, int]:
    """One instant on the monotonic and the wall clock, read as close together as possible."""
    before_ns = time.monotonic_ns()
    wall_ns = time.time_ns()
    after_ns = time.monotonic_ns()
    return {"monotonic_ns": (before_ns + after_ns) // 2, "wall_ns": wall_ns}


class _Timex(ctypes.Structure):
    """The head of Linux's struct timex (adjtimex(2)), and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error_us", ctypes.c_long),
        ("estimated_error_us", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    )


def clock_error_s() -> float | None:
    """The kernel's bound on the wall clock's error; None if unsynchronised or unknown."""
    if sys.platform != "linux":
        return None
    answer = _Timex()  # no modes: nothing is set
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(answer))
    return answer.max_error_us / 1e6 if 0 <= state < _UNSYNCHRONISED else None


def _versions() -> dict[str, str]:
    """Versions of the libraries that are loaded already. Nothing is imported."""
    names = ("torch", "transformers", "lightning", "accelerate", "peft", "jax", "numpy", "pyarrow")
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {name: str(version) for name, version in versions.items() if version is not None}
