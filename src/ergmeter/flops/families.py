"""Which pieces each family of language models is made of, read from its configuration.

One reader a family, by the `model_type` that transformers writes. What two families share is
written once and what sets one apart is in its reader. A `model_type` that is not here is an error
that says so: no family is ever read as its neighbour.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.decoder import (
    Decoder,
    DeltaNet,
    Experts,
    Latent,
    Layer,
    Mamba,
    Mamba2,
    Mlp,
    SelfAttention,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.flops.config import Config


def self_attention(c: Config, *, bias: bool = False, head_dim: int | None = None) -> SelfAttention:
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
        head_dim = _head_dim(c, hidden, heads)
    return SelfAttention(heads, kv_heads, head_dim, q_bias=bias, kv_bias=bias, out_bias=bias)


def _head_dim(c: Config, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise FormatError(
            f"{c.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads},"
            " and there is no head_dim"
        )
    return hidden // heads


def layer_kinds(c: Config, layers: int) -> list[str]:
    """What each layer is, where the configuration lists it."""
    kinds = c.names("layer_types", "layers_block_type") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise FormatError(
            f"{c.where}: layer_types lists {len(kinds)} layers and num_hidden_layers is {layers}"
        )
    return kinds


def _like_llama(
    c: Config,
    family: str,
    layers: Sequence[Layer],
    *,
    tied: bool,
    final_norm: int | None = None,
    head_bias: bool = False,
) -> Decoder:
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


def llama(c: Config) -> Decoder:
    """Llama 1 to 3, and what copies it."""
    hidden = c.whole("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mlp = Mlp(c.whole("intermediate_size"), bias=c.flag("mlp_bias", default=False))
    layer = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    return _like_llama(c, "llama", [layer] * c.whole("num_hidden_layers"), tied=False)


def mistral(c: Config) -> Decoder:
    """Mistral: Llama with a window, in its first versions."""
    window = c.maybe("sliding_window")
    return _each_attention(llama(c), "mistral", lambda _i, a: replace(a, window=window))


def _each_attention(
    decoder: Decoder, family: str, change: Callable[[int, SelfAttention], SelfAttention]
) -> Decoder:
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


def qwen2(c: Config) -> Decoder:
    """Qwen 2 and 2.5: biases on queries, keys and values; upper layers may have a window."""
    window = c.maybe("sliding_window") if c.flag("use_sliding_window", default=False) else None
    first = c.whole("max_window_layers", default=0, at_least=0)
    kinds = c.names("layer_types")

    def change(number: int, a: SelfAttention) -> SelfAttention:
        slides = kinds[number] == "sliding_attention" if kinds else number >= first
        return replace(a, q_bias=True, kv_bias=True, window=window if slides else None)

    return _each_attention(llama(c), "qwen2", change)


def _qk_norms(a: SelfAttention) -> SelfAttention:
    return replace(a, norm_params=2 * a.head_dim)


def qwen3(c: Config) -> Decoder:
    """Qwen 3: a head size of its own, norms on queries and keys."""
    if "head_dim" not in c:
        raise FormatError(f"{c.where}: the field head_dim is missing; add it")
    return _each_attention(llama(c), "qwen3", lambda _i, a: _qk_norms(a))


def gemma(c: Config) -> Decoder:
    """Gemma 1: tied, with a head size of its own."""
    c.whole("head_dim")
    return replace(llama(c), family="gemma", is_tied=c.flag("tie_word_embeddings", default=True))


def _windows(kinds: Sequence[str], window: int | None) -> list[int | None]:
    return [window if kind in ("sliding_attention", "local_attention") else None for kind in kinds]


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
    kinds = c.names("layer_types") or [
        "full_attention" if (number + 1) % every == 0 else "sliding_attention"
        for number in range(count)
    ]
    windows = _windows(kinds, c.whole("sliding_window"))
    base = _each_attention(
        base,
        family,
        lambda number, a: replace(_qk_norms(a) if has_qk_norm else a, window=windows[number]),
    )
    layers = tuple(replace(layer, after_norms=(base.hidden, base.hidden)) for layer in base.layers)
    return replace(base, layers=layers)


def phi(c: Config) -> Decoder:
    """Phi 1 to 2: a parallel block with biases everywhere, the head's included."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    kv_heads = c.whole("num_key_value_heads", default=heads)
    attention = SelfAttention(
        heads,
        kv_heads,
        _head_dim(c, hidden, heads),
        q_bias=True,
        kv_bias=True,
        out_bias=True,
        norm_params=4 * (hidden // heads) if c.flag("qk_layernorm", default=False) else 0,
        names=("q_proj", "k_proj", "v_proj", "dense"),
    )
    mlp = Mlp(
        c.whole("intermediate_size", default=4 * hidden),
        is_gated=False,
        bias=True,
        names=("fc1", "fc2"),
    )
    layer = Layer((attention,), mlp, norm=2 * hidden, is_parallel=True)
    layers = [layer] * c.whole("num_hidden_layers")
    return _like_llama(c, "phi", layers, tied=False, final_norm=2 * hidden, head_bias=True)


def phi3(c: Config) -> Decoder:
    """Phi 3 and 4: Llama with its projections fused."""
    window = c.maybe("sliding_window")
    base = _each_attention(
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


def gpt2(c: Config) -> Decoder:
    """GPT-2: learned positions, biases, one fused projection, tied."""
    hidden, heads = c.whole("n_embd", "hidden_size"), c.whole("n_head", "num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        _head_dim(c, hidden, heads),
        q_bias=True,
        out_bias=True,
        fused="c_attn",
        names=("", "", "", "c_proj"),
        module="attn",
    )
    mlp = Mlp(c.maybe("n_inner") or 4 * hidden, is_gated=False, bias=True, names=("c_fc", "c_proj"))
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    return Decoder(
        "gpt2",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("n_layer", "num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=2 * hidden,
        positions=c.whole("n_positions", "max_position_embeddings"),
        prefix="transformer",
        layer_name="h",
        embedding_name="wte",
    )


def gpt_neox(c: Config) -> Decoder:
    """GPT-NeoX and Pythia: fused, biased, not tied."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    has_bias = c.flag("attention_bias", default=True)
    attention = SelfAttention(
        heads,
        heads,
        _head_dim(c, hidden, heads),
        q_bias=has_bias,
        out_bias=has_bias,
        fused="query_key_value",
        names=("", "", "", "dense"),
        module="attention",
    )
    mlp = Mlp(
        c.whole("intermediate_size"),
        is_gated=False,
        bias=True,
        names=("dense_h_to_4h", "dense_4h_to_h"),
    )
    is_parallel = c.flag("use_parallel_residual", default=True)
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden, is_parallel=is_parallel)
    return Decoder(
        "gpt_neox",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=False),
        final_norm=2 * hidden,
        prefix="gpt_neox",
        embedding_name="embed_in",
        head_name="embed_out",
    )


def falcon(c: Config) -> Decoder:
    """Falcon: one key-value head, or groups in the new architecture; parallel; tied."""
    hidden = c.whole("hidden_size", "n_embed")
    heads = c.whole("num_attention_heads", "n_head")
    is_new = c.flag("new_decoder_architecture", default=False)
    if is_new:
        kv_heads = c.whole("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if c.flag("multi_query", default=True) else heads
    has_bias = c.flag("bias", default=False)
    attention = SelfAttention(
        heads,
        kv_heads,
        _head_dim(c, hidden, heads),
        q_bias=has_bias,
        out_bias=has_bias,
        fused="query_key_value",
        names=("", "", "", "dense"),
        module="self_attention",
    )
    mlp = Mlp(
        c.whole("ffn_hidden_size", default=4 * hidden),
        is_gated=False,
        bias=has_bias,
        names=("dense_h_to_4h", "dense_4h_to_h"),
    )
    is_parallel = is_new or c.flag("parallel_attn", default=True)
    norms = c.whole("num_ln_in_parallel_attn", default=2 if is_new else 1)
    second = 2 * hidden if not is_parallel or (is_new and norms > 1) else 0
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=second, is_parallel=is_parallel)
    return Decoder(
        "falcon",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("num_hidden_layers", "n_layer"),
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=2 * hidden,
        prefix="transformer",
        layer_name="h",
        embedding_name="word_embeddings",
    )


def mpt(c: Config) -> Decoder:
    """MPT: no biases, fused, tied; ALiBi or learned positions."""
    hidden, heads = c.whole("d_model", "hidden_size"), c.whole("n_heads", "num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        _head_dim(c, hidden, heads),
        fused="Wqkv",
        names=("", "", "", "out_proj"),
        module="attn",
    )
    size = int(c.number("expansion_ratio", default=4) * hidden)
    mlp = Mlp(size, is_gated=False, names=("up_proj", "down_proj"), module="ffn")
    layer = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    attn = c.raw("attn_config")
    has_alibi = bool(attn.get("alibi", True)) if isinstance(attn, dict) else True
    has_positions = c.flag("learned_pos_emb", default=True) and not has_alibi
    return Decoder(
        "mpt",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("n_layers", "num_hidden_layers"),
        is_tied=True,
        final_norm=hidden,
        positions=c.whole("max_seq_len") if has_positions else 0,
        prefix="transformer",
        layer_name="blocks",
        embedding_name="wte",
    )


def olmo(c: Config) -> Decoder:
    """OLMo 1: Llama whose norms have no parameters."""
    base = llama(c)
    layers = tuple(replace(layer, norm=0, feed_norm=0) for layer in base.layers)
    return replace(base, family="olmo", layers=layers, final_norm=0)


def olmo2(c: Config) -> Decoder:
    """OLMo 2 and 3: norms after each part instead of before, and over all of queries and keys."""
    base = llama(c)
    kinds = layer_kinds(c, len(base.layers))
    windows = _windows(kinds, c.maybe("sliding_window"))
    base = _each_attention(
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
    base = _each_attention(
        base,
        "cohere",
        lambda _i, a: replace(
            a, norm_params=(a.heads + a.kv_heads) * a.head_dim if has_norms else 0
        ),
    )
    layers = tuple(replace(layer, feed_norm=0, is_parallel=True) for layer in base.layers)
    is_tied = c.flag("tie_word_embeddings", default=True)
    return replace(base, layers=layers, is_tied=is_tied)


def starcoder2(c: Config) -> Decoder:
    """StarCoder 2: plain feed-forward, biases, a window, tied."""
    has_bias = c.flag("use_bias", default=True)
    hidden = c.whole("hidden_size")
    attention = replace(self_attention(c, bias=has_bias), window=c.maybe("sliding_window"))
    mlp = Mlp(c.whole("intermediate_size"), is_gated=False, bias=has_bias, names=("c_fc", "c_proj"))
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    layers = [layer] * c.whole("num_hidden_layers")
    return _like_llama(c, "starcoder2", layers, tied=True, final_norm=2 * hidden)


def stablelm(c: Config) -> Decoder:
    """StableLM: Llama with biased norms and, in some sizes, biases on queries, keys and values."""
    base = llama(c)
    hidden = base.hidden
    has_bias = c.flag("use_qkv_bias", default=False)
    is_parallel = c.flag("use_parallel_residual", default=False)
    base = _each_attention(
        base, "stablelm", lambda _i, a: replace(a, q_bias=has_bias, kv_bias=has_bias)
    )
    second = 0 if is_parallel else 2 * hidden
    layers = tuple(
        replace(layer, norm=2 * hidden, feed_norm=second, is_parallel=is_parallel)
        for layer in base.layers
    )
    return replace(base, layers=layers, final_norm=2 * hidden)


# -- mixtures of experts ---------------------------------------------------------------------------


def mixtral(c: Config) -> Decoder:
    """Mixtral: every layer a mixture, no shared expert."""
    experts = _experts(c, c.whole("num_local_experts"), c.whole("intermediate_size"))
    base = mistral(c)
    layers = tuple(replace(layer, feed=experts) for layer in base.layers)
    return replace(base, family="mixtral", layers=layers)


def _experts(c: Config, held: int, size: int, **more: object) -> Experts:
    used = c.whole("num_experts_per_tok", "top_k", "moe_topk")
    if used > held:
        raise FormatError(f"{c.where}: num_experts_per_tok {used} is more than the {held} experts")
    return replace(Experts(held, used, size), **more)  # type: ignore[arg-type]


def _dense_or_experts(c: Config, base: Decoder, experts: Experts) -> tuple[Layer, ...]:
    """Qwen's rule: every `decoder_sparse_step`-th layer is a mixture, but for those listed."""
    every = c.whole("decoder_sparse_step", default=1)
    dense = c.raw("mlp_only_layers") or []
    return tuple(
        replace(layer, feed=experts) if number not in dense and (number + 1) % every == 0 else layer
        for number, layer in enumerate(base.layers)
    )


def qwen2_moe(c: Config) -> Decoder:
    """Qwen 1.5 and 2 MoE: a gated shared expert beside the routed ones."""
    experts = _experts(
        c,
        c.whole("num_experts", "num_local_experts"),
        c.whole("moe_intermediate_size"),
        shared_size=c.whole("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    base = qwen2(c)
    return replace(base, family="qwen2_moe", layers=_dense_or_experts(c, base, experts))


def qwen3_moe(c: Config) -> Decoder:
    """Qwen 3 MoE: no shared expert."""
    experts = _experts(
        c, c.whole("num_experts", "num_local_experts"), c.whole("moe_intermediate_size")
    )
    base = qwen3(c)
    return replace(base, family="qwen3_moe", layers=_dense_or_experts(c, base, experts))


def qwen3_next(c: Config) -> Decoder:
    """Qwen3-Next: three layers of gated linear attention to one of gated attention."""
    base = qwen3(c)
    count = len(base.layers)
    every = c.whole("full_attention_interval", default=4)
    kinds = c.names("layer_types") or [
        "full_attention" if (number + 1) % every == 0 else "linear_attention"
        for number in range(count)
    ]
    linear = DeltaNet(
        c.whole("linear_num_key_heads"),
        c.whole("linear_num_value_heads"),
        c.whole("linear_key_head_dim"),
        c.whole("linear_value_head_dim"),
        c.whole("linear_conv_kernel_dim"),
    )
    experts = _experts(
        c,
        c.whole("num_experts", "num_local_experts"),
        c.whole("moe_intermediate_size"),
        shared_size=c.whole("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    base = _each_attention(base, "qwen3_next", lambda _i, a: replace(a, is_gated=True))
    layers = tuple(
        replace(layer, mixers=(linear,)) if kind == "linear_attention" else layer
        for layer, kind in zip(base.layers, kinds, strict=True)
    )
    base = replace(base, layers=layers)
    return replace(base, layers=_dense_or_experts(c, base, experts))


def deepseek(c: Config) -> Decoder:
    """DeepSeek V2 and V3, Kimi K2: latent attention; dense layers first, then mixtures."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    latent = Latent(
        c.maybe("q_lora_rank"),
        c.whole("kv_lora_rank"),
        c.whole("qk_nope_head_dim"),
        c.whole("qk_rope_head_dim"),
        c.whole("v_head_dim"),
    )
    has_bias = c.flag("attention_bias", default=False)
    attention = SelfAttention(
        heads, heads, latent.nope_dim, q_bias=has_bias, out_bias=has_bias, latent=latent
    )
    mlp = Mlp(c.whole("intermediate_size"))
    dense = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    count = c.whole("num_hidden_layers")
    held = c.maybe("n_routed_experts")
    layers = [dense] * count
    if held:
        size = c.whole("moe_intermediate_size")
        shared = c.whole("n_shared_experts", default=0, at_least=0) * size
        experts = _experts(c, held, size, shared_size=shared)
        first = c.whole("first_k_dense_replace", default=0, at_least=0)
        every = c.whole("moe_layer_freq", default=1)
        layers = [
            replace(dense, feed=experts) if number >= first and number % every == 0 else dense
            for number in range(count)
        ]
    return _like_llama(c, c.model_type, layers, tied=False)


def gpt_oss(c: Config) -> Decoder:
    """GPT-OSS: biases everywhere, attention sinks, every second layer with a window."""
    hidden = c.whole("hidden_size")
    count = c.whole("num_hidden_layers")
    kinds = c.names("layer_types") or [
        "sliding_attention" if (number + 1) % 2 else "full_attention" for number in range(count)
    ]
    windows = _windows(kinds, c.whole("sliding_window"))
    attention = self_attention(c, bias=c.flag("attention_bias", default=True))
    attention = replace(attention, extra_params=attention.heads)
    experts = _experts(
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
    return _like_llama(c, "gpt_oss", layers, tied=False)


def granite_moe(c: Config) -> Decoder:
    """Granite MoE: Llama with every layer a mixture; tied."""
    experts = _experts(c, c.whole("num_local_experts"), c.whole("intermediate_size"))
    base = llama(c)
    layers = tuple(replace(layer, feed=experts) for layer in base.layers)
    is_tied = c.flag("tie_word_embeddings", default=True)
    return replace(base, family="granitemoe", layers=layers, is_tied=is_tied)


def olmoe(c: Config) -> Decoder:
    """OLMoE: norms over all of queries and keys, every layer a mixture."""
    experts = _experts(c, c.whole("num_experts", "num_local_experts"), c.whole("intermediate_size"))
    base = _each_attention(
        llama(c),
        "olmoe",
        lambda _i, a: replace(a, norm_params=(a.heads + a.kv_heads) * a.head_dim),
    )
    return replace(base, layers=tuple(replace(layer, feed=experts) for layer in base.layers))


def llama4(c: Config) -> Decoder:
    """Llama 4's language model: mixtures with a shared expert; three chunked layers to one."""
    base = replace(llama(c), family="llama4")
    count = len(base.layers)
    every = c.whole("interleave_moe_layer_step", default=1)
    listed = c.raw("moe_layers")
    mixtures = set(listed) if isinstance(listed, list) else set(range(every - 1, count, every))
    size = c.whole("intermediate_size")
    experts = Experts(
        c.whole("num_local_experts"), c.whole("num_experts_per_tok"), size, shared_size=size
    )
    dense = Mlp(c.whole("intermediate_size_mlp"))
    kinds = c.names("layer_types") or [
        "full_attention" if (number + 1) % 4 == 0 else "chunked_attention"
        for number in range(count)
    ]
    chunk = c.maybe("attention_chunk_size")
    base = _each_attention(
        base,
        "llama4",
        lambda number, a: replace(a, chunk=chunk if kinds[number] == "chunked_attention" else None),
    )
    layers = tuple(
        replace(layer, feed=experts if number in mixtures else dense)
        for number, layer in enumerate(base.layers)
    )
    return replace(base, layers=layers)


# -- state spaces and hybrids ----------------------------------------------------------------------


def mamba(c: Config) -> Decoder:
    """Mamba: nothing but state-space layers."""
    hidden = c.whole("hidden_size", "d_model")
    inner = c.maybe("intermediate_size") or int(c.number("expand", default=2) * hidden)
    rank = c.raw("time_step_rank")
    layer = Layer(
        (
            Mamba(
                inner,
                c.whole("state_size"),
                rank if isinstance(rank, int) else -(-hidden // 16),
                c.whole("conv_kernel"),
                conv_bias=c.flag("use_conv_bias", default=True),
                proj_bias=c.flag("use_bias", default=False),
            ),
        ),
        norm=hidden,
    )
    return Decoder(
        "mamba",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("num_hidden_layers", "n_layer"),
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=hidden,
        prefix="backbone",
        embedding_name="embeddings",
    )


def mamba2(c: Config) -> Decoder:
    """Mamba 2: heads and a larger state."""
    hidden = c.whole("hidden_size")
    inner = int(c.number("expand", default=2) * hidden)
    mixer = Mamba2(
        inner,
        c.whole("state_size"),
        c.whole("num_heads"),
        c.whole("n_groups"),
        c.whole("conv_kernel"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias", default=False),
    )
    layer = Layer((mixer,), norm=hidden)
    return Decoder(
        "mamba2",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=False),
        final_norm=hidden,
        prefix="backbone",
        embedding_name="embeddings",
    )


def jamba(c: Config) -> Decoder:
    """Jamba: one attention layer in eight, the others Mamba; every second a mixture."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    attention = self_attention(c)
    state, rank = c.whole("mamba_d_state"), c.raw("mamba_dt_rank")
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    mixer = Mamba(
        c.whole("mamba_expand") * hidden,
        state,
        rank,
        c.whole("mamba_d_conv"),
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias", default=False),
        norm_params=rank + 2 * state,
        module="mamba",
    )
    mlp = Mlp(c.whole("intermediate_size"), module="feed_forward")
    experts = replace(
        _experts(c, c.whole("num_experts", "num_local_experts"), c.whole("intermediate_size")),
        module="feed_forward",
    )
    attends, a_first = c.whole("attn_layer_period"), c.whole("attn_layer_offset", at_least=0)
    mixes, e_first = c.whole("expert_layer_period"), c.whole("expert_layer_offset", at_least=0)
    layers = [
        Layer(
            (attention if number % attends == a_first else mixer,),
            experts if number % mixes == e_first and experts.held > 1 else mlp,
            norm=hidden,
            feed_norm=hidden,
        )
        for number in range(count)
    ]
    return _like_llama(c, "jamba", layers, tied=False)


def _mamba2_of(c: Config, *, module: str, bias: bool = False) -> Mamba2:
    """Mamba-2 as the hybrids write it."""
    hidden = c.whole("hidden_size")
    heads = c.whole("mamba_n_heads")
    head_dim = c.raw("mamba_d_head")
    inner = c.maybe("mamba_d_ssm") or (
        heads * head_dim if isinstance(head_dim, int) else c.whole("mamba_expand") * hidden
    )
    return Mamba2(
        inner,
        c.whole("mamba_d_state"),
        heads,
        c.whole("mamba_n_groups"),
        c.whole("mamba_d_conv"),
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias", default=bias),
        module=module,
    )


def bamba(c: Config) -> Decoder:
    """Bamba: Mamba-2 layers with a few of attention, each with a feed-forward."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    attends = c.raw("attn_layer_indices") or []
    kinds = c.names("layers_block_type") or [
        "attention" if number in attends else "mamba" for number in range(count)
    ]
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = _mamba2_of(c, module="mamba")
    mlp = Mlp(c.whole("intermediate_size"), module="feed_forward")
    layers = [
        Layer((attention if kind == "attention" else mixer,), mlp, norm=hidden, feed_norm=hidden)
        for kind in kinds
    ]
    return _like_llama(c, "bamba", layers, tied=False)


def falcon_h1(c: Config) -> Decoder:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    hidden = c.whole("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = replace(_mamba2_of(c, module="mamba"), has_norm=c.flag("mamba_rms_norm", default=False))
    mlp = Mlp(c.whole("intermediate_size"), module="feed_forward")
    layer = Layer((mixer, attention), mlp, norm=hidden, feed_norm=hidden)
    return _like_llama(c, "falcon_h1", [layer] * c.whole("num_hidden_layers"), tied=False)


def granite_hybrid(c: Config) -> Decoder:
    """Granite 4: Mamba-2 and attention layers, each with experts and a shared feed-forward."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    kinds = c.names("layer_types", "layers_block_type") or ["mamba"] * count
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = _mamba2_of(c, module="mamba")
    shared = c.whole("shared_intermediate_size")
    held = c.whole("num_local_experts", default=0, at_least=0)
    feed: Mlp | Experts = Mlp(shared, module="shared_mlp", fused="input_linear")
    if held:
        feed = _experts(
            c, held, c.whole("intermediate_size"), shared_size=shared, module="block_sparse_moe"
        )
    layers = [
        Layer((attention if kind == "attention" else mixer,), feed, norm=hidden, feed_norm=hidden)
        for kind in kinds
    ]
    return _like_llama(c, "granitemoehybrid", layers, tied=True)


DECODERS: dict[str, Callable[[Config], Decoder]] = {
    "llama": llama,
    "mistral": mistral,
    "ministral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi": phi,
    "phi3": phi3,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "falcon": falcon,
    "mpt": mpt,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "granite": llama,
    "smollm3": llama,
    "helium": llama,
    "cohere": cohere,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "gpt_oss": gpt_oss,
    "granitemoe": granite_moe,
    "olmoe": olmoe,
    "llama4_text": llama4,
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid,
}
