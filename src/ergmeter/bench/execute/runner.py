"""Runs one cell: starts it (`process`), judges how it ended (`outcome`), stores the result.

    python -m ergmeter.bench.execute.runner EXP_DIR

This process belongs to one cell and outlives the driver: if that is killed, the cell still ends
normally. If this process is killed too, the next attempt ends what still runs and moves its output
aside (attempt_1, ...). A cell whose directory is moved or deleted while it runs is ended.

For a cell on several nodes this process runs on the first node and alone writes the status; the
others run `ergmeter.bench.execute.node_worker`. `--meeting` is the token of their launch.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ergmeter.atomic_write import json_number, write_json
from ergmeter.bench import results
from ergmeter.bench.execute import launching, outcome, process, state
from ergmeter.bench.execute.node_worker import Rendezvous, call_off
from ergmeter.bench.execute.outcome import CellOutcome, ParsedOutput
from ergmeter.bench.execute.process import STDERR, STDOUT, Cancelled
from ergmeter.bench.execute.state import RESULTS, SMI_LOG, SMI_NOTE, CellState, Process
from ergmeter.bench.tables import number
from ergmeter.errors import ErgmeterError
from ergmeter.importers.hf_trainer import items_of, kind_of
from ergmeter.runlog.reader import Run

# How much of the end of an output is read to judge it: much may follow a rank's error.
TAIL_BYTES = 4 << 20
_ROWS = 100_000


def output_tail(path: Path) -> str:
    """Return the last 4 MiB of a file as text; empty if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def trainer_figures(*texts: str) -> dict[str, float]:
    """The last final metrics that transformers' Trainer printed; nan and inf are numbers."""
    figures: dict[str, float] = {}
    for line in (line for text in texts for line in text.splitlines() if "train_runtime" in line):
        items = items_of(line.replace('"', "'"))
        if kind_of(items) == "final":
            numbers = ((name, number(text)) for name, text in items.items())
            figures = {name: value for name, value in numbers if value is not None}
    return figures


def killed_by(run: Run | None, exit_code: int | None) -> int | None:
    """SIGKILL, if `erg record` saw its command end by it and then ended with exit code 137."""
    is_killed = run is not None and run.status == f"killed by {signal.SIGKILL.name}"
    return signal.SIGKILL if is_killed and exit_code == outcome.KILLED else None


def last_loss(run: Run | None, trainer: Mapping[str, float]) -> float | None:
    """The last loss of any rank; one that became nan stays nan."""
    losses = [trainer["train_loss"]] if "train_loss" in trainer else []
    if run is not None:
        with suppress(ErgmeterError, OSError):
            losses += _last_losses(run)
    broken = [loss for loss in losses if not math.isfinite(loss)]
    return next(iter(broken or losses), None)


def _last_losses(run: Run) -> list[float]:
    """The last loss of each writer, from the table: in `Run.steps` nan also means an absent loss.

    transformers leaves nan out of the mean loss it logs, and logs 0 if all losses are nan. So a
    loss of 0 with a gradient norm that is nan or infinite counts as nan.
    """
    steps = run.to_arrow()
    names = [name for name in ("writer", "loss", "grad_norm") if name in steps.column_names]
    last: dict[str, float] = {}
    for batch in steps.select(names).to_batches(max_chunksize=_ROWS):
        for step in batch.to_pylist():
            loss, norm = step.get("loss"), step.get("grad_norm")
            if loss is not None:
                is_hidden = loss == 0.0 and norm is not None and not math.isfinite(norm)
                last[step.get("writer", "")] = math.nan if is_hidden else loss
    return list(last.values())


_OUTPUTS = (STDOUT, STDERR, "run", "hf", RESULTS, SMI_LOG, SMI_NOTE)
_OF_NODES = ("stdout.node*", "stderr.node*", "gpu_memory_logs.node*")
_LOOK_S = 0.5  # how soon another node's end is seen
# Once a node has failed, the others have this long to report their ends.
_FOLLOW_S = 10.0


class Runner:
    """One attempt at one cell. Owns the cell's process and its status.json."""

    def __init__(self, directory: Path, *, token: str = "") -> None:
        self._directory = directory
        self._cell = state.read_cell(directory)
        self._state = state.read(self._directory)
        self._token = token
        self._beaten_s = -math.inf
        self._failed: dict[int, int] = {}  # exit codes by node, in the order in which they came

    def run(self) -> CellState:
        """Run the cell, unless it has ended or another runner works on it. Returns its state."""
        with state.claimed(self._directory) as is_ours:
            self._state = state.read(self._directory)  # another may have ended it meanwhile
            if not is_ours:
                sys.stderr.write(f"{self._directory}: another runner works on this cell\n")
            elif not self._state.is_final:
                return self._attempt()
        if self._token:
            call_off(self._directory, token=self._token)
        return self._state

    def _attempt(self) -> CellState:
        process.end_leftover(self._state.child)
        process.end_leftovers(self._directory)
        self._put_aside()
        self._keep(self._state.begun(Process.of(os.getpid())))
        kills = process.kernel_kills()
        exit_code: int | None = None
        meeting = None
        ways: dict[str, Any] = {}
        try:
            meeting = self._meeting() if self._cell.nodes > 1 else None
            with closing(meeting) if meeting else nullcontext():
                exit_code = self._execute(meeting)
        except subprocess.TimeoutExpired as late:
            ways["timed_out_s"] = late.timeout
        except Cancelled as asked:
            ways["cancelled"] = f"it was ended by {asked}"
        except (OSError, ErgmeterError) as error:
            if self._state.child is None:
                return self._end(CellOutcome("error", f"it could not be started: {error}"), None)
            ways["broken"] = str(error)
        killed = [process.kills_since(kills), *(meeting.kills() if meeting else ())]
        kill_counts = [count for count in killed if count is not None]
        ways["kernel_kills"] = sum(kill_counts) if len(kill_counts) == len(killed) else None
        return self._end(self._judged(exit_code, **ways), exit_code)

    def _meeting(self) -> Rendezvous:
        launching.check_nodes(self._cell)
        if not self._token:
            raise OSError(f"a cell on {self._cell.nodes} nodes needs --launcher slurm or ray")
        return Rendezvous(self._directory, token=self._token, nodes=self._cell.nodes)

    def _execute(self, meeting: Rendezvous | None) -> int:
        """Run the command to its end; return the exit code. If interrupted, end it and raise."""
        cell, directory = self._cell, self._directory
        (directory / "hf").mkdir(exist_ok=True)
        node = launching.NodeOfCell(0, 1)
        if meeting:
            node = meeting.gathered(self._beat)
            self._keep(self._state.on(meeting.hosts))
        how = launching.start(cell, directory, has_gpus=bool(launching.gpus_here()), node=node)
        for name, text in how.files.items():
            (directory / name).write_text(text, encoding="utf-8")
        if meeting:
            meeting.begin(node)
        with process.begun(how, directory, suffix=node.suffix) as child:
            self._keep(replace(self._state, child=Process.of(child.pid)))
            return self._wait(child, meeting)

    def _wait(self, child: subprocess.Popen[bytes], meeting: Rendezvous | None) -> int:
        """Wait for all nodes; return 0, or the exit code of the node that failed first.

        Raises TimeoutExpired at the cell's limit. Which of two nodes failed first is unknown if
        both did between two checks; a killed node reports nothing.
        """
        limit_s = math.inf if self._cell.timeout_s is None else self._cell.timeout_s
        began_s = time.monotonic()
        failed_s = math.inf
        while True:
            self._beat()
            left_s = limit_s - (time.monotonic() - began_s)
            own = process.exit_code(child, min(left_s, _LOOK_S))
            codes = [own, *(meeting.codes() if meeting else ())]
            self._failed |= {node: code for node, code in enumerate(codes) if code}
            failed_s = min(failed_s, time.monotonic()) if self._failed else math.inf
            if self._failed and (None not in codes or time.monotonic() - failed_s > _FOLLOW_S):
                time.sleep(process.SETTLE_S)
                return self._failed[self._by_failure()[0]]
            if None not in codes:
                return 0
            if left_s <= 0:
                raise subprocess.TimeoutExpired(child.args, limit_s)
            if own is not None:
                time.sleep(_LOOK_S)

    def _by_failure(self) -> list[int]:
        """The node numbers: killed ones, then failed ones in order of failure, then others."""
        killed = [node for node, code in self._failed.items() if code < 0 or code == outcome.KILLED]
        return list(dict.fromkeys([*killed, *self._failed, *range(self._cell.nodes)]))

    def _beat(self) -> None:
        if time.monotonic() - self._beaten_s > state.BEAT_S / 2:
            state.beat(self._directory)
            self._beaten_s = time.monotonic()

    def _judged(self, exit_code: int | None, **how: Any) -> CellOutcome:  # noqa: ANN401  `outcome`'s
        suffixes = [
            launching.NodeOfCell(n, self._cell.nodes).suffix for n in range(self._cell.nodes)
        ]
        outputs = [
            self._directory / f"{name}{suffix}" for name in (STDOUT, STDERR) for suffix in suffixes
        ]
        tails = [output_tail(path) for path in outputs]
        trainer = trainer_figures(*tails)
        texts = list(zip(tails[: len(suffixes)], tails[len(suffixes) :], strict=True))
        # Nodes that have not ended get an exit code too: they did not fail by themselves.
        others = 1 if self._failed else exit_code
        nodes = [
            ParsedOutput(*texts[node], self._failed.get(node, others))
            for node in self._by_failure()
        ]
        node_output = outcome.telling(nodes)
        run = None
        with suppress(ErgmeterError, OSError):
            run = Run.open(self._directory / "run")
        recorded_signal = killed_by(run, node_output.exit_code)
        node_output = replace(node_output, recorded_signal=recorded_signal)
        ending = outcome.outcome(node_output, loss=last_loss(run, trainer), **how)
        workload = run.workload if run is not None else {}
        # A failed cell may have ended before it could meet its expectations.
        stated = self._cell.expects if ending.status == "ok" else ()
        checked = outcome.check_expectations(stated, outputs=outputs, workload=workload)
        self._state = replace(self._state, claims=tuple(checked))
        self._write_results(ending, trainer)
        return ending

    def _write_results(self, ending: CellOutcome, trainer: Mapping[str, float]) -> None:
        """Write results.json, flat as in FMS: arguments as text, transformers' final metrics."""
        cell = self._cell
        arguments = {k: "" if v is None else str(v) for k, v in cell.settings.items()}
        ours = {
            "num_gpus": cell.num_gpus, "nodes": cell.nodes, "repeat": cell.repeat,
            "scenario": cell.scenario, "status": ending.status,
        }  # fmt: skip
        failed = {"error_messages": [ending.reason]} if ending.reason else {}
        merged = {**arguments, **trainer, **ours, **failed}
        document = {k: json_number(v) for k, v in sorted(merged.items())}
        write_json(self._directory / RESULTS, document, indent=4)

    def _put_aside(self) -> None:
        """Move what an earlier attempt left into a directory attempt_N."""
        gone = CellOutcome("cancelled", "its process was gone before it ended")
        self._state = self._state.ended(gone)  # if its last attempt had not
        there = [self._directory / name for name in _OUTPUTS]
        there = [path for path in there if path.exists()]
        there += [path for pattern in _OF_NODES for path in self._directory.glob(pattern)]
        if not there:
            return
        numbers = (n for n in range(1, 10_000) if not (self._directory / f"attempt_{n}").exists())
        aside = self._directory / f"attempt_{next(numbers)}"
        aside.mkdir()
        for path in there:
            path.rename(aside / path.name)

    def _keep(self, now: CellState) -> None:
        state.write(self._directory, now)
        self._state = now

    def _end(self, ending: CellOutcome, exit_code: int | None) -> CellState:
        self._keep(self._state.ended(ending, exit_code=exit_code))
        return self._state


def main(arguments: list[str]) -> int:
    """Run the cell of a directory, in the directory that the bench was started in."""
    asked = argparse.ArgumentParser()
    asked.add_argument("directory", type=Path)
    asked.add_argument("--meeting", default="", help="the token of a launch on several nodes")
    options = asked.parse_args(arguments)
    process.cancel_on_signals()
    process.adopt_orphans()
    directory = options.directory.resolve()
    try:
        Runner(directory, token=options.meeting).run()
    except OSError:
        if directory.is_dir():
            raise
        sys.stderr.write(f"{directory} was moved or deleted; nothing more is written for it\n")
        return 1
    with suppress(ErgmeterError, OSError):  # else the first reader makes the row
        results.complete(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
