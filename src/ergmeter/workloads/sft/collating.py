"""Rows side by side, as the model takes them.

Two traps. Padding that is told by its token hides every real one of that kind; so the mask is made
from lengths. And a mask beside packed rows undoes the packing: transformers looks for documents in
the positions only where there is no mask and no cache, and else lets them see each other. So a
packed batch has no mask, and its model must have `config.use_cache = False`; what fills a row has
position 0, and each such place sees itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ergmeter.workloads.sft.packed import Row
from ergmeter.workloads.sft.tokenized import NO_LOSS


@dataclass(frozen=True, slots=True)
class Collate:
    """Rows to a batch. It goes to the loader's workers, so it holds numbers only.

    `start`: what the decoder of a seq2seq model begins with; None leaves its input to the model.
    """

    fill: int
    multiple: int = 1
    is_seq2seq: bool = False
    start: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """A rectangle as wide as the longest row, rounded up to the multiple."""
        ids = [row["input_ids"] for row in rows]
        batch = {"input_ids": self._padded(ids, self.fill)}
        labels = self._padded([row["labels"] for row in rows], NO_LOSS)
        if "position_ids" in rows[0]:
            batch["position_ids"] = self._padded([row["position_ids"] for row in rows], 0)
        else:
            batch["attention_mask"] = self._mask(ids)
        batch["labels"] = labels
        if self.is_seq2seq and self.start is not None:
            batch["decoder_input_ids"] = self._shifted(labels, self.start)
            batch["decoder_attention_mask"] = self._mask([row["labels"] for row in rows])
        return batch

    def _padded(self, rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
        longest = max(map(len, rows))
        width = -(-longest // self.multiple) * self.multiple
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    def _mask(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._padded([[1] * len(row) for row in rows], 0)

    def _shifted(self, labels: torch.Tensor, start: int) -> torch.Tensor:
        """What the decoder reads: the labels, one place later."""
        moved = labels.roll(1, dims=-1)
        moved[:, 0] = start
        return moved.masked_fill(moved == NO_LOSS, self.fill)
