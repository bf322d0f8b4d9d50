"""The count of a module, and whether it is the work of one device or of all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ergmeter.hlo import proto
from ergmeter.hlo.wire import Fields, Malformed, integer, message, span, spans

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from ergmeter.hlo.calls import Kernel
    from ergmeter.hlo.module import Computation, Module

# Before XLA has partitioned it, a module of jax's jit (pjit) has the shapes of the full arrays, so
# its products are those of all devices. Inside shard_map, and after partitioning, shapes are those
# of one device.
#
# Signs in jax 0.4 to 0.10 and torch-xla: the partitioner stores the shardings of parameters and
# result in the module and names its entry `..._spmd`. Shardy stores its meshes in the module's
# attributes. Annotations are custom calls, or are at the entry's parameters.


Scope: TypeAlias = Literal["one device", "all devices", "shard_map"]

MANUAL_CALLS = frozenset(["SPMDFullToShardShape", "xla.sdy.GlobalToLocalShape"])
SHARDING_CALLS = frozenset(["Sharding", "xla.sdy.FuncResultSharding", *MANUAL_CALLS])
_SPMD_OUTPUT, _SPMD_PARAMETERS, _DEVICE_ASSIGNMENT, _ATTRIBUTES = 12, 14, 15, 19
_TILED = (2, 3)  # OpSharding.Type: TUPLE, OTHER; a replicated parameter says nothing
_SHARDING_TAG = b"\xc2\x02"  # of INSTRUCTION_SHARDING, a message
_LARGE_BYTES = 1 << 16  # searching takes longer than parsing
_MOST_PARAMETERS = 64  # that are looked at; jax and torch-xla put them first


class WorkScope(NamedTuple):
    """Whether a count is of one device or all, and the number of devices if known."""

    scope: Scope
    devices: int | None = None


def work_scope(module: Module, entry: Computation, calls: AbstractSet[str]) -> WorkScope:
    """The scope of a module's work, from its fields and its sharding calls."""
    fields = module.fields
    is_spmd = spans(fields, _SPMD_OUTPUT) or spans(fields, _SPMD_PARAMETERS)
    if is_spmd or entry.name.endswith("_spmd"):
        return WorkScope("one device", _assigned(module, fields))
    meshes = _mesh_devices(module, fields)
    if meshes == 1:
        return WorkScope("one device")
    if calls & MANUAL_CALLS:
        return WorkScope("shard_map", meshes)
    if calls or meshes is not None or _has_sharded_parameter(module, entry):
        return WorkScope("all devices", meshes)
    return WorkScope("one device")


def _assigned(module: Module, fields: Fields) -> int | None:
    """The number of partitions in the device assignment."""
    where = span(fields, _DEVICE_ASSIGNMENT)
    try:
        return (integer(message(module.data, *where), 2) or None) if where else None
    except Malformed:
        return None


def _mesh_devices(module: Module, fields: Fields) -> int | None:
    """The devices of Shardy's first mesh: `{mesh = #sdy.mesh<["data"=4, "model"=2]>}`."""
    where = span(fields, _ATTRIBUTES)
    attributes = bytes(module.data[where[0] : where[1]]) if where else b""
    if b"xla.sdy.meshes" not in attributes:
        return None
    text = attributes.decode(errors="replace")
    starts = [match.start() for match in re.finditer(r"#sdy\.mesh<", text)]
    for start, end in pairwise([*starts, len(text)]):
        sizes = re.findall(r'"[^"]*"=(\d{1,9})', text[start:end])
        if sizes:
            return prod(map(int, sizes))
    return None


def _has_sharded_parameter(module: Module, entry: Computation) -> bool:
    places = map(entry.places.by_index, range(min(entry.instructions, _MOST_PARAMETERS)))
    may_be = (
        place
        for place in places
        if place[1] - place[0] > _LARGE_BYTES or module.data.find(_SHARDING_TAG, *place) >= 0
    )
    return any(
        instruction.opcode == "parameter"
        and integer(instruction.part(proto.INSTRUCTION_SHARDING), 1) in _TILED
        for instruction in map(module.instruction, may_be)
    )


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
    # "dot", "complex-dot", "convolution", "custom-call:TARGET" and so on; none that is 0
    by_op: dict[str, int]
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
    scope: Scope = "one device"  # whose work it is
    devices: int | None = None  # that share it, where the module says so
    reader: str = field(default="", compare=False)

    @property
    def bound(self) -> Bound:
        """Whether the count is exact ("") or a bound: "at least", "at most" or "about"."""
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
        return sum(
            kernel.calls * kernel.macs_per_call for kernel in self.kernels if kernel.macs_per_call
        )

    @property
    def nki_calls(self) -> int:
        """Calls of NKI kernels."""
        return sum(kernel.calls for kernel in self.kernels)

    @property
    def nki_calls_known(self) -> int:
        """Calls of NKI kernels that state their MACs, a true 0 among them."""
        return sum(kernel.calls for kernel in self.kernels if kernel.state == "known")

    @property
    def nki_share_missing(self) -> str | None:
        """Why the share of NKI kernels is unknown; None if it is known."""
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
        """The share of MACs in NKI kernels; None if unknown."""
        return None if self.nki_share_missing else self.nki_macs / self.macs
