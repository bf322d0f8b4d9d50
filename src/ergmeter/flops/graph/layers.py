"""Descriptions of layers, which families fill in, and the functions that build graphs from them.

A family describes each layer: its mixers (attention, state space) and its feed-forward. How the
parts of a layer connect, which decides where gradients flow, is written here once for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ergmeter.flops.graph.graph import (
    Attention,
    Builder,
    Convolution,
    Graph,
    Linear,
    Mask,
    Node,
    Scan,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix of a mixer. `of` is its input: "" the layer's, else another piece or "conv"."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    of: str = ""
    is_module: bool = True
    norm: int = 0  # parameters of a norm before it (projectors only)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries and keys."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer: projections, core, output."""

    heads: int
    kv_heads: int
    head_dim: int
    q_bias: bool = False
    kv_bias: bool = False
    k_bias: bool | None = None  # of the keys; None: as kv_bias
    out_bias: bool = False
    norm_params: int = 0  # of norms on queries and keys
    extra_params: int = 0  # sinks, tables of relative positions
    window: int | None = None
    chunk: int | None = None
    mask: Mask = "causal"
    latent: Latent | None = None
    is_gated: bool = False  # the query projection also computes a gate of the same size
    fused: str | None = None  # name of one projection for queries, keys and values
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    module: str = "self_attn"
    keys_of: int | None = None  # number of the layer whose keys and values it reuses
    has_values: bool = True  # False: the keys are also the values


@dataclass(frozen=True, slots=True)
class Mamba:
    """A selective state-space layer (Mamba, arXiv 2312.00752)."""

    inner: int
    state: int
    rank: int
    conv: int
    conv_bias: bool = True
    proj_bias: bool = False
    norm_params: int = 0
    module: str = "mixer"


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state-space or linear-attention mixer: projections, convolution, scan, norm, output."""

    pieces: tuple[Piece, ...]
    output: Piece
    part: str  # the row of the result table that counts its matrices
    module: str
    conv: int = 0  # channels of a depthwise convolution
    conv_of: tuple[str, ...] = ()
    conv_width: int = 0
    conv_bias: bool = False
    scan: int = 0  # FLOPs a row
    state: int = 0
    scan_params: int = 0
    scan_of: tuple[str, ...] = ()  # pieces that the scan reads, or "conv"; none: all of them
    norm: int = 0
    norm_of: str = ""  # a piece that the norm reads as a gate


Mixer = AttentionLayer | Mamba | Recurrent


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward layer: two matrices, or three with a gate."""

    size: int
    is_gated: bool = True
    bias: bool = False
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    fused: str | None = None  # one module for gate and up
    module: str = "mlp"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router sends each token to `used` of `count` feed-forward layers."""

    count: int
    used: int
    size: int
    is_gated: bool = True
    bias: bool = False
    router_bias: bool = False
    router_params: int = 0  # other router parameters, such as a correction bias
    shared_size: int = 0
    has_shared_gate: bool = False
    module: str = "mlp"


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: a mixer, a feed-forward, or both. Norm fields are numbers of parameters."""

    mixers: tuple[Mixer, ...] = ()
    feed: Mlp | Experts | None = None
    norm: int = 0  # before the mixer
    feed_norm: int = 0  # before the feed-forward; 0 in a parallel block that shares the first
    after_norms: tuple[int, ...] = ()  # after mixer and feed-forward
    is_parallel: bool = False
    extra_params: int = 0
    beside: tuple[Piece, ...] = ()  # a chain of matrices parallel to the mixer, then a norm
    beside_norm: int = 0
    after: tuple[Piece, ...] = ()  # a chain after the feed-forward that reads per-layer input
    after_norm: int = 0
    streams: int = 1  # AltUp: the layer computes one stream and predicts the others


@dataclass(frozen=True)
class Decoder:
    """A decoder-only language model."""

    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    is_tied: bool
    final_norm: int
    head_bias: bool = False
    positions: int = 0  # rows of a learned table
    further: int = 0  # multi-token prediction layers (arXiv 2412.19437, 2.2)
    embedding_norm: int = 0
    input_width: int = 0  # size of an extra input per layer (Gemma 3n)
    input_rows: int = 0  # rows of the table of these inputs
    streams: int = 1
    prefix: str = "model"
    layer_name: str = "layers"
    embedding_name: str = "embed_tokens"
    head_name: str = "lm_head"
    assumptions: tuple[str, ...] = ()


# The graph of a decoder.


def decoder_graph(decoder: Decoder) -> Graph:
    """Return the graph of a language model."""
    b = Builder()
    add_decoder(b, decoder, inputs=())
    layers, nodes = len(decoder.layers), tuple(b.nodes)
    return Graph(decoder.family, nodes, decoder.hidden, layers, decoder.vocab, decoder.assumptions)


def add_decoder(b: Builder, decoder: Decoder, *, inputs: tuple[str, ...]) -> None:
    """Append a language model whose first layer also reads `inputs`, such as image embeddings."""
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
    # Multi-token prediction layers: a projection, a layer, the head again.
    for number in range(decoder.further):
        name = f"{prefix}.mtp.{number}"
        at = b.within(name)
        normed = at.add("norms", "norm", (out, embedding), params=2 * hidden)
        joined = at.linear("eh_proj", "mtp", normed, 2 * hidden, hidden)
        out = add_layer(at, decoder.layers[-1], joined, hidden)
        last = at.add("final_norm", "norm", out, params=hidden)
        b.linear(f"{name}.head", "head", last, hidden, vocab, stream="logits", tied_to=head)


def _add_inputs(b: Builder, decoder: Decoder, x: str) -> tuple[str, ...]:
    """Append the extra inputs of all layers: a table lookup and a projection of the embedding."""
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
    """Append a matrix for each AltUp stream except the first."""
    made = tuple(
        b.linear(f"{name}.{number}", "altup", x, decoder.hidden, decoder.hidden)
        for number in range(decoder.streams - 1)
    )
    return b.add(f"{name}.sum", "residual", (x, *made)) if made else x


def add_layer(b: Builder, layer: Layer, x: str, hidden: int, *, own: tuple[str, ...] = ()) -> str:
    """Append one block; return the name of its output node. `own`: nodes of per-layer input."""
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
    """Append a layer's use of its per-layer input: gate, product with it, matrix, norm."""
    gate, *rest = layer.after
    met = b.add("own_input", "residual", (add_piece(b, gate, out, "per-layer input"), *own))
    made = _in_a_row(b, tuple(rest), met, part="per-layer input")
    made = b.add("own_norm", "norm", made, params=layer.after_norm)
    return b.add("result", "residual", (out, made))


def _in_a_row(b: Builder, pieces: tuple[Piece, ...], x: str, *, part: str) -> str:
    for piece in pieces:
        x = add_piece(b, piece, x, part)
    return x


def _predicted(b: Builder, streams: int, x: str, hidden: int) -> str:
    """Append AltUp's prediction before a layer: a mix of all streams (arXiv 2301.13310)."""
    n, part = streams, "altup"
    normed = b.add("altup.router_norm", "norm", x, params=hidden)
    router = b.linear("altup.modality_router", part, normed, hidden, n)
    mixes = b.linear("altup.prediction_coefs", part, router, n, n * n)
    # An n x n product per channel: both factors are activations, and both get gradients.
    mixed = b.add("altup.predict", part, (x, mixes), work=Linear(n * n, hidden), tied_to=mixes)
    return b.add("altup.predictions", "residual", (x, mixed))


def _corrected(b: Builder, streams: int, x: str, hidden: int) -> str:
    """Append AltUp's correction after a layer: each stream is corrected by the layer's result."""
    n, part, router = streams, "altup", f"{b.layer}.altup.modality_router"
    normed = b.add("altup.corrected_norm", "norm", x)
    again = b.linear("altup.correcting_router", part, normed, hidden, n, tied_to=router)
    mixes = b.linear("altup.correction_coefs", part, again, n, n)
    return b.add("altup.correct", "norm", (x, mixes), params=hidden)


def add_mlp(b: Builder, mlp: Mlp, x: str, hidden: int, *, part: str = "mlp") -> str:
    """Append a feed-forward: two matrices, or three with a gate."""
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


# The graph of a mixer: attention, state spaces, linear attention.

_QKV = "attention qkv"


def add_mixer(b: Builder, mixer: Mixer, x: str, hidden: int) -> str:
    """Append a mixer: attention, Mamba or another recurrent mixer."""
    if isinstance(mixer, AttentionLayer):
        return add_attention(b, mixer, x, x, hidden)
    if isinstance(mixer, Mamba):
        return _add_mamba(b, mixer, x, hidden)
    return _add_recurrent(b, mixer, x)


def add_attention(
    b: Builder, a: AttentionLayer, x: str, memory: str, hidden: int, *, keys: str | None = None
) -> str:
    """Append attention with queries from `x` and keys from `memory`.

    In cross attention `memory` is another node, and `keys` is its stream.
    """
    at = a.module
    qk_dim, v_dim, cached = a.head_dim, a.head_dim, None
    if a.latent is not None:
        query, key, value = _latent(b, a, a.latent, x, hidden)
        qk_dim, v_dim = a.latent.nope_dim + a.latent.rope_dim, a.latent.v_dim
        cached = a.latent.kv_rank + a.latent.rope_dim
    elif a.fused is not None:
        size = (a.heads + 2 * a.kv_heads) * a.head_dim
        query = key = value = b.linear(f"{at}.{a.fused}", _QKV, x, hidden, size, bias=a.q_bias)
    else:
        query, key, value = _separate(b, a, x, memory, hidden, keys)
    extra = a.norm_params + a.extra_params
    if extra:
        query = b.add(f"{at}.norms", "norm", query, params=extra)
    core = Attention(a.heads, qk_dim, v_dim, a.kv_heads, a.mask, a.window, a.chunk, keys, cached)
    mixed = b.add(f"{at}.core", "attention", (query, key, value), work=core)
    out, wide = f"{at}.{a.names[3]}", a.heads * v_dim
    return b.linear(out, "attention output", mixed, wide, hidden, bias=a.out_bias)


def _separate(
    b: Builder, a: AttentionLayer, x: str, memory: str, hidden: int, keys: str | None
) -> tuple[str, str, str]:
    """Append separate projections of queries, keys and values; return the three nodes."""
    q_size = a.heads * a.head_dim * (2 if a.is_gated else 1)
    kv_size = a.kv_heads * a.head_dim
    k_bias = a.kv_bias if a.k_bias is None else a.k_bias
    made = [
        b.linear(f"{a.module}.{module}", _QKV, of, hidden, size, bias=bias, stream=stream)
        for module, of, size, bias, stream in (
            (a.names[0], x, q_size, a.q_bias, None),
            (a.names[1], memory, kv_size, k_bias, keys),
            (a.names[2], memory, kv_size, a.kv_bias, keys),
        )[: 1 if a.keys_of is not None else 3 if a.has_values else 2]
    ]
    if a.keys_of is not None:
        other = f"{(b.layer or '').rpartition('.')[0]}.{a.keys_of}.{a.module}"
        made += [f"{other}.{a.names[1]}", f"{other}.{a.names[2 if a.has_values else 1]}"]
    return made[0], made[1], made[-1]


def _latent(b: Builder, a: AttentionLayer, m: Latent, x: str, hidden: int) -> tuple[str, str, str]:
    at, q_size = a.module, a.heads * (m.nope_dim + m.rope_dim)
    if m.q_rank is None:
        query = b.linear(f"{at}.q_proj", _QKV, x, hidden, q_size)
    else:
        down = b.linear(f"{at}.q_a_proj", _QKV, x, hidden, m.q_rank, bias=a.q_bias)
        normed = b.add(f"{at}.q_a_layernorm", "norm", down, params=m.q_rank)
        query = b.linear(f"{at}.q_b_proj", _QKV, normed, m.q_rank, q_size)
    name, wide = f"{at}.kv_a_proj_with_mqa", m.kv_rank + m.rope_dim
    compressed = b.linear(name, _QKV, x, hidden, wide, bias=a.q_bias)
    normed = b.add(f"{at}.kv_a_layernorm", "norm", compressed, params=m.kv_rank)
    kv_size = a.heads * (m.nope_dim + m.v_dim)
    both = b.linear(f"{at}.kv_b_proj", _QKV, normed, m.kv_rank, kv_size)
    return query, both, both


def _add_convolution(
    b: Builder, module: str, of: str | tuple[str, ...], channels: int, width: int, *, bias: bool
) -> str:
    params, work = channels * (width + bias), Convolution(channels, width)
    return b.add(f"{module}.conv1d", "convolution", of, params=params, work=work)


def _add_mamba(b: Builder, m: Mamba, x: str, hidden: int) -> str:
    at, part = m.module, "mamba"
    both = b.linear(f"{at}.in_proj", part, x, hidden, 2 * m.inner, bias=m.proj_bias)
    conv = _add_convolution(b, at, both, m.inner, m.conv, bias=m.conv_bias)
    choice = b.linear(f"{at}.x_proj", part, conv, m.inner, m.rank + 2 * m.state)
    if m.norm_params:
        choice = b.add(f"{at}.norms", "norm", choice, params=m.norm_params)
    time = b.linear(f"{at}.dt_proj", part, choice, m.rank, m.inner, bias=True)
    # 7 FLOPs per state element: decay, input, their products and sum, the product with C.
    work = Scan(7 * m.inner * m.state, m.inner * m.state)
    params = m.inner * (m.state + 1)
    scan = b.add(f"{at}.scan", "scan", (time, choice, conv), params=params, work=work)
    gated = b.add(f"{at}.gate", "residual", (scan, both))
    return b.linear(f"{at}.out_proj", part, gated, m.inner, hidden, bias=m.proj_bias)


def _add_recurrent(b: Builder, m: Recurrent, x: str) -> str:
    made: dict[str, str] = {}

    def matrix(piece: Piece, of: str) -> str:
        part = f"{m.part} gates" if piece.of == "conv" else m.part
        return add_piece(b, piece, of, part, module=f"{m.module}.")

    for piece in m.pieces:
        if piece.of != "conv":
            made[piece.name] = matrix(piece, made[piece.of] if piece.of else x)
    if m.conv:
        of = tuple(made[each] for each in m.conv_of)
        made["conv"] = _add_convolution(b, m.module, of, m.conv, m.conv_width, bias=m.conv_bias)
    for piece in m.pieces:
        if piece.of == "conv":
            made[piece.name] = matrix(piece, made["conv"])
    out = tuple(made[each] for each in m.scan_of or made)
    if m.scan:
        work = Scan(m.scan, m.state)
        out = (b.add(f"{m.module}.scan", "scan", out, params=m.scan_params, work=work),)
    if m.norm_of:
        out = (*out, made[m.norm_of])
    return matrix(m.output, b.add(f"{m.module}.norm", "norm", out, params=m.norm))


def add_piece(
    b: Builder, p: Piece, of: str | tuple[str, ...], part: str, *, module: str = ""
) -> str:
    """Append the matrix that a `Piece` describes, with the input `of`."""
    name = f"{module}{p.name}"
    return b.linear(name, part, of, p.inputs, p.outputs, bias=p.bias, is_module=p.is_module)


# The layer of every encoder, also of vision towers and encoder-decoders.
#
# BERT is post-norm, most other encoders are pre-norm. With frozen embeddings this decides whether
# the first projections have a backward pass. So each layer is built in its own order.


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    """A layer of an encoder, or of the decoder of an encoder-decoder."""

    attention: AttentionLayer
    feed: Mlp
    norm: int  # parameters of the attention's norm
    feed_norm: int  # parameters of the feed-forward's norm
    cross: AttentionLayer | None = None  # cross attention; its norm is as large as `norm`
    is_post_norm: bool = False  # norm after the residual sum, not before the sublayer
    extra_params: int = 0  # such as layer scales


def add_block(
    b: Builder, block: EncoderBlock, x: str, hidden: int, *, memory: str | None = None
) -> str:
    """Append a layer; return its output node. `memory`: the node that cross attention reads."""

    def around(what: str, x: str, params: int, part: Callable[[str], str]) -> str:
        """Append a sublayer with its norm and residual sum."""
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
    """Return the nodes with `what` before the name of their part, such as `encoder mlp`."""
    return tuple(replace(node, part=f"{what} {node.part}") for node in nodes)
