"""A model as a graph of operations: inputs, parameters and cost of each.

`6 N` is not enough. Whether a weight costs 2, 4 or 6 FLOPs a token depends on what is trained. A
frozen weight has no gradient of its own. No gradient goes below the lowest trainable layer. An
adapter costs 6 on a few weights and leaves 4 on the rest. All of it follows from one rule applied
to a graph. Nothing here depends on a model family.

Names are those of the modules in transformers, so a LoRA target means the same here.
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

    Of `copies` matrices of this shape each row goes through `used`: experts, of which the router
    picks a few. Otherwise both are 1.
    """

    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    is_module: bool = True  # a layer of its own, so that an adapter can be put on it by name

    @property
    def weights(self) -> int:
        """Weights one row goes through, biases left out: they are added, not multiplied."""
        return self.inputs * self.outputs * self.used

    @property
    def params(self) -> int:
        """Parameters kept, biases included."""
        return (self.inputs + self.bias) * self.outputs * self.copies


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries against keys, then weights against values: work for each pair, and no weights.

    Grouped queries shrink what is projected and cached; every query head still meets every key.
    """

    heads: int
    qk_dim: int
    v_dim: int
    kv_heads: int
    mask: Mask = "causal"
    window: int | None = None  # keys a query can see, itself included
    chunk: int | None = None  # queries see their own chunk of the sequence only
    keys: str | None = None  # the stream the keys come from, where it is another one
    latent: int | None = None  # numbers cached for a position where keys and values are compressed

    @property
    def cached(self) -> int:
        """Numbers the cache holds for one position."""
        return self.latent or self.kv_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A depthwise convolution along the sequence: 2 x channels x width FLOPs a row."""

    channels: int
    width: int

    @property
    def state(self) -> int:
        """Numbers carried from one position to the next."""
        return self.channels * (self.width - 1)


@dataclass(frozen=True, slots=True)
class Scan:
    """A recurrence over a state, elementwise: no matrix product, and seldom counted."""

    flops_per_row: int
    state: int = 0  # numbers carried from one position to the next


@dataclass(frozen=True, slots=True)
class Fold:
    """A low-rank update that is added to a weight before rows meet it: hardware's work alone.

    PEFT adapts so what is no module of its own, such as experts held as one tensor. The model's
    work, two small matrices times each row, is on the nodes before it.
    """

    inputs: int
    outputs: int
    rank: int
    copies: int = 1
    used: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of making the update once, for any number of rows."""
        return 2 * self.inputs * self.outputs * self.rank * self.copies

    @property
    def params(self) -> int:
        """Numbers of the weight it is added to."""
        return self.inputs * self.outputs * self.copies


Work: TypeAlias = "Linear | Attention | Convolution | Scan | Fold"


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: what it takes, what it holds, what it costs."""

    name: str
    part: str  # the row of the table it is counted under
    of: tuple[str, ...]  # the operations whose results it takes; none: data
    params: int = 0
    work: Work | None = None
    stream: str = "tokens"  # which rows it works on
    layer: str | None = None  # the block that is checkpointed as one
    role: Role = ""
    tied_to: str | None = None  # the node whose parameters it uses

    @property
    def params_active(self) -> int:
        """Parameters one row meets."""
        if isinstance(self.work, Linear) and self.work.copies > 1:
            return self.params * self.work.used // self.work.copies
        return self.params


@dataclass(frozen=True)
class Graph:
    """A model: its nodes in an order in which each comes after what it takes."""

    family: str
    nodes: tuple[Node, ...]
    hidden: int
    layers: int
    vocab: int
    assumptions: tuple[str, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)  # what a batch needs to know of the model
    traits: frozenset[str] = frozenset()  # what its code does that no size says

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @property
    def params(self) -> int:
        """Parameters held, a tied one once."""
        return sum(node.params for node in self.nodes)

    @property
    def params_active(self) -> int:
        """Parameters a token meets: of the experts only those it is sent to."""
        return sum(node.params_active for node in self.nodes)

    def linears(self) -> list[tuple[Node, Linear]]:
        """The nodes that are weight matrices, each with its work."""
        return [(node, node.work) for node in self.nodes if isinstance(node.work, Linear)]

    def attentions(self) -> list[tuple[Node, Attention]]:
        """The nodes where queries meet keys, each with its work."""
        return [(node, node.work) for node in self.nodes if isinstance(node.work, Attention)]

    def params_of(self, *roles: Role) -> int:
        """Parameters held by nodes of these roles."""
        return sum(node.params for node in self.nodes if node.role in roles)


class Builder:
    """Collects nodes while a family's reader walks through its layers.

    A builder `within` a layer puts the layer's name before the names of its nodes.
    """

    def __init__(
        self, nodes: list[Node] | None = None, *, layer: str | None = None, stream: str = "tokens"
    ) -> None:
        self.nodes = [] if nodes is None else nodes
        self.layer, self.stream = layer, stream

    def within(self, layer: str, stream: str = "tokens") -> Builder:
        """A builder of the same nodes for one layer, whose rows are those of `stream`."""
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
        """Append a node and return its full name, for what takes its result."""
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
        """Append a weight matrix; one tied to another node holds nothing itself."""
        work = Linear(inputs, outputs, bias, copies, used, is_module)
        params = (work.bias * outputs) if tied_to else work.params
        return self.add(
            name, part, of, params=params, work=work, stream=stream, role=role, tied_to=tied_to
        )

    def head(
        self, name: str, of: str, width: int, vocab: int, *, bias: bool, tied_to: str | None
    ) -> str:
        """Append the matrix that makes the logits."""
        rows = Builder(self.nodes, layer=self.layer, stream="logits")
        return rows.linear(name, "head", of, width, vocab, bias=bias, role="head", tied_to=tied_to)


Trainable: TypeAlias = Callable[[Node], bool]


def trains_all(_node: Node) -> bool:
    """Every parameter is trained."""
    return True


def gradients(graph: Graph, trainable: Trainable) -> dict[str, bool]:
    """True for each node whose result needs a gradient: it or a node before it is trained.

    This is autograd's own rule (`requires_grad` of an output), and all that backward costs follows
    from it, together with where autograd begins: what the loss does not come from, such as the last
    layer of a tower whose last but one is used, is not walked back through.
    """
    trained = trained_nodes(graph, trainable)
    reached = leading_to_loss(graph)
    needs: dict[str, bool] = {}
    for node in graph:
        before = any(needs[name] for name in node.of)
        needs[node.name] = trained[node.name] or (before and node.name in reached)
    return needs


def trained_nodes(graph: Graph, trainable: Trainable) -> dict[str, bool]:
    """True for each node with parameters that get a gradient, its own or a tied node's."""
    own = {node.name: node.params > 0 and trainable(node) for node in graph}
    reached = leading_to_loss(graph)
    return {
        node.name: node.name in reached
        and (own[node.name] or (node.tied_to is not None and own[node.tied_to]))
        for node in graph
    }


def leading_to_loss(graph: Graph) -> frozenset[str]:
    """Nodes whose results reach the head or, where there is none, the last node."""
    reached = {node.name for node in graph if node.role == "head"}
    reached.update(node.name for node in graph.nodes[-1:])
    for node in reversed(graph.nodes):
        if node.name in reached:
            reached.update(node.of)
    return frozenset(reached)
