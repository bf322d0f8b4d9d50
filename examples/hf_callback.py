"""transformers' Trainer, measured: one line more, the callback.

python examples/hf_callback.py [STEPS]

A tiny Llama on random texts of several lengths, from scratch: nothing is downloaded. Texts are
padded to the longest of their batch; what the padding costs is in the report.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ergmeter.integrations.huggingface import ErgmeterCallback

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 900  # fewer last too short to tell a rate
BATCH, LONGEST, VOCABULARY = 4, 64, 256


class RandomTexts(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(16, LONGEST + 1, (), generator=generator))
        return torch.randint(1, VOCABULARY, (length,), generator=generator)


def padded(texts):
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LONGEST,
)
measured = ErgmeterCallback(warmup_steps=3)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=RandomTexts(),
    data_collator=padded,
    callbacks=[measured],
)
trainer.train()
print(measured.summary().readings["throughput.tokens_per_s"])
print(f"erg report {measured.path}")
