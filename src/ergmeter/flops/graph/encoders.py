"""Models that only read: embeddings, layers that look both ways, a head.

An encoder is built with the head of masked language modelling at every position, as transformers
computes it; `heads` exchanges it where the class has another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.flops.graph.encoder_block import add_block
from ergmeter.flops.graph.graph import Attention, Builder, Graph

if TYPE_CHECKING:
    from ergmeter.flops.graph.encoder_block import EncoderBlock
    from ergmeter.flops.graph.graph import Node
    from ergmeter.flops.graph.layers import SelfAttention


@dataclass(frozen=True)
class Encoder:
    """An encoder with the head of masked language modelling."""

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
    head_bias: bool = True  # of the transformation before the last matrix
    head_names: tuple[str, str] = ("cls.predictions.transform.dense", "cls.predictions.decoder")
    is_tied: bool = True
    has_decoder_bias: bool = True
    relative: Relative | None = None
    conv_width: int = 0  # of a convolution beside the first layer
    has_norm: bool = True  # of the embedding
    is_projected: bool = False  # even where the embedding is as wide as the layers
    weights_of: tuple[int, ...] = ()  # for each layer which of the weights it has, where shared
    unused: int = 0  # parameters that no training of a language model reads


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
    first = norm if e.has_norm else 0
    x = start = b.add(f"{e.prefix}.embeddings.norm", "norm", taken, params=first)
    if width != e.hidden or e.is_projected:
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
    if e.weights_of:
        b.nodes = _shared(b.nodes, e)
    if e.unused:
        b.add(f"{e.prefix}.contact_head.regression", "other", params=e.unused)
    if e.final_norm:
        x = b.add(f"{e.prefix}.final_norm", "norm", x, params=e.final_norm)
    _add_masked_head(b, e, x, embedding, width=width, norm=norm)
    facts = {} if e.relative is None else {"relative_positions": e.relative.rows}
    return Graph(e.family, tuple(b.nodes), e.hidden, len(e.blocks), e.vocab, facts=facts)


def _shared(nodes: list[Node], e: Encoder) -> list[Node]:
    """The same nodes, the parameters of a layer that has another's tied to that one's."""
    names = [f"{e.prefix}.{e.layer_name}.{number}" for number in range(len(e.blocks))]
    owners = {name: names[e.weights_of.index(e.weights_of[n])] for n, name in enumerate(names)}
    shared = []
    for node in nodes:
        owner = owners.get(node.layer or "", node.layer)
        if owner != node.layer and node.params:
            assert node.layer is not None
            own = f"{owner}{node.name.removeprefix(node.layer)}"
            shared.append(replace(node, params=0, tied_to=own))
        else:
            shared.append(node)
    return shared


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
    b: Builder, block: EncoderBlock, r: Relative, x: str, positions: str, *, name: str, hidden: int
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
