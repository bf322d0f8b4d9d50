"""Prints steps; once `stopped` is there, 30 MB of them at once; after `go`, a few more."""

import sys
import time
from pathlib import Path

number = 0


def steps(count: int, filler: str = "") -> None:
    global number
    last = number + count
    sys.stdout.write("".join(f"{filler}step={n} tokens=8{filler}\n" for n in range(number, last)))
    sys.stdout.flush()
    number = last


def wait_for(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.02)


for _ in range(10):
    steps(1)
    time.sleep(0.02)
wait_for("stopped")
for _ in range(300):
    steps(1000, filler=" " * 42)
Path("printed").touch()
wait_for("go")
for _ in range(10):
    time.sleep(0.02)
    steps(1)
