"""A loop that logs its loss to W&B under mode="disabled": `hook_wandb.py run|module`.

By the run's own `log`, or by `wandb.log`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import wandb
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = wandb.init(project="hook", mode="disabled")
log: Any = run.log if sys.argv[1] == "run" else wandb.log
losses = []
for _ in range(30):
    ids = torch.randint(0, 16, (2, 8))
    loss: Any = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    log({"train/loss": loss.item()})
run.finish()
print("TRUTH", json.dumps({"losses": losses}))
