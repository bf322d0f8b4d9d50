"""Bytes that inference must move: the weights once, the cache of what came before.

Decoding is bound by memory, not by arithmetic: to make one token every active weight is read, and
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
    from ergmeter.flops.storage import Storage


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


def forward_traffic(graph: Graph, batch: Batch, storage: Storage) -> Traffic:
    """Bytes one forward pass over a batch has to move.

    Of the experts those that at least one row is sent to are read; how many is an expectation, over
    rows sent at random. A lookup reads its rows of the table and no more.
    """
    weights = sum(_share_read(node, batch) * storage.held_bytes(node) for node in graph)
    read = written = 0.0
    for node in graph:
        for sequence in batch.stream(node.stream):
            kept_read, kept_written = _cached(node, sequence, batch)
            read += kept_read
            written += kept_written
    each = storage.cache.bits / 8
    return Traffic(weights, read * each, written * each)


def _cached(node: Node, sequence: Sequences, batch: Batch) -> tuple[float, float]:
    """Numbers that a node reads from its cache, and writes to it."""
    work = node.work
    if isinstance(work, Attention) and work.keys is not None:  # of a source, which is kept whole
        whole = work.cached * batch.source_length(work.keys) * sequence.count
        return (whole, 0) if sequence.past else (0, whole)
    if isinstance(work, Attention) and work.mask == "causal":
        before = _kept(work, sequence.past)
        new = min(sequence.new, _kept(work, sequence.past + sequence.new))
        return work.cached * before * sequence.count, work.cached * new * sequence.count
    state = 0
    if isinstance(work, Scan):
        state = work.state
    elif isinstance(work, Convolution):
        state = work.channels * (work.width - 1)
    return (state * sequence.count if sequence.past else 0), state * sequence.count


def _kept(work: Attention, length: int) -> int:
    """Of so many positions those that the next one sees."""
    if work.chunk is not None:
        return length % work.chunk
    if work.window is not None:  # which has the next one in it
        return min(length, work.window - 1)
    return length


def _share_read(node: Node, batch: Batch) -> float:
    """Of what a node holds, the share read; a tied matrix is read where it is multiplied."""
    rows = batch.rows(node.stream)
    if not rows or node.role in ("embedding", "positions"):
        return 0
    work = node.work
    if isinstance(work, Linear) and work.copies > 1:
        return 1 - (1 - work.used / work.copies) ** rows
    return 1
