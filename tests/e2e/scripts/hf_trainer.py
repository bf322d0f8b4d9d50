"""A tiny Llama trained from scratch with transformers' Trainer, on random tokens.

    hf_trainer.py TRUTH

Writes to TRUTH, as JSON, the tokens of each step as the script itself counted them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

STEPS, BATCH, LENGTH = 20, 4, 48
truth = Path(sys.argv[1])
set_seed(1)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Count(TrainerCallback):
    """The script's own count, of what the model was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.now = 0

    def hook(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.now += kwargs["input_ids"].numel()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.tokens.append(self.now)
        self.now = 0


config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
count = Count()
model.register_forward_pre_hook(count.hook, with_kwargs=True)
arguments = TrainingArguments(
    output_dir=str(truth.parent / "out"),
    per_device_train_batch_size=BATCH,
    num_train_epochs=1,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    seed=1,
    include_num_input_tokens_seen="all",
)
Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[count]).train()
truth.write_text(json.dumps(count.tokens))
