"""A data-parallel loop: `ranks.py STEPS TOKENS TRUTH_DIR [RUN]`. Each rank writes what it did."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ergmeter import Meter


def main(steps: int, tokens: int, truth: Path, run: str | None) -> None:
    with Meter(run, probes=["process"]) as meter:
        dist.init_process_group("gloo")
        gradient = torch.ones(1000)
        dist.barrier()
        start_s, amids_s = time.monotonic(), []
        for _ in range(steps):
            with meter.step(tokens=tokens):
                amids_s.append(time.monotonic())
                time.sleep(0.01)
                dist.all_reduce(gradient)
        end_s = time.monotonic()
        said = {"outside_s": [start_s, end_s], "inside_s": [amids_s[0], amids_s[-1]]}
        (truth / f"{dist.get_rank()}.json").write_text(json.dumps(said))
        dist.barrier()
    dist.destroy_process_group()


named = sys.argv[4] if len(sys.argv) > 4 else None
main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), named)
