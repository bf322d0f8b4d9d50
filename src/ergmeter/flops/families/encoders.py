"""Readers and graphs of encoders (BERT and its successors) and of encoder-decoders (T5, BART).

An encoder is built with a masked-language-modelling head at every position, as transformers
computes it. `graph.heads` replaces the head if the model's class has another.

An encoder-decoder has two sequence lengths: the source, which is read once, and the target. The
decoder's layers compute the keys of cross attention, one per source position. The encoder's rows
are the stream `source`, the decoder's are `tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from ergmeter.errors import FormatError
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.families.pieces import Names, biased_attention, layer_kinds, windows_of
from ergmeter.flops.graph.graph import Attention, Builder, Graph, Node
from ergmeter.flops.graph.layers import AttentionLayer, EncoderBlock, Mlp, add_block, renamed


@dataclass(frozen=True)
class Encoder:
    """An encoder with a masked-language-modelling head."""

    family: str
    hidden: int
    vocab: int
    blocks: tuple[EncoderBlock, ...]
    prefix: str
    tables: int  # parameters of learned positions and of segment types
    norm: int  # parameters of one norm of the hidden size
    layer_name: str = "encoder.layer"
    width: int | None = None  # of the embedding, where it is projected to the hidden size
    final_norm: int = 0
    head_bias: bool = True  # of the head's first matrix
    head_names: tuple[str, str] = ("cls.predictions.transform.dense", "cls.predictions.decoder")
    is_tied: bool = True
    has_decoder_bias: bool = True
    relative: Relative | None = None
    conv_width: int = 0  # of a convolution beside the first layer
    has_norm: bool = True  # a norm after the embedding
    is_projected: bool = False  # project the embedding even if it is as wide as the layers
    weights_of: tuple[int, ...] = ()  # layers with the same number here share their weights
    unused: int = 0  # parameters that language-model training does not read


@dataclass(frozen=True, slots=True)
class Relative:
    """Disentangled attention (DeBERTa, arXiv 2006.03654): also contents x relative positions."""

    rows: int  # of the table: negative and positive distances
    kinds: tuple[str, ...]  # c2p (content to position), p2c
    is_shared: bool  # positions use the projections of the contents
    norm: int  # parameters of the table's norm


def encoder_graph(e: Encoder) -> Graph:
    """Return the graph of an encoder with its masked-language-modelling head."""
    b = Builder()
    at, width = e.prefix, e.width or e.hidden
    name = f"{at}.embeddings.word_embeddings"
    embedding = b.add(name, "embedding", params=e.vocab * width, role="embedding")
    taken: tuple[str, ...] = (embedding,)
    if e.tables:
        table = b.add(f"{at}.embeddings.tables", "embedding", params=e.tables, role="positions")
        taken = (embedding, table)
    norm = e.norm * width // e.hidden
    first = norm if e.has_norm else 0
    x = start = b.add(f"{at}.embeddings.norm", "norm", taken, params=first)
    if width != e.hidden or e.is_projected:
        x = b.linear(f"{at}.embeddings_project", "embedding", x, width, e.hidden, bias=True)
    positions = ""
    if e.relative is not None:  # every layer projects the whole table once a step
        name, params = f"{at}.encoder.rel_embeddings", e.relative.rows * e.hidden + e.relative.norm
        stream = "relative positions"
        positions = b.add(name, "embedding", params=params, stream=stream, role="positions")
    for number, block in enumerate(e.blocks):
        layer = b.within(f"{at}.{e.layer_name}.{number}")
        if e.relative is not None:
            x = _add_disentangled(layer, block, e.relative, x, positions, e.hidden)
        else:
            x = add_block(layer, block, x, e.hidden)
        if e.conv_width and number == 0:
            x = _beside(b, e, start, x)
    if e.weights_of:
        b.nodes = _shared(b.nodes, e)
    if e.unused:
        b.add(f"{at}.contact_head.regression", "other", params=e.unused)
    if e.final_norm:
        x = b.add(f"{at}.final_norm", "norm", x, params=e.final_norm)
    # The head of masked language modelling.
    dense, decoder = e.head_names
    x = b.linear(dense, "head", x, e.hidden, width, bias=e.head_bias, stream="logits")
    x = b.add(f"{dense}_norm", "norm", x, params=norm, stream="logits")
    tied_to = embedding if e.is_tied else None
    b.head(decoder, x, width, e.vocab, bias=e.has_decoder_bias, tied_to=tied_to)
    facts = {} if e.relative is None else {"relative_positions": e.relative.rows}
    return Graph(e.family, tuple(b.nodes), e.hidden, len(e.blocks), e.vocab, facts=facts)


def _shared(nodes: list[Node], e: Encoder) -> list[Node]:
    """Return the nodes; layers that share weights are tied to the first layer that has them."""
    names = [f"{e.prefix}.{e.layer_name}.{number}" for number in range(len(e.blocks))]
    owners = {name: names[e.weights_of.index(e.weights_of[n])] for n, name in enumerate(names)}

    def shared(node: Node) -> Node:
        layer = node.layer or ""
        owner = owners.get(layer, layer)
        if owner == layer or not node.params:
            return node
        return replace(node, params=0, tied_to=f"{owner}{node.name.removeprefix(layer)}")

    return list(map(shared, nodes))


def _beside(b: Builder, e: Encoder, start: str, x: str) -> str:
    at, wide = f"{e.prefix}.encoder.conv", e.conv_width * e.hidden
    conv = b.linear(f"{at}.conv", "convolution", start, wide, e.hidden, bias=True, is_module=False)
    return b.add(f"{at}.LayerNorm", "norm", (x, conv), params=e.norm)


def _add_disentangled(
    b: Builder, block: EncoderBlock, r: Relative, x: str, positions: str, hidden: int
) -> str:
    """Append a DeBERTa layer: scores of contents x contents and contents x relative positions."""
    inner = Builder(layer=b.layer)
    out = add_block(inner, block, x, hidden)
    a = block.attention
    at = f"{b.layer}.{a.module}"
    query, key = f"{at}.{a.names[0]}", f"{at}.{a.names[1]}"
    met: list[str] = []
    for node in inner.nodes:
        if node.name == f"{at}.core":
            for kind in r.kinds:
                content, position = (query, key) if kind == "c2p" else (key, query)
                met.append(_product(b, r, a, (content, position, positions), kind))
        b.nodes.append(replace(node, of=(*node.of, *met)) if node.of == (f"{at}.core",) else node)
    return out


def _product(
    b: Builder, r: Relative, a: AttentionLayer, of: tuple[str, str, str], kind: str
) -> str:
    content, position, positions = of
    size = a.heads * a.head_dim
    projection = "pos_key_proj" if kind == "c2p" else "pos_query_proj"
    name, tied_to = f"{a.module}.self.{projection}", position if r.is_shared else None
    rows, is_own = Builder(b.nodes, layer=b.layer, stream="relative positions"), not r.is_shared
    own = rows.linear(
        name, "attention qkv", positions, size, size, bias=is_own, is_module=is_own, tied_to=tied_to
    )
    work = Attention(a.heads, a.head_dim, 0, a.heads, "full", keys="relative positions")
    return b.add(f"{a.module}.{kind}", "attention", (content, own, own), work=work)


# Families of encoders.

_LM_HEAD = ("lm_head.dense", "lm_head.decoder")


def _block(
    c: ModelConfig,
    attention: tuple[str, ...] = ("self.query", "self.key", "self.value", "output.dense"),
    feed: tuple[str, str] = ("intermediate.dense", "output.dense"),
    *,
    module: str = "",
    hidden: Names = ("hidden_size",),
    heads: Names = ("num_attention_heads",),
    size: Names = ("intermediate_size",),
) -> EncoderBlock:
    """Return a BERT layer; arguments name its matrices and the config fields with its sizes."""
    wide = c.integer(*hidden)
    mixer = biased_attention(c, wide, c.integer(*heads), names=attention, module="attention")
    mlp = Mlp(c.integer(*size), is_gated=False, bias=True, names=feed, module=module)
    return EncoderBlock(mixer, mlp, 2 * wide, 2 * wide, is_post_norm=True)


def _encoder(
    c: ModelConfig,
    hidden: int,
    tables: int,
    blocks: tuple[EncoderBlock, ...],
    **changes: Any,  # noqa: ANN401
) -> Encoder:
    """Return an encoder of `blocks`; `tables`: parameters of positions and segment types."""
    kind, vocab = c.model_type, c.integer("vocab_size")
    is_tied = c.flag("tie_word_embeddings", default=True)
    base = Encoder(kind, hidden, vocab, blocks, kind, tables, norm=2 * hidden, is_tied=is_tied)
    return replace(base, **changes)


def bert(c: ModelConfig, block: EncoderBlock | None = None, **changes: Any) -> Encoder:  # noqa: ANN401
    """BERT; `block` and `changes` make variants of it."""
    hidden = c.integer("hidden_size")
    width = c.integer("embedding_size", default=hidden)
    rows = c.integer("max_position_embeddings") + c.integer("type_vocab_size", at_least=0)
    blocks = (block or _block(c),) * c.integer("num_hidden_layers")
    return _encoder(c, hidden, rows * width, **{"blocks": blocks, "width": width, **changes})


def electra(c: ModelConfig) -> Encoder:
    """ELECTRA's generator: BERT with an embedding that is narrower than its layers."""
    c.integer("embedding_size")
    return bert(c, head_names=("generator_predictions.dense", "generator_lm_head"))


def ernie(c: ModelConfig) -> Encoder:
    """ERNIE 1 to 3: BERT, in some models with a table of task types."""
    base = bert(c)
    has_tasks = c.flag("use_task_id", default=False)
    tasks = c.integer("task_type_vocab_size", default=0) if has_tasks else 0
    return replace(base, tables=base.tables + tasks * base.hidden)


def albert(c: ModelConfig) -> Encoder:
    """ALBERT: BERT with weights shared between all layers or between groups of layers."""
    count = c.integer("num_hidden_layers")
    block = _block(c, ("query", "key", "value", "dense"), ("ffn", "ffn_output"))
    groups = c.integer("num_hidden_groups", default=1)
    inner = c.integer("inner_group_num", default=1)
    c.integer("embedding_size")
    return bert(
        c,
        blocks=(block,) * (count * inner),
        is_projected=True,
        head_names=("predictions.dense", "predictions.decoder"),
        weights_of=tuple(
            int(number / (count / groups)) * inner + inner_layer
            for number in range(count)
            for inner_layer in range(inner)
        ),
    )


def mpnet(c: ModelConfig) -> Encoder:
    """MPNet: BERT without segment types, with a bias for each relative position."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    buckets = c.integer("relative_attention_num_buckets")
    tables = c.integer("max_position_embeddings") * hidden + buckets * heads
    names = ("attn.q", "attn.k", "attn.v", "attn.o")
    blocks = (_block(c, names),) * c.integer("num_hidden_layers")
    return _encoder(c, hidden, tables, blocks, head_names=_LM_HEAD)


def esm(c: ModelConfig) -> Encoder:
    """ESM-2 and ESM-1b: BERT with pre-norm layers and rotary or learned positions."""
    if c.flag("is_folding_model", default=False):
        raise FormatError(
            f"{c.where}: is_folding_model is true; ESMFold's trunk is not supported: leave the"
            " field out to count the language model only"
        )
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    has_table = (c.word("position_embedding_type") or "absolute") == "absolute"
    heads = c.integer("num_attention_heads")
    return _encoder(
        c,
        hidden,
        c.integer("max_position_embeddings") * hidden if has_table else 0,
        (replace(_block(c), is_post_norm=False),) * count,
        has_norm=c.flag("emb_layer_norm_before", default=False),
        final_norm=2 * hidden,
        head_names=_LM_HEAD,
        unused=count * heads + 1,  # a regression on attention weights that training does not use
    )


def distilbert(c: ModelConfig) -> Encoder:
    """DistilBERT: BERT without segment types, with other field and module names."""
    block = _block(
        c,
        ("q_lin", "k_lin", "v_lin", "out_lin"),
        ("lin1", "lin2"),
        module="ffn",
        hidden=("dim", "hidden_size"),
        heads=("n_heads", "num_attention_heads"),
        size=("hidden_dim",),
    )
    hidden, vocab = c.integer("dim", "hidden_size"), c.integer("vocab_size")
    return _encoder(
        c,
        hidden,
        c.integer("max_position_embeddings") * hidden,
        (block,) * c.integer("n_layers", "num_hidden_layers"),
        vocab=vocab,
        layer_name="transformer.layer",
        head_names=("vocab_transform", "vocab_projector"),
    )


def modernbert(c: ModelConfig) -> Encoder:
    """ModernBERT: gated feed-forward, rotary positions; 2 layers with a window to 1 full."""
    hidden, count = c.integer("hidden_size"), c.integer("num_hidden_layers")
    norm = hidden * (1 + c.flag("norm_bias", default=False))
    has_bias = c.flag("attention_bias", default=False)
    heads = c.integer("num_attention_heads")
    biases = {"q_bias": has_bias, "kv_bias": False, "out_bias": has_bias}
    names = {"fused": "Wqkv", "names": ("", "", "", "Wo"), "module": "attn"}
    attention = biased_attention(c, hidden, heads, **biases, **names)
    size, mlp_bias = c.integer("intermediate_size"), c.flag("mlp_bias", default=False)
    feed = Mlp(size, bias=mlp_bias, names=("Wi", "Wo"), fused="Wi")
    every = c.integer("global_attn_every_n_layers", default=3)
    kinds = layer_kinds(
        c, count, lambda number: "sliding_attention" if number % every else "full_attention"
    )
    windows = windows_of(kinds, c.integer("local_attention"))
    blocks = tuple(
        EncoderBlock(replace(attention, window=window), feed, norm if number else 0, norm)
        for number, window in enumerate(windows)
    )
    return _encoder(
        c,
        hidden,
        0,
        blocks,
        prefix="model",
        norm=norm,
        layer_name="layers",
        final_norm=norm,
        head_bias=c.flag("classifier_bias", default=False),
        head_names=("head.dense", "decoder"),
        has_decoder_bias=c.flag("decoder_bias", default=True),
    )


def deberta(c: ModelConfig) -> Encoder:
    """DeBERTa 2 and 3: BERT with attention scores of contents x relative positions as well."""
    names = ("self.query_proj", "self.key_proj", "self.value_proj", "output.dense")
    base = bert(c, _block(c, names), prefix="deberta")
    hidden, positions = base.hidden, c.integer("max_position_embeddings")
    absolute = positions if c.flag("position_biased_input", default=True) else 0
    tables = (absolute + c.integer("type_vocab_size", at_least=0)) * hidden
    relative = None
    if c.flag("relative_attention", default=False):
        buckets = c.integer("position_buckets", default=-1, at_least=-1)
        span = c.integer("max_relative_positions", default=-1, at_least=-1)
        listed = c.raw("pos_att_type")
        kinds = listed.split("|") if isinstance(listed, str) else c.names("pos_att_type") or []
        has_norm = "layer_norm" in (c.word("norm_rel_ebd") or "").split("|")
        relative = Relative(
            2 * (buckets if buckets > 0 else span if span > 0 else positions),
            tuple(kind for kind in ("c2p", "p2c") if kind in kinds),
            c.flag("share_att_key", default=False),
            2 * hidden if has_norm else 0,
        )
    conv_width = c.integer("conv_kernel_size", default=0, at_least=0)
    return replace(base, tables=tables, relative=relative, conv_width=conv_width)


ENCODERS: dict[str, Callable[[ModelConfig], Encoder]] = {
    "bert": bert,
    # BERT in all but its names.
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "data2vec-text"),
        partial(bert, prefix="roberta", head_names=_LM_HEAD),
    ),
    "electra": electra,
    "distilbert": distilbert,
    "modernbert": modernbert,
    "deberta-v2": deberta,
    "albert": albert,
    "mpnet": mpnet,
    "esm": esm,
    "ernie": ernie,
}


# Encoder-decoders.


@dataclass(frozen=True, slots=True)
class Stack:
    """The encoder or the decoder of an encoder-decoder: its layers, positions and norms."""

    blocks: tuple[EncoderBlock, ...]
    prefix: str
    positions: int = 0  # parameters of the table
    embedding_norm: int = 0
    final_norm: int = 0


@dataclass(frozen=True)
class Seq2Seq:
    """An encoder-decoder: the decoder's cross attention reads the encoder's output."""

    family: str
    hidden: int
    vocab: int
    encoder: Stack
    decoder: Stack
    is_tied: bool
    shared: str | None = "model.shared"  # the embedding of both
    layer_name: str = "layers"
    head_name: str = "lm_head"
    mel_bins: int = 0  # of a spectrogram, which two convolutions read; 0: text input
    facts: tuple[tuple[str, int], ...] = ()
    assumptions: tuple[str, ...] = ()


def seq2seq_graph(m: Seq2Seq) -> Graph:
    """Return an encoder-decoder's graph: streams `source` (encoder) and `tokens` (decoder)."""
    b = Builder()
    shared = None
    if m.shared is not None:
        shared = b.add(m.shared, "embedding", params=m.vocab * m.hidden, role="embedding")
    reader = Builder(stream="source")
    first = _front_end(reader, m) if m.mel_bins else _embedding(reader, m, m.encoder, shared)
    memory = _add_stack(reader, m, m.encoder, first)
    b.nodes.extend(renamed(reader.nodes, "encoder"))
    target = _embedding(b, m, m.decoder, shared)
    out = _add_stack(b, m, m.decoder, target, memory=memory)
    tied_to = (shared or target) if m.is_tied else None
    b.head(m.head_name, out, m.hidden, m.vocab, bias=False, tied_to=tied_to)
    layers = len(m.encoder.blocks) + len(m.decoder.blocks)
    facts = dict(m.facts)
    return Graph(m.family, tuple(b.nodes), m.hidden, layers, m.vocab, m.assumptions, facts)


def _embedding(b: Builder, m: Seq2Seq, stack: Stack, shared: str | None) -> str:
    params = 0 if shared else m.vocab * m.hidden
    name = f"{stack.prefix}.embed_tokens"
    return b.add(name, "embedding", params=params, role="embedding", tied_to=shared)


def _front_end(b: Builder, m: Seq2Seq) -> str:
    """Append two convolutions of width 3 over the spectrogram, the second with stride 2.

    Each is a matrix product of a row and its two neighbours: 3 x channels in, the hidden size out.
    """
    x: str | tuple[str, ...] = ()
    for number, inputs, stream in ((1, m.mel_bins, "frames"), (2, m.hidden, "source")):
        name, rows = f"{m.encoder.prefix}.conv{number}", Builder(b.nodes, stream=stream)
        x = rows.linear(name, "convolution", x, 3 * inputs, m.hidden, bias=True, is_module=False)
    return str(x)


def _add_stack(b: Builder, m: Seq2Seq, stack: Stack, x: str, *, memory: str | None = None) -> str:
    at = stack.prefix
    taken: tuple[str, ...] = (x,)
    if stack.positions:
        name = f"{at}.embed_positions"
        taken = (x, b.add(name, "embedding", params=stack.positions, role="positions"))
    x = b.add(f"{at}.embedding_norm", "norm", taken, params=stack.embedding_norm)
    for number, block in enumerate(stack.blocks):
        layer = b.within(f"{at}.{m.layer_name}.{number}", b.stream)
        x = add_block(layer, block, x, m.hidden, memory=memory)
    return b.add(f"{at}.norm", "norm", x, params=stack.final_norm)


def t5(c: ModelConfig) -> Seq2Seq:
    """T5, mT5, FLAN, UMT5. A relative-position table is in each stack's first layer; UMT5: all."""
    tables_everywhere = c.model_type == "umt5"
    hidden, heads = c.integer("d_model"), c.integer("num_heads")
    attention = AttentionLayer(heads, heads, c.integer("d_kv"), names=("q", "k", "v", "o"))
    attention = replace(attention, module="layer.0.SelfAttention")
    table = c.integer("relative_attention_num_buckets") * heads
    is_gated = (c.word("feed_forward_proj") or "relu").startswith("gated-")
    names = ("wi_0", "wi_1", "wo") if is_gated else ("wi", "wo")
    feed = Mlp(c.integer("d_ff"), is_gated, names=names, module="layer.1.DenseReluDense")
    cross = replace(attention, module="layer.1.EncDecAttention", mask="full")
    reads = EncoderBlock(replace(attention, mask="full"), feed, hidden, hidden)
    last = replace(feed, module="layer.2.DenseReluDense")
    writes = EncoderBlock(attention, last, hidden, hidden, cross=cross)
    count = c.integer("num_layers")

    def stack(block: EncoderBlock, layers: int, prefix: str) -> Stack:
        tabled = replace(block, attention=replace(block.attention, extra_params=table))
        rest = tabled if tables_everywhere else block
        return Stack((tabled, *(rest,) * (layers - 1)), prefix, final_norm=hidden)

    kind, vocab, encoder = c.model_type, c.integer("vocab_size"), stack(reads, count, "encoder")
    decoder = stack(writes, c.integer("num_decoder_layers", default=count), "decoder")
    is_tied = c.flag("tie_word_embeddings", default=True)
    return Seq2Seq(kind, hidden, vocab, encoder, decoder, is_tied, "shared", layer_name="block")


class BartVariant(NamedTuple):
    """How a family differs from BART."""

    is_post_norm: bool  # norm after the residual sum
    has_embedding_norm: bool
    has_final_norm: bool
    unused_positions: int | None = 0  # unused rows of the position tables; None: no tables


_BARTS = {
    "bart": BartVariant(True, True, False, 2),
    "mbart": BartVariant(False, True, True, 2),
    "pegasus": BartVariant(False, False, True),  # sinusoidal positions, stored as parameters
    "m2m_100": BartVariant(False, False, True, None),  # M2M-100 and NLLB: sinusoidal positions
    "marian": BartVariant(True, False, False),
    "whisper": BartVariant(False, False, True),
}


def bart(c: ModelConfig) -> Seq2Seq:
    """BART, mBART, Pegasus, M2M-100, NLLB and Marian."""
    if c.model_type == "marian" and not c.flag("share_encoder_decoder_embeddings", default=True):
        raise FormatError(
            f"{c.where}: share_encoder_decoder_embeddings is false; a Marian model with two"
            " embeddings is not supported"
        )
    unused, rows = _BARTS[c.model_type].unused_positions, 0
    if unused is not None:
        rows = c.integer("max_position_embeddings") + unused
    return _like_bart(c, (rows, rows))


def _like_bart(c: ModelConfig, positions: tuple[int, int], *, k_bias: bool = True) -> Seq2Seq:
    """Return an encoder-decoder like BART; `positions`: rows of the encoder's, decoder's table."""
    variant = _BARTS[c.model_type]
    hidden = c.integer("d_model")
    norm = 2 * hidden

    def stack(what: str, rows: int) -> Stack:
        heads = c.integer(f"{what}_attention_heads")
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        attention = biased_attention(c, hidden, heads, k_bias=k_bias, names=names)
        size = c.integer(f"{what}_ffn_dim")
        feed = Mlp(size, is_gated=False, bias=True, names=("fc1", "fc2"), module="")
        block = EncoderBlock(attention, feed, norm, norm, is_post_norm=variant.is_post_norm)
        if what == "decoder":
            cross = replace(attention, module="encoder_attn")
            block = replace(block, attention=replace(attention, mask="causal"), cross=cross)
        return Stack(
            (block,) * c.integer(f"{what}_layers"),
            f"model.{what}",
            positions=rows * hidden,
            embedding_norm=norm if variant.has_embedding_norm else 0,
            final_norm=norm if variant.has_final_norm else 0,
        )

    vocab, encoder = c.integer("vocab_size"), stack("encoder", positions[0])
    decoder, is_tied = stack("decoder", positions[1]), c.flag("tie_word_embeddings", default=True)
    return Seq2Seq(c.model_type, hidden, vocab, encoder, decoder, is_tied)


def whisper(c: ModelConfig) -> Seq2Seq:
    """Whisper: two convolutions, then an encoder that always reads 30 seconds of audio."""
    read = c.integer("max_source_positions")
    base = _like_bart(c, (read, c.integer("max_target_positions")), k_bias=False)
    return replace(
        base,
        shared=None,
        head_name="proj_out",
        mel_bins=c.integer("num_mel_bins"),
        facts=(("source_len", read), ("frames_per_source", 2)),
        assumptions=(
            f"each sequence has {2 * read} frames of audio; shorter audio is padded to this length",
        ),
    )


SEQ2SEQ: dict[str, Callable[[ModelConfig], Seq2Seq]] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), t5),
    **dict.fromkeys(_BARTS, bart),
    "whisper": whisper,
}
