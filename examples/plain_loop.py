"""A plain training loop, measured: three lines beside the loop's own.

python examples/plain_loop.py [STEPS]
"""

import sys
import time

from ergmeter import Meter

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 400  # fewer last too short to tell a rate

with Meter(warmup_steps=2) as meter:
    for number in range(STEPS):
        with meter.step(tokens=4096, samples=8) as step:
            time.sleep(0.02)  # your forward, backward and optimizer step
            step.loss = 3.0 / (number + 1)

tokens_per_s = meter.summary().readings["throughput.tokens_per_s"]
print(tokens_per_s)
print(f"erg report {meter.path}")
