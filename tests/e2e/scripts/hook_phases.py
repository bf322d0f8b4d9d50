"""Evaluates before its first step and after its last, and saves.

Prints the TRUTH: how long evaluations and saves took.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import nn

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
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 32, (4, 16))

    def save(name: str) -> float:
        begun_s = time.monotonic()
        torch.save({"model": model.state_dict(), "slow": Slow()}, name)
        return time.monotonic() - begun_s

    evals = [evaluate(model, ids)]
    saves = []
    for step in range(STEPS):
        loss: Any = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (3, 7):
            saves.append(save(f"{step}.pt"))
    saves.append(save("last.pt"))
    evals.append(evaluate(model, ids, goes_on=False))
    time.sleep(0.3)  # what follows is neither
    print("TRUTH", json.dumps({"steps": STEPS, "evals": evals, "saves": saves}))


main()
