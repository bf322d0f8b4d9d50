"""Does it fit to serve? Weights as they are kept, and a cache for every sequence under way.

The trap: the weights alone. Of Llama 3.1 8B in bf16 they are 16 GB; the cache of 32 sequences of
32768 tokens is 137 GB. What a position takes follows from the attention: grouped heads, a window, a
compressed cache or a state that does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.estimate.optimizer import QUANTISED
from ergmeter.flops.estimate.storage import KEPT
from ergmeter.flops.graph.graph import Attention, Convolution, Linear, Scan
from ergmeter.units import scaled

if TYPE_CHECKING:
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.estimate.arrangement import Parallel
    from ergmeter.flops.estimate.storage import Storage
    from ergmeter.flops.graph.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class Serving:
    """What one device holds to serve, before anything is computed."""

    weights_bytes: float
    cache_bytes: float  # of one sequence
    sequences: int  # asked for, on one device
    context: int
    copies: int  # of the model, each on devices of its own
    assumptions: tuple[str, ...]

    @property
    def total_bytes(self) -> float:
        """With the sequences that were asked for."""
        return self.weights_bytes + self.sequences * self.cache_bytes

    def sequences_max(self, usable_bytes: float) -> int | None:
        """Sequences of this length at a time, on all devices; None: the weights alone are more."""
        spare = usable_bytes - self.weights_bytes
        if spare < 0:
            return None
        return int(spare // self.cache_bytes) * self.copies if self.cache_bytes else None


def serving(graph: Graph, batch: Batch, storage: Storage, parallel: Parallel) -> Serving:
    """Bytes of a device that holds its share of a model and of the caches."""
    if batch.sequences % parallel.data:
        raise UsageError(
            f"--batch-size {batch.sequences} is no multiple of {parallel.data} copies of the model"
        )
    share = parallel.tensor * parallel.pipeline
    each = storage.cache.bits / 8
    cache = sum(
        cached_numbers(node, batch) * each / (_split(node, parallel) * parallel.pipeline)
        for node in graph
    )
    weights = storage.total_bytes(graph) / share
    said = [
        *graph.assumptions,
        *storage.said,
        f"a cache of {scaled(cache, 'B')} a device for each sequence of {batch.seq_len} tokens",
        "activations of a forward pass, and what a server reserves for them, are not in it",
    ]
    if (more := _experts_left_alone(graph, storage)) > 0:
        said.append(
            f"experts in {storage.matrices.name} too; bitsandbytes under transformers 5 leaves"
            " experts held as one tensor alone, and weights are then"
            f" {scaled(weights + more / share, 'B')} a device"
        )
    if share > 1:
        said.append(
            "weights split evenly; the cache by heads of keys and values, a compressed one whole"
        )
    sequences = batch.sequences // parallel.data
    return Serving(weights, cache, sequences, batch.seq_len, parallel.data, tuple(said))


def _experts_left_alone(graph: Graph, storage: Storage) -> float:
    """Bytes that weights grow by where bitsandbytes converts modules alone."""
    if storage.matrices not in [KEPT[name] for name in QUANTISED]:
        return 0
    return sum(
        node.params * storage.rest.bits / 8 - storage.held_bytes(node)
        for node in graph
        if node.part == "experts" and isinstance(node.work, Linear) and not node.work.is_module
    )


def _split(node: Node, parallel: Parallel) -> int:
    """Over how many tensor-parallel devices a node's cache is spread; beyond it is copied."""
    work = node.work
    if not isinstance(work, Attention):
        return parallel.tensor
    return 1 if work.latent else min(parallel.tensor, work.kv_heads)


def cached_numbers(node: Node, batch: Batch) -> float:
    """Numbers kept for one sequence of the batch's length, read to its end."""
    work = node.work
    if isinstance(work, Attention) and work.keys is not None:
        return work.cached * batch.source_length(work.keys)
    if isinstance(work, Attention) and work.mask == "causal":
        limit = work.window or work.chunk or batch.seq_len
        return work.cached * min(batch.seq_len, limit)
    if isinstance(work, Scan):
        return work.state
    if isinstance(work, Convolution):
        return work.channels * (work.width - 1)
    return 0
