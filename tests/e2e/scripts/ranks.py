"""A data-parallel loop: `ranks.py STEPS TOKENS TRUTH_DIR [RUN [NAN_AT]]`. Each rank writes what it
did. From step NAN_AT on the loss is lost, on all ranks."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ergmeter import Meter


def main(steps: int, tokens: int, truth: Path, run: str | None, nan_at: int | None) -> None:
    alerts = [] if nan_at is None else ["loss nan"]
    with Meter(run, probes=["process"], alerts=alerts) as meter:
        dist.init_process_group("gloo")
        gradient = torch.ones(1000)
        dist.barrier()
        start_s, amids_s = time.monotonic(), []
        for number in range(steps):
            with meter.step(tokens=tokens) as step:
                amids_s.append(time.monotonic())
                time.sleep(0.01)
                dist.all_reduce(gradient)
                if nan_at is not None:
                    step.loss = math.nan if number >= nan_at else 2.0
        end_s = time.monotonic()
        said = {"outside_s": [start_s, end_s], "inside_s": [amids_s[0], amids_s[-1]]}
        (truth / f"{dist.get_rank()}.json").write_text(json.dumps(said))
        dist.barrier()
    dist.barrier()  # a Meter judges what came last when it closes: nobody goes before
    dist.destroy_process_group()


named = sys.argv[4] if len(sys.argv) > 4 else None
lost = int(sys.argv[5]) if len(sys.argv) > 5 else None
main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), named, lost)
