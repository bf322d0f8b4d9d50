"""Dense decoders that are Llama with a difference: one reader a family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.layers import Decoder, Layer, Mlp
from ergmeter.flops.pieces import (
    each_attention,
    each_mlp,
    every_nth_full,
    layer_kinds,
    like_llama,
    self_attention,
    windows_of,
    with_qk_norms,
)

if TYPE_CHECKING:
    from ergmeter.flops.config import Config


def llama(c: Config) -> Decoder:
    """Llama 1 to 3, and what copies it."""
    hidden = c.whole("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mlp = Mlp(c.whole("intermediate_size"), bias=c.flag("mlp_bias", default=False))
    layer = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    return like_llama(c, "llama", [layer] * c.whole("num_hidden_layers"), tied=False)


def mistral(c: Config) -> Decoder:
    """Mistral: Llama with a window, in its first versions."""
    window = c.maybe("sliding_window")
    return each_attention(llama(c), "mistral", lambda _i, a: replace(a, window=window))


def qwen2(c: Config) -> Decoder:
    """Qwen 2 and 2.5: biases on queries, keys and values; upper layers may have a window."""
    base = qwen2_full(c)
    windows = _upper_windows(c, len(base.layers))
    return each_attention(base, "qwen2", lambda number, a: replace(a, window=windows[number]))


def qwen2_full(c: Config) -> Decoder:
    """Qwen 2 whose layers see all that is before them."""
    return each_attention(llama(c), "qwen2", lambda _i, a: replace(a, q_bias=True, kv_bias=True))


def qwen3(c: Config) -> Decoder:
    """Qwen 3: a head size of its own, norms on queries and keys; windows as in Qwen 2."""
    base = qwen3_full(c)
    windows = _upper_windows(c, len(base.layers))
    return each_attention(base, "qwen3", lambda number, a: replace(a, window=windows[number]))


def qwen3_full(c: Config) -> Decoder:
    """Qwen 3 whose layers see all that is before them, as in what has been made from it since."""
    if "head_dim" not in c:
        raise FormatError(f"{c.where}: the field head_dim is missing; add it")
    return each_attention(llama(c), "qwen3", lambda _i, a: with_qk_norms(a))


def qwen_window(c: Config) -> int | None:
    """The window that a Qwen has where it is switched on; null is none, absent is 4096."""
    if not c.flag("use_sliding_window", default=False):
        return None
    return c.maybe("sliding_window") if "sliding_window" in c.fields else 4096


def _upper_windows(c: Config, layers: int) -> list[int | None]:
    window = qwen_window(c)
    if window is None:
        return [None] * layers
    first = c.whole("max_window_layers", default=28, at_least=0)
    kinds = layer_kinds(
        c, layers, lambda number: "sliding_attention" if number >= first else "full_attention"
    )
    return windows_of(kinds, window)


def gemma(c: Config) -> Decoder:
    """Gemma 1: tied, with a head size of its own."""
    c.whole("head_dim")
    return replace(llama(c), family="gemma", is_tied=c.flag("tie_word_embeddings", default=True))


def gemma2(c: Config) -> Decoder:
    """Gemma 2: every second layer has a window; norms after each part as well."""
    return _gemma_with_windows(c, "gemma2", every=2, has_qk_norm=False)


def gemma3(c: Config) -> Decoder:
    """Gemma 3: five windowed layers to one that is not; norms on queries and keys."""
    every = c.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _gemma_with_windows(c, "gemma3", every=every, has_qk_norm=True)


def _gemma_with_windows(c: Config, family: str, *, every: int, has_qk_norm: bool) -> Decoder:
    base = gemma(c)
    count = len(base.layers)
    windows = windows_of(layer_kinds(c, count, every_nth_full(every)), c.whole("sliding_window"))
    base = each_attention(
        base,
        family,
        lambda number, a: replace(with_qk_norms(a) if has_qk_norm else a, window=windows[number]),
    )
    layers = tuple(replace(layer, after_norms=(base.hidden, base.hidden)) for layer in base.layers)
    return replace(base, layers=layers)


def phi3(c: Config) -> Decoder:
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


def olmo(c: Config) -> Decoder:
    """OLMo 1: Llama whose norms have no parameters."""
    base = llama(c)
    layers = tuple(replace(layer, norm=0, feed_norm=0) for layer in base.layers)
    return replace(base, family="olmo", layers=layers, final_norm=0)


def olmo2(c: Config) -> Decoder:
    """OLMo 2 and 3: norms after each part instead of before, and over all of queries and keys."""
    base = llama(c)
    kinds = layer_kinds(c, len(base.layers))
    windows = windows_of(kinds, c.maybe("sliding_window"))
    base = each_attention(
        base,
        "olmo2",
        lambda number, a: replace(
            a,
            norm_params=(a.heads + a.kv_heads) * a.head_dim,
            window=windows[number],
        ),
    )
    norms = (base.hidden, base.hidden)
    layers = tuple(replace(layer, norm=0, feed_norm=0, after_norms=norms) for layer in base.layers)
    return replace(base, layers=layers)


def cohere(c: Config) -> Decoder:
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


def stablelm(c: Config) -> Decoder:
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


def glm(c: Config) -> Decoder:
    """GLM 4 of 9B and GLM-Edge: biases on queries, keys and values; gate and up fused."""
    base = each_attention(llama(c), "glm", lambda _i, a: replace(a, out_bias=False))
    return each_mlp(base, lambda mlp: replace(mlp, fused="gate_up_proj"))


def glm4(c: Config) -> Decoder:
    """GLM 4 of 2025: GLM with norms after each part as well."""
    base = glm(c)
    norms = (base.hidden, base.hidden)
    layers = tuple(replace(layer, after_norms=norms) for layer in base.layers)
    return replace(base, family="glm4", layers=layers)


def ernie(c: Config) -> Decoder:
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


def exaone4(c: Config) -> Decoder:
    """EXAONE 4: norms after each part only, and on queries and keys; some layers with a window."""
    base = llama(c)
    window = c.maybe("sliding_window")
    # A pattern of letters, as in the one of 32B, stands beside the list that it makes.
    is_ruled = window is not None and "layer_types" not in c
    every = c.maybe("sliding_window_pattern") if is_ruled else None
    kinds = layer_kinds(c, len(base.layers), every_nth_full(every or 1))
    windows = windows_of(kinds, window)
    base = each_attention(
        base, "exaone4", lambda number, a: replace(with_qk_norms(a), window=windows[number])
    )
    norms = (base.hidden, base.hidden)
    layers = tuple(replace(layer, norm=0, feed_norm=0, after_norms=norms) for layer in base.layers)
    return replace(base, layers=layers)


def arcee(c: Config) -> Decoder:
    """Arcee: Llama with a plain feed-forward."""
    base = replace(llama(c), family="arcee")
    return each_mlp(base, lambda mlp: replace(mlp, is_gated=False, names=("up_proj", "down_proj")))


def seed_oss(c: Config) -> Decoder:
    """Seed-OSS: a head size of its own, biases on queries, keys and values."""
    has_bias = c.flag("attention_out_bias", default=False)
    return each_attention(llama(c), "seed_oss", lambda _i, a: replace(a, out_bias=has_bias))


def hunyuan(c: Config) -> Decoder:
    """Hunyuan dense: Llama with norms on queries and keys."""
    return each_attention(llama(c), "hunyuan_v1_dense", lambda _i, a: with_qk_norms(a))


def cohere2(c: Config) -> Decoder:
    """Command R7B and A: three layers with a window to one without."""
    base = cohere(c)
    every = c.whole("sliding_window_pattern", "_sliding_window_pattern", default=4)
    kinds = layer_kinds(c, len(base.layers), every_nth_full(every))
    windows = windows_of(kinds, c.whole("sliding_window"))
    return each_attention(base, "cohere2", lambda number, a: replace(a, window=windows[number]))
