"""Readers of the parts that families share: attention, windows, experts.

Families have different names and defaults for the same field. An error names the wrong field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ergmeter.errors import FormatError
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.graph.layers import AttentionLayer, Decoder, Experts, Latent, Layer

Names = tuple[str, ...]
"""The names that a config field may have in different families."""


def self_attention(
    c: ModelConfig,
    *,
    bias: bool = False,
    hidden: Names = ("hidden_size",),
    heads: Names = ("num_attention_heads",),
    kv_heads: Names = ("num_key_value_heads",),  # none: as many as heads
    head_dim: Names = ("head_dim",),  # none: an even share of the hidden size
) -> AttentionLayer:
    """Return attention like Llama's: separate projections, grouped queries."""
    wide, count = c.integer(*hidden), c.integer(*heads)
    kv_count = c.integer(*kv_heads, default=count) if kv_heads else count
    if count % kv_count:
        raise FormatError(
            f"{c.where}: num_attention_heads {count} is no multiple of"
            f" num_key_value_heads {kv_count}"
        )
    dim = (c.maybe(*head_dim) if head_dim else None) or head_dim_of(c, wide, count)
    return AttentionLayer(count, kv_count, dim, q_bias=bias, kv_bias=bias, out_bias=bias)


def head_dim_of(c: ModelConfig, hidden: int, heads: int) -> int:
    """Return hidden / heads, the head size of a model without a field for it."""
    if hidden % heads:
        names = f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        raise FormatError(f"{c.where}: {names}")
    return hidden // heads


def biased_attention(c: ModelConfig, hidden: int, heads: int, **more: object) -> AttentionLayer:
    """Return bidirectional attention with biases on all projections; `more` sets other fields."""
    biases = {"q_bias": True, "kv_bias": True, "out_bias": True}
    fields: dict[str, Any] = {**biases, "mask": "full", **more}
    return AttentionLayer(heads, heads, head_dim_of(c, hidden, heads), **fields)


def latent_attention(c: ModelConfig) -> AttentionLayer:
    """Return DeepSeek's multi-head latent attention."""
    heads = c.integer("num_attention_heads")
    latent = Latent(
        c.maybe("q_lora_rank"),
        c.integer("kv_lora_rank"),
        c.integer("qk_nope_head_dim"),
        c.integer("qk_rope_head_dim"),
        c.integer("v_head_dim"),
    )
    has_bias = c.flag("attention_bias", default=False)
    return AttentionLayer(
        heads, heads, latent.nope_dim, q_bias=has_bias, out_bias=has_bias, latent=latent
    )


def with_qk_norms(a: AttentionLayer) -> AttentionLayer:
    """Return the attention with norms on the queries and keys of each head."""
    return replace(a, norm_params=2 * a.head_dim)


def layer_kinds(
    c: ModelConfig,
    layers: int,
    rule: Callable[[int], str] = lambda _number: "full_attention",
    *,
    names: Names = ("layer_types",),
) -> list[str]:
    """Return the kind of each layer: as the configuration lists it, else by the family's rule."""
    kinds = c.names(*names)
    if kinds is None:
        return [rule(number) for number in range(layers)]
    check_listed(c, next(name for name in names if name in c), kinds, layers)
    return kinds


def each_layer(c: ModelConfig, name: str, layers: int) -> list[int]:
    """Return a number per layer from a field that is a list, or one number for all layers."""
    if not isinstance(c.raw(name), list):
        return [c.integer(name)] * layers
    listed = c.integers(name) or []
    check_listed(c, name, listed, layers)
    return [c.having(name, number).integer(name) for number in listed]


def check_listed(c: ModelConfig, name: str, listed: Sequence[object], layers: int) -> None:
    """Raise FormatError if a list does not have one entry per layer."""
    if len(listed) != layers:
        raise FormatError(
            f"{c.where}: {name} lists {len(listed)} layers, and the model has {layers}"
        )


def every_nth_full(every: int, other: str = "sliding_attention") -> Callable[[int], str]:
    """Return the most common rule for layer kinds: full attention in every `every`-th layer."""
    return lambda number: other if (number + 1) % every else "full_attention"


# The window of each layer; None for full attention.

Windows = list[int | None]


def windows_of(kinds: Sequence[str], window: int | None) -> Windows:
    """Return `window` for each sliding or local layer, None for the others."""
    return [window if kind in ("sliding_attention", "local_attention") else None for kind in kinds]


def sliding_window(c: ModelConfig) -> int | None:
    """Return the configuration's sliding window, or None."""
    return c.maybe("sliding_window")


def but_every(
    n: int, pattern: Names = (), *, is_optional: bool = False
) -> Callable[[ModelConfig, int], Windows]:
    """Return a rule: a window in all layers but every `n`-th. Fields `pattern` override `n`."""

    def windows(c: ModelConfig, layers: int) -> Windows:
        every = c.integer(*pattern, default=n) if pattern else n
        window = c.maybe("sliding_window") if is_optional else c.integer("sliding_window")
        return windows_of(layer_kinds(c, layers, every_nth_full(every)), window)

    return windows


def qwen_window(c: ModelConfig) -> int | None:
    """Return a Qwen model's sliding window, or None if it is switched off."""
    return c.maybe("sliding_window") if c.flag("use_sliding_window", default=False) else None


def windows_where(
    c: ModelConfig, layers: int, window: int | None, is_windowed: Callable[[int], bool]
) -> Windows:
    """Return the window of each layer: as `layer_types` lists them, else by `is_windowed`."""

    def kind(number: int) -> str:
        return "sliding_attention" if is_windowed(number) else "full_attention"

    return windows_of(layer_kinds(c, layers, kind), window)


# Experts.


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """A family's experts: the config fields with their sizes, and which layers have experts."""

    count: Names = ("num_local_experts",)
    size: Names = ("intermediate_size",)
    used: Names = ("num_experts_per_tok", "top_k", "moe_topk", "num_experts_per_token")
    shared_size: Names = ()
    shared_default: int | None = None
    shared_count: Names = ()  # shared experts, each as large as a routed one
    has_shared_gate: bool = False
    has_correction: bool = False  # a correction bias per expert beside the router
    bias: bool = False  # of experts and router
    is_gated: bool = True
    is_optional: bool = False  # without the field `count` the model is dense
    module: str = "mlp"
    in_layers: Callable[[ModelConfig, int], Collection[int]] | None = None  # None: in all

    def read(self, c: ModelConfig) -> Experts:
        """Return the experts of one layer."""
        count, size, shared = c.integer(*self.count), c.integer(*self.size), 0
        if self.shared_size:
            least = 1 if self.shared_default is None else 0
            shared = c.integer(*self.shared_size, default=self.shared_default, at_least=least)
        elif self.shared_count:
            shared = c.integer(*self.shared_count, default=0, at_least=0) * size
        used = c.integer(*self.used)
        if used > count:
            raise FormatError(f"{c.where}: {self.used[0]} {used} is more than the {count} experts")
        return Experts(
            count,
            used,
            size,
            self.is_gated,
            self.bias,
            router_bias=self.bias,
            router_params=count if self.has_correction else 0,
            shared_size=shared,
            has_shared_gate=self.has_shared_gate,
            module=self.module,
        )

    def put_in(self, c: ModelConfig, layers: Sequence[Layer], experts: Experts) -> list[Layer]:
        """Return the layers, with the feed-forward replaced by experts in mixture layers."""
        chosen = self.in_layers(c, len(layers)) if self.in_layers else range(len(layers))
        return [
            replace(layer, feed=experts) if number in chosen else layer
            for number, layer in enumerate(layers)
        ]


def sparse_steps(c: ModelConfig, layers: int) -> Collection[int]:
    """Qwen's rule: every `decoder_sparse_step`-th layer is a mixture, except `mlp_only_layers`."""
    every = c.integer("decoder_sparse_step", default=1)
    dense = c.integers("mlp_only_layers") or []
    return {n for n in range(layers) if n not in dense and (n + 1) % every == 0}


def after_the_dense(c: ModelConfig, layers: int) -> Collection[int]:
    """DeepSeek's rule: `first_k_dense_replace` dense layers, then mixtures."""
    first = c.integer("first_k_dense_replace", default=0, at_least=0)
    every = c.integer("moe_layer_freq", default=1)
    return {number for number in range(first, layers) if number % every == 0}


QWEN_EXPERTS = RoutedExperts(
    ("num_experts", "num_local_experts"), ("moe_intermediate_size",), in_layers=sparse_steps
)
QWEN_SHARED_EXPERTS = replace(
    QWEN_EXPERTS, shared_size=("shared_expert_intermediate_size",), has_shared_gate=True
)


def like_llama(
    c: ModelConfig, family: str, layers: Sequence[Layer], *, tied: bool = False
) -> Decoder:
    """Return a decoder of these layers with Llama's embedding, final norm and head."""
    hidden, vocab = c.integer("hidden_size"), c.integer("vocab_size")
    is_tied = c.flag("tie_word_embeddings", default=tied)
    return Decoder(family, hidden, vocab, tuple(layers), is_tied, final_norm=hidden)
