"""How do documents of all lengths fill rows of one length?

The trap: what stands at the border of two documents. The first token of the second is no
continuation of the first, so it bears no loss, and positions begin again at 0, from which attention
knows where to stop. Blocks of continued pre-training are the other way: one stream of text, cut
where a block is full, in which documents see what stands before them; that is the custom there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ergmeter.errors import UsageError
from ergmeter.workloads.sft.data.tokenized import NO_LOSS, Tokens

# -- packed ----------------------------------------------------------------------------------------


Row: TypeAlias = dict[str, list[int]]


def single(documents: Sequence[Tokens]) -> list[Row]:
    """One document a row."""
    return [{"input_ids": one.ids, "labels": one.labels} for one in documents]


def packed(documents: Sequence[Tokens], *, longest: int) -> list[Row]:
    """As many as fit into each row, in their order.

    Sorting them by length first would waste less, and put documents of like length together.
    """
    rows: list[Row] = []
    for one in documents:
        if not rows or len(rows[-1]["input_ids"]) + len(one.ids) > longest:
            rows.append({"input_ids": [], "labels": [], "position_ids": []})
        rows[-1]["input_ids"] += one.ids
        rows[-1]["labels"] += [NO_LOSS, *one.labels[1:]]
        rows[-1]["position_ids"] += range(len(one.ids))
    return rows


def blocks(documents: Sequence[Sequence[int]], *, size: int) -> tuple[list[Row], int]:
    """Blocks of one stream of all documents, and how many tokens at its end fill none."""
    stream = [token for document in documents for token in document]
    whole = len(stream) // size
    if not whole:
        raise UsageError(f"the text is {len(stream)} tokens, less than one block of {size}")
    rows = [stream[start : start + size] for start in range(0, whole * size, size)]
    return [{"input_ids": row, "labels": list(row)} for row in rows], len(stream) - whole * size


def mixed(
    sources: Mapping[str, Sequence[Row]], weights: Mapping[str, float], *, seed: int
) -> tuple[list[Row], dict[str, int]]:
    """As many rows of each source as its weight says, and how many that is; none comes twice.

    Weights are shares of rows. The source that is used up first ends the mixture: drawing with
    replacement would go on, and train on some rows several times for others never seen.
    """
    total = sum(weights.values())
    most = min(len(rows) * total / weights[name] for name, rows in sources.items())
    taken = {name: int(most * weights[name] / total + 1e-9) for name in sources}
    missing = [name for name, number in taken.items() if not number]
    if missing:
        raise UsageError(f"by its weight not one row of {missing[0]} would be used; raise it")
    dice = random.Random(seed)
    rows: list[Row] = []
    for name, number in taken.items():
        rows += _some(sources[name], number, dice)
    return _some(rows, len(rows), dice), taken


def _some(rows: Sequence[Row], number: int, dice: random.Random) -> list[Row]:
    """So many of them in some order, by `random` alone, whose sequence Python keeps."""
    keyed = [(dice.random(), place) for place in range(len(rows))]
    return [rows[place] for _, place in sorted(keyed)[:number]]


def lengths(rows: Sequence[Row]) -> Iterator[int]:
    """How many tokens each row holds."""
    return (len(row["input_ids"]) for row in rows)


# -- collating -------------------------------------------------------------------------------------
# Rows side by side, as the model takes them.
#
# Two traps. Padding that is told by its token hides every real one of that kind; so the mask is
# made from lengths. And a mask beside packed rows undoes the packing: transformers looks for
# documents in the positions only where there is no mask and no cache, and else lets them see each
# other. So a packed batch has no mask, and its model must have `config.use_cache = False`; what
# fills a row has position 0, and each such place sees itself alone.


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
