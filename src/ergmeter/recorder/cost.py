"""What recording costs: all the CPU time of the recorder and of its relay.

Neither does anything but measure, so whatever they spend is our doing: starting Python, reading the
probes, reading the command's output, passing it on. The other way would be to count our threads
alone, as a Meter inside a program has to; it would leave out what a talkative command costs.
"""

from __future__ import annotations

import time
from contextlib import suppress

import psutil


class Cost:
    """The CPU seconds of this process and of the relay, so far."""

    def __init__(self, relay_pid: int) -> None:
        self._relay_s = 0.0
        self._relay: psutil.Process | None = None
        with suppress(psutil.Error):
            self._relay = psutil.Process(relay_pid)

    def __call__(self) -> float:
        """Ask again. A relay that is gone has cost what it had cost when last asked."""
        if self._relay is not None:
            with suppress(psutil.Error):
                times = self._relay.cpu_times()
                self._relay_s = times.user + times.system
        return time.process_time() + self._relay_s
