"""A tiny Llama under DeepSpeed's ZeRO-3, on the CPU, over the ranks of torchrun.

    deepspeed_loop.py plain|metered...

One after the other. Each rank writes to plain-RANK.json and metered-RANK.json what it did, by its
own count and clock.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, MICRO, BATCH, LENGTH, VOCABULARY = 12, 2, 4, 48, 128
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": MICRO,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def made() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(rank: int, number: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * rank + number)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=chance)
    real = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=chance)
    mask = (torch.arange(LENGTH) < real).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def train(how: str) -> None:
    rank = dist.get_rank()
    model = made()
    parameters = sum(one.numel() for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    held = sum(one.numel() for one in engine.parameters())
    watched: Any = None
    if how == "metered":
        from ergmeter.integrations.torch_loop import watch

        watched = watch(engine, optimizer, probes=["process"])
    losses: list[float] = []
    real: list[int] = []
    computed: list[int] = []
    dist.barrier()
    start_s, amids_s = time.monotonic(), []
    for number in range(STEPS * MICRO):
        one = batch(rank, number)
        real.append(int(one["attention_mask"].sum()))
        computed.append(one["input_ids"].numel())
        loss = engine(**one).loss
        engine.backward(loss)
        amids_s.append(time.monotonic())
        engine.step()
        losses.append(loss.item())
    end_s = time.monotonic()
    if watched is not None:
        watched.close()
    said = {
        "losses": losses, "real": real, "computed": computed,
        "outside_s": [start_s, end_s], "inside_s": [amids_s[0], amids_s[-1]],
        "parameters": parameters, "held": held, "steps": engine.global_steps,
    }  # fmt: skip
    Path(f"{how}-{rank}.json").write_text(json.dumps(said))
    engine.destroy()
    dist.barrier()


deepspeed.ops.__compatible_ops__.clear()  # gloo does; nothing is to be compiled for a test
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
for how in sys.argv[1:]:
    train(how)
