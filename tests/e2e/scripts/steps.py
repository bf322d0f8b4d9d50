"""A training that prints its steps, and tells a Meter about them too if asked to."""

import array
import contextlib
import fcntl
import sys
import termios
import time

from ergmeter import Meter


def read_off() -> None:
    """Until what was printed is read: lines that are read together open the window together."""
    left = array.array("i", [1])
    while left[0]:
        time.sleep(0.001)
        fcntl.ioctl(1, termios.FIONREAD, left)


steps, way = int(sys.argv[1]), sys.argv[2]
meter = Meter(probes=()) if way == "meter" else None
with meter or contextlib.nullcontext():
    for number in range(steps):
        with meter.step(tokens=256) if meter else contextlib.nullcontext():
            time.sleep(0.01)
        print(f"step={number} loss={3 - number / steps:.4f} tokens=256")
        if not meter:
            read_off()
