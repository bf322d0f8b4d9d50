"""A training on whose disk nothing is left for a while, and that does not mind.

    fills_disk.py DIRECTORY print|meter

The disk is filled once some steps are on it, and cleared again before the last. Exits with 6.
"""

import contextlib
import sys
import time
from pathlib import Path

from ergmeter import Meter

directory, way = Path(sys.argv[1]), sys.argv[2]
filler = directory / "checkpoint"
meter = Meter(directory / "run", probes=("process",)) if way == "meter" else None
number = 0


def step() -> None:
    global number
    with meter.step(tokens=64) if meter else contextlib.nullcontext():
        time.sleep(0.01)
    print(f"step={number} loss=2.5 tokens=64", flush=True)
    number += 1


def fill() -> None:
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


with meter or contextlib.nullcontext():
    while number < 50 or not any(p.stat().st_size for p in directory.glob("run/*/steps-*")):
        step()
    for _ in range(150):
        fill()  # again and again: what the recorder gave back is not for it
        step()
    filler.unlink()
    for _ in range(100):
        step()
sys.exit(6)
