"""A loop that logs its loss to TensorBoard, W&B (offline) and MLflow, and prints its last."""

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
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
writer, validation = SummaryWriter("tb"), SummaryWriter("tb/validation")
mlflow.set_tracking_uri("sqlite:///mlflow.db")
losses = []
with wandb.init(project="hook", dir=".") as run, mlflow.start_run():
    for step in range(50):
        ids = torch.randint(0, 16, (2, 8))
        loss: Any = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        losses.append(loss.item())
        writer.add_scalar("train/loss", loss, step)
        optimizer.step()
        validation.add_scalar("loss", 99.0, step)
        run.log({"gpu_hours": 0.5, "note": "words"})
        mlflow.log_metric("rate", 0.1, step=step)
        mlflow.log_metrics({"norm": float(step)}, step=step)
writer.close()
validation.close()
print("TRUTH", json.dumps({"losses": losses}))
