"""A plain loop that knows nothing of ergmeter, and prints a loss that is none: `LOST_AT`.

Goes on for longer than it takes to be stopped.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

LOST_AT = int(sys.argv[1])

torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1000):
    ids = torch.randint(0, 256, (4, 65))
    logits = model(ids[:, :-1]).flatten(0, 1)
    loss: Any = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    shown = float("nan") if step >= LOST_AT else loss.item()
    print(f"step={step} loss={shown:.3f} tokens=256", flush=True)
