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
        start_ns = time.monotonic_ns()
        for _ in range(steps):
            with meter.step(tokens=tokens):
                time.sleep(0.01)
                dist.all_reduce(gradient)
        end_ns = time.monotonic_ns()
        rank = dist.get_rank()
        (truth / f"{rank}.json").write_text(json.dumps({"start_ns": start_ns, "end_ns": end_ns}))
        dist.barrier()
    dist.destroy_process_group()


named = sys.argv[4] if len(sys.argv) > 4 else None
main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), named)
