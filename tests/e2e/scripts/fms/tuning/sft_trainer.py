"""Stands where fms-hf-tuning would, which wants an older torch: `python -m tuning.sft_trainer`.

Takes its arguments, trains an adapter of rank `--r` on its data, all ranks together by gloo, and
prints at the end what transformers' Trainer prints, with the same mean of the loss. Every rank
leaves its arguments in --output_dir.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


class Adapted(torch.nn.Module):
    """A frozen layer and a trained one of low rank, as of LoRA."""

    def __init__(self, r: int, alpha: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.a, self.b = torch.nn.Linear(WIDTH, r, False), torch.nn.Linear(r, WIDTH, False)
        self.scale = alpha / r

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) + self.scale * self.b(self.a(x))


def arguments() -> argparse.Namespace:
    """The arguments that it makes use of; all others are in `given`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in (("r", int), ("per_device_train_batch_size", int), ("max_steps", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("lora_alpha", "learning_rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("training_data_path", "output_dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--skip_memory_metrics", default="True")
    return parser.parse_known_args()[0]


def main() -> None:
    asked = arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(rank)
    model: torch.nn.Module = Adapted(asked.r, asked.lora_alpha)
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    rows = asked.training_data_path.read_text().splitlines()
    batch = asked.per_device_train_batch_size
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, asked.learning_rate)
    losses, began_s = [], time.perf_counter()
    for number in range(asked.max_steps):
        texts = [rows[(number * batch + i) % len(rows)].ljust(WIDTH) for i in range(batch)]
        x = torch.tensor([[ord(c) / 128 for c in text[:WIDTH]] for text in texts])
        loss: Any = torch.nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    took_s = time.perf_counter() - began_s
    (asked.output_dir / f"rank-{rank}.json").write_text(json.dumps({**vars(asked)}, default=str))
    if ranks > 1:
        dist.destroy_process_group()
    if rank == 0:
        figures = {
            "train_runtime": took_s,
            "train_samples_per_second": asked.max_steps * batch * ranks / took_s,
            "train_steps_per_second": asked.max_steps / took_s,
            "train_tokens_per_second": asked.max_steps * batch * WIDTH / took_s,
            "train_loss": sum(losses) / len(losses),
        }
        if asked.skip_memory_metrics == "False":
            figures |= {"before_init_mem_cpu": 1, "init_mem_cpu_alloc_delta": 0}
        (asked.output_dir / "figures.json").write_text(json.dumps(figures))
        print({**figures, "epoch": 1.0}, flush=True)


if __name__ == "__main__":
    main()
