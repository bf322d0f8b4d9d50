"""Finds the model that an optimizer trains among the modules of a loop, and counts its calls.

The first module called in training mode may be a frozen teacher. So the model, called root here, is
the outermost called module that owns the optimizer's parameters. Until it is known, every outermost
call is inspected (`torch.calls`). A hook on a module would be copied, pickled and scripted with the
module. So a root's wrapper sits in the attribute where module.compile() stores its result, which
none of these copy.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from ergmeter.integrations.batches import (
    Amount,
    Counts,
    count_labelled,
    count_samples,
    count_tokens,
    is_ids,
    is_later,
)
from ergmeter.integrations.torch.calls import (
    backward_task,
    is_compiling,
    is_grad_enabled,
    outermost,
)
from ergmeter.integrations.training import shifts_labels
from ergmeter.integrations.unsettled_steps import device_events
from ergmeter.meter.clock import moment

if TYPE_CHECKING:
    from torch import nn

    from ergmeter.integrations.torch.steps import Loop

# -- precision of matrix products ------------------------------------------------------------------
# With fp32 weights, autocast decides the precision. If autocast is off where a model is called,
# that proves nothing: it may be switched on inside. Only a precision that is certain is reported.

_SHORT = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_ACCELERATE = ("bf16", "fp16")  # not "fp8": only some products are in fp8 then
# As Lightning and Fabric call it; "transformer-engine" is left out for the same reason.
_LIGHTNING = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}


def call_precision(module: Any, wrapped: Any) -> str | None:  # noqa: ANN401  torch modules
    """The precision of matrix products in a call, from autocast or the framework's settings."""
    return _autocast(wrapped) or lightning_precision(_fabric(module)) or _accelerate(wrapped)


def lightning_precision(precision: object) -> str | None:
    """Return bf16 or fp16 for Lightning's name of a precision; None for other names."""
    return _LIGHTNING.get(str(precision))


def _autocast(module: Any) -> str | None:  # noqa: ANN401
    first = next(module.parameters(), None)
    if first is None:
        return None
    kind = first.device.type
    try:
        is_on = torch.is_autocast_enabled(kind)
        return _SHORT.get(str(torch.get_autocast_dtype(kind))) if is_on else None
    except (TypeError, RuntimeError, AttributeError):  # torch before 2.4; a device without it
        return None


def _fabric(module: Any) -> object:  # noqa: ANN401
    strategy = getattr(module, "_strategy", None)
    return getattr(getattr(strategy, "precision", None), "precision", None)


def _accelerate(module: Any) -> str | None:  # noqa: ANN401
    """The precision that Accelerate puts into the forward of a model it prepares."""
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not hasattr(module, "_original_forward"):
        return None
    precision = str(state.AcceleratorState._shared_state.get("_mixed_precision"))
    return precision if precision in _ACCELERATE else None


# -- roots -----------------------------------------------------------------------------------------

_CALL = "_compiled_call_impl"  # where torch looks first when a module is called, since 2.2
_OURS = "ergmeter_stands_before"  # attribute of our replacement: the call that it replaced
_NAMED = "input_ids"
_WRAPPED_IN = ("module", "_orig_mod")
_MOST_COUNTS = 4096  # per module that is not known to be trained
_SEQUENCE_FIRST = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
_KEPT_EVALS = 64


class Root:
    """A module that a loop calls: the start and the token counts of its step in progress."""

    def __init__(self, module: nn.Module, loop: Loop) -> None:
        self.module = ref(module)
        self.parts = frozenset(id(part) for part in unwrapped(module))
        self.active = True
        self.was_called = False
        self.dtype: str | None = None  # precision of its matrix products, where known
        self.trains_in_eval = False  # fine-tuned in eval mode, as some do for frozen statistics
        self.drop()
        self.early_evals: list[list[int]] = []  # before the first step: start and end
        self._in_early_eval = False
        self._loop = loop
        self._thread = 0  # that calls it first; on another thread we count its FLOPs
        self._call: Any = None
        self._names = _argument_names(unwrapped(module)[-1])
        self._shifts = shifts_labels(module)
        self._alike: dict[Any, Counts] = {}
        self._inside: InnerShapes | None = None  # looked at in the first step
        self._layout: BatchLayout | None = None  # where it is not the usual one

    def drop(self) -> None:
        """Drop the counts since the last step, without waiting for the device."""
        self.start_ns: int | None = None
        self.counts: list[Counts] = []
        self.on_device: list[Any] | None = None  # the last numbers that are not in host memory
        self.unknown = 0  # batches without tokens: the step's sum is unknown then
        self.aside: tuple[int, list[Counts]] | None = None  # of forwards that may be evaluation

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Count a call that is about to be made. Runs at every call, so it is short.

        True if it is not a training forward: `Loop.evaluated` is then called when it returns.
        """
        if not self.active or self._thread not in (0, get_ident()):
            return False
        if not is_grad_enabled() or not (module.training or self.trains_in_eval):
            self._call_outside_training(args, kwargs)
            return True
        if backward_task() != -1:
            return False  # computed again for the backward pass
        if self.start_ns is None:
            self.start_ns = moment()
            self._in_early_eval = False
            if self._loop.eval_ns is not None:
                self._loop.trains(self, self.start_ns)
        counts = None
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            counts = self._alike.get((args[0].shape, args[0].dtype))
        if counts is None:
            self._thread = get_ident()
            self._is_called(module)
            counts = self._tokens(args, kwargs)
        if counts is None:
            self.unknown += 1
        elif self._call is not None or len(self.counts) < _MOST_COUNTS:
            self.counts.append(counts)
        return False

    def evaluates_early(self, now_ns: int) -> None:
        """Store the start of a call without gradients, made before the first step."""
        if not self._in_early_eval and len(self.early_evals) < _KEPT_EVALS:
            self._in_early_eval = True
            self.early_evals.append([now_ns, now_ns])

    def evaluated_early(self, now_ns: int) -> None:
        """Store the end of the call whose start `evaluates_early` stored."""
        if self._in_early_eval:
            self.early_evals[-1][1] = now_ns

    def _call_outside_training(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report a call as evaluation; count it if it has gradients and may be training."""
        now_ns = time.monotonic_ns()
        self._loop.evaluates(self, now_ns)
        if not is_grad_enabled() or backward_task() != -1:
            return
        self._is_called(self.module())
        if self.aside is None:
            self.aside = (now_ns, [])
        counts = self._tokens(args, kwargs)
        if counts is not None and len(self.aside[1]) < _MOST_COUNTS:
            self.aside[1].append(counts)

    def _is_called(self, module: nn.Module | None) -> None:
        if not self.was_called and module is not None:
            self.was_called = True
            self.dtype = call_precision(module, unwrapped(module)[-1])
            self._inside = InnerShapes(module)

    def take_step(self) -> tuple[int | None, list[Counts], int, Any]:
        """End the step; return its start, counts, number of micro-batches and device events."""
        if self.start_ns is None and self.aside is not None:
            self.start_ns, self.counts = self.aside
            self.trains_in_eval = True
            self._loop.evaluated_nothing()
        start_ns, counts = self.start_ns, self.counts
        unknown, on_device = self.unknown, self.on_device
        self.drop()
        if self._inside is not None:
            layout = self._inside.layout()
            self._inside.detach()
            self._inside = None
            if layout != BatchLayout():
                self._layout = layout
                counts = [layout.applied(count) for count in counts]
                self._alike = {key: layout.applied(count) for key, count in self._alike.items()}
        after = device_events(on_device) if on_device is not None else None
        return start_ns, [] if unknown else counts, len(counts) + unknown or 1, after

    def attach(self) -> None:
        """Wrap the module's calls."""
        module = self.module()
        if self._call is None and module is not None:
            evaluated = partial(self._loop.evaluated, self)
            self._call = _look_first(module, self.called, fail=self._loop.fail, after=evaluated)

    def detach(self) -> None:
        """Remove the wrapper."""
        self.active = False
        if self._inside is not None:
            self._inside.detach()
        _restore_call(self.module(), self._call)
        self._call = None

    def owned(self, parameters: Mapping[int, int]) -> int:
        """How many elements of `parameters` (sizes by id) belong to this module."""
        module = self.module()
        if module is None:
            return 0
        return sum(parameters.get(id(parameter), 0) for parameter in module.parameters())

    @property
    def trainable(self) -> int:
        """The number of trainable parameter elements of the module."""
        module = self.module()
        return sum(p.numel() for p in module.parameters() if p.requires_grad) if module else 0

    def _tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counts | None:
        if is_captured():
            return None
        known = self._alike.get(_pair(args)) if not kwargs and len(args) == 2 else None
        if known is not None:
            loss = count_labelled(args[1])
            return Counts(known.computed, known.samples, known.real, loss, known.squares)
        if self._inside is not None:
            ids = next((value for value in (*args, *kwargs.values()) if is_ids(value)), None)
            if ids is not None:
                self._inside.inputs.add(tuple(ids.shape))
        batch = self._batch(args, kwargs)
        counts = count_tokens(batch, shifts=self._shifts)
        if counts is None and self._loop.optimizers_made < 2:  # a GAN's batches are of two kinds
            counts = count_samples((*args, *kwargs.values()))
        if counts is not None and self._layout is not None:
            counts = self._layout.applied(counts)
        if counts is not None and counts.laters:
            self.on_device = counts.laters
        elif counts is not None and not kwargs:
            self._remember(args, counts, is_unnamed=isinstance(batch, tuple))
        return counts

    def _remember(self, args: tuple[Any, ...], counts: Counts, *, is_unnamed: bool) -> None:
        """Cache the counts by shape: later batches often differ only in their labels."""
        key: Any = None
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            key = args[0].shape, args[0].dtype
        elif len(args) == 2 and is_unnamed and counts.loss is not None:
            key = _pair(args)
        if key is not None and len(self._alike) < _MOST_COUNTS:
            self._alike[key] = counts

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """The call's arguments as a batch: by name if one is `input_ids`, else in order."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            return args[0]
        named = dict(zip(self._names, args, strict=False)) | kwargs
        if any(name.endswith(_NAMED) and is_ids(value) for name, value in named.items()):
            return named
        values = (*args, *kwargs.values())
        return values[0] if len(values) == 1 and isinstance(values[0], Mapping) else values


class BatchLayout(NamedTuple):
    """How a model reads the rows and columns of its batches, judged by shapes inside it."""

    drops_last: bool = False  # rows of T + 1 tokens, of which it reads T
    is_sequence_first: bool = False  # (T, B)
    knows_axis: bool = True

    def applied(self, counts: Counts) -> Counts:
        """Correct counts that were taken for a (batch, sequence) layout."""
        samples, computed = counts.samples, counts.computed
        if not self.knows_axis:
            return replace(counts, samples=None)
        if computed is None or not isinstance(samples, int) or not samples:
            return replace(counts, samples=None) if self.is_sequence_first else counts
        if self.is_sequence_first:
            return replace(counts, samples=computed // samples, squares=computed * samples)
        if self.drops_last and counts.real is None:
            length = computed // samples - 1
            return replace(counts, computed=computed - samples, squares=samples * length * length)
        return counts


class InnerShapes:
    """Shapes that reach embeddings and sequence-first layers inside a model, in its first step.

    Compiled models, and models with compiled parts, are not inspected.
    """

    def __init__(self, module: nn.Module) -> None:
        self.inputs: set[tuple[int, ...]] = set()  # of the ids that the model is called with
        self._embedded: set[tuple[int, ...]] = set()
        self._layered: set[tuple[int, ...]] = set()
        self._places: list[tuple[ref[nn.Module], Any]] = []
        parts = list(module.modules())
        layers = [part for part in parts if getattr(part, "batch_first", None) is False]
        layers = [layer for layer in layers if isinstance(layer, _SEQUENCE_FIRST)]
        self._has_layers = bool(layers)
        if any(type(p).__name__ == "OptimizedModule" or p.__dict__.get(_CALL) for p in parts[1:]):
            return
        if type(module).__name__ == "OptimizedModule":
            return
        for part in parts:
            if isinstance(part, torch.nn.Embedding):
                self._look_at(part, self._embedded)
        for part in layers:
            self._look_at(part, self._layered)

    def called_with(self, shapes: set[tuple[int, ...]]) -> None:
        """Use the shapes of outermost calls if none were seen at an embedding."""
        if not self._embedded:
            self._embedded = shapes

    def layout(self) -> BatchLayout:
        """The layout that the shapes agree on."""
        pairs = [shape for shape in self.inputs if len(shape) == 2]
        tokens = {shape for shape in self._embedded if len(shape) == 2}
        shorter = {(rows, length - 1) for rows, length in pairs}
        drops = bool(pairs) and shorter <= tokens and not tokens & set(pairs)
        if not self._has_layers:
            return BatchLayout(drops_last=drops)
        layered = {shape[:2] for shape in self._layered}
        if pairs and set(pairs) <= layered:
            return BatchLayout(is_sequence_first=True)
        if pairs and {(b, a) for a, b in pairs} <= layered:
            return BatchLayout(drops_last=drops)
        return BatchLayout(knows_axis=False)

    def detach(self) -> None:
        """Remove the wrappers."""
        for reference, ours in self._places:
            _restore_call(reference(), ours)
        self._places = []

    def _look_at(self, module: nn.Module, shapes: set[tuple[int, ...]]) -> None:
        def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = (*args, *kwargs.values())
            first = next((value for value in values if hasattr(value, "shape")), None)
            if first is not None:
                shapes.add(tuple(first.shape))

        self._places.append((ref(module), _look_first(module, look, fail=lambda _error: None)))


def _look_first(
    module: nn.Module,
    look: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object],
    *,
    fail: Callable[[Exception], object],
    after: Callable[[], None] = lambda: None,
) -> Any:  # noqa: ANN401
    """Replace a module's call by one that passes the arguments to `look` first.

    If `look` returns True, `after` is called when the module has returned. `fail` gets an exception
    of `look`.
    """
    to = ref(module)  # weak: a cycle would keep the model's memory until garbage collection
    compiled = module.__dict__.get(_CALL)

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        called, is_aside = to(), None
        assert called is not None
        if not is_compiling():
            try:
                is_aside = look(called, args, kwargs)
            except Exception as error:  # noqa: BLE001  never break training
                fail(error)
        if is_aside:
            result = (compiled or called._call_impl)(*args, **kwargs)
            after()
            return result
        if compiled is not None:
            return compiled(*args, **kwargs)
        return called._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__dict__[_OURS] = compiled
    module.__dict__[_CALL] = call
    return call


def _restore_call(module: nn.Module | None, ours: Any) -> None:  # noqa: ANN401
    """Remove our replacement of a module's call, if it is still there."""
    if module is not None and ours is not None and module.__dict__.get(_CALL) is ours:
        without_wrapper(module)


def tokens_of_calls(model: nn.Module) -> Root:
    """Return a `Root` that counts tokens from a model's calls with gradients.

    For batches without token ids: in reinforcement learning a batch is prompts as text, and the
    model trains on what it generates.
    """
    # The framework reports the steps: there is no loop to be informed.
    events = ("trains", "evaluates", "evaluated", "evaluated_nothing", "fail")
    ignored = dict.fromkeys(events, lambda *_event: None)
    loop: Any = SimpleNamespace(eval_ns=None, optimizers_made=2, **ignored)
    root = Root(model, loop)
    root.attach()
    return root


def without_wrapper(module: nn.Module) -> nn.Module:
    """Remove our wrapper from a module, such as a DataParallel replica that copied it."""
    ours = getattr(module.__dict__.get(_CALL), "__dict__", {})
    if _OURS in ours:
        module.__dict__.pop(_CALL)
        if ours[_OURS] is not None:
            module.__dict__[_CALL] = ours[_OURS]
    return module


class Discovery:
    """Inspects every outermost call until the root of each new optimizer is known."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._roots: WeakKeyDictionary[nn.Module, Root | None] = WeakKeyDictionary()
        self._wrappers = 0  # that the present call is inside of
        self.armed = False  # calls are looked at

    def arm(self) -> None:
        """Start to inspect calls."""
        self.armed = True
        outermost.add(self)

    def disarm(self) -> None:
        """Stop inspecting calls, and drop the roots found."""
        self.armed = False
        outermost.remove(self)
        self._wrappers = 0
        self._roots = WeakKeyDictionary()

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_wrapper: bool
    ) -> Any:  # noqa: ANN401
        """Inspect an outermost call that begins; a wrapper and the module inside are one call."""
        self._wrappers += is_wrapper
        aside = self._aside(module, args, kwargs) if self._wrappers <= is_wrapper else None
        return (is_wrapper, aside) if is_wrapper or aside is not None else None

    def after(self, token: Any) -> None:  # noqa: ANN401
        """End the call of a wrapper, or a call outside training. `token` is from `before`."""
        is_wrapper, aside = token
        if aside is not None:
            self._loop.evaluated(aside)
        self._wrappers = max(0, self._wrappers - is_wrapper)

    def fail(self, error: Exception) -> None:
        """Pass an exception of this class to the loop."""
        self._loop.fail(error)

    def ignore(self, root: Root) -> None:
        """Stop inspecting this root's module: the root has a wrapper of its own."""
        module = root.module()
        if module is not None:
            self._roots[module] = None

    def _aside(self, module: nn.Module, args: Any, kwargs: Any) -> Root | None:  # noqa: ANN401
        """Count an outermost call; return its root if it is outside training, else None."""
        if module not in self._roots:
            has_parameters = next(module.parameters(), None) is not None
            self._roots[module] = Root(module, self._loop) if has_parameters else None
        root = self._roots[module]
        return root if root is not None and root.called(module, args, kwargs) else None

    def forget(self) -> None:
        """Drop the calls of the step that is over."""
        for root in self._roots.values():
            if root is not None:
                root.take_step()

    def root_of(self, optimizer: torch.optim.Optimizer) -> Root | None:
        """The called module that owns this optimizer's parameters.

        Optimizers with copies of the parameters (ZeRO, Megatron) match no module: then the called
        module with the most trainable parameters.
        """
        parameters = parameters_of(optimizer)
        called = [root for root in self._roots.values() if root is not None and root.was_called]
        if not called:
            return None
        best = max(called, key=lambda root: root.owned(parameters))
        if best.owned(parameters):
            return best
        return max(called, key=lambda root: root.trainable)


def parameters_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The sizes of the parameters that an optimizer trains, by id."""
    return {
        id(parameter): parameter.numel()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """A module and the modules that it wraps, outermost first."""
    modules = [module]
    while True:
        inner = (modules[-1]._modules.get(name) for name in _WRAPPED_IN)
        inside = next((part for part in inner if part is not None), None)
        if inside is None:
            return modules
        modules.append(inside)


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # a scripted module
        return ()


def _pair(args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Shapes and dtypes of ids and targets, as a key; None unless both are CPU tensors."""
    ids, targets = args
    if type(ids) is type(targets) is torch.Tensor and ids.is_cpu and targets.is_cpu:
        return ids.shape, ids.dtype, targets.shape, targets.dtype
    return None


def is_captured() -> bool:
    """True while a CUDA graph is captured, which must get no device work of ergmeter."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


# -- labels given to a loss module -----------------------------------------------------------------
# A loss that includes the output projection may apply it to labelled positions alone, as
# torchtune's LinearCrossEntropyLoss does. Then FLOPs vary between steps with their number. So the
# calls of such a loss are counted over the whole training, not only in the recorded steps. A loss
# without products (nn.CrossEntropyLoss) looks the same, and is released after the first backward
# pass, so that ordinary loops pay nothing.


class LossLabels:
    """Counts the labels given to one loss module, from its first call to `detach`."""

    def __init__(self) -> None:
        self.module: ref[nn.Module] | None = None
        self._amounts: list[Amount] = []  # of the step in progress, one for each call
        self._call: Any = None
        self._is_over = False

    @property
    def is_active(self) -> bool:
        """True while a loss is counted."""
        return self._call is not None

    def look_at(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """If this module is a loss with labels, count this call and the later ones."""
        if self._is_over or (self.module is not None and self.module() is module):
            return
        if _labels((*args, *kwargs.values())) is None:
            return
        if self.module is not None or module.__dict__.get(_CALL) is not None:
            self.detach()  # two losses, or a compiled one: labelled positions are unknown
            return
        self.module = ref(module)
        self._call = _look_first(module, self._count, fail=lambda _error: self.detach())

    def decide(self, *, has_products: bool) -> None:
        """After a backward pass: detach if no product can depend on the labels."""
        module = self.module() if self.module is not None else None
        if module is not None and not has_products and next(module.parameters(), None) is None:
            self.detach()

    def detach(self) -> None:
        """Stop counting, and remove the wrapper."""
        _restore_call(self.module() if self.module is not None else None, self._call)
        self._call, self._amounts, self._is_over = None, [], True

    def merged(self, counts: list[Counts], after: Any) -> tuple[list[Counts], Any]:  # noqa: ANN401
        """Add labelled positions to the counts of a step, if there is one loss call per batch.

        `after` is what `device_events` returned for these counts.
        """
        amounts, self._amounts = self._amounts, []
        if len(amounts) != len(counts) or any(count.loss is not None for count in counts):
            return counts, after
        merged = [
            replace(count, loss=amount) for count, amount in zip(counts, amounts, strict=True)
        ]
        later = device_events([amount for amount in amounts if is_later(amount)])
        return merged, {**(after or {}), **later} if later else after

    def _count(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is None or not is_grad_enabled() or backward_task() != -1:
            return  # detached; evaluation, or computed again for the backward pass
        if is_captured():
            self.detach()  # replays of a CUDA graph are not seen
            return
        labels = _labels((*args, *kwargs.values()))
        self._amounts.append(None if labels is None else count_labelled(labels))


def _labels(values: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """The labels among these values: one for each row of the tensors with gradients; or None."""
    rows = {
        value.numel() // value.shape[-1]
        for value in values
        if isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.dim() > 1
        and value.shape[-1]
    }
    candidates = [value for value in values if isinstance(value, torch.Tensor) and is_ids(value)]
    return candidates[0] if len(candidates) == 1 and rows == {candidates[0].numel()} else None
