"""The result of counting an HLO module, and whether it is the work of one device or of all."""

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
_TILED = (2, 3)  # OpSharding.Type: TUPLE, OTHER; a replicated parameter shows nothing
_SHARDING_TAG = b"\xc2\x02"  # of INSTRUCTION_SHARDING, a message
_LARGE_BYTES = 1 << 16  # searching takes longer than parsing
_MOST_PARAMETERS = 64  # instructions that are searched; jax and torch-xla put parameters first


class WorkScope(NamedTuple):
    """Whether a count is of one device or of all, and the number of devices if known."""

    scope: Scope
    devices: int | None = None


def work_scope(module: Module, entry: Computation, calls: AbstractSet[str]) -> WorkScope:
    """Return whose work a module is, from its fields and the sharding calls in it."""
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
    """Return the number of partitions in the module's device assignment, or None."""
    where = span(fields, _DEVICE_ASSIGNMENT)
    try:
        return (integer(message(module.data, *where), 2) or None) if where else None
    except Malformed:
        return None


def _mesh_devices(module: Module, fields: Fields) -> int | None:
    """Return the devices of Shardy's first mesh: 8 for `#sdy.mesh<["data"=4, "model"=2]>`."""
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
    """The work of one execution of a module, in multiply-accumulates (MACs) of matrix products.

    Elementwise work is not included. What could not be counted is listed: kernels that do not state
    their MACs, loops whose trip count depends on data, calls that may have products, and operations
    that are not products (`uncounted_calls`). A complex product counts as four real ones.
    """

    name: str
    macs: int
    macs_loop_once: int  # with every loop's body counted once, as XLA's cost analysis does
    # "dot", "complex-dot", "convolution", "custom-call:TARGET" and so on; none that is 0
    by_op: dict[str, int]
    by_computation: dict[str, int]  # of its own instructions, in all its executions; none that is 0
    instructions: int  # of the whole module, as are computations
    computations: int
    unreachable: int  # computations that nothing calls; not counted
    kernels: tuple[Kernel, ...]
    unknown_loops: tuple[str, ...]  # loops of unknown trip count, functions applied to elements
    uneven_branches: tuple[str, ...]  # conditionals whose branches differ: the costliest is counted
    unknown_calls: dict[str, int]  # custom-call targets that may hold products, and their calls
    uncounted_calls: dict[str, int]  # cholesky, triangular-solve, fft: how often each runs
    uncounted_flops: dict[str, int]  # and their nominal FLOPs (products.nominal_flops)
    scope: Scope = "one device"  # whose work it is
    devices: int | None = None  # that share it, if the module shows it
    reader: str = field(default="", compare=False)

    @property
    def bound(self) -> Bound:
        """Empty if the count is exact, else what it is: "at least", "at most" or "about"."""
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
        """FLOPs: two for each multiply-accumulate."""
        return 2 * self.macs

    @property
    def nki_macs(self) -> int:
        """MACs in NKI kernels, as far as they state them."""
        return sum(
            kernel.calls * kernel.macs_per_call for kernel in self.kernels if kernel.macs_per_call
        )

    @property
    def nki_calls(self) -> int:
        """The number of calls of NKI kernels."""
        return sum(kernel.calls for kernel in self.kernels)

    @property
    def nki_calls_known(self) -> int:
        """The number of calls of NKI kernels that state their MACs, 0 included."""
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
            return f"loops with an unknown number of runs: {', '.join(self.unknown_loops)}"
        return None if self.macs else "the module has no matrix products"

    @property
    def nki_share_frac(self) -> float | None:
        """The share of MACs in NKI kernels; None if unknown."""
        return None if self.nki_share_missing else self.nki_macs / self.macs
