"""How a step is run, as far as its memory is concerned: numbers, kernels, devices.

Nothing here is measured, and each choice moves the answer, so each has a name and a default that is
some program's own, and all of them are said beside the figure they lead to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ergmeter.errors import UsageError
from ergmeter.flops.batch import IMAGE_STREAMS
from ergmeter.flops.estimate.optimizer import optimizer
from ergmeter.flops.graph.graph import Attention
from ergmeter.units import number_of, scaled

if TYPE_CHECKING:
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.graph.activation_traits import ActivationTraits
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.flops.work import TrainedParts

FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a number, by what it is."""

    name: str
    weight: int
    compute: int  # what matrices are multiplied in
    stream: int  # what flows between layers
    master: int = 0  # a second copy of trained weights, which the optimizer keeps

    @property
    def is_autocast(self) -> bool:
        """Whether weights are cast for each product."""
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


def precision(name: str) -> Precision:
    """By name."""
    if name not in PRECISIONS:
        raise UsageError(f"no precision {name!r}; there are {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, slots=True)
class Kernels:
    """How operations are written, where it changes what they keep. The defaults: transformers'."""

    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    norm: Literal["eager", "fused"] = "eager"
    feed: Literal["eager", "fused"] = "eager"
    loss: Literal["logits", "fused"] = "logits"
    adapter_bytes: int = FP32  # PEFT's autocast_adapter_dtype, on unless it is turned off
    has_adapter_dropout: bool = False
    # The model copies keys and values into a cache: `config.use_cache`, on in a loop of one's own
    # unless it is turned off, off in transformers' Trainer and under checkpointing.
    has_cache: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """Over how many devices a model and its batch are spread, and how."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    zero: int = 0  # ZeRO's stage; 3 is FSDP's full sharding, 2 its SHARD_GRAD_OP
    is_sequence_parallel: bool = False  # Megatron's: norms and sums split along the sequence

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} parallelism is over 1 device or more")
        if self.zero not in range(4):
            raise UsageError(f"ZeRO has the stages 0 to 3; got {self.zero}")

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline * self.context

    def sharded(self, stage: int) -> int:
        """Devices that share what is sharded from this stage of ZeRO on."""
        return self.data * self.context if self.zero >= stage else 1


# How long a program holds what the model returned, the logits first of all. Freed: before the
# backward pass. Until the step: through the backward pass. Until the next: also through the
# optimizer's step and the next forward pass, which is what `output = model(...)` in a loop does.
Output = Literal["freed", "until-step", "until-next"]


@dataclass(frozen=True, slots=True)
class Setup:
    """How a step is run, as far as memory is concerned. The defaults: transformers' Trainer."""

    dtype: str = "bf16"
    optimizer: str = "adamw-fused"
    quantize: str | None = None
    kernels: Kernels = field(default_factory=Kernels)
    micro_batches: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    workspace_bytes: float = 0
    output: Output = "freed"


def check_sizes(graph: Graph, batch: Batch, setup: Setup) -> None:
    """UsageError where something would be split finer than it has pieces."""
    parallel, parts = setup.parallel, setup.micro_batches
    check_model_split(graph, parallel)
    if parallel.context > batch.seq_len:
        raise UsageError(
            f"sequences of {batch.seq_len} tokens can't be split over {parallel.context} devices;"
            f" --context-parallel is at most {batch.seq_len}"
        )
    if batch.sequences % (parallel.data * parts):
        raise UsageError(
            f"--batch-size {batch.sequences} is no multiple of {parallel.data}"
            f" data-parallel devices x {parts} micro-batches"
        )


def check_model_split(graph: Graph, parallel: Parallel) -> None:
    """UsageError where a model's layers or heads are fewer than their parts."""
    layers = len({node.layer for node in graph if node.layer is not None})
    if parallel.pipeline > max(1, layers):
        raise UsageError(
            f"{layers} layers can't be {parallel.pipeline} stages of a pipeline;"
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
    """Of text: an image's tower may be whole on every device."""
    return [
        node.work
        for node in graph
        if isinstance(node.work, Attention) and node.stream not in IMAGE_STREAMS
    ]


def is_written_out(
    work: Attention, numbers: Precision, kernels: Kernels, code: ActivationTraits
) -> bool:
    """Whether the probabilities are kept.

    torch's kernels for 32 bits take no grouped heads, so its sdpa writes those out whatever was
    asked for: on an H200 that made 99 GB of 46. For capped scores, for sinks and for some older
    families transformers has no sdpa, and takes the code that writes them out.
    """
    if kernels.attention != "sdpa":
        return kernels.attention == "eager"
    grouped = numbers.compute == FP32 and work.kv_heads != work.heads
    return grouped or code.has_no_fused_attention or is_math(work, kernels, code)


def is_math(work: Attention, kernels: Kernels, code: ActivationTraits) -> bool:
    """Whether torch's sdpa falls back to its math, which is in 32 bits.

    It does for one head of keys that is to serve all queries without `enable_gqa` (Falcon 7B).
    """
    is_shared = code.is_masked_always and work.kv_heads == 1 < work.heads
    return kernels.attention == "sdpa" and is_shared


def is_masked(work: Attention, keys: int, kernels: Kernels, code: ActivationTraits) -> bool:
    """Whether torch's sdpa is handed a mask of every pair, for a window that it does not know.

    transformers leaves it out for sequences shorter than the window.
    """
    window = work.window or work.chunk
    needs_mask = code.is_masked_always or (window is not None and keys >= window)
    return kernels.attention == "sdpa" and needs_mask


def _cache(kernels: Kernels, how: TrainedParts) -> str:
    """Whether the forward pass fills a cache of keys and values."""
    if kernels.has_cache and how.checkpointing != "full":
        return "the forward pass copies keys and values into a cache (use_cache=True)"
    why = "checkpointing turns it off" if kernels.has_cache else "as in transformers' Trainer"
    return f"no cache of keys and values in the forward pass ({why})"


def _spread(parallel: Parallel) -> str:
    """Over which devices, and what each of them holds."""
    held = {
        0: "each data-parallel device holds all states",
        1: "the optimizer's states are sharded",
        2: "the optimizer's states and gradients are sharded",
        3: "states, gradients and weights are sharded (FSDP)",
    }
    if parallel.devices == 1:
        return "one device"
    sizes = ", ".join(
        f"{name} {count}"
        for name, count in (
            ("data", parallel.data),
            ("tensor", parallel.tensor),
            ("pipeline", parallel.pipeline),
            ("context", parallel.context),
        )
        if count > 1
    )
    devices = number_of(parallel.devices, "device")
    return f"{devices} ({sizes}), ZeRO stage {parallel.zero}: {held[parallel.zero]}"


def assumptions(setup: Setup, how: TrainedParts, graph: Graph) -> list[str]:
    """The choices that an estimate rests on, a line for each."""
    numbers = precision(setup.dtype)
    kernels, parallel = setup.kernels, setup.parallel
    has_windows = any(one.window or one.chunk for one in _attention_of_text(graph))
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
    lines = [
        f"{setup.dtype}: weights {numbers.weight} B, products in {numbers.compute} B, {master}",
        f"optimizer {setup.optimizer}: {optimizer(setup.optimizer).says}",
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
        lines.append(f"adapters of {kernels.adapter_bytes} B a number, {dropout} dropout")
    if setup.quantize is not None:
        lines.append(
            f"{setup.quantize} on matrices; embedding, head, norms, routers and experts held as one"
            " tensor, as transformers 5 has them, are not quantised"
        )
    if setup.workspace_bytes:
        lines.append(f"{scaled(setup.workspace_bytes, 'B')} of workspace for matrix products")
    if parallel.tensor > 1:
        lines.append(
            "tensor-parallel: matrices, vocabulary and heads split evenly; norms are whole"
        )
    keys = {one.kv_heads for one in _attention_of_text(graph) if one.kv_heads % parallel.tensor}
    if keys:
        lines.append(
            f"keys and values have {min(keys)} heads for {parallel.tensor} tensor-parallel devices:"
            " counted as if split, where frameworks copy them; a little low"
        )
    if parallel.pipeline > 1:
        lines.append("a pipeline of even stages, one forward and one backward in turn (1F1B)")
    if parallel.zero >= 2 and parallel.sharded(2) > 1:
        lines.append("gradients are whole from their layer's way back until the next layer's")
    if parallel.zero == 3:
        lines.append("two layers, and what is in no layer, are gathered at a time")
    return lines
