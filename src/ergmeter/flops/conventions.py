"""The ways in which people count a training step, by name: each with its definition and source.

The trap: "our MFU is 45 %". Under which count? For Llama-3-8B at 8192 tokens the conventions in use
are 20 % apart, for LoRA twice that, and none of them is written beside the number. Here each is a
function with a name; a report shows the one that was chosen and how far the others are from it.

All but `exact` are other people's formulas, kept as they are, with their faults: they are for
comparing with their figures. They know a grid of sequences, not documents, and count a frozen
weight as if it were trained unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.graph import Attention, Linear

if TYPE_CHECKING:
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.graph import Graph

EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the formulas take, summed over a model: per token unless it says otherwise."""

    params: int  # N: held, but of the experts only those a token meets
    params_held: int
    embedding: int  # the input table, where nothing else uses it
    embedding_held: int  # the input table, tied or not
    positions: int
    weights: int  # multiplied with each token: projections, feed-forward, head, router
    router: int
    head: int
    heads: int  # query heads, over all layers
    core: int  # heads x (query size + value size), over all layers: 2 L H Q where all are alike
    core_full: int  # of it, in layers without a window
    windows: tuple[tuple[int, int], ...]  # (window, heads x both sizes) of the others
    layers: int
    hidden: int
    vocab: int

    def reach(self, seq_len: int, *, per_window: Callable[[int, int], float]) -> float:
        """Sum over layers of heads x both sizes x the keys a query is counted to see."""
        return self.core_full * seq_len + sum(
            per_window(window, seq_len) * size for window, size in self.windows
        )


def sizes(graph: Graph) -> Sizes:
    """The sums of a model. NotMeasurable where its parameters do not all meet every token."""
    streams = {node.stream for node in graph if node.params} - {"tokens", "logits"}
    if streams:
        raise NotMeasurable(
            "this formula takes every parameter for every token, and part of this model works on"
            f" something else ({', '.join(sorted(streams))}); use exact"
        )
    linears = [(node, node.work) for node in graph if isinstance(node.work, Linear)]
    cores = [node.work for node in graph if isinstance(node.work, Attention)]
    tied = {node.tied_to for node in graph if node.tied_to}
    per_head = [(core, core.heads * (core.qk_dim + core.v_dim)) for core in cores]
    windowed = tuple(
        (core.window or core.chunk or 0, size)
        for core, size in per_head
        if core.window or core.chunk
    )
    return Sizes(
        params=graph.params_active,
        params_held=graph.params,
        embedding=sum(
            node.params for node in graph if node.role == "embedding" and node.name not in tied
        ),
        embedding_held=graph.params_of("embedding"),
        positions=graph.params_of("positions"),
        weights=sum(work.weights for _, work in linears),
        router=sum(work.weights for node, work in linears if node.part == "router"),
        head=sum(work.weights for node, work in linears if node.role == "head"),
        heads=sum(core.heads for core in cores),
        core=sum(size for _, size in per_head),
        core_full=sum(size for core, size in per_head if not (core.window or core.chunk)),
        windows=windowed,
        layers=graph.layers,
        hidden=graph.hidden,
        vocab=graph.vocab,
    )


PerToken: TypeAlias = "Callable[[Sizes, int], float]"


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to count, per token of a training step of sequences of `seq_len`."""

    name: str
    formula: str
    definition: str
    source: str
    per_token: PerToken | None  # None: counted from the graph
    recomputed: float | PerToken = 4 / 3  # hardware FLOPs over model FLOPs, all recomputed
    is_for_lora: bool = False

    def model(self, found: Sizes, batch: Batch) -> float:
        """Model FLOPs of a training step."""
        assert self.per_token is not None
        return self.per_token(found, batch.seq_len) * batch.tokens

    def hardware(self, found: Sizes, batch: Batch) -> float:
        """The same with every layer computed a second time."""
        if callable(self.recomputed):
            return self.recomputed(found, batch.seq_len) * batch.tokens
        return self.model(found, batch) * self.recomputed


def _capped(window: int, seq_len: int) -> float:
    return min(window, seq_len)


def _ignored(_window: int, seq_len: int) -> float:
    return seq_len


def _twice_mean(window: int, seq_len: int) -> float:
    """Twice the keys an average query sees through a window, exactly; S where it sees all."""
    if window >= seq_len:
        return seq_len
    return 2 * window - window * (window - 1) / seq_len


def _palm(s: Sizes, n: int) -> float:
    return 6 * s.params + 6 * s.reach(n, per_window=_capped)


def _mosaicml(s: Sizes, n: int) -> float:
    return 6 * s.params + 12 * s.layers * s.hidden * n


def _torchtitan(s: Sizes, n: int) -> float:
    return 6 * (s.params - s.embedding - s.positions) + 6 * s.reach(n, per_window=_capped)


def _nanogpt(s: Sizes, n: int) -> float:
    return 6 * (s.params - s.positions) + 6 * s.reach(n, per_window=_ignored)


def _six_nd(s: Sizes, _n: int) -> float:
    return 6 * s.params


def _hf_six_nd(s: Sizes, _n: int) -> float:
    return 6 * (s.params_held - s.embedding_held - s.positions)


def _megatron(s: Sizes, n: int) -> float:
    return 6 * (s.weights - s.router) + 3 * s.reach(n, per_window=_ignored)


def _megatron_2024(s: Sizes, n: int) -> float:
    return 6 * (s.weights - s.router) + 6 * s.reach(n, per_window=_ignored)


def _megatron_2021(s: Sizes, n: int) -> float:
    h, layers = s.hidden, s.layers
    return 72 * layers * h**2 * (1 + n / (6 * h) + s.vocab / (12 * layers * h))


def _megatron_2021_recomputed(s: Sizes, n: int) -> float:
    h, layers = s.hidden, s.layers
    return 96 * layers * h**2 * (1 + n / (6 * h) + s.vocab / (16 * layers * h))


def _bridge(s: Sizes, n: int) -> float:
    return 6 * (s.weights - s.router) + 3 * s.reach(n, per_window=_twice_mean)


def _bridge_lora(s: Sizes, _n: int) -> float:
    return 4 * (s.weights - s.router)


def _automodel_lora(s: Sizes, n: int) -> float:
    return 2 / 3 * _bridge(s, n)


def _maxtext(s: Sizes, n: int) -> float:
    return 6 * s.weights + 3 * s.reach(n, per_window=_capped)


def _maxtext_2024(s: Sizes, n: int) -> float:
    return 6 * s.weights + 6 * s.reach(n, per_window=_ignored)


def _verl(s: Sizes, n: int) -> float:
    return 6 * (s.weights + s.vocab * s.hidden) + 3 * s.reach(n, per_window=_capped)


def _neuron(s: Sizes, n: int) -> float:
    lookup = s.vocab * s.hidden
    return 6 * (s.weights + lookup) + 6 * s.reach(n, per_window=_ignored) + 18 * s.heads * n


def _chinchilla(s: Sizes, n: int) -> float:
    lookup = s.vocab * s.hidden
    return 6 * (s.weights + lookup) + 6 * s.reach(n, per_window=_ignored) + 9 * s.heads * n


_ALL = (
    Convention(
        EXACT,
        "matmuls of the graph",
        "Every matrix product the step needs and none it does not: pairs the mask lets meet, and of"
        " the backward products those whose gradient somebody asks for (frozen weights, adapters,"
        " layers below the lowest trained one). Documents of a packed or padded batch one by one."
        " Convolutions and state-space scans included.",
        "derived part by part in docs/flops.md",
        None,
    ),
    Convention(
        "palm",
        "6 N + 12 L H Q T",
        "N is every parameter, a tied one once, of the experts those a token meets; attention not"
        " halved for its causal mask, a window counted as the keys it shows.",
        "PaLM, arXiv 2204.02311, appendix B",
        _palm,
    ),
    Convention(
        "megatron",
        "6 M + 6 L H Q T",
        "M is every weight that is multiplied, the head once, the input table and the router not;"
        " attention halved; windows not looked at. (Megatron pads the vocabulary; give it padded.)",
        "Megatron-LM training.py since March 2025",
        _megatron,
    ),
    Convention(
        "megatron-2024",
        "6 M + 12 L H Q T",
        "The same before the halving.",
        "Megatron-LM training.py, end of 2023 to March 2025",
        _megatron_2024,
    ),
    Convention(
        "megatron-2021",
        "72 L h^2 (1 + T/6h + V/12Lh)",
        "A GPT with a feed-forward of 4 h, attention not halved. The paper prints it with every"
        " layer recomputed, 96 L h^2 (1 + T/6h + V/16Lh): hardware FLOPs, and its 52 % an HFU.",
        "Narayanan et al. 2021, arXiv 2104.04473, equation 3",
        _megatron_2021,
        _megatron_2021_recomputed,
    ),
    Convention(
        "bridge",
        "6 M + 6 L H Q T",
        "As megatron, with a window's pairs counted exactly.",
        "Megatron-Bridge flop_utils.py since 2026; AutoModel for most families",
        _bridge,
    ),
    Convention(
        "torchtitan",
        "6 (N - E) + 12 L H Q T",
        "N without the input table, unless the head is tied to it; attention not halved, a window"
        " counted as the keys it shows. (Before 2026 a tied head was left out as well.)",
        "torchtitan models/utils.py, 2026",
        _torchtitan,
    ),
    Convention(
        "mosaicml",
        "6 N + 12 L h T",
        "N is every parameter, tied and learned positions included; h is the hidden size. Its HFU"
        " is 4/3 of it where activations are recomputed.",
        "LLM-Foundry scripts/train/benchmarking/collect_results.py; fms-fsdp uses the same",
        _mosaicml,
    ),
    Convention(
        "nanogpt",
        "6 (N - P) + 12 L H Q T",
        "N without the learned positions; attention not halved.",
        "nanoGPT model.py, estimate_mfu",
        _nanogpt,
    ),
    Convention(
        "maxtext",
        "6 M + 6 L H Q T",
        "M with the router; attention halved, a window as well.",
        "MaxText maxtext_utils.py since July 2025",
        _maxtext,
    ),
    Convention(
        "maxtext-2024",
        "6 M + 12 L H Q T",
        "M with the router; attention not halved.",
        "MaxText maxtext_utils.py, May 2024 to July 2025",
        _maxtext_2024,
    ),
    Convention(
        "verl",
        "6 (M + V h) + 6 L H Q T",
        "The input table counted as a product; attention halved.",
        "verl utils/flops_counter.py since January 2026",
        _verl,
    ),
    Convention(
        "hf-6nd",
        "6 N'",
        "N' is every parameter held but the input tables, and so without a tied head; all experts;"
        " no attention term.",
        "transformers floating_point_ops, which total_flos adds up",
        _hf_six_nd,
    ),
    Convention(
        "6nd",
        "6 N",
        "N is every parameter, of the experts those a token meets; no attention term.",
        "Kaplan et al. 2020, arXiv 2001.08361, with all parameters as N",
        _six_nd,
    ),
    Convention(
        "neuron",
        "6 (M + V h) + 12 L H Q T + 18 L H T",
        "The input table counted as a product and the softmax as 6 operations a pair; attention not"
        " halved.",
        "neuronx-distributed-training llama_perf_estimate.py",
        _neuron,
    ),
    Convention(
        "chinchilla",
        "6 (M + V h) + 12 L H Q T + 9 L H T",
        "The input table counted as a product and the softmax as 3 operations a pair; attention not"
        " halved.",
        "Hoffmann et al. 2022, arXiv 2203.15556, appendix F",
        _chinchilla,
    ),
    Convention(
        "bridge-lora",
        "4 M",
        "For LoRA: forward and the inputs' gradients of frozen weights; attention and adapters left"
        " out.",
        "Megatron-Bridge performance summary, LoRA rows of 2026",
        _bridge_lora,
        is_for_lora=True,
    ),
    Convention(
        "automodel-lora",
        "2/3 (6 M + 6 L H Q T)",
        "For LoRA: two thirds of everything, the attention core included.",
        "NeMo AutoModel recipes/llm/benchmark.py since November 2025",
        _automodel_lora,
        is_for_lora=True,
    ),
)

CONVENTIONS: dict[str, Convention] = {convention.name: convention for convention in _ALL}


def convention(name: str) -> Convention:
    """The convention of that name, or UsageError with those there are."""
    found = CONVENTIONS.get(name.lower())
    if found is None:
        raise UsageError(f"no convention {name!r}; there are {', '.join(CONVENTIONS)}")
    return found
