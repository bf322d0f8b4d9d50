"""A module call without data: which module, and the shapes of what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


class TensorSpec:
    """A tensor without its values."""

    __slots__ = ("dtype", "is_parameter", "requires_grad", "shape")

    def __init__(
        self,
        shape: Iterable[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        is_parameter: bool = False,
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.is_parameter = is_parameter

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The whole tensor's, where ranks hold pieces of it (ZeRO-3, DTensor)."""
        return cls(
            getattr(tensor, "ds_shape", tensor.shape),
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
    for one in values:
        if isinstance(one, TensorSpec) and len(one.shape) == 2 and _is_integer(one.dtype):
            return one.shape[0], one.shape[1]
    embedded = call.kwargs.get("inputs_embeds")
    if isinstance(embedded, TensorSpec) and len(embedded.shape) == 3:
        return embedded.shape[0], embedded.shape[1]
    return None


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype is not torch.bool
