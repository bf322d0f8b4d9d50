"""A cell's process on one machine: starts it with its output stored, ends it with its children.

torchrun gives each rank its own process group, and a leftover rank holds its GPU during the next
cell. If torchrun itself is killed, its ranks are orphans; the kernel makes them the runner's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from ergmeter.atomic_write import read_json, write_json
from ergmeter.bench.execute import launching, nvidia_smi_logger
from ergmeter.bench.execute.state import Process

STDOUT, STDERR = "stdout", "stderr"
# From SIGTERM to SIGKILL: `erg train` finishes its step and saves what it has.
GRACE_S = 20.0
# A signal for all of a job may end the cell's process a moment before it reaches its runner.
SETTLE_S = 0.5
# SIGUSR2 is what submitit has SLURM send before a job's time is up or it is preempted.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# Set by launchers that kill runners with themselves, as Ray does: the cell then ends too.
ENDS_WITH_RUNNER = "ERGMETER_CELL_ENDS_WITH_RUNNER"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


class Cancelled(BaseException):
    """The cell must end: by a signal, or by the state of another node. The text says why."""


def cancel_on_signals() -> None:
    """From here on, the signals in SIGNALS raise Cancelled."""

    def cancel(number: int, _frame: FrameType | None) -> NoReturn:
        raise Cancelled(signal.Signals(number).name)

    for number in SIGNALS:
        signal.signal(number, cancel)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def runner_log(directory: Path, number: int = 0) -> Path:
    """The file with the output of a node's runner."""
    return directory / (f"runner.node{number}.log" if number else "runner.log")


def hold_signals() -> None:
    """From here on, ignore the signals in SIGNALS: ending the cell must not be interrupted."""
    for number in SIGNALS:
        with suppress(ValueError):  # not the main thread: it has no handlers
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def begun(
    how: launching.Start, directory: Path, *, suffix: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a cell's process on this machine; at the block's end, end it and all it has started.

    `suffix` is added to the names of this node's files: stdout.node1, command.node1.sh.
    """
    write_json(directory / f"environment{suffix}.json", launching.launch_environment(how))
    script = launching.script(how, where=Path.cwd())
    (directory / f"command{suffix}.sh").write_text(script, encoding="utf-8")
    out_path, err_path = (directory / f"{name}{suffix}" for name in (STDOUT, STDERR))
    with (
        nvidia_smi_logger.logged(directory, environment=how.environment, suffix=suffix),
        out_path.open("wb") as out,
        err_path.open("wb") as err,
    ):
        others = psutil.Process().children()  # nvidia-smi, which ends by itself
        is_bound = bool(os.environ.get(ENDS_WITH_RUNNER))
        bound_to_runner = nvidia_smi_logger.ends_with_parent() if is_bound else None
        child = subprocess.Popen(
            how.words, env=how.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True, preexec_fn=bound_to_runner,
        )  # fmt: skip
        try:
            yield child
        finally:
            hold_signals()
            end(child.pid)
            child.wait()
            if _adopts():
                _end_orphans(others)


def exit_code(child: subprocess.Popen[bytes], wait_s: float) -> int | None:
    """The exit code of a process; None if it does not end within `wait_s`."""
    try:
        return child.wait(max(0.0, wait_s))
    except subprocess.TimeoutExpired:
        return None


def end_leftover(left: Process | None) -> None:
    """End a process that an attempt left running after its runner was gone."""
    if left is not None and left.live() is not None:
        end(left.pid)


def end_leftovers(directory: Path) -> None:
    """End processes on this machine that earlier attempts left as nodes other than the first.

    This machine may have had another node number then. Call it only before the nodes have met:
    later the files are those of this attempt.
    """
    for path in sorted(directory.glob("started.node*.json")):
        with suppress(OSError, TypeError):
            end_leftover(Process(**read_json(path)))


def end(pid: int) -> None:
    """End the process group that `pid` leads, and all processes that its members started.

    torchrun gives each rank a group of its own, so the group alone is not enough.
    """
    left = _signalled(_family(pid), signal.SIGTERM)
    if left:
        started = [child for process in left for child in _family(process.pid)]
        _signalled([*left, *started], signal.SIGKILL)


def _adopts() -> bool:
    """True if this process adopts orphans; else its children may not belong to the cell."""
    if not sys.platform.startswith("linux"):
        return False
    answer = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def _end_orphans(others: list[psutil.Process]) -> None:
    """End all our descendants, except `others` and their descendants."""
    spared = set(others)
    for process in others:
        with suppress(psutil.Error):
            spared |= set(process.children(recursive=True))
    left = [child for child in psutil.Process().children(recursive=True) if child not in spared]
    _signalled(_signalled(left, signal.SIGTERM), signal.SIGKILL)


def _signalled(processes: Iterable[psutil.Process], number: signal.Signals) -> list[psutil.Process]:
    """Signal processes and wait for their end. Returns those that still run after GRACE_S.

    A zombie counts as ended.
    """
    left = [process for process in processes if _is_alive(process)]
    for process in left:
        with suppress(psutil.Error):
            process.send_signal(number)
    until_s = time.monotonic() + GRACE_S
    while left and time.monotonic() < until_s:
        time.sleep(0.05)
        left = [process for process in left if _is_alive(process)]
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _family(pid: int) -> list[psutil.Process]:
    """The members of the process group `pid`, and their descendants."""
    family: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                family[process.pid] = process
                family |= {child.pid: child for child in process.children(recursive=True)}
    return list(family.values())


def kernel_kills() -> int | None:
    """Processes that the kernel killed for lack of memory so far; None if unknown."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        counts = {name: value for name, _, value in (line.partition(" ") for line in lines)}
        return int(counts["oom_kill"])
    return None


def kills_since(before: int | None) -> int | None:
    """By how much `kernel_kills` has risen since `before`; None if unknown."""
    now = kernel_kills()
    return None if now is None or before is None else now - before
