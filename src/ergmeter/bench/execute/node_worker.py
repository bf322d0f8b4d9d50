"""Runs a cell's ranks on a node that is not its first.

    python -m ergmeter.bench.execute.node_worker EXP_DIR

The trap: ranks that go on alone. When the first node is gone, or has ended the cell, what runs here
computes for nobody; so this process does what the first one's connection says, and ends when that
closes. It writes its own output (stdout.node1, ...) and no status.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ergmeter.bench.execute import launching
from ergmeter.bench.execute.process import (
    SETTLE_S,
    Cancelled,
    adopt_orphans,
    begun,
    cancel_on_signals,
    end_leftovers,
    kernel_kills,
    kills_since,
)
from ergmeter.bench.execute.rendezvous import Wire, joined
from ergmeter.bench.execute.state import CELL, Process, write_json
from ergmeter.bench.plan.cells import Cell
from ergmeter.errors import ErgmeterError

_LOOK_S = 0.2


class Member:
    """One node's part in one attempt. Owns the processes that it starts here."""

    def __init__(self, directory: Path, *, token: str, number: int) -> None:
        self._directory = directory.resolve()
        self._cell = Cell.from_json(json.loads((directory / CELL).read_text(encoding="utf-8")))
        self._token, self._number = token, number
        self._started = self._directory / f"started.node{number}.json"

    def run(self) -> None:
        """Wait for the first node, do this one's part, and say how it ended."""
        end_leftovers(self._directory)
        try:
            met = joined(
                self._directory, token=self._token, number=self._number, nodes=self._cell.nodes
            )
        except Cancelled as asked:
            sys.stderr.write(f"{self._directory}: node {self._number} was ended by {asked}\n")
            return
        if met is not None:
            self._take_part(*met)

    def _take_part(self, wire: Wire, node: launching.NodeOfCell) -> None:
        kills = kernel_kills()
        try:
            exit_code = self._execute(wire, node)
        except Cancelled as asked:
            wire.send({"cancelled": str(asked)})
        except (OSError, ErgmeterError) as error:
            wire.send({"error": str(error)})
        else:
            wire.send({"exit_code": exit_code, "kills": kills_since(kills)})
        _until_heard(wire)
        wire.close()

    def _execute(self, wire: Wire, node: launching.NodeOfCell) -> int:
        has_gpus = bool(launching.gpus_here())
        how = launching.start(self._cell, self._directory, has_gpus=has_gpus, node=node)
        with begun(how, self._directory, suffix=node.suffix) as child:
            write_json(self._started, asdict(Process.of(child.pid)))
            while True:
                try:
                    exit_code = child.wait(_LOOK_S)
                except subprocess.TimeoutExpired:
                    wire.heard(0.0)
                    if not wire.is_closed:
                        continue
                    return -1  # whatever: the first node has decided
                if exit_code:
                    time.sleep(SETTLE_S)
                return exit_code


def _until_heard(wire: Wire) -> None:
    """The first node closes when it has all it wants; one that is gone has closed already."""
    while not wire.is_closed:
        wire.heard(1.0)


def main(arguments: list[str]) -> int:
    """Do one node's part of the cell of a directory."""
    asked = argparse.ArgumentParser()
    asked.add_argument("directory", type=Path)
    asked.add_argument("--meeting", required=True, help="the token of the launch")
    asked.add_argument("--node", type=int, required=True, help="its number, from 1")
    given = asked.parse_args(arguments)
    cancel_on_signals()
    adopt_orphans()
    Member(given.directory, token=given.meeting, number=given.node).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
