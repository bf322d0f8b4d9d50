"""Two ranks that torch.multiprocessing forks, which no environment tells anything.

    spawned.py OUT PORT TIMES

The same group meets TIMES times at the same address, one after the other. Each rank writes to
OUT-TURN-RANK.json which training it was told it is.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from ergmeter.integrations.model_description import training_identity


def rank(number: int, out: str, port: str, turn: int) -> None:
    if number == 0:
        training_identity()  # it has trained alone before, which the other has not
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=2)
    said = training_identity()
    Path(f"{out}-{turn}-{number}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for turn in range(int(sys.argv[3])):
        started: Any = start_processes
        started(rank, (sys.argv[1], sys.argv[2], turn), nprocs=2, start_method="fork")
