"""Choices of a training setup that change memory: precision, kernels, devices, optimizer.

Nothing here is measured, and each choice changes the estimate. So each has a name and the default
of a common program, and all choices are listed beside the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ergmeter.errors import UsageError
from ergmeter.flops.batch import IMAGE_STREAMS, Batch
from ergmeter.flops.estimate.storage import STORED_TYPES
from ergmeter.flops.graph.graph import Attention, Linear, gradients, trained_nodes
from ergmeter.units import number_of, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.flops.graph.graph import Graph, Node, Trainable
    from ergmeter.flops.work import TrainedParts

# Optimizers and quantisation: bytes per parameter.
#
# torch's AdamW stores its two moments in the parameter's own type: 4 bytes a parameter for a model
# in bf16. bitsandbytes stores them in 32 bits, or in 8 with a scale per 256 elements. With a 32-bit
# master copy the optimizer needs 12 bytes. A 4-bit weight takes more than half a byte: it has
# scales.

FP32 = 4  # bytes
_BLOCK_8BIT = 256  # bitsandbytes' block of an 8-bit state, each with a scale in 32 bits
_LEAST_8BIT = 4096  # smaller tensors keep 32-bit states (bitsandbytes' min_8bit_size)


# Temporaries of torch's AdamW (torch/optim/adam.py). foreach: the square roots of all second
# moments at once. A loop over tensors: a root and its quotient, one tensor at a time. Fused: none.
Scratch = Literal["none", "foreach", "loop"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Bytes that an optimizer stores for one tensor of parameters."""

    name: str
    moments: Callable[[Node, float], float]  # (node, bytes per element) -> bytes
    says: str
    is_paged: bool = False  # in unified memory, which moves to the host when the GPU is full
    scratch: Scratch = "none"


def _moments(count: int) -> Callable[[Node, float], float]:
    return lambda node, size: count * node.params * size


def _two_in_32_bits(node: Node, _size: float) -> float:
    return 2 * node.params * FP32


def _two_in_8_bits(node: Node, _size: float) -> float:
    return 2 * node.params * (FP32 if node.params < _LEAST_8BIT else 1 + FP32 / _BLOCK_8BIT)


def _factored(node: Node, _size: float) -> float:
    """Adafactor (arXiv 1804.04235): a row and a column per matrix as second moment, no first."""
    if isinstance(node.work, Linear):
        return (node.work.inputs + node.work.outputs) * node.work.copies * FP32
    return node.params * FP32 if node.role == "" else node.params**0.5 * 2 * FP32


def _orthogonal(node: Node, size: float) -> float:
    """Muon: one momentum for matrices inside layers; AdamW's two moments for the rest."""
    is_matrix = isinstance(node.work, Linear) and node.role == ""
    return node.params * size * (1 if is_matrix else 2)


OPTIMIZERS = {
    each.name: each
    for each in (
        Optimizer(
            "adamw",
            _moments(2),
            "torch's AdamW as it is by default on CUDA (foreach): two moments in the parameter's"
            " type, and during the step a temporary as large as one of them",
            scratch="foreach",
        ),
        Optimizer(
            "adamw-fused",
            _moments(2),
            "torch's AdamW(fused=True), the default of transformers' Trainer: two moments in the"
            " parameter's type, no temporaries",
        ),
        Optimizer(
            "adamw-loop",
            _moments(2),
            "torch's AdamW(foreach=False): two moments in the parameter's type, and during the step"
            " two temporaries as large as the largest tensor",
            scratch="loop",
        ),
        Optimizer("adamw-32bit", _two_in_32_bits, "two moments in 32 bits"),
        Optimizer("adamw-8bit", _two_in_8_bits, "bitsandbytes: two moments in 8 bits"),
        Optimizer("paged-adamw", _two_in_32_bits, "bitsandbytes, paged: 32 bits", is_paged=True),
        Optimizer("paged-adamw-8bit", _two_in_8_bits, "bitsandbytes, paged: 8 bits", is_paged=True),
        Optimizer("lion", _moments(1), "one moment"),
        Optimizer("sgd", _moments(0), "nothing; weight decay would add a temporary"),
        Optimizer("sgd-momentum", _moments(1), "one moment"),
        Optimizer("adafactor", _factored, "a row and a column for each matrix, in 32 bits"),
        Optimizer("muon", _orthogonal, "one moment; two for embeddings, head and vectors"),
    )
}


QUANTISED = ("nf4", "nf4-double", "int8")  # bitsandbytes' types for the frozen base of an adapter


# Precision, kernels, devices.


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of weights, products, activations between layers and master weights."""

    name: str
    weight: int
    compute: int  # matrix products
    stream: int  # activations between layers
    master: int = 0  # a second copy of trained weights, which the optimizer keeps

    @property
    def is_autocast(self) -> bool:
        """True if weights are cast to another type for each product."""
        return self.weight != self.compute


PRECISIONS = {
    each.name: each
    for each in (
        Precision("bf16", 2, 2, 2),
        Precision("fp16", 2, 2, 2),
        Precision("fp32", 4, 4, 4),
        Precision("mixed", 4, 2, 4),  # weights in 32 bits, torch.autocast to 16
        Precision("bf16-master", 2, 2, 2, master=4),  # Megatron, DeepSpeed
    )
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that change what autograd saves. The defaults are those of transformers."""

    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    norm: Literal["eager", "fused"] = "eager"
    feed: Literal["eager", "fused"] = "eager"
    loss: Literal["logits", "fused"] = "logits"
    adapter_bytes: int = FP32  # PEFT's autocast_adapter_dtype, on unless it is turned off
    has_adapter_dropout: bool = False
    # The model copies keys and values into a cache: `config.use_cache`. It is on by default in a
    # custom training loop, off in transformers' Trainer and under checkpointing.
    has_cache: bool = False


_SPLITS = ("data", "tensor", "pipeline", "context")


@dataclass(frozen=True, slots=True)
class Parallel:
    """The number of devices of each kind of parallelism, and the stage of ZeRO."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    zero: int = 0  # ZeRO's stage; 3 is FSDP's full sharding, 2 its SHARD_GRAD_OP
    is_sequence_parallel: bool = False  # Megatron's: norms and sums split along the sequence

    def __post_init__(self) -> None:
        for name in _SPLITS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} parallelism must be over 1 device or more")
        if self.zero not in range(4):
            raise UsageError(f"ZeRO has the stages 0 to 3; got {self.zero}")

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.data * self.tensor * self.pipeline * self.context

    def sharded(self, stage: int) -> int:
        """Return the number of devices over which ZeRO shards what it shards from `stage` on."""
        return self.data * self.context if self.zero >= stage else 1


# How long a program keeps the model's output (mainly the logits) in memory. freed: until before the
# backward pass. until-step: through the backward pass. until-next: also through the optimizer's
# step and the next forward pass, as `output = model(...)` in a loop does.
Output = Literal["freed", "until-step", "until-next"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The choices of a training setup that change memory. Defaults: transformers' Trainer."""

    dtype: str = "bf16"
    optimizer: str = "adamw-fused"
    quantize: str | None = None
    kernels: Kernels = field(default_factory=Kernels)
    micro_batches: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    workspace_bytes: float = 0
    output: Output = "freed"

    def __post_init__(self) -> None:
        for what, name, names in (
            ("precision", self.dtype, PRECISIONS),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("quantisation", self.quantize, QUANTISED),
        ):
            if name is not None and name not in names:
                raise UsageError(f"no {what} {name!r}; there are {', '.join(names)}")

    @property
    def precision(self) -> Precision:
        """The `Precision` that `dtype` names."""
        return PRECISIONS[self.dtype]


def check_sizes(graph: Graph, batch: Batch, setup: Setup) -> None:
    """Raise UsageError if layers, heads, tokens or sequences do not divide over the devices."""
    parallel, parts = setup.parallel, setup.micro_batches
    check_model_split(graph, parallel)
    if parallel.context > batch.seq_len:
        raise UsageError(
            f"sequences of {batch.seq_len} tokens can't be split over {parallel.context} devices;"
            f" --context-parallel is at most {batch.seq_len}"
        )
    if batch.sequences % (parallel.data * parts):
        raise UsageError(
            f"--batch-size {batch.sequences} must be a multiple of {parallel.data}"
            f" data-parallel devices x {parts} micro-batches"
        )


def check_model_split(graph: Graph, parallel: Parallel) -> None:
    """Raise UsageError if pipeline stages exceed the layers, or heads do not divide evenly."""
    layers = len({node.layer for node in graph if node.layer is not None})
    if parallel.pipeline > max(1, layers):
        raise UsageError(
            f"{layers} layers can't be split into {parallel.pipeline} pipeline stages;"
            f" --pipeline-parallel is at most {max(1, layers)}"
        )
    heads = [attention.heads for attention in _attention_of_text(graph)]
    for count in heads or [graph.hidden]:  # without attention, channels are split
        if count % parallel.tensor:
            raise UsageError(
                f"{count} {'attention heads' if heads else 'channels'} can't be split evenly"
                f" over {parallel.tensor} devices; --tensor-parallel must divide {count}"
            )


def _attention_of_text(graph: Graph) -> list[Attention]:
    """Return the attention cores except a vision tower's, which each device may hold whole."""
    return [work for node, work in graph.attentions() if node.stream not in IMAGE_STREAMS]


def _cache(kernels: Kernels, how: TrainedParts) -> str:
    """Return a line on whether the forward pass fills a KV cache, and why."""
    if kernels.has_cache and how.checkpointing != "full":
        return "the forward pass copies keys and values into a cache (use_cache=True)"
    why = "checkpointing turns it off" if kernels.has_cache else "as in transformers' Trainer"
    return f"no cache of keys and values in the forward pass ({why})"


def _spread(parallel: Parallel) -> str:
    """Return a line on the number of devices and on what ZeRO shards over them."""
    sharding = {
        0: "each data-parallel device holds all states",
        1: "the optimizer's states are sharded",
        2: "the optimizer's states and gradients are sharded",
        3: "states, gradients and weights are sharded (FSDP)",
    }
    if parallel.devices == 1:
        return "one device"
    counts = {name: getattr(parallel, name) for name in _SPLITS}
    sizes = ", ".join(f"{name} {count}" for name, count in counts.items() if count > 1)
    devices = number_of(parallel.devices, "device")
    return f"{devices} ({sizes}), ZeRO stage {parallel.zero}: {sharding[parallel.zero]}"


def assumptions(setup: Setup, how: TrainedParts, graph: Graph) -> Iterator[str]:
    """Yield a line for each choice that an estimate depends on."""
    numbers = setup.precision
    kernels, parallel = setup.kernels, setup.parallel
    attentions = _attention_of_text(graph)
    has_windows = any(each.window or each.chunk for each in attentions)
    masked = "; layers with a window shorter than the sequence keep its mask" if has_windows else ""
    attention = {
        "sdpa": f"torch's sdpa for attention, which keeps no probabilities{masked}",
        "flash": "flash attention: no probabilities kept, windows and caps in the kernel",
        "eager": "attention written out, its probabilities kept in 32 bits and as cast",
    }
    loss = {
        "logits": "the loss from whole logits, in 32 bits, as transformers computes it",
        "fused": "a loss fused with the head, which never has the logits whole",
    }
    master = "a master copy of 4 B" if numbers.master else "no master copy"
    yield from [
        f"{setup.dtype}: weights {numbers.weight} B, products in {numbers.compute} B, {master}",
        f"optimizer {setup.optimizer}: {OPTIMIZERS[setup.optimizer].says}",
        _spread(parallel),
        attention[kernels.attention],
        "norms that keep their input in 32 bits, as transformers writes RMSNorm"
        if kernels.norm == "eager"
        else "norms in one kernel that keeps its input",
        loss[kernels.loss],
        _cache(kernels, how),
        "no dropout in the model; gradients are freed before each step's first forward pass",
    ]
    if how.lora is not None:
        dropout = "with" if kernels.has_adapter_dropout else "without"
        yield f"adapters of {kernels.adapter_bytes} B a number, {dropout} dropout"
    if setup.quantize is not None:
        yield (
            f"{setup.quantize} on matrices; embedding, head, norms, routers and experts held as one"
            " tensor, as transformers 5 has them, are not quantised"
        )
    if setup.workspace_bytes:
        yield f"{scaled(setup.workspace_bytes, 'B')} of workspace for matrix products"
    if parallel.tensor > 1:
        yield "tensor-parallel: matrices, vocabulary and heads split evenly; norms are whole"
    keys = {each.kv_heads for each in attentions if each.kv_heads % parallel.tensor}
    if keys:
        yield (
            f"{min(keys)} key-value heads for {parallel.tensor} tensor-parallel devices: counted"
            " as split, but frameworks copy them, so the estimate is a little low"
        )
    if parallel.pipeline > 1:
        yield "a pipeline of even stages, one forward and one backward in turn (1F1B)"
    if parallel.zero >= 2 and parallel.sharded(2) > 1:
        yield "a layer's gradients stay unsharded through the backward pass of the next layer"
    if parallel.zero == 3:
        yield "gathered at a time: two layers, and the weights outside layers"


# Weights, gradients and optimizer states on one device, node by node.


class ParameterMemory:
    """Bytes of weights, gradients and optimizer states on one device, node by node."""

    def __init__(self, graph: Graph, trainable: Trainable, setup: Setup) -> None:
        self.nodes, self.setup = {node.name: node for node in graph}, setup
        self.numbers = setup.precision
        self.trained = trained_nodes(graph, trainable)
        self.needs = gradients(graph, trainable)

    def split(self, node: Node) -> int:
        """Return the number of tensor-parallel devices that share a node's parameters."""
        is_replicated = node.part in ("norm", "router", "lora") or node.role == "positions"
        return 1 if is_replicated or not node.params else self.setup.parallel.tensor

    def weight_bytes(self, node: Node) -> float:
        """Return the bytes of a node's parameters on one tensor-parallel device, before ZeRO."""
        params = node.params / self.split(node)
        if node.part == "lora":
            return params * self._adapter_bytes()
        storage = self.setup.quantize
        if storage and isinstance(node.work, Linear) and node.work.is_module and not node.role:
            matrix = STORED_TYPES[storage].matrix_bytes(node.work, self.numbers.compute)
            return matrix / self.split(node)
        return params * self.numbers.weight

    def _adapter_bytes(self) -> int:
        return max(self.setup.kernels.adapter_bytes, self.numbers.weight)

    def _number_bytes(self, node: Node) -> int:
        """Return the bytes per element of a trained parameter and its gradient."""
        return self._adapter_bytes() if node.part == "lora" else self.numbers.weight

    def _moment_bytes(self, node: Node) -> int:
        """Return the bytes per element of a moment: as the master copy, if there is one."""
        return max(self._number_bytes(node), self.numbers.master)

    def _own(self, node: Node) -> bool:
        return self.trained[node.name] and node.params > 0

    def gradient_bytes(self, node: Node) -> float:
        """Return the bytes of a node's gradient, before ZeRO."""
        return node.params / self.split(node) * self._number_bytes(node) if self._own(node) else 0

    def made_gradient_bytes(self, node: Node) -> float:
        """Return the gradient bytes that a node's backward allocates; for a tied weight, too."""
        own = self.gradient_bytes(node)
        if node.tied_to is None or not self.trained[node.name]:
            return own
        return own + self.gradient_bytes(self.nodes[node.tied_to])

    def states(self, node: Node) -> tuple[float, float]:
        """Return the bytes of a node's optimizer states: on the device, on the host."""
        if not self._own(node):
            return 0, 0
        share = self.split(node) * self.setup.parallel.sharded(1)
        chosen = OPTIMIZERS[self.setup.optimizer]
        copy = node.params * self.numbers.master if node.part != "lora" else 0
        moments = chosen.moments(node, self._moment_bytes(node))
        if chosen.is_paged:
            return copy / share, moments / share
        return (copy + moments) / share, 0.0

    def scratch(self, nodes: list[Node]) -> float:
        """Return the bytes of the optimizer's temporaries in its step over these nodes."""
        shards = self.setup.parallel.sharded(1)
        moments = [
            node.params * self._moment_bytes(node) / (self.split(node) * shards)
            for node in nodes
            if self._own(node)
        ]
        scratch = OPTIMIZERS[self.setup.optimizer].scratch
        if scratch == "foreach":
            return sum(moments)
        return 2 * max(moments, default=0.0) if scratch == "loop" else 0.0

    def cast_bytes(self, node: Node) -> float:
        """Return the bytes of autocast's 16-bit copy of a matrix, kept for its backward pass."""
        is_cast = self.numbers.is_autocast and self.needs[node.name]
        if not is_cast or not isinstance(node.work, Linear):
            return 0.0
        share = self.split(node) if node.params else self.setup.parallel.tensor
        return node.work.params / (share * self.setup.parallel.sharded(3)) * self.numbers.compute

    def gathered_bytes(self, nodes: list[Node], layers: list[str]) -> float:
        """Return the bytes of weights that ZeRO stage 3 gathers at a time.

        These are the running layer, the next one (prefetched) and the weights outside layers.
        """
        if self.setup.parallel.sharded(3) == 1:
            return 0
        sizes = dict.fromkeys([None, *layers], 0.0)
        for node in nodes:
            sizes[node.layer] += self.weight_bytes(node)
        outside = sizes.pop(None)
        return outside + sum(sorted(sizes.values())[-2:])
