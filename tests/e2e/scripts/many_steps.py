"""Makes a run of so many steps as fast as it can. many_steps.py RUN STEPS"""

import sys

from ergmeter import Meter

with Meter(sys.argv[1], probes=("process",)) as meter:
    for number in range(int(sys.argv[2])):
        with meter.step(tokens=8) as step:
            step.loss = 1 / (number + 1)
        if number == 3:
            meter.mark("noticed", "something")
