"""FLOPs of a model's step by running it once, on tensors that have shapes and no memory.

`count` takes a model as it is in the training script, live or compiled or quantized, and runs a
weightless copy of it (`shadow`) under our own counter (`counter`, `rules`). The model's own step is
never run, and nothing is moved between devices. What comes out is exact for what the copy
computes, attention as the whole rectangle of scores; what it can't see is named.

The result is kept for as long as the model and the shapes stay what they are, so it may be asked
for at every step.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import OrderedDict
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.counted.counter import Counter
from ergmeter.flops.counted.meta_model import Shadow, set_runnable, unwrapped
from ergmeter.flops.counted.op_totals import CountedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["CountedStep", "Counter", "count", "count_built"]

# What a model that can't be run this way may raise: everything that is not the machine's fault.
RAISED = (
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError),
    *(ImportError, ArithmeticError),
)
_CURE = "pass inputs= it accepts, or count it from its configuration"
_KEPT = 128
_PLAIN = (bool, int, float, str, tuple)  # what a module is told when it is made
_torch_log = logging.getLogger("torch._subclasses.fake_tensor")  # prints what we raise
_counts: OrderedDict[object, CountedStep] = OrderedDict()
_faces: WeakKeyDictionary[nn.Module, _Face] = WeakKeyDictionary()


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
    """The FLOPs of one step of `model`: forward, and with `train` the gradients of what is trained.

    A text model is given `batch_size` rows of `seq_len` tokens, an encoder-decoder `source_len`
    on its encoder's side (as many by default). Any other model is given `inputs`, of which only
    the shapes matter: by name, or in order. `loss` makes a number of what the model returns, for a
    model that returns neither loss nor logits nor a tensor.

    The model, its hooks, gradients, generators and compiled code are left as they are.
    NotMeasurable where it can't be run without values: it decides by them, or a kernel insists.
    """
    key = (_structure(model), _shapes(inputs), batch_size, seq_len, source_len, train, loss)
    if key in _counts:
        _counts.move_to_end(key)
        return _counts[key]

    def build(shadow: Shadow) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        copy = shadow.of(model)
        given = tree_map(partial(_faked, shadow), inputs)
        if given is None:
            given = _text(copy, batch_size=batch_size, seq_len=seq_len, source_len=source_len)
        return (copy, (), dict(given)) if hasattr(given, "items") else (copy, tuple(given), {})

    counted = _run(build, train=train, loss=loss)
    _check_untouched(model)
    return _keep(key, counted)


def count_built(
    key: object,
    build: Callable[[], nn.Module],
    *,
    batch_size: int,
    seq_len: int,
    source_len: int | None = None,
    train: bool = True,
    trainable: Callable[[str], bool] | None = None,
    checkpointing: bool = False,
) -> CountedStep:
    """The same for a text model that is only made for it, by `build`, on fake tensors.

    `trainable` says by name which parameters are trained: all, if not given. `key` stands for what
    `build` makes.
    """
    whole = (key, batch_size, seq_len, source_len, train, trainable, checkpointing)
    if whole in _counts:
        _counts.move_to_end(whole)
        return _counts[whole]

    def made(_: Shadow) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        model: Any = build()
        if hasattr(model, "config"):
            set_runnable(model.config)
        if checkpointing:
            model.gradient_checkpointing_enable()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable is None or trainable(name))
        given = _text(model, batch_size=batch_size, seq_len=seq_len, source_len=source_len)
        return model, (), given

    return _keep(whole, _run(made, train=train, loss=None))


def _keep(key: object, counted: CountedStep) -> CountedStep:
    _counts[key] = counted
    while len(_counts) > _KEPT:
        _counts.popitem(last=False)
    return counted


# -- running ---------------------------------------------------------------------------------------


def _run(
    build: Callable[[Shadow], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]],
    *,
    train: bool,
    loss: Callable[[Any], torch.Tensor] | None,
) -> CountedStep:
    shadow, counter = Shadow(), Counter()
    depth = torch._C._len_torch_dispatch_stack()
    generator = torch.get_rng_state()
    try:
        with apart():
            model, args, kwargs = build(shadow)
            model.train(train)
            params, trained = _sizes(model)
            if train and not trained:
                raise UsageError("no parameter of the model is trained; pass train=False")
            if not train:  # a forward pass that could be walked back: no fused short cuts
                for parameter in model.parameters():
                    parameter.requires_grad_(parameter.is_floating_point())
            counter.follow(model)
            with counter:
                result = model(*args, **kwargs)
                if train:
                    number: Any = loss(result) if loss is not None else scalar_of(result)
                    if number is None:
                        raise UsageError(
                            "nothing that the model returns depends on a trained parameter; pass"
                            " loss="
                        )
                    number.backward()
    except RAISED as error:
        raise NotMeasurable(why_not_run(error)) from error
    finally:
        while torch._C._len_torch_dispatch_stack() > depth:
            torch._C._pop_torch_dispatch_stack(None)
        torch.set_rng_state(generator)
    return counter.counted(
        params=params, params_trained=trained, assumptions=tuple(shadow.assumptions)
    )


def apart() -> ExitStack:
    """Where nothing the caller has switched on is felt, and nothing done here is kept."""
    stack = ExitStack()
    stack.callback(setattr, _torch_log, "disabled", _torch_log.disabled)
    _torch_log.disabled = True
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch.autocast("cpu", enabled=False))
    stack.enter_context(torch.autograd.set_multithreading_enabled(False))
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        # A compiled function inside a model would be given up for good under a dispatch mode.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.device("cpu"))
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    return stack


def _check_untouched(model: nn.Module) -> None:
    """A function that kept hold of the model itself, and was run in the copy, would reach it."""
    reached = [p for p in model.parameters() if isinstance(p.grad, FakeTensor)]
    for parameter in reached:
        parameter.grad = None
    if reached:
        raise NotMeasurable(
            "a part of the model runs the model itself and not its copy, because a forward was"
            " replaced by a function that holds on to it; count it before that is done"
        )


def _sizes(model: nn.Module) -> tuple[int, int]:
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def scalar_of(result: Any) -> torch.Tensor | None:  # noqa: ANN401
    """The number to walk back from; what it is made of costs no product. None: there is none."""
    for name in ("loss", "logits", "last_hidden_state"):
        found = result.get(name) if hasattr(result, "get") else getattr(result, name, None)
        if isinstance(found, torch.Tensor) and found.requires_grad:
            return found.sum()
    tensors = [
        leaf
        for leaf in tree_flatten(result)[0]
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    return torch.stack([tensor.sum() for tensor in tensors]).sum() if tensors else None


def why_not_run(error: BaseException, *, cure: str = _CURE) -> str:
    """Why a model can't be counted by running it without values, and what to do."""
    said = str(error).strip().partition("\n")[0][:200]
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return (
            f"the model decides by the values of its tensors ({said}), which a count without values"
            f" does not have; {cure}"
        )
    return f"the model can't be run without its weights: {kind}: {said}; {cure}"


# -- inputs ----------------------------------------------------------------------------------------


def _text(
    model: nn.Module, *, batch_size: int | None, seq_len: int | None, source_len: int | None
) -> dict[str, Any]:
    name = _taking_tokens(model)
    rows, length = _whole_number("batch_size", batch_size), _whole_number("seq_len", seq_len)
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {name: torch.zeros(rows, length, dtype=torch.long)}
    source = length if source_len is None else _whole_number("source_len", source_len)
    return {
        "input_ids": torch.zeros(rows, source, dtype=torch.long),
        "decoder_input_ids": torch.zeros(rows, length, dtype=torch.long),
    }


def _taking_tokens(model: nn.Module) -> str:
    """The name of the argument that takes a batch of tokens: input_ids, or the only one needed."""
    accepted = inspect.signature(model.forward).parameters
    passes_on = any(kind.kind is kind.VAR_KEYWORD for kind in accepted.values())
    if "input_ids" in accepted or (passes_on and hasattr(model, "config")):
        return "input_ids"
    needed = [
        name
        for name, one in accepted.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    reads = any("Embedding" in kind.__name__ for m in model.modules() for kind in type(m).__mro__)
    if len(needed) != 1 or not reads:
        raise UsageError(
            f"{type(model).__name__} takes no input_ids, nor one batch of tokens alone"
            f" ({', '.join(needed) or 'nothing'}); pass inputs= it accepts"
        )
    return needed[0]


def _whole_number(name: str, value: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of 1 or more; got {value!r}")
    return value


def _faked(shadow: Shadow, value: Any) -> Any:  # noqa: ANN401
    return shadow.tensor(value) if isinstance(value, torch.Tensor) else value


# -- knowing a model again -------------------------------------------------------------------------


class _Face:
    """What a model's count depends on, told quickly, without keeping the model alive.

    Its structure is described once; after that only what can change is looked at: which modules and
    parameters there are, which of these are trained, who is checkpointed.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = tuple(unwrapped(model).modules())
        self._refs = tuple(ref(module) for module in modules)
        self._described = hash(tuple(_described(modules[0])))
        self._children, self._parameters, _ = _parts(modules)

    def key(self) -> tuple[object, ...] | None:
        """Equal for two models only where their counts are; None if this one was rebuilt."""
        modules = [reference() for reference in self._refs]
        if None in modules:
            return None
        children, parameters, trained = _parts(modules)  # type: ignore[arg-type]
        if children != self._children or parameters != self._parameters:
            return None
        own = [module.__dict__ for module in modules]
        checkpointed = tuple([names.get("gradient_checkpointing") for names in own])
        configuration = own[0].get("config")
        kernels = (
            getattr(configuration, "_attn_implementation", None),
            getattr(configuration, "_experts_implementation", None),
        )
        return (self._described, hash(tuple(trained)), hash(checkpointed), str(kernels))


def _parts(modules: Sequence[nn.Module]) -> tuple[list[int], list[int], list[bool]]:
    """Which modules are in these, which parameters, and which of them are trained."""
    held = [p for module in modules for p in module._parameters.values() if p is not None]
    children = [id(child) for module in modules for child in module._modules.values()]
    return children, [id(p) for p in held], [p.requires_grad for p in held]


def _structure(model: nn.Module) -> tuple[object, ...]:
    face = _faces.get(model)
    key = face.key() if face is not None else None
    if key is None:
        face = _faces[model] = _Face(model)
        key = face.key()
    assert key is not None
    return key


def _described(model: nn.Module) -> Iterator[object]:
    """A model's structure: what it is made of, and how each piece was told to work."""
    for name, module in model.named_modules():
        own = vars(module).copy()  # a thread may be setting something on it
        yield name, type(module)
        yield repr([(k, v) for k, v in own.items() if k != "training" and isinstance(v, _PLAIN)])
        forward = own.get("forward")
        yield getattr(getattr(forward, "__func__", forward), "__code__", forward)
    for name, parameter in model.named_parameters():
        yield name, tuple(getattr(parameter, "ds_shape", parameter.shape))
    configuration = getattr(model, "config", None)
    if configuration is not None and hasattr(configuration, "to_json_string"):
        yield configuration.to_json_string(use_diff=False)


def _shapes(inputs: Any) -> object:  # noqa: ANN401
    if inputs is None:
        return None
    leaves, form = tree_flatten(dict(inputs) if hasattr(inputs, "items") else inputs)
    return str(form), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
