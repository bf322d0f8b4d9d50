"""What counting a module comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from ergmeter.hlo.config import Kernel
    from ergmeter.hlo.scope import Scope

Bound: TypeAlias = Literal["", "at least", "at most", "about"]


@dataclass(frozen=True, slots=True)
class ModuleCount:
    """The work of one execution of a module, in multiply-accumulates of its matrix products.

    Elementwise work is no part of it. What could not be counted is listed: kernels whose MACs are
    not stated, loops whose trip count is data, calls that may hold products, and operations that
    are no products (`uncounted_calls`). A product of complex numbers is four real ones.
    """

    name: str
    macs: int
    macs_loop_once: int  # with every loop's body counted once, as XLA's cost analysis does
    by_op: dict[
        str, int
    ]  # "dot", "complex-dot", "convolution", "custom-call:TARGET" and so on; none that is 0
    by_computation: dict[str, int]  # of its own instructions, times its executions; none that is 0
    instructions: int  # of the whole module, as are computations
    computations: int
    unreachable: int  # computations that nothing calls, left out
    kernels: tuple[Kernel, ...]
    unknown_loops: tuple[str, ...]  # loops as long as data says, functions applied to elements
    uneven_branches: tuple[str, ...]  # conditionals of which the costliest branch was taken
    unknown_calls: dict[str, int]  # custom-call targets that may hold products, and their calls
    uncounted_calls: dict[str, int]  # cholesky, triangular-solve, fft: how often each runs
    uncounted_flops: dict[str, int]  # and their FLOPs by the formulas of `uncounted`
    literal_bytes: int  # of constants, which were skipped
    scope: Scope = "one device"  # whose work it is
    devices: int | None = None  # that share it, where the module says so
    reader: str = field(default="", compare=False)

    @property
    def bound(self) -> Bound:
        """How the count stands to the truth: a lower bound, an upper one, neither, or exact."""
        is_least = bool(
            self.unknown_loops
            or self.unknown_calls
            or self.uncounted_calls
            or self.nki_calls_known < self.nki_calls
        )
        if self.uneven_branches:
            return "about" if is_least else "at most"
        return "at least" if is_least else ""

    @property
    def flops(self) -> int:
        """Two for each multiply-accumulate."""
        return 2 * self.macs

    @property
    def nki_macs(self) -> int:
        """MACs of the NKI kernels that state them."""
        return sum(one.calls * one.macs_per_call for one in self.kernels if one.macs_per_call)

    @property
    def nki_calls(self) -> int:
        """Calls of NKI kernels."""
        return sum(one.calls for one in self.kernels)

    @property
    def nki_calls_known(self) -> int:
        """Calls of NKI kernels that state their MACs, a true 0 among them."""
        return sum(one.calls for one in self.kernels if one.state == "known")

    @property
    def nki_share_missing(self) -> str | None:
        """Why the share of NKI kernels can't be said; None where it can."""
        if self.nki_calls_known < self.nki_calls:
            unknown = self.nki_calls - self.nki_calls_known
            return f"{unknown} of {self.nki_calls} kernel calls do not state their MACs"
        if self.unknown_calls:
            return f"calls that may hold products: {', '.join(sorted(self.unknown_calls))}"
        if self.unknown_loops:
            return f"what may run more often than once: {', '.join(self.unknown_loops)}"
        return None if self.macs else "the module has no matrix products"

    @property
    def nki_share_frac(self) -> float | None:
        """The part of all MACs that NKI kernels do; None where something of it is unknown."""
        return None if self.nki_share_missing else self.nki_macs / self.macs
