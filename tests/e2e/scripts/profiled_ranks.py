"""A data-parallel training with profiled steps: `profiled_ranks.py RUN PROFILE_STEPS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ergmeter.integrations.torch_loop import watch

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watched = watch(model, optimizer, out=Path(sys.argv[1]), probes=(), profile_steps=int(sys.argv[2]))
ids = torch.arange(512).reshape(8, 64) % 256
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    losses.append(float(loss).hex())
watched.close()
(Path(sys.argv[1]).parent / f"losses{dist.get_rank()}-{sys.argv[2]}").write_text("\n".join(losses))
dist.destroy_process_group()
