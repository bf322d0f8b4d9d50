"""FLOPs of one step, from a model's graph and a batch's shape: forward, backward, recomputed.

A matrix product of m x k and k x n is 2 m k n FLOPs: a multiplication and an addition for each
term. Backward needs up to two more products: the gradient of the input, if something before it is
trained, and the gradient of the weights, if they are trained. (Kaplan et al. 2020, section 2.1,
count both as 2 N; with LoRA, frozen towers and first layers one of the two is absent.)

Only matrix products, convolutions and scans are counted. Norms, activations, rotary embeddings,
softmax and the optimizer are below one percent of the FLOPs at any size in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.errors import UsageError
from ergmeter.flops.batch import IMAGE_STREAMS, Batch, Pairs
from ergmeter.flops.graph.graph import (
    Attention,
    Convolution,
    Fold,
    Linear,
    Scan,
    gradients,
    trained_nodes,
    trains_all,
)
from ergmeter.units import listed_by

if TYPE_CHECKING:
    from ergmeter.flops.graph.graph import Graph, Node, Trainable

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class PartFlops:
    """FLOPs of one part of a model in one step."""

    forward: float = 0
    backward: float = 0
    recomputed: float = 0

    @property
    def model(self) -> float:
        """Model FLOPs: forward and backward, without recomputation."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """Hardware FLOPs: model FLOPs plus recomputation."""
        return self.model + self.recomputed

    def __add__(self, other: PartFlops) -> PartFlops:
        return PartFlops(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recomputed + other.recomputed,
        )


Parts: TypeAlias = "dict[str, PartFlops]"


def step_flops(
    graph: Graph,
    batch: Batch,
    *,
    trainable: Trainable | None = trains_all,
    checkpointing: Checkpointing = "none",
    pairs: Pairs = "needed",
) -> Parts:
    """Return a step's FLOPs by part, in the graph's order. `trainable` None: inference.

    With `checkpointing` "full" each layer saves only its input and is recomputed, except a last
    product whose result backward does not need (torch's non-reentrant checkpoint stops early).
    "selective" recomputes only the attention core.
    """
    _check_streams(graph, batch)
    needs = gradients(graph, trainable) if trainable else {}
    trained = trained_nodes(graph, trainable) if trainable else {}
    again = _recomputed(graph, needs, checkpointing) if trainable else frozenset()
    parts: Parts = {}
    small: dict[str, PartFlops] = {}  # of each adapter's matrices
    for node in graph:
        for part, forward, backward in _node_flops(node, batch, needs, trained, pairs):
            cost = PartFlops(forward, backward, forward if node.name in again else 0)
            parts[part] = parts.get(part, PartFlops()) + cost
            if node.part == "lora":
                site = node.name.rpartition(".")[0]
                small[site] = small.get(site, PartFlops()) + cost
        if isinstance(node.work, Fold) and trainable:
            node_cost = _folded(node.work, batch.rows(node.stream), is_again=node.name in again)
            over = PartFlops(recomputed=node_cost - small[node.name].hardware)
            parts[node.part] = parts[node.part] + over
    return parts


def _folded(work: Fold, rows: float, *, is_again: bool) -> float:
    """Return the hardware FLOPs of a low-rank update that PEFT 0.21 adds to the weight.

    Forward computes the update (for experts twice: torch computes a parametrisation to see its
    shape). Backward computes a gradient for each of the two factors. Rows multiply the sum, so the
    gradient of the whole weight is computed too.
    """
    made = work.flops * (2 if work.copies > 1 else 1)
    product = 2 * work.inputs * work.outputs * work.used * rows
    return made * (2 if is_again else 1) + 2 * work.flops + product


def _check_streams(graph: Graph, batch: Batch) -> None:
    """Raise UsageError if the batch lacks a stream that the model reads; images may be absent."""
    for name in dict.fromkeys(node.stream for node in graph):
        if name not in IMAGE_STREAMS and not batch.stream(name):
            raise UsageError(
                f"the batch has no {name}, which {graph.family} reads: give the length of its"
                " source and the graph's facts"
            )


def total(parts: Parts) -> PartFlops:
    """Return the sum of all parts."""
    return sum(parts.values(), PartFlops())


def _node_flops(
    node: Node, batch: Batch, needs: dict[str, bool], trained: dict[str, bool], pairs: Pairs
) -> list[tuple[str, float, float]]:
    """Return (part, forward, backward) FLOPs of a node; attention has two parts."""
    work = node.work
    if isinstance(work, Attention):
        return _attention(node, work, batch, needs, pairs)
    if isinstance(work, Linear):
        once = 2 * work.weights * batch.rows(node.stream)
    elif isinstance(work, Convolution):
        once = 2 * work.channels * work.width * batch.rows(node.stream)
    elif isinstance(work, Scan) and pairs == "needed":  # it is computed by no matrix product
        once = work.flops_per_row * batch.rows(node.stream)
    else:
        return []
    passes = any(needs.get(name, False) for name in node.of) + trained.get(node.name, False)
    if not needs.get(node.name, False):  # nothing is asked of it on the way back
        passes = 0
    if isinstance(work, Scan):  # its inputs' gradients take about twice the scan, all or none
        passes = 2 * bool(passes)
    return [(node.part, once, once * passes)]


def _attention(
    node: Node, work: Attention, batch: Batch, needs: dict[str, bool], how: Pairs
) -> list[tuple[str, float, float]]:
    met = node_pairs(work, batch, node.stream, how)
    scores = 2 * work.heads * work.qk_dim * met
    values = 2 * work.heads * work.v_dim * met
    wanted = needs.get(node.name, False)
    query, key, value = (wanted and needs.get(name, False) for name in node.of)
    # dQ and dK cost what the scores did, dV what the values did; the weights' own gradient, which
    # both dQ and dK need, costs what the values did.
    return [
        (f"{node.part} scores", scores, scores * (query + key)),
        (f"{node.part} values", values, values * (value + (query or key))),
    ]


def node_pairs(work: Attention, batch: Batch, stream: str, how: Pairs) -> float:
    """Return the pairs of query and key in one attention layer, for one head."""
    if work.keys is None:
        return sum(sequence.pairs(work, how) for sequence in batch.stream(stream))
    # Across streams every position of a sequence sees all of its source, read now or before.
    sources = batch.stream(work.keys)
    keys = sum((source.past + source.new) * source.count for source in sources)
    rows = sum(sequence.rows for sequence in batch.stream(stream))
    return rows * keys / max(1, sum(source.count for source in sources))


def _recomputed(
    graph: Graph, needs: dict[str, bool], checkpointing: Checkpointing
) -> frozenset[str]:
    """Return the nodes that the backward pass recomputes."""
    if checkpointing == "none":
        return frozenset()
    if checkpointing == "selective":
        cores = (node for node, _ in graph.attentions() if node.layer is not None)
        return frozenset(node.name for node in cores if needs[node.name])
    inside = (node for node in graph if node.layer is not None and node.work is not None)
    by_layer = listed_by((node.layer, node) for node in inside)
    again: set[str] = set()
    for nodes in by_layer.values():
        if any(needs[node.name] for node in nodes):
            again.update(node.name for node in nodes)
            # Nothing on the way back asks for a layer's last product, and torch stops there; that
            # of experts is multiplied by the router's weight, whose gradient does ask for it.
            last = nodes[-1].work
            if isinstance(last, Linear) and last.copies == 1:
                again.discard(nodes[-1].name)
    return frozenset(again)
