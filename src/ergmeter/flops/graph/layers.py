"""The pieces of a layer that families describe, and which tensors their code saves for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.flops.graph.graph import Attention, Builder, Convolution, Graph, Mask, Scan

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig

# -- what autograd saves ---------------------------------------------------------------------------
#
# Two models of the same sizes can save different tensors. A cap on the scores saves a second matrix
# of scores. A norm that subtracts its mean twice saves two copies in 32 bits. An activation written
# in Python saves five tensors instead of one. Each was read off torch's saved-tensor hooks for
# transformers 5.22 on a CPU, and 5.17 on an H200.


CAPPED_SCORES = "capped scores"
CAPPED_LOGITS = "capped logits"
SPELLED_OUT = "an activation spelled out"
KEEPS_RESULT = "an activation that keeps its result"

# Families by a trait of their code, a field of `ActivationTraits`.
_FAMILIES: dict[str, tuple[str, ...]] = {
    # They turn a part of each head and join it with the rest, so queries, and with them attention's
    # result, are laid out in another order than the next matrix wants, which copies it.
    "joins_heads": (
        *("gpt_neox", "phi", "phi3", "stablelm", "glm", "glm4", "glm4_moe"),
        *("deepseek_v2", "deepseek_v3", "kimi_k2"),
    ),
    # Elsewhere a norm without parameters stands for none at all.
    "norms_bare": ("olmo", "nanochat"),
    # Written out, their softmax is in the scores' own type, and one tensor serves twice.
    "softmax_as_it_comes": ("gpt2", "gpt_oss", "falcon"),
    # Written out, they multiply queries and keys in 32 bits.
    "scores_in_32_bits": ("gptj", "gpt_neo"),
    # transformers has no sdpa for them.
    "has_no_sdpa": ("bloom", "gptj", "gpt_neo", "mpt"),
    # They hand a mask to sdpa whether it is needed or not, and copy keys and values for each head.
    "is_masked_always": ("falcon",),
    # Their norms are torch's LayerNorm although they have no bias.
    "is_layer_norm": ("mpt", "dbrx"),
    # Their routers multiply in 32 bits, from a copy of what they are given.
    "routes_in_32_bits": ("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_k2"),
    # Extra keys that are no token: transformers has no fused kernel for them.
    "has_sinks": ("gpt_oss",),
}
# They multiply by the scale before they round to 16 bits, so what is scaled is kept in 32.
_SCALED_IN_32_BITS = ("gemma", "olmo2", "cohere", "gpt_oss")
# They take the mean off twice, once for the variance, and keep both in 32 bits.
_CENTRED = ("cohere",)
# Clamped before and after: gate, up, both clamped, the sigmoid, and what it makes of the gate.
_CLAMPED = ("gpt_oss",)
# Activations that transformers writes in Python: 0.5 x (1 + tanh(...)) and its like. The others
# are one operation of torch.
_IN_PYTHON = ("gelu_new", "gelu_accurate", "gelu_python_tanh")
_DEFAULT_ACTIVATIONS = {**dict.fromkeys(("gpt2", "phi", "gptj"), "gelu_new"), "opt": "relu"}
# The derivative follows from the result, so torch keeps that and not what the activation was given.
_FROM_RESULT = ("relu",)
_DEFAULT_CAPS = {"gemma2": (True, True)}  # of scores, of logits, where a config does not say


@dataclass(frozen=True, slots=True)
class ActivationTraits:
    """Traits of a model's code beyond its matrices."""

    scales_in_32_bits: bool
    centres_twice: bool
    joins_heads: bool
    norms_bare: bool
    softmax_as_it_comes: bool
    scores_in_32_bits: bool
    is_masked_always: bool
    is_layer_norm: bool
    routes_in_32_bits: bool
    has_no_sdpa: bool
    has_sinks: bool
    caps_scores: bool
    caps_logits: bool
    keeps_result: bool  # of the activation, in place of what it is given
    steps: int  # tensors that an activation keeps beyond what it is given

    @property
    def has_no_fused_attention(self) -> bool:
        """True if transformers falls back to attention written out where sdpa is asked for."""
        return self.caps_scores or self.has_sinks or self.has_no_sdpa


def code_traits(graph: Graph) -> ActivationTraits:
    """The traits of this model's code."""
    family = graph.family
    return ActivationTraits(
        scales_in_32_bits=family.startswith(_SCALED_IN_32_BITS),
        centres_twice=family.startswith(_CENTRED),
        **{trait: family in families for trait, families in _FAMILIES.items()},
        caps_scores=CAPPED_SCORES in graph.traits,
        caps_logits=CAPPED_LOGITS in graph.traits,
        keeps_result=KEEPS_RESULT in graph.traits,
        steps=3 if SPELLED_OUT in graph.traits or family in _CLAMPED else 0,
    )


def traits(config: ModelConfig) -> frozenset[str]:
    """The names of traits that follow from a configuration's fields."""
    inner = config.raw("text_config")
    fields = inner if isinstance(inner, dict) else config.fields
    kind = str(fields.get("model_type") or config.model_type)
    scores, logits = _DEFAULT_CAPS.get(kind, (False, False))
    matching = set()
    if fields.get("attn_logit_softcapping", scores):
        matching.add(CAPPED_SCORES)
    if fields.get("final_logit_softcapping", logits):
        matching.add(CAPPED_LOGITS)
    names = ("hidden_activation", "activation_function", "hidden_act")
    used = next((fields[name] for name in names if fields.get(name)), None)
    activation = used or _DEFAULT_ACTIVATIONS.get(kind)
    if activation in _IN_PYTHON:
        matching.add(SPELLED_OUT)
    if activation in _FROM_RESULT:
        matching.add(KEEPS_RESULT)
    return frozenset(matching)


# -- pieces of layers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix of a mixer: of what goes into the layer, of another piece, or of its `conv`."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    of: str = ""
    is_module: bool = True
    norm: int = 0  # parameters of the norm before it, in a projector


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
    module: str = "self_attn"
    keys_of: int | None = None  # the layer whose keys and values it uses, where it has none
    has_values: bool = True  # or its keys are its values too


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
    """A mixer by its pieces: projections, a convolution, a scan, a norm, an output."""

    pieces: tuple[Piece, ...]
    output: Piece
    part: str  # what its matrices are counted under
    module: str
    conv: int = 0  # channels of a depthwise convolution
    conv_of: tuple[str, ...] = ()
    conv_width: int = 0
    conv_bias: bool = False
    scan: int = 0  # FLOPs a row
    state: int = 0
    scan_params: int = 0
    scan_of: tuple[str, ...] = ()  # pieces that it reads, or "conv"; none: all of them
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
    router_params: int = 0  # such as a correction bias that is no weight
    shared_size: int = 0
    has_shared_gate: bool = False
    module: str = "mlp"


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
    beside: tuple[Piece, ...] = ()  # matrices in a row beside the mixer, with a norm after them
    beside_norm: int = 0
    after: tuple[Piece, ...] = ()  # and after the feed-forward, with the layer's own input
    after_norm: int = 0
    streams: int = 1  # of which the layer computes one and predicts the others


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
    further: int = 0  # layers that predict the tokens after the next (arXiv 2412.19437, 2.2)
    embedding_norm: int = 0
    input_width: int = 0  # of an input of its own for each layer
    input_rows: int = 0  # of the table it is looked up in
    streams: int = 1
    prefix: str = "model"
    layer_name: str = "layers"
    embedding_name: str = "embed_tokens"
    head_name: str = "lm_head"
    assumptions: tuple[str, ...] = ()


# The graph of a mixer: attention, state spaces, linear attention.

_QKV = "attention qkv"


def add_mixer(b: Builder, mixer: Mixer, x: str, hidden: int) -> str:
    """Append what mixes the positions of a sequence to the layer that `b` builds."""
    if isinstance(mixer, AttentionLayer):
        return add_attention(b, mixer, x, x, hidden)
    if isinstance(mixer, Mamba):
        return _add_mamba(b, mixer, x, hidden)
    return _add_recurrent(b, mixer, x)


def add_attention(
    b: Builder, a: AttentionLayer, x: str, memory: str, hidden: int, *, keys: str | None = None
) -> str:
    """Append attention of `x` to `memory`, the same node or, across streams, another."""
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
    """A projection each for queries, keys and values."""
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
    # Each state: decay, input, their products and sum, and the product with C that reads it out.
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
    """Append one matrix."""
    name = f"{module}{p.name}"
    return b.linear(name, part, of, p.inputs, p.outputs, bias=p.bias, is_module=p.is_module)
