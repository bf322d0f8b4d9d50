"""Trainings one after the other, of a program that knows nothing of ergmeter: `NAME...`.

Each prints its TRUTH: what it did, by its own count and clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 64


class Small(nn.Module):
    """A model of a width, called by position or by name."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.hidden(self.embed(input_ids))))
        return found


class Timed:
    """The program's own clock: around the steps, and amid the first and the last of them."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []
        self.amids_s: list[float] = []
        self.end_s = 0.0

    def began(self) -> None:
        self.starts_s.append(time.perf_counter())

    def amid(self) -> None:
        """After the forward, before the optimizer's step."""
        self.amids_s.append(time.perf_counter())

    def ended(self) -> None:
        self.end_s = time.perf_counter()

    def truth(self, name: str, tokens: int, **more: Any) -> None:
        said = {
            "steps": len(self.starts_s), "tokens": tokens,
            "outside_s": [self.starts_s[0], self.end_s],
            "inside_s": [self.amids_s[0], self.amids_s[-1]],
            **more,
        }  # fmt: skip
        print("TRUTH", json.dumps({"name": name, **said}), flush=True)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def size(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def teacher() -> None:
    taught, frozen, timed = Small(8), Small(128), Timed()
    frozen.requires_grad_(requires_grad=False)
    optimizer = sgd(taught)
    for _ in range(20):
        x = ids(2, 8)
        wanted = frozen(x)  # in training mode, called first
        timed.began()
        loss = (taught(x) - wanted).square().mean()
        loss.backward()
        timed.amid()
        optimizer.step()
        optimizer.zero_grad()
        timed.ended()
        time.sleep(0.002)
    timed.truth("teacher", 20 * 16, parameters=size(taught))


def padded() -> None:
    model, timed, real = Small(), Timed(), 0
    optimizer = sgd(model)
    for _ in range(20):
        x = ids(4, 16)
        lengths = torch.randint(3, 17, (4, 1))
        mask = (torch.arange(16) < lengths).long()
        real += int(lengths.sum())
        timed.began()
        model(input_ids=x, attention_mask=mask).mean().backward()
        timed.amid()
        optimizer.step()
        timed.ended()
        time.sleep(0.002)
    timed.truth("padded", 20 * 64, real=real, parameters=size(model))


class Slowly(dict[str, torch.Tensor]):
    """Takes its time while it is saved, and knows how much."""

    held_s = 0.0

    def items(self) -> Any:
        begun_s = time.perf_counter()
        time.sleep(0.03)
        self.held_s += time.perf_counter() - begun_s
        return super().items()


def accumulated() -> None:
    """Four micro-batches a step; evaluation and a checkpoint every five steps."""
    model, timed = Small(), Timed()
    optimizer = sgd(model)
    evals_s, saving_s = [0.0, 0.0], 0.0  # within, and in all
    big = Slowly(weights=torch.zeros(4_000_000))
    for step in range(15):
        for micro in range(4):
            if micro == 0:
                timed.began()
            model(ids(2, 8)).mean().backward()
            time.sleep(0.001)
        timed.amid()
        optimizer.step()
        timed.ended()
        if step % 5 == 4 and step < 14:
            begun_s = time.perf_counter()
            model.eval()
            within_s = time.perf_counter()
            with torch.no_grad():
                for _ in range(3):
                    model(ids(8, 8))
                    time.sleep(0.02)
            evals_s[0] += time.perf_counter() - within_s
            model.train()
            evals_s[1] += time.perf_counter() - begun_s
            begun_s = time.perf_counter()
            save_file(big, "big.safetensors")
            torch.save(model.state_dict(), "small.pt")
            saving_s += time.perf_counter() - begun_s
    saves_s = [big.held_s, saving_s]
    timed.truth("accumulated", 15 * 64, micro=4, eval_s=evals_s, checkpoint_s=saves_s)


def gan() -> None:
    """The judge steps, then the maker, in every iteration; neither reads tokens."""
    maker, judge, timed = nn.Linear(4, 8), nn.Linear(8, 1), Timed()
    judging, making = sgd(judge), sgd(maker)
    for _ in range(20):
        timed.began()
        made = maker(torch.randn(16, 4))
        (judge(torch.randn(16, 8)).mean() - judge(made.detach()).mean()).backward()
        timed.amid()
        judging.step()
        judging.zero_grad()
        judge(maker(torch.randn(16, 4))).mean().backward()
        making.step()
        making.zero_grad()
        timed.ended()
        time.sleep(0.002)
    timed.truth("gan", 0)


def halves() -> None:
    """Two optimizers for one model, one right after the other."""
    model, timed = Small(), Timed()
    one = torch.optim.SGD(model.embed.parameters(), lr=0.01)
    other = torch.optim.AdamW([*model.hidden.parameters(), *model.head.parameters()], lr=0.01)
    for _ in range(20):
        timed.began()
        model(ids(2, 8)).mean().backward()
        timed.amid()
        one.step()
        other.step()
        timed.ended()
        time.sleep(0.002)
    timed.truth("halves", 20 * 16, parameters=size(model))


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return ids(1, 8)[0]


def loaded() -> None:
    """Two forked workers, which are slower than the loop."""
    model, timed = Small(), Timed()
    optimizer = sgd(model)
    loader: DataLoader[torch.Tensor] = DataLoader(Slow(), batch_size=2, num_workers=2)
    waited_s = 0.0
    batches: Any = iter(loader)
    fetch, within_s = batches._next_data, []

    def timed_fetch() -> torch.Tensor:
        begun_s = time.perf_counter()
        found: torch.Tensor = fetch()
        within_s.append(time.perf_counter() - begun_s)
        return found

    batches._next_data = timed_fetch
    for _ in range(20):
        begun_s = time.perf_counter()
        x = next(batches)
        waited_s += time.perf_counter() - begun_s
        timed.began()
        model(x).mean().backward()
        timed.amid()
        optimizer.step()
        timed.ended()
    timed.truth("loaded", 20 * 16, data_s=[sum(within_s), waited_s], parameters=size(model))


def uneven() -> None:
    """One step in ten takes twenty times as long."""
    model, timed = Small(), Timed()
    optimizer = sgd(model)
    for step in range(30):
        timed.began()
        model(ids(2, 8)).mean().backward()
        time.sleep(0.1 if step % 10 == 5 else 0.005)
        timed.amid()
        optimizer.step()
        timed.ended()
    timed.truth("uneven", 30 * 16)


def in_eval_mode() -> None:
    """Trained in eval mode, as some do to keep what a model has learned of its statistics."""
    model, timed = Small().eval(), Timed()
    optimizer = sgd(model)
    for _ in range(10):
        timed.began()
        model(ids(2, 8)).mean().backward()
        timed.amid()
        optimizer.step()
        timed.ended()
        time.sleep(0.002)
    timed.truth("in_eval_mode", 10 * 16)


def copied() -> None:
    """The model is copied, pickled and scripted between steps, and saved whole."""
    import copy
    import pickle

    model, timed = Small(), Timed()
    optimizer = sgd(model)
    for _ in range(6):
        timed.began()
        model(ids(2, 8)).mean().backward()
        timed.amid()
        optimizer.step()
        timed.ended()
        copy.deepcopy(model)(ids(2, 8))
        pickle.loads(pickle.dumps(model))(ids(2, 8))
    torch.save(model, "whole.pt")
    assert b"ergmeter" not in Path("whole.pt").read_bytes()
    timed.truth("copied", 6 * 16)


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], None]] = {
        one.__name__: one
        for one in (
            teacher, padded, accumulated, gan, halves, loaded, uneven, in_eval_mode, copied,
        )
    }  # fmt: skip
    for name in names or kinds:
        kinds[name]()


main(sys.argv[1:])
