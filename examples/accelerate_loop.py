"""An Accelerate loop with gradient accumulation, and one line: padding is not counted as tokens.

python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter.integrations.torch_loop import watch

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
)
model = LlamaForCausalLM(config)
rows = [torch.randint(5, 256, (8 + number % 9,)) for number in range(96)]


def padded(batch):
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(rows, batch_size=4, collate_fn=padded)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
watched = watch(model, optimizer, warmup_steps=2)

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    watched.logged(loss=loss.item())

summary = watched.summary()
for key in ("throughput.tokens_per_s", "tokens.padding_frac", "time.data_s"):
    print(key, summary.readings[key])
print(f"erg report runs/{watched.path.name}")
