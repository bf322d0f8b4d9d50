"""A tiny Llama trained by Lightning's Trainer on padded rows of random tokens.

    lightning_trainer.py OUT PLAIN|METERED [STRATEGY] [DEVICES]

Each rank writes to OUT-RANK.json what it did by its own count: the tokens and losses of each step,
how long the loop, the evaluations and the checkpoints took, and what the Meter's share was called.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, MICRO, BATCH, LENGTH, VOCABULARY = 12, 4, 4, 48, 128
EVALUATE_EVERY = 4 * MICRO  # micro-batches
SAVE_S = 0.05  # what a slow disk adds to each checkpoint


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of which each is padded by another length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=chance)
        real = LENGTH - index % 17
        mask = (torch.arange(LENGTH) < real).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=LENGTH,
        )  # fmt: skip
        self.network: Any = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.network(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Truth(Callback):
    """The program's own account. Placed first, and `After` it last: ours are between the two."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.seen: dict[str, Any] = {
            "real": [], "computed": [],
            "eval_s": [0.0, 0.0], "checkpoint_s": [0.0, 0.0],  # within, and in all
        }  # fmt: skip
        self.evals_s = [0.0, 0.0]  # where ours has not begun yet, and where it has

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.seen.setdefault("outside_s", [time.monotonic()])
        self.seen["real"].append(int(batch["attention_mask"].sum()))
        self.seen["computed"].append(batch["input_ids"].numel())

    def on_before_optimizer_step(self, *_: Any) -> None:
        now_s = time.monotonic()
        self.seen["inside_s"] = [self.seen.get("inside_s", [now_s])[0], now_s]

    def on_validation_start(self, *_: Any) -> None:
        self.evals_s[0] = time.monotonic()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.seen["eval_s"][0] += time.monotonic() - self.evals_s[1]

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.seen |= {
            "losses": module.losses,
            "steps": trainer.global_step,
            "parameters": sum(one.numel() for one in module.parameters()),
            "rank": trainer.global_rank,
        }
        Path(f"{self.out}-{trainer.global_rank}.json").write_text(json.dumps(self.seen))


class After(Callback):
    """Called where all others have been."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth

    def on_train_batch_end(self, *_: Any) -> None:
        self.truth.seen["outside_s"][1:] = [time.monotonic()]

    def on_validation_start(self, *_: Any) -> None:
        self.truth.evals_s[1] = time.monotonic()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.truth.seen["eval_s"][1] += time.monotonic() - self.truth.evals_s[0]


class Slow(ModelCheckpoint):
    """Times its own saving."""

    def __init__(self, truth: Truth, **options: Any) -> None:
        super().__init__(**options)
        self.truth = truth

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        start_s = time.monotonic()
        super()._save_checkpoint(trainer, filepath)
        self.truth.seen["checkpoint_s"][1] += time.monotonic() - start_s

    def on_save_checkpoint(self, *_: Any) -> None:
        start_s = time.monotonic()
        time.sleep(SAVE_S)
        self.truth.seen["checkpoint_s"][0] += time.monotonic() - start_s


def main(out: str, how: str, strategy: str = "auto", count: str = "1") -> None:
    devices = int(count)
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    truth = Truth(out)
    callbacks: list[Any] = [truth, Slow(truth, every_n_train_steps=5, dirpath=f"{out}-saved")]
    if how != "plain":
        from ergmeter.integrations.lightning import ErgmeterCallback

        callbacks += [ErgmeterCallback(probes=["process"]) for _ in range(2)]  # twice is once
    callbacks.append(After(truth))
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, max_steps=STEPS, logger=False,
        accumulate_grad_batches=MICRO, val_check_interval=EVALUATE_EVERY, limit_val_batches=2,
        num_sanity_val_steps=1, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks,
    )  # fmt: skip
    rows = STEPS * MICRO * BATCH * devices
    trainer.fit(
        Task(),
        torch.utils.data.DataLoader(Rows(rows), batch_size=BATCH),
        torch.utils.data.DataLoader(Rows(8 * devices), batch_size=BATCH),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
