"""How much is in the data that a training is given?

The trap: one number for it. What the hardware computes, what is text and what is learnt from are
three amounts; a padded batch can be half nothing, and a long prompt bears no loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ergmeter.workloads.sft.data.packed import Collate, Row
from ergmeter.workloads.sft.data.prepared import TokenRows
from ergmeter.workloads.sft.data.tokenized import NO_LOSS


@dataclass(frozen=True, slots=True)
class EpochTokens:
    """Tokens of one epoch, its rows taken in their order (a training shuffles them)."""

    rows: int
    real: int  # text; of a seq2seq model what is read and what is said
    computed: int  # every place of the rectangles, padding included
    loss: int  # predicted and compared
    shortest: int
    median: float
    longest: int


def amounts(rows: TokenRows, collate: Collate, *, batch_size: int) -> EpochTokens:
    """The amounts of these rows, in batches of this size."""
    listed = [rows[place] for place in range(len(rows))]
    starts = range(0, len(listed), batch_size)
    lengths = [len(row["input_ids"]) for row in listed]
    said = sum(len(row["labels"]) for row in listed) if collate.is_seq2seq else 0
    return EpochTokens(
        rows=len(listed),
        real=sum(lengths) + said,
        computed=sum(_places(listed[start : start + batch_size], collate) for start in starts),
        loss=sum(_bearing(row, collate) for row in listed),
        shortest=min(lengths),
        median=statistics.median(lengths),
        longest=max(lengths),
    )


def _places(rows: Sequence[Row], collate: Collate) -> int:
    batch = collate(rows)
    said = batch["labels"].numel() if collate.is_seq2seq else 0
    return batch["input_ids"].numel() + said


def _bearing(row: Row, collate: Collate) -> int:
    """A causal model predicts each token from those before, so the first one of a row never."""
    labels = row["labels"] if collate.is_seq2seq else row["labels"][1:]
    return sum(label != NO_LOSS for label in labels)
