"""Counts the FLOPs of a model's step by running a copy once, on tensors without memory.

`count` takes a model as it is in the training script: live, compiled or quantized. It runs a
weightless copy of it (`skeleton`) under `Counter`. The model itself is never run, and no data moves
between devices. The count is exact for what the copy computes, with all attention pairs. Operators
that can't be counted are named.
"""

from __future__ import annotations

import inspect
import logging
import sys
from bisect import bisect_right
from collections import Counter as Counts
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.analytic import PartFlops
from ergmeter.flops.batch import Sequences, positive
from ergmeter.flops.counted.meta_model import make_runnable, make_tensor
from ergmeter.flops.counted.op_costs import POSITIONS, RULES, Call, looks_like_a_product
from ergmeter.flops.counted.op_totals import CountedStep
from ergmeter.flops.counted.skeleton import dumps, loads
from ergmeter.flops.graph.graph import Attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ergmeter.flops.counted.op_costs import AttentionShape

# The counter: products that torch computes while it is active, by module, operator and direction.
#
# A backward pass computes gradients and, under checkpointing, parts of the forward pass again.
# Autograd runs a gradient with recording off and a recomputation with recording on, which separates
# the two. The module of a gradient follows from the sequence number that autograd gave the forward
# operation: numbers rise, so a module's are an interval.
#
# Never use it around a compiled training step: a dispatch mode at the first call of a compiled
# model leaves the model uncompiled for good, without a message.

# Queries of a tensor's shape and layout: not dispatched, the tensor answers them itself.
_ABOUT = frozenset(
    {"size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "dim", "storage_offset"}
    | {"sym_storage_offset", "is_contiguous", "sym_is_contiguous", "is_strides_like_format"}
    | {"is_non_overlapping_and_dense", "layout"}
)


_DEVICE = torch.ops.prim.device.default


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that counts the FLOPs of torch operators. For a live model use `count`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows: dict[tuple[str, str], list[int]] = {}
        self._unknown: Counts[str] = Counts()
        self._stack: list[str] = [""]
        self._from: list[int] = []  # autograd sequence numbers at which the module changes
        self._owner: list[str] = []  # the module from each of these numbers on
        self._masks: dict[str, Attention] = {}  # of modules with is_causal = True
        self._spared = [0, 0, 0]
        self._handles: list[Any] = []

    def __enter__(self) -> Counter:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def counted(self) -> CountedStep:
        """Return the totals counted so far."""
        rows = {key: PartFlops(*costs) for key, costs in self._rows.items()}
        spared = PartFlops(*self._spared)
        return CountedStep(rows, calls_not_counted=dict(self._unknown), spared=spared)

    def follow(self, model: torch.nn.Module) -> None:
        """Count by module of `model`. It adds hooks to the modules, so pass a copy."""
        apart = {type(module) for module in model.modules() if "sliding_window" in vars(module)}
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._entering(name)),
                module.register_forward_hook(self._leaving, always_call=True),
            ]
            if getattr(module, "is_causal", False) is True:
                # transformers: if layers differ, sliding_window is a field of the module.
                says = module if type(module) in apart else getattr(module, "config", None)
                window = getattr(says, "sliding_window", None)
                self._masks[name] = _mask(window if isinstance(window, int) else None)

    def unfollow(self) -> None:
        """Remove the hooks that `follow` added."""
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
        """Run an operator and add its FLOPs."""
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
        """Return the FLOPs of the pairs that a causal mask hides."""
        mask = self._masks.get(module, _mask() if met.is_causal else None)
        if mask is None or met.queries != met.keys:
            return 0
        pairs = met.sequences * met.queries * met.keys
        unmasked = Sequences(met.queries, met.sequences).pairs(mask, "needed")
        return needed // pairs * (pairs - int(unmasked))

    def _owner_of(self, node: Any) -> str:  # noqa: ANN401
        index = bisect_right(self._from, node._sequence_nr()) - 1
        return self._owner[index] if index >= 0 else ""


def _mask(window: int | None = None) -> Attention:
    return Attention(1, 1, 1, 1, "causal", window=window)


@lru_cache(maxsize=4096)
def _kind(func: Any) -> tuple[str | None, bool, bool]:  # noqa: ANN401
    """Return an operator's name, whether it has a rule, and whether to decompose it first."""
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
    """Return an empty result of `grouped_mm`: torch's fake version accepts bfloat16 only."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape.insert(0, left.shape[0] if left.dim() == 3 else offs.shape[0])  # type: ignore[union-attr]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _call_text(func: Any, name: str, kwargs: dict[str, Any]) -> str:  # noqa: ANN401
    """Return an operator's name; for a Triton kernel, the kernel's own name."""
    if "kernel_idx" not in kwargs:
        return name
    table = torch._higher_order_ops.triton_kernel_wrap.kernel_side_table
    return f"the Triton kernel {getattr(table.get_kernel(kwargs['kernel_idx']), '__name__', func)}"


# Counting a model.

__all__ = ["CountedStep", "Counter", "count"]

# Errors of a model that can't run without values. Others, such as MemoryError, are not caught.
RAISED = (
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError),
    *(ImportError, ArithmeticError),
)
_CURE = "pass inputs= that it accepts, or count it from its configuration"
_torch_log = logging.getLogger("torch._subclasses.fake_tensor")  # also prints errors that we raise


def count(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    source_len: int | None = None,
    train: bool = True,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> CountedStep:
    """Count the FLOPs of one step of `model`: forward and, with `train`, backward.

    A text model gets `batch_size` rows of `seq_len` tokens; an encoder-decoder's encoder gets
    `source_len` tokens (default: `seq_len`). For other models pass `inputs`, by name or in order;
    only their shapes matter. `loss` computes a scalar from the model's output; it is needed if the
    output has no loss, logits or tensors.

    The model, its hooks, gradients, generators and compiled code are not changed.
    Raises NotMeasurable if the model or a kernel needs the values of tensors to run.
    """

    data = dumps(model, modules=[model])

    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        copy: nn.Module = loads(data)
        if inputs is None:
            return copy, (), text_inputs(copy, batch_size, seq_len, source_len)
        fake_inputs = tree_map(_without_values, inputs)
        if hasattr(fake_inputs, "items"):
            return copy, (), dict(fake_inputs)
        return copy, tuple(fake_inputs), {}

    return run_once(build, train=train, loss=loss)


def _without_values(value: Any) -> Any:  # noqa: ANN401  a tensor, or any other argument
    is_tensor = isinstance(value, torch.Tensor)
    return make_tensor(tuple(value.shape), value.dtype) if is_tensor else value


# Running the copy.


def run_once(
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]],
    *,
    train: bool,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> CountedStep:
    """Count one step of the model that `build` returns, with the arguments that it returns."""
    try:
        with isolated():
            model, args, kwargs = build()
            assumptions = make_runnable(model)
            model.train(train)
            params, trained = _sizes(model)
            if train and not trained:
                raise UsageError("no parameter of the model is trained; pass train=False")
            if not train:  # with gradients torch does not use fused inference kernels
                for parameter in model.parameters():
                    parameter.requires_grad_(parameter.is_floating_point())
            counted, is_back = counted_call(
                model, args, kwargs, loss=(loss or scalar_of) if train else None
            )
    except RAISED as error:
        raise NotMeasurable(why_not_run(error)) from error
    if train and not is_back:
        raise UsageError(
            "nothing that the model returns depends on a trained parameter; pass loss="
        )
    return replace(counted, params=params, params_trained=trained, assumptions=assumptions)


def counted_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor | None] | None,
) -> tuple[CountedStep, bool]:
    """Count a forward pass and, if `loss` returns a scalar of its result, the backward pass.

    Also returns whether there was a backward pass.
    """
    counter = Counter()
    counter.follow(model)
    try:
        with counter:
            result = model(*args, **kwargs)
            number: Any = loss(result) if loss is not None else None
            if number is not None:
                number.backward()
    finally:
        counter.unfollow()
    return counter.counted(), number is not None


@contextmanager
def isolated() -> Iterator[None]:
    """Run a block on fake tensors, without the caller's torch modes; global state is restored."""
    depth, generator = torch._C._len_torch_dispatch_stack(), torch.get_rng_state()
    try:
        with ExitStack() as stack:
            stack.callback(setattr, _torch_log, "disabled", _torch_log.disabled)
            _torch_log.disabled = True
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
                # Under a dispatch mode torch would permanently skip a model's compiled functions.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.device("cpu"))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield
    finally:
        while torch._C._len_torch_dispatch_stack() > depth:
            torch._C._pop_torch_dispatch_stack(None)
        torch.set_rng_state(generator)


def _sizes(model: nn.Module) -> tuple[int, int]:
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def scalar_of(result: Any) -> torch.Tensor | None:  # noqa: ANN401
    """Return a scalar of a model's output to call backward() on; None if it has no gradient.

    It is a sum, so it adds no matrix products.
    """
    for name in ("loss", "logits", "last_hidden_state"):
        value = result.get(name) if hasattr(result, "get") else getattr(result, name, None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.sum()
    leaves = tree_flatten(result)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([tensor.sum() for tensor in tensors]).sum() if tensors else None


def why_not_run(error: BaseException, *, cure: str = _CURE) -> str:
    """Return a message: why a model can't be run without values, and what to do."""
    message = str(error).strip().partition("\n")[0][:200]
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return (
            f"the model branches on the values of its tensors ({message}), and the count runs"
            f" without values; {cure}"
        )
    return f"the model can't be run without its weights: {kind}: {message}; {cure}"


# Inputs.


def text_inputs(
    model: nn.Module, batch_size: int | None, seq_len: int | None, source_len: int | None = None
) -> dict[str, Any]:
    """Return token inputs of this shape, under the argument names of the model's forward."""
    name = _taking_tokens(model)
    rows, length = positive("batch_size", batch_size), positive("seq_len", seq_len)
    target = torch.zeros(rows, length, dtype=torch.long)
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {name: target}
    source = length if source_len is None else positive("source_len", source_len)
    return {"input_ids": torch.zeros(rows, source, dtype=torch.long), "decoder_input_ids": target}


def _taking_tokens(model: nn.Module) -> str:
    """Return the name of the token argument: input_ids, or the only required argument."""
    accepted = inspect.signature(model.forward).parameters
    passes_on = any(kind.kind is kind.VAR_KEYWORD for kind in accepted.values())
    if "input_ids" in accepted or (passes_on and hasattr(model, "config")):
        return "input_ids"
    needed = [
        name
        for name, parameter in accepted.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    reads = any("Embedding" in kind.__name__ for m in model.modules() for kind in type(m).__mro__)
    if len(needed) != 1 or not reads:
        raise UsageError(
            f"{type(model).__name__} takes neither input_ids nor a batch of tokens as its only"
            f" argument (it needs {', '.join(needed) or 'none'}); pass inputs= that it accepts"
        )
    return needed[0]
