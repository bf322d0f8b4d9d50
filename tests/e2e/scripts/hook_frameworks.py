"""A Trainer evaluates before it trains; after it has trained, it saves and evaluates again.

    hook_frameworks.py transformers|lightning|pytorch_lightning

After that another model is trained: by a plain loop, or by one of that Lightning's Fabric, which
evaluates and saves too. Lightning is imported before torch, as many programs do. Prints as TRUTH
how long evaluations and saves took, of the Trainer and of the loop.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
import warnings
from typing import Any

FRAMEWORK = sys.argv[1]
FABRIC = {"lightning": "lightning", "pytorch_lightning": "lightning_fabric"}.get(FRAMEWORK)
if FABRIC:
    importlib.import_module(FRAMEWORK)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

STEPS, ROWS, LENGTH, VOCABULARY = 8, 2, 16, 64
SLEPT = 0.2
LOOP_STEPS = 5
warnings.simplefilter("ignore")
torch.manual_seed(0)
rows: Any = list(torch.randint(0, VOCABULARY, (STEPS * ROWS, LENGTH)))
took: dict[str, list[float]] = {"evals": [], "saves": [], "loop_evals": [], "loop_saves": []}


def timed(kind: str, call: Any, *arguments: Any) -> None:
    begun_s = time.monotonic()
    call(*arguments)
    took[kind].append(time.monotonic() - begun_s)


class Slow:
    """A part of a checkpoint that takes a while to write."""

    def __reduce__(self) -> Any:
        time.sleep(SLEPT / 2)
        return (int, ())


def with_transformers() -> None:
    import light  # type: ignore[import-not-found]  # noqa: F401
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir="out", per_device_train_batch_size=ROWS, num_train_epochs=1, logging_steps=4,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip

    class Trainer(transformers.Trainer):
        def evaluation_loop(self, *given: Any, **named: Any) -> Any:
            time.sleep(SLEPT)
            return super().evaluation_loop(*given, **named)

        def _save(self, *given: Any, **named: Any) -> None:
            time.sleep(SLEPT / 2)
            super()._save(*given, **named)

    data = [{"input_ids": one, "labels": one} for one in rows]
    trainer = Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
    )
    timed("evals", trainer.evaluate)
    trainer.train()
    timed("saves", trainer.save_model)
    timed("evals", trainer.evaluate)


def with_lightning(name: str) -> None:
    pl: Any = importlib.import_module(name)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

        def training_step(self, batch: Any, _: int) -> Any:
            return nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())

        def validation_step(self, batch: Any, number: int) -> Any:
            time.sleep(SLEPT if number == 0 else 0)
            return self.training_step(batch, number)

        test_step = validation_step

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["slow"] = Slow()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=0,
    )  # fmt: skip
    module, loader = Small(), DataLoader(rows, batch_size=ROWS)
    timed("evals", trainer.test, module, loader, None, False)
    trainer.fit(module, loader)
    timed("saves", trainer.save_checkpoint, "last.ckpt")
    timed("evals", trainer.test, module, loader, None, False)


def plain() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(LOOP_STEPS):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def with_fabric(name: str) -> None:
    fabric = importlib.import_module(name).Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    made = nn.Linear(4, 4)
    model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 4))
            time.sleep(SLEPT)
            model(torch.ones(2, 4))
        model.train()

    for step in range(LOOP_STEPS):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        if step == 2:
            timed("loop_saves", fabric.save, "loop.pt", {"model": model, "slow": Slow()})
            timed("loop_evals", evaluate)
    timed("loop_saves", fabric.save, "last.pt", {"model": model, "slow": Slow()})
    timed("loop_evals", evaluate)


if FABRIC:
    with_lightning(FRAMEWORK)
    with_fabric(FABRIC)
else:
    with_transformers()
    plain()
print("TRUTH", json.dumps({"steps": STEPS, "loop_steps": LOOP_STEPS, **took}))
