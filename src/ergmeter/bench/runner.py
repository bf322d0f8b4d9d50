"""Runs one cell, judges its end and keeps everything: `python -m ergmeter.bench.runner EXP_DIR`.

The trap: the driver as the only one who knows. This process belongs to one cell, on whatever
machine, and outlives the driver: if that is killed, the cell ends as if nothing had happened. If
this process is killed as well, the next one finds what it left, ends what still runs of it and
puts its output aside (attempt_1, ...); nothing is overwritten.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import pyarrow as pa

from ergmeter.bench import claims, launching, state
from ergmeter.bench.cells import Cell
from ergmeter.bench.outcome import Outcome, outcome
from ergmeter.bench.state import CELL, RESULTS, Process, State, write_json
from ergmeter.errors import ErgmeterError
from ergmeter.importers.dicts import items_of, kind_of
from ergmeter.runlog.reader import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

STDOUT, STDERR = "stdout", "stderr"
# Of a command's output, what is read to judge its end: a rank's message may have much behind it.
TAIL_BYTES = 4 << 20
# From SIGTERM to SIGKILL: `erg train` finishes its step and saves what it has.
GRACE_S = 20.0
_ROWS = 100_000
_OUTPUTS = (STDOUT, STDERR, "run", "hf", RESULTS, "gpu_memory_logs.csv")


class _Cancelled(BaseException):
    """A signal asked for the end."""


class Runner:
    """One attempt at one cell. Owns the cell's process and its status.json."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._cell = Cell.from_json(json.loads((directory / CELL).read_text(encoding="utf-8")))
        self._state = state.read(directory)

    def run(self) -> State:
        """Run the cell to its end, unless it has had one or another is at it. What it came to."""
        with state.claimed(self._directory) as is_ours:
            self._state = state.read(self._directory)  # another may have ended it meanwhile
            if not is_ours:
                sys.stderr.write(f"{self._directory}: another runner is at this cell\n")
            elif not self._state.is_final:
                return self._attempt()
        return self._state

    def _attempt(self) -> State:
        end_leftover(self._state)
        self._put_aside()
        self._keep(self._state.begun(Process.of(os.getpid())))
        kills = kernel_kills()
        exit_code: int | None = None
        cancelled = ""
        timed_out_s = None
        try:
            exit_code = self._execute()
        except subprocess.TimeoutExpired as late:
            timed_out_s = late.timeout
        except _Cancelled as asked:
            cancelled = f"it was ended by {asked}"
        except (OSError, ErgmeterError) as error:
            return self._end(Outcome("error", f"it could not be started: {error}"), None)
        now = kernel_kills()
        found = self._judged(
            exit_code,
            timed_out_s=timed_out_s,
            cancelled=cancelled,
            kernel_kills=None if now is None or kills is None else now - kills,
        )
        return self._end(found, exit_code)

    def _execute(self) -> int:
        """Start the command and wait for it. Raises what cut it short, once it is gone."""
        cell, directory = self._cell, self._directory
        (directory / "hf").mkdir(exist_ok=True)
        how = launching.start(cell, directory, has_gpus=bool(launching.gpus_here()))
        for name, text in how.files.items():
            (directory / name).write_text(text, encoding="utf-8")
        write_json(directory / "environment.json", launching.told(how))
        script = launching.script(how, where=Path.cwd())
        (directory / "command.sh").write_text(script, encoding="utf-8")
        with (directory / STDOUT).open("wb") as out, (directory / STDERR).open("wb") as err:
            child = subprocess.Popen(
                how.words, env=how.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            try:
                self._keep(replace(self._state, child=Process.of(child.pid)))
                return self._wait(child)
            finally:
                _hold_signals()
                end(child.pid)
                child.wait()

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        limit_s = math.inf if self._cell.timeout_s is None else self._cell.timeout_s
        began_s = time.monotonic()
        while True:
            state.beat(self._directory)
            left_s = limit_s - (time.monotonic() - began_s)
            try:
                return child.wait(max(0.0, min(left_s, state.BEAT_S)))
            except subprocess.TimeoutExpired:
                if left_s <= state.BEAT_S:
                    raise subprocess.TimeoutExpired(child.args, limit_s) from None

    def _judged(self, exit_code: int | None, **how: Any) -> Outcome:  # noqa: ANN401  `outcome`'s
        outputs = [self._directory / name for name in (STDOUT, STDERR)]
        stdout, stderr = map(_tail, outputs)
        trainer = _trainer(stdout, stderr)
        run = _opened(self._directory / "run")
        found = outcome(
            exit_code,
            signal=-exit_code if exit_code is not None and exit_code < 0 else None,
            stdout=stdout,
            stderr=stderr,
            loss=_last_loss(run, trainer),
            **how,
        )
        workload = run.workload if run is not None else {}
        # What failed may not have come as far as what is stated of it.
        stated = self._cell.expects if found.status == "ok" else ()
        held = claims.check(stated, outputs=outputs, workload=workload)
        self._state = replace(self._state, claims=tuple(one.to_json() for one in held))
        self._write_results(found, trainer)
        return found

    def _write_results(self, found: Outcome, trainer: Mapping[str, float]) -> None:
        """Flat, as FMS has it: arguments as text, and what transformers printed at the end."""
        cell = self._cell
        arguments = {k: "" if v is None else str(v) for k, v in cell.settings.items()}
        ours = {
            "num_gpus": cell.num_gpus, "nodes": cell.nodes, "repeat": cell.repeat,
            "scenario": cell.scenario, "status": found.status,
        }  # fmt: skip
        failed = {"error_messages": [found.reason]} if found.reason else {}
        whole = {**arguments, **trainer, **ours, **failed}
        write_json(
            self._directory / RESULTS, {k: _plain(v) for k, v in sorted(whole.items())}, indent=4
        )

    def _put_aside(self) -> None:
        """What an attempt before this one left goes into a directory of its own."""
        gone = Outcome("cancelled", "its process was gone before it ended")
        self._state = self._state.ended(gone)  # if its last attempt had not
        there = [self._directory / name for name in _OUTPUTS]
        there = [path for path in there if path.exists()]
        if not there:
            return
        numbers = (n for n in range(1, 10_000) if not (self._directory / f"attempt_{n}").exists())
        aside = self._directory / f"attempt_{next(numbers)}"
        aside.mkdir()
        for path in there:
            path.rename(aside / path.name)

    def _keep(self, now: State) -> None:
        state.write(self._directory, now)
        self._state = now

    def _end(self, found: Outcome, exit_code: int | None) -> State:
        self._keep(self._state.ended(found, exit_code=exit_code))
        return self._state


def end_leftover(left: State) -> None:
    """End what an attempt left running whose runner is gone."""
    if left.child is not None and left.child.found() is not None:
        end(left.child.pid)


def end(pid: int) -> None:
    """End a process that leads a group, all of its group and all that they started.

    torchrun gives each rank a group of its own, so the group alone is not enough.
    """
    started = _family(pid)
    _signal(pid, started, signal.SIGTERM)
    alive = _still_there(started, GRACE_S)
    if alive:
        _signal(
            pid, [*alive, *(more for one in alive for more in _family(one.pid))], signal.SIGKILL
        )
        _still_there(alive, GRACE_S)


def _still_there(processes: list[psutil.Process], wait_s: float) -> list[psutil.Process]:
    """Wait for these to end. A zombie has: its parent, who may be gone, has just not asked."""
    until_s = time.monotonic() + wait_s
    left = processes
    while True:
        left = [one for one in left if _is_alive(one)]
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(0.05)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _family(pid: int) -> list[psutil.Process]:
    """The members of its group and their descendants, and it."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
    return list(found.values())


def _signal(pid: int, processes: list[psutil.Process], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    for process in processes:
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) != pid:
                process.send_signal(number)


def kernel_kills() -> int | None:
    """How many processes the kernel killed for lack of memory so far; None where it won't say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _trainer(*texts: str) -> dict[str, float]:
    """What transformers' Trainer printed at its end, the last of it; nan and inf are numbers."""
    found: dict[str, float] = {}
    for line in (line for text in texts for line in text.splitlines() if "train_runtime" in line):
        items = items_of(line.replace('"', "'"))
        if kind_of(items) == "final":
            found = dict(_numbers(items))
    return found


def _numbers(items: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for name, text in items.items():
        with suppress(ValueError):
            yield name, float(text)


def _opened(path: Path) -> Run | None:
    try:
        return Run.open(path)
    except (ErgmeterError, OSError):
        return None


def _last_loss(run: Run | None, trainer: Mapping[str, float]) -> float | None:
    """The loss that was told last, of any rank: one that became nan stays so."""
    found = [trainer["train_loss"]] if "train_loss" in trainer else []
    if run is not None:
        with suppress(ErgmeterError, OSError):
            found += _last_losses(run)
    broken = [loss for loss in found if not math.isfinite(loss)]
    return next(iter(broken or found), None)


def _last_losses(run: Run) -> list[float]:
    """Of each writer. Not by `Run.steps`, in which nan also stands for a loss that is absent.

    transformers leaves losses that are nan out of the mean it logs, and so logs 0 where all are;
    the norm of the gradient it logs as it is.
    """
    steps = run.table("steps")
    if not {"loss", "writer"} <= set(steps.column_names):
        return []
    if "grad_norm" not in steps.column_names:
        steps = steps.append_column("grad_norm", pa.nulls(steps.num_rows))
    last: dict[str, float] = {}
    for start in range(0, steps.num_rows, _ROWS):
        rows = steps.slice(start, _ROWS)
        columns = (rows[name].to_pylist() for name in ("writer", "loss", "grad_norm"))
        for writer, loss, norm in zip(*columns, strict=True):
            if loss is not None:
                is_hidden = loss == 0.0 and norm is not None and not math.isfinite(norm)
                last[writer] = math.nan if is_hidden else loss
    return list(last.values())


def _plain(value: object) -> object:
    """JSON has no nan and no inf: as text."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _hold_signals() -> None:
    """From here on the end is under way, and is not to be ended itself."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):  # not the main thread: it has no handlers
            signal.signal(number, signal.SIG_IGN)


def _cancel(number: int, _frame: FrameType | None) -> NoReturn:
    raise _Cancelled(signal.Signals(number).name)


def main(arguments: list[str]) -> int:
    """Run the cell of a directory, in the directory that the bench was started in."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _cancel)
    Runner(Path(arguments[0])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
