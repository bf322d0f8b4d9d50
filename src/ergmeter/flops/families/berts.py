"""Encoders by family: BERT and what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.families.fields import layer_kinds
from ergmeter.flops.graph.encoder_block import EncoderBlock, biased_attention, head_size
from ergmeter.flops.graph.encoders import Encoder, Relative
from ergmeter.flops.graph.layers import Mlp, SelfAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import ModelConfig


def _bert_block(
    c: ModelConfig, *, query: str = "query", key: str = "key", value: str = "value"
) -> EncoderBlock:
    hidden = c.whole("hidden_size")
    attention = biased_attention(
        c,
        hidden,
        c.whole("num_attention_heads"),
        names=(f"self.{query}", f"self.{key}", f"self.{value}", "output.dense"),
        module="attention",
    )
    feed = Mlp(
        c.whole("intermediate_size"),
        is_gated=False,
        bias=True,
        names=("intermediate.dense", "output.dense"),
        module="",
    )
    return EncoderBlock(attention, feed, 2 * hidden, 2 * hidden, is_post_norm=True)


def bert(c: ModelConfig) -> Encoder:
    """BERT."""
    hidden = c.whole("hidden_size")
    width = c.whole("embedding_size", default=hidden)
    rows = c.whole("max_position_embeddings") + c.whole("type_vocab_size", at_least=0)
    return Encoder(
        c.model_type,
        hidden,
        c.whole("vocab_size"),
        (_bert_block(c),) * c.whole("num_hidden_layers"),
        prefix="bert",
        tables=rows * width,
        norm=2 * hidden,
        width=width,
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def roberta(c: ModelConfig) -> Encoder:
    """RoBERTa and XLM-RoBERTa: BERT in all but its names."""
    return replace(bert(c), prefix="roberta", head_names=("lm_head.dense", "lm_head.decoder"))


def electra(c: ModelConfig) -> Encoder:
    """ELECTRA's generator: BERT whose embedding is narrower than its layers."""
    names = ("generator_predictions.dense", "generator_lm_head")
    c.whole("embedding_size")
    return replace(bert(c), prefix="electra", head_names=names)


def ernie(c: ModelConfig) -> Encoder:
    """ERNIE 1 to 3: BERT, in some with a table of tasks as well."""
    base = bert(c)
    tasks = (
        c.whole("task_type_vocab_size", default=0) if c.flag("use_task_id", default=False) else 0
    )
    return replace(base, prefix="ernie", tables=base.tables + tasks * base.hidden)


def albert(c: ModelConfig) -> Encoder:
    """ALBERT: BERT whose layers share their weights, all of them or in groups."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    attention = biased_attention(
        c,
        hidden,
        c.whole("num_attention_heads"),
        names=("query", "key", "value", "dense"),
        module="attention",
    )
    size = c.whole("intermediate_size")
    feed = Mlp(size, is_gated=False, bias=True, names=("ffn", "ffn_output"), module="")
    block = EncoderBlock(attention, feed, 2 * hidden, 2 * hidden, is_post_norm=True)
    groups, inner = c.whole("num_hidden_groups", default=1), c.whole("inner_group_num", default=1)
    width = c.whole("embedding_size")
    rows = c.whole("max_position_embeddings") + c.whole("type_vocab_size", at_least=0)
    return Encoder(
        "albert",
        hidden,
        c.whole("vocab_size"),
        (block,) * (count * inner),
        prefix="albert",
        tables=rows * width,
        norm=2 * hidden,
        width=width,
        is_projected=True,
        head_names=("predictions.dense", "predictions.decoder"),
        weights_of=tuple(
            int(number / (count / groups)) * inner + place
            for number in range(count)
            for place in range(inner)
        ),
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def mpnet(c: ModelConfig) -> Encoder:
    """MPNet: BERT without segment types, with a bias for each relative position."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    block = _bert_block(c)
    names = ("attn.q", "attn.k", "attn.v", "attn.o")
    block = replace(block, attention=replace(block.attention, names=names))
    buckets = c.whole("relative_attention_num_buckets")
    return Encoder(
        "mpnet",
        hidden,
        c.whole("vocab_size"),
        (block,) * c.whole("num_hidden_layers"),
        prefix="mpnet",
        tables=c.whole("max_position_embeddings") * hidden + buckets * heads,
        norm=2 * hidden,
        head_names=("lm_head.dense", "lm_head.decoder"),
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def esm(c: ModelConfig) -> Encoder:
    """ESM-2 and ESM-1b: BERT with its norms before each part, rotary or learned positions."""
    if c.flag("is_folding_model", default=False):
        raise FormatError(
            f"{c.where}: is_folding_model is true; ESMFold's trunk can't be read: leave the field"
            " out to count its language model"
        )
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    has_table = (c.word("position_embedding_type") or "absolute") == "absolute"
    heads = c.whole("num_attention_heads")
    return Encoder(
        "esm",
        hidden,
        c.whole("vocab_size"),
        (replace(_bert_block(c), is_post_norm=False),) * count,
        prefix="esm",
        tables=c.whole("max_position_embeddings") * hidden if has_table else 0,
        norm=2 * hidden,
        has_norm=c.flag("emb_layer_norm_before", default=False),
        final_norm=2 * hidden,
        head_names=("lm_head.dense", "lm_head.decoder"),
        unused=count * heads + 1,  # a regression on all attention weights, which training leaves
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def distilbert(c: ModelConfig) -> Encoder:
    """DistilBERT: no segment types, and names of its own."""
    hidden = c.whole("dim", "hidden_size")
    attention = biased_attention(
        c,
        hidden,
        c.whole("n_heads", "num_attention_heads"),
        names=("q_lin", "k_lin", "v_lin", "out_lin"),
        module="attention",
    )
    feed = Mlp(c.whole("hidden_dim"), is_gated=False, bias=True, names=("lin1", "lin2"))
    feed = replace(feed, module="ffn")
    block = EncoderBlock(attention, feed, 2 * hidden, 2 * hidden, is_post_norm=True)
    return Encoder(
        "distilbert",
        hidden,
        c.whole("vocab_size"),
        (block,) * c.whole("n_layers", "num_hidden_layers"),
        prefix="distilbert",
        tables=c.whole("max_position_embeddings") * hidden,
        norm=2 * hidden,
        layer_name="transformer.layer",
        head_names=("vocab_transform", "vocab_projector"),
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def modernbert(c: ModelConfig) -> Encoder:
    """ModernBERT: gated, rotary, two layers that see a neighbourhood to one that sees all."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    norm = hidden * (1 + c.flag("norm_bias", default=False))
    has_bias = c.flag("attention_bias", default=False)
    heads = c.whole("num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        head_size(c, hidden, heads),
        q_bias=has_bias,
        out_bias=has_bias,
        mask="full",
        fused="Wqkv",
        names=("", "", "", "Wo"),
        module="attn",
    )
    feed = Mlp(
        c.whole("intermediate_size"),
        bias=c.flag("mlp_bias", default=False),
        names=("Wi", "Wo"),
        fused="Wi",
    )
    every = c.whole("global_attn_every_n_layers", default=3)
    kinds = layer_kinds(
        c, count, lambda number: "sliding_attention" if number % every else "full_attention"
    )
    window = c.whole("local_attention")
    blocks = tuple(
        EncoderBlock(
            replace(attention, window=window if kind == "sliding_attention" else None),
            feed,
            norm if number else 0,
            norm,
        )
        for number, kind in enumerate(kinds)
    )
    return Encoder(
        "modernbert",
        hidden,
        c.whole("vocab_size"),
        blocks,
        prefix="model",
        tables=0,
        norm=norm,
        layer_name="layers",
        final_norm=norm,
        head_bias=c.flag("classifier_bias", default=False),
        head_names=("head.dense", "decoder"),
        has_decoder_bias=c.flag("decoder_bias", default=True),
        is_tied=c.flag("tie_word_embeddings", default=True),
    )


def deberta(c: ModelConfig) -> Encoder:
    """DeBERTa 2 and 3: BERT whose attention also compares contents with relative positions."""
    base = bert(c)
    names = {"query": "query_proj", "key": "key_proj", "value": "value_proj"}
    hidden, positions = base.hidden, c.whole("max_position_embeddings")
    absolute = positions if c.flag("position_biased_input", default=True) else 0
    tables = (absolute + c.whole("type_vocab_size", at_least=0)) * hidden
    relative = None
    if c.flag("relative_attention", default=False):
        buckets = c.whole("position_buckets", default=-1, at_least=-1)
        span = c.whole("max_relative_positions", default=-1, at_least=-1)
        listed = c.raw("pos_att_type")
        kinds = listed.split("|") if isinstance(listed, str) else c.names("pos_att_type") or []
        has_norm = "layer_norm" in (c.word("norm_rel_ebd") or "").split("|")
        relative = Relative(
            2 * (buckets if buckets > 0 else span if span > 0 else positions),
            tuple(kind for kind in ("c2p", "p2c") if kind in kinds),
            c.flag("share_att_key", default=False),
            2 * hidden if has_norm else 0,
        )
    return replace(
        base,
        prefix="deberta",
        tables=tables,
        blocks=(_bert_block(c, **names),) * len(base.blocks),
        relative=relative,
        conv_width=c.whole("conv_kernel_size", default=0, at_least=0),
    )


ENCODERS: dict[str, Callable[[ModelConfig], Encoder]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "camembert": roberta,
    "electra": electra,
    "distilbert": distilbert,
    "modernbert": modernbert,
    "deberta-v2": deberta,
    "albert": albert,
    "mpnet": mpnet,
    "esm": esm,
    "ernie": ernie,
    "data2vec-text": roberta,
}
