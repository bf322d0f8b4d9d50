"""A plain torch loop and one line: its steps, tokens and data waits are seen.

python examples/plain_torch.py [STEPS]
"""

import sys

import torch
from torch import nn

from ergmeter.integrations.torch_loop import watch

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300  # fewer last too short to tell a rate

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 512), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watched = watch(model, optimizer, warmup_steps=3)

for _ in range(STEPS):
    ids = torch.randint(0, 256, (8, 129))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    watched.logged(loss=loss.item())

summary = watched.summary()
for key in ("throughput.tokens_per_s", "time.step_s", "training.loss"):
    print(key, summary.readings[key])
print(f"erg report runs/{watched.path.name}")
