"""Bytes that inference must move: the weights once, the cache of what came before.

Decoding is bound by memory, not by arithmetic: to make one token every weight it meets is read, and
with it the keys and values of its whole context. Bandwidth utilisation is these bytes over time
over what the memory can do, as MFU is for FLOPs.

The least that any program has to move is counted. Activations are left out: they fit in caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.flops.graph import Attention, Convolution, Linear, Scan

if TYPE_CHECKING:
    from ergmeter.flops.batch import Batch, Sequences
    from ergmeter.flops.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one forward pass."""

    weights_bytes: float
    cache_read_bytes: float
    cache_written_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.weights_bytes + self.cache_read_bytes + self.cache_written_bytes


def forward_traffic(
    graph: Graph, batch: Batch, *, bytes_per_weight: float, bytes_per_cached: float
) -> Traffic:
    """Bytes one forward pass over a batch has to move.

    Of the experts those that at least one row is sent to are read; how many is an expectation, over
    rows sent at random. A lookup reads its rows of the table and no more.
    """
    weights = sum(_touched(node, batch) for node in graph) * bytes_per_weight
    read = written = 0.0
    for node in graph:
        for sequence in batch.stream(node.stream):
            kept_read, kept_written = _cached(node, sequence, batch)
            read += kept_read
            written += kept_written
    return Traffic(weights, read * bytes_per_cached, written * bytes_per_cached)


def _cached(node: Node, sequence: Sequences, batch: Batch) -> tuple[float, float]:
    """Numbers that a node reads from its cache, and writes to it."""
    work = node.work
    if isinstance(work, Attention) and work.keys is not None:  # of a source, which is kept whole
        whole = work.cached * batch.source_length(work.keys) * sequence.count
        return (whole, 0) if sequence.past else (0, whole)
    if isinstance(work, Attention) and work.mask == "causal":
        seen = sequence.past % work.chunk if work.chunk else sequence.past
        seen = min(seen, work.window or seen)
        return work.cached * seen * sequence.count, work.cached * sequence.rows
    state = 0
    if isinstance(work, Scan):
        state = work.state
    elif isinstance(work, Convolution):
        state = work.channels * (work.width - 1)
    return (state * sequence.count if sequence.past else 0), state * sequence.count


def bytes_of(dtype: str | None) -> float:
    """Bytes of a number of this type; 2 where it is not said, as of bf16 and fp16."""
    return {"fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}.get(dtype or "", 2.0)


def _touched(node: Node, batch: Batch) -> float:
    """Parameters of a node that are read."""
    rows = batch.rows(node.stream)
    if not rows:
        return 0
    work = node.work
    if isinstance(work, Linear):
        held = work.held  # a tied matrix is read where it is multiplied
        if work.copies > 1:
            missed = (1 - work.used / work.copies) ** rows
            return held * (1 - missed)
        return held
    if node.role in ("embedding", "positions"):
        return 0.0
    return node.params
