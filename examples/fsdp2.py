"""A model sharded by FSDP2, measured: one line more, and the whole model's parameters and FLOPs.

torchrun --nproc_per_node=2 examples/fsdp2.py [STEPS]

It runs on CPUs too, and alone: `python examples/fsdp2.py`.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter.integrations.torch_loop import watch

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 600  # fewer last too short to tell a rate
BATCH, LENGTH, VOCABULARY = 4, 64, 256
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    meeting = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
torch.manual_seed(dist.get_rank())
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
model = LlamaForCausalLM(config)
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watched = watch(model, optimizer, warmup_steps=3)

for _ in range(STEPS):
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

watched.close()
dist.barrier()  # every rank has closed its share of the run
if dist.get_rank() == 0:
    print(watched.summary().readings["throughput.tokens_per_s"])
    print(f"erg report {watched.path}")
dist.destroy_process_group()
