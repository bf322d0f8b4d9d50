"""Mixtures of experts: which layers are mixtures, which experts a token meets, what is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.families.fields import (
    dense_or_experts,
    each_attention,
    each_layer,
    every_nth_full,
    experts_of,
    head_dim_of,
    layer_kinds,
    like_llama,
    self_attention,
    windows_of,
    with_windows,
)
from ergmeter.flops.families.llamas import (
    ernie,
    hunyuan,
    llama,
    mistral,
    olmo2,
    qwen2_full,
    qwen3_full,
    qwen_window,
)
from ergmeter.flops.graph.layers import Decoder, Experts, Latent, Layer, Mlp, SelfAttention

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig


def mixtral(c: ModelConfig) -> Decoder:
    """Mixtral: every layer a mixture, no shared expert."""
    experts = experts_of(c, c.whole("num_local_experts"), c.whole("intermediate_size"))
    return _all_mixtures(replace(mistral(c), family="mixtral"), experts)


def qwen2_moe(c: ModelConfig) -> Decoder:
    """Qwen 1.5 and 2 MoE: a gated shared expert beside the routed ones."""
    experts = experts_of(
        c,
        c.whole("num_experts", "num_local_experts"),
        c.whole("moe_intermediate_size"),
        shared_size=c.whole("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    base = qwen2_full(c)
    base = replace(base, family="qwen2_moe", layers=dense_or_experts(c, base, experts))
    window = qwen_window(c)
    if window is None:
        return base
    # Not the dense Qwen 2's rule: every second of the lower layers, not all of the upper ones.
    last = c.whole("max_window_layers", default=28, at_least=0)
    kinds = layer_kinds(
        c,
        len(base.layers),
        lambda number: "full_attention" if number % 2 or number >= last else "sliding_attention",
    )
    windows = windows_of(kinds, window)
    return each_attention(base, "qwen2_moe", lambda number, a: replace(a, window=windows[number]))


def qwen3_moe(c: ModelConfig) -> Decoder:
    """Qwen 3 MoE: no shared expert; a window, where there is one, in every layer."""
    window = qwen_window(c)
    return each_attention(qwen3_moe_full(c), "qwen3_moe", lambda _i, a: replace(a, window=window))


def qwen3_moe_full(c: ModelConfig) -> Decoder:
    """Qwen 3 MoE whose layers see all that is before them, as in Qwen3-VL."""
    experts = experts_of(
        c, c.whole("num_experts", "num_local_experts"), c.whole("moe_intermediate_size")
    )
    base = qwen3_full(c)
    return replace(base, family="qwen3_moe", layers=dense_or_experts(c, base, experts))


def latent_attention(c: ModelConfig) -> SelfAttention:
    """Multi-head latent attention, as DeepSeek has it."""
    heads = c.whole("num_attention_heads")
    latent = Latent(
        c.maybe("q_lora_rank"),
        c.whole("kv_lora_rank"),
        c.whole("qk_nope_head_dim"),
        c.whole("qk_rope_head_dim"),
        c.whole("v_head_dim"),
    )
    has_bias = c.flag("attention_bias", default=False)
    return SelfAttention(
        heads, heads, latent.nope_dim, q_bias=has_bias, out_bias=has_bias, latent=latent
    )


def deepseek(c: ModelConfig) -> Decoder:
    """DeepSeek V2 and V3, Kimi K2: latent attention; dense layers first, then mixtures."""
    hidden, attention = c.whole("hidden_size"), latent_attention(c)
    mlp = Mlp(c.whole("intermediate_size"))
    dense = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    base = like_llama(c, c.model_type, [dense] * c.whole("num_hidden_layers"), tied=False)
    return _with_further(c, _with_routed(c, base))


def _with_further(c: ModelConfig, base: Decoder) -> Decoder:
    """The same decoder with the layers that predict further tokens, if they are to be counted.

    transformers does not build them; whoever trains them says so by the name that Megatron has for
    their number.
    """
    further = c.whole("mtp_num_layers", default=0, at_least=0)
    held = c.whole("num_nextn_predict_layers", default=0, at_least=0)
    if not held or "mtp_num_layers" in c:
        return replace(base, further=further)
    said = (
        f"num_nextn_predict_layers = {held} is not counted: transformers does not build it;"
        f" add mtp_num_layers = {held} to the configuration to count it"
    )
    return replace(base, assumptions=(*base.assumptions, said))


def gpt_oss(c: ModelConfig) -> Decoder:
    """GPT-OSS: biases everywhere, attention sinks, every second layer with a window."""
    hidden = c.whole("hidden_size")
    count = c.whole("num_hidden_layers")
    windows = windows_of(layer_kinds(c, count, every_nth_full(2)), c.whole("sliding_window"))
    attention = self_attention(c, bias=c.flag("attention_bias", default=True))
    attention = replace(attention, extra_params=attention.heads)
    experts = experts_of(
        c,
        c.whole("num_local_experts"),
        c.whole("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    layers = [
        Layer((replace(attention, window=window),), experts, norm=hidden, feed_norm=hidden)
        for window in windows
    ]
    return like_llama(c, "gpt_oss", layers, tied=False)


def granite_moe(c: ModelConfig) -> Decoder:
    """Granite MoE: Llama with every layer a mixture; in some a shared expert."""
    experts = experts_of(
        c,
        c.whole("num_local_experts"),
        c.whole("intermediate_size"),
        shared_size=c.whole("shared_intermediate_size", default=0, at_least=0),
        module="block_sparse_moe",
    )
    return _all_mixtures(replace(llama(c), family=c.model_type), experts)


def _all_mixtures(base: Decoder, experts: Experts) -> Decoder:
    """The same decoder with every feed-forward a mixture."""
    return replace(base, layers=tuple(replace(layer, feed=experts) for layer in base.layers))


def olmoe(c: ModelConfig) -> Decoder:
    """OLMoE: norms over all of queries and keys, every layer a mixture."""
    experts = experts_of(
        c, c.whole("num_experts", "num_local_experts"), c.whole("intermediate_size")
    )
    base = each_attention(
        llama(c),
        "olmoe",
        lambda _i, a: replace(a, norm_params=(a.heads + a.kv_heads) * a.head_dim),
    )
    return _all_mixtures(base, experts)


def flex_olmo(c: ModelConfig) -> Decoder:
    """FlexOlmo: OLMo 2 with every layer a mixture."""
    experts = experts_of(c, c.whole("num_experts"), c.whole("intermediate_size"))
    return _all_mixtures(replace(olmo2(c), family="flex_olmo"), experts)


def llama4(c: ModelConfig) -> Decoder:
    """Llama 4's language model: mixtures with a shared expert; three chunked layers to one."""
    base = replace(llama(c), family="llama4")
    count = len(base.layers)
    every = c.whole("interleave_moe_layer_step", default=1)
    listed = c.wholes("moe_layers")
    mixtures = set(range(every - 1, count, every)) if listed is None else set(listed)
    size = c.whole("intermediate_size")
    experts = experts_of(c, c.whole("num_local_experts"), size, shared_size=size)
    dense = Mlp(c.whole("intermediate_size_mlp"))
    kinds = layer_kinds(c, count, every_nth_full(4, "chunked_attention"))
    chunk = c.maybe("attention_chunk_size")
    base = each_attention(
        base,
        "llama4",
        lambda number, a: replace(a, chunk=chunk if kinds[number] == "chunked_attention" else None),
    )
    layers = tuple(
        replace(layer, feed=experts if number in mixtures else dense)
        for number, layer in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def glm4_moe(c: ModelConfig) -> Decoder:
    """GLM 4.5: dense layers first, then mixtures with a shared expert."""
    has_norms = c.flag("use_qk_norm", default=False)
    base = each_attention(
        llama(c),
        "glm4_moe",
        lambda _i, a: replace(a, out_bias=False, norm_params=2 * a.head_dim if has_norms else 0),
    )
    return _with_further(c, _with_routed(c, base))


def _with_routed(c: ModelConfig, base: Decoder) -> Decoder:
    """DeepSeek's rule: dense layers first, then mixtures, with shared experts beside the routed."""
    held = c.maybe("n_routed_experts")
    if held is None:
        return base
    size = c.whole("moe_intermediate_size")
    shared = c.whole("n_shared_experts", default=0, at_least=0) * size
    experts = experts_of(c, held, size, shared_size=shared)
    first = c.whole("first_k_dense_replace", default=0, at_least=0)
    every = c.whole("moe_layer_freq", default=1)
    layers = tuple(
        replace(layer, feed=experts) if number >= first and number % every == 0 else layer
        for number, layer in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def phimoe(c: ModelConfig) -> Decoder:
    """Phi 3.5 MoE: every layer a mixture, norms and the head with biases."""
    base = llama(c)
    hidden = base.hidden
    experts = experts_of(c, c.whole("num_local_experts"), c.whole("intermediate_size"))
    window = c.maybe("sliding_window")
    base = each_attention(base, "phimoe", lambda _i, a: replace(a, window=window))
    layers = tuple(
        replace(layer, feed=experts, norm=2 * hidden, feed_norm=2 * hidden) for layer in base.layers
    )
    head_bias = c.flag("lm_head_bias", default=False)
    return replace(base, layers=layers, final_norm=2 * hidden, head_bias=head_bias)


def dbrx(c: ModelConfig) -> Decoder:
    """DBRX: sixteen fine experts, four of them used; its parts configured apart."""
    hidden, heads = c.whole("d_model", "hidden_size"), c.whole("n_heads", "num_attention_heads")
    attn, ffn = c.part("attn_config"), c.part("ffn_config")
    attention = SelfAttention(
        heads,
        attn.whole("kv_n_heads"),
        head_dim_of(c, hidden, heads),
        fused="Wqkv",
        names=("", "", "", "out_proj"),
        module="norm_attn_norm.attn",
    )
    held, used = ffn.whole("moe_num_experts"), ffn.whole("moe_top_k")
    if used > held:
        raise FormatError(f"{ffn.where}: moe_top_k {used} is more than the {held} experts")
    experts = Experts(held, used, ffn.whole("ffn_hidden_size"), module="ffn")
    layer = Layer((attention,), experts, norm=hidden, feed_norm=hidden)
    return Decoder(
        "dbrx",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("n_layers", "num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=False),
        final_norm=hidden,
        prefix="transformer",
        layer_name="blocks",
        embedding_name="wte",
    )


def ernie_moe(c: ModelConfig) -> Decoder:
    """ERNIE 4.5 MoE: mixtures from one layer to another, with shared experts."""
    if c.flag("use_bias", default=False):
        raise FormatError(f"{c.where}: use_bias is true; a mixture with biases can't be read")
    base = ernie(c)
    size, held = c.whole("moe_intermediate_size"), c.whole("moe_num_experts")
    used = c.whole("moe_k")
    if used > held:
        raise FormatError(f"{c.where}: moe_k {used} is more than the {held} experts")
    experts = Experts(
        held,
        used,
        size,
        router_params=held,
        shared_size=c.whole("moe_num_shared_experts", default=0, at_least=0) * size,
    )
    count = len(base.layers)
    first = c.whole("moe_layer_start_index", at_least=0)
    last = c.whole("moe_layer_end_index", default=-1, at_least=-1)
    last = count - 1 if last == -1 else last
    every = c.whole("moe_layer_interval", default=1)
    layers = tuple(
        replace(layer, feed=experts)
        if first <= number <= last and (number + 1) % every == 0
        else layer
        for number, layer in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def minimax_m2(c: ModelConfig) -> Decoder:
    """MiniMax M2: norms over all of queries and keys, every layer a mixture."""
    experts = experts_of(c, c.whole("num_local_experts"), c.whole("intermediate_size"))
    base = each_attention(
        llama(c),
        "minimax_m2",
        lambda _i, a: replace(a, norm_params=(a.heads + a.kv_heads) * a.head_dim),
    )
    return _all_mixtures(base, experts)


def dots1(c: ModelConfig) -> Decoder:
    """dots.llm1: Qwen 3's attention, DeepSeek's mixtures; upper layers may have a window."""
    base = _with_routed(c, replace(qwen3_full(c), family="dots1"))
    first = c.whole("max_window_layers", default=len(base.layers), at_least=0)
    return with_windows(
        c,
        base,
        c.maybe("sliding_window"),
        lambda number: "sliding_attention" if number >= first else "full_attention",
    )


def hunyuan_moe(c: ModelConfig) -> Decoder:
    """Hunyuan MoE: every layer a mixture, with a shared expert of the same size."""
    base = replace(hunyuan(c), family="hunyuan_v1_moe")
    count, size = len(base.layers), c.whole("intermediate_size")
    held, used = (each_layer(c, name, count) for name in ("num_experts", "moe_topk"))
    if any(top > most for top, most in zip(used, held, strict=True)):
        raise FormatError(f"{c.where}: moe_topk is more than the experts of a layer")
    layers = tuple(
        replace(layer, feed=Experts(most, top, size, shared_size=size))
        for layer, most, top in zip(base.layers, held, used, strict=True)
    )
    return replace(base, layers=layers)
