"""Very many steps through an integration, as fast as they go, with a sink. million.py RUN

Files end after an eighth of the rows that they end after otherwise, so that there are as many of
them as after two million steps.

Prints the least memory of its own in kB (mapped files aside) in the second and in the last quarter:
what is taken for a moment, to make an update of, is not kept. In the first quarter buffers fill.
"""

import re
import sys
from pathlib import Path

import numpy as np

from ergmeter.integrations.training import Training
from ergmeter.runlog import format as fmt

STEPS = 400_000
fmt.SEGMENT_ROWS //= 8


def resident_kb() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


training = Training(out=sys.argv[1], probes=("process",), sinks=("jsonl",), sinks_every_s=1.0)
training.begin()
seen: list[int] = []
batch = {"input_ids": np.zeros((2, 4), dtype=int), "attention_mask": np.array([[1, 1, 1, 0]] * 2)}
for number in range(STEPS):
    training.step_begin()
    training.batch(batch)
    training.step_end()
    training.logged({"loss": 1 / (number + 1)})
    if number % 1000 == 0:
        seen.append(resident_kb())
training.end()
quarter = len(seen) // 4
print(min(seen[quarter : 2 * quarter]))
print(min(seen[3 * quarter :]))
