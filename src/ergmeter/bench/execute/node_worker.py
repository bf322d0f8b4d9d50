"""Runs a cell's ranks on a node other than its first, and connects the nodes of a cell.

    python -m ergmeter.bench.execute.node_worker EXP_DIR

Each node keeps a connection to the first. When it closes, the node ends its ranks, which would
otherwise wait in a collective until NCCL's timeout. This process writes its own output
(stdout.node1, ...) and no status.

The first node writes its addresses to `meeting.json` in the cell's directory, with the token of
this launch and a password. Each other node reports the address it came through, and the ranks
meet at an address that works for all.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ergmeter.atomic_write import read_json, write_json
from ergmeter.bench.execute import launching, process
from ergmeter.bench.execute.process import Cancelled
from ergmeter.bench.execute.state import Process, read_cell
from ergmeter.bench.plan.cells import Cell
from ergmeter.errors import ErgmeterError

MEETING = "meeting.json"
MEET_S = 300.0  # nodes of one job start within seconds; file systems show a new file within 60 s
_END_S = 2 * process.GRACE_S + 10.0  # longer than ending a cell's process takes
_ANSWER_S = 5.0
_LOOK_S = 0.2
# A node that is cut off closes nothing: asked every 10 s, it is given up after a minute.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Wire:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = b""
        self.is_closed = False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; it is lost if the other side has closed."""
        with suppress(OSError):
            self._connection.settimeout(_ANSWER_S)
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def heard(self, wait_s: float) -> dict[str, Any] | None:
        """The next message; None after `wait_s` without one. Invalid JSON closes the connection."""
        until_s = time.monotonic() + wait_s
        while b"\n" not in self._left and not self.is_closed:
            try:
                self._connection.settimeout(max(0.001, until_s - time.monotonic()))
                got = self._connection.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError:
                got = b""
            self._left += got
            self.is_closed = not got
        line, newline, rest = self._left.partition(b"\n")
        if not newline:
            return None
        self._left = rest
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            self.close()
            return None

    def done(self) -> None:
        """Close this side of the connection."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        self._connection.close()


@dataclass
class _Other:
    """A node that connected: its connection, its host, and its report of its end."""

    wire: Wire
    host: str
    reached: list[str]
    report: dict[str, Any] | None = None


class Rendezvous:
    """The first node's side: gathers the other nodes, starts their ranks and follows them."""

    def __init__(self, directory: Path, *, token: str, nodes: int) -> None:
        self._directory, self._token, self._nodes = directory, token, nodes
        self._secret = secrets.token_hex(16)
        self._others: dict[int, _Other] = {}
        self._addresses = _own_addresses()
        self._listening = _listening()
        self._listening.settimeout(_LOOK_S)
        facts = {"token": token, "secret": self._secret, "addresses": self._addresses,
                "port": self._listening.getsockname()[1]}  # fmt: skip
        write_json(directory / MEETING, facts)

    @property
    def hosts(self) -> list[str]:
        """The host names of all nodes, in order."""
        return [socket.gethostname(), *(other.host for _, other in sorted(self._others.items()))]

    def gathered(self, beat: Callable[[], None]) -> launching.NodeOfCell:
        """Wait for all nodes; return where the ranks meet. Raises Cancelled if one is missing."""
        until_s = time.monotonic() + MEET_S
        while len(self._others) < self._nodes - 1:
            beat()
            if time.monotonic() > until_s:
                missing = sorted(set(range(1, self._nodes)) - set(self._others))
                raise Cancelled(
                    f"the scheduler: node {', '.join(map(str, missing))} of {self._nodes} did not"
                    f" reach the first at {', '.join(self._addresses)} within {MEET_S:.0f} s"
                )
            with suppress(TimeoutError):
                self._welcome(Wire(self._listening.accept()[0]))
        common = [
            address for address in self._addresses
            if all(address in other.reached for other in self._others.values())
        ]  # fmt: skip
        if not common:
            raise Cancelled("the network: no address of the first node is known to all others")
        return launching.NodeOfCell(0, self._nodes, common[0], launching.free_port(), self._token)

    def _welcome(self, wire: Wire) -> None:
        wire.send({"token": self._token})
        message = wire.heard(_ANSWER_S) or {}
        if message.get("secret") != self._secret or "node" not in message:
            wire.close()  # a node that tests an address, or a stranger
            return
        self._others[int(message["node"])] = _Other(
            wire, str(message["host"]), list(message["reached"])
        )

    def begin(self, at: launching.NodeOfCell) -> None:
        """Have the others start their ranks."""
        for other in self._others.values():
            other.wire.send({"address": at.address, "port": at.port})

    def codes(self) -> list[int | None]:
        """Exit codes of the other nodes; None for running ones. Raises what a node reports."""
        for number, other in sorted(self._others.items()):
            if other.report is None:
                other.report = other.wire.heard(0.0)
            if other.report is None and other.wire.is_closed:
                raise Cancelled(f"the loss of node {number} ({other.host})")
            if other.report is not None and other.report.get("cancelled"):
                raise Cancelled(f"{other.report['cancelled']} on node {number} ({other.host})")
            if other.report is not None and other.report.get("error"):
                raise OSError(f"node {number} ({other.host}): {other.report['error']}")
        others = [other for _, other in sorted(self._others.items())]
        return [other.report["exit_code"] if other.report else None for other in others]

    def kills(self) -> list[int | None]:
        """Processes that the kernel of each other node killed; None if it did not report."""
        return [
            other.report.get("kills") if other.report else None for other in self._others.values()
        ]

    def close(self) -> None:
        """End the ranks of the other nodes and wait: none may outlive the cell's status."""
        with suppress(FileNotFoundError):
            call_off(self._directory, token=self._token)
        for other in self._others.values():
            other.wire.done()
        until_s = time.monotonic() + _END_S
        for other in self._others.values():
            while not other.wire.is_closed and time.monotonic() < until_s:
                other.report = other.wire.heard(_LOOK_S) or other.report
            other.wire.close()
        self._listening.close()


def call_off(directory: Path, *, token: str) -> None:
    """Tell nodes that wait for the first one that there is nothing to do."""
    write_json(directory / MEETING, {"token": token, "is_over": True})


def _listening() -> socket.socket:
    """Listen at a free port of all addresses, IPv6 and IPv4 if the system has both."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0))


def _own_addresses() -> list[str]:
    """Names and addresses by which other nodes may reach this one, the best first."""
    addresses = [
        address.address
        for _, listed in sorted(psutil.net_if_addrs().items())
        for address in listed
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return list(dict.fromkeys([socket.gethostname(), socket.getfqdn(), *addresses, "127.0.0.1"]))


def join_first_node(
    directory: Path, *, token: str, number: int, nodes: int
) -> tuple[Wire, launching.NodeOfCell] | None:
    """Connect to the first node; return the connection and the ranks' rendezvous address.

    None if the cell is over or called off. The first node closes the connection to end this part.
    """
    until_s = time.monotonic() + MEET_S
    while time.monotonic() < until_s:
        facts = read_json(directory / MEETING)
        if facts.get("token") == token:
            if facts.get("is_over"):
                return None
            reached = [address for address in facts["addresses"] if _answers(address, facts)]
            wire = _called(reached[0], facts) if reached else None
            if wire is not None:
                wire.send({"secret": facts["secret"], "node": number,
                           "host": socket.gethostname(), "reached": reached})  # fmt: skip
                return _begun(wire, launching.NodeOfCell(number, nodes, token=token))
        time.sleep(_LOOK_S)
    raise Cancelled(f"the scheduler: the first node was not found within {MEET_S:.0f} s")


def _begun(wire: Wire, waiting: launching.NodeOfCell) -> tuple[Wire, launching.NodeOfCell] | None:
    """Wait for all nodes; return the wire and where the ranks meet, or None if called off."""
    while not wire.is_closed:
        message = wire.heard(_ANSWER_S)
        if message is not None:
            address, port = str(message["address"]), int(message["port"])
            return wire, replace(waiting, address=address, port=port)
    return None


def _answers(address: str, facts: Mapping[str, Any]) -> bool:
    wire = _called(address, facts)
    if wire is not None:
        wire.close()
    return wire is not None


def _called(address: str, facts: Mapping[str, Any]) -> Wire | None:
    """Connect to an address; None unless the first node of this launch answers there."""
    try:
        wire = Wire(socket.create_connection((address, facts["port"]), timeout=_ANSWER_S))
    except OSError:
        return None
    if (wire.heard(_ANSWER_S) or {}).get("token") == facts["token"]:
        return wire
    wire.close()
    return None


def take_part(directory: Path, *, token: str, number: int) -> None:
    """Wait for the first node, run this node's ranks, and report how they ended."""
    directory = directory.resolve()
    cell = read_cell(directory)
    process.end_leftovers(directory)
    try:
        met = join_first_node(directory, token=token, number=number, nodes=cell.nodes)
    except Cancelled as asked:
        sys.stderr.write(f"{directory}: node {number} was ended by {asked}\n")
        return
    if met is None:
        return
    wire, node = met
    kills = process.kernel_kills()
    try:
        exit_code = _execute(cell, directory, wire, node)
    except Cancelled as asked:
        wire.send({"cancelled": str(asked)})
    except (OSError, ErgmeterError) as error:
        wire.send({"error": str(error)})
    else:
        wire.send({"exit_code": exit_code, "kills": process.kills_since(kills)})
    # The first node closes when it has all it wants; one that is gone has closed already.
    while not wire.is_closed:
        wire.heard(1.0)
    wire.close()


def _execute(cell: Cell, directory: Path, wire: Wire, node: launching.NodeOfCell) -> int:
    """Run this node's ranks; return the exit code, or -1 if the first node ended them."""
    how = launching.start(cell, directory, has_gpus=bool(launching.gpus_here()), node=node)
    with process.begun(how, directory, suffix=node.suffix) as child:
        write_json(directory / f"started.node{node.number}.json", asdict(Process.of(child.pid)))
        while (exit_code := process.exit_code(child, _LOOK_S)) is None:
            wire.heard(0.0)
            if wire.is_closed:
                return -1
        if exit_code:
            time.sleep(process.SETTLE_S)
        return exit_code


def main(arguments: list[str]) -> int:
    """Do one node's part of the cell of a directory."""
    asked = argparse.ArgumentParser()
    asked.add_argument("directory", type=Path)
    asked.add_argument("--meeting", required=True, help="the token of the launch")
    asked.add_argument("--node", type=int, required=True, help="the node's number, from 1")
    options = asked.parse_args(arguments)
    process.cancel_on_signals()
    process.adopt_orphans()
    take_part(options.directory, token=options.meeting, number=options.node)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
