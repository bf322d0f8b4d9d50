"""A small training that prints its losses as other programs do: `hook_prints.py KIND`.

KIND is `plain`, `table` (as pytorch's word_language_model, which updates its weights itself) or
`bar` (tqdm, with the loss in its postfix).
Prints as TRUTH, to standard error, the losses that it printed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

KIND = sys.argv[1]
STEPS, EPOCHS = 20, 2
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
printed: list[float] = []


def step(optimizer: Any = None) -> float:
    ids = torch.randint(0, 16, (2, 8))
    loss: Any = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    model.zero_grad()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.1)
    time.sleep(0.01)
    return float(loss)


def plain() -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        printed.append(round(step(optimizer), 3))
        print(f"step {number}: loss {printed[-1]:.3f}")


def table() -> None:
    for epoch in range(1, EPOCHS + 1):
        for batch in range(STEPS):
            loss = step()
            if batch and batch % 5 == 0:
                printed.append(round(loss, 2))
                print(
                    f"| epoch {epoch:3d} | {batch:5d}/{STEPS:5d} batches | lr 20.00 |"
                    f" ms/batch {10.0:5.2f} | loss {loss:5.2f} | ppl {99.0:8.2f}"
                )


def bar() -> None:
    from tqdm import tqdm

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tqdm(total=STEPS, mininterval=0) as shown:
        for _ in range(STEPS):
            loss = step(optimizer)
            shown.update()  # draws the new number with the old loss
            shown.set_postfix(loss=f"{loss:.4f}")
            printed.append(round(loss, 4))


{"plain": plain, "table": table, "bar": bar}[KIND]()
print("TRUTH", json.dumps({"losses": printed}), file=sys.stderr)
