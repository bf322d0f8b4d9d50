"""A loop of Lightning Fabric, measured: one line more, after `fabric.setup`.

python examples/fabric_loop.py [STEPS]
"""

import sys

import torch
from lightning.fabric import Fabric
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter.integrations.torch_loop import watch

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 600  # fewer last too short to tell a rate
BATCH, LENGTH, VOCABULARY = 4, 64, 256
fabric = Fabric(accelerator="cpu", devices=1)
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
model = LlamaForCausalLM(config)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
watched = watch(model, optimizer, warmup_steps=3)

for _ in range(STEPS):
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), device=fabric.device)
    loss = model(input_ids=ids, labels=ids).loss
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    watched.logged(loss=loss.detach())  # optional

print(watched.summary().readings["throughput.tokens_per_s"])
print(f"erg report {watched.path}")
