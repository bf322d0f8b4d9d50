"""A model as a graph of operations: inputs, parameters and cost of each.

`6 N` is not enough. A weight costs 2, 4 or 6 FLOPs a token, depending on what is trained. A frozen
weight has no gradient of its own. Below the lowest trainable layer there is no backward pass. With
adapters, the few adapter weights cost 6 and the frozen ones 4. All of this follows from one rule
(`gradients`) on a graph. Nothing here depends on a model family.

Node names are module names in transformers, so LoRA targets mean the same here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Role = Literal["", "embedding", "positions", "head"]
Mask = Literal["causal", "full"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight matrix times each row: 2 x inputs x outputs FLOPs.

    Experts are `copies` matrices of this shape, and the router sends each row to `used` of them.
    Otherwise both are 1.
    """

    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    is_module: bool = True  # a torch module of its own: an adapter can target its name

    @property
    def weights(self) -> int:
        """Weights that multiply one row; biases are not included."""
        return self.inputs * self.outputs * self.used

    @property
    def params(self) -> int:
        """Parameters of all copies, biases included."""
        return (self.inputs + self.bias) * self.outputs * self.copies


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention core: queries x keys, then probabilities x values. It has no weights.

    Its cost is per pair of positions. Grouped queries make projections and cache smaller, but not
    this cost: every query head still attends to every key.
    """

    heads: int
    qk_dim: int
    v_dim: int
    kv_heads: int
    mask: Mask = "causal"
    window: int | None = None  # keys a query can see, itself included
    chunk: int | None = None  # queries see their own chunk of the sequence only
    keys: str | None = None  # the stream of the keys, if not the stream of the queries
    latent: int | None = None  # size of a compressed cache entry (latent attention)

    @property
    def cached(self) -> int:
        """Elements that the KV cache stores per position."""
        return self.latent or self.kv_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A depthwise convolution along the sequence: 2 x channels x width FLOPs a row."""

    channels: int
    width: int

    @property
    def state(self) -> int:
        """Elements of state that pass from one position to the next."""
        return self.channels * (self.width - 1)


@dataclass(frozen=True, slots=True)
class Scan:
    """An elementwise recurrence over a state (Mamba, linear attention), not a matrix product."""

    flops_per_row: int
    state: int = 0  # elements that pass from one position to the next


@dataclass(frozen=True, slots=True)
class Fold:
    """A low-rank update that is added to a weight before the product: hardware FLOPs only.

    PEFT adapts weights that are not modules this way, such as experts stored as one tensor. The
    model FLOPs, two small matrices times each row, are on the nodes before this one.
    """

    inputs: int
    outputs: int
    rank: int
    copies: int = 1
    used: int = 1

    @property
    def flops(self) -> int:
        """FLOPs to compute the update once; they do not depend on the number of rows."""
        return 2 * self.inputs * self.outputs * self.rank * self.copies

    @property
    def params(self) -> int:
        """Elements of the weight that the update is added to."""
        return self.inputs * self.outputs * self.copies


Work: TypeAlias = "Linear | Attention | Convolution | Scan | Fold"


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: its inputs, its parameters and its cost."""

    name: str
    part: str  # the row of the result table that counts it
    of: tuple[str, ...]  # names of the nodes whose results it reads; none: data
    params: int = 0
    work: Work | None = None
    stream: str = "tokens"  # which rows it works on
    layer: str | None = None  # the block that is checkpointed as one
    role: Role = ""
    tied_to: str | None = None  # the node whose parameters it uses

    @property
    def params_active(self) -> int:
        """Parameters used for one row: of experts, only those it is routed to."""
        if isinstance(self.work, Linear) and self.work.copies > 1:
            return self.params * self.work.used // self.work.copies
        return self.params


@dataclass(frozen=True)
class Graph:
    """A model: its nodes in topological order, each after its inputs."""

    family: str
    nodes: tuple[Node, ...]
    hidden: int
    layers: int
    vocab: int
    assumptions: tuple[str, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)  # sizes that a batch needs of the model
    traits: frozenset[str] = frozenset()  # names of `ActivationTraits` of the model's code

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @property
    def params(self) -> int:
        """All parameters; a tied one counts once."""
        return sum(node.params for node in self.nodes)

    @property
    def params_active(self) -> int:
        """Parameters used for one token: of experts, only those it is routed to."""
        return sum(node.params_active for node in self.nodes)

    def linears(self) -> list[tuple[Node, Linear]]:
        """Return the nodes that are weight matrices, each with its work."""
        return [(node, node.work) for node in self.nodes if isinstance(node.work, Linear)]

    def attentions(self) -> list[tuple[Node, Attention]]:
        """Return the attention cores, each with its work."""
        return [(node, node.work) for node in self.nodes if isinstance(node.work, Attention)]

    def params_of(self, *roles: Role) -> int:
        """Return the number of parameters of nodes with these roles."""
        return sum(node.params for node in self.nodes if node.role in roles)


class Builder:
    """Collects the nodes of a graph.

    A builder `within` a layer prefixes the names of its nodes with the layer's name.
    """

    def __init__(
        self, nodes: list[Node] | None = None, *, layer: str | None = None, stream: str = "tokens"
    ) -> None:
        self.nodes = [] if nodes is None else nodes
        self.layer, self.stream = layer, stream

    def within(self, layer: str, stream: str = "tokens") -> Builder:
        """Return a builder for one layer, whose rows are in `stream`; it adds to the same list."""
        return Builder(self.nodes, layer=layer, stream=stream)

    def add(
        self,
        name: str,
        part: str,
        of: str | tuple[str, ...] = (),
        *,
        params: int = 0,
        work: Work | None = None,
        stream: str | None = None,
        role: Role = "",
        tied_to: str | None = None,
    ) -> str:
        """Append a node; return its full name, which nodes that read its result use."""
        takes = (of,) if isinstance(of, str) else of
        name = f"{self.layer}.{name}" if self.layer else name
        stream = stream or self.stream
        self.nodes.append(Node(name, part, takes, params, work, stream, self.layer, role, tied_to))
        return name

    def linear(
        self,
        name: str,
        part: str,
        of: str | tuple[str, ...],
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        copies: int = 1,
        used: int = 1,
        is_module: bool = True,
        stream: str | None = None,
        role: Role = "",
        tied_to: str | None = None,
    ) -> str:
        """Append a weight matrix; a tied one has no weights of its own, only its bias."""
        work = Linear(inputs, outputs, bias, copies, used, is_module)
        params = (work.bias * outputs) if tied_to else work.params
        return self.add(
            name, part, of, params=params, work=work, stream=stream, role=role, tied_to=tied_to
        )

    def head(
        self, name: str, of: str, width: int, vocab: int, *, bias: bool, tied_to: str | None
    ) -> str:
        """Append the matrix that computes the logits."""
        rows = Builder(self.nodes, layer=self.layer, stream="logits")
        return rows.linear(name, "head", of, width, vocab, bias=bias, role="head", tied_to=tied_to)


Trainable: TypeAlias = Callable[[Node], bool]


def trains_all(_node: Node) -> bool:
    """Return True: every parameter is trained."""
    return True


def gradients(graph: Graph, trainable: Trainable) -> dict[str, bool]:
    """Return by node name whether its result needs a gradient: it or a node before it is trained.

    This is autograd's own rule (`requires_grad` of an output), and the backward cost follows from
    it. Nodes that the loss does not depend on have no backward pass, such as the last layer of a
    tower if a model reads the one before it.
    """
    trained = trained_nodes(graph, trainable)
    reached = leading_to_loss(graph)
    needs: dict[str, bool] = {}
    for node in graph:
        before = any(needs[name] for name in node.of)
        needs[node.name] = trained[node.name] or (before and node.name in reached)
    return needs


def trained_nodes(graph: Graph, trainable: Trainable) -> dict[str, bool]:
    """Return by node name whether its parameters, own or tied, get a gradient."""
    own = {node.name: node.params > 0 and trainable(node) for node in graph}
    reached = leading_to_loss(graph)
    return {
        node.name: node.name in reached
        and (own[node.name] or (node.tied_to is not None and own[node.tied_to]))
        for node in graph
    }


def leading_to_loss(graph: Graph) -> frozenset[str]:
    """Return the nodes that the head depends on or, without a head, the last node depends on."""
    reached = {node.name for node in graph if node.role == "head"}
    reached.update(node.name for node in graph.nodes[-1:])
    for node in reversed(graph.nodes):
        if node.name in reached:
            reached.update(node.of)
    return frozenset(reached)
