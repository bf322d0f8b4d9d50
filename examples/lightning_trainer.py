"""Lightning's Trainer, measured: one line more, the callback.

python examples/lightning_trainer.py [STEPS]

A tiny Llama on random tokens, from scratch: nothing is downloaded. What `self.log` logs as the loss
is seen without a logger.
"""

import logging
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter.integrations.lightning import ErgmeterCallback

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 600  # fewer last too short to tell a rate
BATCH, LENGTH, VOCABULARY = 4, 64, 256
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it greets at length
warnings.simplefilter("ignore")


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class LanguageModel(LightningModule):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
        self.network = LlamaForCausalLM(config)

    def training_step(self, batch, _):
        loss = self.network(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


measured = ErgmeterCallback(warmup_steps=3)
trainer = Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[measured],
)
trainer.fit(LanguageModel(), torch.utils.data.DataLoader(RandomTokens(), batch_size=BATCH))
print(measured.summary().readings["throughput.tokens_per_s"])
print(f"erg report {measured.path}")
