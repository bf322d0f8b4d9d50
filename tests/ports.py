"""A port for a launcher that wants to be told one.

A number that stands in the test is somebody else's too, as soon as the tests run twice on
one machine; and one that the kernel gives for port 0 it may give to the next who asks.
"""

from __future__ import annotations

import random
import socket

_LOWEST, _HIGHEST = 20_000, 32_000  # the kernel gives out those from 32768 on

_chance = random.SystemRandom()


def free_port() -> int:
    """One that nobody listens on, and that the kernel gives to nobody by itself."""
    while True:
        port = _chance.randrange(_LOWEST, _HIGHEST)
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
        return port
