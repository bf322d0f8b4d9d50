"""What has become of each cell? Kept in files, so that no process need live to know it.

The trap: a driver that holds the state. It is killed, the machine restarts, and either everything
runs again or a cell that nobody works on is "running" for ever. Here every cell has a status.json
that is replaced whole (never half written), and one that says "running" names the process at it:
by number, start time and boot, so that another process with that number is not taken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil

from ergmeter.bench.cells import Cell, Plan
from ergmeter.bench.outcome import FINAL, Outcome, Status
from ergmeter.errors import FormatError, UsageError
from ergmeter.runlog.liveness import boot_id, started_s

ALIVE, CLAIM = "alive", "claim"
JOB = "job"  # of a scheduler, kept beside its cell
BEAT_S = 5.0
# Twelve missed beats: file systems of clusters show a change late, and clocks differ by seconds.
SILENT_S = 60.0
PLAN, CELL, STATUS, RESULTS, DRIVER = (
    *("plan.json", "cell.json", "status.json", "results.json", "driver.json"),
)


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can be told from a later one with its number."""

    pid: int
    started_s: float | None
    boot_id: str | None
    host: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process with that number, now, on this machine."""
        return cls(pid, started_s(pid), boot_id(), socket.gethostname())

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine since its last start."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    def found(self) -> psutil.Process | None:
        """The process, if it is still there; None on another machine, which can't be asked."""
        if not self.is_here or self.started_s is None:
            return None
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started_s) < 1.0
            is_same = is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return None
        return process if is_same else None


@dataclass(frozen=True, slots=True)
class State:
    """What a cell's status.json says. `worker` runs the cell and judges it; `child` is the cell."""

    status: Status = "pending"
    reason: str = ""
    exit_code: int | None = None
    attempts: tuple[Mapping[str, Any], ...] = ()
    claims: tuple[Mapping[str, Any], ...] = ()
    worker: Process | None = None
    child: Process | None = None

    @property
    def is_final(self) -> bool:
        """Whether a resumed bench leaves it alone."""
        return self.status in FINAL

    def begun(self, worker: Process) -> State:
        """Under way, once more."""
        attempt = {
            "started": now(), "ended": None, "status": "running", "exit_code": None,
            "host": worker.host,
        }  # fmt: skip
        return replace(
            self, status="running", reason="", exit_code=None, worker=worker, child=None, claims=(),
            attempts=(*self.attempts, attempt),
        )  # fmt: skip

    def on(self, hosts: Sequence[str]) -> State:
        """The same, with the machines that the last attempt is on."""
        return replace(
            self, attempts=(*self.attempts[:-1], {**self.attempts[-1], "hosts": [*hosts]})
        )

    def ended(self, outcome: Outcome, *, exit_code: int | None = None) -> State:
        """At its end, the last attempt with it."""
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
        """How long the last attempt took; None while it lasts, or where there was none."""
        last = self.attempts[-1] if self.attempts else {}
        if not last.get("ended"):
            return None
        start, end = (datetime.fromisoformat(last[name]) for name in ("started", "ended"))
        return (end - start).total_seconds()


def now() -> str:
    """This instant, as ISO 8601 in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def directory_of(out: Path, cell: Cell) -> Path:
    """Where all of a cell is kept."""
    return out / f"exp_{cell.index}"


def write_json(path: Path, value: object, *, indent: int | None = 1) -> None:
    """Replace a file whole: a reader sees the old one or the new one."""
    text = json.dumps(value, indent=indent, allow_nan=False) + "\n"
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read(directory: Path) -> State:
    """What is known of the cell there; pending if nothing is."""
    path = directory / STATUS
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        for name in ("worker", "child"):
            said[name] = Process(**said[name]) if said.get(name) else None
        for name in ("attempts", "claims"):
            said[name] = tuple(said.get(name, ()))
        return State(**{name: said[name] for name in State.__slots__ if name in said})
    except FileNotFoundError:
        return State()
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is no status of a cell: {error}; move it away") from error


def write(directory: Path, state: State) -> None:
    """Keep it."""
    write_json(directory / STATUS, asdict(state))


def beat(directory: Path) -> None:
    """Say that a runner is at work here: its process can't be looked up from another machine."""
    (directory / ALIVE).touch()


@contextmanager
def claimed(directory: Path) -> Iterator[bool]:
    """Be the one runner of this cell; False if another is.

    A lock and no file that is there or not: it goes with its process, however that ends. Where a
    file system has no locks there is none, and status.json alone says who is at work.
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


def is_worked_on(directory: Path, state: State) -> bool:
    """Whether a runner is at this cell now, here or on another machine."""
    if state.status != "running" or state.worker is None:
        return False
    if state.worker.is_here:
        return state.worker.found() is not None
    try:
        silent_s = time.time() - (directory / ALIVE).stat().st_mtime
    except OSError:
        return False
    return silent_s < SILENT_S


def states(out: Path, plan: Plan) -> Iterator[tuple[Cell, State]]:
    """Every cell of a plan with its state."""
    for cell in plan.cells:
        yield cell, read(directory_of(out, cell))


def at_work(out: Path) -> set[int]:
    """The processes on this machine of cells that run there, whoever started them."""
    found: set[int] = set()
    if not (out / PLAN).exists():
        return found
    for _, state in states(out, Plan.read(out / PLAN)):
        process = state.worker.found() if state.status == "running" and state.worker else None
        if process is not None:
            with suppress(psutil.Error):
                found |= {process.pid, *(one.pid for one in process.children(recursive=True))}
    return found


@dataclass(frozen=True, slots=True)
class Opening:
    """What to do with a directory that is there already, and what to write into a new one."""

    resume: bool = False
    move_aside: bool = False
    script: Mapping[str, Any] = field(default_factory=dict)


def opened(out: Path, plan: Plan, opening: Opening) -> Plan:
    """Make the directory, or take it up again. The plan to run, with the indices it has there.

    Nothing in it is ever deleted. Taken up, its own plan holds, of which the one that is given
    must be all or a part: otherwise one directory would hold the results of two questions.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out names a directory")
    if out.is_dir() and any(out.iterdir()):
        if opening.move_aside:
            _check_undriven(out)
            _check_at_rest(out)
            _move_aside(out)
        elif not opening.resume:
            raise UsageError(
                f"{out} is not empty: --resume goes on with it, --move-aside keeps it under"
                " another name and starts anew; results are never deleted"
            )
        elif (out / PLAN).exists():
            return _taken_up(out, plan)
        elif any(out.glob("exp_*")) or not _is_ours(out):
            raise UsageError(f"{out} has no {PLAN}, so it can't be resumed; --move-aside keeps it")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "script.json", dict(opening.script), indent=4)
    (out / "requirements.txt").write_text(_installed(), encoding="utf-8")
    write_json(out / PLAN, plan.to_json(), indent=None)
    return plan


def _is_ours(out: Path) -> bool:
    """Whether nothing is there but what we write before the plan."""
    names = {"script.json", "requirements.txt"}
    return all(path.name in names or path.name.startswith(".") for path in out.iterdir())


def _taken_up(out: Path, plan: Plan) -> Plan:
    """The cells of this plan as they are there. New ones (more repeats) are added to what is kept,
    if their numbers are free."""
    kept = Plan.read(out / PLAN)
    # Scenarios that differ in a key alone have cells with one id.
    there = {(cell.scenario, cell.id): cell for cell in kept.cells}
    used = {cell.index for cell in kept.cells}
    added = tuple(cell for cell in plan.cells if (cell.scenario, cell.id) not in there)
    clash = next((cell for cell in added if cell.index in used), None)
    if clash is not None:
        raise UsageError(
            f"{len(added)} of {len(plan.cells)} cells are not in the plan of {out} (the first:"
            f" {clash.scenario}, {clash.id}): the scenarios or options changed since;"
            " --move-aside keeps what is there and starts anew"
        )
    if added:
        whole = Plan(source=kept.source, cells=(*kept.cells, *added), settings=kept.settings)
        write_json(out / PLAN, whole.to_json(), indent=None)
    cells = tuple(there.get((cell.scenario, cell.id), cell) for cell in plan.cells)
    return Plan(source=kept.source, cells=cells, settings=plan.settings)


def _check_at_rest(out: Path) -> None:
    """A cell that runs holds its paths: it would go on writing into what takes their place.

    So would one that waits in a scheduler's queue, which is known by the job beside it.
    """
    if not (out / PLAN).exists():
        return
    jobs: dict[Path, str] = {}
    for cell, state in states(out, Plan.read(out / PLAN)):
        directory = directory_of(out, cell)
        if is_worked_on(directory, state):
            raise UsageError(
                f"{directory.name} of {out} is running; wait for it or end it, then move it aside"
            )
        if not state.is_final and (directory / JOB).exists():
            jobs[directory] = (directory / JOB).read_text(encoding="utf-8").strip()
    queued = _queued() if jobs else ""
    for directory, job in jobs.items():
        # An id, or where none is known yet the name of its array and a place in it.
        if queued is None or not {*job.split()[:1]} - {*queued.split()}:
            raise UsageError(
                f"{directory.name}'s job {job} may be queued: --resume goes on with it; or scancel"
                " it, then move it aside"
                + (f" (squeue can't be asked: remove {directory / JOB})" if queued is None else "")
            )


def _queued() -> str | None:
    """Our jobs in SLURM's queue, by id and name; None where it can't be asked."""
    words = ("squeue", "--me", "--noheader", "--array", "--format=%i %j")
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout


def _move_aside(out: Path) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    aside = out.with_name(f"{out.name}-{stamp}-{secrets.token_hex(2)}")
    out.rename(aside)
    return aside


def _installed() -> str:
    """What `pip freeze` would say of this environment, near enough to make it again."""
    found = {(one.name or "").lower(): one for one in distributions() if one.name}
    lines = sorted(f"{one.name}=={one.version}" for one in found.values())
    return "\n".join(lines) + "\n"


def claim_driver(out: Path) -> None:
    """Be the one driver of this directory. Two would run every cell twice."""
    _check_undriven(out)
    write_json(out / DRIVER, asdict(Process.of(os.getpid())))


def _check_undriven(out: Path) -> None:
    try:
        said = json.loads((out / DRIVER).read_text(encoding="utf-8"))
        other = Process(**said)
    except (OSError, ValueError, TypeError):
        other = None
    if other is not None and other.pid != os.getpid() and other.found() is not None:
        raise UsageError(f"process {other.pid} is running {out} already; wait for it, or end it")
