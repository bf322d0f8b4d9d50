"""Readers and graphs of encoder-decoders: T5, BART and their kin, Whisper.

There are two sequence lengths: the source, which is read once, and the target. The keys of cross
attention are computed for the source's positions, although they are in the decoder's layers. The
encoder's rows are `source`, the decoder's `tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ergmeter.errors import FormatError
from ergmeter.flops.graph.decoder import EncoderBlock, add_block, biased_attention, renamed
from ergmeter.flops.graph.graph import Builder, Graph
from ergmeter.flops.graph.layers import AttentionLayer, Mlp

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stack:
    """One of the two halves: its layers, and what is before and after them."""

    blocks: tuple[EncoderBlock, ...]
    prefix: str
    positions: int = 0  # parameters of the table
    embedding_norm: int = 0
    final_norm: int = 0


@dataclass(frozen=True)
class Seq2Seq:
    """An encoder and the decoder that reads it."""

    family: str
    hidden: int
    vocab: int
    encoder: Stack
    decoder: Stack
    is_tied: bool
    shared: str | None = "model.shared"  # the embedding of both
    layer_name: str = "layers"
    head_name: str = "lm_head"
    mel_bins: int = 0  # of the spectrogram that two convolutions read
    facts: tuple[tuple[str, int], ...] = ()
    assumptions: tuple[str, ...] = ()


def seq2seq_graph(m: Seq2Seq) -> Graph:
    """The graph of an encoder-decoder: the encoder's rows are `source`, the decoder's `tokens`."""
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
    """Two convolutions of width 3 over the spectrogram, the second at every second frame.

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
    """T5, mT5, FLAN: relative positions in the first layer of each half; UMT5: in every layer."""
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

    is_post_norm: bool  # normed after the sum
    has_embedding_norm: bool
    has_final_norm: bool
    unused_positions: int | None = 0  # rows of its tables that are never used; None: no tables


_BARTS = {
    "bart": BartVariant(True, True, False, 2),
    "mbart": BartVariant(False, True, True, 2),
    "pegasus": BartVariant(False, False, True),  # sines for positions, stored as parameters
    "m2m_100": BartVariant(False, False, True, None),  # M2M-100 and NLLB; sines for positions
    "marian": BartVariant(True, False, False),
    "whisper": BartVariant(False, False, True),
}


def bart(c: ModelConfig) -> Seq2Seq:
    """BART, mBART, Pegasus, M2M-100, NLLB and Marian."""
    if c.model_type == "marian" and not c.flag("share_encoder_decoder_embeddings", default=True):
        raise FormatError(
            f"{c.where}: share_encoder_decoder_embeddings is false; a Marian model of two"
            " embeddings can't be read"
        )
    unused, rows = _BARTS[c.model_type].unused_positions, 0
    if unused is not None:
        rows = c.integer("max_position_embeddings") + unused
    return _like_bart(c, (rows, rows))


def _like_bart(c: ModelConfig, positions: tuple[int, int], *, k_bias: bool = True) -> Seq2Seq:
    """The encoder-decoder of BART and its many kin; `positions` are the rows of both tables."""
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
    """Whisper: two convolutions before the encoder, which always reads thirty seconds."""
    read = c.integer("max_source_positions")
    base = _like_bart(c, (read, c.integer("max_target_positions")), k_bias=False)
    return replace(
        base,
        shared=None,
        head_name="proj_out",
        mel_bins=c.integer("num_mel_bins"),
        facts=(("source_len", read), ("frames_per_source", 2)),
        assumptions=(
            f"each sequence comes with {2 * read} frames of audio, padded to that where it is"
            " shorter",
        ),
    )


SEQ2SEQ: dict[str, Callable[[ModelConfig], Seq2Seq]] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), t5),
    **dict.fromkeys(_BARTS, bart),
    "whisper": whisper,
}
