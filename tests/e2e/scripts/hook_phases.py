"""Evaluates before its first step and after its last, and saves: `hook_phases.py LIBRARY`.

LIBRARY is imported first, as many programs do: lightning or lightning_fabric, before torch; or
torch itself, and then torch.save is used. Prints the TRUTH: how long evaluations and saves took.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

LIBRARY = sys.argv[1]
library: Any = importlib.import_module(LIBRARY)

import torch  # noqa: E402
from torch import nn  # noqa: E402

EVALUATED, SAVED = 0.2, 0.1
STEPS = 12


def evaluate(model: Any, ids: torch.Tensor, *, goes_on: bool = True) -> float:
    begun_s = time.monotonic()
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            model(ids)
            time.sleep(EVALUATED / 4)
        model(ids)
    if goes_on:
        model.train()
    return time.monotonic() - begun_s


class Slow:
    """A part of a checkpoint that takes a while to write."""

    def __reduce__(self) -> Any:
        time.sleep(SAVED)
        return (int, ())


def main() -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    model: Any = made
    optimizer: Any = torch.optim.AdamW(made.parameters(), lr=1e-3)
    fabric: Any = None
    if LIBRARY != "torch":
        fabric = library.Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model, optimizer = fabric.setup(made, optimizer)
    ids = torch.randint(0, 32, (4, 16))

    def save(name: str) -> float:
        begun_s = time.monotonic()
        state = {"model": model if fabric else made.state_dict(), "slow": Slow()}
        fabric.save(name, state) if fabric else torch.save(state, name)
        return time.monotonic() - begun_s

    evals = [evaluate(model, ids)]
    saves = []
    for step in range(STEPS):
        loss: Any = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        fabric.backward(loss) if fabric else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (3, 7):
            saves.append(save(f"{step}.pt"))
    saves.append(save("last.pt"))
    evals.append(evaluate(model, ids, goes_on=False))
    time.sleep(0.3)  # what follows is neither
    print("TRUTH", json.dumps({"steps": STEPS, "evals": evals, "saves": saves}))


main()
