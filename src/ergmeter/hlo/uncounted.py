"""What do a Cholesky decomposition, a triangular solve and an FFT cost?

None of the three is a matrix product, so none is in a module's MACs: matrix units do not run them
as such, and each library does another number of operations. They are listed beside the total, with
their calls and the number of real floating-point operations by which the field rates them:

- cholesky: n^3 / 3 for a matrix of n x n (Golub and Van Loan, Matrix Computations, section 4.2)
- triangular-solve: n^2 for each right-hand side (the same, section 3.1)
- fft: 5 N log2 N for N complex points, half of that for real ones (the rate of FFTW's benchmarks,
  fftw.org/speed)

A complex operation is four times a real one, as in LAPACK's counts (LAPACK Working Note 41). XLA's
cost analysis has other factors: 2 n^2 for a solve and 8 log2(N) for each point of an FFT.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from ergmeter.hlo.module import FFT_LENGTH, FFT_TYPE
from ergmeter.hlo.products import at, product, real_factor
from ergmeter.hlo.wire import Malformed, integers

if TYPE_CHECKING:
    from ergmeter.hlo.module import Computation, Instruction, Module

UNCOUNTED = ("cholesky", "triangular-solve", "fft")
_REAL_TO_COMPLEX, _COMPLEX_TO_REAL = 2, 3  # FftType


def nominal_flops(module: Module, computation: Computation, found: Instruction) -> int:
    """Real floating-point operations of one call, by the formulas above."""
    if found.opcode == "fft":
        return _fft(module, computation, found)
    matrix = module.operand(computation, found, 0).shape
    size = at(matrix.dimensions, len(matrix.dimensions) - 1)
    if found.opcode == "cholesky":
        return real_factor(matrix.type) * product([*matrix.dimensions, size]) // 3
    right = module.operand(computation, found, 1).shape
    return real_factor(matrix.type) * product([*right.dimensions, size])


def _fft(module: Module, computation: Computation, found: Instruction) -> int:
    lengths = integers(found.data, found.fields, FFT_LENGTH)
    points = product(lengths)
    if points < 1:
        raise Malformed("a transform of no points", 0)
    kind = found.integer(FFT_TYPE)
    # The real side of a transform of real points has all of them, the complex one half.
    whole = found if kind == _COMPLEX_TO_REAL else module.operand(computation, found, 0)
    each = 2.5 if kind in (_REAL_TO_COMPLEX, _COMPLEX_TO_REAL) else 5.0
    return round(each * log2(points) * product(whole.shape.dimensions))
