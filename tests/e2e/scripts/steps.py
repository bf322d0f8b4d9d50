"""A training that prints its steps, and tells a Meter about them too if asked to."""

import contextlib
import sys
import time

from ergmeter import Meter

steps, way = int(sys.argv[1]), sys.argv[2]
meter = Meter(probes=()) if way == "meter" else None
with meter or contextlib.nullcontext():
    for number in range(steps):
        with meter.step(tokens=256) if meter else contextlib.nullcontext():
            time.sleep(0.01)
        print(f"step={number} loss={3 - number / steps:.4f} tokens=256")
