"""How do the nodes of one cell find each other, and how does each know that another has ended?

The trap: two. A rank that dies on one node leaves the others in a collective that nobody will
answer, for as long as NCCL's patience lasts, so each node holds a connection to the first, and one
that closes says so at once. And a node's name need not be known to the others (a laptop's, a
container's), nor lead to it: the first node lists all its addresses, each of the others says by
which it came through, and the ranks meet at one that holds for all.

Where the first node listens is in a file of the cell's directory (`meeting.json`), with the token
of this launch, so that nobody goes where an earlier attempt was, and a word that opens it.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ergmeter.bench.execute.launching import NodeOfCell, free_port
from ergmeter.bench.execute.moved_directory import Gone, OpenDirectory
from ergmeter.bench.execute.process import GRACE_S, Cancelled
from ergmeter.bench.execute.state import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MEETING = "meeting.json"
MEET_S = 300.0  # nodes of one job start within seconds; file systems show a new file within 60 s
_END_S = 2 * GRACE_S + 10.0  # longer than ending a cell's process takes
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

    def send(self, said: Mapping[str, Any]) -> None:
        """Say it; one who is gone does not hear it."""
        with suppress(OSError):
            self._connection.settimeout(_ANSWER_S)
            self._connection.sendall(json.dumps(said).encode() + b"\n")

    def heard(self, wait_s: float) -> dict[str, Any] | None:
        """The next line, if one comes in that time; what is no JSON closes the connection."""
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
        """Nothing more will be said from here."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up."""
        self.is_closed = True
        self._connection.close()


@dataclass
class _Other:
    """A node that came: its connection, its host, and what it said of its end."""

    wire: Wire
    host: str
    reached: list[str]
    said: dict[str, Any] | None = None


class Rendezvous:
    """The first node's side: it calls the others, has them begin, hears of their end, ends them."""

    def __init__(self, place: OpenDirectory, *, token: str, nodes: int) -> None:
        self._place, self._token, self._nodes = place, token, nodes
        self._secret = secrets.token_hex(16)
        self._others: dict[int, _Other] = {}
        self._addresses = _own_addresses()
        self._listening = _listening()
        self._listening.settimeout(_LOOK_S)
        told = {"token": token, "secret": self._secret, "addresses": self._addresses,
                "port": self._listening.getsockname()[1]}  # fmt: skip
        write_json(place.path / MEETING, told)

    @property
    def hosts(self) -> list[str]:
        """Of all nodes, in order."""
        return [socket.gethostname(), *(one.host for _, one in sorted(self._others.items()))]

    def gathered(self, beat: Callable[[], None]) -> NodeOfCell:
        """Wait for the others. Where all ranks meet; Cancelled if somebody does not come."""
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
            one for one in self._addresses
            if all(one in other.reached for other in self._others.values())
        ]  # fmt: skip
        if not common:
            raise Cancelled("the network: no address of the first node is known to all others")
        return NodeOfCell(0, self._nodes, common[0], free_port(), self._token)

    def _welcome(self, wire: Wire) -> None:
        wire.send({"token": self._token})
        said = wire.heard(_ANSWER_S) or {}
        if said.get("secret") != self._secret or "node" not in said:
            wire.close()  # one who tries an address, or a stranger
            return
        self._others[int(said["node"])] = _Other(wire, str(said["host"]), list(said["reached"]))

    def begin(self, at: NodeOfCell) -> None:
        """Have the others start their ranks."""
        for one in self._others.values():
            one.wire.send({"address": at.address, "port": at.port})

    def codes(self) -> list[int | None]:
        """How the others ended, by number; None for those at work. Raises what one met with."""
        for number, one in sorted(self._others.items()):
            if one.said is None:
                one.said = one.wire.heard(0.0)
            if one.said is None and one.wire.is_closed:
                raise Cancelled(f"the loss of node {number} ({one.host})")
            if one.said is not None and one.said.get("cancelled"):
                raise Cancelled(f"{one.said['cancelled']} on node {number} ({one.host})")
            if one.said is not None and one.said.get("error"):
                raise OSError(f"node {number} ({one.host}): {one.said['error']}")
        others = [one for _, one in sorted(self._others.items())]
        return [one.said["exit_code"] if one.said else None for one in others]

    def kills(self) -> list[int | None]:
        """How many processes the kernels of the others killed, None where one did not say."""
        return [one.said.get("kills") if one.said else None for one in self._others.values()]

    def close(self) -> None:
        """End what still runs elsewhere, and wait for it: nothing of a cell outlives its status."""
        with suppress(Gone):
            call_off(self._place.path, token=self._token)
        for one in self._others.values():
            one.wire.done()
        until_s = time.monotonic() + _END_S
        for one in self._others.values():
            while not one.wire.is_closed and time.monotonic() < until_s:
                one.said = one.wire.heard(_LOOK_S) or one.said
            one.wire.close()
        self._listening.close()


def call_off(directory: Path, *, token: str) -> None:
    """Tell nodes that wait for the first one that there is nothing to do."""
    write_json(directory / MEETING, {"token": token, "is_over": True})


def _listening() -> socket.socket:
    """At a port of all addresses, of both kinds where the system has both."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0))


def _own_addresses() -> list[str]:
    """By what this machine may be known to others, the best first; itself by the last."""
    found = [
        one.address
        for _, listed in sorted(psutil.net_if_addrs().items())
        for one in listed
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    return list(dict.fromkeys([socket.gethostname(), socket.getfqdn(), *found, "127.0.0.1"]))


def joined(
    directory: Path, *, token: str, number: int, nodes: int
) -> tuple[Wire, NodeOfCell] | None:
    """Another node's side: find the first, say that we are here, and be told where ranks meet.

    None if there is nothing to do. The wire closes when this node's part is to end.
    """
    until_s = time.monotonic() + MEET_S
    while time.monotonic() < until_s:
        told = _launch_facts(directory / MEETING)
        if told.get("token") == token:
            if told.get("is_over"):
                return None
            reached = [one for one in told["addresses"] if _answers(one, told)]
            wire = _called(reached[0], told) if reached else None
            if wire is not None:
                wire.send({"secret": told["secret"], "node": number,
                           "host": socket.gethostname(), "reached": reached})  # fmt: skip
                return _begun(wire, NodeOfCell(number, nodes, token=token))
        time.sleep(_LOOK_S)
    raise Cancelled(f"the scheduler: the first node was not found within {MEET_S:.0f} s")


def _begun(wire: Wire, waiting: NodeOfCell) -> tuple[Wire, NodeOfCell] | None:
    """Where the ranks meet, once all have come; None if it was called off."""
    while not wire.is_closed:
        said = wire.heard(_ANSWER_S)
        if said is not None:
            return wire, waiting.at(str(said["address"]), int(said["port"]))
    return None


def _launch_facts(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _answers(address: str, told: Mapping[str, Any]) -> bool:
    wire = _called(address, told)
    if wire is not None:
        wire.close()
    return wire is not None


def _called(address: str, told: Mapping[str, Any]) -> Wire | None:
    """A connection, if it is the first node of this launch that answers there."""
    try:
        wire = Wire(socket.create_connection((address, told["port"]), timeout=_ANSWER_S))
    except OSError:
        return None
    if (wire.heard(_ANSWER_S) or {}).get("token") == told["token"]:
        return wire
    wire.close()
    return None
