"""How large a model is whose weights lie in pieces or packed: true names, shapes and flags.

The trap: `numel()` of what one rank holds. FSDP leaves it a part of one long vector, ZeRO-3 an
empty tensor, and 4 bits put two weights into a byte. Each keeps the true shape beside what it keeps
of the weight, and it is read there. A DTensor tells the shape of the whole by itself.

A training may be under way on another thread, which swaps parameters as it goes: a module's are
taken all at once, and only what does not change is looked at. Nothing of torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_FLAT = "_flat_param"  # what FSDP calls the vector that it makes of a module's parameters
_ENGINES = ("DeepSpeedEngine", "PipelineEngine", "DeepSpeedHybridEngine")


@dataclass(frozen=True, slots=True)
class UnshardedParameter:
    """A parameter as it is on all ranks together, unpacked."""

    name: str  # without what wrappers put around it
    shape: tuple[int, ...] | None  # None: packed in a way that does not tell
    dtype: str
    requires_grad: bool

    @property
    def numel(self) -> int | None:
        """How many numbers it is."""
        return None if self.shape is None else prod(self.shape)


def whole_parameters(model: Any, inside: object = None) -> list[UnshardedParameter]:  # noqa: ANN401
    """Every parameter of a torch module once, whoever holds which part of it.

    `inside` is a module in it: only its parameters are given then, by the names they have there.
    What is known of them may lie further out: FSDP's wrapper keeps what it took from the module.
    """
    seen: set[int] = set()
    found: list[UnshardedParameter] = []
    modules = list(model.named_modules())
    flat = {name: list(_flattened(name, module)) for name, module in modules}
    in_flat = {place for parts in flat.values() for place, _ in parts}
    for name, module in modules:
        found += [whole for _, whole in flat[name]]
        for own, parameter in list(module._parameters.items()):
            if parameter is None or own == _FLAT or (id(module), own) in in_flat:
                continue
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(_unsharded(f"{name}.{own}", module, parameter, parameter.shape))
    path = next((_plain(name) for name, module in modules if module is inside), "")
    if not path:
        return found
    within = [one for one in found if one.name.startswith(f"{path}.")]
    return [replace(one, name=one.name[len(path) + 1 :]) for one in within]


def sizes(parameters: Iterable[UnshardedParameter]) -> tuple[int, int] | None:
    """How many numbers these are, and how many of them are trained; None where packing hides it."""
    counts = [(one.numel, one.requires_grad) for one in parameters]
    if any(count is None for count, _ in counts):
        return None
    return sum(n or 0 for n, _ in counts), sum(n or 0 for n, trained in counts if trained)


def spread_by(model: Any) -> str:  # noqa: ANN401
    """What makes a forward pass of this model talk to other processes; empty if nothing does."""
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
    """A name without what wrappers put into it."""
    return ".".join(word for word in name.split(".") if word and word not in _WRAPPED)


def _flattened(name: str, module: Any) -> Iterator[tuple[tuple[int, str], UnshardedParameter]]:  # noqa: ANN401
    """What FSDP has put into this module's vector, and where each parameter was taken from."""
    vector = getattr(getattr(module, "_handle", None), "flat_param", None)
    if vector is None or not hasattr(vector, "_param_infos"):
        return
    originals = vector._params or [vector] * len(vector._shapes)  # kept with use_orig_params
    parts = zip(vector._param_infos, vector._fqns, vector._shapes, originals, strict=True)
    for place, own, shape, original in parts:
        whole = _unsharded(f"{name}.{own}", place.module, original, shape)
        yield (id(place.module), place.param_name), whole


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
