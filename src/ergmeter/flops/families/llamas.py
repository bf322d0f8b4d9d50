"""Dense decoders that are Llama with a difference: one reader a family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.families.fields import (
    each_attention,
    each_mlp,
    every_nth_full,
    like_llama,
    self_attention,
    with_qk_norms,
    with_windows,
)
from ergmeter.flops.graph.layers import Decoder, Layer, Mlp

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig


def llama(c: ModelConfig) -> Decoder:
    """Llama 1 to 3, and what copies it."""
    hidden = c.whole("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mlp = Mlp(c.whole("intermediate_size"), bias=c.flag("mlp_bias", default=False))
    layer = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    return like_llama(c, "llama", [layer] * c.whole("num_hidden_layers"), tied=False)


def mistral(c: ModelConfig) -> Decoder:
    """Mistral: Llama with a window, in its first versions."""
    window = c.maybe("sliding_window")
    return each_attention(llama(c), "mistral", lambda _i, a: replace(a, window=window))


def qwen2(c: ModelConfig) -> Decoder:
    """Qwen 2 and 2.5: biases on queries, keys and values; upper layers may have a window."""
    return _upper_windows(c, qwen2_full(c))


def qwen2_full(c: ModelConfig) -> Decoder:
    """Qwen 2 whose layers see all that is before them."""
    return each_attention(llama(c), "qwen2", lambda _i, a: replace(a, q_bias=True, kv_bias=True))


def qwen3(c: ModelConfig) -> Decoder:
    """Qwen 3: a head size of its own, norms on queries and keys; windows as in Qwen 2."""
    return _upper_windows(c, qwen3_full(c))


def qwen3_full(c: ModelConfig) -> Decoder:
    """Qwen 3 whose layers see all that is before them, as in what has been made from it since."""
    return each_attention(llama(c), "qwen3", lambda _i, a: with_qk_norms(a))


def qwen_window(c: ModelConfig) -> int | None:
    """The window that a Qwen has where it is switched on."""
    return c.maybe("sliding_window") if c.flag("use_sliding_window", default=False) else None


def _upper_windows(c: ModelConfig, base: Decoder) -> Decoder:
    window = qwen_window(c)
    if window is None:
        return base
    first = c.whole("max_window_layers", default=28, at_least=0)
    return with_windows(
        c, base, window, lambda number: "sliding_attention" if number >= first else "full_attention"
    )


def gemma(c: ModelConfig) -> Decoder:
    """Gemma 1: tied, with a head size of its own."""
    c.whole("head_dim")
    return replace(llama(c), family="gemma", is_tied=c.flag("tie_word_embeddings", default=True))


def gemma2(c: ModelConfig) -> Decoder:
    """Gemma 2: every second layer has a window; norms after each part as well."""
    return _gemma_with_windows(c, "gemma2", every=2, has_qk_norm=False)


def gemma3(c: ModelConfig) -> Decoder:
    """Gemma 3: five windowed layers to one that is not; norms on queries and keys."""
    every = c.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _gemma_with_windows(c, "gemma3", every=every, has_qk_norm=True)


def _gemma_with_windows(c: ModelConfig, family: str, *, every: int, has_qk_norm: bool) -> Decoder:
    base = each_attention(gemma(c), family, lambda _i, a: with_qk_norms(a) if has_qk_norm else a)
    base = with_windows(c, base, c.whole("sliding_window"), every_nth_full(every))
    layers = tuple(replace(layer, after_norms=(base.hidden, base.hidden)) for layer in base.layers)
    return replace(base, layers=layers)


def phi3(c: ModelConfig) -> Decoder:
    """Phi 3 and 4: Llama with its projections fused."""
    window = c.maybe("sliding_window")
    base = each_attention(
        llama(c),
        "phi3",
        lambda _i, a: replace(a, fused="qkv_proj", window=window),
    )
    layers = tuple(
        replace(layer, feed=replace(layer.feed, fused="gate_up_proj"))
        if isinstance(layer.feed, Mlp)
        else layer
        for layer in base.layers
    )
    return replace(base, layers=layers)


def olmo(c: ModelConfig) -> Decoder:
    """OLMo 1: Llama whose norms have no parameters."""
    base = llama(c)
    layers = tuple(replace(layer, norm=0, feed_norm=0) for layer in base.layers)
    return replace(base, family="olmo", layers=layers, final_norm=0)


def olmo2(c: ModelConfig) -> Decoder:
    """OLMo 2: norms after each part instead of before, and over all of queries and keys."""
    base = each_attention(
        llama(c), "olmo2", lambda _i, a: replace(a, norm_params=(a.heads + a.kv_heads) * a.head_dim)
    )
    return _normed_after(base)


def olmo3(c: ModelConfig) -> Decoder:
    """OLMo 3: OLMo 2 with three layers with a window to one without."""
    return with_windows(c, olmo2(c), c.maybe("sliding_window"), every_nth_full(4))


def _normed_after(base: Decoder) -> Decoder:
    """The same decoder with norms after each part, and none before."""
    norms = (base.hidden, base.hidden)
    layers = tuple(replace(layer, norm=0, feed_norm=0, after_norms=norms) for layer in base.layers)
    return replace(base, layers=layers)


def smollm3(c: ModelConfig) -> Decoder:
    """SmolLM3: Llama; layers without rotary positions may have a window."""
    base = llama(c)
    if not c.flag("use_sliding_window", default=False):
        return base
    every = c.whole("no_rope_layer_interval", default=4)
    rotates = c.wholes("no_rope_layers") or [
        int((i + 1) % every != 0) for i in range(len(base.layers))
    ]
    if len(rotates) != len(base.layers):
        raise FormatError(
            f"{c.where}: no_rope_layers lists {len(rotates)} layers, and the model has"
            f" {len(base.layers)}"
        )
    return with_windows(
        c,
        base,
        c.maybe("sliding_window"),
        lambda number: "full_attention" if rotates[number] else "sliding_attention",
    )


def cohere(c: ModelConfig) -> Decoder:
    """Command R: a parallel block with one norm; tied."""
    base = llama(c)
    has_norms = c.flag("use_qk_norm", default=False)
    base = each_attention(
        base,
        "cohere",
        lambda _i, a: replace(
            a, norm_params=(a.heads + a.kv_heads) * a.head_dim if has_norms else 0
        ),
    )
    layers = tuple(replace(layer, feed_norm=0, is_parallel=True) for layer in base.layers)
    is_tied = c.flag("tie_word_embeddings", default=True)
    return replace(base, layers=layers, is_tied=is_tied)


def stablelm(c: ModelConfig) -> Decoder:
    """StableLM: Llama with biased norms and, in some sizes, biases on queries, keys and values."""
    base = llama(c)
    hidden = base.hidden
    has_bias = c.flag("use_qkv_bias", default=False)
    is_parallel = c.flag("use_parallel_residual", default=False)
    base = each_attention(
        base, "stablelm", lambda _i, a: replace(a, q_bias=has_bias, kv_bias=has_bias)
    )
    second = 0 if is_parallel else 2 * hidden
    layers = tuple(
        replace(layer, norm=2 * hidden, feed_norm=second, is_parallel=is_parallel)
        for layer in base.layers
    )
    return replace(base, layers=layers, final_norm=2 * hidden)


def glm(c: ModelConfig) -> Decoder:
    """GLM 4 of 9B and GLM-Edge: biases on queries, keys and values; gate and up fused."""
    base = each_attention(llama(c), "glm", lambda _i, a: replace(a, out_bias=False))
    return each_mlp(base, lambda mlp: replace(mlp, fused="gate_up_proj"))


def glm4(c: ModelConfig) -> Decoder:
    """GLM 4 of 2025: GLM with norms after each part as well."""
    base = glm(c)
    norms = (base.hidden, base.hidden)
    layers = tuple(replace(layer, after_norms=norms) for layer in base.layers)
    return replace(base, family="glm4", layers=layers)


def ernie(c: ModelConfig) -> Decoder:
    """ERNIE 4.5: Llama, tied; one flag for all biases."""
    has_bias = c.flag("use_bias", default=False)
    base = each_attention(
        llama(c),
        c.model_type,
        lambda _i, a: replace(a, q_bias=has_bias, kv_bias=has_bias, out_bias=has_bias),
    )
    base = each_mlp(base, lambda mlp: replace(mlp, bias=has_bias))
    is_tied = c.flag("tie_word_embeddings", default=True)
    return replace(base, is_tied=is_tied)


def exaone4(c: ModelConfig) -> Decoder:
    """EXAONE 4: norms after each part only, and on queries and keys; some layers with a window."""
    base = _normed_after(each_attention(llama(c), "exaone4", lambda _i, a: with_qk_norms(a)))
    window = c.maybe("sliding_window")
    # A pattern of letters, as in the one of 32B, stands beside the list that it makes.
    is_ruled = window is not None and "layer_types" not in c
    every = c.maybe("sliding_window_pattern") if is_ruled else None
    return with_windows(c, base, window, every_nth_full(every or 1))


def arcee(c: ModelConfig) -> Decoder:
    """Arcee: Llama with a plain feed-forward."""
    base = replace(llama(c), family="arcee")
    return each_mlp(base, lambda mlp: replace(mlp, is_gated=False, names=("up_proj", "down_proj")))


def seed_oss(c: ModelConfig) -> Decoder:
    """Seed-OSS: a head size of its own, biases on queries, keys and values."""
    has_bias = c.flag("attention_out_bias", default=False)
    return each_attention(llama(c), "seed_oss", lambda _i, a: replace(a, out_bias=has_bias))


def hunyuan(c: ModelConfig) -> Decoder:
    """Hunyuan dense: Llama with norms on queries and keys."""
    return each_attention(llama(c), "hunyuan_v1_dense", lambda _i, a: with_qk_norms(a))


def cohere2(c: ModelConfig) -> Decoder:
    """Command R7B and A: three layers with a window to one without."""
    base = cohere(c)
    every = c.whole("sliding_window_pattern", "_sliding_window_pattern", default=4)
    base = with_windows(c, base, c.whole("sliding_window"), every_nth_full(every))
    return replace(base, family="cohere2")


def bitnet(c: ModelConfig) -> Decoder:
    """BitNet b1.58: Llama with a norm before the output of attention and of the feed-forward."""
    base = replace(llama(c), family="bitnet")
    extra = base.hidden + c.whole("intermediate_size")
    return replace(base, layers=tuple(replace(each, extra_params=extra) for each in base.layers))


def nanochat(c: ModelConfig) -> Decoder:
    """nanochat: a plain feed-forward, and norms without parameters."""
    base = each_mlp(
        olmo(c), lambda mlp: replace(mlp, is_gated=False, bias=False, names=("fc1", "fc2"))
    )
    return replace(base, family="nanochat")


def apertus(c: ModelConfig) -> Decoder:
    """Apertus: a plain feed-forward with a learned activation, norms on queries and keys."""
    base = each_attention(arcee(c), "apertus", lambda _i, a: with_qk_norms(a))
    base = each_mlp(base, lambda mlp: replace(mlp, bias=False))
    layers = tuple(replace(layer, extra_params=_XIELU) for layer in base.layers)
    return replace(base, layers=layers)


_XIELU = 2  # numbers that the activation learns in each layer (arXiv 2411.13010)


def cwm(c: ModelConfig) -> Decoder:
    """Code World Model: Llama with three layers with a window to one without."""
    base = replace(llama(c), family="cwm")
    return with_windows(
        c,
        base,
        c.whole("sliding_window"),
        lambda number: "sliding_attention" if number % 4 else "full_attention",
    )
