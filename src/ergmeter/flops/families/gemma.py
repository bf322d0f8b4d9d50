"""Gemma 3n and 4, whose layers have several widths.

A table beside the embedding feeds every layer a few numbers a token. Upper layers share the keys
and values of lower ones. Layers without a window have other heads than those with one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.flops.families.pieces import (
    RoutedExperts,
    each_layer,
    every_nth_full,
    layer_kinds,
    like_llama,
    self_attention,
    windows_of,
)
from ergmeter.flops.graph.layers import AttentionLayer, Decoder, Experts, Layer, Mlp, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.flops.config import ModelConfig

_SHARED = (
    "layers that use the keys and values of another are counted in the cache as if each had its own"
)


def gemma3n(c: ModelConfig) -> Decoder:
    """Gemma 3n: four streams, of which each layer computes one and predicts the others (AltUp)."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    kinds = layer_kinds(c, count, every_nth_full(5))
    first = count - c.integer("num_kv_shared_layers", at_least=0)
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    attentions = _sharing([attention] * count, kinds, first, c)
    sizes = each_layer(c, "intermediate_size", count)
    rank, streams = c.integer("laurel_rank"), c.integer("altup_num_inputs")
    beside = (Piece("laurel.linear_left", hidden, rank), Piece("laurel.linear_right", rank, hidden))
    like = _layer(c, hidden, beside=beside, beside_norm=hidden, streams=streams)
    layers = [
        replace(like, mixers=(each,), feed=Mlp(size))
        for each, size in zip(attentions, sizes, strict=True)
    ]
    return _with_inputs(c, like_llama(c, "gemma3n", layers, tied=True), streams=streams)


def gemma4(c: ModelConfig) -> Decoder:
    """Gemma 4: layers that see everything have wider heads; dense, or with experts beside."""
    if c.word("use_bidirectional_attention") == "all":
        raise FormatError(
            f"{c.where}: use_bidirectional_attention is 'all'; a Gemma that looks both ways can't"
            " be read"
        )
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    kinds = layer_kinds(c, count, every_nth_full(6))
    kinds[-1] = "full_attention"  # as transformers forces it to be
    shared = c.integer("num_kv_shared_layers", at_least=0)
    first = count - shared
    attentions = _sharing(_heads_of_gemma4(c, kinds), kinds, first, c)
    size = c.integer("intermediate_size")
    widens = c.flag("use_double_wide_mlp", default=False) and shared and first > 0
    extra = 3 * hidden if c.flag("enable_moe_block", default=False) else 0
    like = _layer(c, hidden, extra_params=extra)
    sizes = [size * (2 if widens and number >= first else 1) for number in range(count)]
    layers = [
        replace(like, mixers=(each,), feed=_feed_of_gemma4(c, wide))
        for each, wide in zip(attentions, sizes, strict=True)
    ]
    return _with_inputs(c, like_llama(c, "gemma4", layers, tied=True))


def _layer(c: ModelConfig, hidden: int, **more: Any) -> Layer:  # noqa: ANN401  fields of a Layer
    """What all layers have in common: norms around each part, and what reads the own input."""
    width = c.maybe("hidden_size_per_layer_input", at_least=0)
    if width:
        gate = Piece("per_layer_input_gate", hidden, width)
        more["after"] = (gate, Piece("per_layer_projection", width, hidden))
        more["after_norm"] = hidden
    return Layer(norm=hidden, feed_norm=hidden, after_norms=(hidden, hidden), **more)


def _heads_of_gemma4(c: ModelConfig, kinds: Sequence[str]) -> list[AttentionLayer]:
    base = self_attention(c, bias=c.flag("attention_bias", default=False))
    has_one = c.flag("attention_k_eq_v", default=False)  # keys are the values too
    wide = replace(
        base,
        head_dim=c.integer("global_head_dim", default=_GLOBAL_HEAD),
        kv_heads=(c.maybe("num_global_key_value_heads") if has_one else None) or base.kv_heads,
    )
    own = _layer_configs(c)
    attentions = []
    for number, kind in enumerate(kinds):
        each = wide if kind == "full_attention" and own is None else base
        if own is not None and number in own:
            each = self_attention(own[number], bias=base.q_bias)
        attentions.append(replace(each, has_values=not (has_one and kind == "full_attention")))
    return attentions


def _layer_configs(c: ModelConfig) -> dict[int, ModelConfig] | None:
    """The configuration of layers that have one of their own, by number: "05" is 5."""
    listed = c.raw("per_layer_config")
    if listed is None:
        return None
    configs = {}
    for key, fields in listed.items() if isinstance(listed, dict) else ():
        if not str(key).isdigit() or not isinstance(fields, dict):
            break
        config = c
        for name, value in fields.items():
            config = config.having(name, value)
        configs[int(key)] = config
    if not isinstance(listed, dict) or len(configs) != len(listed):
        raise FormatError(f"{c.where}: per_layer_config must be an object of layers by number")
    return configs


_GLOBAL_HEAD = 512  # what transformers takes where neither field is there


def _feed_of_gemma4(c: ModelConfig, size: int) -> Mlp | Experts:
    """A feed-forward, or experts with it beside them."""
    if not c.flag("enable_moe_block", default=False):
        return Mlp(size)
    experts = RoutedExperts(("num_experts",), ("moe_intermediate_size",), ("top_k_experts",))
    own = experts.read(c)
    scales = c.integer("hidden_size") + own.count  # of what the router reads, and of each expert
    return replace(own, shared_size=size, router_params=scales)


def _sharing(
    attentions: Sequence[AttentionLayer], kinds: Sequence[str], first: int, c: ModelConfig
) -> list[AttentionLayer]:
    """Norms and windows; from `first` on layers use the keys of the last of their kind before."""
    windows = windows_of(kinds, c.integer("sliding_window"))
    result = []
    for number, each in enumerate(attentions):
        source = None
        if number >= first:
            alike = [earlier for earlier in range(first) if kinds[earlier] == kinds[number]]
            if not alike:
                raise FormatError(
                    f"{c.where}: layer {number} shares the keys of a {kinds[number]} layer below"
                    f" layer {first}, and there is none; lower num_kv_shared_layers"
                )
            source = alike[-1]
        norms = each.head_dim * (2 if source is None else 1)
        result.append(replace(each, window=windows[number], norm_params=norms, keys_of=source))
    return result


def _with_inputs(c: ModelConfig, base: Decoder, *, streams: int = 1) -> Decoder:
    width = c.maybe("hidden_size_per_layer_input", at_least=0) or 0
    rows = c.integer("vocab_size_per_layer_input") if width else 0
    is_sharing = any(
        isinstance(mixer, AttentionLayer) and mixer.keys_of is not None
        for layer in base.layers
        for mixer in layer.mixers
    )
    lines = (_SHARED,) if is_sharing else ()
    return replace(base, input_width=width, input_rows=rows, streams=streams, assumptions=lines)
