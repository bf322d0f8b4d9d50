"""Readers of dense decoders that are arranged otherwise than Llama: GPT-2 and its kin, Falcon."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.flops.config import quoted_value
from ergmeter.flops.families.llamas import head_dim_of, like_llama, llama, self_attention, variant
from ergmeter.flops.graph.layers import AttentionLayer, Decoder, Layer, Mlp

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig

# The names of GPT-2's modules.
_GPT2: dict[str, Any] = {"prefix": "transformer", "layer_name": "h", "embedding_name": "wte"}


def _attention(
    c: ModelConfig,
    hidden: int,
    heads: int,
    out: str,
    *,
    kv_heads: int | None = None,
    fused: str | None = None,
    **more: Any,  # noqa: ANN401
) -> AttentionLayer:
    """Attention whose output projection is named `out`, with separate or `fused` inputs."""
    inputs = ("", "", "") if fused else ("q_proj", "k_proj", "v_proj")
    head_dim = head_dim_of(c, hidden, heads)
    return AttentionLayer(
        heads, kv_heads or heads, head_dim, fused=fused, names=(*inputs, out), **more
    )


def _plain(size: int, up: str, down: str, *, bias: bool = True, module: str = "mlp") -> Mlp:
    """A feed-forward without a gate."""
    return Mlp(size, is_gated=False, bias=bias, names=(up, down), module=module)


def _decoder(
    c: ModelConfig,
    family: str,
    hidden: int,
    layer: Layer,
    layers: tuple[str, ...] = ("num_hidden_layers",),
    *,
    tied: bool,
    positions: tuple[str, ...] = (),
    **more: Any,  # noqa: ANN401
) -> Decoder:
    """A decoder of equal layers; `layers` and `positions` name the fields of their numbers."""
    return Decoder(
        family,
        hidden,
        c.integer("vocab_size"),
        (layer,) * c.integer(*layers),
        is_tied=c.flag("tie_word_embeddings", default=tied),
        final_norm=layer.norm,
        positions=c.integer(*positions) if positions else 0,
        **more,
    )


def phi(c: ModelConfig) -> Decoder:
    """Phi 1 to 2: a parallel block with biases everywhere, the head's included."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", default=heads)
    attention = AttentionLayer(
        heads,
        kv_heads,
        head_dim_of(c, hidden, heads),
        q_bias=True,
        kv_bias=True,
        out_bias=True,
        norm_params=4 * (hidden // heads) if c.flag("qk_layernorm", default=False) else 0,
        names=("q_proj", "k_proj", "v_proj", "dense"),
    )
    mlp = _plain(c.integer("intermediate_size", default=4 * hidden), "fc1", "fc2")
    layer = Layer((attention,), mlp, norm=2 * hidden, is_parallel=True)
    layers = [layer] * c.integer("num_hidden_layers")
    return like_llama(c, "phi", layers, tied=False, final_norm=2 * hidden, head_bias=True)


def gpt2(c: ModelConfig) -> Decoder:
    """GPT-2: learned positions, biases, one fused projection, tied."""
    hidden, heads = c.integer("n_embd", "hidden_size"), c.integer("n_head", "num_attention_heads")
    attention = _attention(
        c, hidden, heads, "c_proj", fused="c_attn", module="attn", q_bias=True, out_bias=True
    )
    mlp = _plain(c.maybe("n_inner") or 4 * hidden, "c_fc", "c_proj")
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    layers, positions = ("n_layer", "num_hidden_layers"), ("n_positions", "max_position_embeddings")
    return _decoder(c, "gpt2", hidden, layer, layers, tied=True, positions=positions, **_GPT2)


def gpt_neox(c: ModelConfig) -> Decoder:
    """GPT-NeoX and Pythia: fused, biased, not tied."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    has_bias = c.flag("attention_bias", default=True)
    biases = {"q_bias": has_bias, "out_bias": has_bias}
    attention = _attention(
        c, hidden, heads, "dense", fused="query_key_value", module="attention", **biases
    )
    mlp = _plain(c.integer("intermediate_size"), "dense_h_to_4h", "dense_4h_to_h")
    is_parallel = c.flag("use_parallel_residual", default=True)
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden, is_parallel=is_parallel)
    return _decoder(
        c,
        "gpt_neox",
        hidden,
        layer,
        tied=False,
        prefix="gpt_neox",
        embedding_name="embed_in",
        head_name="embed_out",
    )


def falcon(c: ModelConfig) -> Decoder:
    """Falcon: one key-value head, or groups in the new architecture; parallel; tied."""
    hidden = c.integer("hidden_size", "n_embed")
    heads = c.integer("num_attention_heads", "n_head")
    is_new = c.flag("new_decoder_architecture", default=False)
    if is_new:
        kv_heads = c.integer("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if c.flag("multi_query", default=True) else heads
    has_bias = c.flag("bias", default=False)
    attention = _attention(
        c,
        hidden,
        heads,
        "dense",
        kv_heads=kv_heads,
        fused="query_key_value",
        module="self_attention",
        q_bias=has_bias,
        out_bias=has_bias,
    )
    size = c.integer("ffn_hidden_size", default=4 * hidden)
    mlp = _plain(size, "dense_h_to_4h", "dense_4h_to_h", bias=has_bias)
    is_parallel = is_new or c.flag("parallel_attn", default=True)
    norms = c.integer("num_ln_in_parallel_attn", default=2 if is_new else 1)
    second = 2 * hidden if not is_parallel or (is_new and norms > 1) else 0
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=second, is_parallel=is_parallel)
    names = {**_GPT2, "embedding_name": "word_embeddings"}
    layers = ("num_hidden_layers", "n_layer")
    return _decoder(c, "falcon", hidden, layer, layers, tied=True, **names)


def mpt(c: ModelConfig) -> Decoder:
    """MPT: no biases, fused, tied; ALiBi or learned positions."""
    hidden, heads = c.integer("d_model", "hidden_size"), c.integer("n_heads", "num_attention_heads")
    attention = _attention(c, hidden, heads, "out_proj", fused="Wqkv", module="attn")
    size = c.share("expansion_ratio", hidden, default=4)
    mlp = _plain(size, "up_proj", "down_proj", bias=False, module="ffn")
    layer = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    has_alibi = "attn_config" not in c or c.part("attn_config").flag("alibi", default=True)
    has_positions = c.flag("learned_pos_emb", default=True) and not has_alibi
    return Decoder(
        "mpt",
        hidden,
        c.integer("vocab_size"),
        (layer,) * c.integer("n_layers", "num_hidden_layers"),
        is_tied=True,
        final_norm=hidden,
        positions=c.integer("max_seq_len") if has_positions else 0,
        prefix="transformer",
        layer_name="blocks",
        embedding_name="wte",
    )


def gptj(c: ModelConfig) -> Decoder:
    """GPT-J: a parallel block with one norm; biases in the feed-forward and at the head."""
    hidden, heads = c.integer("n_embd", "hidden_size"), c.integer("n_head", "num_attention_heads")
    attention = _attention(c, hidden, heads, "out_proj", module="attn")
    mlp = _plain(c.maybe("n_inner") or 4 * hidden, "fc_in", "fc_out")
    layer = Layer((attention,), mlp, norm=2 * hidden, is_parallel=True)
    layers = ("n_layer", "num_hidden_layers")
    return _decoder(c, "gptj", hidden, layer, layers, tied=False, head_bias=True, **_GPT2)


def gpt_neo(c: ModelConfig) -> Decoder:
    """GPT-Neo: learned positions, every second layer with a window, tied."""
    hidden = c.integer("hidden_size")
    heads = c.integer("num_heads", "num_attention_heads")
    count = c.integer("num_layers", "num_hidden_layers")
    kinds = c.names("attention_layers")
    if kinds is None:
        kinds = _repeated(c, count)
    if len(kinds) != count:
        raise FormatError(
            f"{c.where}: attention_types lists {len(kinds)} layers and num_layers is {count}"
        )
    attention = _attention(c, hidden, heads, "out_proj", module="attn.attention", out_bias=True)
    mlp = _plain(c.maybe("intermediate_size") or 4 * hidden, "c_fc", "c_proj")
    layers = tuple(
        Layer(
            (replace(attention, window=c.integer("window_size") if kind == "local" else None),),
            mlp,
            norm=2 * hidden,
            feed_norm=2 * hidden,
        )
        for kind in kinds
    )
    return Decoder(
        "gpt_neo",
        hidden,
        c.integer("vocab_size"),
        layers,
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=2 * hidden,
        positions=c.integer("max_position_embeddings"),
        **_GPT2,
    )


def _repeated(c: ModelConfig, count: int) -> list[str]:
    """The kind of each layer from `attention_types`, such as [[["global", "local"], 12]]."""
    value = c.raw("attention_types")
    kinds: list[str] = []
    for each in value if isinstance(value, list) else [value]:
        match each:
            case [[*group], int(times)] if 0 <= times <= count:
                kinds.extend(str(kind) for _ in range(times) for kind in group)
            case _:
                raise FormatError(
                    f"{c.where}: attention_types must be a list of pairs, kinds of layers and how"
                    f" often they come; got {quoted_value(value)}"
                )
    return kinds


def gpt_bigcode(c: ModelConfig) -> Decoder:
    """StarCoder 1: GPT-2 with one key-value head."""
    base = gpt2(c)
    attention = {"kv_heads": 1} if c.flag("multi_query", default=True) else {}
    return variant(base, "gpt_bigcode", attention=attention)


def opt(c: ModelConfig) -> Decoder:
    """OPT: learned positions, two rows of which are never used; biases; tied."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if c.integer("word_embed_proj_dim", default=hidden) != hidden or not c.flag(
        "do_layer_norm_before", default=True
    ):
        raise FormatError(
            f"{c.where}: word_embed_proj_dim is not hidden_size, or do_layer_norm_before is false;"
            " an OPT of this kind (the one of 350M) can't be read"
        )
    has_bias = c.flag("enable_bias", default=True)
    attention = _attention(
        c, hidden, heads, "out_proj", q_bias=has_bias, kv_bias=has_bias, out_bias=has_bias
    )
    mlp = _plain(c.integer("ffn_dim"), "fc1", "fc2", bias=has_bias, module="")
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    positions = ("max_position_embeddings",)
    base = _decoder(c, "opt", hidden, layer, tied=True, positions=positions, prefix="model.decoder")
    return replace(base, positions=base.positions + 2)


def bloom(c: ModelConfig) -> Decoder:
    """BLOOM: ALiBi, a norm on the embedding, fused and biased, tied."""
    hidden = c.integer("hidden_size", "n_embed")
    heads = c.integer("n_head", "num_attention_heads")
    biases = {"q_bias": True, "out_bias": True}
    attention = _attention(
        c, hidden, heads, "dense", fused="query_key_value", module="self_attention", **biases
    )
    mlp = _plain(4 * hidden, "dense_h_to_4h", "dense_4h_to_h")
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    names = {**_GPT2, "embedding_name": "word_embeddings"}
    layers = ("n_layer", "num_hidden_layers")
    return _decoder(
        c, "bloom", hidden, layer, layers, tied=True, embedding_norm=2 * hidden, **names
    )


def starcoder2(c: ModelConfig) -> Decoder:
    """StarCoder 2: plain feed-forward, biases, a window, tied."""
    has_bias = c.flag("use_bias", default=True)
    hidden = c.integer("hidden_size")
    attention = replace(self_attention(c, bias=has_bias), window=c.maybe("sliding_window"))
    mlp = _plain(c.integer("intermediate_size"), "c_fc", "c_proj", bias=has_bias)
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    layers = [layer] * c.integer("num_hidden_layers")
    return like_llama(c, "starcoder2", layers, tied=True, final_norm=2 * hidden)


def nemotron(c: ModelConfig) -> Decoder:
    """Nemotron 4 and Minitron: biased norms and a plain feed-forward."""
    base = llama(c)
    norm = 2 * base.hidden
    mlp = {"is_gated": False, "names": ("up_proj", "down_proj")}
    layer = {"norm": norm, "feed_norm": norm}
    return variant(base, "nemotron", mlp=mlp, layer=layer, final_norm=norm)
