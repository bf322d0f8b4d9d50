"""FLOPs of one call of a torch operator, from the shapes of its arguments.

torch's own table has no rule for attention on a CPU, nor for `grouped_mm`, which transformers uses
for experts. In some versions it rejects grouped queries, ignores the groups in a convolution's
gradient, and counts fused attention's recomputation as model FLOPs. So all rules here are our own.
An operator that looks like a matrix product and has no rule is reported by name.

Operators are looked up by name, so that older versions of torch work too. A product of m x k and
k x n is 2 m k n FLOPs, as in `analytic`. Masks are ignored: all pairs count. The FLOPs of masked
pairs are reported separately (`CountedStep.spared`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch


class AttentionShape(NamedTuple):
    """The shape of an attention call: sequences, queries and keys of each."""

    sequences: int
    queries: int
    keys: int
    is_causal: bool = False  # as the kernel was told


class CallWork(NamedTuple):
    """FLOPs of a call: `needed`, and `again` for what a kernel recomputes.

    For attention `needed` has all pairs, and `meeting` the shape of the call if it is known.
    """

    needed: int
    again: int = 0
    meeting: AttentionShape | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call: arguments by name, result, and in backward which inputs need gradients."""

    arguments: dict[str, Any]
    out: Any
    wanted: tuple[bool, ...] = ()

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  a tensor, a number or a list
        return self.arguments[name]

    def get(self, *names: str) -> Any:  # noqa: ANN401
        """Return the first of these arguments that is not None, or None."""
        return next((self.arguments[n] for n in names if self.arguments.get(n) is not None), None)

    def wants(self, position: int) -> bool:
        """True if an input's gradient is needed, or if that is unknown."""
        return self.wanted[position] if position < len(self.wanted) else True


Rule: TypeAlias = "Callable[[Call], CallWork]"


# Products.


def _rows_of(left: str) -> Rule:
    """Return the rule of a matrix product: result elements x columns of the argument `left`."""
    return lambda call: CallWork(2 * _first(call.out).numel() * call[left].shape[-1])


def _first(out: Any) -> torch.Tensor:  # noqa: ANN401
    tensor: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
    return tensor


def _summed_batches(call: Call) -> CallWork:
    batches, rows, inner = call["batch1"].shape
    return CallWork(2 * batches * rows * inner * call["batch2"].shape[-1])


def _dot(call: Call) -> CallWork:
    return CallWork(2 * call["self"].numel())


def _grouped(left: str, right: str) -> Rule:
    """Return the rule of a grouped product: groups of rows, each multiplied with its own matrix.

    The sizes of the groups do not matter: each row is multiplied with one matrix. The ragged
    dimension does: rows (3-D right), columns (3-D left) or, in a weight's gradient, the summed one
    (both 2-D).
    """

    def rule(call: Call) -> CallWork:
        a, b = call[left], call[right]
        if a.dim() == 3 and b.dim() == 2:
            return CallWork(2 * a.shape[1] * b.numel())
        return CallWork(2 * a.numel() * b.shape[-1])

    return rule


# Convolutions.


def _convolution(image: str) -> Rule:
    return lambda call: CallWork(_convolved(call[image], call["weight"], _first(call.out), call))


def _convolution_backward(call: Call) -> CallWork:
    once = _convolved(call["input"], call["weight"], call["grad_output"], call)
    mask = call["output_mask"]
    return CallWork(once * (bool(mask[0]) + bool(mask[1])))


def _convolved(image: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: Call) -> int:
    """Return a convolution's FLOPs: result elements (if transposed: input's) x filter size x 2.

    The filter size is the weight's without its first dimension; groups are already divided out. The
    input's and the weight's gradient cost the same each.
    """
    met = image if call.get("transposed") else out
    return 2 * met.numel() * prod(weight.shape[1:])


# Attention.

Shape: TypeAlias = "tuple[int, int, int]"  # heads, query-key dimension, value dimension


def _attention(pairs_of: Callable[[Call], tuple[int, Shape]]) -> Rule:
    def rule(call: Call) -> CallWork:
        met, (heads, qk_dim, v_dim) = pairs_of(call)
        return CallWork(2 * heads * (qk_dim + v_dim) * met, meeting=_attention_shape(call, met))

    return rule


def _attention_backward(pairs_of: Callable[[Call], tuple[int, Shape]]) -> Rule:
    """Return the rule of attention's backward: products for dV, probabilities, dQ and dK.

    A fused kernel recomputes the scores, a fifth product, which counts as hardware FLOPs only. So
    do gradients that it computes although they are not needed, such as those of frozen keys.
    """

    def rule(call: Call) -> CallWork:
        met, (heads, qk_dim, v_dim) = pairs_of(call)
        scores, values = 2 * heads * qk_dim * met, 2 * heads * v_dim * met
        query, key, value = (call.wants(position) for position in range(3))
        needed = scores * (query + key) + values * (value + (query or key))
        return CallWork(needed, 3 * scores + 2 * values - needed, _attention_shape(call, met))

    return rule


def _attention_shape(call: Call, met: int) -> AttentionShape | None:
    """Return the shape of attention over equal sequences; None for different lengths."""
    query, key = (call.get(name, name[0]) for name in ("query", "key"))
    if call.get("cum_seq_q", "cu_seqlens_q", "cu_seq_q") is not None or query.dim() != 4:
        return None
    for axis in (-2, 1):  # heads first, positions first
        queries, keys = query.shape[axis], key.shape[axis]
        if met == query.shape[0] * queries * keys:
            is_causal = bool(call.get("is_causal", "causal"))
            return AttentionShape(query.shape[0], queries, keys, is_causal)
    return None


def _heads_first(call: Call) -> tuple[int, Shape]:
    """Return pairs and shape for (batch, heads, positions, dim) tensors, as of torch's sdpa.

    The number of query heads counts, also if they share key-value heads.
    """
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, qk_dim = query.shape
    return batch * queries * key.shape[-2], (heads, qk_dim, value.shape[-1])


def _positions_first(call: Call) -> tuple[int, Shape]:
    """Return pairs and shape for (batch, positions, heads, dim), or packed sequences."""
    query, key, value = (call.get(name, name[0]) for name in ("query", "key", "value"))
    shape = (query.shape[-2], query.shape[-1], value.shape[-1])
    starts = call.get("cum_seq_q", "cu_seqlens_q", "cu_seq_q")
    if starts is None:
        return query.shape[0] * query.shape[1] * key.shape[1], shape
    key_starts = call.get("cum_seq_k", "cu_seqlens_k", "cu_seq_k")
    lengths = _lengths(starts)
    key_lengths = lengths if key_starts is None else _lengths(key_starts)
    if lengths is None or key_lengths is None:
        # Unknown lengths: a query attends to at most as many keys as the longest sequence has.
        longest = call.get("max_k", "max_seqlen_k", "max_q", "max_seqlen_q")
        return prod(query.shape[:-2]) * int(longest), shape
    return sum(a * b for a, b in zip(lengths, key_lengths, strict=True)), shape


def _lengths(starts: torch.Tensor) -> list[int] | None:
    if type(starts) is not torch.Tensor or starts.device.type == "meta":
        return None
    lengths: list[int] = starts.diff().tolist()
    return lengths


# Recurrent layers that are one operator.


def _recurrent(times: int) -> Rule:
    def rule(call: Call) -> CallWork:
        rows = prod(call["input"].shape[:-1])
        return CallWork(2 * times * rows * sum(_matrices(call.arguments)))

    return rule


def _matrices(arguments: dict[str, Any]) -> Iterable[int]:
    for name, value in arguments.items():
        if name.startswith("weight"):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
                    yield tensor.numel()


_FUSED = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_ATEN_BY_RULE: dict[Rule, tuple[str, ...]] = {
    _rows_of("self"): (
        *("mm", "bmm", "mv", "_int_mm", "_scaled_mm", "_scaled_mm_v2"),
        *("_weight_int4pack_mm", "_weight_int8pack_mm"),
    ),
    _rows_of("mat1"): ("addmm", "addmm_", "_addmm_activation"),
    _rows_of("mat"): ("addmv", "addmv_"),
    _rows_of("batch1"): ("baddbmm", "baddbmm_"),
    _summed_batches: ("addbmm", "addbmm_"),
    _dot: ("dot", "vdot"),
    _grouped("self", "mat2"): ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    _convolution("input"): ("convolution", "_convolution", "convolution_overrideable"),
    _convolution("self"): (
        *("mkldnn_convolution", "cudnn_convolution", "miopen_convolution"),
        *("_slow_conv2d_forward", "_conv_depthwise2d", "conv_depthwise3d", "slow_conv3d"),
    ),
    _convolution_backward: ("convolution_backward", "convolution_backward_overrideable"),
    _attention(_heads_first): (
        *(f"_scaled_dot_product_{name}" for name in _FUSED),
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    _attention_backward(_heads_first): (
        *(f"_scaled_dot_product_{name}_backward" for name in _FUSED),
        "_scaled_dot_product_fused_attention_overrideable_backward",
    ),
    _attention(_positions_first): ("_flash_attention_forward", "_efficient_attention_forward"),
    _attention_backward(_positions_first): (
        *("_flash_attention_backward", "_efficient_attention_backward"),
    ),
    _recurrent(1): ("mkldnn_rnn_layer", "_cudnn_rnn"),
    _recurrent(2): ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"),
}
_OTHERS_BY_RULE: dict[Rule, tuple[str, ...]] = {
    _grouped("input", "weight"): ("transformers::grouped_mm_fallback",),
    _rows_of("X"): ("mkldnn::_linear_pointwise",),
    _rows_of("A"): (
        *("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit", "bitsandbytes::int8_scaled_mm"),
        *("bitsandbytes::int8_linear_matmul", "bitsandbytes::int8_mixed_scaled_mm"),
    ),
    _attention(_heads_first): ("flex_attention",),
    _attention_backward(_heads_first): ("flex_attention_backward",),
    _attention(_positions_first): (
        *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
        "torch_attn::_varlen_attn",
    ),
    _attention_backward(_positions_first): (
        *("flash_attn::_flash_attn_backward", "flash_attn::_flash_attn_varlen_backward"),
        "torch_attn::_varlen_attn_backward",
    ),
}
RULES: dict[str, Rule] = {
    **{f"aten::{name}": rule for rule, names in _ATEN_BY_RULE.items() for name in names},
    **{name: rule for rule, names in _OTHERS_BY_RULE.items() for name in names},
}

# Higher-order operators have no schema to take names from.
POSITIONS: dict[str, tuple[str, ...]] = {
    "flex_attention": ("query", "key", "value"),
    "flex_attention_backward": ("query", "key", "value"),
}

_OWN = frozenset(
    {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "rngprims"}
    | {"inductor"}
)
PRODUCT_NAME = re.compile(
    r"(?:^|_|add|b)mm(?:_|$)|matmul|gemm|attention|attn|convolution|conv\d|linear_|_linear|rnn"
    r"|lstm(?!_cell)|gru(?!_cell)|trilinear"
)


def looks_like_a_product(name: str, arguments: Iterable[Any]) -> bool:
    """True if an operator without a rule may be a matrix product.

    torch's own operators are judged by name; others also if they take two matrices or more.
    """
    namespace, _, operator = name.rpartition("::")
    if namespace in _OWN:
        return "upsample" not in operator and bool(PRODUCT_NAME.search(operator))
    matrices = [
        value
        for value in arguments
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.is_floating_point()
    ]
    return len(matrices) > 1 or bool(PRODUCT_NAME.search(operator))
