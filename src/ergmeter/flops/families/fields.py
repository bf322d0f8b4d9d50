"""What the readers of model families share: attention by its fields, layers by their kinds.

A published configuration names the same thing in several ways and leaves out what its family takes
for granted; each of these reads one thing, and says which field is wrong where one is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.graph.layers import Decoder, Experts, Layer, Mlp, SelfAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.flops.config import ModelConfig


def self_attention(
    c: ModelConfig, *, bias: bool = False, head_dim: int | None = None
) -> SelfAttention:
    """Attention as Llama has it: separate projections, grouped keys and values."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    kv_heads = c.whole("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise FormatError(
            f"{c.where}: num_attention_heads {heads} is no multiple of"
            f" num_key_value_heads {kv_heads}"
        )
    if head_dim is None:
        head_dim = c.maybe("head_dim")
    if head_dim is None:
        head_dim = head_dim_of(c, hidden, heads)
    return SelfAttention(heads, kv_heads, head_dim, q_bias=bias, kv_bias=bias, out_bias=bias)


def head_dim_of(c: ModelConfig, hidden: int, heads: int) -> int:
    """The size of a head where no field has it: an even share of the hidden size."""
    if hidden % heads:
        raise FormatError(
            f"{c.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads},"
            " and there is no head_dim"
        )
    return hidden // heads


def layer_kinds(
    c: ModelConfig,
    layers: int,
    rule: Callable[[int], str] = lambda _number: "full_attention",
    *,
    names: tuple[str, ...] = ("layer_types",),
) -> list[str]:
    """What each layer is: as the configuration lists it, or else by the family's rule."""
    kinds = c.names(*names)
    if kinds is None:
        return [rule(number) for number in range(layers)]
    if len(kinds) != layers:
        listed = next(name for name in names if name in c)
        raise FormatError(
            f"{c.where}: {listed} lists {len(kinds)} layers, and the model has {layers}"
        )
    return kinds


def each_layer(c: ModelConfig, name: str, layers: int) -> list[int]:
    """A number of each layer, written as one for all or as a list."""
    if not isinstance(c.raw(name), list):
        return [c.whole(name)] * layers
    listed = c.wholes(name) or []
    if len(listed) != layers:
        raise FormatError(
            f"{c.where}: {name} lists {len(listed)} layers, and the model has {layers}"
        )
    return [c.having(name, number).whole(name) for number in listed]


def every_nth_full(every: int, other: str = "sliding_attention") -> Callable[[int], str]:
    """The rule that most families have: full attention in each n-th layer."""
    return lambda number: other if (number + 1) % every else "full_attention"


def like_llama(
    c: ModelConfig,
    family: str,
    layers: Sequence[Layer],
    *,
    tied: bool,
    final_norm: int | None = None,
    head_bias: bool = False,
) -> Decoder:
    """A decoder of these layers, with the table, norm and head that Llama has."""
    hidden = c.whole("hidden_size")
    return Decoder(
        family,
        hidden,
        c.whole("vocab_size"),
        tuple(layers),
        is_tied=c.flag("tie_word_embeddings", default=tied),
        final_norm=hidden if final_norm is None else final_norm,
        head_bias=head_bias,
    )


def each_attention(
    decoder: Decoder, family: str, change: Callable[[int, SelfAttention], SelfAttention]
) -> Decoder:
    """The same decoder with every attention layer changed, by its number."""
    layers = tuple(
        replace(
            layer,
            mixers=tuple(
                change(number, mixer) if isinstance(mixer, SelfAttention) else mixer
                for mixer in layer.mixers
            ),
        )
        for number, layer in enumerate(decoder.layers)
    )
    return replace(decoder, family=family, layers=layers)


def each_mlp(decoder: Decoder, change: Callable[[Mlp], Mlp]) -> Decoder:
    """The same decoder with every feed-forward changed."""
    layers = tuple(
        replace(layer, feed=change(layer.feed)) if isinstance(layer.feed, Mlp) else layer
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers)


def with_qk_norms(a: SelfAttention) -> SelfAttention:
    """The same attention with norms on the queries and keys of each head."""
    return replace(a, norm_params=2 * a.head_dim)


def windows_of(kinds: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer, by its kind."""
    return [window if kind in ("sliding_attention", "local_attention") else None for kind in kinds]


def with_windows(
    c: ModelConfig,
    decoder: Decoder,
    window: int | None,
    rule: Callable[[int], str] = lambda _number: "full_attention",
) -> Decoder:
    """The same decoder with a window in the layers that are listed, or ruled, to have one."""
    windows = windows_of(layer_kinds(c, len(decoder.layers), rule), window)
    return each_attention(
        decoder, decoder.family, lambda number, a: replace(a, window=windows[number])
    )


def experts_of(c: ModelConfig, held: int, size: int, **more: object) -> Experts:
    """Routed experts; how many of them a token meets has several names."""
    used = c.whole("num_experts_per_tok", "top_k", "moe_topk", "num_experts_per_token")
    if used > held:
        raise FormatError(f"{c.where}: num_experts_per_tok {used} is more than the {held} experts")
    return replace(Experts(held, used, size), **more)  # type: ignore[arg-type]


def dense_or_experts(c: ModelConfig, base: Decoder, experts: Experts) -> tuple[Layer, ...]:
    """Qwen's rule: every `decoder_sparse_step`-th layer is a mixture, but for those listed."""
    every = c.whole("decoder_sparse_step", default=1)
    dense = c.wholes("mlp_only_layers") or []
    return tuple(
        replace(layer, feed=experts) if number not in dense and (number + 1) % every == 0 else layer
        for number, layer in enumerate(base.layers)
    )
