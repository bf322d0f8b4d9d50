"""A Lightning Trainer on two ranks that knows nothing of ergmeter."""

from __future__ import annotations

import json
import logging
import time
import warnings
from pathlib import Path

import lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

STEPS, ROWS, LENGTH = 20, 2, 16


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64)
        self.start_s = self.end_s = 0.0
        self.amids_s: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.start_s = time.monotonic()

    def on_train_batch_end(self, *_: object) -> None:
        self.end_s = time.monotonic()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        time.sleep(0.005)
        logits = self.head(self.embed(batch))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        self.amids_s.append(time.monotonic())
        return loss

    def on_train_end(self) -> None:
        steps = len(self.amids_s)
        truth = {
            "steps": steps,
            "tokens": steps * ROWS * LENGTH,
            "outside_s": [self.start_s, self.end_s],
            "inside_s": [self.amids_s[0], self.amids_s[-1]],
        }
        Path(f"rank-{self.global_rank}.json").write_text(json.dumps(truth))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.randint(0, 64, (STEPS * ROWS * 2, LENGTH))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Small(), DataLoader(data, batch_size=ROWS))  # type: ignore[arg-type]
