"""Describes module calls without data, and prepares a model's copy to run without weights.

All floating-point tensors become float32 on the CPU. FLOPs depend on neither, and a kernel for one
device or mixed types could keep the copy from running. A layer with packed weights (4 or 8 bits)
becomes the plain layer of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# A module call without data: the module, and the shapes of its arguments.


@dataclass(slots=True, eq=False)
class TensorSpec:
    """Shape, dtype and flags of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_parameter: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor; for one sharded over ranks, that of the whole tensor."""
        return cls(
            tuple(int(size) for size in getattr(tensor, "ds_shape", tensor.shape)),
            tensor.dtype,
            requires_grad=tensor.requires_grad,
            is_parameter=isinstance(tensor, nn.Parameter),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return make_tensor, (self.shape, self.dtype, self.requires_grad, self.is_parameter)


def make_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool = False,
    is_parameter: bool = False,
) -> torch.Tensor:
    """Return a tensor of this shape. Call it under a FakeTensorMode, so that it takes no memory."""
    is_floating = dtype.is_floating_point
    made = torch.empty(shape, dtype=torch.float32 if is_floating else dtype)
    trained = requires_grad and is_floating
    return (
        nn.Parameter(made, requires_grad=trained) if is_parameter else made.requires_grad_(trained)
    )


@dataclass
class ModuleCall:
    """An outermost call of a module in a step, with `TensorSpec`s instead of tensors."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_grad: bool  # gradients were recorded
    training: bool
    trained: tuple[bool, ...]  # requires_grad of each parameter
    times: int = 1
    is_walked_back: bool = True  # a backward pass went through it
    is_recomputed: bool = False  # inside torch.utils.checkpoint
    graph_flops: tuple[float, float] | None = None  # forward, backward: by the autograd graph


def ids_shape(call: ModuleCall) -> tuple[int, int] | None:
    """Return (rows, positions) of a call's tokens; None if it has none."""
    values: list[Any] = [call.kwargs.get("input_ids"), *call.args, *call.kwargs.values()]
    for value in values:
        if isinstance(value, TensorSpec) and len(value.shape) == 2 and _is_integer(value.dtype):
            return value.shape[0], value.shape[1]
    embedded = call.kwargs.get("inputs_embeds")
    if isinstance(embedded, TensorSpec) and len(embedded.shape) == 3:
        return embedded.shape[0], embedded.shape[1]
    return None


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype is not torch.bool


# The copy of a model.

# Where wrappers keep what they wrap, by their names.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",
}
# Up to torch 2.10 transformers asks where in memory the grouped product's weights are.
_TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
_EXPERTS = ("batched_mm", "grouped_mm") if _TORCH >= (2, 11) else ("batched_mm",)
HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


class PlainLinear(nn.Module):
    """Replaces a linear layer with packed weights (4 or 8 bits) by a plain one of its size."""

    def __init__(self, packed: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        weight: Any = getattr(packed, "weight", None)
        is_trained = isinstance(weight, nn.Parameter) and weight.requires_grad
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=is_trained)
        bias = getattr(packed, "bias", None)
        self.bias = bias if isinstance(bias, nn.Parameter) else None

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return x times the weight, plus the bias."""
        return nn.functional.linear(x.float(), self.weight, self.bias)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, DDP, DeepSpeed or Fabric."""
    while True:
        attribute = _WRAPPERS.get(type(model).__name__)
        inner = model._modules.get(attribute) if attribute is not None else None
        if inner is None:
            return model
        model = inner


def make_runnable(copy: nn.Module) -> tuple[str, ...]:
    """Change a model's copy in place so that it runs without values; return the assumptions.

    Call it under a FakeTensorMode.
    """
    assumptions: dict[str, None] = {}
    for module in copy.modules():
        if packed := packed_size(module):
            kind = type(module).__name__
            assumptions[f"{kind} layers are counted as the plain layers they stand for"] = None
            # In place, because more than its parent may refer to it.
            module.__dict__ = vars(PlainLinear(module, *packed))
            module.__class__ = PlainLinear
        for value in vars(module).values():
            if _is_configuration(value):
                _use_plain_kernels(value)
        if vars(module).get("rope_type") in ("dynamic", "longrope"):
            # These look at the positions themselves, which are unknown; no product depends on it.
            module.__dict__["rope_type"] = "default"
    return tuple(assumptions)


def packed_size(module: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer with packed weights; None for another module.

    Libraries that pack weights (bitsandbytes, GPTQ, AWQ, HQQ) store the true sizes in the module.
    """
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not isinstance(inputs, int) or not isinstance(outputs, int) or module._modules:
        return None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return inputs, outputs
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    # An 8-bit layer of bitsandbytes packs its weights when it is first used.
    packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    is_plain = sorted(shape) == sorted((inputs, outputs)) and "bitsandbytes" not in packages
    return None if is_plain or not isinstance(module, nn.Linear) else (inputs, outputs)


def needed_hooks(hooks: dict[int, Any]) -> Any:  # noqa: ANN401  a mapping of the same type
    """Return the hooks that a model needs to run: some of its libraries', none of the user's.

    PEFT and transformers make the embedding's output require a gradient in a hook; torch computes a
    normalised weight in one.
    """
    needed = type(hooks)()
    for key, hook in hooks.items():
        where = getattr(hook, "__module__", None) or type(hook).__module__
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        if where.startswith("torch.nn.utils") or (
            where.partition(".")[0] in ("transformers", "peft") and "require_grad" in name
        ):
            needed[key] = hook
    return needed


def _is_configuration(value: object) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "_attn_implementation")


def _use_plain_kernels(configuration: Any) -> None:  # noqa: ANN401
    """Set a transformers configuration to implementations that run without values.

    A loop over experts needs the routing; a batched product per token and expert does not, and
    costs the same. All attention kernels cost the same too.
    """
    for part in (configuration, *vars(configuration).copy().values()):
        if not _is_configuration(part):
            continue
        if part._attn_implementation not in (None, "eager", "sdpa"):
            part._attn_implementation_internal = "sdpa"
        if getattr(part, "_experts_implementation", None) not in _EXPERTS:
            part._experts_implementation_internal = "batched_mm"
        if getattr(part, "use_cache", None):
            part.use_cache = False
