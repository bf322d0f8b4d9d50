"""What goes through the model in one step, and how many tokens is that?

The trap: "tokens" without saying which. Documents differ in length, so a rectangular batch is in
part padding; and, as in instruction tuning, the request bears no loss. So there are three counts,
all of positions that the model is given:

    computed   every position of the rectangle, padding included: what the hardware does
    real       the positions that hold text: what the reader of a throughput expects
    loss       the positions whose next byte is part of a tale: what the model learns from
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ergmeter.workloads.text import Document

PADDING = 0  # a byte that no text holds
NO_LOSS = -100  # what torch's cross_entropy leaves out

# Kernels are chosen and cached by shape. A few widths keep a step from paying for a new one each
# time; the price is a little more padding, which is counted.
WIDTH_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """Bytes in and the byte to predict at each position, with the three counts of its tokens."""

    inputs: torch.Tensor  # (documents, width)
    targets: torch.Tensor  # the same; NO_LOSS in padding and where the request is still going on
    tokens_computed: int
    tokens_real: int
    tokens_loss: int

    @property
    def samples(self) -> int:
        """Its documents."""
        return len(self.inputs)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return Batch(inputs, targets, self.tokens_computed, self.tokens_real, self.tokens_loss)


def batch_of(documents: Sequence[Document], *, multiple: int = WIDTH_MULTIPLE) -> Batch:
    """Documents side by side, padded on the right to the longest, rounded up to a multiple.

    A document of n bytes has n - 1 positions: its last byte is predicted and never read. With the
    padding on the right, a causal model cannot see it from any real position, so it needs no mask.
    """
    longest = max(len(document.text) - 1 for document in documents)
    width = -(-longest // multiple) * multiple
    inputs = torch.full((len(documents), width), PADDING)
    targets = torch.full((len(documents), width), NO_LOSS)
    real = bearing = 0
    for row, document in enumerate(documents):
        text = torch.tensor(list(document.text))
        positions, asked = len(text) - 1, len(document.prompt)
        inputs[row, :positions] = text[:-1]
        # Position i predicts byte i + 1, so the tale's first byte is predicted at asked - 1.
        targets[row, asked - 1 : positions] = text[asked:]
        real += positions
        bearing += len(document.tale)
    return Batch(inputs, targets, inputs.numel(), real, bearing)


def endless(documents: Sequence[Document], size: int, *, seed: int) -> Iterator[Batch]:
    """Batches of `size` documents for ever, in a new order each time round; the rest is dropped."""
    order, dice = list(documents), random.Random(seed)
    while True:
        dice.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield batch_of(order[start : start + size])
