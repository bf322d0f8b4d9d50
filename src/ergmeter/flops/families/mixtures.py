"""Readers of mixtures of experts: mixture layers, experts per token, shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.families.llamas import (
    dense_or_experts,
    each_layer,
    ernie,
    every_nth_full,
    experts_of,
    head_dim_of,
    hunyuan,
    layer_kinds,
    like_llama,
    llama,
    mistral,
    olmo2,
    qwen2_full,
    qwen3_full,
    qwen_window,
    self_attention,
    variant,
    windows_of,
    with_layer_values,
    with_windows,
)
from ergmeter.flops.graph.layers import AttentionLayer, Decoder, Experts, Latent, Layer, Mlp

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig


def mixtral(c: ModelConfig) -> Decoder:
    """Mixtral: every layer a mixture, no shared expert."""
    experts = experts_of(c, c.integer("num_local_experts"), c.integer("intermediate_size"))
    return variant(mistral(c), "mixtral", layer={"feed": experts})


def qwen2_moe(c: ModelConfig) -> Decoder:
    """Qwen 1.5 and 2 MoE: a gated shared expert beside the routed ones."""
    experts = experts_of(
        c,
        c.integer("num_experts", "num_local_experts"),
        c.integer("moe_intermediate_size"),
        shared_size=c.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    base = qwen2_full(c)
    base = replace(base, family="qwen2_moe", layers=dense_or_experts(c, base, experts))
    window = qwen_window(c)
    if window is None:
        return base
    # Not the dense Qwen 2's rule: every second of the lower layers, not all of the upper ones.
    last = c.integer("max_window_layers", default=28, at_least=0)
    return with_windows(
        c,
        base,
        window,
        lambda number: "full_attention" if number % 2 or number >= last else "sliding_attention",
    )


def qwen3_moe(c: ModelConfig) -> Decoder:
    """Qwen 3 MoE: no shared expert; a window, where there is one, in every layer."""
    window = qwen_window(c)
    return variant(qwen3_moe_full(c), "qwen3_moe", attention={"window": window})


def qwen3_moe_full(c: ModelConfig) -> Decoder:
    """Qwen 3 MoE whose layers see all that is before them, as in Qwen3-VL."""
    experts = experts_of(
        c, c.integer("num_experts", "num_local_experts"), c.integer("moe_intermediate_size")
    )
    base = qwen3_full(c)
    return replace(base, family="qwen3_moe", layers=dense_or_experts(c, base, experts))


def latent_attention(c: ModelConfig) -> AttentionLayer:
    """Multi-head latent attention, as DeepSeek has it."""
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


def deepseek(c: ModelConfig) -> Decoder:
    """DeepSeek V2 and V3, Kimi K2: latent attention; dense layers first, then mixtures."""
    hidden, attention = c.integer("hidden_size"), latent_attention(c)
    mlp = Mlp(c.integer("intermediate_size"))
    dense = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    base = like_llama(c, c.model_type, [dense] * c.integer("num_hidden_layers"), tied=False)
    return _with_further(c, _with_routed(c, base))


def _with_further(c: ModelConfig, base: Decoder) -> Decoder:
    """The same decoder with the layers that predict further tokens, if they are to be counted.

    transformers does not build them; to count them, pass their number under Megatron's name for it.
    """
    further = c.integer("mtp_num_layers", default=0, at_least=0)
    count = c.integer("num_nextn_predict_layers", default=0, at_least=0)
    if not count or "mtp_num_layers" in c:
        return replace(base, further=further)
    assumption = (
        f"num_nextn_predict_layers = {count} is not counted: transformers does not build it;"
        f" add mtp_num_layers = {count} to the configuration to count it"
    )
    return replace(base, assumptions=(*base.assumptions, assumption))


def gpt_oss(c: ModelConfig) -> Decoder:
    """GPT-OSS: biases everywhere, attention sinks, every second layer with a window."""
    hidden = c.integer("hidden_size")
    count = c.integer("num_hidden_layers")
    windows = windows_of(layer_kinds(c, count, every_nth_full(2)), c.integer("sliding_window"))
    attention = self_attention(c, bias=c.flag("attention_bias", default=True))
    attention = replace(attention, extra_params=attention.heads)
    experts = experts_of(
        c,
        c.integer("num_local_experts"),
        c.integer("intermediate_size"),
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
        c.integer("num_local_experts"),
        c.integer("intermediate_size"),
        shared_size=c.integer("shared_intermediate_size", default=0, at_least=0),
        module="block_sparse_moe",
    )
    return variant(llama(c), c.model_type, layer={"feed": experts})


def olmoe(c: ModelConfig) -> Decoder:
    """OLMoE: norms over all of queries and keys, every layer a mixture."""
    experts = experts_of(
        c, c.integer("num_experts", "num_local_experts"), c.integer("intermediate_size")
    )
    return variant(llama(c), "olmoe", qk_norms="all", layer={"feed": experts})


def flex_olmo(c: ModelConfig) -> Decoder:
    """FlexOlmo: OLMo 2 with every layer a mixture."""
    experts = experts_of(c, c.integer("num_experts"), c.integer("intermediate_size"))
    return variant(olmo2(c), "flex_olmo", layer={"feed": experts})


def llama4(c: ModelConfig) -> Decoder:
    """Llama 4's language model: mixtures with a shared expert; three chunked layers to one."""
    base = replace(llama(c), family="llama4")
    count = len(base.layers)
    every = c.integer("interleave_moe_layer_step", default=1)
    listed = c.integers("moe_layers")
    mixtures = set(range(every - 1, count, every)) if listed is None else set(listed)
    size = c.integer("intermediate_size")
    experts = experts_of(c, c.integer("num_local_experts"), size, shared_size=size)
    dense = Mlp(c.integer("intermediate_size_mlp"))
    kinds = layer_kinds(c, count, every_nth_full(4, "chunked_attention"))
    chunk = c.maybe("attention_chunk_size")
    chunks = [chunk if kind == "chunked_attention" else None for kind in kinds]
    base = with_layer_values(base, "chunk", chunks)
    layers = tuple(
        replace(layer, feed=experts if number in mixtures else dense)
        for number, layer in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def glm4_moe(c: ModelConfig) -> Decoder:
    """GLM 4.5: dense layers first, then mixtures with a shared expert."""
    has_norms = c.flag("use_qk_norm", default=False)
    base = variant(
        llama(c),
        "glm4_moe",
        attention={"out_bias": False},
        qk_norms="head" if has_norms else "none",
    )
    return _with_further(c, _with_routed(c, base))


def _with_routed(c: ModelConfig, base: Decoder) -> Decoder:
    """DeepSeek's rule: dense layers first, then mixtures, with shared experts beside the routed."""
    count = c.maybe("n_routed_experts")
    if count is None:
        return base
    size = c.integer("moe_intermediate_size")
    shared = c.integer("n_shared_experts", default=0, at_least=0) * size
    experts = experts_of(c, count, size, shared_size=shared)
    first = c.integer("first_k_dense_replace", default=0, at_least=0)
    every = c.integer("moe_layer_freq", default=1)
    layers = tuple(
        replace(layer, feed=experts) if number >= first and number % every == 0 else layer
        for number, layer in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def phimoe(c: ModelConfig) -> Decoder:
    """Phi 3.5 MoE: every layer a mixture, norms and the head with biases."""
    base = llama(c)
    norm = 2 * base.hidden
    experts = experts_of(c, c.integer("num_local_experts"), c.integer("intermediate_size"))
    return variant(
        base,
        "phimoe",
        attention={"window": c.maybe("sliding_window")},
        layer={"feed": experts, "norm": norm, "feed_norm": norm},
        final_norm=norm,
        head_bias=c.flag("lm_head_bias", default=False),
    )


def dbrx(c: ModelConfig) -> Decoder:
    """DBRX: sixteen fine experts, four of them used; its parts configured apart."""
    hidden, heads = c.integer("d_model", "hidden_size"), c.integer("n_heads", "num_attention_heads")
    attn, ffn = c.part("attn_config"), c.part("ffn_config")
    attention = AttentionLayer(
        heads,
        attn.integer("kv_n_heads"),
        head_dim_of(c, hidden, heads),
        fused="Wqkv",
        names=("", "", "", "out_proj"),
        module="norm_attn_norm.attn",
    )
    count, used = ffn.integer("moe_num_experts"), ffn.integer("moe_top_k")
    if used > count:
        raise FormatError(f"{ffn.where}: moe_top_k {used} is more than the {count} experts")
    experts = Experts(count, used, ffn.integer("ffn_hidden_size"), module="ffn")
    layer = Layer((attention,), experts, norm=hidden, feed_norm=hidden)
    return Decoder(
        "dbrx",
        hidden,
        c.integer("vocab_size"),
        (layer,) * c.integer("n_layers", "num_hidden_layers"),
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
    size, experts_count = c.integer("moe_intermediate_size"), c.integer("moe_num_experts")
    used = c.integer("moe_k")
    if used > experts_count:
        raise FormatError(f"{c.where}: moe_k {used} is more than the {experts_count} experts")
    experts = Experts(
        experts_count,
        used,
        size,
        router_params=experts_count,
        shared_size=c.integer("moe_num_shared_experts", default=0, at_least=0) * size,
    )
    count = len(base.layers)
    first = c.integer("moe_layer_start_index", at_least=0)
    last = c.integer("moe_layer_end_index", default=-1, at_least=-1)
    last = count - 1 if last == -1 else last
    every = c.integer("moe_layer_interval", default=1)
    layers = tuple(
        replace(layer, feed=experts)
        if first <= number <= last and (number + 1) % every == 0
        else layer
        for number, layer in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def minimax_m2(c: ModelConfig) -> Decoder:
    """MiniMax M2: norms over all of queries and keys, every layer a mixture."""
    experts = experts_of(c, c.integer("num_local_experts"), c.integer("intermediate_size"))
    return variant(llama(c), "minimax_m2", qk_norms="all", layer={"feed": experts})


def dots1(c: ModelConfig) -> Decoder:
    """dots.llm1: Qwen 3's attention, DeepSeek's mixtures; upper layers may have a window."""
    base = _with_routed(c, replace(qwen3_full(c), family="dots1"))
    first = c.integer("max_window_layers", default=len(base.layers), at_least=0)
    return with_windows(
        c,
        base,
        c.maybe("sliding_window"),
        lambda number: "sliding_attention" if number >= first else "full_attention",
    )


def hunyuan_moe(c: ModelConfig) -> Decoder:
    """Hunyuan MoE: every layer a mixture, with a shared expert of the same size."""
    base = replace(hunyuan(c), family="hunyuan_v1_moe")
    count, size = len(base.layers), c.integer("intermediate_size")
    experts, used = (each_layer(c, name, count) for name in ("num_experts", "moe_topk"))
    if any(top > most for top, most in zip(used, experts, strict=True)):
        raise FormatError(f"{c.where}: moe_topk is more than the experts of a layer")
    layers = tuple(
        replace(layer, feed=Experts(most, top, size, shared_size=size))
        for layer, most, top in zip(base.layers, experts, used, strict=True)
    )
    return replace(base, layers=layers)
