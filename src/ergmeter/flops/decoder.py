"""Builds the graph of a decoder from what its family says each layer is made of.

A transformer is the same few pieces in many arrangements. A family fills in the pieces (`Mixer`s
and `Mlp`s, layer by layer); the arrangement, which is what decides who needs whose gradient, is
built here once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ergmeter.flops.graph import Attention, Builder, Convolution, Graph, Scan

if TYPE_CHECKING:
    from ergmeter.flops.graph import Mask


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries and keys."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """An attention layer: projections, core, output."""

    heads: int
    kv_heads: int
    head_dim: int
    q_bias: bool = False
    kv_bias: bool = False
    k_bias: bool | None = None  # of the keys alone, where it is another
    out_bias: bool = False
    norm_params: int = 0  # of norms on queries and keys
    extra_params: int = 0  # sinks, tables of relative positions
    window: int | None = None
    chunk: int | None = None
    mask: Mask = "causal"
    latent: Latent | None = None
    is_gated: bool = False  # queries carry a gate of their own size
    fused: str | None = None  # the one projection that makes all three
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    inputs: int | None = None  # where it reads something wider than the hidden size
    outputs: int | None = None
    module: str = "self_attn"


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
class Mamba2:
    """A state-space layer with heads (Mamba-2, arXiv 2405.21060)."""

    inner: int
    state: int
    heads: int
    groups: int
    conv: int
    conv_bias: bool = True
    proj_bias: bool = False
    has_norm: bool = True
    module: str = "mixer"


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated linear attention by the delta rule (arXiv 2412.06464), as in Qwen3-Next."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    module: str = "linear_attn"


Mixer = SelfAttention | Mamba | Mamba2 | DeltaNet


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
    """A mixture of experts: a router sends each token to `used` of `held` feed-forward layers."""

    held: int
    used: int
    size: int
    is_gated: bool = True
    bias: bool = False
    router_bias: bool = False
    router_params: int = 0  # such as a correction bias that is no weight
    shared_size: int = 0
    has_shared_gate: bool = False
    module: str = "mlp"
    are_modules: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: a mixer, a feed-forward, or both. Norm sizes are their parameters."""

    mixers: tuple[Mixer, ...] = ()
    feed: Mlp | Experts | None = None
    norm: int = 0  # before the mixer
    feed_norm: int = 0  # before the feed-forward; 0 in a parallel block that shares the first
    after_norms: tuple[int, ...] = ()  # after mixer and feed-forward
    is_parallel: bool = False
    extra_params: int = 0


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
    has_head: bool = True
    positions: int = 0  # rows of a learned table
    further: int = 0  # layers that predict the tokens after the next (arXiv 2412.19437, 2.2)
    embedding_dim: int | None = None
    embedding_norm: int = 0
    prefix: str = "model"
    layer_name: str = "layers"
    embedding_name: str = "embed_tokens"
    head_name: str = "lm_head"
    assumptions: tuple[str, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)


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
    for number, layer in enumerate(decoder.layers):
        out = add_layer(
            b, layer, out, name=f"{prefix}.{decoder.layer_name}.{number}", hidden=decoder.hidden
        )
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
    b: Builder, layer: Layer, x: str, *, name: str, hidden: int, stream: str = "tokens"
) -> str:
    """Append one block; returns the node that holds its result."""
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
    middle = x
    if mixed:
        middle = b.add(f"{name}.middle", "residual", (x, *mixed), stream=stream, layer=name)
    if layer.feed is None:
        return middle
    if layer.is_parallel:
        source = normed
        if layer.feed_norm:
            source = b.add(
                f"{name}.feed_norm", "norm", x, params=layer.feed_norm, stream=stream, layer=name
            )
    else:
        source = b.add(
            f"{name}.feed_norm", "norm", middle, params=layer.feed_norm, stream=stream, layer=name
        )
    fed = add_feed(b, layer.feed, source, name=name, hidden=hidden, stream=stream)
    if layer.after_norms:
        fed = b.add(f"{name}.after_feed", "norm", fed, params=layer.after_norms[1], layer=name)
    return b.add(f"{name}.out", "residual", (middle, fed), stream=stream, layer=name)


def add_mixer(b: Builder, mixer: Mixer, x: str, *, name: str, hidden: int, stream: str) -> str:
    """Append what mixes the positions of a sequence."""
    if isinstance(mixer, SelfAttention):
        return add_attention(b, mixer, x, x, name=name, hidden=hidden, stream=stream)
    if isinstance(mixer, Mamba):
        return _add_mamba(b, mixer, x, name=name, hidden=hidden)
    if isinstance(mixer, Mamba2):
        return _add_mamba2(b, mixer, x, name=name, hidden=hidden)
    return _add_delta(b, mixer, x, name=name, hidden=hidden)


def add_attention(
    b: Builder,
    a: SelfAttention,
    x: str,
    memory: str,
    *,
    name: str,
    hidden: int,
    stream: str = "tokens",
    keys: str | None = None,
) -> str:
    """Append attention of `x` to `memory`, the same node or, across streams, another."""
    at = f"{name}.{a.module}"
    wide = a.inputs or hidden
    key_stream = keys or stream
    if a.latent is not None:
        query, key, value, qk_dim, v_dim = _latent(b, a, a.latent, x, at=at, name=name, wide=wide)
    elif a.fused is not None:
        size = (a.heads + 2 * a.kv_heads) * a.head_dim
        query = key = value = b.linear(
            f"{at}.{a.fused}",
            "attention qkv",
            x,
            wide,
            size,
            bias=a.q_bias,
            stream=stream,
            layer=name,
        )
        qk_dim = v_dim = a.head_dim
    else:
        part = "attention qkv"
        q_size = a.heads * a.head_dim * (2 if a.is_gated else 1)
        kv_size = a.kv_heads * a.head_dim
        q_name, k_name, v_name, _ = a.names
        query = b.linear(
            f"{at}.{q_name}", part, x, wide, q_size, bias=a.q_bias, stream=stream, layer=name
        )
        key = b.linear(
            f"{at}.{k_name}",
            part,
            memory,
            wide,
            kv_size,
            bias=a.kv_bias if a.k_bias is None else a.k_bias,
            stream=key_stream,
            layer=name,
        )
        value = b.linear(
            f"{at}.{v_name}",
            part,
            memory,
            wide,
            kv_size,
            bias=a.kv_bias,
            stream=key_stream,
            layer=name,
        )
        qk_dim = v_dim = a.head_dim
    extra = a.norm_params + a.extra_params
    if extra:
        query = b.add(f"{at}.norms", "norm", query, params=extra, stream=stream, layer=name)
    core = b.add(
        f"{at}.core",
        "attention",
        (query, key, value),
        work=Attention(
            a.heads,
            qk_dim,
            v_dim,
            a.kv_heads,
            a.mask,
            a.window,
            a.chunk,
            keys=keys,
            latent=a.latent.kv_rank + a.latent.rope_dim if a.latent else None,
        ),
        stream=stream,
        layer=name,
    )
    return b.linear(
        f"{at}.{a.names[3]}",
        "attention output",
        core,
        a.heads * v_dim,
        a.outputs or hidden,
        bias=a.out_bias,
        stream=stream,
        layer=name,
    )


def _latent(
    b: Builder, a: SelfAttention, m: Latent, x: str, *, at: str, name: str, wide: int
) -> tuple[str, str, str, int, int]:
    part = "attention qkv"
    qk_dim = m.nope_dim + m.rope_dim
    if m.q_rank is None:
        query = b.linear(f"{at}.q_proj", part, x, wide, a.heads * qk_dim, layer=name)
    else:
        down = b.linear(f"{at}.q_a_proj", part, x, wide, m.q_rank, bias=a.q_bias, layer=name)
        normed = b.add(f"{at}.q_a_layernorm", "norm", down, params=m.q_rank, layer=name)
        query = b.linear(f"{at}.q_b_proj", part, normed, m.q_rank, a.heads * qk_dim, layer=name)
    compressed = b.linear(
        f"{at}.kv_a_proj_with_mqa", part, x, wide, m.kv_rank + m.rope_dim, bias=a.q_bias, layer=name
    )
    normed = b.add(f"{at}.kv_a_layernorm", "norm", compressed, params=m.kv_rank, layer=name)
    both = b.linear(
        f"{at}.kv_b_proj", part, normed, m.kv_rank, a.heads * (m.nope_dim + m.v_dim), layer=name
    )
    return query, both, both, qk_dim, m.v_dim


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
        e.held,
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
        copies=e.held,
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
        copies=e.held,
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


def _add_mamba(b: Builder, m: Mamba, x: str, *, name: str, hidden: int) -> str:
    at, part = f"{name}.{m.module}", "mamba"
    both = b.linear(f"{at}.in_proj", part, x, hidden, 2 * m.inner, bias=m.proj_bias, layer=name)
    conv = b.add(
        f"{at}.conv1d",
        "convolution",
        both,
        params=m.inner * (m.conv + m.conv_bias),
        work=Convolution(m.inner, m.conv),
        layer=name,
    )
    choice = b.linear(f"{at}.x_proj", part, conv, m.inner, m.rank + 2 * m.state, layer=name)
    if m.norm_params:
        choice = b.add(f"{at}.norms", "norm", choice, params=m.norm_params, layer=name)
    time = b.linear(f"{at}.dt_proj", part, choice, m.rank, m.inner, bias=True, layer=name)
    # Each state: decay, input, their products and sum, and the product with C that reads it out.
    scan = b.add(
        f"{at}.scan",
        "scan",
        (time, choice, conv),
        params=m.inner * (m.state + 1),
        work=Scan(7 * m.inner * m.state, m.inner * m.state),
        layer=name,
    )
    gated = b.add(f"{at}.gate", "residual", (scan, both), layer=name)
    return b.linear(f"{at}.out_proj", part, gated, m.inner, hidden, bias=m.proj_bias, layer=name)


def _add_mamba2(b: Builder, m: Mamba2, x: str, *, name: str, hidden: int) -> str:
    at, part = f"{name}.{m.module}", "mamba"
    channels = m.inner + 2 * m.groups * m.state
    both = b.linear(
        f"{at}.in_proj", part, x, hidden, m.inner + channels + m.heads, bias=m.proj_bias, layer=name
    )
    conv = b.add(
        f"{at}.conv1d",
        "convolution",
        both,
        params=channels * (m.conv + m.conv_bias),
        work=Convolution(channels, m.conv),
        layer=name,
    )
    scan = b.add(
        f"{at}.scan",
        "scan",
        (conv, both),
        params=3 * m.heads,
        work=Scan(7 * m.inner * m.state, m.inner * m.state),
        layer=name,
    )
    normed = b.add(
        f"{at}.norm", "norm", (scan, both), params=m.inner if m.has_norm else 0, layer=name
    )
    return b.linear(f"{at}.out_proj", part, normed, m.inner, hidden, bias=m.proj_bias, layer=name)


def _add_delta(b: Builder, d: DeltaNet, x: str, *, name: str, hidden: int) -> str:
    at, part = f"{name}.{d.module}", "linear attention"
    keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
    channels = 2 * keys + values
    qkvz = b.linear(f"{at}.in_proj_qkvz", part, x, hidden, channels + values, layer=name)
    ba = b.linear(f"{at}.in_proj_ba", part, x, hidden, 2 * d.value_heads, layer=name)
    conv = b.add(
        f"{at}.conv1d",
        "convolution",
        qkvz,
        params=channels * d.conv,
        work=Convolution(channels, d.conv),
        layer=name,
    )
    # Per value head a state of key_dim x value_dim: read by the key, corrected, read by the query.
    state = d.value_heads * d.key_dim * d.value_dim
    scan = b.add(
        f"{at}.scan",
        "scan",
        (conv, ba),
        params=2 * d.value_heads,
        work=Scan(8 * state, state),
        layer=name,
    )
    normed = b.add(f"{at}.norm", "norm", (scan, qkvz), params=d.value_dim, layer=name)
    return b.linear(f"{at}.out_proj", part, normed, values, hidden, layer=name)
