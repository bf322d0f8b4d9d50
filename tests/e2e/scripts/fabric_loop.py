"""A tiny Llama in a loop of Lightning Fabric, with gradient accumulation and an evaluation.

    fabric_loop.py plain|metered...

One after the other. Writes to plain.json and metered.json what each loop did by its own count and
clock.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, MICRO, BATCH, LENGTH, VOCABULARY = 20, 4, 4, 48, 128


def batch(number: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=chance)
    real = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=chance)
    mask = (torch.arange(LENGTH) < real).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def main(how: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config)
    model: Any
    model, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
    watched: Any = None
    if how == "metered":
        from ergmeter.integrations.torch_loop import watch

        watched = watch(model, optimizer, probes=["process"])
    losses: list[float] = []
    real: list[int] = []
    computed: list[int] = []
    start_s, amids_s, evals_s = time.monotonic(), [], [0.0, 0.0]
    for step in range(STEPS):
        for micro in range(MICRO):
            one = batch(step * MICRO + micro)
            real.append(int(one["attention_mask"].sum()))
            computed.append(one["input_ids"].numel())
            with fabric.no_backward_sync(model, enabled=micro < MICRO - 1):
                loss = model(**one).loss
                fabric.backward(loss / MICRO)
            losses.append(loss.item())
        amids_s.append(time.monotonic())
        optimizer.step()
        optimizer.zero_grad()
        if watched is not None:
            watched.logged(loss=losses[-1])
        if step == STEPS // 2:
            begun_s = time.monotonic()
            model.eval()
            within_s = time.monotonic()
            with torch.no_grad():
                for number in range(10):
                    model(**batch(1000 + number))
            evals_s[0] = time.monotonic() - within_s
            model.train()
            evals_s[1] = time.monotonic() - begun_s
    end_s = time.monotonic()
    if watched is not None:
        watched.close()
    said = {
        "losses": losses, "real": real, "computed": computed,
        "outside_s": [start_s, end_s], "inside_s": [amids_s[0], amids_s[-1]], "eval_s": evals_s,
        "parameters": sum(one.numel() for one in made.parameters()),
    }  # fmt: skip
    Path(f"{how}.json").write_text(json.dumps(said))


for how in sys.argv[1:]:
    main(how)
