"""Builds the graph of a decoder, and of one encoder layer, from the pieces that a family describes.

A transformer is the same few pieces in many arrangements. A family fills in the pieces (`Mixer`s
and `Mlp`s, layer by layer). The arrangement, which decides what needs whose gradient, is built here
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.flops.graph.graph import Builder, Graph, Linear, Node
from ergmeter.flops.graph.layers import (
    AttentionLayer,
    Decoder,
    Experts,
    Layer,
    Mlp,
    Piece,
    add_attention,
    add_mixer,
    add_piece,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.flops.config import ModelConfig


def decoder_graph(decoder: Decoder) -> Graph:
    """The graph of a language model by itself."""
    b = Builder()
    add_decoder(b, decoder, inputs=())
    layers, nodes = len(decoder.layers), tuple(b.nodes)
    return Graph(decoder.family, nodes, decoder.hidden, layers, decoder.vocab, decoder.assumptions)


def add_decoder(b: Builder, decoder: Decoder, *, inputs: tuple[str, ...]) -> None:
    """Append a language model that also takes `inputs`, such as an image's embeddings."""
    prefix, hidden, vocab = decoder.prefix, decoder.hidden, decoder.vocab
    name = f"{prefix}.{decoder.embedding_name}"
    embedding = b.add(name, "embedding", params=vocab * hidden, role="embedding")
    x: tuple[str, ...] = (embedding, *inputs)
    if decoder.positions:
        params = decoder.positions * hidden
        x = (*x, b.add(f"{prefix}.positions", "embedding", params=params, role="positions"))
    if decoder.embedding_norm:
        x = (b.add(f"{prefix}.embedding_norm", "norm", x, params=decoder.embedding_norm),)
    out = b.add(f"{prefix}.input", "residual", x)
    own = _add_inputs(b, decoder, out)
    out = _add_streams(b, decoder, out, name=f"{prefix}.altup_projections")
    for number, layer in enumerate(decoder.layers):
        at = b.within(f"{prefix}.{decoder.layer_name}.{number}")
        out = add_layer(at, layer, out, hidden, own=own)
    out = _add_streams(b, decoder, out, name=f"{prefix}.altup_unembed_projections")
    out = b.add(f"{prefix}.norm", "norm", out, params=decoder.final_norm)
    tied_to = embedding if decoder.is_tied else None
    head = b.head(decoder.head_name, out, hidden, vocab, bias=decoder.head_bias, tied_to=tied_to)
    for number in range(decoder.further):
        out = _add_further(b, decoder, out, embedding, head, name=f"{prefix}.mtp.{number}")


def _add_inputs(b: Builder, decoder: Decoder, x: str) -> tuple[str, ...]:
    """Append what each layer is given of its own: a table, and a projection of the embedding."""
    if not decoder.input_width:
        return ()
    wide = decoder.input_width * len(decoder.layers)
    at, rows = decoder.prefix, decoder.input_rows
    name = f"{at}.embed_tokens_per_layer"
    table = b.add(name, "embedding", params=rows * wide, role="embedding")
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
    hidden, layer = decoder.hidden, b.within(name)
    normed = layer.add("norms", "norm", (out, embedding), params=2 * hidden)
    joined = layer.linear("eh_proj", "mtp", normed, 2 * hidden, hidden)
    out = add_layer(layer, decoder.layers[-1], joined, hidden)
    last = layer.add("final_norm", "norm", out, params=hidden)
    b.linear(f"{name}.head", "head", last, hidden, decoder.vocab, stream="logits", tied_to=head)
    return out


def add_layer(b: Builder, layer: Layer, x: str, hidden: int, *, own: tuple[str, ...] = ()) -> str:
    """Append one block; returns the node that holds its result. `own` is its own input."""
    if layer.streams > 1:
        x = _predicted(b, layer.streams, x, hidden)
    normed = b.add("norm", "norm", x, params=layer.norm + layer.extra_params)
    mixed = tuple(add_mixer(b, mixer, normed, hidden) for mixer in layer.mixers)
    if layer.after_norms:
        mixed = (b.add("after_norm", "norm", mixed, params=layer.after_norms[0]),)
    if layer.beside:
        made = _in_a_row(b, layer.beside, normed, part="laurel")
        mixed += (b.add("beside_norm", "norm", made, params=layer.beside_norm),)
    middle = b.add("middle", "residual", (x, *mixed)) if mixed else x
    if layer.feed is None:
        return middle
    source = normed
    if layer.feed_norm or not layer.is_parallel:
        of = x if layer.is_parallel else middle
        source = b.add("feed_norm", "norm", of, params=layer.feed_norm)
    if isinstance(layer.feed, Mlp):
        fed = add_mlp(b, layer.feed, source, hidden)
    else:
        fed = _add_experts(b, layer.feed, source, hidden)
    if layer.after_norms:
        fed = b.add("after_feed", "norm", fed, params=layer.after_norms[1])
    out = b.add("out", "residual", (middle, fed))
    if layer.streams > 1:
        out = _corrected(b, layer.streams, out, hidden)
    return _add_own_input(b, layer, out, own) if layer.after else out


def _add_own_input(b: Builder, layer: Layer, out: str, own: tuple[str, ...]) -> str:
    """Append what a layer does with its own input: a gate, their product, a matrix, a norm."""
    gate, *rest = layer.after
    gated = add_piece(b, gate, out, "per-layer input")
    met = b.add("own_input", "residual", (gated, *own))
    made = _in_a_row(b, tuple(rest), met, part="per-layer input")
    made = b.add("own_norm", "norm", made, params=layer.after_norm)
    return b.add("result", "residual", (out, made))


def _in_a_row(b: Builder, pieces: tuple[Piece, ...], x: str, *, part: str) -> str:
    for piece in pieces:
        x = add_piece(b, piece, x, part)
    return x


def _predicted(b: Builder, streams: int, x: str, hidden: int) -> str:
    """AltUp before a layer (arXiv 2301.13310): all streams mixed, by what one of them holds."""
    n, part = streams, "altup"
    normed = b.add("altup.router_norm", "norm", x, params=hidden)
    router = b.linear("altup.modality_router", part, normed, hidden, n)
    mixes = b.linear("altup.prediction_coefs", part, router, n, n * n)
    # A product of n x n with each channel: neither is a weight, and both get gradients.
    mixed = b.add("altup.predict", part, (x, mixes), work=Linear(n * n, hidden), tied_to=mixes)
    return b.add("altup.predictions", "residual", (x, mixed))


def _corrected(b: Builder, streams: int, x: str, hidden: int) -> str:
    """AltUp after a layer: every stream corrected by what the layer made of one."""
    n, part, router = streams, "altup", f"{b.layer}.altup.modality_router"
    normed = b.add("altup.corrected_norm", "norm", x)
    again = b.linear("altup.correcting_router", part, normed, hidden, n, tied_to=router)
    mixes = b.linear("altup.correction_coefs", part, again, n, n)
    return b.add("altup.correct", "norm", (x, mixes), params=hidden)


def add_mlp(b: Builder, mlp: Mlp, x: str, hidden: int, *, part: str = "mlp") -> str:
    """Append two matrices, or three."""
    at = f"{mlp.module}." if mlp.module else ""
    size = mlp.size
    ups = [(name, size) for name in mlp.names[: 2 if mlp.is_gated else 1]]
    if mlp.fused:
        ups = [(mlp.fused, 2 * size)]
    inner = tuple(b.linear(f"{at}{up}", part, x, hidden, wide, bias=mlp.bias) for up, wide in ups)
    return b.linear(f"{at}{mlp.names[-1]}", part, inner, size, hidden, bias=mlp.bias)


def _add_experts(b: Builder, e: Experts, x: str, hidden: int) -> str:
    at, up_size = e.module, e.size * (2 if e.is_gated else 1)
    expert = partial(b.linear, bias=e.bias, copies=e.count, used=e.used, is_module=False)
    router = b.linear(
        f"{at}.gate", "router", x, hidden, e.count, bias=e.router_bias, is_module=False
    )
    if e.router_params:
        router = b.add(f"{at}.correction", "router", router, params=e.router_params)
    up = expert(f"{at}.experts.gate_up_proj", "experts", x, hidden, up_size)
    down = expert(f"{at}.experts.down_proj", "experts", up, e.size, hidden)
    routed = b.add(f"{at}.combine", "residual", (down, router))
    if not e.shared_size:
        return routed
    mlp = Mlp(e.shared_size, module=f"{at}.shared_experts", is_gated=e.is_gated)
    shared = add_mlp(b, mlp, x, hidden, part="shared expert")
    if e.has_shared_gate:
        gate = b.linear(f"{at}.shared_expert_gate", "router", x, hidden, 1)
        shared = b.add(f"{at}.gated", "residual", (shared, gate))
    return b.add(f"{at}.sum", "residual", (routed, shared))


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
    b: Builder, block: EncoderBlock, x: str, hidden: int, *, memory: str | None = None
) -> str:
    """Append a layer; `memory` is what cross attention reads."""

    def around(what: str, x: str, params: int, part: Callable[[str], str]) -> str:
        """Add a part of the layer to the residual stream."""
        if block.is_post_norm:
            return b.add(f"{what}_norm", "norm", (x, part(x)), params=params)
        made = part(b.add(f"{what}_norm", "norm", x, params=params))
        return b.add(f"{what}_out", "residual", (x, made))

    def attend(source: str) -> str:
        return add_attention(b, block.attention, source, source, hidden)

    out = around("attention", x, block.norm + block.extra_params, attend)
    cross = block.cross
    if cross is not None and memory is not None:

        def attend_across(source: str) -> str:
            return add_attention(b, cross, source, memory, hidden, keys="source")

        out = around("cross", out, block.norm, attend_across)
    return around("feed", out, block.feed_norm, lambda read: add_mlp(b, block.feed, read, hidden))


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
    biases = {"q_bias": True, "kv_bias": True, "out_bias": True}
    fields: dict[str, Any] = {**biases, "mask": "full", **more}
    return AttentionLayer(heads, heads, head_size(c, hidden, heads), **fields)
