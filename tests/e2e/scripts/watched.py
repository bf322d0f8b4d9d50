"""A training to be watched. watched.py RUN STEPS [NAN_AT]; RUN is - inside `erg record`.

It ends after so many steps, or before where there is a file RUN.stop.
"""

import math
import sys
import time
from pathlib import Path

from ergmeter import Budget, Meter

steps = int(sys.argv[2])
nan_at = int(sys.argv[3]) if len(sys.argv) > 3 else steps
out = None if sys.argv[1] == "-" else sys.argv[1]
with Meter(out, probes=("process",), budget=Budget(steps=steps)) as meter:
    for number in range(steps):
        if Path(f"{out}.stop").exists():
            break
        with meter.step(tokens=256) as step:
            time.sleep(0.02)
            step.loss = math.nan if number >= nan_at else 3 - number / steps
