"""Readers of Llama and of dense families that differ from it in a few fields, Gemma included.

A reader turns a configuration into a `Decoder`. Most families are `variant`s of `llama`. Families
name the same field in several ways and leave out what they take for granted. A reader names the
field that is wrong. Other modules of families share the helpers in the first half.

Gemma 3n and 4 have several widths. A table beside the embedding feeds every layer a few numbers a
token. Upper layers share the keys and values of lower ones. Layers without a window have other
heads than those with one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ergmeter.errors import FormatError
from ergmeter.flops.graph.layers import AttentionLayer, Decoder, Experts, Layer, Mixer, Mlp, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.flops.config import ModelConfig


def self_attention(
    c: ModelConfig, *, bias: bool = False, head_dim: int | None = None
) -> AttentionLayer:
    """Attention as Llama has it: separate projections, grouped keys and values."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise FormatError(
            f"{c.where}: num_attention_heads {heads} is no multiple of"
            f" num_key_value_heads {kv_heads}"
        )
    if head_dim is None:
        head_dim = c.maybe("head_dim")
    if head_dim is None:
        head_dim = head_dim_of(c, hidden, heads)
    return AttentionLayer(heads, kv_heads, head_dim, q_bias=bias, kv_bias=bias, out_bias=bias)


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
    """The kind of each layer: as the configuration lists it, else by the family's rule."""
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
        return [c.integer(name)] * layers
    listed = c.integers(name) or []
    if len(listed) != layers:
        raise FormatError(
            f"{c.where}: {name} lists {len(listed)} layers, and the model has {layers}"
        )
    return [c.having(name, number).integer(name) for number in listed]


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
    hidden = c.integer("hidden_size")
    return Decoder(
        family,
        hidden,
        c.integer("vocab_size"),
        tuple(layers),
        is_tied=c.flag("tie_word_embeddings", default=tied),
        final_norm=hidden if final_norm is None else final_norm,
        head_bias=head_bias,
    )


def variant(
    base: Decoder,
    family: str,
    *,
    attention: dict[str, Any] | None = None,
    mlp: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None,
    qk_norms: Literal["none", "head", "all"] = "none",
    **changes: Any,  # noqa: ANN401
) -> Decoder:
    """The decoder of another family: `base` with these fields changed in every layer.

    `qk_norms` puts norms on queries and keys, of the size of one head or of all heads together.
    """

    def mixer_of(mixer: Mixer) -> Mixer:
        if not isinstance(mixer, AttentionLayer):
            return mixer
        if qk_norms == "head":
            mixer = with_qk_norms(mixer)
        elif qk_norms == "all":
            mixer = replace(mixer, norm_params=(mixer.heads + mixer.kv_heads) * mixer.head_dim)
        return replace(mixer, **attention or {})

    layers = tuple(
        replace(
            each,
            mixers=tuple(map(mixer_of, each.mixers)),
            feed=replace(each.feed, **mlp) if mlp and isinstance(each.feed, Mlp) else each.feed,
        )
        for each in base.layers
    )
    if layer:
        layers = tuple(replace(each, **layer) for each in layers)
    return replace(base, family=family, layers=layers, **changes)


def with_qk_norms(a: AttentionLayer) -> AttentionLayer:
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
    kinds = layer_kinds(c, len(decoder.layers), rule)
    return with_layer_values(decoder, "window", windows_of(kinds, window))


def with_layer_values(decoder: Decoder, name: str, values: Sequence[int | None]) -> Decoder:
    """The same decoder with this field of each layer's attention set."""
    changes: list[dict[str, Any]] = [{name: value} for value in values]
    layers = tuple(
        replace(
            layer,
            mixers=tuple(
                replace(mixer, **change) if isinstance(mixer, AttentionLayer) else mixer
                for mixer in layer.mixers
            ),
        )
        for layer, change in zip(decoder.layers, changes, strict=True)
    )
    return replace(decoder, layers=layers)


def experts_of(c: ModelConfig, count: int, size: int, **more: object) -> Experts:
    """Routed experts; how many of them a token meets has several names."""
    used = c.integer("num_experts_per_tok", "top_k", "moe_topk", "num_experts_per_token")
    if used > count:
        raise FormatError(f"{c.where}: num_experts_per_tok {used} is more than the {count} experts")
    return replace(Experts(count, used, size), **more)  # type: ignore[arg-type]


def dense_or_experts(c: ModelConfig, base: Decoder, experts: Experts) -> tuple[Layer, ...]:
    """Qwen's rule: every `decoder_sparse_step`-th layer is a mixture, but for those listed."""
    every = c.integer("decoder_sparse_step", default=1)
    dense = c.integers("mlp_only_layers") or []
    return tuple(
        replace(layer, feed=experts) if number not in dense and (number + 1) % every == 0 else layer
        for number, layer in enumerate(base.layers)
    )


def llama(c: ModelConfig) -> Decoder:
    """Llama 1 to 3, and families that copy it."""
    hidden = c.integer("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mlp = Mlp(c.integer("intermediate_size"), bias=c.flag("mlp_bias", default=False))
    layer = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    return like_llama(c, "llama", [layer] * c.integer("num_hidden_layers"), tied=False)


def mistral(c: ModelConfig) -> Decoder:
    """Mistral: Llama with a window, in its first versions."""
    window = c.maybe("sliding_window")
    return variant(llama(c), "mistral", attention={"window": window})


def qwen2(c: ModelConfig) -> Decoder:
    """Qwen 2 and 2.5: biases on queries, keys and values; upper layers may have a window."""
    return _upper_windows(c, qwen2_full(c))


def qwen2_full(c: ModelConfig) -> Decoder:
    """Qwen 2 without windows."""
    return variant(llama(c), "qwen2", attention={"q_bias": True, "kv_bias": True})


def qwen3(c: ModelConfig) -> Decoder:
    """Qwen 3: a head size of its own, norms on queries and keys; windows as in Qwen 2."""
    return _upper_windows(c, qwen3_full(c))


def qwen3_full(c: ModelConfig) -> Decoder:
    """Qwen 3 without windows, which later families build on."""
    return variant(llama(c), "qwen3", qk_norms="head")


def qwen_window(c: ModelConfig) -> int | None:
    """The window of a Qwen, or None where it is switched off."""
    return c.maybe("sliding_window") if c.flag("use_sliding_window", default=False) else None


def _upper_windows(c: ModelConfig, base: Decoder) -> Decoder:
    window = qwen_window(c)
    if window is None:
        return base
    first = c.integer("max_window_layers", default=28, at_least=0)
    return with_windows(
        c, base, window, lambda number: "sliding_attention" if number >= first else "full_attention"
    )


def gemma(c: ModelConfig) -> Decoder:
    """Gemma 1: tied, with a head size of its own."""
    c.integer("head_dim")
    return replace(llama(c), family="gemma", is_tied=c.flag("tie_word_embeddings", default=True))


def gemma2(c: ModelConfig) -> Decoder:
    """Gemma 2: every second layer has a window; norms after each part as well."""
    base = gemma(c)
    return _normed_twice(
        with_windows(c, base, c.integer("sliding_window"), every_nth_full(2)), "gemma2"
    )


def gemma3(c: ModelConfig) -> Decoder:
    """Gemma 3: five windowed layers to one that is not; norms on queries and keys."""
    every = c.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    base = variant(gemma(c), "gemma3", qk_norms="head")
    return _normed_twice(
        with_windows(c, base, c.integer("sliding_window"), every_nth_full(every)), "gemma3"
    )


def _normed_twice(base: Decoder, family: str) -> Decoder:
    """The same decoder with norms after each part as well as before."""
    return variant(base, family, layer={"after_norms": (base.hidden, base.hidden)})


def _normed_after(base: Decoder) -> Decoder:
    """The same decoder with norms after each part, and none before."""
    norms = (base.hidden, base.hidden)
    return variant(base, base.family, layer={"norm": 0, "feed_norm": 0, "after_norms": norms})


def phi3(c: ModelConfig) -> Decoder:
    """Phi 3 and 4: Llama with its projections fused."""
    attention = {"fused": "qkv_proj", "window": c.maybe("sliding_window")}
    return variant(llama(c), "phi3", attention=attention, mlp={"fused": "gate_up_proj"})


def olmo(c: ModelConfig) -> Decoder:
    """OLMo 1: Llama whose norms have no parameters."""
    return variant(llama(c), "olmo", layer={"norm": 0, "feed_norm": 0}, final_norm=0)


def olmo2(c: ModelConfig) -> Decoder:
    """OLMo 2: norms after each part instead of before, and over all of queries and keys."""
    return _normed_after(variant(llama(c), "olmo2", qk_norms="all"))


def olmo3(c: ModelConfig) -> Decoder:
    """OLMo 3: OLMo 2 with three layers with a window to one without."""
    return with_windows(c, olmo2(c), c.maybe("sliding_window"), every_nth_full(4))


def smollm3(c: ModelConfig) -> Decoder:
    """SmolLM3: Llama; layers without rotary positions may have a window."""
    base = llama(c)
    if not c.flag("use_sliding_window", default=False):
        return base
    every = c.integer("no_rope_layer_interval", default=4)
    rotates = c.integers("no_rope_layers") or [
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
    return variant(
        llama(c),
        "cohere",
        qk_norms="all" if c.flag("use_qk_norm", default=False) else "none",
        layer={"feed_norm": 0, "is_parallel": True},
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def cohere2(c: ModelConfig) -> Decoder:
    """Command R7B and A: three layers with a window to one without."""
    base = cohere(c)
    every = c.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    base = with_windows(c, base, c.integer("sliding_window"), every_nth_full(every))
    return replace(base, family="cohere2")


def stablelm(c: ModelConfig) -> Decoder:
    """StableLM: Llama with biased norms and, in some sizes, biases on queries, keys and values."""
    base = llama(c)
    norm = 2 * base.hidden
    has_bias = c.flag("use_qkv_bias", default=False)
    is_parallel = c.flag("use_parallel_residual", default=False)
    return variant(
        base,
        "stablelm",
        attention={"q_bias": has_bias, "kv_bias": has_bias},
        layer={"norm": norm, "feed_norm": 0 if is_parallel else norm, "is_parallel": is_parallel},
        final_norm=norm,
    )


def glm(c: ModelConfig) -> Decoder:
    """GLM 4 of 9B and GLM-Edge: biases on queries, keys and values; gate and up fused."""
    attention, mlp = {"out_bias": False}, {"fused": "gate_up_proj"}
    return variant(llama(c), "glm", attention=attention, mlp=mlp)


def glm4(c: ModelConfig) -> Decoder:
    """GLM 4 of 2025: GLM with norms after each part as well."""
    return _normed_twice(glm(c), "glm4")


def ernie(c: ModelConfig) -> Decoder:
    """ERNIE 4.5: Llama, tied; one flag for all biases."""
    has_bias = c.flag("use_bias", default=False)
    return variant(
        llama(c),
        c.model_type,
        attention={"q_bias": has_bias, "kv_bias": has_bias, "out_bias": has_bias},
        mlp={"bias": has_bias},
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def exaone4(c: ModelConfig) -> Decoder:
    """EXAONE 4: norms after each part only, and on queries and keys; some layers with a window."""
    base = _normed_after(variant(llama(c), "exaone4", qk_norms="head"))
    window = c.maybe("sliding_window")
    # The 32B model has a pattern of letters beside the list of layers that it makes.
    is_ruled = window is not None and "layer_types" not in c
    every = c.maybe("sliding_window_pattern") if is_ruled else None
    return with_windows(c, base, window, every_nth_full(every or 1))


def arcee(c: ModelConfig) -> Decoder:
    """Arcee: Llama with a plain feed-forward."""
    mlp = {"is_gated": False, "names": ("up_proj", "down_proj")}
    return variant(llama(c), "arcee", mlp=mlp)


def seed_oss(c: ModelConfig) -> Decoder:
    """Seed-OSS: a head size of its own, biases on queries, keys and values."""
    has_bias = c.flag("attention_out_bias", default=False)
    return variant(llama(c), "seed_oss", attention={"out_bias": has_bias})


def hunyuan(c: ModelConfig) -> Decoder:
    """Hunyuan dense: Llama with norms on queries and keys."""
    return variant(llama(c), "hunyuan_v1_dense", qk_norms="head")


def bitnet(c: ModelConfig) -> Decoder:
    """BitNet b1.58: Llama with a norm before the output of attention and of the feed-forward."""
    base = llama(c)
    extra = base.hidden + c.integer("intermediate_size")
    return variant(base, "bitnet", layer={"extra_params": extra})


def nanochat(c: ModelConfig) -> Decoder:
    """nanochat: a plain feed-forward, and norms without parameters."""
    mlp = {"is_gated": False, "bias": False, "names": ("fc1", "fc2")}
    return variant(olmo(c), "nanochat", mlp=mlp)


_XIELU = 2  # numbers that the activation learns in each layer (arXiv 2411.13010)


def apertus(c: ModelConfig) -> Decoder:
    """Apertus: a plain feed-forward with a learned activation, norms on queries and keys."""
    layer = {"extra_params": _XIELU}
    return variant(arcee(c), "apertus", qk_norms="head", mlp={"bias": False}, layer=layer)


def cwm(c: ModelConfig) -> Decoder:
    """Code World Model: Llama with three layers with a window to one without."""
    return with_windows(
        c,
        replace(llama(c), family="cwm"),
        c.integer("sliding_window"),
        lambda number: "sliding_attention" if number % 4 else "full_attention",
    )


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
    after = _own_input(c, hidden)
    layers = [
        Layer(
            (each,),
            Mlp(size),
            norm=hidden,
            feed_norm=hidden,
            after_norms=(hidden, hidden),
            beside=beside,
            beside_norm=hidden,
            streams=streams,
            after=after,
            after_norm=hidden if after else 0,
        )
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
    after = _own_input(c, hidden)
    layers = [
        Layer(
            (each,),
            _feed_of_gemma4(c, size * (2 if widens and number >= first else 1)),
            norm=hidden,
            feed_norm=hidden,
            after_norms=(hidden, hidden),
            extra_params=3 * hidden if c.flag("enable_moe_block", default=False) else 0,
            after=after,
            after_norm=hidden if after else 0,
        )
        for number, each in enumerate(attentions)
    ]
    return _with_inputs(c, like_llama(c, "gemma4", layers, tied=True))


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
    count, used = c.integer("num_experts"), c.integer("top_k_experts")
    if used > count:
        raise FormatError(f"{c.where}: top_k_experts {used} is more than the {count} experts")
    scales = c.integer("hidden_size") + count  # of what the router reads, and of each expert
    own = c.integer("moe_intermediate_size")
    return Experts(count, used, own, shared_size=size, router_params=scales)


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


def _own_input(c: ModelConfig, hidden: int) -> tuple[Piece, ...]:
    """The matrices that read a layer's own input, where there is one."""
    width = c.maybe("hidden_size_per_layer_input", at_least=0)
    if not width:
        return ()
    return (
        Piece("per_layer_input_gate", hidden, width),
        Piece("per_layer_projection", width, hidden),
    )


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
