"""Models that only read, and the layer that every encoder is made of.

The trap: the order of norms. BERT has its norms after each part and most others before, and with
frozen embeddings that decides whether the first projections are walked back through. So a layer is
built in its own order, not in one that has the same parameters.

An encoder is counted with the head of masked language modelling at every position, as transformers
computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.decoder import add_mlp
from ergmeter.flops.graph import Attention, Builder, Graph, Node
from ergmeter.flops.layers import Mlp, SelfAttention
from ergmeter.flops.mixing import add_attention
from ergmeter.flops.pieces import layer_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.flops.config import Config


@dataclass(frozen=True, slots=True)
class Block:
    """A layer of an encoder, or of the decoder that reads from one."""

    attention: SelfAttention
    feed: Mlp
    norm: int  # parameters of the norm at the attention
    feed_norm: int  # and of that at the feed-forward
    cross: SelfAttention | None = None  # attention to the source; its norm is as large as `norm`
    is_post_norm: bool = False  # normed after the sum and not before the part
    extra_params: int = 0  # such as a scale for each channel


def add_block(
    b: Builder,
    block: Block,
    x: str,
    *,
    name: str,
    hidden: int,
    stream: str,
    memory: str | None = None,
) -> str:
    """Append a layer; `memory` is what cross attention reads."""
    node = _Sums(b, name=name, stream=stream, is_post_norm=block.is_post_norm)

    def attention(source: str) -> str:
        return add_attention(
            b, block.attention, source, source, name=name, hidden=hidden, stream=stream
        )

    def feed(source: str) -> str:
        return add_mlp(b, block.feed, source, name=name, hidden=hidden, part="mlp", stream=stream)

    out = node.around("attention", x, block.norm + block.extra_params, attention)
    cross = block.cross
    if cross is not None and memory is not None:

        def across(source: str) -> str:
            return add_attention(
                b, cross, source, memory, name=name, hidden=hidden, stream=stream, keys="source"
            )

        out = node.around("cross", out, block.norm, across)
    return node.around("feed", out, block.feed_norm, feed)


@dataclass(frozen=True, slots=True)
class _Sums:
    """How a layer adds its parts to what goes through it."""

    b: Builder
    name: str
    stream: str
    is_post_norm: bool

    def around(self, what: str, x: str, params: int, part: Callable[[str], str]) -> str:
        if self.is_post_norm:
            return self._norm(what, (x, part(x)), params)
        made = part(self._norm(what, (x,), params))
        return self.b.add(
            f"{self.name}.{what}_out", "residual", (x, made), stream=self.stream, layer=self.name
        )

    def _norm(self, what: str, of: tuple[str, ...], params: int) -> str:
        return self.b.add(
            f"{self.name}.{what}_norm",
            "norm",
            of,
            params=params,
            stream=self.stream,
            layer=self.name,
        )


def renamed(nodes: Sequence[Node], what: str) -> tuple[Node, ...]:
    """The nodes, counted in rows of the table of their own: `encoder mlp`, `vision mlp`."""
    return tuple(replace(node, part=f"{what} {node.part}") for node in nodes)


# -- encoders by themselves ------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """An encoder with the head of masked language modelling."""

    family: str
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    prefix: str
    tables: int  # parameters of learned positions and of segment types
    norm: int  # parameters of one norm of the hidden size
    layer_name: str = "encoder.layer"
    width: int | None = None  # of the embedding, where it is projected to the hidden size
    final_norm: int = 0
    head_bias: bool = True  # of the transformation before the last matrix
    head_names: tuple[str, str] = ("cls.predictions.transform.dense", "cls.predictions.decoder")
    is_tied: bool = True
    has_decoder_bias: bool = True
    relative: Relative | None = None
    conv_width: int = 0  # of a convolution beside the first layer


@dataclass(frozen=True, slots=True)
class Relative:
    """Disentangled attention (DeBERTa, arXiv 2006.03654): contents against relative positions."""

    rows: int  # of the table, each side of zero together
    kinds: tuple[str, ...]  # c2p, p2c
    is_shared: bool  # positions go through the projections of the contents
    norm: int


def encoder_graph(e: Encoder) -> Graph:
    """The graph of an encoder with its head."""
    b = Builder()
    width = e.width or e.hidden
    embedding = b.add(
        f"{e.prefix}.embeddings.word_embeddings",
        "embedding",
        params=e.vocab * width,
        role="embedding",
    )
    taken: tuple[str, ...] = (embedding,)
    if e.tables:
        table = b.add(
            f"{e.prefix}.embeddings.tables", "embedding", params=e.tables, role="positions"
        )
        taken = (embedding, table)
    norm = e.norm * width // e.hidden
    x = start = b.add(f"{e.prefix}.embeddings.norm", "norm", taken, params=norm)
    if width != e.hidden:
        x = b.linear(f"{e.prefix}.embeddings_project", "embedding", x, width, e.hidden, bias=True)
    positions = _positions(b, e)
    for number, block in enumerate(e.blocks):
        name = f"{e.prefix}.{e.layer_name}.{number}"
        if e.relative is not None and positions is not None:
            x = _add_disentangled(b, block, e.relative, x, positions, name=name, hidden=e.hidden)
        else:
            x = add_block(b, block, x, name=name, hidden=e.hidden, stream="tokens")
        if e.conv_width and number == 0:
            x = _beside(b, e, start, x)
    if e.final_norm:
        x = b.add(f"{e.prefix}.final_norm", "norm", x, params=e.final_norm)
    _add_masked_head(b, e, x, embedding, width=width, norm=norm)
    facts = {} if e.relative is None else {"relative_positions": e.relative.rows}
    return Graph(e.family, tuple(b.nodes), e.hidden, len(e.blocks), e.vocab, facts=facts)


def _add_masked_head(
    b: Builder, e: Encoder, x: str, embedding: str, *, width: int, norm: int
) -> None:
    dense, decoder = e.head_names
    x = b.linear(dense, "head", x, e.hidden, width, bias=e.head_bias, stream="logits")
    x = b.add(f"{dense}_norm", "norm", x, params=norm, stream="logits")
    b.linear(
        decoder,
        "head",
        x,
        width,
        e.vocab,
        bias=e.has_decoder_bias,
        stream="logits",
        role="head",
        tied_to=embedding if e.is_tied else None,
    )


def _positions(b: Builder, e: Encoder) -> str | None:
    """The table of relative positions, which goes through every layer once a step."""
    if e.relative is None:
        return None
    return b.add(
        f"{e.prefix}.encoder.rel_embeddings",
        "embedding",
        params=e.relative.rows * e.hidden + e.relative.norm,
        stream="relative positions",
        role="positions",
    )


def _beside(b: Builder, e: Encoder, start: str, x: str) -> str:
    conv = b.linear(
        f"{e.prefix}.encoder.conv.conv",
        "convolution",
        start,
        e.conv_width * e.hidden,
        e.hidden,
        bias=True,
        is_module=False,
    )
    return b.add(f"{e.prefix}.encoder.conv.LayerNorm", "norm", (x, conv), params=e.norm)


def _add_disentangled(
    b: Builder, block: Block, r: Relative, x: str, positions: str, *, name: str, hidden: int
) -> str:
    """A layer whose scores are three products: contents with each other and with positions."""
    inner = Builder()
    out = add_block(inner, block, x, name=name, hidden=hidden, stream="tokens")
    a = block.attention
    at = f"{name}.{a.module}"
    query, key = f"{at}.{a.names[0]}", f"{at}.{a.names[1]}"
    met: list[str] = []
    for node in inner.nodes:
        if node.name == f"{at}.core":
            for kind in r.kinds:
                content, position = (query, key) if kind == "c2p" else (key, query)
                met.append(_product(b, r, a, content, position, positions, kind, name=name))
        b.nodes.append(replace(node, of=(*node.of, *met)) if node.of == (f"{at}.core",) else node)
    return out


def _product(
    b: Builder,
    r: Relative,
    a: SelfAttention,
    content: str,
    position: str,
    positions: str,
    kind: str,
    *,
    name: str,
) -> str:
    size = a.heads * a.head_dim
    projection = "pos_key_proj" if kind == "c2p" else "pos_query_proj"
    own = b.linear(
        f"{name}.{a.module}.self.{projection}",
        "attention qkv",
        positions,
        size,
        size,
        bias=not r.is_shared,
        is_module=not r.is_shared,
        stream="relative positions",
        layer=name,
        tied_to=position if r.is_shared else None,
    )
    return b.add(
        f"{name}.{a.module}.{kind}",
        "attention",
        (content, own, own),
        work=Attention(a.heads, a.head_dim, 0, a.heads, "full", keys="relative positions"),
        layer=name,
    )


def _heads(c: Config, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise FormatError(f"{c.where}: the hidden size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def biased_attention(c: Config, hidden: int, heads: int, **more: object) -> SelfAttention:
    """Attention that looks both ways, with biases everywhere."""
    plain = SelfAttention(
        heads,
        heads,
        _heads(c, hidden, heads),
        q_bias=True,
        kv_bias=True,
        out_bias=True,
        mask="full",
    )
    return replace(plain, **more)  # type: ignore[arg-type]


def _bert_block(
    c: Config, *, query: str = "query", key: str = "key", value: str = "value"
) -> Block:
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
    return Block(attention, feed, 2 * hidden, 2 * hidden, is_post_norm=True)


def bert(c: Config) -> Encoder:
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


def roberta(c: Config) -> Encoder:
    """RoBERTa and XLM-RoBERTa: BERT in all but its names."""
    return replace(bert(c), prefix="roberta", head_names=("lm_head.dense", "lm_head.decoder"))


def electra(c: Config) -> Encoder:
    """ELECTRA's generator: BERT whose embedding is narrower than its layers."""
    names = ("generator_predictions.dense", "generator_lm_head")
    c.whole("embedding_size")
    return replace(bert(c), prefix="electra", head_names=names)


def distilbert(c: Config) -> Encoder:
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
    block = Block(attention, feed, 2 * hidden, 2 * hidden, is_post_norm=True)
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


def modernbert(c: Config) -> Encoder:
    """ModernBERT: gated, rotary, two layers that see a neighbourhood to one that sees all."""
    hidden, count = c.whole("hidden_size"), c.whole("num_hidden_layers")
    norm = hidden * (1 + c.flag("norm_bias", default=False))
    has_bias = c.flag("attention_bias", default=False)
    heads = c.whole("num_attention_heads")
    attention = SelfAttention(
        heads,
        heads,
        _heads(c, hidden, heads),
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
        Block(
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


def deberta(c: Config) -> Encoder:
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


ENCODERS: dict[str, Callable[[Config], Encoder]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "camembert": roberta,
    "electra": electra,
    "distilbert": distilbert,
    "modernbert": modernbert,
    "deberta-v2": deberta,
}
