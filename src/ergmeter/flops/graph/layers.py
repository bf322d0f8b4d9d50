"""What layers are made of: the pieces a family fills in, and nothing of how they are joined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergmeter.flops.graph.graph import Mask


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix of a mixer: of what goes into the layer, of another piece, or of its `conv`."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    of: str = ""
    is_module: bool = True


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
    norm: int = 0


Mixer = SelfAttention | Mamba | Mamba2 | DeltaNet | Recurrent


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
    has_head: bool = True
    positions: int = 0  # rows of a learned table
    further: int = 0  # layers that predict the tokens after the next (arXiv 2412.19437, 2.2)
    embedding_dim: int | None = None
    embedding_norm: int = 0
    input_width: int = 0  # of an input of its own for each layer
    input_rows: int = 0  # of the table it is looked up in
    streams: int = 1
    prefix: str = "model"
    layer_name: str = "layers"
    embedding_name: str = "embed_tokens"
    head_name: str = "lm_head"
    assumptions: tuple[str, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)
