"""Copies a model's structure without its weights, and describes module calls without data.

A live model's own step must not be run to be counted: its hooks would fire, its generators
advance, its gradients fill and its compiled code be lost. So every module is rebuilt around fake
tensors (shapes without memory, on a device that computes nothing). Whatever a module refers to
(submodules, bound methods, configuration) refers to the copy.

All floating-point tensors become float32 on the CPU. FLOPs depend on neither, and a kernel for one
device or mixed types could keep the copy from running. A layer with packed weights (4 or 8 bits)
becomes the plain layer of its size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ergmeter.errors import NotMeasurable

# A module call without data: the module, and the shapes of its arguments.


@dataclass(slots=True, eq=False)
class TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_parameter: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The whole tensor's, where ranks hold pieces of it (ZeRO-3, DTensor)."""
        return cls(
            tuple(int(size) for size in getattr(tensor, "ds_shape", tensor.shape)),
            tensor.dtype,
            requires_grad=tensor.requires_grad,
            is_parameter=isinstance(tensor, nn.Parameter),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return make_tensor, (self.shape, self.dtype, self.requires_grad, self.is_parameter)


def make_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    """A tensor of this shape. To be called under a FakeTensorMode, where it takes no memory."""
    is_floating = dtype.is_floating_point
    made = torch.empty(shape, dtype=torch.float32 if is_floating else dtype)
    trained = requires_grad and is_floating
    return (
        nn.Parameter(made, requires_grad=trained) if is_parameter else made.requires_grad_(trained)
    )


@dataclass
class ModuleCall:
    """An outermost call of a module in a step. Tensors are `TensorSpec`s, so it holds no data."""

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
    """Rows and positions of the tokens that a call was given."""
    named = call.kwargs.get("input_ids")
    values: list[Any] = [named, *call.args, *call.kwargs.values()]
    for value in values:
        if isinstance(value, TensorSpec) and len(value.shape) == 2 and _is_integer(value.dtype):
            return value.shape[0], value.shape[1]
    embedded = call.kwargs.get("inputs_embeds")
    if isinstance(embedded, TensorSpec) and len(embedded.shape) == 3:
        return embedded.shape[0], embedded.shape[1]
    return None


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype is not torch.bool


# The copy.

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
    """The plain layer of a packed linear layer's size. Integer weights take no gradient."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: nn.Parameter | None, is_trained: bool
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=is_trained)
        self.bias = bias

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """The product."""
        return nn.functional.linear(x.float(), self.weight, self.bias)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what compiles it or spreads it over devices."""
    while True:
        attribute = _WRAPPERS.get(type(model).__name__)
        inner = model._modules.get(attribute) if attribute is not None else None
        if inner is None:
            return model
        model = inner


class MetaModel:
    """Makes the copy. To be used inside a FakeTensorMode."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._kept: list[object] = []  # keeps ids from being given again
        self.assumptions: list[str] = []

    def of(self, model: nn.Module) -> nn.Module:
        """The copy of a model, its parameters trained where the model's are."""
        return self._module(unwrapped(model))

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape that holds nothing."""
        shape = getattr(real, "ds_shape", real.shape)  # ZeRO-3 leaves an empty tensor behind
        dtype = torch.float32 if real.is_floating_point() else real.dtype
        return torch.empty(tuple(shape), dtype=dtype)

    def mapped(self, value: Any) -> Any:  # noqa: ANN401
        """Whatever a module holds, with the copy in the model's place."""
        if isinstance(value, nn.Module):
            return self._module(unwrapped(value))
        if isinstance(value, nn.Parameter):
            return self._parameter(value)
        if isinstance(value, torch.Tensor):
            return self._once(value, self.tensor)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.mapped(value.__self__))
        if isinstance(value, partial):
            words = {name: self.mapped(word) for name, word in value.keywords.items()}
            return partial(value.func, *(self.mapped(item) for item in value.args), **words)
        if type(value) is dict:
            return {key: self.mapped(item) for key, item in value.items()}
        if type(value) in (list, tuple, set):
            return type(value)(self.mapped(item) for item in value)
        if _is_configuration(value):
            return self._once(value, lambda real: set_runnable(copy.deepcopy(real)))
        return value

    def _once(self, value: Any, make: Any) -> Any:  # noqa: ANN401
        if id(value) not in self._made:
            self._made[id(value)] = make(value)
            self._kept.append(value)
        return self._made[id(value)]

    def _parameter(self, real: nn.Parameter) -> nn.Parameter:
        def make(real: nn.Parameter) -> nn.Parameter:
            fake = self.tensor(real)
            trained = real.requires_grad and fake.is_floating_point()
            return nn.Parameter(fake, requires_grad=trained)

        made: nn.Parameter = self._once(real, make)
        return made

    def _module(self, real: nn.Module) -> nn.Module:
        if id(real) in self._made:
            made: nn.Module = self._made[id(real)]
            return made
        self._kept.append(real)
        if type(real).__name__ == "FullyShardedDataParallel":
            raise NotMeasurable(
                "a model inside FullyShardedDataParallel has lost the shapes of its layers;"
                " count it before it is wrapped, or shard it with fully_shard"
            )
        if packed := packed_size(real):
            return self._plain(real, *packed)
        fake: nn.Module = object.__new__(type(real))
        self._made[id(real)] = fake
        state = dict(real.__dict__)
        contents = {name: state.pop(name) for name in ("_parameters", "_buffers", "_modules")}
        for name in HOOKS:
            hooks = state.pop(name, None)
            fake.__dict__[name] = needed_hooks(hooks) if isinstance(hooks, dict) else hooks
        state["_compiled_call_impl"] = None
        if "_old_forward" in state:  # what accelerate puts aside when it moves a layer's inputs
            state["forward"] = state["_old_forward"]
        for name, members in contents.items():
            fake.__dict__[name] = {key: self.mapped(item) for key, item in members.items()}
        for name, value in state.items():
            fake.__dict__[name] = self.mapped(value)
        if fake.__dict__.get("rope_type") in ("dynamic", "longrope"):
            # These look at the positions themselves, which are unknown; no product depends on it.
            fake.__dict__["rope_type"] = "default"
        return fake

    def _plain(self, real: nn.Module, inputs: int, outputs: int) -> nn.Module:
        bias = getattr(real, "bias", None)
        fake_bias = self._parameter(bias) if isinstance(bias, nn.Parameter) else None
        weight = getattr(real, "weight", None)
        is_trained = isinstance(weight, nn.Parameter) and weight.requires_grad
        fake = PlainLinear(inputs, outputs, bias=fake_bias, is_trained=is_trained)
        self._made[id(real)] = fake
        assumption = f"{type(real).__name__} layers are counted as the plain layers they stand for"
        if assumption not in self.assumptions:
            self.assumptions.append(assumption)
        return fake


def packed_size(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer whose weights are not a matrix of that size, or None.

    Whatever packs weights (bitsandbytes, GPTQ, AWQ, HQQ) keeps the true sizes beside them.
    """
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not isinstance(inputs, int) or not isinstance(outputs, int) or module._modules:
        return None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return inputs, outputs
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    # An 8-bit layer of bitsandbytes packs its weights when it is first used.
    is_plain = sorted(shape) == sorted((inputs, outputs)) and not _is_of(module, "bitsandbytes")
    return None if is_plain or not isinstance(module, nn.Linear) else (inputs, outputs)


def _is_of(module: nn.Module, library: str) -> bool:
    return any(kind.__module__.partition(".")[0] == library for kind in type(module).__mro__)


def needed_hooks(hooks: dict[int, Any]) -> Any:  # noqa: ANN401  a mapping of the same type
    """The hooks a model can't be run without: none of the user's, some of its libraries'.

    PEFT and transformers make the embedding's result need a gradient by a hook; torch derives a
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


def set_runnable(configuration: Any) -> Any:  # noqa: ANN401
    """Have transformers run what can run without values: no kernels from outside, no loops.

    A loop over the experts asks which tokens went where; a batch of products, one for each token
    and expert, does not need to know and costs the same. So does every kernel for attention.
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
    return configuration
