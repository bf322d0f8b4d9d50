"""A tiny Llama, sharded over the ranks of torchrun, in a plain loop.

    fsdp_loop.py KIND...

KIND is fsdp2, fsdp1 or fsdp1-flat. One is trained after the other: all plain, and then all metered,
each into a run of its name. Each rank writes to plain-KIND-RANK.json and metered-KIND-RANK.json
what it did by its own count and clock.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS, MICRO, BATCH, LENGTH, VOCABULARY = 12, 2, 4, 48, 128


def made() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    return model


def sharded(how: str) -> Any:
    model = made()
    if how == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=how == "fsdp1", device_id=torch.device("cpu"),
    )  # fmt: skip


def batch(rank: int, number: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * rank + number)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=chance)
    real = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=chance)
    mask = (torch.arange(LENGTH) < real).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def train(how: str, kind: str) -> None:
    rank = dist.get_rank()
    plain = made()
    sizes = [(one.numel(), one.requires_grad) for one in plain.parameters()]
    model = sharded(kind)
    held = sum(one.to_local().numel() if hasattr(one, "to_local") else one.numel()
               for one in model.parameters())  # fmt: skip
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    watched: Any = None
    if how == "metered":
        from ergmeter.integrations.torch_loop import watch

        watched = watch(model, optimizer, out=kind, probes=["process"])
    losses: list[float] = []
    real: list[int] = []
    squares = 0
    computed: list[int] = []
    dist.barrier()
    start_s, amids_s = time.monotonic(), []
    for step in range(STEPS):
        for micro in range(MICRO):
            one = batch(rank, step * MICRO + micro)
            real.append(int(one["attention_mask"].sum()))
            squares += int((one["attention_mask"].sum(-1) ** 2).sum())
            computed.append(one["input_ids"].numel())
            loss = model(**one).loss
            (loss / MICRO).backward()
            losses.append(loss.item())
        amids_s.append(time.monotonic())
        optimizer.step()
        optimizer.zero_grad()
        if watched is not None:
            watched.logged(loss=losses[-1])
    end_s = time.monotonic()
    if watched is not None:
        watched.close()
    said = {
        "losses": losses, "real": real, "squares": squares, "computed": computed,
        "outside_s": [start_s, end_s], "inside_s": [amids_s[0], amids_s[-1]],
        "parameters": sum(size for size, _ in sizes), "held": held,
        "parameters_trained": sum(size for size, trained in sizes if trained),
    }  # fmt: skip
    Path(f"{how}-{kind}-{rank}.json").write_text(json.dumps(said))


dist.init_process_group("gloo")
for how in ("plain", "metered"):
    for kind in sys.argv[1:]:
        train(how, kind)
        dist.barrier()
dist.destroy_process_group()
