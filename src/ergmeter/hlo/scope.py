"""Is a module's work that of one device, or of all devices together?

Before XLA has partitioned it, a module of jax's jit (pjit) with shardings has the shapes of the
whole arrays, so its products are those of all devices. Inside shard_map shapes are already those of
one device. Once it is partitioned, everything is of one device. A count that does not say which is
off by the number of devices.

The signs, in jax 0.4 to 0.10 and torch-xla: the partitioner stores the shardings of parameters and
result in the module and calls its entry `..._spmd`; Shardy stores its meshes in the module's
attributes; annotations are custom calls, or stand at the entry's parameters.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ergmeter.hlo.module import INSTRUCTION_SHARDING
from ergmeter.hlo.wire import Malformed, integer, message, span, spans

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from ergmeter.hlo.module import Computation, Module
    from ergmeter.hlo.wire import Fields

Scope: TypeAlias = Literal["one device", "all devices", "shard_map"]

MANUAL_CALLS = frozenset(["SPMDFullToShardShape", "xla.sdy.GlobalToLocalShape"])
SHARDING_CALLS = frozenset(["Sharding", "xla.sdy.FuncResultSharding", *MANUAL_CALLS])
_SPMD_OUTPUT, _SPMD_PARAMETERS, _DEVICE_ASSIGNMENT, _ATTRIBUTES = 12, 14, 15, 19
_TILED = (2, 3)  # OpSharding.Type: TUPLE, OTHER; a replicated parameter says nothing
_MOST_PARAMETERS = 64  # that are looked at; jax and torch-xla put them first


class WorkScope(NamedTuple):
    """Whose work a count is, and how many devices share it where the module says so."""

    scope: Scope
    devices: int | None = None


def extent(module: Module, entry: Computation, calls: AbstractSet[str]) -> WorkScope:
    """By a module's own fields and the sharding calls that it executes."""
    fields = module.fields
    if spans(fields, _SPMD_OUTPUT) or spans(fields, _SPMD_PARAMETERS) or _is_spmd(entry):
        return WorkScope("one device", _assigned(module, fields))
    meshes = _mesh_devices(module, fields)
    if meshes == 1:
        return WorkScope("one device")
    if calls & MANUAL_CALLS:
        return WorkScope("shard_map", meshes)
    if calls or meshes is not None or _has_sharded_parameter(module, entry):
        return WorkScope("all devices", meshes)
    return WorkScope("one device")


def _is_spmd(entry: Computation) -> bool:
    return entry.name.endswith("_spmd")


def _assigned(module: Module, fields: Fields) -> int | None:
    """The number of partitions in the device assignment."""
    place = span(fields, _DEVICE_ASSIGNMENT)
    try:
        return (integer(message(module.data, *place), 2) or None) if place else None
    except Malformed:
        return None


def _mesh_devices(module: Module, fields: Fields) -> int | None:
    """The devices of Shardy's first mesh: `{mesh = #sdy.mesh<["data"=4, "model"=2]>}`."""
    place = span(fields, _ATTRIBUTES)
    attributes = bytes(module.data[place[0] : place[1]]) if place else b""
    if b"xla.sdy.meshes" not in attributes:
        return None
    text = attributes.decode(errors="replace")
    starts = [one.start() for one in re.finditer(r"#sdy\.mesh<", text)]
    for start, end in pairwise([*starts, len(text)]):
        sizes = re.findall(r'"[^"]*"=(\d{1,9})', text[start:end])
        if sizes:
            return prod(map(int, sizes))
    return None


def _has_sharded_parameter(module: Module, entry: Computation) -> bool:
    for index in range(min(entry.instructions, _MOST_PARAMETERS)):
        found = module.instruction(entry.places.by_index(index))
        if found.opcode == "parameter" and integer(found.part(INSTRUCTION_SHARDING), 1) in _TILED:
            return True
    return False
