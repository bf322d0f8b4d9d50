"""A program of Megatron-LM's: providers of model and data, a forward step, and `pretrain`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.training import get_args, pretrain  # type: ignore[import-not-found]

VOCABULARY, WIDTH = 64, 16


def model_provider(args: argparse.Namespace) -> torch.nn.Module:
    """64 x 16 + 16 x 64 + 64 parameters: 2112."""
    del args
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    return torch.nn.Sequential(embedding, torch.nn.Linear(WIDTH, VOCABULARY))


def train_valid_test_datasets_provider(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Micro-batches without end, other ones on each rank."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    shape = (args.micro_batch_size, args.seq_length + 1)
    while True:
        yield torch.randint(0, VOCABULARY, shape, generator=generator)


def loss_func(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def forward_step(
    data_iterator: Iterator[torch.Tensor], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    tokens = next(data_iterator)
    assert tokens.shape[1] == get_args().seq_length + 1
    return model(tokens[:, :-1]), partial(loss_func, tokens[:, 1:])


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, "encoder_or_decoder", forward_step)
