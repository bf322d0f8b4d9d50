"""Writes a run through a Meter, a step every tenth of a second, until there is a file RUN.stop.

    steady.py RUN [NAME]

Prints how many steps it was.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from ergmeter import Meter

run = sys.argv[1]
name = sys.argv[2] if len(sys.argv) > 2 else None
with Meter(run, name=name, probes=["process"]) as meter:
    for number in itertools.count():
        if Path(f"{run}.stop").exists():
            break
        with meter.step(tokens=100) as step:
            time.sleep(0.1)
            step.loss = 5.0 / (number + 1)
print(number)
