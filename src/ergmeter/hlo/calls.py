"""The multiply-accumulates (MACs) of a custom call, by its target and its backend config.

XLA counts a custom call as -1 FLOP, and common scripts as 0. Here a library's matrix product counts
like a dot, from its shapes. Calls that are known to have no products count 0. Other calls are
listed as unknown.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal

from ergmeter.hlo import proto
from ergmeter.hlo.products import at, product, real_factor, window_macs
from ergmeter.hlo.wire import integer, span

if TYPE_CHECKING:
    from ergmeter.hlo.module import Computation, Instruction, Module

# A backend config has a loop's trip count, a library call's dimensions or an NKI kernel's MACs. The
# MACs of a kernel are known if its config states them, even as 0 (a norm). They are unknown if the
# key is missing or the config can't be read.


KERNEL_TARGETS = ("AwsNeuronCustomNativeKernel", "AwsNeuronNkiKernel")
# NKI writes the first name, which AWS's own scoring scripts read; an older compiler the second.
_MAC_KEYS = ("mac_count", "matmul_mac_count")
_MAX_BYTES = 1 << 26

State = Literal["known", "absent", "unreadable"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An NKI kernel in a module: its number of calls, and the MACs per call that it states."""

    function: str | None
    target: str
    state: State
    calls: int
    macs_per_call: int | None


def backend_config(module: Module, instruction: Instruction) -> bytes:
    """Return the bytes of an instruction's backend config, from any version of XLA."""
    data, where = instruction.data, span(instruction.fields, proto.BACKEND_CONFIG)
    payload = instruction.part(proto.BACKEND_CONFIG_PAYLOAD)
    if payload and not (where and where[1] > where[0]):
        where = span(payload, 1)
        number = integer(payload, 2)
        if where is None and 0 <= number < len(module.payloads):
            where, data = module.payloads[number], module.data
    if not where or where[1] - where[0] > _MAX_BYTES:
        return b""
    return data[where[0] : where[1]]


def as_json(config: bytes) -> dict[str, Any]:
    """Return a config that is a JSON object, as of XLA's CPU and GPU backends; {} for others."""
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def known_trip_count(config: bytes) -> int | None:
    """Return the trip count that the compiler wrote into a loop's config, or None."""
    loop = as_json(config).get("known_trip_count")
    return whole_number(loop.get("n")) if isinstance(loop, dict) else None


def whole_number(value: object) -> int | None:
    """A count that is written as a number or as a string of digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 100:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def kernel(module: Module, call: Instruction) -> Kernel:
    """Return an NKI kernel, with function and MACs from its config."""
    function, state, macs = _kernel(backend_config(module, call))
    return Kernel(function, call.text(proto.CUSTOM_CALL_TARGET), state, 1, macs)


@lru_cache(maxsize=64)
def _kernel(config: bytes) -> tuple[str | None, State, int | None]:
    try:
        fields = json.loads(config if config.lstrip()[:1] == b"{" else _unpacked(config))
    except (ValueError, RecursionError):
        return None, "unreadable", None
    if not isinstance(fields, dict):
        return None, "unreadable", None
    name = fields.get("func_name")
    function = name if isinstance(name, str) else None
    for key in _MAC_KEYS:
        if key in fields:
            macs = whole_number(fields[key])
            return function, "unreadable" if macs is None else "known", macs
    return function, "absent", None


def _unpacked(config: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(config.split()), validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


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
_PRODUCTS = frozenset([*_LIBRARY_PRODUCTS, *_CONVOLUTIONS, _COLLECTIVE_PRODUCT])


def call_macs(module: Module, computation: Computation, call: Instruction) -> int | None:
    """Return the MACs of a call that is not an NKI kernel; None for an unknown target."""
    target = call.text(proto.CUSTOM_CALL_TARGET)
    if target in _WITHOUT_PRODUCTS or target.startswith(_PREFIXES_WITHOUT_PRODUCTS):
        return 0
    if target not in _PRODUCTS or len(call.operand_ids) < 2:
        return None
    left, right = (module.operand(computation, call, number).shape.dimensions for number in (0, 1))
    shape = call.shape.first(call.data)
    result = shape.dimensions
    macs: int | None
    if target in _CONVOLUTIONS:
        shapes = (left, right, result)
        source, kernel, out = (shapes[role] for role in _CONVOLUTIONS[target])
        macs = window_macs(call, source=source, kernel=kernel, result=out)
    elif target == _COLLECTIVE_PRODUCT:
        macs = _collective_macs(left, right, result)
    else:
        inner = [at(left, index) for index in _contracted(backend_config(module, call))]
        macs = product([*result, *inner]) if inner else _matmul_macs(left, right, result)
    return None if macs is None else real_factor(shape.type) * macs


def _contracted(config: bytes) -> list[int]:
    """Return the left operand's contracted dimensions from a cuBLAS config; [] if it has none."""
    fields = as_json(config)
    for key in ("gemm_backend_config", "dot_dimension_numbers", "lhs_contracting_dimensions"):
        if key == "gemm_backend_config" and key not in fields:
            continue
        fields = fields.get(key, {})
        if isinstance(fields, list):
            numbers = [whole_number(number) for number in fields]
            return [number for number in numbers if number is not None]
        if not isinstance(fields, dict):
            break
    return []


def _matmul_macs(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> int | None:
    """Return a matmul's MACs from its sizes only, whichever operand is transposed; None if odd.

    With a batch b on both sides, |left| |right| |out| = (b m k) (b k n) (b m n) = (b m k n)^2 b.
    With a batch on one side only, it is a plain product with b times the rows or columns.
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
    """Return the MACs of a matmul that is fused with a collective; None if shapes are ambiguous.

    The left operand or the result is a shard of the rows. This device multiplies all rows: those of
    the gathered left operand, or of the result before it is scattered, whichever are more.
    """
    if len(right) != 2 or not left or not out:
        return None
    counts = set()
    for inner, columns in (right, right[::-1]):
        if inner and columns and inner in left and columns in out:
            rows = max(product(left) // inner, product(out) // columns)
            counts.add(rows * inner * columns)
    return counts.pop() if len(counts) == 1 else None
