"""A plain torch loop and one line: its steps, tokens and data waits are seen.

python examples/plain_torch.py
"""

import torch
from torch import nn

from ergmeter.integrations.torch_loop import watch

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watched = watch(model, optimizer, warmup_steps=3)

for _ in range(30):
    ids = torch.randint(0, 256, (4, 65))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    watched.logged(loss=loss.item())

summary = watched.summary()
for key in ("throughput.tokens_per_s", "time.step_s", "training.loss"):
    print(key, summary.readings[key])
print(f"erg report runs/{watched.path.name}")
