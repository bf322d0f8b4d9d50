"""Readers of decoders whose layers are all attention layers: a `DecoderFamily` for each family.

A `DecoderFamily` lists how a family differs from Llama: names of config fields, biases, norms,
windows, experts. A few families need a function: it computes one of these values from the
configuration, or changes the decoder in a way that no field describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ergmeter.errors import FormatError
from ergmeter.flops.config import ModelConfig, quoted_value
from ergmeter.flops.families.pieces import (
    QWEN_EXPERTS,
    QWEN_SHARED_EXPERTS,
    Names,
    RoutedExperts,
    Windows,
    after_the_dense,
    but_every,
    check_listed,
    each_layer,
    every_nth_full,
    latent_attention,
    layer_kinds,
    qwen_window,
    self_attention,
    sliding_window,
    windows_of,
    windows_where,
)
from ergmeter.flops.graph.layers import AttentionLayer, Decoder, Experts, Layer, Mlp


class Flag(NamedTuple):
    """A boolean config field, and its default."""

    name: str
    default: bool = False


_ATTENTION_BIAS, _MLP_BIAS = Flag("attention_bias"), Flag("mlp_bias")
_UNTIED = Flag("tie_word_embeddings")  # where the configuration does not say
_TIED = Flag("tie_word_embeddings", default=True)


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """How a family of decoders differs from Llama. The defaults are Llama's."""

    # Names of the config fields that have the sizes.
    hidden: Names = ("hidden_size",)
    heads: Names = ("num_attention_heads",)
    kv_heads: Names = ("num_key_value_heads",)  # none: as many as heads
    head_dim: Names = ("head_dim",)  # none: an even share of the hidden size
    needs_head_dim: bool = False
    size: Names = ("intermediate_size",)  # of the feed-forward
    layers: Names = ("num_hidden_layers",)
    positions: Names = ()  # rows of a table of learned positions
    # Attention.
    qkv_bias: bool | Flag = _ATTENTION_BIAS
    out_bias: bool | Flag | None = None  # None: as qkv_bias
    qk_norms: Literal["none", "head", "all"] = "none"  # a norm per head, or over all heads
    qk_norms_if: Flag | None = None
    has_sinks: bool = False  # attention sinks: a parameter per head
    attention: dict[str, Any] = field(default_factory=dict)  # other fields: names, fused, module
    latent: bool = False
    window: Callable[[ModelConfig], int | None] | None = None  # the same in all layers
    windows: Callable[[ModelConfig, int], Windows] | None = None  # of each layer
    # Feed-forward.
    is_size_optional: bool = False  # without the field: 4 x the hidden size
    mlp_bias: bool | Flag = _MLP_BIAS
    mlp: dict[str, Any] = field(default_factory=dict)
    experts: RoutedExperts | None = None
    # Norms.
    norm: int = 1  # parameters for each channel: 2 with a bias, 0 for a norm without parameters
    norms: Literal["before", "after", "around"] = "before"  # where they are, for each sublayer
    is_parallel: bool | Flag = False  # attention and feed-forward read the same input
    parallel_norms: int = 1
    extra_params: Callable[[ModelConfig, int], int] | None = None  # (config, hidden) -> per layer
    # Embedding and head.
    has_embedding_norm: bool = False
    is_tied: bool | Flag = _UNTIED
    head_bias: bool | Flag = False
    names: dict[str, str] = field(default_factory=dict)  # of modules: prefix, layer_name, ...
    predicts_further: bool = False  # has multi-token prediction layers
    family: str = ""  # the name in results, if not the model_type

    def __call__(self, c: ModelConfig) -> Decoder:
        """Return the decoder that a configuration of this family describes."""
        if self.needs_head_dim:
            c.integer(*self.head_dim)
        window = self.window(c) if self.window else None
        routed = self.experts
        experts = routed.read(c) if routed and not routed.is_optional else None
        hidden = c.integer(*self.hidden)
        attention = latent_attention(c) if self.latent else self._attention(c)
        norm, is_parallel = self.norm * hidden, _is(c, self.is_parallel)
        is_normed_before = self.norms != "after"
        shares_norm = is_parallel and self.parallel_norms == 1
        layer = Layer(
            (replace(attention, window=window),),
            self._mlp(c, hidden),
            norm=norm if is_normed_before else 0,
            feed_norm=norm if is_normed_before and not shares_norm else 0,
            after_norms=() if self.norms == "before" else (norm, norm),
            is_parallel=is_parallel,
            extra_params=self.extra_params(c, hidden) if self.extra_params else 0,
        )
        layers = [layer] * c.integer(*self.layers)
        decoder = Decoder(
            self.family or c.model_type,
            hidden,
            c.integer("vocab_size"),
            (),
            is_tied=_is(c, self.is_tied),
            final_norm=norm,
            embedding_norm=norm if self.has_embedding_norm else 0,
            head_bias=_is(c, self.head_bias),
            positions=c.integer(*self.positions) if self.positions else 0,
            **self.names,  # type: ignore[arg-type]
        )
        if routed and (experts or c.maybe(*routed.count)):
            layers = routed.put_in(c, layers, experts or routed.read(c))
        if self.windows is not None:
            layers = _with_each(layers, "window", self.windows(c, len(layers)))
        decoder = replace(decoder, layers=tuple(layers))
        return _with_further(c, decoder) if self.predicts_further else decoder

    def _attention(self, c: ModelConfig) -> AttentionLayer:
        qkv_bias = _is(c, self.qkv_bias)
        out_bias = qkv_bias if self.out_bias is None else _is(c, self.out_bias)
        a = self_attention(
            c, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim
        )
        if self.qk_norms_if is None or _is(c, self.qk_norms_if):
            normed = {"none": 0, "head": 2, "all": a.heads + a.kv_heads}[self.qk_norms]
            a = replace(a, norm_params=normed * a.head_dim * self.norm)
        a = replace(a, q_bias=qkv_bias, kv_bias=qkv_bias, out_bias=out_bias)
        return replace(a, extra_params=a.heads if self.has_sinks else 0, **self.attention)

    def _mlp(self, c: ModelConfig, hidden: int) -> Mlp:
        default = 4 * hidden if self.is_size_optional else None
        size = c.integer(*self.size, default=default) if self.size else 4 * hidden
        return replace(Mlp(size), **{"bias": _is(c, self.mlp_bias), **self.mlp})


def _is(c: ModelConfig, value: bool | Flag) -> bool:
    return c.flag(value.name, default=value.default) if isinstance(value, Flag) else value


def _with_each(layers: Sequence[Layer], name: str, values: Sequence[int | None]) -> list[Layer]:
    """Return the layers with the attention field `name` set to one of `values` in each."""
    changes: list[dict[str, Any]] = [{name: value} for value in values]
    return [
        replace(layer, mixers=tuple(replace(mixer, **change) for mixer in layer.mixers))
        for layer, change in zip(layers, changes, strict=True)
    ]


def _with_further(c: ModelConfig, base: Decoder) -> Decoder:
    """Return the decoder with its multi-token prediction layers, if the configuration counts them.

    transformers does not build these layers. `mtp_num_layers`, Megatron's field, counts them.
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


# Rules of single families: which layers have a window.


def _qwen2_windows(c: ModelConfig, layers: int) -> Windows:
    """If windows are on: Qwen2's upper layers have one, Qwen2-MoE's even layers below those."""
    window = qwen_window(c)
    if window is None:
        return [None] * layers
    limit = c.integer("max_window_layers", default=28, at_least=0)
    is_mixture = c.model_type == "qwen2_moe"
    return windows_where(
        c, layers, window, lambda n: n % 2 == 0 and n < limit if is_mixture else n >= limit
    )


def _smollm3_windows(c: ModelConfig, layers: int) -> Windows:
    """If windows are on, the layers without rotary positions have one."""
    if not c.flag("use_sliding_window", default=False):
        return [None] * layers
    every = c.integer("no_rope_layer_interval", default=4)
    rotates = c.integers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    check_listed(c, "no_rope_layers", rotates, layers)
    window = c.maybe("sliding_window")
    return windows_where(c, layers, window, lambda number: not rotates[number])


def _exaone4_windows(c: ModelConfig, layers: int) -> Windows:
    window = c.maybe("sliding_window")
    # The 32B model has both layer_types and the pattern of letters that they come from.
    is_ruled = window is not None and "layer_types" not in c
    every = c.maybe("sliding_window_pattern") if is_ruled else None
    return windows_of(layer_kinds(c, layers, every_nth_full(every or 1)), window)


def _cwm_windows(c: ModelConfig, layers: int) -> Windows:
    return windows_where(c, layers, c.integer("sliding_window"), lambda number: number % 4 > 0)


def _dots1_windows(c: ModelConfig, layers: int) -> Windows:
    first = c.integer("max_window_layers", default=layers, at_least=0)
    return windows_where(c, layers, c.maybe("sliding_window"), lambda number: number >= first)


def _gpt_neo_windows(c: ModelConfig, layers: int) -> Windows:
    """Every second layer has a window, as `attention_types` [[["global", "local"], 12]] lists."""
    kinds = c.names("attention_layers")
    if kinds is None:
        kinds = []
        value = c.raw("attention_types")
        for each in value if isinstance(value, list) else [value]:
            match each:
                case [[*group], int(times)] if 0 <= times <= layers:
                    kinds.extend(str(kind) for _ in range(times) for kind in group)
                case _:
                    raise FormatError(
                        f"{c.where}: attention_types must be a list of pairs (a list of layer"
                        f" kinds, the times it repeats); got {quoted_value(value)}"
                    )
    check_listed(c, "attention_types", kinds, layers)
    return [c.integer("window_size") if kind == "local" else None for kind in kinds]


# Rules of single families: which layers have experts.


def _llama4_mixtures(c: ModelConfig, layers: int) -> set[int]:
    every = c.integer("interleave_moe_layer_step", default=1)
    listed = c.integers("moe_layers")
    return set(range(every - 1, layers, every)) if listed is None else set(listed)


def _ernie_mixtures(c: ModelConfig, layers: int) -> set[int]:
    """Return the mixture layers: every `moe_layer_interval`-th from start to end index."""
    first = c.integer("moe_layer_start_index", at_least=0)
    last = c.integer("moe_layer_end_index", default=-1, at_least=-1)
    last = layers - 1 if last == -1 else last
    every = c.integer("moe_layer_interval", default=1)
    return {number for number in range(first, last + 1) if (number + 1) % every == 0}


# Families that other families are built on.

_PLAIN = {"is_gated": False, "names": ("up_proj", "down_proj")}
_GPT2_NAMES = {"prefix": "transformer", "layer_name": "h", "embedding_name": "wte"}
_BLOOM_NAMES = {**_GPT2_NAMES, "embedding_name": "word_embeddings"}
_BLOOM_MLP = {"is_gated": False, "names": ("dense_h_to_4h", "dense_4h_to_h")}
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_XIELU = 2  # numbers that Apertus' activation learns in each layer (arXiv 2411.13010)

_LLAMA = DecoderFamily(family="llama")
_MISTRAL = DecoderFamily(window=sliding_window, family="mistral")
QWEN2 = DecoderFamily(
    qkv_bias=True, out_bias=_ATTENTION_BIAS, windows=_qwen2_windows, family="qwen2"
)
QWEN3 = DecoderFamily(qk_norms="head", family="qwen3")  # without windows
QWEN3_MOE = replace(QWEN3, family="qwen3_moe", experts=QWEN_EXPERTS)
MIXTRAL = replace(_MISTRAL, family="mixtral", experts=RoutedExperts())
_GEMMA = DecoderFamily(needs_head_dim=True, is_tied=_TIED)
_GEMMA2 = replace(_GEMMA, norms="around", windows=but_every(2))
_OLMO = DecoderFamily(norm=0)
_OLMO2 = DecoderFamily(qk_norms="all", norms="after")
_COHERE = DecoderFamily(
    qk_norms="all", qk_norms_if=Flag("use_qk_norm"), is_parallel=True, is_tied=_TIED
)
_GLM = DecoderFamily(out_bias=False, mlp={"fused": "gate_up_proj"})
_ERNIE_BIAS = Flag("use_bias")
_ERNIE = DecoderFamily(qkv_bias=_ERNIE_BIAS, mlp_bias=_ERNIE_BIAS, is_tied=_TIED)
_DEEPSEEK_EXPERTS = RoutedExperts(
    ("n_routed_experts",),
    ("moe_intermediate_size",),
    shared_count=("n_shared_experts",),
    is_optional=True,
    in_layers=after_the_dense,
)
_DEEPSEEK = DecoderFamily(
    latent=True, mlp_bias=False, experts=_DEEPSEEK_EXPERTS, predicts_further=True
)
_GRANITE_MOE = DecoderFamily(
    experts=RoutedExperts(
        shared_size=("shared_intermediate_size",), shared_default=0, module="block_sparse_moe"
    )
)
# Dense decoders with GPT-2's fields: no grouped queries; norms and matrices with biases.
_GPT2 = DecoderFamily(
    hidden=("n_embd", "hidden_size"),
    heads=("n_head", "num_attention_heads"),
    kv_heads=(),
    head_dim=(),
    size=("n_inner",),
    layers=("n_layer", "num_hidden_layers"),
    positions=("n_positions", "max_position_embeddings"),
    qkv_bias=True,
    attention={"fused": "c_attn", "names": ("", "", "", "c_proj"), "module": "attn"},
    is_size_optional=True,
    mlp_bias=True,
    mlp={"is_gated": False, "names": ("c_fc", "c_proj")},
    norm=2,
    is_tied=_TIED,
    names=_GPT2_NAMES,
)


_MPT = DecoderFamily(
    hidden=("d_model", "hidden_size"),
    heads=("n_heads", "num_attention_heads"),
    kv_heads=(),
    head_dim=(),
    size=(),
    layers=("n_layers", "num_hidden_layers"),
    qkv_bias=False,
    attention={"fused": "Wqkv", "names": ("", "", "", "out_proj"), "module": "attn"},
    mlp_bias=False,
    is_tied=True,
    names={**_GPT2_NAMES, "layer_name": "blocks"},
)


# Families that need a function.


def _falcon(c: ModelConfig) -> Decoder:
    """Falcon: one key-value head, or groups in the new architecture; parallel block; tied head."""
    hidden = c.integer("hidden_size", "n_embed")
    heads = c.integer("num_attention_heads", "n_head")
    is_new = c.flag("new_decoder_architecture", default=False)
    if is_new:
        kv_heads = c.integer("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if c.flag("multi_query", default=True) else heads
    bias = c.flag("bias", default=False)
    size = c.integer("ffn_hidden_size", default=4 * hidden)
    is_parallel = is_new or c.flag("parallel_attn", default=True)
    norms = c.integer("num_ln_in_parallel_attn", default=2 if is_new else 1)
    return replace(
        _BLOOM,
        hidden=("hidden_size", "n_embed"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
        qkv_bias=bias,
        mlp_bias=bias,
        attention={**_BLOOM.attention, "kv_heads": kv_heads},
        mlp={**_BLOOM_MLP, "size": size},
        is_parallel=is_parallel,
        parallel_norms=norms if is_new else 1,
    )(c)


def _mpt(c: ModelConfig) -> Decoder:
    """MPT: no biases, fused projections, tied head; ALiBi or learned positions."""
    size = c.share("expansion_ratio", c.integer("d_model", "hidden_size"), default=4)
    has_alibi = "attn_config" not in c or c.part("attn_config").flag("alibi", default=True)
    has_positions = c.flag("learned_pos_emb", default=True) and not has_alibi
    positions = ("max_seq_len",) if has_positions else ()
    return replace(_MPT, positions=positions, mlp={**_PLAIN, "size": size, "module": "ffn"})(c)


def _gpt_bigcode(c: ModelConfig) -> Decoder:
    """StarCoder 1: GPT-2 with one key-value head."""
    base = _GPT2(c)
    if not c.flag("multi_query", default=True):
        return base
    layers = _with_each(base.layers, "kv_heads", [1] * len(base.layers))
    return replace(base, layers=tuple(layers))


def _opt(c: ModelConfig) -> Decoder:
    """OPT: learned positions (two unused rows), biases, tied head."""
    hidden = c.integer("hidden_size")
    if c.integer("word_embed_proj_dim", default=hidden) != hidden or not c.flag(
        "do_layer_norm_before", default=True
    ):
        raise FormatError(
            f"{c.where}: word_embed_proj_dim is not hidden_size, or do_layer_norm_before is false;"
            " such an OPT (the 350M model) is not supported"
        )
    bias = Flag("enable_bias", default=True)
    decoder = DecoderFamily(
        kv_heads=(),
        head_dim=(),
        size=("ffn_dim",),
        positions=("max_position_embeddings",),
        qkv_bias=bias,
        attention={"names": ("q_proj", "k_proj", "v_proj", "out_proj")},
        mlp_bias=bias,
        mlp={"is_gated": False, "names": ("fc1", "fc2"), "module": ""},
        norm=2,
        is_tied=_TIED,
        names={"prefix": "model.decoder"},
    )(c)
    return replace(decoder, positions=decoder.positions + 2)


_BLOOM = replace(
    _GPT2,
    hidden=("hidden_size", "n_embed"),
    size=(),
    positions=(),
    attention={
        "fused": "query_key_value",
        "names": ("", "", "", "dense"),
        "module": "self_attention",
    },
    mlp=_BLOOM_MLP,
    names=_BLOOM_NAMES,
)


def _llama4(c: ModelConfig) -> Decoder:
    """Llama 4's language model: mixtures with a shared expert; 3 chunked layers to 1 full."""
    base = _LLAMA4(c)
    kinds = layer_kinds(c, len(base.layers), every_nth_full(4, "chunked_attention"))
    chunk = c.maybe("attention_chunk_size")
    chunks = [chunk if kind == "chunked_attention" else None for kind in kinds]
    return replace(base, layers=tuple(_with_each(base.layers, "chunk", chunks)))


_LLAMA4 = DecoderFamily(
    family="llama4",
    size=("intermediate_size_mlp",),
    mlp_bias=False,
    experts=RoutedExperts(shared_size=("intermediate_size",), in_layers=_llama4_mixtures),
)


def _dbrx(c: ModelConfig) -> Decoder:
    """DBRX: a mixture in every layer; attention and experts in config objects of their own."""
    kv_heads = c.part("attn_config").integer("kv_n_heads")
    experts = RoutedExperts(
        ("moe_num_experts",), ("ffn_hidden_size",), ("moe_top_k",), module="ffn"
    ).read(c.part("ffn_config"))
    attention = {**_MPT.attention, "kv_heads": kv_heads, "module": "norm_attn_norm.attn"}
    base = replace(_MPT, attention=attention, is_tied=_UNTIED)(c)
    return replace(base, layers=tuple(replace(layer, feed=experts) for layer in base.layers))


def _ernie_moe(c: ModelConfig) -> Decoder:
    """ERNIE 4.5 MoE: mixtures with shared experts in a range of layers."""
    if c.flag("use_bias", default=False):
        raise FormatError(f"{c.where}: use_bias is true; experts with biases are not supported")
    experts = RoutedExperts(
        ("moe_num_experts",),
        ("moe_intermediate_size",),
        ("moe_k",),
        shared_count=("moe_num_shared_experts",),
        has_correction=True,
        in_layers=_ernie_mixtures,
    )
    return replace(_ERNIE, experts=experts)(c)


def _hunyuan_moe(c: ModelConfig) -> Decoder:
    """Hunyuan MoE: a mixture in every layer, with a shared expert as large as a routed one."""
    base = DecoderFamily(qk_norms="head")(c)
    count, size = len(base.layers), c.integer("intermediate_size")
    experts, used = (each_layer(c, name, count) for name in ("num_experts", "moe_topk"))
    if any(top > most for top, most in zip(used, experts, strict=True)):
        raise FormatError(f"{c.where}: moe_topk is more than num_experts in a layer")
    layers = tuple(
        replace(layer, feed=Experts(most, top, size, shared_size=size))
        for layer, most, top in zip(base.layers, experts, used, strict=True)
    )
    return replace(base, layers=layers)


READERS: dict[str, Callable[[ModelConfig], Decoder]] = {
    **dict.fromkeys(("llama", "granite", "helium"), _LLAMA),
    **dict.fromkeys(("mistral", "ministral", "ministral3"), _MISTRAL),
    "qwen2": QWEN2,
    "qwen3": replace(QWEN3, windows=_qwen2_windows),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, family="gemma3", qk_norms="head", windows=but_every(6, _PATTERN)
    ),
    "phi3": DecoderFamily(
        attention={"fused": "qkv_proj"}, mlp={"fused": "gate_up_proj"}, window=sliding_window
    ),
    # OLMo 1 has norms without parameters, 2 and 3 norms after each part.
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, family="olmo2", windows=but_every(4, is_optional=True)),
    # Its layers without rotary positions may have a window.
    "smollm3": DecoderFamily(windows=_smollm3_windows, family="llama"),
    # Command R, R7B and A: a parallel block with one norm.
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, windows=but_every(4, _PATTERN)),
    "stablelm": DecoderFamily(
        qkv_bias=Flag("use_qkv_bias"),
        out_bias=_ATTENTION_BIAS,
        norm=2,
        is_parallel=Flag("use_parallel_residual"),
    ),
    # glm: GLM 4 9B and GLM-Edge; glm4: GLM 4 of 2025.
    "glm": _GLM,
    "glm4": replace(_GLM, norms="around"),
    "ernie4_5": _ERNIE,
    "exaone4": DecoderFamily(qk_norms="head", norms="after", windows=_exaone4_windows),
    "arcee": DecoderFamily(mlp=_PLAIN),
    "seed_oss": DecoderFamily(out_bias=Flag("attention_out_bias")),
    "hunyuan_v1_dense": DecoderFamily(qk_norms="head"),
    # Extra norms before the output matrices of attention and feed-forward.
    "bitnet": DecoderFamily(extra_params=lambda c, hidden: hidden + c.integer("intermediate_size")),
    "nanochat": replace(_OLMO, mlp={"is_gated": False, "bias": False, "names": ("fc1", "fc2")}),
    "apertus": DecoderFamily(
        qk_norms="head", mlp={**_PLAIN, "bias": False}, extra_params=lambda _config, _hidden: _XIELU
    ),
    # Code World Model: three layers with a window, then one without.
    "cwm": DecoderFamily(windows=_cwm_windows),
    "starcoder2": DecoderFamily(
        qkv_bias=Flag("use_bias", default=True),
        mlp_bias=Flag("use_bias", default=True),
        mlp={"is_gated": False, "names": ("c_fc", "c_proj")},
        norm=2,
        is_tied=_TIED,
        window=sliding_window,
    ),
    # Nemotron 4 and Minitron.
    "nemotron": DecoderFamily(mlp=_PLAIN, norm=2),
    # Phi 1 to 2: a parallel block with biases everywhere, the head's included.
    "phi": DecoderFamily(
        head_dim=(),
        qkv_bias=True,
        qk_norms="head",
        qk_norms_if=Flag("qk_layernorm"),
        attention={"names": ("q_proj", "k_proj", "v_proj", "dense")},
        is_size_optional=True,
        mlp_bias=True,
        mlp={"is_gated": False, "names": ("fc1", "fc2")},
        norm=2,
        is_parallel=True,
        head_bias=True,
    ),
    **dict.fromkeys(("gpt2", "gpt-sw3"), replace(_GPT2, family="gpt2")),
    "gpt_bigcode": _gpt_bigcode,
    # A parallel block with one norm; no biases in attention.
    "gptj": replace(
        _GPT2,
        positions=(),
        qkv_bias=False,
        attention={"names": ("q_proj", "k_proj", "v_proj", "out_proj"), "module": "attn"},
        mlp={"is_gated": False, "names": ("fc_in", "fc_out")},
        is_parallel=True,
        is_tied=_UNTIED,
        head_bias=True,
    ),
    "gpt_neo": replace(
        _GPT2,
        hidden=("hidden_size",),
        heads=("num_heads", "num_attention_heads"),
        size=("intermediate_size",),
        layers=("num_layers", "num_hidden_layers"),
        positions=("max_position_embeddings",),
        qkv_bias=False,
        out_bias=True,
        attention={"names": ("q_proj", "k_proj", "v_proj", "out_proj"), "module": "attn.attention"},
        windows=_gpt_neo_windows,
    ),
    # GPT-NeoX and Pythia.
    "gpt_neox": DecoderFamily(
        kv_heads=(),
        head_dim=(),
        qkv_bias=Flag("attention_bias", default=True),
        attention={**_BLOOM.attention, "module": "attention"},
        mlp_bias=True,
        mlp=_BLOOM_MLP,
        norm=2,
        is_parallel=Flag("use_parallel_residual", default=True),
        parallel_norms=2,
        names={"prefix": "gpt_neox", "embedding_name": "embed_in", "head_name": "embed_out"},
    ),
    "falcon": _falcon,
    "mpt": _mpt,
    "opt": _opt,
    "bloom": replace(_BLOOM, has_embedding_norm=True),
    # Mixtures of experts.
    "mixtral": MIXTRAL,
    "qwen2_moe": replace(QWEN2, family="qwen2_moe", experts=QWEN_SHARED_EXPERTS),
    "qwen3_moe": replace(QWEN3_MOE, window=qwen_window),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
    # Biases everywhere, attention sinks, every second layer with a window.
    "gpt_oss": DecoderFamily(
        qkv_bias=Flag("attention_bias", default=True),
        has_sinks=True,
        mlp_bias=False,
        experts=RoutedExperts(bias=True),
        windows=but_every(2),
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE_MOE),
    "olmoe": DecoderFamily(
        qk_norms="all", experts=RoutedExperts(("num_experts", "num_local_experts"))
    ),
    "flex_olmo": replace(_OLMO2, experts=RoutedExperts(("num_experts",))),
    "llama4_text": _llama4,
    # GLM 4.5.
    "glm4_moe": DecoderFamily(
        out_bias=False,
        qk_norms="head",
        qk_norms_if=Flag("use_qk_norm"),
        experts=_DEEPSEEK_EXPERTS,
        predicts_further=True,
    ),
    # Phi 3.5 MoE.
    "phimoe": DecoderFamily(
        norm=2, experts=RoutedExperts(), window=sliding_window, head_bias=Flag("lm_head_bias")
    ),
    "dbrx": _dbrx,
    "ernie4_5_moe": _ernie_moe,
    "minimax_m2": DecoderFamily(qk_norms="all", experts=RoutedExperts()),
    # Qwen 3's attention, DeepSeek's mixtures.
    "dots1": replace(QWEN3, family="dots1", experts=_DEEPSEEK_EXPERTS, windows=_dots1_windows),
    "hunyuan_v1_moe": _hunyuan_moe,
}
