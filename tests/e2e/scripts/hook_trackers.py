"""A loop that logs its loss to TensorBoard, W&B (offline) and MLflow; one to a disabled W&B.

The second logs by the run's own `log` and by `wandb.log`, in turn. Prints as TRUTH the losses of
each.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", MLFLOW_DISABLE_TELEMETRY="true")

import mlflow
import torch
import wandb
from torch import nn
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def lost(model: nn.Module) -> Any:
    ids = torch.randint(0, 16, (2, 8))
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


losses: list[list[float]] = [[], []]
model, optimizer = made()
writer, validation = SummaryWriter("tb"), SummaryWriter("tb/validation")
mlflow.set_tracking_uri("sqlite:///mlflow.db")
with wandb.init(project="hook", dir=".") as run, mlflow.start_run():
    for step in range(20):
        loss = lost(model)
        loss.backward()
        losses[0].append(loss.item())
        writer.add_scalar("train/loss", loss, step)
        optimizer.step()
        validation.add_scalar("loss", 99.0, step)
        run.log({"gpu_hours": 0.5, "note": "words"})
        mlflow.log_metric("rate", 0.1, step=step)
        mlflow.log_metrics({"norm": float(step)}, step=step)
writer.close()
validation.close()

model, optimizer = made()
disabled = wandb.init(project="hook", mode="disabled")
for step in range(20):
    loss = lost(model)
    loss.backward()
    optimizer.step()
    losses[1].append(loss.item())
    log: Any = disabled.log if step % 2 else wandb.log
    log({"train/loss": loss.item()})
disabled.finish()
print("TRUTH", json.dumps({"losses": losses}))
