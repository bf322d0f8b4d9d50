"""How long the recorder reads on once its command has ended."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, cast

from ergmeter.recorder.output import FRAME, OutputReader, RelayedOutput

if TYPE_CHECKING:
    from ergmeter.meter import Meter
    from ergmeter.records import Record

S = 10**9
LINES = 150


class SlowMeter:
    """Takes each record in 5 ms, so that the reader is behind for longer than one has patience."""

    def __init__(self) -> None:
        self.taken = 0

    def record(self, record: Record) -> None:
        time.sleep(0.005)
        self.taken += 1

    def mark(self, name: str, detail: str = "") -> None:
        """Nothing goes wrong here."""


def frame(number: int, t_ns: int) -> bytes:
    line = f"step={number} tokens=8\n".encode()
    return FRAME.pack(t_ns, 0, len(line)) + line


def test_what_the_relay_passed_on_just_after_the_end_is_waited_for() -> None:
    """The command's last lines were in the pipe still: 3 ms apart, from its end on."""
    read_fd, write_fd = os.pipe()
    ended_ns = 100 * S
    meter = SlowMeter()
    reader = OutputReader(RelayedOutput(read_fd), cast("Meter", meter), tokens_are=None)
    os.write(write_fd, b"".join(frame(i, ended_ns + 3_000_000 * i) for i in range(LINES)))
    os.close(write_fd)
    reader.start()
    reader.finish(ended_ns, patience_s=0.5)
    assert meter.taken >= LINES - 1  # the first line begins the first step


def test_a_background_child_that_goes_on_printing_is_not_waited_for() -> None:
    read_fd, write_fd = os.pipe()
    stopping = threading.Event()

    def go_on() -> None:
        number = 0
        while not stopping.wait(0.01):
            os.write(write_fd, frame(number, time.monotonic_ns()))
            number += 1
        os.close(write_fd)

    child = threading.Thread(target=go_on)
    child.start()
    reader = OutputReader(RelayedOutput(read_fd), cast("Meter", SlowMeter()), tokens_are=None)
    reader.start()
    before_s = time.monotonic()
    reader.finish(time.monotonic_ns(), patience_s=0.5)
    took_s = time.monotonic() - before_s
    stopping.set()
    child.join()
    reader._thread.join()
    assert 1.0 <= took_s < 60.0  # and not for ever
