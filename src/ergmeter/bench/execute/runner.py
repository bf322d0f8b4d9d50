"""Runs one cell, judges its end and keeps everything.

    python -m ergmeter.bench.execute.runner EXP_DIR

The trap: the driver as the only one who knows. This process belongs to one cell, on whatever
machine, and outlives the driver: if that is killed, the cell ends as if nothing had happened. If
this process is killed as well, the next one finds what it left, ends what still runs of it and
puts its output aside (attempt_1, ...); nothing is overwritten. Nor is another's: a cell whose
directory is moved while it runs is ended, and the mark of it is in that directory.

Of a cell on several nodes this is the first node's, which alone writes its status; the others run
`ergmeter.bench.execute.node_worker`. They find each other by `--meeting`, the token of their
launch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.bench.execute import expectations, judging, launching, nvidia_smi_logger, state
from ergmeter.bench.execute.judging import plain
from ergmeter.bench.execute.moved_directory import Gone, OpenDirectory
from ergmeter.bench.execute.outcome import KILLED, CellOutcome, ParsedOutput, outcome, telling
from ergmeter.bench.execute.process import (
    SETTLE_S,
    STDERR,
    STDOUT,
    Cancelled,
    adopt_orphans,
    begun,
    cancel_on_signals,
    end_leftover,
    end_leftovers,
    kernel_kills,
    kills_since,
)
from ergmeter.bench.execute.rendezvous import Rendezvous, call_off
from ergmeter.bench.execute.state import CELL, RESULTS, CellState, Process, write_json
from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.results import results
from ergmeter.errors import ErgmeterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OUTPUTS = (STDOUT, STDERR, "run", "hf", RESULTS, nvidia_smi_logger.LOG, nvidia_smi_logger.NOTE)
_OF_NODES = ("stdout.node*", "stderr.node*", "gpu_memory_logs.node*")
_LOOK_S = 0.5  # how soon another node's end is seen, or that the directory was moved
# Once a node has failed, the others have so long to say what they know of it.
_FOLLOW_S = 10.0


class Runner:
    """One attempt at one cell. Owns the cell's process and its status.json."""

    def __init__(self, place: OpenDirectory, *, token: str = "") -> None:
        self._place = place
        said = json.loads((self._directory / CELL).read_text(encoding="utf-8"))
        self._cell = Cell.from_json(said)
        self._state = state.read(self._directory)
        self._token = token
        self._beaten_s = -math.inf
        self._failed: dict[int, int] = {}  # exit codes by node, in the order in which they came

    @property
    def _directory(self) -> Path:
        """Looked up for each use: it may be called otherwise by now."""
        return self._place.path

    def run(self) -> CellState:
        """Run the cell to its end, unless it has had one or another is at it. What it came to."""
        with state.claimed(self._directory) as is_ours:
            self._state = state.read(self._directory)  # another may have ended it meanwhile
            if not is_ours:
                sys.stderr.write(f"{self._directory}: another runner is at this cell\n")
            elif not self._state.is_final:
                return self._attempt()
        if self._token:
            call_off(self._directory, token=self._token)
        return self._state

    def _attempt(self) -> CellState:
        end_leftover(self._state.child)
        end_leftovers(self._directory)
        self._put_aside()
        self._keep(self._state.begun(Process.of(os.getpid())))
        kills = kernel_kills()
        exit_code: int | None = None
        meeting = None
        ways: dict[str, Any] = {}
        try:
            several = self._cell.nodes > 1
            meeting = self._meeting() if several else None
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
        killed = [kills_since(kills), *(meeting.kills() if meeting else ())]
        known = [one for one in killed if one is not None]
        ways["kernel_kills"] = sum(known) if len(known) == len(killed) else None
        return self._end(self._judged(exit_code, **ways), exit_code)

    def _meeting(self) -> Rendezvous:
        launching.check_nodes(self._cell)
        if not self._token:
            raise OSError(f"a cell on {self._cell.nodes} nodes is started by slurm or ray")
        return Rendezvous(self._place, token=self._token, nodes=self._cell.nodes)

    def _execute(self, meeting: Rendezvous | None) -> int:
        """Start the command and wait for it. Raises what cut it short, once it is gone."""
        cell, directory = self._cell, self._directory
        (directory / "hf").mkdir(exist_ok=True)
        node = launching.NodeOfCell(0, 1)
        if meeting:
            node = meeting.gathered(self._beat)
            self._keep(self._state.on(meeting.hosts))
        has_gpus = bool(launching.gpus_here())
        how = launching.start(cell, directory, has_gpus=has_gpus, node=node)
        for name, text in how.files.items():
            (directory / name).write_text(text, encoding="utf-8")
        if meeting:
            meeting.begin(node)
        with begun(how, directory, suffix=node.suffix) as child:
            self._keep(replace(self._state, child=Process.of(child.pid)))
            return self._wait(child, meeting)

    def _wait(self, child: subprocess.Popen[bytes], meeting: Rendezvous | None) -> int:
        """Until all nodes have ended, or time is up. The exit code, of whichever failed first.

        Between two looks nobody knows who was first; one that was killed did not say anything.
        """
        limit_s = math.inf if self._cell.timeout_s is None else self._cell.timeout_s
        began_s = time.monotonic()
        failed_s = math.inf
        while True:
            if self._place.has_moved:
                raise Cancelled(
                    f"a move of its directory to {self._directory}: its command knows the old path"
                )
            self._beat()
            left_s = limit_s - (time.monotonic() - began_s)
            own = _ended(child, min(left_s, _LOOK_S))
            codes = [own, *(meeting.codes() if meeting else ())]
            self._failed |= {node: code for node, code in enumerate(codes) if code}
            failed_s = min(failed_s, time.monotonic()) if self._failed else math.inf
            if self._failed and (None not in codes or time.monotonic() - failed_s > _FOLLOW_S):
                time.sleep(SETTLE_S)
                return self._failed[self._by_failure()[0]]
            if None not in codes:
                return 0
            if left_s <= 0:
                raise subprocess.TimeoutExpired(child.args, limit_s)
            if own is not None:
                time.sleep(_LOOK_S)

    def _by_failure(self) -> list[int]:
        """The nodes: those that were killed, those that failed as they did so, the others."""
        killed = [node for node, code in self._failed.items() if code < 0 or code == KILLED]
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
            self._directory / f"{name}{one}" for name in (STDOUT, STDERR) for one in suffixes
        ]
        tails = [judging.tail(path) for path in outputs]
        trainer = judging.trainer_figures(*tails)
        texts = list(zip(tails[: len(suffixes)], tails[len(suffixes) :], strict=True))
        # Of a node that has not ended, nothing is known but that it did not fail by itself.
        others = 1 if self._failed else exit_code
        nodes = [
            ParsedOutput(*texts[node], self._failed.get(node, others))
            for node in self._by_failure()
        ]
        said = telling(nodes)
        run = judging.opened(self._directory / "run")
        found = outcome(
            said.exit_code,
            signal=said.signal or judging.killed_by(run, said.exit_code),
            stdout=said.stdout,
            stderr=said.stderr,
            loss=judging.last_loss(run, trainer),
            **how,
        )
        workload = run.workload if run is not None else {}
        # What failed may not have come as far as what is stated of it.
        stated = self._cell.expects if found.status == "ok" else ()
        held = expectations.check(stated, outputs=outputs, workload=workload)
        self._state = replace(self._state, claims=tuple(one.to_json() for one in held))
        self._write_results(found, trainer)
        return found

    def _write_results(self, found: CellOutcome, trainer: Mapping[str, float]) -> None:
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
            self._directory / RESULTS, {k: plain(v) for k, v in sorted(whole.items())}, indent=4
        )

    def _put_aside(self) -> None:
        """What an attempt before this one left goes into a directory of its own."""
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

    def _end(self, found: CellOutcome, exit_code: int | None) -> CellState:
        self._keep(self._state.ended(found, exit_code=exit_code))
        return self._state


def _ended(child: subprocess.Popen[bytes], wait_s: float) -> int | None:
    """The exit code, if it ends in that time."""
    try:
        return child.wait(max(0.0, wait_s))
    except subprocess.TimeoutExpired:
        return None


def main(arguments: list[str]) -> int:
    """Run the cell of a directory, in the directory that the bench was started in."""
    asked = argparse.ArgumentParser()
    asked.add_argument("directory", type=Path)
    asked.add_argument("--meeting", default="", help="the token of a launch on several nodes")
    given = asked.parse_args(arguments)
    cancel_on_signals()
    adopt_orphans()
    with OpenDirectory(given.directory) as place:
        try:
            Runner(place, token=given.meeting).run()
        except Gone as error:
            sys.stderr.write(f"{error}\n")
            return 1
        with suppress(ErgmeterError, OSError):  # whoever reads the row first makes it else
            results.complete(place.path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
