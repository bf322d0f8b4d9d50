"""A training that keeps a log of its own, to be compared with what was recorded of it.

    long_lived.py DIRECTORY STEPS print|meter

Each step's number and end go to DIRECTORY/log by one write each; DIRECTORY/pid comes first,
DIRECTORY/end last.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

directory, steps, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
directory.mkdir(exist_ok=True)
(directory / ".pid").write_text(str(os.getpid()))
(directory / ".pid").rename(directory / "pid")
log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
meter = None
if way == "meter":
    from ergmeter import Meter

    meter = Meter(directory / "run", probes=("process",))
with meter or contextlib.nullcontext():
    for number in range(steps):
        with meter.step(tokens=64) if meter else contextlib.nullcontext():
            time.sleep(0.01)
        if not meter:
            print(f"step={number} loss={3 - number / steps:.4f} tokens=64", flush=True)
        os.write(log, f"{number} {time.monotonic_ns()}\n".encode())
(directory / "end").touch()
