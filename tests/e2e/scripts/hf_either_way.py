"""One Trainer script for two ways of measuring it. hf_either_way.py [RUN]

With RUN its one line more is the callback; without, it knows nothing of ergmeter. Prints as TRUTH
the tokens of the steps after the third, and when these were under way by its own clock.
"""

import json
import sys
import time
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

STEPS, BATCH, LENGTH, SKIPPED = 20, 4, 64, 3
set_seed(1)
amids: list[float] = []
tokens: list[int] = []


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(LENGTH) < LENGTH - index % 20).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


class Clock(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        amids.append(time.perf_counter())
        first = (len(amids) - 1) * BATCH
        tokens.append(sum(LENGTH - index % 20 for index in range(first, first + BATCH)))


callbacks: list[TrainerCallback] = [Clock()]
if len(sys.argv) > 1:
    from ergmeter.integrations.huggingface import ErgmeterCallback

    callbacks.append(ErgmeterCallback(sys.argv[1], warmup_steps=SKIPPED))
config = LlamaConfig(
    vocab_size=128,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=BATCH,
    num_train_epochs=1,
    logging_steps=4,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(Texts())


InOrder(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Texts(),
    callbacks=callbacks,
).train()
said = {
    "steps": len(tokens) - SKIPPED,
    "tokens": sum(tokens[SKIPPED:]),
    "outside_s": [amids[SKIPPED - 1], time.perf_counter()],
    "inside_s": [amids[SKIPPED], amids[-1]],
}
print("TRUTH", json.dumps(said))
