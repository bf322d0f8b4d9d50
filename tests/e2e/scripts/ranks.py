"""A data-parallel loop: `ranks.py STEPS TOKENS TRUTH_DIR RUN[=NAN_AT]...`.

It is run once for each RUN, one after the other; `-` is a run of no name. Each rank writes what it
did to RUN-RANK.json. From step NAN_AT on the loss is lost, on all ranks.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

from ergmeter import Meter


def main(steps: int, tokens: int, truth: Path, run: str, nan_at: str) -> None:
    alerts = ["loss nan"] if nan_at else []
    with Meter(None if run == "-" else run, probes=["process"], alerts=alerts) as meter:
        import torch  # a rank that is refused ends before
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        gradient = torch.ones(1000)
        dist.barrier()
        start_s, amids_s = time.monotonic(), []
        for number in range(steps):
            with meter.step(tokens=tokens) as step:
                amids_s.append(time.monotonic())
                time.sleep(0.01)
                dist.all_reduce(gradient)
                if nan_at:
                    step.loss = math.nan if number >= int(nan_at) else 2.0
        end_s = time.monotonic()
        said = {"outside_s": [start_s, end_s], "inside_s": [amids_s[0], amids_s[-1]]}
        (truth / f"{run}-{dist.get_rank()}.json").write_text(json.dumps(said))
        dist.barrier()
    dist.barrier()  # a Meter judges what came last when it closes: nobody goes before


for named in sys.argv[4:]:
    name, _, lost = named.partition("=")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), name, lost)
