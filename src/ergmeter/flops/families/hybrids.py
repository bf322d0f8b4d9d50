"""Readers of state-space and linear-attention models, and of hybrids with attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.families.llamas import (
    dense_or_experts,
    every_nth_full,
    experts_of,
    layer_kinds,
    like_llama,
    qwen3_full,
    self_attention,
    variant,
    with_qk_norms,
)
from ergmeter.flops.families.mixtures import latent_attention, mixtral
from ergmeter.flops.graph.layers import (
    Decoder,
    DeltaNet,
    Experts,
    Layer,
    Mamba,
    Mamba2,
    Mlp,
    Piece,
    Recurrent,
)

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig


def qwen3_next(c: ModelConfig) -> Decoder:
    """Qwen3-Next: three layers of gated linear attention to one of gated attention."""
    base = qwen3_full(c)
    count = len(base.layers)
    every = c.integer("full_attention_interval", default=4)
    kinds = layer_kinds(c, count, every_nth_full(every, "linear_attention"))
    linear = DeltaNet(
        c.integer("linear_num_key_heads"),
        c.integer("linear_num_value_heads"),
        c.integer("linear_key_head_dim"),
        c.integer("linear_value_head_dim"),
        c.integer("linear_conv_kernel_dim"),
    )
    experts = experts_of(
        c,
        c.integer("num_experts", "num_local_experts"),
        c.integer("moe_intermediate_size"),
        shared_size=c.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    base = variant(base, "qwen3_next", attention={"is_gated": True})
    layers = tuple(
        replace(layer, mixers=(linear,)) if kind == "linear_attention" else layer
        for layer, kind in zip(base.layers, kinds, strict=True)
    )
    base = replace(base, layers=layers)
    return replace(base, layers=dense_or_experts(c, base, experts))


def mamba(c: ModelConfig) -> Decoder:
    """Mamba: nothing but state-space layers."""
    hidden = c.integer("hidden_size", "d_model")
    inner = c.maybe("intermediate_size") or c.share("expand", hidden, default=2)
    layer = Layer(
        (
            Mamba(
                inner,
                c.integer("state_size"),
                c.integer_or_auto("time_step_rank") or -(-hidden // 16),
                c.integer("conv_kernel"),
                conv_bias=c.flag("use_conv_bias", default=True),
                proj_bias=c.flag("use_bias", default=False),
            ),
        ),
        norm=hidden,
    )
    return Decoder(
        "mamba",
        hidden,
        c.integer("vocab_size"),
        (layer,) * c.integer("num_hidden_layers", "n_layer"),
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=hidden,
        prefix="backbone",
        embedding_name="embeddings",
    )


def mamba2(c: ModelConfig) -> Decoder:
    """Mamba 2: heads and a larger state."""
    hidden = c.integer("hidden_size")
    inner = c.share("expand", hidden, default=2)
    mixer = Mamba2(
        inner,
        c.integer("state_size"),
        c.integer("num_heads"),
        c.integer("n_groups"),
        c.integer("conv_kernel"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias", default=False),
    )
    layer = Layer((mixer,), norm=hidden)
    return Decoder(
        "mamba2",
        hidden,
        c.integer("vocab_size"),
        (layer,) * c.integer("num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=False),
        final_norm=hidden,
        prefix="backbone",
        embedding_name="embeddings",
    )


def jamba(c: ModelConfig) -> Decoder:
    """Jamba: one attention layer in eight, the others Mamba; every second a mixture."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    attention = self_attention(c)
    state, rank = c.integer("mamba_d_state"), c.integer_or_auto("mamba_dt_rank") or -(-hidden // 16)
    mixer = Mamba(
        c.integer("mamba_expand") * hidden,
        state,
        rank,
        c.integer("mamba_d_conv"),
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias", default=False),
        norm_params=rank + 2 * state,
        module="mamba",
    )
    mlp = Mlp(c.integer("intermediate_size"), module="feed_forward")
    experts = replace(
        experts_of(
            c, c.integer("num_experts", "num_local_experts"), c.integer("intermediate_size")
        ),
        module="feed_forward",
    )
    attends, a_first = c.integer("attn_layer_period"), c.integer("attn_layer_offset", at_least=0)
    mixes, e_first = c.integer("expert_layer_period"), c.integer("expert_layer_offset", at_least=0)
    layers = [
        Layer(
            (attention if number % attends == a_first else mixer,),
            experts if number % mixes == e_first and experts.count > 1 else mlp,
            norm=hidden,
            feed_norm=hidden,
        )
        for number in range(count)
    ]
    return like_llama(c, "jamba", layers, tied=False)


def mamba2_of(c: ModelConfig, *, module: str, bias: bool = False) -> Mamba2:
    """Mamba-2 as the hybrids write it."""
    hidden = c.integer("hidden_size")
    heads = c.integer("mamba_n_heads")
    head_dim = c.integer_or_auto("mamba_d_head")
    inner = c.maybe("mamba_d_ssm") or (
        heads * head_dim if head_dim else c.integer("mamba_expand") * hidden
    )
    return Mamba2(
        inner,
        c.integer("mamba_d_state"),
        heads,
        c.integer("mamba_n_groups"),
        c.integer("mamba_d_conv"),
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias", default=bias),
        module=module,
    )


_ATTENDS = ("attention", "full_attention")  # before transformers 5, and since


def bamba(c: ModelConfig) -> Decoder:
    """Bamba: Mamba-2 layers with a few of attention, each with a feed-forward."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    attends = c.integers("attn_layer_indices") or []
    kinds = layer_kinds(
        c,
        count,
        lambda number: "attention" if number in attends else "mamba",
        names=("layers_block_type",),
    )
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = mamba2_of(c, module="mamba")
    mlp = Mlp(c.integer("intermediate_size"), module="feed_forward")
    layers = [
        Layer((attention if kind in _ATTENDS else mixer,), mlp, norm=hidden, feed_norm=hidden)
        for kind in kinds
    ]
    return like_llama(c, "bamba", layers, tied=False)


def falcon_h1(c: ModelConfig) -> Decoder:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    hidden = c.integer("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = replace(mamba2_of(c, module="mamba"), has_norm=c.flag("mamba_rms_norm", default=False))
    mlp = Mlp(c.integer("intermediate_size"), module="feed_forward")
    layer = Layer((mixer, attention), mlp, norm=hidden, feed_norm=hidden)
    return like_llama(c, "falcon_h1", [layer] * c.integer("num_hidden_layers"), tied=False)


def granite_hybrid(c: ModelConfig) -> Decoder:
    """Granite 4: Mamba-2 and attention layers, each with experts and a shared feed-forward."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    names = ("layer_types", "layers_block_type")
    kinds = layer_kinds(c, count, lambda _number: "mamba", names=names)
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = mamba2_of(c, module="mamba")
    shared = c.integer("shared_intermediate_size")
    experts_count = c.integer("num_local_experts", default=0, at_least=0)
    feed: Mlp | Experts = Mlp(shared, module="shared_mlp", fused="input_linear")
    if experts_count:
        feed = experts_of(
            c,
            experts_count,
            c.integer("intermediate_size"),
            shared_size=shared,
            module="block_sparse_moe",
        )
    layers = [
        Layer((attention if kind in _ATTENDS else mixer,), feed, norm=hidden, feed_norm=hidden)
        for kind in kinds
    ]
    return like_llama(c, "granitemoehybrid", layers, tied=True)


def qwen3_5(c: ModelConfig) -> Decoder:
    """Qwen 3.5: three layers of gated linear attention to one of gated attention, dense or not."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    every = c.integer("full_attention_interval", default=4)
    kinds = layer_kinds(c, count, every_nth_full(every, "linear_attention"))
    c.integer("head_dim")
    has_bias = c.flag("attention_bias", default=False)
    attention = replace(with_qk_norms(self_attention(c, bias=has_bias)), is_gated=True)
    linear = DeltaNet(
        c.integer("linear_num_key_heads"),
        c.integer("linear_num_value_heads"),
        c.integer("linear_key_head_dim"),
        c.integer("linear_value_head_dim"),
        c.integer("linear_conv_kernel_dim"),
    )
    feed: Mlp | Experts
    if "moe_intermediate_size" in c:
        feed = experts_of(
            c,
            c.integer("num_experts", "num_local_experts"),
            c.integer("moe_intermediate_size"),
            shared_size=c.integer("shared_expert_intermediate_size"),
            has_shared_gate=True,
        )
    else:
        feed = Mlp(c.integer("intermediate_size"))
    layers = [
        Layer(
            (linear if kind == "linear_attention" else attention,),
            feed,
            norm=hidden,
            feed_norm=hidden,
        )
        for kind in kinds
    ]
    return like_llama(c, c.model_type, layers, tied=False)


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(c: ModelConfig) -> Decoder:
    """Nemotron-H and Nemotron 3: each layer one thing, Mamba-2, attention or a feed-forward."""
    hidden = c.integer("hidden_size")
    kinds = c.names("layers_block_type", "layer_types")
    if kinds is None:
        pattern = c.word("hybrid_override_pattern") or ""
        if not pattern or set(pattern) - set(_NEMOTRON_LETTERS):
            raise FormatError(
                f"{c.where}: the field layers_block_type (or hybrid_override_pattern, of the"
                f" letters {' '.join(_NEMOTRON_LETTERS)}) is missing; add it"
            )
        kinds = [_NEMOTRON_LETTERS[letter] for letter in pattern]
    count = c.integer("num_hidden_layers", default=len(kinds))
    if count != len(kinds):
        raise FormatError(
            f"{c.where}: num_hidden_layers is {count}, and {len(kinds)} layers are listed"
        )
    layers = [_nemotron_layer(c, kind, hidden) for kind in kinds]
    base = like_llama(c, "nemotron_h", layers, tied=False)
    return replace(base, embedding_name="embeddings")


def _nemotron_layer(c: ModelConfig, kind: str, hidden: int) -> Layer:
    names = ("up_proj", "down_proj")
    if kind in ("attention", "full_attention"):
        c.integer("head_dim")
        attention = self_attention(c, bias=c.flag("attention_bias", default=False))
        return Layer((replace(attention, module="mixer"),), norm=hidden)
    if kind in ("mamba", "linear_attention"):
        heads = c.integer("mamba_num_heads")
        mixer = Mamba2(
            heads * c.integer("mamba_head_dim"),
            c.integer("ssm_state_size"),
            heads,
            c.integer("n_groups", "mamba_n_groups"),
            c.integer("conv_kernel", "mamba_d_conv"),
            conv_bias=c.flag("use_conv_bias", "mamba_conv_bias", default=True),
            proj_bias=c.flag("mamba_proj_bias", default=False),
        )
        return Layer((mixer,), norm=hidden)
    if kind == "mlp":
        has_bias = c.flag("mlp_bias", default=False)
        mlp = Mlp(c.integer("intermediate_size"), is_gated=False, bias=has_bias, names=names)
        return Layer((), replace(mlp, module="mixer"), feed_norm=hidden)
    if kind != "moe" or "moe_latent_size" in c:
        what = "moe_latent_size" if kind == "moe" else f"a layer of the kind {kind!r}"
        raise FormatError(f"{c.where}: {what} can't be read")
    experts = experts_of(
        c,
        c.integer("n_routed_experts"),
        c.integer("moe_intermediate_size"),
        is_gated=False,
        shared_size=c.integer("moe_shared_expert_intermediate_size"),
        module="mixer",
    )
    return Layer((), experts, feed_norm=hidden)


def lfm2(c: ModelConfig) -> Decoder:
    """LFM2: short gated convolutions, and attention in some layers."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    attends = c.integers("full_attn_idxs") or list(range(count))
    kinds = layer_kinds(c, count, lambda number: "full_attention" if number in attends else "conv")
    size = c.integer("block_ff_dim", "intermediate_size")
    if c.flag("block_auto_adjust_ff_dim", default=True):
        size = int(2 * size / 3)
        if "block_ffn_dim_multiplier" in c:
            multiple = c.integer("block_multiple_of", default=256)
            size = -(-c.share("block_ffn_dim_multiplier", size) // multiple) * multiple
    mlp = Mlp(size, names=("w1", "w3", "w2"), module="feed_forward")
    return _lfm2(c, hidden, [(kind, mlp) for kind in kinds])


def lfm2_moe(c: ModelConfig) -> Decoder:
    """LFM2 with mixtures above the first layers."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    kinds = c.names("layer_types")
    if kinds is None:
        raise FormatError(f"{c.where}: the field layer_types is missing; add it")
    kinds = layer_kinds(c, count)
    mlp = Mlp(c.integer("intermediate_size"), names=("w1", "w3", "w2"), module="feed_forward")
    size = c.integer("moe_intermediate_size")
    experts = experts_of(c, c.integer("num_experts"), size, module="feed_forward")
    first = c.integer("num_dense_layers", at_least=0)
    feeds = [mlp if number < first else experts for number in range(count)]
    return _lfm2(c, hidden, list(zip(kinds, feeds, strict=True)))


def _lfm2(c: ModelConfig, hidden: int, layers: list[tuple[str, Mlp | Experts]]) -> Decoder:
    attention = with_qk_norms(self_attention(c))
    attention = replace(attention, names=("q_proj", "k_proj", "v_proj", "out_proj"))
    bias = c.flag("conv_bias", default=False)
    conv = Recurrent(
        (Piece("in_proj", hidden, 3 * hidden, bias),),
        Piece("out_proj", hidden, hidden, bias),
        part="short conv",
        module="conv",
        conv=hidden,
        conv_of=("in_proj",),
        conv_width=c.integer("conv_L_cache"),
        conv_bias=bias,
    )
    base = like_llama(
        c,
        c.model_type,
        [
            Layer((conv if kind == "conv" else attention,), feed, norm=hidden, feed_norm=hidden)
            for kind, feed in layers
        ],
        tied=True,
    )
    return replace(base, is_tied=c.flag("tie_embedding", "tie_word_embeddings", default=True))


def minimax(c: ModelConfig) -> Decoder:
    """MiniMax-01 and M1: linear attention without softmax, and attention in some layers."""
    base = mixtral(c)
    hidden, count = base.hidden, len(base.layers)
    kinds = layer_kinds(
        c, count, lambda number: "linear_attention" if number % 2 else "full_attention"
    )
    plain = self_attention(c)
    inner, state = plain.heads * plain.head_dim, plain.heads * plain.head_dim**2
    lightning = Recurrent(
        (Piece("qkv_proj", hidden, 3 * inner), Piece("output_gate", hidden, inner)),
        Piece("out_proj", inner, hidden),
        part="linear attention",
        module="self_attn",
        scan=5 * state,  # it decays, a product is added, a query reads it
        state=state,
        norm=inner,
    )
    layers = tuple(
        replace(layer, mixers=(lightning,)) if kind == "linear_attention" else layer
        for layer, kind in zip(base.layers, kinds, strict=True)
    )
    return replace(base, family="minimax", layers=layers)


def recurrent_gemma(c: ModelConfig) -> Decoder:
    """RecurrentGemma: gated linear recurrences (arXiv 2402.19427), every third layer attention."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    count = c.integer("num_hidden_layers")
    pattern = c.names("block_types") or ["recurrent", "recurrent", "attention"]
    if not pattern:
        raise FormatError(f"{c.where}: block_types is empty")
    wide = c.integer("lru_width", default=hidden)
    if wide % heads:
        raise FormatError(
            f"{c.where}: lru_width {wide} is no multiple of num_attention_heads {heads}"
        )
    bias = c.flag("attention_bias", default=False)
    attention = replace(
        self_attention(c, bias=bias),
        out_bias=True,
        window=c.integer("attention_window_size"),
        module="temporal_block",
    )
    # Its gates are block diagonal: a square for each head.
    gates = tuple(
        Piece(f"rg_lru.{name}", wide // heads, wide, bias=True, of="conv", is_module=False)
        for name in ("input_gate", "recurrent_gate")
    )
    recurrence = Recurrent(
        (Piece("linear_y", hidden, wide, True), Piece("linear_x", hidden, wide, True), *gates),
        Piece("linear_out", wide, hidden, True),
        part="recurrence",
        module="temporal_block",
        conv=wide,
        conv_of=("linear_x",),
        conv_width=c.integer("conv1d_width"),
        conv_bias=True,
        scan=6 * wide,
        state=wide,
        scan_params=wide,
    )
    mlp = Mlp(c.integer("intermediate_size") // 2, bias=True, module="mlp_block")
    layers = [
        Layer(
            (attention if pattern[number % len(pattern)] == "attention" else recurrence,),
            mlp,
            norm=hidden,
            feed_norm=hidden,
        )
        for number in range(count)
    ]
    return like_llama(c, "recurrent_gemma", layers, tied=True)


def kimi_linear(c: ModelConfig) -> Decoder:
    """Kimi Linear: delta attention with a decay for each channel; some layers latent attention."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    linear = c.part("linear_attn_config") if "linear_attn_config" in c else c
    attends = linear.integers("full_attn_layers")  # counted from 1

    def kind(number: int) -> str:
        is_full = number + 1 in attends if attends is not None else number and number % 4 == 0
        return "full_attention" if is_full else "linear_attention"

    kinds = layer_kinds(c, count, kind)
    first = c.integer("first_k_dense_replace", default=1, at_least=0)
    feeds = layer_kinds(
        c, count, lambda n: "dense" if n < first else "sparse", names=("mlp_layer_types",)
    )
    size = c.integer("moe_intermediate_size")
    experts = experts_of(
        c,
        c.integer("num_experts", "num_local_experts"),
        size,
        shared_size=c.integer("num_shared_experts", "n_shared_experts", at_least=0) * size,
    )
    mlp = Mlp(c.integer("intermediate_size"))
    full, delta = latent_attention(c), _kimi_delta(c, linear, hidden)
    layers = [
        Layer(
            (full if mixer == "full_attention" else delta,),
            mlp if feed == "dense" else experts,
            norm=hidden,
            feed_norm=hidden,
        )
        for mixer, feed in zip(kinds, feeds, strict=True)
    ]
    return like_llama(c, "kimi_linear", layers, tied=False)


def _kimi_delta(c: ModelConfig, linear: ModelConfig, hidden: int) -> Recurrent:
    dim = linear.maybe("head_dim") if linear is not c else None
    heads = linear.maybe("num_heads") if linear is not c else None
    width = linear.maybe("short_conv_kernel_size") if linear is not c else None
    dim, heads = dim or c.integer("linear_head_dim"), heads or c.integer("linear_num_heads")
    inner, state = heads * dim, heads * dim * dim
    return Recurrent(
        (
            Piece("q_proj", hidden, inner),
            Piece("k_proj", hidden, inner),
            Piece("v_proj", hidden, inner),
            Piece("forget_gate.f_a_proj", hidden, dim),
            Piece("forget_gate.f_b_proj", dim, inner, of="forget_gate.f_a_proj"),
            Piece("b_proj", hidden, heads),
            Piece("g_a_proj", hidden, dim),
            Piece("g_b_proj", dim, inner, of="g_a_proj"),
        ),
        Piece("o_proj", inner, hidden),
        part="linear attention",
        module="self_attn",
        conv=3 * inner,
        conv_of=("q_proj", "k_proj", "v_proj"),
        conv_width=width or c.integer("linear_conv_kernel_dim"),
        scan=8 * state,
        state=state,
        scan_params=inner + heads,
        norm=dim,
    )
