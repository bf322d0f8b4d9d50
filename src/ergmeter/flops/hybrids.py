"""State spaces, linear attention, and models that mix them with attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.layers import Decoder, DeltaNet, Experts, Layer, Mamba, Mamba2, Mlp
from ergmeter.flops.llamas import qwen3_full
from ergmeter.flops.pieces import (
    dense_or_experts,
    each_attention,
    every_nth_full,
    experts_of,
    layer_kinds,
    like_llama,
    self_attention,
    with_qk_norms,
)

if TYPE_CHECKING:
    from ergmeter.flops.config import Config


def qwen3_next(c: Config) -> Decoder:
    """Qwen3-Next: three layers of gated linear attention to one of gated attention."""
    base = qwen3_full(c)
    count = len(base.layers)
    every = c.whole("full_attention_interval", default=4)
    kinds = layer_kinds(c, count, every_nth_full(every, "linear_attention"))
    linear = DeltaNet(
        c.whole("linear_num_key_heads"),
        c.whole("linear_num_value_heads"),
        c.whole("linear_key_head_dim"),
        c.whole("linear_value_head_dim"),
        c.whole("linear_conv_kernel_dim"),
    )
    experts = experts_of(
        c,
        c.whole("num_experts", "num_local_experts"),
        c.whole("moe_intermediate_size"),
        shared_size=c.whole("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    base = each_attention(base, "qwen3_next", lambda _i, a: replace(a, is_gated=True))
    layers = tuple(
        replace(layer, mixers=(linear,)) if kind == "linear_attention" else layer
        for layer, kind in zip(base.layers, kinds, strict=True)
    )
    base = replace(base, layers=layers)
    return replace(base, layers=dense_or_experts(c, base, experts))


def mamba(c: Config) -> Decoder:
    """Mamba: nothing but state-space layers."""
    hidden = c.whole("hidden_size", "d_model")
    inner = c.maybe("intermediate_size") or c.share("expand", hidden, default=2)
    layer = Layer(
        (
            Mamba(
                inner,
                c.whole("state_size"),
                c.whole_or_auto("time_step_rank") or -(-hidden // 16),
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
    inner = c.share("expand", hidden, default=2)
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
    state, rank = c.whole("mamba_d_state"), c.whole_or_auto("mamba_dt_rank") or -(-hidden // 16)
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
        experts_of(c, c.whole("num_experts", "num_local_experts"), c.whole("intermediate_size")),
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
    return like_llama(c, "jamba", layers, tied=False)


def mamba2_of(c: Config, *, module: str, bias: bool = False) -> Mamba2:
    """Mamba-2 as the hybrids write it."""
    hidden = c.whole("hidden_size")
    heads = c.whole("mamba_n_heads")
    head_dim = c.whole_or_auto("mamba_d_head")
    inner = c.maybe("mamba_d_ssm") or (
        heads * head_dim if head_dim else c.whole("mamba_expand") * hidden
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


_ATTENDS = ("attention", "full_attention")  # before transformers 5, and since


def bamba(c: Config) -> Decoder:
    """Bamba: Mamba-2 layers with a few of attention, each with a feed-forward."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    attends = c.wholes("attn_layer_indices") or []
    kinds = layer_kinds(
        c,
        count,
        lambda number: "attention" if number in attends else "mamba",
        names=("layers_block_type",),
    )
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = mamba2_of(c, module="mamba")
    mlp = Mlp(c.whole("intermediate_size"), module="feed_forward")
    layers = [
        Layer((attention if kind in _ATTENDS else mixer,), mlp, norm=hidden, feed_norm=hidden)
        for kind in kinds
    ]
    return like_llama(c, "bamba", layers, tied=False)


def falcon_h1(c: Config) -> Decoder:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    hidden = c.whole("hidden_size")
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = replace(mamba2_of(c, module="mamba"), has_norm=c.flag("mamba_rms_norm", default=False))
    mlp = Mlp(c.whole("intermediate_size"), module="feed_forward")
    layer = Layer((mixer, attention), mlp, norm=hidden, feed_norm=hidden)
    return like_llama(c, "falcon_h1", [layer] * c.whole("num_hidden_layers"), tied=False)


def granite_hybrid(c: Config) -> Decoder:
    """Granite 4: Mamba-2 and attention layers, each with experts and a shared feed-forward."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    names = ("layer_types", "layers_block_type")
    kinds = layer_kinds(c, count, lambda _number: "mamba", names=names)
    attention = self_attention(c, bias=c.flag("attention_bias", default=False))
    mixer = mamba2_of(c, module="mamba")
    shared = c.whole("shared_intermediate_size")
    held = c.whole("num_local_experts", default=0, at_least=0)
    feed: Mlp | Experts = Mlp(shared, module="shared_mlp", fused="input_linear")
    if held:
        feed = experts_of(
            c, held, c.whole("intermediate_size"), shared_size=shared, module="block_sparse_moe"
        )
    layers = [
        Layer((attention if kind in _ATTENDS else mixer,), feed, norm=hidden, feed_norm=hidden)
        for kind in kinds
    ]
    return like_llama(c, "granitemoehybrid", layers, tied=True)


def qwen3_5(c: Config) -> Decoder:
    """Qwen 3.5: three layers of gated linear attention to one of gated attention, dense or not."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    every = c.whole("full_attention_interval", default=4)
    kinds = layer_kinds(c, count, every_nth_full(every, "linear_attention"))
    c.whole("head_dim")
    has_bias = c.flag("attention_bias", default=False)
    attention = replace(with_qk_norms(self_attention(c, bias=has_bias)), is_gated=True)
    linear = DeltaNet(
        c.whole("linear_num_key_heads"),
        c.whole("linear_num_value_heads"),
        c.whole("linear_key_head_dim"),
        c.whole("linear_value_head_dim"),
        c.whole("linear_conv_kernel_dim"),
    )
    feed: Mlp | Experts
    if "moe_intermediate_size" in c:
        feed = experts_of(
            c,
            c.whole("num_experts", "num_local_experts"),
            c.whole("moe_intermediate_size"),
            shared_size=c.whole("shared_expert_intermediate_size"),
            has_shared_gate=True,
        )
    else:
        feed = Mlp(c.whole("intermediate_size"))
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


def nemotron_h(c: Config) -> Decoder:
    """Nemotron-H and Nemotron 3: each layer one thing, Mamba-2, attention or a feed-forward."""
    hidden = c.whole("hidden_size")
    kinds = c.names("layers_block_type", "layer_types")
    if kinds is None:
        pattern = c.word("hybrid_override_pattern") or ""
        if not pattern or set(pattern) - set(_NEMOTRON_LETTERS):
            raise FormatError(
                f"{c.where}: the field layers_block_type (or hybrid_override_pattern, of the"
                f" letters {' '.join(_NEMOTRON_LETTERS)}) is missing; add it"
            )
        kinds = [_NEMOTRON_LETTERS[letter] for letter in pattern]
    count = c.whole("num_hidden_layers", default=len(kinds))
    if count != len(kinds):
        raise FormatError(
            f"{c.where}: num_hidden_layers is {count}, and {len(kinds)} layers are listed"
        )
    layers = [_nemotron_layer(c, kind, hidden) for kind in kinds]
    base = like_llama(c, "nemotron_h", layers, tied=False)
    return replace(base, embedding_name="embeddings")


def _nemotron_layer(c: Config, kind: str, hidden: int) -> Layer:
    names = ("up_proj", "down_proj")
    if kind in ("attention", "full_attention"):
        c.whole("head_dim")
        attention = self_attention(c, bias=c.flag("attention_bias", default=False))
        return Layer((replace(attention, module="mixer"),), norm=hidden)
    if kind in ("mamba", "linear_attention"):
        heads = c.whole("mamba_num_heads")
        mixer = Mamba2(
            heads * c.whole("mamba_head_dim"),
            c.whole("ssm_state_size"),
            heads,
            c.whole("n_groups", "mamba_n_groups"),
            c.whole("conv_kernel", "mamba_d_conv"),
            conv_bias=c.flag("use_conv_bias", "mamba_conv_bias", default=True),
            proj_bias=c.flag("mamba_proj_bias", default=False),
        )
        return Layer((mixer,), norm=hidden)
    if kind == "mlp":
        has_bias = c.flag("mlp_bias", default=False)
        mlp = Mlp(c.whole("intermediate_size"), is_gated=False, bias=has_bias, names=names)
        return Layer((), replace(mlp, module="mixer"), feed_norm=hidden)
    if kind != "moe" or "moe_latent_size" in c:
        what = "moe_latent_size" if kind == "moe" else f"a layer of the kind {kind!r}"
        raise FormatError(f"{c.where}: {what} can't be read")
    experts = experts_of(
        c,
        c.whole("n_routed_experts"),
        c.whole("moe_intermediate_size"),
        is_gated=False,
        shared_size=c.whole("moe_shared_expert_intermediate_size"),
        module="mixer",
    )
    return Layer((), experts, feed_norm=hidden)
