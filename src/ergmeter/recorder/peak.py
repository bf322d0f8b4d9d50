"""The most memory that one process of a recorded command ever held, by the kernel at its end.

The trap: `ru_maxrss` begins before the command does. Until it executes the program, the child is
in the recorder's own memory, and Linux counts that as the child's: `true`, started from a recorder
of 60 MB, is said to have held 60 MB. So the number is believed only where it is more than the
recorder itself had ever held by then. It is the largest of the command and of the descendants that
were waited for, each by itself.

A smaller command is known by its high-water marks while it lives. The process probe reads them
every two seconds, which may be all the life of a small command; so a thread of its own asks again
whenever a fiftieth of that life has gone by, until the probe does so as often.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

from ergmeter.probes.process import PERIOD_S, high_water_bytes

_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of each system
_FIRST_S = 0.02
_AGAIN_FRAC = 0.02


class MemoryPeak:
    """Asked by the process probe when it reads for the last time."""

    def __init__(self) -> None:
        self._ours_bytes = 0
        self._mark_bytes = 0
        self._bytes: int | None = None
        self._ended = threading.Event()

    def started(self, pid: int) -> None:
        """The command has been started just now: note what we hold ourselves, and watch it."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES
        # Our own ru_maxrss has the same fault, of whoever started us; the mark has not.
        mark = high_water_bytes("self")
        self._ours_bytes = mark or own
        if mark is not None:
            threading.Thread(
                target=self._watch, args=(pid,), name="ergmeter-peak", daemon=True
            ).start()

    def ended(self, usage: resource.struct_rusage) -> None:
        """The command has ended, and this is what wait4 said of it."""
        self._ended.set()
        found = usage.ru_maxrss * _UNIT_BYTES
        self._bytes = found if found > self._ours_bytes else self._mark_bytes or None

    def __call__(self) -> int | None:
        """The peak, if the command has ended and it is known."""
        return self._bytes

    def _watch(self, pid: int) -> None:
        began_s = time.monotonic()
        wait_s = _FIRST_S
        while not self._ended.wait(wait_s) and wait_s < PERIOD_S:
            marks = [high_water_bytes(member) or 0 for member in _tree(pid)]
            self._mark_bytes = max(self._mark_bytes, *marks)
            wait_s = max(_FIRST_S, _AGAIN_FRAC * (time.monotonic() - began_s))


def _tree(pid: int) -> list[int]:
    """A process and its descendants, without a look at every process of the machine."""
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:  # gone, or a kernel that has no such file
            continue
        found += map(int, children.split())
    return found
