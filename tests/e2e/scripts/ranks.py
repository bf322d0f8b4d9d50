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
        start_ns = time.monotonic_ns()
        for number in range(steps):
            with meter.step(tokens=tokens) as step:
                time.sleep(0.01)
                dist.all_reduce(gradient)
                if nan_at is not None:
                    step.loss = math.nan if number >= nan_at else 2.0
        end_ns = time.monotonic_ns()
        rank = dist.get_rank()
        (truth / f"{rank}.json").write_text(json.dumps({"start_ns": start_ns, "end_ns": end_ns}))
        dist.barrier()
    dist.barrier()  # a Meter judges what came last when it closes: nobody goes before
    dist.destroy_process_group()


named = sys.argv[4] if len(sys.argv) > 4 else None
lost = int(sys.argv[5]) if len(sys.argv) > 5 else None
main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), named, lost)
