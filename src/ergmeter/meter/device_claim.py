"""Who reads a device for all processes of a node: the first that asks; after its death, another.

The trap: a rule such as "local rank 0 reads". It may be the one that is killed, it may end before
the others, and where every rank sees just its own GPU it would read one of eight. So a claim is on
what a process sees, whoever comes first has it, and the kernel takes it from whoever dies.

It is an abstract socket, which is bound and never listens: there is no file to be left behind, none
that NFS would have to lock, and nothing to clean up after `kill -9`. Where a system has none, or
processes do not share a network namespace, each reads for itself, which costs more and counts
nothing twice.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
import weakref

_held: weakref.WeakSet[DeviceClaim] = weakref.WeakSet()


class DeviceClaim:
    """A right that one process of this node has at a time."""

    def __init__(self, *what: str) -> None:
        word = hashlib.sha256("|".join(what).encode()).hexdigest()[:32]
        self._address = f"\0ergmeter-{word}"
        self._socket: socket.socket | None = None

    def take(self) -> bool:
        """Whether it is ours now."""
        if self._socket is not None or sys.platform != "linux":
            return True
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            ours.bind(self._address)
        except OSError as error:
            ours.close()
            return error.errno != errno.EADDRINUSE
        self._socket = ours
        _held.add(self)
        return True

    def release(self) -> None:
        """Let another have it."""
        ours, self._socket = self._socket, None
        if ours is not None:
            ours.close()


def _in_child() -> None:
    """A forked child has the socket too, and would keep the claim of a parent that has died."""
    for claim in tuple(_held):
        claim.release()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)
