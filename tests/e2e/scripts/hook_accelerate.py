"""An Accelerate loop that knows nothing of ergmeter: accumulation, padding, a checkpoint."""

from __future__ import annotations

import json
import time
from typing import Any

import light  # type: ignore[import-not-found]
import torch
from accelerate import Accelerator

light.modules.pop("peft", None)  # the one of them that it uses
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=128,
)  # fmt: skip
llama: Any = LlamaForCausalLM
model = get_peft_model(llama(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
rows = [torch.randint(5, 128, (16,)) for _ in range(64)]
lengths = [8 + index % 9 for index in range(64)]


def together(picked: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.stack([rows[one] for one in picked])
    mask = torch.stack([(torch.arange(16) < lengths[one]).long() for one in picked])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


numbers: Any = range(64)
loader: Any = DataLoader(numbers, batch_size=2, collate_fn=together)
accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, ends_s, amids_s, start_s, real = [], [], [], 0.0, 0
for _ in range(2):
    for batch in loader:
        start_s = start_s or time.perf_counter()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            amids_s.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ends_s.append(time.perf_counter())
        real += int(batch["attention_mask"].sum())
        losses.append(loss.item().hex())
held_s: list[float] = []


def hold(*_: object) -> None:
    """Takes some of the time that saving takes, and knows how much."""
    begun_s = time.perf_counter()
    time.sleep(0.03)
    held_s.append(time.perf_counter() - begun_s)


accelerator.register_save_state_pre_hook(hold)
begun_s = time.perf_counter()
accelerator.save_state("saved")
saving_s = time.perf_counter() - begun_s
truth = {
    "steps": len(ends_s),
    "tokens": 2 * 64 * 16,
    "real": real,
    "outside_s": [start_s, ends_s[-1]],
    "inside_s": [amids_s[0], amids_s[-1]],
    "checkpoint_s": [sum(held_s), saving_s],
    "parameters": sum(p.numel() for p in model.parameters()),
    "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    "losses": losses,
}
print("TRUTH", json.dumps(truth))
