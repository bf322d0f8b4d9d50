"""A Trainer under torchrun, with the callback and a count of its own of what its model was given.

    torchrun --nproc_per_node=2 hf_ranks.py

Each rank writes its own count to RANK.json.
"""

import json
import os
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ergmeter.integrations.huggingface import ErgmeterCallback

given = {"computed": 0, "real": 0, "samples": 0}


class Texts(torch.utils.data.Dataset[list[int]]):
    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> list[int]:
        return [1 + index] * (5 + 7 * index % 11)


def padded(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    rows = [(text, longest - len(text)) for text in texts]
    ids = torch.tensor([text + [0] * empty for text, empty in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids}


def count(module: torch.nn.Module, _: Any, named: dict[str, torch.Tensor]) -> None:
    if module.training:
        given["computed"] += named["input_ids"].numel()
        given["real"] += int(named["attention_mask"].sum())
        given["samples"] += len(named["input_ids"])


set_seed(1)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
model.register_forward_pre_hook(count, with_kwargs=True)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=4,
        report_to="none",
        use_cpu=True,
        include_num_input_tokens_seen="non_padding",
    ),
    train_dataset=Texts(),
    eval_dataset=Texts(),
    data_collator=padded,
    callbacks=[ErgmeterCallback(probes=["process"])],
)
trainer.train()
given["seen"] = trainer.state.num_input_tokens_seen
given["steps"] = trainer.state.global_step
Path(f"{os.environ['RANK']}.json").write_text(json.dumps(given))
