"""Loops whose throughput is known, because they keep their own clock and count.

    truth.py LOOP WAY TRUTH

LOOP is uneven, short or padded; WAY is span (meter.step), end (meter.step_end) or print. Writes to
TRUTH, as JSON, how many tokens each step had, and when it was under way and over.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ergmeter import Meter

loop, way, truth = sys.argv[1:]
chance = random.Random(3)


def batches() -> Iterator[tuple[float, int, int]]:
    """Seconds, tokens computed, real tokens."""
    if loop == "uneven":
        for number in range(70):
            yield (0.3 if number % 10 == 9 else 0.015), 1024, 1024
    elif loop == "short":
        for _ in range(20_000):
            yield 100e-6, 32, 32
    else:
        for _ in range(250):
            yield 0.01, 2048, chance.randint(200, 2048)


def work(seconds: float) -> None:
    if seconds > 1e-3:
        time.sleep(seconds)
        return
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


plan = list(batches())
meter = Meter(probes=("process",)) if way != "print" else None
if meter:
    meter.start()
amids, ends = [], []
start_s = time.monotonic()
if meter and way == "end":
    meter.step_begin()
for number, (seconds, computed, real) in enumerate(plan):
    if meter and way == "span":
        with meter.step(tokens=computed, tokens_real=real):
            amids.append(time.monotonic())
            work(seconds)
    elif meter:
        amids.append(time.monotonic())
        work(seconds)
        meter.step_end(tokens=computed, tokens_real=real)
    else:
        work(seconds)
        amids.append(time.monotonic())
        print(f"step={number} tokens={computed} tokens_real={real}")
    ends.append(time.monotonic())
if meter:
    meter.close()
document = {
    "computed": [computed for _, computed, _ in plan],
    "real": [real for _, _, real in plan],
    "outside_s": [start_s, ends[-1]],
    "inside_s": [amids[0], amids[-1]],
    "run": str(meter.path) if meter else None,
    "amids_s": amids,  # where lines are printed: right before
}
Path(truth).write_text(json.dumps(document))
