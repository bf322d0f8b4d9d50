"""Dense decoders with an arrangement of their own: GPT-2 and its kin, parallel blocks, biases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.config import shown_value
from ergmeter.flops.families.fields import (
    each_attention,
    each_mlp,
    head_dim_of,
    like_llama,
    self_attention,
)
from ergmeter.flops.families.llamas import llama
from ergmeter.flops.graph.layers import Decoder, Layer, Mlp, SelfAttention

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig


def phi(c: ModelConfig) -> Decoder:
    """Phi 1 to 2: a parallel block with biases everywhere, the head's included."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    kv_heads = c.whole("num_key_value_heads", default=heads)
    attention = SelfAttention(
        heads,
        kv_heads,
        head_dim_of(c, hidden, heads),
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
    return like_llama(c, "phi", layers, tied=False, final_norm=2 * hidden, head_bias=True)


def gpt2(c: ModelConfig) -> Decoder:
    """GPT-2: learned positions, biases, one fused projection, tied."""
    hidden, heads = c.whole("n_embd", "hidden_size"), c.whole("n_head", "num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        head_dim_of(c, hidden, heads),
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


def gpt_neox(c: ModelConfig) -> Decoder:
    """GPT-NeoX and Pythia: fused, biased, not tied."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    has_bias = c.flag("attention_bias", default=True)
    attention = SelfAttention(
        heads,
        heads,
        head_dim_of(c, hidden, heads),
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


def falcon(c: ModelConfig) -> Decoder:
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
        head_dim_of(c, hidden, heads),
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


def mpt(c: ModelConfig) -> Decoder:
    """MPT: no biases, fused, tied; ALiBi or learned positions."""
    hidden, heads = c.whole("d_model", "hidden_size"), c.whole("n_heads", "num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        head_dim_of(c, hidden, heads),
        fused="Wqkv",
        names=("", "", "", "out_proj"),
        module="attn",
    )
    size = c.share("expansion_ratio", hidden, default=4)
    mlp = Mlp(size, is_gated=False, names=("up_proj", "down_proj"), module="ffn")
    layer = Layer((attention,), mlp, norm=hidden, feed_norm=hidden)
    has_alibi = "attn_config" not in c or c.part("attn_config").flag("alibi", default=True)
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


def gptj(c: ModelConfig) -> Decoder:
    """GPT-J: a parallel block with one norm; biases in the feed-forward and at the head."""
    hidden, heads = c.whole("n_embd", "hidden_size"), c.whole("n_head", "num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        head_dim_of(c, hidden, heads),
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
        module="attn",
    )
    size = c.maybe("n_inner") or 4 * hidden
    mlp = Mlp(size, is_gated=False, bias=True, names=("fc_in", "fc_out"))
    layer = Layer((attention,), mlp, norm=2 * hidden, is_parallel=True)
    return Decoder(
        "gptj",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("n_layer", "num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=False),
        final_norm=2 * hidden,
        head_bias=True,
        prefix="transformer",
        layer_name="h",
        embedding_name="wte",
    )


def gpt_neo(c: ModelConfig) -> Decoder:
    """GPT-Neo: learned positions, every second layer with a window, tied."""
    hidden = c.whole("hidden_size")
    heads = c.whole("num_heads", "num_attention_heads")
    count = c.whole("num_layers", "num_hidden_layers")
    kinds = c.names("attention_layers")
    if kinds is None:
        kinds = _repeated(c, count)
    if len(kinds) != count:
        raise FormatError(
            f"{c.where}: attention_types lists {len(kinds)} layers and num_layers is {count}"
        )
    attention = SelfAttention(
        heads,
        heads,
        head_dim_of(c, hidden, heads),
        out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
        module="attn.attention",
    )
    size = c.maybe("intermediate_size") or 4 * hidden
    mlp = Mlp(size, is_gated=False, bias=True, names=("c_fc", "c_proj"))
    layers = tuple(
        Layer(
            (replace(attention, window=c.whole("window_size") if kind == "local" else None),),
            mlp,
            norm=2 * hidden,
            feed_norm=2 * hidden,
        )
        for kind in kinds
    )
    return Decoder(
        "gpt_neo",
        hidden,
        c.whole("vocab_size"),
        layers,
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=2 * hidden,
        positions=c.whole("max_position_embeddings"),
        prefix="transformer",
        layer_name="h",
        embedding_name="wte",
    )


def _repeated(c: ModelConfig, count: int) -> list[str]:
    """What `attention_types` says of each layer: [[["global", "local"], 12]], and more of these."""
    value = c.raw("attention_types")
    kinds: list[str] = []
    for each in value if isinstance(value, list) else [value]:
        match each:
            case [[*group], int(times)] if 0 <= times <= count:
                kinds.extend(str(kind) for _ in range(times) for kind in group)
            case _:
                raise FormatError(
                    f"{c.where}: attention_types must be a list of pairs, kinds of layers and how"
                    f" often they come; got {shown_value(value)}"
                )
    return kinds


def gpt_bigcode(c: ModelConfig) -> Decoder:
    """StarCoder 1: GPT-2 with one key-value head."""
    base = gpt2(c)
    kv_heads = 1 if c.flag("multi_query", default=True) else None
    return each_attention(
        base, "gpt_bigcode", lambda _i, a: replace(a, kv_heads=kv_heads or a.heads)
    )


def opt(c: ModelConfig) -> Decoder:
    """OPT: learned positions, two rows of which are never used; biases; tied."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if c.whole("word_embed_proj_dim", default=hidden) != hidden or not c.flag(
        "do_layer_norm_before", default=True
    ):
        raise FormatError(
            f"{c.where}: word_embed_proj_dim is not hidden_size, or do_layer_norm_before is false;"
            " an OPT of this kind (the one of 350M) can't be read"
        )
    has_bias = c.flag("enable_bias", default=True)
    attention = SelfAttention(
        heads,
        heads,
        head_dim_of(c, hidden, heads),
        q_bias=has_bias,
        kv_bias=has_bias,
        out_bias=has_bias,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    mlp = Mlp(c.whole("ffn_dim"), is_gated=False, bias=has_bias, names=("fc1", "fc2"), module="")
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    return Decoder(
        "opt",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=2 * hidden,
        positions=c.whole("max_position_embeddings") + 2,
        prefix="model.decoder",
    )


def bloom(c: ModelConfig) -> Decoder:
    """BLOOM: ALiBi, a norm on the embedding, fused and biased, tied."""
    hidden = c.whole("hidden_size", "n_embed")
    heads = c.whole("n_head", "num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        head_dim_of(c, hidden, heads),
        q_bias=True,
        out_bias=True,
        fused="query_key_value",
        names=("", "", "", "dense"),
        module="self_attention",
    )
    names = ("dense_h_to_4h", "dense_4h_to_h")
    mlp = Mlp(4 * hidden, is_gated=False, bias=True, names=names)
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    return Decoder(
        "bloom",
        hidden,
        c.whole("vocab_size"),
        (layer,) * c.whole("n_layer", "num_hidden_layers"),
        is_tied=c.flag("tie_word_embeddings", default=True),
        final_norm=2 * hidden,
        embedding_norm=2 * hidden,
        prefix="transformer",
        layer_name="h",
        embedding_name="word_embeddings",
    )


def starcoder2(c: ModelConfig) -> Decoder:
    """StarCoder 2: plain feed-forward, biases, a window, tied."""
    has_bias = c.flag("use_bias", default=True)
    hidden = c.whole("hidden_size")
    attention = replace(self_attention(c, bias=has_bias), window=c.maybe("sliding_window"))
    mlp = Mlp(c.whole("intermediate_size"), is_gated=False, bias=has_bias, names=("c_fc", "c_proj"))
    layer = Layer((attention,), mlp, norm=2 * hidden, feed_norm=2 * hidden)
    layers = [layer] * c.whole("num_hidden_layers")
    return like_llama(c, "starcoder2", layers, tied=True, final_norm=2 * hidden)


def nemotron(c: ModelConfig) -> Decoder:
    """Nemotron 4 and Minitron: biased norms and a plain feed-forward."""
    base = llama(c)
    hidden = base.hidden
    base = each_mlp(base, lambda mlp: replace(mlp, is_gated=False, names=("up_proj", "down_proj")))
    layers = tuple(replace(layer, norm=2 * hidden, feed_norm=2 * hidden) for layer in base.layers)
    return replace(base, family="nemotron", layers=layers, final_norm=2 * hidden)
