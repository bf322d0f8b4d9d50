"""Names, shapes and flags of a model's parameters when its weights are sharded or packed.

`numel()` on one rank is wrong: FSDP leaves a part of one long vector, ZeRO-3 an empty tensor, and
4-bit types store two weights per byte. Each also stores the true shape, which is read here. A
DTensor has the unsharded shape itself.

A training on another thread may replace parameters meanwhile. So a module's parameters are copied
to a list first, and only fixed attributes are read. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_FLAT = "_flat_param"  # what FSDP calls the vector that it makes of a module's parameters
_ENGINES = ("DeepSpeedEngine", "PipelineEngine", "DeepSpeedHybridEngine")


@dataclass(frozen=True, slots=True)
class UnshardedParameter:
    """A parameter with its true shape: of all ranks together, unpacked."""

    name: str  # without the prefixes of wrappers
    shape: tuple[int, ...] | None  # None: packed, and the true shape is unknown
    dtype: str
    requires_grad: bool

    @property
    def numel(self) -> int | None:
        """The number of elements; None if the shape is unknown."""
        return None if self.shape is None else prod(self.shape)


def unsharded_parameters(model: Any, inside: object = None) -> list[UnshardedParameter]:  # noqa: ANN401
    """Return every parameter of a torch module once, on any rank.

    `inside`: a submodule; only its parameters are returned, with their names in it. `model` must
    still be the outermost module, because FSDP's wrapper has the submodule's parameters.
    """
    visited: set[int] = set()
    parameters: list[UnshardedParameter] = []
    modules = list(model.named_modules())
    flat = {name: list(_flattened(name, module)) for name, module in modules}
    in_flat = {path for parts in flat.values() for path, _ in parts}
    for name, module in modules:
        parameters += [parameter for _, parameter in flat[name]]
        for own, parameter in list(module._parameters.items()):
            if parameter is None or own == _FLAT or (id(module), own) in in_flat:
                continue
            if id(parameter) not in visited:
                visited.add(id(parameter))
                parameters.append(_unsharded(f"{name}.{own}", module, parameter, parameter.shape))
    path = next((_plain(name) for name, module in modules if module is inside), "")
    if not path:
        return parameters
    within = [parameter for parameter in parameters if parameter.name.startswith(f"{path}.")]
    return [replace(parameter, name=parameter.name[len(path) + 1 :]) for parameter in within]


def sizes(parameters: Iterable[UnshardedParameter]) -> tuple[int, int] | None:
    """Return the number of elements and of trained elements; None if packing hides it."""
    counts = [(parameter.numel, parameter.requires_grad) for parameter in parameters]
    if any(count is None for count, _ in counts):
        return None
    return sum(n or 0 for n, _ in counts), sum(n or 0 for n, trained in counts if trained)


def sharded_by(model: Any) -> str:  # noqa: ANN401
    """Return the library that shards the model over processes; "" if it is not sharded."""
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            return "FullyShardedDataParallel"
        if "FSDPModule" in kinds:
            return "fully_shard"
        if kinds & set(_ENGINES):
            return "DeepSpeed"
        for parameter in list(module._parameters.values()):
            if hasattr(parameter, "ds_id"):
                return "DeepSpeed"
            if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
                return "DTensor"
    return ""


def _plain(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(word for word in name.split(".") if word and word not in _WRAPPED)


def _flattened(name: str, module: Any) -> Iterator[tuple[tuple[int, str], UnshardedParameter]]:  # noqa: ANN401
    """Yield the parameters in a module's FSDP vector, each after its (module id, name)."""
    vector = getattr(getattr(module, "_handle", None), "flat_param", None)
    if vector is None or not hasattr(vector, "_param_infos"):
        return
    originals = vector._params or [vector] * len(vector._shapes)  # kept with use_orig_params
    parts = zip(vector._param_infos, vector._fqns, vector._shapes, originals, strict=True)
    for location, own, shape, original in parts:
        parameter = _unsharded(f"{name}.{own}", location.module, original, shape)
        yield (id(location.module), location.param_name), parameter


def _unsharded(name: str, module: Any, parameter: Any, shape: Any) -> UnshardedParameter:  # noqa: ANN401
    dtype = str(parameter.dtype).rpartition(".")[2]
    true = getattr(parameter, "ds_shape", shape)
    packed = getattr(parameter, "quant_state", None)
    if packed is None and name.endswith(".weight"):
        packed = getattr(module, "quant_state", None)  # where a vector has swallowed the weight's
    if packed is not None and getattr(packed, "shape", None) is not None:
        true = packed.shape
    elif not parameter.is_floating_point() and type(parameter).__name__ != "Int8Params":
        return UnshardedParameter(_plain(name), None, dtype, parameter.requires_grad)
    return UnshardedParameter(
        _plain(name), tuple(int(n) for n in true), dtype, bool(parameter.requires_grad)
    )
