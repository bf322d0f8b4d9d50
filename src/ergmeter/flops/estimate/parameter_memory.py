"""What hangs on parameters, node by node: weights, gradients and optimizer, on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.flops.estimate.arrangement import precision
from ergmeter.flops.estimate.optimizer import quantisation, scratch_bytes, state_bytes
from ergmeter.flops.graph.graph import Linear, gradients, trained_nodes

if TYPE_CHECKING:
    from ergmeter.flops.estimate.arrangement import Setup
    from ergmeter.flops.graph.graph import Graph, Node, Trainable


class Holdings:
    """A model's parameters as a setup spreads them."""

    def __init__(self, graph: Graph, trainable: Trainable, setup: Setup) -> None:
        self.nodes, self.setup = {node.name: node for node in graph}, setup
        self.numbers = precision(setup.dtype)
        self.trained = trained_nodes(graph, trainable)
        self.needs = gradients(graph, trainable)

    def split(self, node: Node) -> int:
        """Over how many tensor-parallel devices a node's parameters are spread."""
        whole = node.part in ("norm", "router", "lora") or node.role == "positions"
        return 1 if whole or not node.params else self.setup.parallel.tensor

    def weight_bytes(self, node: Node) -> float:
        """Of a node's parameters on one tensor-parallel device, before ZeRO."""
        params = node.params / self.split(node)
        if node.part == "lora":
            return params * self._adapter_bytes()
        quantised = quantisation(self.setup.quantize)
        if quantised and isinstance(node.work, Linear) and node.work.is_module and not node.role:
            return quantised.matrix_bytes(node.work, self.numbers.compute) / self.split(node)
        return params * self.numbers.weight

    def _adapter_bytes(self) -> int:
        return max(self.setup.kernels.adapter_bytes, self.numbers.weight)

    def _number_bytes(self, node: Node) -> int:
        """Of one number of a trained parameter, and so of its gradient."""
        return self._adapter_bytes() if node.part == "lora" else self.numbers.weight

    def _own(self, node: Node) -> bool:
        return self.trained[node.name] and node.params > 0

    def gradient_bytes(self, node: Node) -> float:
        """Of a node's gradient, before ZeRO."""
        return node.params / self.split(node) * self._number_bytes(node) if self._own(node) else 0

    def made_gradient_bytes(self, node: Node) -> float:
        """Of the gradient that a node's backward makes: a tied head makes the embedding's."""
        own = self.gradient_bytes(node)
        if node.tied_to is None or not self.trained[node.name]:
            return own
        return own + self.gradient_bytes(self.nodes[node.tied_to])

    def states(self, node: Node) -> tuple[float, float]:
        """Bytes of an optimizer's states on the device and on the host."""
        if not self._own(node):
            return 0, 0
        share = self.split(node) * self.setup.parallel.sharded(1)
        device, host = state_bytes(
            self.setup.optimizer, node, self._number_bytes(node), self.numbers.master
        )
        return device / share, host / share

    def scratch(self, nodes: list[Node]) -> float:
        """Temporaries of the optimizer's step over these nodes."""
        shards = self.setup.parallel.sharded(1)
        moments = (
            node.params
            * max(self._number_bytes(node), self.numbers.master)
            / (self.split(node) * shards)
            for node in nodes
            if self._own(node)
        )
        return scratch_bytes(self.setup.optimizer, moments)

    def cast_bytes(self, node: Node) -> float:
        """Autocast's 16-bit copy of a matrix: kept until the backward pass has used it."""
        if not (
            self.numbers.is_autocast and isinstance(node.work, Linear) and self.needs[node.name]
        ):
            return 0.0
        share = self.split(node) if node.params else self.setup.parallel.tensor
        return node.work.held / (share * self.setup.parallel.sharded(3)) * self.numbers.compute

    def gathered_bytes(self, nodes: list[Node], layers: list[str]) -> float:
        """Weights that stage 3 has whole for a moment.

        The layer at work, the next one, which is fetched meanwhile, and what is in no layer.
        """
        if self.setup.parallel.sharded(3) == 1:
            return 0
        sizes = dict.fromkeys([None, *layers], 0.0)
        for node in nodes:
            sizes[node.layer] += self.weight_bytes(node)
        outside = sizes.pop(None)
        return outside + sum(sorted(sizes.values())[-2:])
