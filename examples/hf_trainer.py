"""A script of transformers' Trainer, which knows nothing of ergmeter, recorded from outside.

erg record --warmup-steps 3 -- python examples/hf_trainer.py [STEPS]

A tiny Llama on random tokens, from scratch: nothing is downloaded. Two arguments matter to the
recording: `logging_steps` (each printed line ends a step) and `include_num_input_tokens_seen`.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200  # fewer last too short to tell a rate
BATCH, LENGTH, VOCABULARY = 4, 256, 256


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=BATCH,
    num_train_epochs=1,
    logging_steps=1,
    include_num_input_tokens_seen="all",
    save_strategy="no",
    report_to="none",
)
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=RandomTokens()).train()
