"""Where this process stands in the layout of its training, asked of the framework that made it.

The trap: a layout from a command line that the framework reads in its own order. Megatron-LM can
be told to count ranks in any order, and a mesh has its own; each knows where this rank is, and that
is what is asked for. Nothing is imported to ask: what is not loaded has laid nothing out.

And the other one: a place among some of the ranks. A mesh over each pair, with DDP over the pairs
that no mesh knows of, makes all pairs look like one. So a place counts where its sizes make up the
world, or where meshes like this one cover it; else it is not known who shares what, and why is
said.
"""

from __future__ import annotations

import re
import sys
from math import prod
from typing import TYPE_CHECKING, Any

from ergmeter.runlog.process_group import world_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# By what their functions are called; a world of 1 says nothing. NxD's cp has a name of its own, and
# its sizes are `get_.._size` where Megatron-LM's are `get_.._world_size`.
_MEGATRON = {
    "tp": ("tensor_model_parallel",),
    "cp": ("context_parallel", "context_model_parallel"),
    "pp": ("pipeline_model_parallel",),
    "dp": ("data_parallel",),
}
_SIZES = ("world_size", "size")
_STATES = (
    "megatron.core.parallel_state",
    "neuronx_distributed.parallel_layers.parallel_state",
    "megatron.mpu",
)
_DEEPSPEED = {"tp": ("model_parallel",), "pp": ("pipe_parallel",), "dp": ("data_parallel",)}
# What people call the dimensions of a mesh. A name with a word of data parallelism is that: the
# replicas of a model are no part of it. "model" is last, as in "pipeline_model_parallel".
_WORDS = {
    "dp": {"dp", "ddp", "fsdp", "hsdp", "data", "batch", "replica", "replicas", "replicate"},
    "pp": {"pp", "pipe", "pipeline"},
    "cp": {"cp", "sp", "context", "sequence"},
    "tp": {"tp", "tensor", "mp", "model"},
}

Place = dict[str, tuple[int, int]]
"""By dimension: this rank's number along it, and how long it is."""


def told_layout(model: object = None) -> dict[str, Any] | None:
    """Where this rank stands (`at`), by whose word, or why it can't be known (`unknown`); None
    where nobody loaded knows of more than data parallelism."""
    for whose, ask in (
        ("Megatron", _megatron),
        ("DeepSpeed", _deepspeed),
        ("Accelerate", _accelerate),
        ("DeviceMesh", lambda: _of_mesh(_mesh_of(model))),
    ):
        try:
            place = ask()
        except (AttributeError, AssertionError, KeyError, RuntimeError, TypeError, ValueError):
            continue  # not set up yet, or another version
        if place:
            return _in_world(place, whose)
    return None


def _in_world(place: Place, whose: str) -> dict[str, Any]:
    """The place if it is one among all ranks, as far as it is known how many there are."""
    world, placed = world_size(), prod(size for _, size in place.values())
    if world < 2 or placed == world:
        return {"at": {name: list(where) for name, where in place.items()}, "from": whose}
    sizes = ", ".join(f"{name}={size}" for name, (_, size) in place.items())
    return {"unknown": f"{whose} places {placed} of the {world} ranks ({sizes})", "from": whose}


def _megatron() -> Place:
    for name in _STATES:
        state = sys.modules.get(name)
        if state is not None and state.model_parallel_is_initialized():
            return _asked(state, _MEGATRON)
    return {}


def _deepspeed() -> Place:
    """DeepSpeed takes the word of the `mpu` it was given."""
    groups = sys.modules.get("deepspeed.utils.groups")
    mpu = getattr(groups, "mpu", None)
    return _asked(mpu, _MEGATRON) or _asked(mpu, _DEEPSPEED) if mpu is not None else {}


def _asked(state: Any, names: Mapping[str, tuple[str, ...]]) -> Place:  # noqa: ANN401  a module or an object
    place: Place = {}
    for dimension, called in names.items():
        for name in called:
            rank = getattr(state, f"get_{name}_rank", None)
            sizes = (getattr(state, f"get_{name}_{size}", None) for size in _SIZES)
            size = next((one for one in sizes if one is not None), None)
            if rank is not None and size is not None:
                place[dimension] = (int(rank()), int(size()))
    return _shared(place)


def _accelerate() -> Place:
    state = sys.modules.get("accelerate.state")
    shared = state.AcceleratorState._shared_state if state is not None else {}
    return _of_mesh(shared.get("device_mesh"))


def _mesh_of(model: object) -> Any:  # noqa: ANN401  a DeviceMesh, or None
    """The mesh that a model's parameters are spread over: the whole, with all its dimensions."""
    if not hasattr(model, "parameters"):
        return None
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            root = getattr(mesh, "_get_root_mesh", lambda: None)()
            return root if root is not None else mesh
    return None


def _of_mesh(mesh: Any) -> Place:  # noqa: ANN401
    """A mesh's dimensions by the names people give them; what is none of ours is data-parallel."""
    names, at = getattr(mesh, "mesh_dim_names", None), mesh and mesh.get_coordinate()
    if not names or at is None:
        return {}
    place: Place = {}
    for number, name in enumerate(names):
        dimension = dimension_of(str(name))
        index, size = place.get(dimension, (0, 1))
        length = int(mesh.size(number))
        place[dimension] = (index * length + int(at[number]), size * length)
    world = world_size()
    if _shared(place) and world > 1 and "dp" not in place:
        copies = _copies(mesh.mesh.flatten().tolist(), world)
        if copies is not None:
            place["dp"] = copies
    return _shared(place)


def _copies(ranks: Sequence[int], world: int) -> tuple[int, int] | None:
    """Which one of how many meshes of this shape this one is, where they cover all ranks; None
    where they can't."""
    first = min(ranks)
    shape = [rank - first for rank in ranks]
    left = set(range(world))
    own, copies = -1, 0
    for start in range(world):
        if start not in left:
            continue
        one = {start + step for step in shape}
        if not one <= left:
            return None
        left -= one
        own = copies if start == first else own
        copies += 1
    return None if own < 0 else (own, copies)


def dimension_of(name: str) -> str:
    """Which of ours the name of a mesh's dimension means, by its words; what is none is data."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    return next((ours for ours, theirs in _WORDS.items() if words & theirs), "dp")


def _shared(place: Place) -> Place:
    """Nothing where no two ranks share a token: that is what goes without saying."""
    return place if any(n > 1 for name, (_, n) in place.items() if name != "dp") else {}
