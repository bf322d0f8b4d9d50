"""A training whose disk does not answer for a while.

    stalls_disk.py RUN SECONDS STEP_S [STALL_S]

Makes steps of STEP_S for SECONDS. From the second second on, whatever writes to a file waits until
STALL_S have passed, as a write to a file server does that is restarted. Prints the number of steps
made, the longest time from one step to the next, and how long the close took.
"""

import os
import sys
import time
from pathlib import Path

from ergmeter import Meter

run, seconds, step_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
stall_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
write = os.write
began_s = time.monotonic()


def slow(fd: int, data: bytes) -> int:
    since_s = time.monotonic() - began_s
    if 2 < since_s < 2 + stall_s:
        time.sleep(2 + stall_s - since_s)
    return write(fd, data)


os.write = slow  # type: ignore[assignment]
made, longest_s, has_described = 0, 0.0, False
with Meter(run, probes=("process",)) as meter:
    last_s = time.monotonic()
    until_s = began_s + seconds
    while last_s < until_s:
        with meter.step(tokens=64):
            if step_s:
                time.sleep(step_s)
        made += 1
        if last_s > began_s + 3 and not has_described:
            has_described = True
            meter.workload({"said": "while the disk stalls"})
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    ended_s = time.monotonic()
print(made, longest_s, time.monotonic() - ended_s)
