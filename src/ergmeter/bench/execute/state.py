"""The state of each cell, in files, so that it does not depend on a living process.

Every cell has a status.json that is replaced as a whole. With status "running" it names the process
by PID, start time and boot, so that another process with that PID is not mistaken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from ergmeter.atomic_write import write_json
from ergmeter.bench.execute.outcome import FINAL, CellOutcome, Status
from ergmeter.bench.plan.cells import Cell, broken_expectations
from ergmeter.errors import FormatError
from ergmeter.runlog.process_group import boot_id, same_process, started_s

ALIVE, CLAIM = "alive", "claim"
_PREFIX = "exp_"
JOB = "job"  # file with the id of a cell's job in a scheduler
BEAT_S = 5.0
# Twelve missed beats: file systems of clusters show a change late, and clocks differ by seconds.
SILENT_S = 60.0
PLAN, CELL, STATUS, RESULTS, DRIVER = (
    *("plan.json", "cell.json", "status.json", "results.json", "driver.json"),
)
SMI_LOG, SMI_NOTE = "gpu_memory_logs.csv", "gpu_memory_logs.json"  # of nvidia-smi, in a cell


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified by pid, start time and boot."""

    pid: int
    started_s: float | None
    boot_id: str | None
    host: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """Describe the process that has this PID now, on this machine."""
        return cls(pid, started_s(pid), boot_id(), socket.gethostname())

    @property
    def is_here(self) -> bool:
        """True if the process runs, or ran, on this machine since the machine's last boot."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    def live(self) -> psutil.Process | None:
        """The process, if it still runs here; None also for one on another machine."""
        if not self.is_here or self.started_s is None:
            return None
        return same_process(self.pid, self.started_s)


@dataclass(frozen=True, slots=True)
class CellState:
    """A cell's status.json. `worker` runs the cell and judges it; `child` is the cell."""

    status: Status = "pending"
    reason: str = ""
    exit_code: int | None = None
    attempts: tuple[Mapping[str, Any], ...] = ()
    claims: tuple[Mapping[str, Any], ...] = ()
    worker: Process | None = None
    child: Process | None = None

    @property
    def is_final(self) -> bool:
        """True if the cell has ended, so that --resume does not run it again."""
        return self.status in FINAL

    def begun(self, worker: Process) -> CellState:
        """Return the state with a new attempt that runs under `worker`."""
        attempt = {
            "started": now(), "ended": None, "status": "running", "exit_code": None,
            "host": worker.host,
        }  # fmt: skip
        return replace(
            self, status="running", reason="", exit_code=None, worker=worker, child=None, claims=(),
            attempts=(*self.attempts, attempt),
        )  # fmt: skip

    def on(self, hosts: Sequence[str]) -> CellState:
        """Return the state with the hosts of the last attempt."""
        return replace(
            self, attempts=(*self.attempts[:-1], {**self.attempts[-1], "hosts": [*hosts]})
        )

    def ended(self, outcome: CellOutcome, *, exit_code: int | None = None) -> CellState:
        """Return the state after this outcome, which also ends the last attempt."""
        attempts = list(self.attempts)
        if attempts and attempts[-1]["ended"] is None:
            attempts[-1] = {
                **attempts[-1],
                "ended": now(),
                "status": outcome.status,
                "exit_code": exit_code,
            }
        return replace(
            self, status=outcome.status, reason=outcome.reason, exit_code=exit_code,
            attempts=tuple(attempts), worker=None, child=None,
        )  # fmt: skip

    @property
    def lasted_s(self) -> float | None:
        """The duration of the last attempt; None while it runs, without one, and for a cell that
        will run again."""
        last = self.attempts[-1] if self.attempts else {}
        if not last.get("ended") or self.status == "pending":
            return None
        start, end = (datetime.fromisoformat(last[name]) for name in ("started", "ended"))
        return (end - start).total_seconds()

    @property
    def lasts_s(self) -> float | None:
        """How long the running attempt has taken so far; None if none runs."""
        if self.status != "running" or not self.attempts:
            return None
        began = datetime.fromisoformat(self.attempts[-1]["started"])
        return max(0.0, (datetime.now(timezone.utc) - began).total_seconds())

    @property
    def broken(self) -> str:
        """The expectations that this cell did not meet, in one line; empty if it met all."""
        return broken_expectations(self.claims)


def now() -> str:
    """This instant, as ISO 8601 in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def directory_of(out: Path, cell: Cell) -> Path:
    """The directory of a cell in the results directory `out`."""
    return out / f"{_PREFIX}{cell.index}"


def read(directory: Path) -> CellState:
    """Read a cell's state from its directory; pending if it has no status.json."""
    path = directory / STATUS
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        for name in ("worker", "child"):
            document[name] = Process(**document[name]) if document.get(name) else None
        for name in ("attempts", "claims"):
            document[name] = tuple(document.get(name, ()))
        return CellState(
            **{name: document[name] for name in CellState.__slots__ if name in document}
        )
    except FileNotFoundError:
        return CellState()
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is not a cell's status: {error}; move it away") from error


def write(directory: Path, state: CellState) -> None:
    """Write a cell's status.json."""
    write_json(directory / STATUS, asdict(state))


def beat(directory: Path) -> None:
    """Touch the cell's `alive` file: other machines can't see the runner's process."""
    (directory / ALIVE).touch()


@contextmanager
def claimed(directory: Path) -> Iterator[bool]:
    """Take the lock of a cell (or results directory); yield False if another process has it.

    It is a file lock, since the kernel releases it however the process ends. On a file system
    without locks this yields True, and only status.json shows who works on the cell.
    """
    with (directory / CLAIM).open("a") as file:
        is_ours = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        except OSError:
            pass
        yield is_ours


def is_worked_on(directory: Path, state: CellState) -> bool:
    """True if a runner works on this cell now, here or on another machine."""
    if state.status != "running" or state.worker is None:
        return False
    if state.worker.is_here:
        return state.worker.live() is not None
    try:
        silent_s = time.time() - (directory / ALIVE).stat().st_mtime
    except OSError:
        return False
    return silent_s < SILENT_S


def cell_directories(out: Path) -> list[Path]:
    """The cells' directories in a results directory, in the order of their numbers."""
    names = [name for name in files_in(out) if name.startswith(_PREFIX)]
    numbered = [(name.removeprefix(_PREFIX), name) for name in names]
    return [out / name for _, name in sorted((int(n), name) for n, name in numbered if n.isdigit())]


def files_in(directory: Path) -> list[str]:
    """The file names in a directory; empty if it can't be read."""
    with suppress(OSError):
        return os.listdir(directory)  # noqa: PTH208  a Path for each takes longer
    return []


def read_cell(directory: Path) -> Cell:
    """Read the cell of a directory. Raises FormatError if its cell.json is damaged."""
    path = directory / CELL
    try:
        return Cell.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} describes no cell: {error}") from error


def states(out: Path) -> Iterator[tuple[Cell, CellState]]:
    """Every cell in a directory of results with its state, read one at a time."""
    for directory in cell_directories(out):
        if (directory / CELL).exists():
            yield read_cell(directory), read(directory)


def at_work(out: Path) -> set[int]:
    """The pids on this machine of cells that run in this directory."""
    pids: set[int] = set()
    for _, state in states(out):
        process = state.worker.live() if state.status == "running" and state.worker else None
        if process is not None:
            with suppress(psutil.Error):
                pids |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    return pids
