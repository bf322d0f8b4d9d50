"""What does a custom call cost?

The trap: XLA counts a custom call as -1 flop, and scripts count it as 0. A library's matrix product
is as much work as a dot; a kernel that can't be seen into is unknown, and is listed as that.

By the target's name: products whose shapes tell, calls that hold no product, and all others, which
may.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from ergmeter.hlo.config import as_json, backend_config, whole_number
from ergmeter.hlo.module import CUSTOM_CALL_TARGET
from ergmeter.hlo.products import at, product, real_factor, window_macs

if TYPE_CHECKING:
    from ergmeter.hlo.module import Computation, Instruction, Module

# Activations, norms, reductions, markers, transfers and annotations.
_WITHOUT_PRODUCTS = frozenset(
    [
        "AwsNeuronArgMax", "AwsNeuronArgMin", "AwsNeuronDropout", "AwsNeuronErf", "AwsNeuronGelu",
        "AwsNeuronGeluApprxTanh", "AwsNeuronGeluApprxTanhBackward", "AwsNeuronGeluBackward",
        "AwsNeuronLNCShardingConstraint", "AwsNeuronRmsNorm", "AwsNeuronRmsNormBackward",
        "AwsNeuronSilu", "AwsNeuronSiluBackward", "AwsNeuronSoftmax", "AwsNeuronSoftmaxBackward",
        "AwsNeuronSoftmaxForward", "AwsNeuronTopK", "AwsNeuronTransferWithStaticRing",
        "AllocateBuffer", "CreateToken", "LayoutConstraint", "MoveToDevice", "MoveToHost",
        "PadToStatic", "PartialReduce", "PinToDevice", "SPMDFullToShardShape",
        "SPMDShardToFullShape", "Sharding", "SliceToDynamic", "TopK", "X64Combine", "X64SplitHigh",
        "X64SplitLow", "__cub$DeviceRadixSort", "__cudnn$norm", "__gpu$TopK", "__onednn$layernorm",
        "__onednn$softmax", "annotate_device_placement", "cu_threefry2x32_ffi", "shape_assertion",
    ]
)  # fmt: skip
_PREFIXES_WITHOUT_PRODUCTS = ("AwsNeuronModuleMarker", "xla.sdy.", "Sdy")
_LIBRARY_PRODUCTS = frozenset(
    [
        "__onednn$matmul", "__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8",
        "AwsNeuronIntMatmult",
    ]
)  # fmt: skip
_COLLECTIVE_PRODUCT = "AwsNeuronCollectiveMatmul"
# Which of operand 0, operand 1 and the result is the forward convolution's source, kernel, result.
_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convForwardGraph": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
    "__onednn$convolution": (0, 1, 2),
}


def call_macs(module: Module, computation: Computation, call: Instruction) -> int | None:
    """MACs of a call that is not an NKI kernel; None where it may hold products unseen."""
    target = call.text(CUSTOM_CALL_TARGET)
    if target in _WITHOUT_PRODUCTS or target.startswith(_PREFIXES_WITHOUT_PRODUCTS):
        return 0
    known = target in _LIBRARY_PRODUCTS or target in _CONVOLUTIONS or target == _COLLECTIVE_PRODUCT
    if not known or len(call.operand_ids) < 2:
        return None
    left, right = (module.operand(computation, call, number).shape.dimensions for number in (0, 1))
    shape = call.shape.first(call.data)
    macs = _product_macs(module, call, target, left, right, shape.dimensions)
    return None if macs is None else real_factor(shape.type) * macs


def _product_macs(
    module: Module,
    call: Instruction,
    target: str,
    left: tuple[int, ...],
    right: tuple[int, ...],
    result: tuple[int, ...],
) -> int | None:
    if target in _CONVOLUTIONS:
        shapes = (left, right, result)
        source, kernel, out = (shapes[role] for role in _CONVOLUTIONS[target])
        return window_macs(call, source=source, kernel=kernel, result=out)
    if target == _COLLECTIVE_PRODUCT:
        return _collective_macs(left, right, result)
    contracted = _contracted(backend_config(module, call))
    if contracted:
        return product([*result, *(at(left, index) for index in contracted)])
    return _matmul_macs(left, right, result)


def _contracted(config: bytes) -> list[int]:
    """The left operand's contracted dimensions, where cuBLAS's config has them (as strings)."""
    found = as_json(config)
    for key in ("gemm_backend_config", "dot_dimension_numbers", "lhs_contracting_dimensions"):
        if key == "gemm_backend_config" and key not in found:
            continue
        found = found.get(key, {})
        if isinstance(found, list):
            numbers = [whole_number(number) for number in found]
            return [number for number in numbers if number is not None]
        if not isinstance(found, dict):
            break
    return []


def _matmul_macs(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> int | None:
    """From the sizes alone, whichever operand is transposed.

    With a batch b on both sides, |left| |right| |out| = (b m k) (b k n) (b m n) = (b m k n)^2 b.
    With it on one side only it is a plain product with b times the rows, or the columns.
    """
    batches = product(left[:-2]), product(right[:-2])
    batch = 1 if 1 in batches else product(out[:-2])
    if batch != 1 and not left[:-2] == right[:-2] == out[:-2]:
        return None
    sizes = product([*left, *right, *out])
    macs = isqrt(sizes // batch) if batch else 0
    return macs if macs * macs * batch == sizes else None


def _collective_macs(
    left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]
) -> int | None:
    """A product around a collective: the left operand or the result is a shard of the rows.

    What this device multiplies is the gathered left operand, or the result before it is
    scattered: whichever has more rows.
    """
    if len(right) != 2 or not left or not out:
        return None
    counts = set()
    for inner, columns in (right, right[::-1]):
        if inner and columns and inner in left and columns in out:
            rows = max(product(left) // inner, product(out) // columns)
            counts.add(rows * inner * columns)
    return counts.pop() if len(counts) == 1 else None
