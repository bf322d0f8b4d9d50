"""Readers of hybrid decoders: state spaces, linear attention, and layers that differ in width.

Gemma 3n and 4 are here too. A second embedding table gives every layer a small input per token.
Upper layers reuse the keys and values of lower ones. Layers with a window and layers without one
differ in their head sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, repeat
from typing import Any

from ergmeter.errors import FormatError
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.families.decoders import MIXTRAL
from ergmeter.flops.families.pieces import (
    QWEN_SHARED_EXPERTS,
    RoutedExperts,
    check_listed,
    each_layer,
    every_nth_full,
    latent_attention,
    layer_kinds,
    like_llama,
    self_attention,
    sparse_steps,
    windows_of,
    with_qk_norms,
)
from ergmeter.flops.graph.layers import (
    AttentionLayer,
    Decoder,
    Experts,
    Layer,
    Mamba,
    Mixer,
    Mlp,
    Piece,
    Recurrent,
)


def _layers(
    hidden: int, mixers: Iterable[Mixer], feeds: Iterable[Mlp | Experts]
) -> tuple[Layer, ...]:
    """Return layers of a mixer and a feed-forward, with a norm before each of the two."""
    return tuple(
        Layer((mixer,), feed, norm=hidden, feed_norm=hidden)
        for mixer, feed in zip(mixers, feeds, strict=False)
    )


def _delta_net(c: ModelConfig, hidden: int) -> Recurrent:
    """Return a Gated DeltaNet mixer: linear attention with the delta rule (arXiv 2412.06464)."""
    key_heads, heads = c.integer("linear_num_key_heads"), c.integer("linear_num_value_heads")
    key_dim, value_dim = c.integer("linear_key_head_dim"), c.integer("linear_value_head_dim")
    # Each value head has a state of key_dim x value_dim. FLOPs: the key reads it, the delta rule
    # corrects it, the query reads it.
    values, state = heads * value_dim, heads * key_dim * value_dim
    channels = 2 * key_heads * key_dim + values
    qkvz = Piece("in_proj_qkvz", hidden, channels + values)
    return Recurrent(
        (qkvz, Piece("in_proj_ba", hidden, 2 * heads)),
        Piece("out_proj", values, hidden),
        part="linear attention",
        module="linear_attn",
        conv=channels,
        conv_of=(qkvz.name,),
        conv_width=c.integer("linear_conv_kernel_dim"),
        scan=8 * state,
        state=state,
        scan_params=2 * heads,
        scan_of=("conv", "in_proj_ba"),
        norm=value_dim,
        norm_of=qkvz.name,
    )


def qwen3_next(c: ModelConfig) -> Decoder:
    """Qwen3-Next and 3.5: three layers of gated linear attention to one of gated attention."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    every = c.integer("full_attention_interval", default=4)
    kinds = layer_kinds(c, count, every_nth_full(every, "linear_attention"))
    c.integer("head_dim")
    has_bias = c.flag("attention_bias", default=False)
    attention = replace(with_qk_norms(self_attention(c, bias=has_bias)), is_gated=True)
    linear = _delta_net(c, hidden)
    mixers = [linear if kind == "linear_attention" else attention for kind in kinds]
    is_mixture = "moe_intermediate_size" in c
    experts = QWEN_SHARED_EXPERTS.read(c) if is_mixture else None
    sparse = sparse_steps(c, count) if is_mixture else ()
    feeds = (
        experts if experts and number in sparse else Mlp(c.integer("intermediate_size"))
        for number in range(count)
    )
    return like_llama(c, c.model_type, _layers(hidden, mixers, feeds))


def mamba(c: ModelConfig) -> Decoder:
    """Mamba: state-space layers only."""
    hidden = c.integer("hidden_size", "d_model")
    inner = c.maybe("intermediate_size") or c.share("expand", hidden, default=2)
    mixer = Mamba(
        inner,
        c.integer("state_size"),
        c.integer_or_auto("time_step_rank") or -(-hidden // 16),
        c.integer("conv_kernel"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias", default=False),
    )
    return _state_space(c, "mamba", hidden, mixer, tied=True)


def mamba2(c: ModelConfig) -> Decoder:
    """Mamba-2: state-space layers only, with heads and a larger state than Mamba's."""
    hidden = c.integer("hidden_size")
    mixer = _mamba2(c, c.share("expand", hidden, default=2), "use_bias", "mixer")
    return _state_space(c, "mamba2", hidden, mixer, tied=False)


def _mamba2(c: ModelConfig, inner: int, bias: str, module: str) -> Recurrent:
    """Return a Mamba-2 mixer (arXiv 2405.21060); sizes are read under any family's field names."""
    hidden = c.integer("hidden_size")
    state = c.integer("state_size", "ssm_state_size", "mamba_d_state")
    heads = c.integer("num_heads", "mamba_num_heads", "mamba_n_heads")
    channels = inner + 2 * c.integer("n_groups", "mamba_n_groups") * state
    width = c.integer("conv_kernel", "mamba_d_conv")
    conv_bias = c.flag("use_conv_bias", "mamba_conv_bias", default=True)
    proj_bias = c.flag(bias, default=False)
    return Recurrent(
        (Piece("in_proj", hidden, inner + channels + heads, proj_bias),),
        Piece("out_proj", inner, hidden, proj_bias),
        part="mamba",
        module=module,
        conv=channels,
        conv_of=("in_proj",),
        conv_width=width,
        conv_bias=conv_bias,
        scan=7 * inner * state,
        state=inner * state,
        scan_params=3 * heads,
        scan_of=("conv", "in_proj"),
        norm=inner,
        norm_of="in_proj",
    )


def _state_space(c: ModelConfig, family: str, hidden: int, mixer: Mixer, *, tied: bool) -> Decoder:
    """Return a decoder whose layers are all `mixer`, with no feed-forward."""
    vocab, count = c.integer("vocab_size"), c.integer("num_hidden_layers", "n_layer")
    layers = (Layer((mixer,), norm=hidden),) * count
    is_tied = c.flag("tie_word_embeddings", default=tied)
    base = Decoder(family, hidden, vocab, layers, is_tied, final_norm=hidden)
    return replace(base, prefix="backbone", embedding_name="embeddings")


def jamba(c: ModelConfig) -> Decoder:
    """Jamba: by default 1 attention layer in 8, the others Mamba; every second layer a mixture."""
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
    experts = RoutedExperts(("num_experts", "num_local_experts"), module="feed_forward").read(c)
    attends, a_first = c.integer("attn_layer_period"), c.integer("attn_layer_offset", at_least=0)
    mixes, e_first = c.integer("expert_layer_period"), c.integer("expert_layer_offset", at_least=0)
    mixers = [attention if n % attends == a_first else mixer for n in range(count)]
    has_experts = [n % mixes == e_first and experts.count > 1 for n in range(count)]
    feeds = [experts if has else mlp for has in has_experts]
    return like_llama(c, "jamba", _layers(hidden, mixers, feeds))


def mamba2_of(c: ModelConfig) -> Recurrent:
    """Return the Mamba-2 mixer of a hybrid model, whose size fields start with `mamba_`."""
    hidden, heads = c.integer("hidden_size"), c.integer("mamba_n_heads")
    head_dim = c.integer_or_auto("mamba_d_head")
    inner = c.maybe("mamba_d_ssm") or (head_dim or 0) * heads or c.integer("mamba_expand") * hidden
    return _mamba2(c, inner, "mamba_proj_bias", "mamba")


_ATTENDS = ("attention", "full_attention")  # the name before transformers 5, and the new name


def bamba(c: ModelConfig) -> Decoder:
    """Bamba: Mamba-2 layers and a few attention layers, each with a feed-forward."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    attends = c.integers("attn_layer_indices") or []

    def kind(number: int) -> str:
        return "attention" if number in attends else "mamba"

    kinds = layer_kinds(c, count, kind, names=("layers_block_type",))
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = mamba2_of(c)
    mlp = Mlp(c.integer("intermediate_size"), module="feed_forward")
    mixers = [attention if kind in _ATTENDS else mixer for kind in kinds]
    return like_llama(c, "bamba", _layers(hidden, mixers, repeat(mlp)))


def falcon_h1(c: ModelConfig) -> Decoder:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    hidden = c.integer("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = mamba2_of(c)
    if not c.flag("mamba_rms_norm", default=False):
        mixer = replace(mixer, norm=0)
    mlp = Mlp(c.integer("intermediate_size"), module="feed_forward")
    layer = Layer((mixer, attention), mlp, norm=hidden, feed_norm=hidden)
    return like_llama(c, "falcon_h1", [layer] * c.integer("num_hidden_layers"))


def granite_hybrid(c: ModelConfig) -> Decoder:
    """Granite 4: Mamba-2 and attention layers, each with experts and a shared feed-forward."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    names = ("layer_types", "layers_block_type")
    kinds = layer_kinds(c, count, lambda _number: "mamba", names=names)
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = mamba2_of(c)
    shared = c.integer("shared_intermediate_size")
    feed: Mlp | Experts = Mlp(shared, module="shared_mlp", fused="input_linear")
    if c.integer("num_local_experts", default=0, at_least=0):
        feed = replace(RoutedExperts(module="block_sparse_moe").read(c), shared_size=shared)
    mixers = [attention if kind in _ATTENDS else mixer for kind in kinds]
    return like_llama(c, "granitemoehybrid", _layers(hidden, mixers, repeat(feed)), tied=True)


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(c: ModelConfig) -> Decoder:
    """Nemotron-H and Nemotron 3: each layer is only Mamba-2, attention or a feed-forward."""
    hidden = c.integer("hidden_size")
    name, kinds = "layers_block_type", c.names("layers_block_type", "layer_types")
    if kinds is None:
        pattern = c.word("hybrid_override_pattern") or ""
        if not pattern or set(pattern) - set(_NEMOTRON_LETTERS):
            raise FormatError(
                f"{c.where}: the field layers_block_type (or hybrid_override_pattern, of the"
                f" letters {' '.join(_NEMOTRON_LETTERS)}) is missing; add it"
            )
        name = "hybrid_override_pattern"
        kinds = [_NEMOTRON_LETTERS[letter] for letter in pattern]
    check_listed(c, name, kinds, c.integer("num_hidden_layers", default=len(kinds)))
    base = like_llama(c, "nemotron_h", [_nemotron_layer(c, kind, hidden) for kind in kinds])
    return replace(base, embedding_name="embeddings")


def _nemotron_layer(c: ModelConfig, kind: str, hidden: int) -> Layer:
    names = ("up_proj", "down_proj")
    if kind in ("attention", "full_attention"):
        c.integer("head_dim")
        attention = self_attention(c, bias=c.flag("attention_bias", default=False))
        return Layer((replace(attention, module="mixer"),), norm=hidden)
    if kind in ("mamba", "linear_attention"):
        inner = c.integer("mamba_num_heads") * c.integer("mamba_head_dim")
        return Layer((_mamba2(c, inner, "mamba_proj_bias", "mixer"),), norm=hidden)
    if kind == "mlp":
        has_bias = c.flag("mlp_bias", default=False)
        mlp = Mlp(c.integer("intermediate_size"), is_gated=False, bias=has_bias, names=names)
        return Layer((), replace(mlp, module="mixer"), feed_norm=hidden)
    if kind != "moe" or "moe_latent_size" in c:
        what = "moe_latent_size" if kind == "moe" else f"a layer of the kind {kind!r}"
        raise FormatError(f"{c.where}: {what} is not supported")
    experts = RoutedExperts(
        ("n_routed_experts",),
        ("moe_intermediate_size",),
        shared_size=("moe_shared_expert_intermediate_size",),
        is_gated=False,
        module="mixer",
    )
    return Layer((), experts.read(c), feed_norm=hidden)


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
    return _lfm2(c, hidden, kinds, repeat(mlp))


def lfm2_moe(c: ModelConfig) -> Decoder:
    """LFM2-MoE: the first layers are dense, the others mixtures."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    if c.names("layer_types") is None:
        raise FormatError(f"{c.where}: the field layer_types is missing; add it")
    kinds = layer_kinds(c, count)
    mlp = Mlp(c.integer("intermediate_size"), names=("w1", "w3", "w2"), module="feed_forward")
    experts = RoutedExperts(("num_experts",), ("moe_intermediate_size",), module="feed_forward")
    feed, first = experts.read(c), c.integer("num_dense_layers", at_least=0)
    return _lfm2(c, hidden, kinds, [mlp if n < first else feed for n in range(count)])


def _lfm2(
    c: ModelConfig, hidden: int, kinds: Sequence[str], feeds: Iterable[Mlp | Experts]
) -> Decoder:
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
    mixers = [conv if kind == "conv" else attention for kind in kinds]
    base = like_llama(c, c.model_type, _layers(hidden, mixers, feeds), tied=True)
    return replace(base, is_tied=c.flag("tie_embedding", "tie_word_embeddings", default=True))


def minimax(c: ModelConfig) -> Decoder:
    """MiniMax-01 and M1: linear attention without softmax, and attention in some layers."""
    base = MIXTRAL(c)
    hidden, count = base.hidden, len(base.layers)
    kinds = layer_kinds(c, count, lambda n: "linear_attention" if n % 2 else "full_attention")
    plain = self_attention(c)
    inner, state = plain.heads * plain.head_dim, plain.heads * plain.head_dim**2
    lightning = Recurrent(
        (Piece("qkv_proj", hidden, 3 * inner), Piece("output_gate", hidden, inner)),
        Piece("out_proj", inner, hidden),
        part="linear attention",
        module="self_attn",
        scan=5 * state,  # the state decays, key x value is added, the query reads it
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
    wide = c.integer("lru_width", default=hidden)
    if wide % heads:
        raise FormatError(
            f"{c.where}: lru_width {wide} must be a multiple of num_attention_heads {heads}"
        )
    bias = c.flag("attention_bias", default=False)
    attention = replace(
        self_attention(c, bias=bias),
        out_bias=True,
        window=c.integer("attention_window_size"),
        module="temporal_block",
    )
    # The gate matrices are block diagonal: a square block per head.
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
    kinds = islice(cycle(pattern), count)
    mixers = [attention if kind == "attention" else recurrence for kind in kinds]
    return like_llama(c, "recurrent_gemma", _layers(hidden, mixers, repeat(mlp)), tied=True)


def kimi_linear(c: ModelConfig) -> Decoder:
    """Kimi Linear: linear attention (KDA: a decay per channel); some layers latent attention."""
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
    experts = RoutedExperts(
        ("num_experts", "num_local_experts"),
        ("moe_intermediate_size",),
        shared_count=("num_shared_experts", "n_shared_experts"),
    ).read(c)
    mlp = Mlp(c.integer("intermediate_size"))
    full, delta = latent_attention(c), _kimi_delta(c, linear, hidden)
    mixers = [full if mixer == "full_attention" else delta for mixer in kinds]
    layers = _layers(hidden, mixers, [mlp if feed == "dense" else experts for feed in feeds])
    return like_llama(c, "kimi_linear", layers)


def _kimi_delta(c: ModelConfig, linear: ModelConfig, hidden: int) -> Recurrent:
    fields = ("head_dim", "num_heads", "short_conv_kernel_size")
    dim, heads, width = (linear.maybe(name) if linear is not c else None for name in fields)
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


# Gemma 3n and 4.

_SHARED = "cache: layers that reuse another layer's keys and values count as if each stored its own"


def gemma3n(c: ModelConfig) -> Decoder:
    """Gemma 3n: several residual streams; a layer computes one and predicts the others (AltUp)."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    kinds = layer_kinds(c, count, every_nth_full(5))
    first = count - c.integer("num_kv_shared_layers", at_least=0)
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    attentions = list(_sharing([attention] * count, kinds, first, c))
    sizes = each_layer(c, "intermediate_size", count)
    rank, streams = c.integer("laurel_rank"), c.integer("altup_num_inputs")
    beside = (Piece("laurel.linear_left", hidden, rank), Piece("laurel.linear_right", rank, hidden))
    like = _gemma_layer(c, hidden, beside=beside, beside_norm=hidden, streams=streams)
    layers = [
        replace(like, mixers=(each,), feed=Mlp(size))
        for each, size in zip(attentions, sizes, strict=True)
    ]
    return _with_inputs(c, like_llama(c, "gemma3n", layers, tied=True), streams=streams)


def gemma4(c: ModelConfig) -> Decoder:
    """Gemma 4: layers with full attention have wider heads; dense, or dense with experts beside."""
    if c.word("use_bidirectional_attention") == "all":
        raise FormatError(
            f"{c.where}: use_bidirectional_attention is 'all'; a Gemma with bidirectional"
            " attention is not supported"
        )
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    kinds = layer_kinds(c, count, every_nth_full(6))
    kinds[-1] = "full_attention"  # as transformers forces it to be
    shared = c.integer("num_kv_shared_layers", at_least=0)
    first = count - shared
    attentions = list(_sharing(_heads_of_gemma4(c, kinds), kinds, first, c))
    size = c.integer("intermediate_size")
    widens = c.flag("use_double_wide_mlp", default=False) and shared and first > 0
    extra = 3 * hidden if c.flag("enable_moe_block", default=False) else 0
    like = _gemma_layer(c, hidden, extra_params=extra)
    sizes = [size * (2 if widens and number >= first else 1) for number in range(count)]
    layers = [
        replace(like, mixers=(each,), feed=_feed_of_gemma4(c, wide))
        for each, wide in zip(attentions, sizes, strict=True)
    ]
    return _with_inputs(c, like_llama(c, "gemma4", layers, tied=True))


def _gemma_layer(c: ModelConfig, hidden: int, **more: Any) -> Layer:  # noqa: ANN401  fields of a Layer
    """Return a Gemma layer without mixer and feed-forward: its norms, its per-layer input."""
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
    """Return the configurations in `per_layer_config` by layer number; the key "05" is layer 5."""
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
        raise FormatError(f"{c.where}: per_layer_config must be an object of layer number: fields")
    return configs


_GLOBAL_HEAD = 512  # transformers' default for global_head_dim


def _feed_of_gemma4(c: ModelConfig, size: int) -> Mlp | Experts:
    """Return a feed-forward or, in a mixture, experts with the feed-forward as shared expert."""
    if not c.flag("enable_moe_block", default=False):
        return Mlp(size)
    experts = RoutedExperts(("num_experts",), ("moe_intermediate_size",), ("top_k_experts",))
    own = experts.read(c)
    scales = c.integer("hidden_size") + own.count  # of what the router reads, and of each expert
    return replace(own, shared_size=size, router_params=scales)


def _sharing(
    attentions: Sequence[AttentionLayer], kinds: Sequence[str], first: int, c: ModelConfig
) -> Iterator[AttentionLayer]:
    """Yield each attention layer with its window and norms.

    A layer from `first` on reuses the keys of the last layer of its kind below `first`.
    """
    windows = windows_of(kinds, c.integer("sliding_window"))
    for number, each in enumerate(attentions):
        source = None
        if number >= first:
            alike = [earlier for earlier in range(first) if kinds[earlier] == kinds[number]]
            if not alike:
                raise FormatError(
                    f"{c.where}: layer {number} reuses the keys of a {kinds[number]} layer below"
                    f" layer {first}, and there is none; lower num_kv_shared_layers"
                )
            source = alike[-1]
        norms = each.head_dim * (2 if source is None else 1)
        yield replace(each, window=windows[number], norm_params=norms, keys_of=source)


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


READERS: dict[str, Callable[[ModelConfig], Decoder]] = {
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen3_next),
    **dict.fromkeys(("mamba", "falcon_mamba"), mamba),
    "mamba2": mamba2,
    "jamba": jamba,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "minimax": minimax,
    "recurrent_gemma": recurrent_gemma,
    "kimi_linear": kimi_linear,
}
