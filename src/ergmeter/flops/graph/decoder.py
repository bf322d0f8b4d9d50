"""Builds the graph of a decoder, and of one encoder layer, from the pieces that a family describes.

A transformer is the same few pieces in many arrangements. A family fills in the pieces (`Mixer`s
and `Mlp`s, layer by layer). The arrangement, which decides what needs whose gradient, is built here
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.graph.graph import Builder, Graph, Linear
from ergmeter.flops.graph.layers import (
    AttentionLayer,
    Decoder,
    Experts,
    Layer,
    Mlp,
    Piece,
    add_attention,
    add_mixer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.graph import Node


def decoder_graph(decoder: Decoder) -> Graph:
    """The graph of a language model by itself."""
    b = Builder()
    add_decoder(b, decoder, inputs=())
    return Graph(
        decoder.family,
        tuple(b.nodes),
        decoder.hidden,
        len(decoder.layers),
        decoder.vocab,
        decoder.assumptions,
        decoder.facts,
    )


def add_decoder(b: Builder, decoder: Decoder, *, inputs: tuple[str, ...]) -> str:
    """Append a language model that also takes `inputs`, such as an image's embeddings."""
    prefix = decoder.prefix
    width = decoder.embedding_dim or decoder.hidden
    embedding = b.add(
        f"{prefix}.{decoder.embedding_name}",
        "embedding",
        params=decoder.vocab * width,
        role="embedding",
    )
    x: tuple[str, ...] = (embedding, *inputs)
    if decoder.positions:
        table = b.add(
            f"{prefix}.positions",
            "embedding",
            params=decoder.positions * decoder.hidden,
            role="positions",
        )
        x = (*x, table)
    if decoder.embedding_norm:
        x = (b.add(f"{prefix}.embedding_norm", "norm", x, params=decoder.embedding_norm),)
    out = b.add(f"{prefix}.input", "residual", x)
    own = _add_inputs(b, decoder, out)
    out = _add_streams(b, decoder, out, name=f"{prefix}.altup_projections")
    for number, layer in enumerate(decoder.layers):
        name = f"{prefix}.{decoder.layer_name}.{number}"
        out = add_layer(b, layer, out, name=name, hidden=decoder.hidden, own=own)
    out = _add_streams(b, decoder, out, name=f"{prefix}.altup_unembed_projections")
    out = b.add(f"{prefix}.norm", "norm", out, params=decoder.final_norm)
    if not decoder.has_head:
        return out
    head = b.linear(
        decoder.head_name,
        "head",
        out,
        width,
        decoder.vocab,
        bias=decoder.head_bias,
        stream="logits",
        role="head",
        tied_to=embedding if decoder.is_tied else None,
    )
    for number in range(decoder.further):
        out = _add_further(b, decoder, out, embedding, head, name=f"{prefix}.mtp.{number}")
    return head


def _add_inputs(b: Builder, decoder: Decoder, x: str) -> tuple[str, ...]:
    """Append what each layer is given of its own: a table, and a projection of the embedding."""
    if not decoder.input_width:
        return ()
    wide = decoder.input_width * len(decoder.layers)
    at = decoder.prefix
    table = b.add(
        f"{at}.embed_tokens_per_layer",
        "embedding",
        params=decoder.input_rows * wide,
        role="embedding",
    )
    name = f"{at}.per_layer_model_projection"
    made = b.linear(name, "per-layer input", x, decoder.hidden, wide)
    params = decoder.input_width
    return (b.add(f"{at}.per_layer_projection_norm", "norm", (made, table), params=params),)


def _add_streams(b: Builder, decoder: Decoder, x: str, *, name: str) -> str:
    """Append a matrix for each stream but the first, where there are several."""
    made = tuple(
        b.linear(f"{name}.{number}", "altup", x, decoder.hidden, decoder.hidden)
        for number in range(decoder.streams - 1)
    )
    return b.add(f"{name}.sum", "residual", (x, *made)) if made else x


def _add_further(
    b: Builder, decoder: Decoder, out: str, embedding: str, head: str, *, name: str
) -> str:
    """Append a layer that predicts one token further: a projection, a layer, the head again."""
    hidden = decoder.hidden
    normed = b.add(f"{name}.norms", "norm", (out, embedding), params=2 * hidden, layer=name)
    joined = b.linear(f"{name}.eh_proj", "mtp", normed, 2 * hidden, hidden, layer=name)
    out = add_layer(b, decoder.layers[-1], joined, name=name, hidden=hidden)
    last = b.add(f"{name}.final_norm", "norm", out, params=hidden, layer=name)
    b.linear(
        f"{name}.head",
        "head",
        last,
        hidden,
        decoder.vocab,
        stream="logits",
        tied_to=head,
    )
    return out


def add_layer(
    b: Builder,
    layer: Layer,
    x: str,
    *,
    name: str,
    hidden: int,
    stream: str = "tokens",
    own: tuple[str, ...] = (),
) -> str:
    """Append one block; returns the node that holds its result. `own` is its own input."""
    if layer.streams > 1:
        x = _predicted(b, layer, x, name=name, hidden=hidden)
    normed = b.add(
        f"{name}.norm", "norm", x, params=layer.norm + layer.extra_params, stream=stream, layer=name
    )
    mixed = tuple(
        add_mixer(b, mixer, normed, name=name, hidden=hidden, stream=stream)
        for mixer in layer.mixers
    )
    if layer.after_norms:
        mixed = (
            b.add(f"{name}.after_norm", "norm", mixed, params=layer.after_norms[0], layer=name),
        )
    if layer.beside:
        made = _in_a_row(b, layer.beside, normed, part="laurel", name=name)
        mixed += (b.add(f"{name}.beside_norm", "norm", made, params=layer.beside_norm, layer=name),)
    middle = x
    if mixed:
        middle = b.add(f"{name}.middle", "residual", (x, *mixed), stream=stream, layer=name)
    if layer.feed is None:
        return middle
    source = normed
    if layer.feed_norm or not layer.is_parallel:
        of, params = x if layer.is_parallel else middle, layer.feed_norm
        source = b.add(f"{name}.feed_norm", "norm", of, params=params, stream=stream, layer=name)
    fed = add_feed(b, layer.feed, source, name=name, hidden=hidden, stream=stream)
    if layer.after_norms:
        fed = b.add(f"{name}.after_feed", "norm", fed, params=layer.after_norms[1], layer=name)
    out = b.add(f"{name}.out", "residual", (middle, fed), stream=stream, layer=name)
    if layer.streams > 1:
        out = _corrected(b, layer, out, name=name, hidden=hidden)
    return _add_own_input(b, layer, out, own, name=name) if layer.after else out


def _add_own_input(b: Builder, layer: Layer, out: str, own: tuple[str, ...], *, name: str) -> str:
    """Append what a layer does with its own input: a gate, their product, a matrix, a norm."""
    gate, *rest = layer.after
    gated = _in_a_row(b, (gate,), out, part="per-layer input", name=name)
    met = b.add(f"{name}.own_input", "residual", (gated, *own), layer=name)
    made = _in_a_row(b, tuple(rest), met, part="per-layer input", name=name)
    made = b.add(f"{name}.own_norm", "norm", made, params=layer.after_norm, layer=name)
    return b.add(f"{name}.result", "residual", (out, made), layer=name)


def _in_a_row(b: Builder, pieces: tuple[Piece, ...], x: str, *, part: str, name: str) -> str:
    for piece in pieces:
        at = f"{name}.{piece.name}"
        x = b.linear(at, part, x, piece.inputs, piece.outputs, bias=piece.bias, layer=name)
    return x


def _predicted(b: Builder, layer: Layer, x: str, *, name: str, hidden: int) -> str:
    """AltUp before a layer (arXiv 2301.13310): all streams mixed, by what one of them holds."""
    n, at = layer.streams, f"{name}.altup"
    normed = b.add(f"{at}.router_norm", "norm", x, params=hidden, layer=name)
    router = b.linear(f"{at}.modality_router", "altup", normed, hidden, n, layer=name)
    mixes = b.linear(f"{at}.prediction_coefs", "altup", router, n, n * n, layer=name)
    # A product of n x n with each channel: neither is a weight, and both get gradients.
    mixed = b.add(
        f"{at}.predict", "altup", (x, mixes), work=Linear(n * n, hidden), layer=name, tied_to=mixes
    )
    return b.add(f"{at}.predictions", "residual", (x, mixed), layer=name)


def _corrected(b: Builder, layer: Layer, x: str, *, name: str, hidden: int) -> str:
    """AltUp after a layer: every stream corrected by what the layer made of one."""
    n, at = layer.streams, f"{name}.altup"
    normed = b.add(f"{at}.corrected_norm", "norm", x, layer=name)
    router = b.linear(
        f"{at}.correcting_router", "altup", normed, hidden, n, layer=name,
        tied_to=f"{at}.modality_router",
    )  # fmt: skip
    mixes = b.linear(f"{at}.correction_coefs", "altup", router, n, n, layer=name)
    return b.add(f"{at}.correct", "norm", (x, mixes), params=hidden, layer=name)


def add_feed(
    b: Builder, feed: Mlp | Experts, x: str, *, name: str, hidden: int, stream: str = "tokens"
) -> str:
    """Append a feed-forward layer."""
    if isinstance(feed, Mlp):
        return add_mlp(b, feed, x, name=name, hidden=hidden, stream=stream, part="mlp")
    return _add_experts(b, feed, x, name=name, hidden=hidden)


def add_mlp(
    b: Builder, mlp: Mlp, x: str, *, name: str, hidden: int, part: str, stream: str = "tokens"
) -> str:
    """Append two matrices, or three."""
    at = f"{name}.{mlp.module}" if mlp.module else name
    size = mlp.size
    if mlp.fused:
        ups = [(mlp.fused, 2 * size)]
    elif mlp.is_gated:
        ups = [(mlp.names[0], size), (mlp.names[1], size)]
    else:
        ups = [(mlp.names[0], size)]
    inner = tuple(
        b.linear(f"{at}.{up}", part, x, hidden, wide, bias=mlp.bias, stream=stream, layer=name)
        for up, wide in ups
    )
    return b.linear(
        f"{at}.{mlp.names[-1]}",
        part,
        inner,
        size,
        hidden,
        bias=mlp.bias,
        stream=stream,
        layer=name,
    )


def _add_experts(b: Builder, e: Experts, x: str, *, name: str, hidden: int) -> str:
    at = f"{name}.{e.module}"
    router = b.linear(
        f"{at}.gate",
        "router",
        x,
        hidden,
        e.count,
        bias=e.router_bias,
        is_module=False,
        layer=name,
    )
    if e.router_params:
        router = b.add(f"{at}.correction", "router", router, params=e.router_params, layer=name)
    up = b.linear(
        f"{at}.experts.gate_up_proj",
        "experts",
        x,
        hidden,
        e.size * (2 if e.is_gated else 1),
        bias=e.bias,
        copies=e.count,
        used=e.used,
        is_module=e.are_modules,
        layer=name,
    )
    down = b.linear(
        f"{at}.experts.down_proj",
        "experts",
        up,
        e.size,
        hidden,
        bias=e.bias,
        copies=e.count,
        used=e.used,
        is_module=e.are_modules,
        layer=name,
    )
    routed = b.add(f"{at}.combine", "residual", (down, router), layer=name)
    if not e.shared_size:
        return routed
    shared = add_mlp(
        b,
        Mlp(e.shared_size, module=f"{e.module}.shared_experts", is_gated=e.is_gated),
        x,
        name=name,
        hidden=hidden,
        part="shared expert",
    )
    if e.has_shared_gate:
        gate = b.linear(f"{at}.shared_expert_gate", "router", x, hidden, 1, layer=name)
        shared = b.add(f"{at}.gated", "residual", (shared, gate), layer=name)
    return b.add(f"{at}.sum", "residual", (routed, shared), layer=name)


# The layer of every encoder, also of vision towers and encoder-decoders.
#
# BERT has its norms after each part, most others before. With frozen embeddings that decides
# whether the first projections get a backward pass. So a layer is built in its own order.


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    """A layer of an encoder, or of the decoder that reads from one."""

    attention: AttentionLayer
    feed: Mlp
    norm: int  # parameters of the norm at the attention
    feed_norm: int  # and of that at the feed-forward
    cross: AttentionLayer | None = None  # attention to the source; its norm is as large as `norm`
    is_post_norm: bool = False  # normed after the sum and not before the part
    extra_params: int = 0  # such as a scale for each channel


def add_block(
    b: Builder,
    block: EncoderBlock,
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
    """Adds each part of a layer to the residual stream."""

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


def head_size(c: ModelConfig, hidden: int, heads: int) -> int:
    """Numbers of one head, where the hidden size is cut into as many."""
    if hidden % heads:
        raise FormatError(f"{c.where}: the hidden size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def biased_attention(c: ModelConfig, hidden: int, heads: int, **more: object) -> AttentionLayer:
    """Attention that looks both ways, with biases everywhere."""
    plain = AttentionLayer(
        heads,
        heads,
        head_size(c, hidden, heads),
        q_bias=True,
        kv_bias=True,
        out_bias=True,
        mask="full",
    )
    return replace(plain, **more)  # type: ignore[arg-type]
