"""Where this process stands in the layout of its training, asked of the framework that made it.

The trap: a layout from a command line that the framework reads in its own order. Megatron-LM can
be told to count ranks in any order, and a mesh has its own; each knows where this rank is, and that
is what is asked for. Nothing is imported to ask: what is not loaded has laid nothing out.
"""

from __future__ import annotations

import sys
from typing import Any

# By what their functions are called; a world of 1 says nothing.
_MEGATRON = {
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
}
_STATES = (
    "megatron.core.parallel_state",
    "neuronx_distributed.parallel_layers.parallel_state",
    "megatron.mpu",
)
_DEEPSPEED = {"tp": "model_parallel", "pp": "pipe_parallel", "dp": "data_parallel"}

Place = dict[str, tuple[int, int]]
"""By dimension: this rank's number along it, and how long it is."""


def told_layout(model: object = None) -> dict[str, Any] | None:
    """Where this rank stands, by whose word; None where nobody loaded knows of more than data
    parallelism."""
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
            return {"at": {name: list(where) for name, where in place.items()}, "from": whose}
    return None


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


def _asked(state: Any, names: dict[str, str]) -> Place:  # noqa: ANN401  a module or an object
    place: Place = {}
    for dimension, name in names.items():
        rank = getattr(state, f"get_{name}_rank", None)
        size = getattr(state, f"get_{name}_world_size", None)
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
        dimension = _dimension(str(name).lower())
        index, size = place.get(dimension, (0, 1))
        length = int(mesh.size(number))
        place[dimension] = (index * length + int(at[number]), size * length)
    return _shared(place)


def _dimension(name: str) -> str:
    for ours, starts in {
        "tp": ("tp", "tensor", "mp", "model"),
        "cp": ("cp", "sp", "context", "sequence"),
        "pp": ("pp", "pipe"),
    }.items():
        if name.startswith(starts):
            return ours
    return "dp"


def _shared(place: Place) -> Place:
    """Nothing where no two ranks share a token: that is what goes without saying."""
    return place if any(n > 1 for name, (_, n) in place.items() if name != "dp") else {}
