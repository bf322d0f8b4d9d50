"""The most that the backward pass through a layer needs at a time.

The layer's nodes are visited in reverse. Each one takes the gradient of its result, makes those of
its inputs and weights, and then frees what it saved. So the peak is rarely where the layer begins:
it is at the activation between the feed-forward matrices, at attention where its probabilities
exist, or at a norm written in Python, whose derivative takes five tensors in 32 bits.

Temporaries inside a kernel (the 32-bit accumulator of flash attention's backward) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.flops.estimate.arrangement import FP32, is_written_out
from ergmeter.flops.graph.graph import Attention, Fold, Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ergmeter.flops.estimate.parameter_memory import Holdings
    from ergmeter.flops.estimate.saved_activations import Saved, SavedTensors
    from ergmeter.flops.graph.graph import Node

# RMSNorm in Python, backward: the gradient by way of the product, and for the mean square its own
# gradient, the power, twice the power and their product (aten::pow_backward).
_NORM_TENSORS = 5
# Softmax, backward, on CUDA: the gradient that arrives, its product with the result, and the
# gradient that leaves (softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu). A CPU
# has no product.
SOFTMAX_TENSORS = 3
# 0.5 x (1 + tanh(...)) in Python: tensors as wide as the activation beyond its gradients.
_SPELLED_OUT_TENSORS = 1


@dataclass(frozen=True, slots=True)
class LayerPeak:
    """Bytes at the moment of a layer's backward pass that needs most."""

    saved: float = 0.0  # not freed yet
    weight_gradients: float = 0.0  # made so far
    working: float = 0.0  # gradients of activations, and temporaries

    @property
    def total(self) -> float:
        """All of it."""
        return self.saved + self.weight_gradients + self.working


class LayerBackward:
    """Visits the nodes of one layer in reverse."""

    def __init__(
        self,
        tensors: SavedTensors,
        parameters: Holdings,
        share: Callable[[bool], float],
        *,
        recomputes_core: bool,
    ) -> None:
        """`share` of a device in what is, or is not, split by tensor parallelism."""
        self.tensors, self.parameters, self.share = tensors, parameters, share
        self.recomputes_core = recomputes_core  # selective checkpointing

    def peak(
        self,
        nodes: list[Node],
        saved: Iterable[Saved],
        arriving: dict[str, float],
        flowing: float,
    ) -> LayerPeak:
        """The largest moment.

        `arriving`: bytes of gradients that are there at the start, by node. `flowing`: bytes of the
        residual stream's gradient, there all along.
        """
        self.alive: dict[str, list[Saved]] = {}
        for each in saved:
            self.alive.setdefault(each.node, []).append(each)
        self.gradients = dict(arriving)  # of results inside the layer
        self.inside = {node.name for node in nodes if node.part != "residual"}
        self.flowing, self.weight_gradients = flowing, 0.0
        self.core_is_there = not self.recomputes_core
        self.largest = LayerPeak()
        for node in reversed(nodes):
            if self.tensors.needs[node.name]:
                self._visit(node)
            self.alive.pop(node.name, None)
        return self.largest

    def _visit(self, node: Node) -> None:
        work = node.work
        if isinstance(work, Linear):
            self._matrix(node, work)
        elif isinstance(work, Attention):
            self._attention(node, work)
        elif isinstance(work, Fold):
            whole = work.held / self.parameters.setup.parallel.tensor
            self._moment(whole * self.tensors.numbers.compute)
        elif node.part == "norm":
            self._norm(node)
        elif node.part == "lora":  # a sum hands its gradient on
            self._hand_on(node)
        self.gradients.pop(node.name, None)

    def _matrix(self, node: Node, work: Linear) -> None:
        copies = work.used if work.copies > 1 else 1
        activation = self.tensors.follows_activation(node)
        below = f"{self.tensors.site(node)}:product" if activation else node.of[0]
        is_split = activation or self.tensors.is_split(below)
        size = self._size(work.inputs * copies, is_split, node)
        carries = any(self.tensors.needs[name] for name in node.of)
        unpacked = 0.0
        if self.parameters.setup.quantize and work.is_module and node.part != "lora":
            share = self.parameters.split(node)
            unpacked = work.held / share * self.tensors.numbers.compute
        self.weight_gradients += self.parameters.made_gradient_bytes(node)
        self._moment((size if carries else 0.0) + unpacked)
        if not carries:
            return
        if below in self.inside or activation:
            self.gradients[below] = size
        self.gradients.pop(node.name, None)
        if activation and any(each.storage in node.of for each in self.alive.get(node.name, ())):
            self._activation(node, below)

    def _activation(self, node: Node, product: str) -> None:
        """Between the matrices of a feed-forward layer: what comes out of it is freed already."""
        code = self.tensors.code
        if not code.keeps_result:
            self._free(node, product)
        given = {name: self._size(self._width(name, node), True, node) for name in node.of}
        extra = _SPELLED_OUT_TENSORS * self.gradients[product] if code.steps else 0.0
        self._moment(sum(given.values()) + extra)
        self.gradients.pop(product)
        self.gradients.update(given)

    def _attention(self, node: Node, work: Attention) -> None:
        self.core_is_there = True
        tensors = self.tensors
        sizes: dict[str, float] = {}
        widths = (
            work.heads * work.qk_dim,
            work.kv_heads * work.qk_dim,
            work.kv_heads * work.v_dim,
        )
        for name, width in zip(node.of, widths, strict=True):
            sizes[name] = sizes.get(name, 0.0) + self._size(width, True, node)
        if is_written_out(work, tensors.numbers, tensors.kernels, tensors.code):
            # At the softmax, whose result is needed; its copy for the product is freed already.
            self._free(node, f"{node.name}:cast")
            each = tensors.softmax_bytes(work)
            scores = tensors.batch.rows(node.stream) * work.heads * tensors.keys(node, work)
            temporaries = SOFTMAX_TENSORS * scores * each * self.share(True)
            self._moment(temporaries + self._size(work.heads * work.v_dim, True, node))
        else:
            self._moment(sum(sizes.values()))
        self.gradients.update(sizes)

    def _norm(self, node: Node) -> None:
        tensors = self.tensors
        heads = tensors.normed_heads(node)
        if heads == 0 or not any(tensors.needs[name] for name in node.of):
            return
        width = heads or tensors.widths[node.name]
        is_fused = tensors.is_fused_norm(node, width)
        rows = tensors.batch.rows(node.stream) * self.share(bool(heads))
        each = tensors.numbers.stream if is_fused else _NORM_TENSORS * FP32
        if not is_fused:
            self.gradients.pop(node.name, None)  # cast to 32 bits at once
            self._free(node, f"{node.name}:scaled")
        self._moment(rows * width * each)
        self._hand_on(node)

    def _free(self, node: Node, storage: str) -> None:
        rest = [each for each in self.alive.get(node.name, ()) if each.storage != storage]
        self.alive[node.name] = rest

    def _hand_on(self, node: Node) -> None:
        for name in node.of:
            if name in self.inside and node.name in self.gradients:
                self.gradients[name] = self.gradients[node.name]

    def _width(self, name: str, node: Node) -> int:
        work = node.work
        copies = work.used if isinstance(work, Linear) and work.copies > 1 else 1
        return self.tensors.widths[name] * copies

    def _size(self, width: int, is_split: bool, node: Node) -> float:
        rows = self.tensors.batch.rows(node.stream)
        return rows * width * self.tensors.numbers.compute * self.share(is_split)

    def _moment(self, temporaries: float) -> None:
        saved = sum(
            each.bytes
            for some in self.alive.values()
            for each in some
            if self.core_is_there or not each.is_core
        )
        working = self.flowing + sum(self.gradients.values()) + temporaries
        now = LayerPeak(saved, self.weight_gradients, working)
        if now.total > self.largest.total:
            self.largest = now
