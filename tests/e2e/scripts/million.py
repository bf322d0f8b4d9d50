"""A million steps through an integration, as fast as they go, with a sink. million.py RUN

Prints the memory of its own in kB (mapped files aside) after three tenths of them and after all.
"""

import re
import sys
from pathlib import Path

from ergmeter.integrations.batches import Counts
from ergmeter.integrations.training import Training

STEPS = 1_000_000


def resident_kb() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


training = Training(out=sys.argv[1], probes=("process",), sinks=("jsonl",), sinks_every_s=1.0)
training.begin()
counts = Counts(512, 4, 400, 396, 512 * 128)
for number in range(STEPS):
    training.step_begin()
    training.batch(counts)
    training.step_end()
    training.logged({"loss": 1 / (number + 1)})
    if number == 3 * STEPS // 10:
        print(resident_kb())
print(resident_kb())
training.end()
