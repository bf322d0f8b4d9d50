"""Prints steps; once `stopped` is there, 30 MB of them at once; after `go`, a few more."""

import array
import fcntl
import sys
import termios
import time
from pathlib import Path

number = 0


def steps(count: int, filler: str = "") -> None:
    global number
    last = number + count
    sys.stdout.write("".join(f"{filler}step={n} tokens=8{filler}\n" for n in range(number, last)))
    sys.stdout.flush()
    number = last


def read_off() -> None:
    """Until what was printed is read: lines that are read together open the window together."""
    left = array.array("i", [1])
    while left[0]:
        time.sleep(0.001)
        fcntl.ioctl(1, termios.FIONREAD, left)


def wait_for(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.02)


for _ in range(10):
    steps(1)
    read_off()
wait_for("stopped")
for _ in range(300):
    steps(1000, filler=" " * 42)
Path("printed").touch()
wait_for("go")
for _ in range(10):
    time.sleep(0.02)
    steps(1)
