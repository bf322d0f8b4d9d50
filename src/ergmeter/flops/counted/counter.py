"""Counts the products that torch computes while it is active: by module, by operator, by direction.

The trap: what runs on the way back. Some of it is the gradient, some is the forward pass computed
a second time because checkpointing threw it away; a counter that adds both up gives neither model
nor hardware FLOPs. Autograd runs a gradient with recording off and a recomputation with recording
on, which tells them apart. And which module a gradient belongs to is in the number that autograd
gave the operation on the way forward: numbers rise, so a module's are an interval.

Never around a training step that is compiled: a dispatch mode at the first call of a compiled model
leaves it uncompiled for good, without a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter as Counts
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ergmeter.flops.analytic import PartFlops
from ergmeter.flops.batch import Sequences
from ergmeter.flops.counted.op_costs import POSITIONS, RULES, Call, looks_like_a_product
from ergmeter.flops.counted.op_totals import CountedStep
from ergmeter.flops.graph.graph import Attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.counted.op_costs import AttentionShape

# What tensors say about themselves: asked of the tensor, never of a mode.
_ABOUT = frozenset(
    {"size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "dim", "storage_offset"}
    | {"sym_storage_offset", "is_contiguous", "sym_is_contiguous", "is_strides_like_format"}
    | {"is_non_overlapping_and_dense", "layout"}
)


_DEVICE = torch.ops.prim.device.default


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered. For tensors of one's own: a model in training is `count`'s."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows: dict[tuple[str, str], list[int]] = {}
        self._unknown: Counts[str] = Counts()
        self._stack: list[str] = [""]
        self._from: list[int] = []  # the autograd number from which on ...
        self._owner: list[str] = []  # ... what is recorded belongs to this module
        self._masks: dict[str, Attention] = {}  # of modules that say they are causal
        self._spared = [0, 0, 0]
        self._handles: list[Any] = []

    def __enter__(self) -> Counter:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def counted(
        self, *, params: int = 0, params_trained: int = 0, assumptions: tuple[str, ...] = ()
    ) -> CountedStep:
        """What was counted so far."""
        rows = {key: PartFlops(*costs) for key, costs in self._rows.items()}
        spared = PartFlops(*self._spared)
        return CountedStep(rows, params, params_trained, dict(self._unknown), assumptions, spared)

    def follow(self, model: torch.nn.Module) -> None:
        """Tell modules apart, by their names in `model`. It puts hooks on them, so a copy's."""
        apart = {type(module) for module in model.modules() if "sliding_window" in vars(module)}
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._entering(name)),
                module.register_forward_hook(self._leaving, always_call=True),
            ]
            if getattr(module, "is_causal", False) is True:
                # As transformers has it: where layers differ, those with a window say so.
                says = module if type(module) in apart else getattr(module, "config", None)
                window = getattr(says, "sliding_window", None)
                self._masks[name] = _mask(window if isinstance(window, int) else None)

    def unfollow(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self._stack.append(name)
            self._note_owner()

        return hook

    def _leaving(self, *_: object) -> None:
        self._stack.pop()
        self._note_owner()

    def _note_owner(self) -> None:
        self._from.append(torch._C._autograd._get_sequence_nr())
        self._owner.append(self._stack[-1])

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, and add what it cost."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked twice for each gradient
            return args[0].fake_device
        kwargs = kwargs or {}
        name, is_known, decomposes = _kind(func)
        if name is None:
            return NotImplemented
        if decomposes:
            with self:
                return func.decompose(*args, **kwargs)
        if name == "aten::_grouped_mm" and isinstance(args[0], FakeTensor):
            out = _grouped_result(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if is_known:
            self._add(func, name, args, kwargs, out)
        elif looks_like_a_product(name, (*args, *kwargs.values())):
            self._unknown[_call_text(func, name, kwargs)] += 1
        return out

    def _add(
        self,
        func: Any,  # noqa: ANN401
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> None:
        node: Any = torch._C._current_autograd_node()
        wanted: tuple[bool, ...] = ()
        arguments = dict(zip(_names(func, name), args, strict=False)) | kwargs
        if node is None:
            direction, module = 0, self._stack[-1]
        elif torch.is_grad_enabled():
            direction, module = 2, self._stack[-1]
        else:
            direction, module = 1, self._owner_of(node)
            wanted = tuple(edge[0] is not None for edge in node.next_functions)
        work = RULES[name](Call(arguments, out, wanted))
        costs = self._rows.setdefault((module, name), [0, 0, 0])
        costs[direction] += int(work.needed)
        costs[2] += int(work.again)
        self._spared[2] += int(work.again)
        if work.meeting is not None and work.needed:
            self._spared[direction] += self._masked(work.needed, work.meeting, module)

    def _masked(self, needed: int, met: AttentionShape, module: str) -> int:
        """Of the rectangle's FLOPs those of pairs that a causal mask keeps apart."""
        mask = self._masks.get(module, _mask() if met.is_causal else None)
        if mask is None or met.queries != met.keys:
            return 0
        whole = met.sequences * met.queries * met.keys
        kept = Sequences(met.queries, met.sequences).pairs(mask, "needed")
        return needed // whole * (whole - int(kept))

    def _owner_of(self, node: Any) -> str:  # noqa: ANN401
        place = bisect_right(self._from, node._sequence_nr()) - 1
        return self._owner[place] if place >= 0 else ""


def _mask(window: int | None = None) -> Attention:
    return Attention(1, 1, 1, 1, "causal", window=window)


@lru_cache(maxsize=4096)
def _kind(func: Any) -> tuple[str | None, bool, bool]:  # noqa: ANN401
    """An operator's name, whether it has a rule, and whether it is to be taken apart first."""
    if isinstance(func, HigherOrderOperator):
        higher: str = func._name
        return higher, higher in RULES, False
    name: str = func._schema.name
    if name.rpartition("::")[2] in _ABOUT:
        return None, False, False
    if name in RULES:
        return name, True, False
    return name, False, name != "prim::device" and bool(func._can_decompose())


@lru_cache(maxsize=256)
def _names(func: Any, name: str) -> tuple[str, ...]:  # noqa: ANN401
    if name in POSITIONS:
        return POSITIONS[name]
    return tuple(argument.name for argument in func._schema.arguments)


def _grouped_result(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,  # noqa: ARG001
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What `grouped_mm` returns, by shape: torch's own stand-in refuses all types but bfloat16."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape.insert(0, left.shape[0] if left.dim() == 3 else offs.shape[0])  # type: ignore[union-attr]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _call_text(func: Any, name: str, kwargs: dict[str, Any]) -> str:  # noqa: ANN401
    """An operator's name; of a Triton kernel its own, which the wrapper's arguments hold."""
    if "kernel_idx" not in kwargs:
        return name
    table = torch._higher_order_ops.triton_kernel_wrap.kernel_side_table
    return f"the Triton kernel {getattr(table.get_kernel(kwargs['kernel_idx']), '__name__', func)}"
