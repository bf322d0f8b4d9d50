"""Multiply-accumulates (MACs) of a dot, a convolution or a ragged dot.

A convolution's padding and the holes of a dilation are not multiplied. Like XLA, this counts the
pairs of kernel and output position that read an input element. Kernel x output would be 4 % more
for a 3x3 kernel over 32x32 with same-size padding. XLA loops over all pairs; here only the shorter
of kernel and output is looped over.

All numbers are integers: XLA sums in float32 and is off by 4e-4 for a module of 100k instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd, log2

from ergmeter.hlo import proto
from ergmeter.hlo.module import Computation, Instruction, Module, Shape
from ergmeter.hlo.wire import Malformed, integer, integers, message, span, spans

LIMIT = 1 << 512  # larger counts are errors: a damaged file's could fill the memory
_MAX_WINDOW = 1 << 20  # positions of a window along an axis


def product(values: Iterable[int]) -> int:
    """Return the product of dimensions. Raises Malformed if negative or impossibly large."""
    result = 1
    for value in values:
        if value < 0:
            raise Malformed(f"a dimension is {value}; must be 0 or more", 0)
        result *= value
        if result >= LIMIT:
            raise Malformed("the product of dimensions is impossibly large", 0)
    return result


def at(dimensions: Sequence[int], index: int) -> int:
    """Return the dimension with this index. Raises Malformed if the shape does not have it."""
    if not 0 <= index < len(dimensions):
        raise Malformed(f"dimension {index} of a shape that has {len(dimensions)}", 0)
    return dimensions[index]


_COMPLEX_TYPES = (15, 18)  # PrimitiveType: C64, C128


def real_factor(element_type: int) -> int:
    """Return the real MACs per MAC of this type: 4 for complex numbers, else 1.

    (a + bi)(c + di) = (ac - bd) + (ad + bc)i, as BLAS counts it: 8 mnk FLOPs for a complex GEMM.
    """
    return 4 if element_type in _COMPLEX_TYPES else 1


def is_complex(shape: bytes) -> bool:
    """True if an encoded shape has complex elements."""
    return Shape.parse(shape, (0, len(shape))).type in _COMPLEX_TYPES


@lru_cache(maxsize=4096)
def dot_macs(result: bytes, left: bytes, numbers: bytes) -> int:
    """Return a dot's MACs: result elements x contracted dimensions, times 4 if complex.

    The arguments are encoded: the shapes of result and left operand, and the dimension numbers.
    """
    dimensions = Shape.parse(left, (0, len(left))).dimensions
    contracted = integers(numbers, message(numbers, 0, len(numbers)), 1)
    shape = Shape.parse(result, (0, len(result)))
    return product(
        [
            real_factor(shape.type),
            *shape.dimensions,
            *(at(dimensions, index) for index in contracted),
        ]
    )


def ragged_dot_macs(module: Module, computation: Computation, dot: Instruction) -> int:
    """Return a ragged dot's MACs: left elements x free dimensions of the right operand.

    Each left element is multiplied in one group only, in all three modes (ragged rows, contraction
    or batch). So the right operand's group dimension does not count. Rows beyond the last group
    are counted, because their number is known only at run time.
    """
    left = module.operand(computation, dot, 0).shape.dimensions
    right = module.operand(computation, dot, 1).shape.dimensions
    ragged = dot.part(proto.RAGGED_DIMENSIONS)
    inner = span(ragged, 1)
    numbers = message(dot.data, *inner) if inner else {}
    bound = {
        *integers(dot.data, numbers, 2),
        *integers(dot.data, numbers, 4),
        *integers(dot.data, ragged, 3),
    }
    for index in bound:
        at(right, index)
    free = (size for index, size in enumerate(right) if index not in bound)
    return product([real_factor(dot.shape.type), *left, *free])


def convolution_macs(module: Module, computation: Computation, convolution: Instruction) -> int:
    """Return the MACs of an HLO convolution."""
    return real_factor(convolution.shape.type) * window_macs(
        convolution,
        source=module.operand(computation, convolution, 0).shape.dimensions,
        kernel=module.operand(computation, convolution, 1).shape.dimensions,
        result=convolution.shape.dimensions,
    )


def window_macs(
    user: Instruction, *, source: Sequence[int], kernel: Sequence[int], result: Sequence[int]
) -> int:
    """Return a convolution's MACs from its window and the dimensions of its operands.

    Input features per group x output features x batch per batch group x valid pairs per axis.
    """
    data = user.data
    numbers = user.part(proto.CONVOLUTION_DIMENSIONS)
    windows = [message(data, *where) for where in spans(user.part(proto.WINDOW), 1)]
    axes = [integers(data, numbers, number) for number in (11, 6, 12)]
    if {len(axis) for axis in axes} != {len(windows)}:
        raise Malformed("a convolution's window has another rank than its dimensions", user.offset)
    groups, batch_groups = (
        user.integer(n) or 1 for n in (proto.FEATURE_GROUPS, proto.BATCH_GROUPS)
    )
    if groups < 1 or batch_groups < 1:
        raise Malformed("a convolution's number of groups is negative", user.offset)
    factors = [
        at(source, integer(numbers, 8)) // groups,
        at(result, integer(numbers, 10)),
        at(source, integer(numbers, 7)) // batch_groups,
    ]
    for window, source_axis, kernel_axis, result_axis in zip(windows, *axes, strict=True):
        factors.append(
            valid_pairs(
                source=product([at(source, source_axis)]),
                kernel=product([at(kernel, kernel_axis)]),
                result=product([at(result, result_axis)]),
                stride=integer(window, 2),
                padding=integer(window, 3),
                dilation=integer(window, 5),
                source_dilation=integer(window, 6),
            )
        )
    return product(factors)


@lru_cache(maxsize=4096)
def valid_pairs(
    *,
    source: int,
    kernel: int,
    result: int,
    stride: int,
    padding: int,
    dilation: int,
    source_dilation: int,
) -> int:
    """Return the number of pairs of kernel position k and output position o that read an element.

    That is, o * stride + k * dilation - padding is an element of the dilated source. For each
    position on the shorter side, the valid positions on the other are every `period`-th of a range.
    """
    if min(stride, dilation, source_dilation) < 1:
        raise Malformed("a window's stride or dilation is not positive", 0)
    if kernel > result:
        kernel, dilation, result, stride = result, stride, kernel, dilation
    if kernel > _MAX_WINDOW:
        raise Malformed("a window is impossibly large", 0)
    common = gcd(stride, source_dilation)
    period = source_dilation // common
    inverse = pow(stride // common, -1, period)
    pairs = 0
    for position in range(kernel):
        start = padding - position * dilation
        if start % common == 0:
            first = start // common * inverse % period
            low = max(0, -(-start // stride))
            high = min(result - 1, (start + (source - 1) * source_dilation) // stride)
            pairs += max(0, (high - first) // period - (low - 1 - first) // period)
    return pairs


# Cholesky decompositions, triangular solves and FFTs are not matrix products, so a module's MACs do
# not include them. Their number of operations depends on the library. They are listed beside the
# total, with their calls and their nominal number of real floating-point operations:
#
#     - cholesky: n^3 / 3 for an n x n matrix (Golub and Van Loan, Matrix Computations, section 4.2)
#     - triangular-solve: n^2 for each right-hand side (the same, section 3.1)
#     - fft: 5 N log2 N for N complex points, half of that for real ones (FFTW's benchmarks,
#       fftw.org/speed)
#
# A complex operation is four times a real one, as in LAPACK's counts (LAPACK Working Note 41).
# XLA's cost analysis has other factors: 2 n^2 for a solve and 8 log2(N) for each point of an FFT.


UNCOUNTED = ("cholesky", "triangular-solve", "fft")
_REAL_TO_COMPLEX, _COMPLEX_TO_REAL = 2, 3  # FftType


def nominal_flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the real FLOPs of a Cholesky, triangular solve or FFT, by the formulas above."""
    if instruction.opcode == "fft":
        return _fft(module, computation, instruction)
    matrix = module.operand(computation, instruction, 0).shape
    size = at(matrix.dimensions, len(matrix.dimensions) - 1)
    if instruction.opcode == "cholesky":
        return real_factor(matrix.type) * product([*matrix.dimensions, size]) // 3
    right = module.operand(computation, instruction, 1).shape
    return real_factor(matrix.type) * product([*right.dimensions, size])


def _fft(module: Module, computation: Computation, instruction: Instruction) -> int:
    points = product(integers(instruction.data, instruction.fields, proto.FFT_LENGTH))
    if points < 1:
        raise Malformed("an FFT of 0 points", 0)
    kind = instruction.integer(proto.FFT_TYPE)
    # The real side of a real FFT has all points, the complex side half of them.
    full = instruction if kind == _COMPLEX_TO_REAL else module.operand(computation, instruction, 0)
    each = 2.5 if kind in (_REAL_TO_COMPLEX, _COMPLEX_TO_REAL) else 5.0
    return round(each * log2(points) * product(full.shape.dimensions))
