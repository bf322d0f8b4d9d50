"""A plain loop of a small GPT that knows nothing of ergmeter: `hook_plain.py [STEPS] [compiled]`.

Prints its losses, and the TRUTH by its own clock.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
ROWS, LENGTH, VOCABULARY, WIDTH = 4, 32, 256, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return found


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gpt = Gpt()
    model: Any = torch.compile(gpt, backend="eager") if "compiled" in sys.argv else gpt
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    data = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1))
    losses, amids_s = [], []
    for _ in range(STEPS):
        loss: Any = nn.functional.cross_entropy(
            model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        amids_s.append(time.perf_counter())
        optimizer.step()
        time.sleep(0.01)
        losses.append(loss.item().hex())
    end_s = time.perf_counter()
    truth = {
        "steps": STEPS,
        "tokens": STEPS * ROWS * LENGTH,
        # Of the steps after the first, which begin somewhere between these two.
        "outside_s": [amids_s[0], end_s],
        "inside_s": [amids_s[1], amids_s[-1]],
        "parameters": sum(p.numel() for p in gpt.parameters()),
        "losses": losses,
    }
    print("TRUTH", json.dumps(truth))


main()
