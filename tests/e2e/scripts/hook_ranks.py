"""Two ranks on gloo that a program spawns itself, without a launcher: `hook_ranks.py PORT [fork]`.

Each rank writes its truth to rank-N.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

STEPS, ROWS, LENGTH = 20, 2, 16


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(ids))
        return found


def rank_main(rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(Small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start_s, amids_s = time.monotonic(), []
    for _ in range(STEPS):
        model(torch.randint(0, 64, (ROWS, LENGTH))).mean().backward()
        amids_s.append(time.monotonic())
        optimizer.step()
        end_s = time.monotonic()
        time.sleep(0.005)
    inside_s = [amids_s[0], amids_s[-1]]
    truth = {
        "tokens": STEPS * ROWS * LENGTH, "outside_s": [start_s, end_s], "inside_s": inside_s,
    }  # fmt: skip
    Path(f"rank-{rank}.json").write_text(json.dumps(truth))
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks: Any = start_processes
    ranks(rank_main, (sys.argv[1],), 2, start_method=sys.argv[2])
