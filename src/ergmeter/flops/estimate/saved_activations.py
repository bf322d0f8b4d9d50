"""Bytes that autograd saves in a forward pass, and the peak of the backward pass through a layer.

"34 s b h bytes a layer" (Korthikanti et al., arXiv 2205.05198) holds for a fully trained GPT with
dropout and 16-bit LayerNorm only. A frozen matrix does not save its input. An RMSNorm written in
Python saves a 32-bit copy. A 32-bit adapter copies its input. So the sum is made per operation.
Each saves what its own derivative needs:

  matrix          its input, if the matrix is trained
  RMSNorm         its input in 32 bits; the normalised input, if the scale is trained
  LayerNorm       its input, and mean and deviation of each row
  attention       queries, keys and values after rotation and copying; its result; one number per
                  row and head; for a window under sdpa the mask, and keys and values repeated for
                  each head; in eager attention the probabilities, in 32 bits and in 16
  logit cap       the tanh
  act(gate) x up  gate, up and act(gate)
  act(up)         up; or act(up) if the derivative follows from it, as for a ReLU
  sum             nothing
  experts         the same on the rows routed to each; their results, which the router weighs;
                  the order of the routed rows
  experts with    the whole weight with the update added: PEFT multiplies rows with this sum
  adapters

Two operations can save the same tensor, and a view keeps its whole base tensor alive. So the list
is by storage: each storage is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.estimate.arrangement import FP32, ParameterMemory
from ergmeter.flops.graph.graph import Attention, Convolution, Fold, Graph, Linear, Node, Scan
from ergmeter.units import listed_by

# What autograd saves by how a family's code is written.
#
# Two models of the same sizes can save different tensors. A cap on the scores saves a second matrix
# of scores. A norm that subtracts its mean twice saves two copies in 32 bits. An activation written
# in Python saves five tensors instead of one. Each was read off torch's saved-tensor hooks for
# transformers 5.22 on a CPU, and 5.17 on an H200.

# Families by a trait of their code, a field of `ActivationTraits`.
_FAMILIES: dict[str, tuple[str, ...]] = {
    # Rotary embedding on a part of each head: the concatenation changes the memory layout of the
    # queries and of attention's result, so the next matrix makes a copy.
    "joins_heads": (
        *("gpt_neox", "phi", "phi3", "stablelm", "glm", "glm4", "glm4_moe"),
        *("deepseek_v2", "deepseek_v3", "kimi_k2"),
    ),
    # Norms without parameters that do compute. In other families such a node does nothing.
    "norms_bare": ("olmo", "nanochat"),
    # Their eager softmax is in the scores' own type, so it needs no cast copy.
    "softmax_as_it_comes": ("gpt2", "gpt_oss", "falcon"),
    # Their eager attention multiplies queries and keys in 32 bits.
    "scores_in_32_bits": ("gptj", "gpt_neo"),
    # transformers has no sdpa for them.
    "has_no_sdpa": ("bloom", "gptj", "gpt_neo", "mpt"),
    # They always pass a mask to sdpa, and copy keys and values for each head.
    "is_masked_always": ("falcon",),
    # Their norms are torch's LayerNorm although they have no bias.
    "is_layer_norm": ("mpt", "dbrx"),
    # Their routers multiply in 32 bits, from a copy of their input.
    "routes_in_32_bits": ("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_k2"),
    # Attention sinks: transformers has no fused kernel for them.
    "has_sinks": ("gpt_oss",),
    # They multiply by the scale before they round to 16 bits, so its input is saved in 32 bits.
    "scales_in_32_bits": (
        *("gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "olmo2", "cohere", "cohere2"),
        "gpt_oss",
    ),
    # They subtract the mean twice, once for the variance, and save both results in 32 bits.
    "centres_twice": ("cohere", "cohere2"),
    # Clamps in the activation. Saved: gate, up, both clamped, the sigmoid, the gate's product.
    "spells_out_activation": ("gpt_oss",),
}
# Activations that transformers writes in Python: 0.5 x (1 + tanh(...)) and its like. The others
# are one operation of torch.
_IN_PYTHON = ("gelu_new", "gelu_accurate", "gelu_python_tanh")
_DEFAULT_ACTIVATIONS = {**dict.fromkeys(("gpt2", "phi", "gptj"), "gelu_new"), "opt": "relu"}
# The derivative follows from the result, so torch saves the result and not the input.
_FROM_RESULT = ("relu",)
_DEFAULT_CAPS = {"gemma2": (True, True)}  # of scores, of logits, where a config does not say


@dataclass(frozen=True, slots=True)
class ActivationTraits:
    """How a model's code differs from the common code in the tensors that autograd saves."""

    scales_in_32_bits: bool = False
    centres_twice: bool = False
    joins_heads: bool = False
    norms_bare: bool = False
    softmax_as_it_comes: bool = False
    scores_in_32_bits: bool = False
    is_masked_always: bool = False
    is_layer_norm: bool = False
    routes_in_32_bits: bool = False
    has_no_sdpa: bool = False
    has_sinks: bool = False
    caps_scores: bool = False
    caps_logits: bool = False
    keeps_result: bool = False  # the activation saves its result, not its input
    spells_out_activation: bool = False

    @property
    def steps(self) -> int:
        """The number of tensors that an activation saves besides its input."""
        return 3 if self.spells_out_activation else 0

    @property
    def has_no_fused_attention(self) -> bool:
        """True if transformers uses eager attention although sdpa is asked for."""
        return self.caps_scores or self.has_sinks or self.has_no_sdpa


def code_traits(graph: Graph) -> ActivationTraits:
    """Return the traits of the model's code, by its family and its configuration."""
    of_family = (trait for trait, families in _FAMILIES.items() if graph.family in families)
    return ActivationTraits(**dict.fromkeys((*of_family, *graph.traits), True))


def traits(config: ModelConfig) -> frozenset[str]:
    """Return the names of `ActivationTraits` that a configuration's fields imply."""
    inner = config.raw("text_config")
    fields = inner if isinstance(inner, dict) else config.fields
    kind = str(fields.get("model_type") or config.model_type)
    scores, logits = _DEFAULT_CAPS.get(kind, (False, False))
    names = ("hidden_activation", "activation_function", "hidden_act")
    used = next((fields[name] for name in names if fields.get(name)), None)
    activation = used or _DEFAULT_ACTIVATIONS.get(kind)
    has_trait = {
        "caps_scores": fields.get("attn_logit_softcapping", scores),
        "caps_logits": fields.get("final_logit_softcapping", logits),
        "spells_out_activation": activation in _IN_PYTHON,
        "keeps_result": activation in _FROM_RESULT,
    }
    return frozenset(trait for trait, is_present in has_trait.items() if is_present)


# Saved tensors.

_FEED = frozenset({"mlp", "experts", "shared expert"})
_INDEX = 8  # bytes


@dataclass(frozen=True, slots=True)
class Saved:
    """A storage that autograd saves for the backward pass."""

    storage: str
    bytes: float
    node: str  # the first in the graph that saves it, so the last in backward to need it
    layer: str | None
    is_split: bool  # tensor parallelism gives each device a share
    is_core: bool = False  # inside attention: selective checkpointing recomputes it
    is_weight: bool = False  # its size does not depend on the number of rows


class SavedTensors:
    """Computes what each node of a graph saves, given which parameters are trained."""

    def __init__(self, graph: Graph, batch: Batch, parameters: ParameterMemory) -> None:
        self.parameters, self.nodes = parameters, parameters.nodes
        self.batch = batch.grid()  # padding is computed and kept like anything else
        self.needs, self.trained = parameters.needs, parameters.trained
        self.numbers, self.kernels = parameters.numbers, parameters.setup.kernels
        self.widths = widths(graph)
        self.is_rotary = not any(node.role == "positions" for node in graph)
        self.code = code_traits(graph)
        self.folds = {node.name for node in graph if isinstance(node.work, Fold)}
        self.used = {  # experts that a row is sent to, by the module that holds them
            node.name.partition(".experts.")[0]: work.used
            for node, work in graph.linears()
            if work.copies > 1
        }

    def all(self) -> list[Saved]:
        """Return everything saved for the backward pass, each storage once, without the loss."""
        tensors: dict[str, Saved] = {}
        for node in self.nodes.values():
            for each in self.of(node):
                first = tensors.get(each.storage)
                if first is None:
                    tensors[each.storage] = each
                elif first.is_core:  # a matrix saves it too: recomputing attention frees nothing
                    tensors[each.storage] = replace(each, node=first.node)
        return [each for each in tensors.values() if each.bytes]

    def of(self, node: Node) -> Iterator[Saved]:
        """Yield the tensors that one node saves."""
        work = node.work
        if isinstance(work, Linear):
            if node.role == "head" and self.code.caps_logits and self.kernels.loss == "logits":
                size = work.outputs * self.numbers.compute
                yield self._keep(node, f"{node.name}:tanh", size, split=True)
            if node.part == "lora" and self.site(node) in self.folds:
                return
            yield from self._matrix(node, work)
        elif isinstance(work, Fold):
            yield from self._fold(node, work)
        elif isinstance(work, Attention):
            yield from self._attention(node, work)
        elif isinstance(work, Convolution | Scan):
            yield from self._recurrence(node)
        elif node.part == "norm":
            yield from self._norm(node)
        elif node.part == "residual":
            yield from self._weighed(node)

    def _keep(
        self, node: Node, storage: str, per_row: float, *, split: bool, core: bool = False
    ) -> Saved:
        rows = self.batch.rows(node.stream)
        return Saved(storage, rows * per_row, node.name, node.layer, split, core)

    def _storage(self, name: str) -> str:
        """Return the storage of a node's result: its input's, if the node computes nothing."""
        node = self.nodes[name]
        is_bare = node.part == "norm" and not node.params and not self.code.norms_bare
        return self._storage(node.of[0]) if is_bare and len(node.of) == 1 else name

    def _bytes_out(self, name: str) -> int:
        """Return the bytes of one number of a node's result."""
        node = self.nodes[name]
        if node.work is not None or node.part == "lora":
            return self.numbers.compute
        return self.numbers.stream

    def is_split(self, name: str) -> bool:
        """True if a node's result is inside attention or feed-forward, not between layers."""
        node = self.nodes[name]
        if node.part == "lora" and not isinstance(node.work, Linear):
            return self.is_split(node.of[0])
        closes = node.part == "attention output" or node.name.endswith(("down_proj", "out_proj"))
        return node.layer is not None and node.part not in ("norm", "residual") and not closes

    def _part(self, name: str) -> str:
        """Return the part of a node; for the sum of a matrix and its adapter, the matrix's."""
        node = self.nodes[name]
        is_sum = node.part == "lora" and not isinstance(node.work, Linear)
        return self.nodes[node.of[0]].part if is_sum else node.part

    def _matrix(self, node: Node, work: Linear) -> Iterator[Saved]:
        size = self.numbers.compute
        copies = work.used if work.copies > 1 else 1
        is_adapter = node.part == "lora"
        is_product = self.follows_activation(node)
        if is_product:
            yield from self._activation(node, work, copies)
            source, nbytes, split = f"{self.site(node)}:product", size, True
        elif len(node.of) == 1:
            source, nbytes = self._storage(node.of[0]), self._bytes_out(node.of[0])
            split = self.is_split(source)
        else:
            source, nbytes, split = f"{node.name}:input", size, False
        if node.part == "router" and self.needs[node.name]:
            yield from self._choice(node, work)
        if not (self.trained[node.name] or self.site(node) in self.folds):
            return
        wanted = self.kernels.adapter_bytes if is_adapter and not self.numbers.is_autocast else size
        if node.part == "router" and self.code.routes_in_32_bits:
            wanted = FP32
        dropped = is_adapter and self.kernels.has_adapter_dropout and node.name.endswith("lora_A")
        gathered = work.copies > 1 and not is_product  # the rows of each expert, copied out
        if wanted != nbytes or dropped or gathered:
            source = f"{node.name}:copy"
        yield self._keep(node, source, work.inputs * copies * wanted, split=split)
        if dropped and any(self.needs[name] for name in node.of):
            yield self._keep(node, f"{node.name}:mask", work.inputs * copies, split=split)

    def _choice(self, node: Node, work: Linear) -> Iterator[Saved]:
        """Yield a router's 32-bit probabilities, and the indices that sort rows by expert."""
        yield self._keep(node, f"{node.name}:weights", work.outputs * FP32, split=False)
        used = self.used.get(node.name.rpartition(".")[0], 0)
        yield self._keep(node, f"{node.name}:order", 4 * used * _INDEX, split=False)

    def _fold(self, node: Node, work: Fold) -> Iterator[Saved]:
        """Yield a weight with its low-rank update added, needed for the gradient of its input."""
        small = work.rank * (work.inputs + work.outputs) * work.copies
        base = self.nodes[node.of[0]]
        weight = work.params if any(self.needs[name] for name in base.of) else 0
        size = (small + weight) * self.numbers.compute
        name = f"{node.name}:folded"
        yield Saved(name, size, node.name, node.layer, is_split=True, is_weight=True)

    def _base_part(self, node: Node) -> str:
        """Return the part of a node; for an adapter, the part of the matrix it adapts."""
        if node.part != "lora":
            return node.part
        return self.nodes[f"{self.site(node)}.base_layer"].part

    @staticmethod
    def site(node: Node) -> str:
        """Return the name of the module that a matrix or its adapter belongs to."""
        for ending in (".base_layer", ".lora_A", ".lora_B"):
            if node.name.endswith(ending):
                return node.name.removesuffix(ending)
        return node.name

    def follows_activation(self, node: Node) -> bool:
        """True for the last matrix of a feed-forward layer, whose input is an activation's result.

        False for an adapter's second matrix: no activation is between an adapter's two matrices.
        """
        if not node.of or node.name.endswith(".lora_B"):
            return False
        return {self._part(name) for name in node.of} == {self._base_part(node)} & _FEED

    def _activation(self, node: Node, work: Linear, copies: int) -> Iterator[Saved]:
        """Yield what the activation between the matrices of a feed-forward layer saves."""
        if not any(self.needs[name] for name in node.of):
            return
        size, width = self.numbers.compute, work.inputs * copies
        wide = {name: self.widths[name] * copies for name in node.of}
        is_gated = sum(wide.values()) == 2 * width
        if self.code.keeps_result and not is_gated:  # the next matrix saves it too
            steps = 0
            yield self._keep(node, f"{self.site(node)}:product", width * size, split=True)
        else:
            steps = is_gated + self.code.steps
            for name, each in wide.items():
                yield self._keep(node, name, each * size, split=True)
        if self.kernels.feed == "fused":
            return
        for step in range(steps):
            name = f"{self.site(node)}:activated {step}"
            yield self._keep(node, name, width * size, split=True)

    def _norm(self, node: Node) -> Iterator[Saved]:
        if self._storage(node.name) != node.name:
            return
        source = self._storage(node.of[0])
        carries = any(self.needs[name] for name in node.of)
        trained = self.trained[node.name]
        if not carries and not trained:
            return
        of_heads = self.normed_heads(node)
        if of_heads == 0:
            return
        width = of_heads or self.widths[node.name]
        split = bool(of_heads)
        nbytes = self._bytes_out(source)
        if self.is_fused_norm(node, width):
            yield self._keep(node, source, width * nbytes, split=split)
            yield self._keep(node, f"{node.name}:scale", 2 * FP32, split=False)
            return
        if carries and self.code.centres_twice:
            yield self._keep(node, f"{node.name}:centred", 2 * width * FP32, split=split)
        elif carries:
            name = source if nbytes == FP32 and len(node.of) == 1 else f"{node.name}:wide"
            yield self._keep(node, name, width * FP32, split=split)
        yield self._keep(node, f"{node.name}:scale", FP32, split=False)
        if trained:
            size = FP32 if self.code.scales_in_32_bits else nbytes
            yield self._keep(node, f"{node.name}:scaled", width * size, split=split)

    def is_fused_norm(self, node: Node, width: int) -> bool:
        """True if a norm runs as one kernel: a fused norm, or torch's LayerNorm."""
        is_layer_norm = node.params == 2 * width or self.code.is_layer_norm
        return self.kernels.norm == "fused" or is_layer_norm

    def normed_heads(self, node: Node) -> int | None:
        """Return the width of the queries and keys that a node inside attention normalises.

        None for a norm elsewhere; 0 if the parameters are not a norm's (sinks, position tables).
        """
        core = self.nodes.get(f"{node.name.rpartition('.')[0]}.core")
        if core is None or core.of[0] != node.name or not isinstance(core.work, Attention):
            return None
        if node.params < 2 * core.work.qk_dim:
            return 0
        return (core.work.heads + core.work.kv_heads) * core.work.qk_dim

    def _attention(self, node: Node, work: Attention) -> Iterator[Saved]:
        if not any(self.needs[name] for name in node.of):
            return
        size = self.numbers.compute
        is_eager = self.is_written_out(work)
        keys = self.keys(node, work)
        masked = not is_eager and self.is_masked(work, keys)
        yield from self._met(node, work, is_eager=is_eager, masked=masked)
        out = self._keep(node, node.name, work.heads * work.v_dim * size, split=True, core=True)
        if not is_eager:
            yield out
            if self.code.joins_heads:
                yield replace(out, storage=f"{node.name}:joined")
            yield self._keep(node, f"{node.name}:sums", work.heads * FP32, split=True, core=True)
            if masked:
                yield self._keep(node, f"{node.name}:mask", keys * size, split=False, core=True)
            return
        each = work.heads * keys
        if self.code.caps_scores:
            yield self._keep(node, f"{node.name}:tanh", each * size, split=True, core=True)
        softmax = self.softmax_bytes(work)
        yield self._keep(node, f"{node.name}:softmax", each * softmax, split=True, core=True)
        if size != softmax and not self.is_math(work):
            yield self._keep(node, f"{node.name}:cast", each * size, split=True, core=True)

    def is_written_out(self, work: Attention) -> bool:
        """True if attention stores its probabilities in memory; autograd then saves them.

        torch's fused sdpa kernels do not support grouped heads in 32 bits, so sdpa then stores
        them too: on an H200 memory rose from 46 to 99 GB. transformers has no sdpa for capped
        scores, for sinks and for some older families, and uses eager attention instead.
        """
        if self.kernels.attention != "sdpa":
            return self.kernels.attention == "eager"
        grouped = self.numbers.compute == FP32 and work.kv_heads != work.heads
        return grouped or self.code.has_no_fused_attention or self.is_math(work)

    def is_math(self, work: Attention) -> bool:
        """True if torch's sdpa falls back to its math backend, which computes in 32 bits.

        It does if one key head serves all query heads without `enable_gqa` (Falcon 7B).
        """
        is_shared = self.code.is_masked_always and work.kv_heads == 1 < work.heads
        return self.kernels.attention == "sdpa" and is_shared

    def is_masked(self, work: Attention, keys: int) -> bool:
        """True if sdpa gets a full mask, because it has no parameter for a window.

        transformers passes no mask for sequences shorter than the window.
        """
        window = work.window or work.chunk
        needs_mask = self.code.is_masked_always or (window is not None and keys >= window)
        return self.kernels.attention == "sdpa" and needs_mask

    def softmax_bytes(self, work: Attention) -> int:
        """Bytes per probability in eager attention; autocast computes softmax in 32 bits."""
        as_it_comes = self.code.softmax_as_it_comes and not self.numbers.is_autocast
        is_32_bits = self.is_math(work) or not as_it_comes
        return FP32 if is_32_bits else self.numbers.compute

    def keys(self, node: Node, work: Attention) -> int:
        """Return the number of keys per query, masked ones included."""
        return max(each.past + each.new for each in self.batch.stream(work.keys or node.stream))

    def _met(self, node: Node, work: Attention, *, is_eager: bool, masked: bool) -> Iterator[Saved]:
        """Yield the saved queries, keys and values that go into the attention kernel."""
        size = self.numbers.compute
        query, key, value = node.of
        repeated = (is_eager or masked) and work.kv_heads != work.heads
        kv_heads = work.heads if repeated else work.kv_heads
        if query == key == value and not is_eager:
            yield from self._views(node, work, kv_heads, is_repeated=repeated)
            return
        qkv_widths = _qkv_widths(work, kv_heads)
        moved = dict(zip(node.of, qkv_widths, strict=True))
        if query == key == value:
            moved = {query: sum(qkv_widths)}
        elif key == value:  # latent: keys are joined with their rotary part, values are a view
            values = work.v_dim if is_eager else self.widths[value] // work.kv_heads
            moved[key] = kv_heads * (work.qk_dim + values)
        if self.is_math(work):
            size = FP32
        elif is_eager and self.code.scores_in_32_bits and size != FP32:
            moved = {query: moved[query] * 2, key: moved[key] * 2, value: moved[value]}
        for name, width in moved.items():
            is_new = repeated or self.is_rotary or self.nodes[name].part == "norm"
            storage = f"{node.name}:{name}" if is_new else name
            yield self._keep(node, storage, width * size, split=True)

    def _views(
        self, node: Node, work: Attention, kv_heads: int, *, is_repeated: bool
    ) -> Iterator[Saved]:
        """Yield queries, keys and values of a fused projection, as a fused kernel saves them.

        Rotation, repetition and caching make copies. The others are views; a single view keeps
        the projection's whole result alive.
        """
        size, cached = self.numbers.compute, self.kernels.has_cache
        is_copied = {
            "query": self.is_rotary,
            "key": self.is_rotary or is_repeated or cached,
            "value": is_repeated or cached,
        }
        for name, width in zip(is_copied, _qkv_widths(work, kv_heads), strict=True):
            if is_copied[name]:
                yield self._keep(node, f"{node.name}:{name}", width * size, split=True)
        if not all(is_copied.values()):
            buffer = node.of[0]
            yield self._keep(node, buffer, self.widths[buffer] * size, split=True)

    def _recurrence(self, node: Node) -> Iterator[Saved]:
        """Yield what a fused kernel of a convolution or scan saves: its inputs and its result."""
        if not self.needs[node.name]:
            return
        size = self.numbers.compute
        for name in (*node.of, node.name):
            yield self._keep(node, name, self.widths[name] * size, split=True)

    def _weighed(self, node: Node) -> Iterator[Saved]:
        """Yield the saved factors of a product: experts x router, scan x gate. A sum saves none."""
        weighs = [name for name in node.of if self._part(name) == "router"]
        gates = [name for name in node.of if isinstance(self.nodes[name].work, Scan)]
        if not (weighs or gates) or not self.needs[node.name]:
            return
        for name in node.of:
            work = self.nodes[name].work
            if name in weighs or (weighs and not self.needs[weighs[0]]):
                continue
            used = work.used if isinstance(work, Linear | Fold) and work.copies > 1 else 1
            per_row = self.widths[name] * used * self.numbers.compute
            yield self._keep(node, name, per_row, split=False)


def _qkv_widths(work: Attention, kv_heads: int) -> tuple[int, int, int]:
    """Elements per token of queries, of keys and of values."""
    return work.heads * work.qk_dim, kv_heads * work.qk_dim, kv_heads * work.v_dim


def widths(graph: Graph) -> dict[str, int]:
    """Return the elements per row of each node's result, by name; for experts, of one expert."""
    by_name: dict[str, int] = {}
    for node in graph:
        work = node.work
        if isinstance(work, Linear):
            by_name[node.name] = work.outputs
        elif isinstance(work, Attention):
            by_name[node.name] = work.heads * work.v_dim
        elif isinstance(work, Convolution):
            by_name[node.name] = work.channels
        elif node.role == "embedding" and node.params % graph.vocab == 0:
            by_name[node.name] = node.params // graph.vocab
        else:
            by_name[node.name] = by_name[node.of[0]] if node.of else graph.hidden
    return by_name


# The largest number of bytes that the backward pass through one layer needs at a time.
#
# The layer's nodes are visited in reverse. Each reads the gradient of its result, computes those of
# its inputs and weights, and then frees what it saved. So the peak is rarely at the layer's end. It
# is at the activation between the feed-forward matrices, at eager attention with its probabilities,
# or at a norm written in Python, whose derivative needs five 32-bit tensors.
#
# Temporaries inside a kernel (flash attention's 32-bit accumulator) are not counted.

# RMSNorm in Python, backward: the gradient of the product, and for the mean square its own
# gradient, the power, twice the power and their product (aten::pow_backward).
_NORM_TENSORS = 5
# Softmax, backward, on CUDA: the gradient of its result, that gradient times the result, and the
# gradient of its input (softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu). On a
# CPU the product is not stored.
SOFTMAX_TENSORS = 3
# 0.5 x (1 + tanh(...)) in Python: temporaries as wide as the activation, besides its gradients.
_SPELLED_OUT_TENSORS = 1


@dataclass(frozen=True, slots=True)
class LayerPeak:
    """Bytes at the moment of a layer's backward pass that needs the most memory."""

    saved: float = 0.0  # not freed yet
    weight_gradients: float = 0.0  # computed so far
    working: float = 0.0  # gradients of activations, and temporaries

    @property
    def total(self) -> float:
        """Saved tensors, weight gradients and working memory together."""
        return self.saved + self.weight_gradients + self.working


class LayerBackward:
    """Simulates the backward pass through one layer, node by node, to find its memory peak."""

    def __init__(
        self, tensors: SavedTensors, share: Callable[[bool], float], *, recomputes_core: bool
    ) -> None:
        """`share(is_split)`: a device's share of a tensor that tensor parallelism splits or not."""
        self.tensors, self.parameters, self.share = tensors, tensors.parameters, share
        self.recomputes_core = recomputes_core  # selective checkpointing

    def peak(
        self, nodes: list[Node], saved: Iterable[Saved], arriving: dict[str, float], flowing: float
    ) -> LayerPeak:
        """Return the moment of the largest memory use in the backward pass through `nodes`.

        `arriving`: bytes of the gradients that exist at the start, by node. `flowing`: bytes of
        the residual stream's gradient, which exists throughout.
        """
        self.alive = listed_by((each.node, each) for each in saved)
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
            weight = work.params / self.parameters.setup.parallel.tensor
            self._moment(weight * self.tensors.numbers.compute)
        elif node.part == "norm":
            self._norm(node)
        elif node.part == "lora":  # a sum passes its gradient to both inputs
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
            unpacked = work.params / share * self.tensors.numbers.compute
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
        """Add the moment at the activation of a feed-forward layer; its result is already freed."""
        code = self.tensors.code
        if not code.keeps_result:
            self._free(node, product)
        gradients = {name: self._size(self._width(name, node), True, node) for name in node.of}
        extra = _SPELLED_OUT_TENSORS * self.gradients[product] if code.steps else 0.0
        self._moment(sum(gradients.values()) + extra)
        self.gradients.pop(product)
        self.gradients.update(gradients)

    def _attention(self, node: Node, work: Attention) -> None:
        self.core_is_there = True
        tensors = self.tensors
        sizes: dict[str, float] = {}
        for name, width in zip(node.of, _qkv_widths(work, work.kv_heads), strict=True):
            sizes[name] = sizes.get(name, 0.0) + self._size(width, True, node)
        if tensors.is_written_out(work):
            # The softmax needs its result; the 16-bit copy of it is already freed.
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
        alive = (each for some in self.alive.values() for each in some)
        saved = sum(each.bytes for each in alive if self.core_is_there or not each.is_core)
        working = self.flowing + sum(self.gradients.values()) + temporaries
        now = LayerPeak(saved, self.weight_gradients, working)
        if now.total > self.largest.total:
            self.largest = now
