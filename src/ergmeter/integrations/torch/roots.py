"""The model that an optimizer trains: which of the modules that a loop calls it is, and its calls.

Two pitfalls shaped it. The first module called in training mode may be a frozen teacher: so the
root is the outermost called module that owns the optimizer's parameters, as `torch_calls` shows
calls until it is known. And a hook on a module is copied, pickled and scripted with the module: so
a root is looked at where module.compile() puts what it made, which none of these takes along.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from ergmeter.integrations.batches import Counts, counted, is_ids, rows_only
from ergmeter.integrations.device_fetch import now_on
from ergmeter.integrations.torch.calls import outermost
from ergmeter.integrations.torch.precision import of_call
from ergmeter.integrations.training import shifts_labels
from ergmeter.meter.clock import moment

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ergmeter.integrations.torch.steps import Loop

_CALL = "_compiled_call_impl"  # where torch looks first when a module is called, since 2.2
_OURS = "ergmeter_stands_before"  # of what we put there: what was there
_NAMED = "input_ids"
_WRAPPED_IN = ("module", "_orig_mod")
_KEPT_COUNTS = 4096  # of a module that nobody trains, as far as is known
_SEQUENCE_FIRST = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
_KEPT_EVALS = 64
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_backward_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Root:
    """One module that a loop calls: when it began to compute for a step, and with what tokens."""

    def __init__(self, module: nn.Module, loop: Loop) -> None:
        self.module = ref(module)
        self.parts = frozenset(id(part) for part in unwrapped(module))
        self.active = True
        self.was_called = False
        self.dtype: str | None = None  # of its products, where that is known
        self.start_ns: int | None = None
        self.counts: list[Counts] = []
        self.on_device: list[Any] | None = None  # the last numbers that are not in host memory
        self.unknown = 0  # batches without tokens: their sum can't be told, then
        self.trains_in_eval = False  # fine-tuned in eval mode, as some do for frozen statistics
        self.aside: tuple[int, list[Counts]] | None = None  # of forwards that may be evaluation
        self.early_evals: list[list[int]] = []  # before the first step: start and end
        self._in_early_eval = False
        self._loop = loop
        self._thread = 0  # that calls it first; another one is ours, counting its FLOPs
        self._call: Any = None
        self.compiled: Any = None  # what module.compile() had made of it
        self._names = _argument_names(unwrapped(module)[-1])
        self._shifts = shifts_labels(module)
        self._alike: dict[Any, Counts] = {}
        self._inside: InnerShapes | None = None  # looked at in the first step
        self._layout = BatchLayout()

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The module is about to compute this. Few lines: they are paid for each time.

        True if it is no training forward: then `Loop.evaluated` waits for its return.
        """
        if self._thread != get_ident() and self._thread:
            return False
        if not _is_grad_enabled() or not (module.training or self.trains_in_eval):
            self._called_aside(args, kwargs)
            return True
        if _backward_task() != -1:
            return False  # computed again for the backward pass
        if self.start_ns is None:
            self.start_ns = moment()
            self._in_early_eval = False
            if self._loop.eval_ns is not None:
                self._loop.trains(self, self.start_ns)
        found = None
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            found = self._alike.get((args[0].shape, args[0].dtype))
        if found is None:
            self._thread = get_ident()
            self._is_called(module)
            found = self._tokens(args, kwargs)
        if found is None:
            self.unknown += 1
        elif self._call is not None or len(self.counts) < _KEPT_COUNTS:
            self.counts.append(found)
        return False

    def evaluates_early(self, now_ns: int) -> None:
        """It is called without gradients before the first step."""
        if not self._in_early_eval and len(self.early_evals) < _KEPT_EVALS:
            self._in_early_eval = True
            self.early_evals.append([now_ns, now_ns])

    def evaluated_early(self, now_ns: int) -> None:
        """That call has returned."""
        if self._in_early_eval:
            self.early_evals[-1][1] = now_ns

    def _called_aside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For an evaluation; or, in eval mode but with gradients, perhaps for a training step."""
        now_ns = time.monotonic_ns()
        self._loop.evaluates(self, now_ns)
        if not _is_grad_enabled() or _backward_task() != -1:
            return
        self._is_called(self.module())
        if self.aside is None:
            self.aside = (now_ns, [])
        found = self._tokens(args, kwargs)
        if found is not None and len(self.aside[1]) < _KEPT_COUNTS:
            self.aside[1].append(found)

    def _is_called(self, module: nn.Module | None) -> None:
        if not self.was_called and module is not None:
            self.was_called = True
            self.dtype = of_call(module, unwrapped(module)[-1])
            self._inside = InnerShapes(module)

    def taken(self) -> tuple[int | None, list[Counts], int, Any]:
        """When the step that is over now began, and what it was given; the next begins anew."""
        if self.start_ns is None and self.aside is not None:
            self.start_ns, self.counts = self.aside
            self.trains_in_eval = True
            self._loop.evaluated_nothing()
        start_ns, self.start_ns = self.start_ns, None
        counts, self.counts = self.counts, []
        unknown, self.unknown = self.unknown, 0
        on_device, self.on_device = self.on_device, None
        self.aside = None
        if self._inside is not None:
            self._layout = self._inside.layout()
            self._inside.detach()
            self._inside = None
            counts = [self._layout.applied(one) for one in counts]
            self._alike = {key: self._layout.applied(one) for key, one in self._alike.items()}
        after = now_on(on_device) if on_device is not None else None
        return start_ns, [] if unknown else counts, len(counts) + unknown or 1, after

    def drop(self) -> None:
        """Forget what was seen since the last step, and ask the device nothing."""
        self.start_ns = self.on_device = self.aside = None
        self.counts, self.unknown = [], 0

    def attach(self) -> None:
        """See every call of it from now on."""
        module = self.module()
        if self._call is None and module is not None:
            self._call = _looked_into(self, module)
            module.__dict__[_CALL] = self._call

    def detach(self) -> None:
        """See none any more."""
        self.active = False
        if self._inside is not None:
            self._inside.detach()
        module = self.module()
        if module is not None and module.__dict__.get(_CALL) is self._call is not None:
            module.__dict__.pop(_CALL)
            if self.compiled is not None:
                module.__dict__[_CALL] = self.compiled
        self._call = None

    def owned(self, parameters: Mapping[int, int]) -> int:
        """How many numbers of these parameters are this module's."""
        module = self.module()
        if module is None:
            return 0
        return sum(parameters.get(id(one), 0) for one in module.parameters())

    @property
    def trainable(self) -> int:
        """How many numbers of it could be trained."""
        module = self.module()
        return sum(p.numel() for p in module.parameters() if p.requires_grad) if module else 0

    def _tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counts | None:
        if is_captured():
            return None
        values = (*args, *kwargs.values())
        if self._inside is not None:
            ids = next((one for one in values if is_ids(one)), None)
            if ids is not None:
                self._inside.given(tuple(ids.shape))
        found = counted(self._batch(args, kwargs), shifts=self._shifts)
        if found is None and self._loop.optimizers_made < 2:  # a GAN's batches are of two kinds
            found = rows_only(values)
        if found is not None:
            found = self._layout.applied(found)
        if found is not None and found.laters:
            self.on_device = found.laters
        elif found is not None and _is_one_tensor(args, kwargs) and len(self._alike) < _KEPT_COUNTS:
            # Nothing but its shape was asked, and the next is often the same.
            self._alike[args[0].shape, args[0].dtype] = found
        return found

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """What was passed, by names where there are some: as a dict or a tuple, as loops do."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            return args[0]
        named = dict(zip(self._names, args, strict=False)) | kwargs
        if any(name.endswith(_NAMED) and is_ids(value) for name, value in named.items()):
            return named
        values = (*args, *kwargs.values())
        return values[0] if len(values) == 1 and isinstance(values[0], Mapping) else values


class BatchLayout(NamedTuple):
    """How a model takes its batches, as was seen inside it."""

    drops_last: bool = False  # rows of T + 1 tokens, of which it reads T
    is_sequence_first: bool = False  # (T, B)
    knows_axis: bool = True

    def applied(self, counts: Counts) -> Counts:
        """Counts of a batch as of (B, T), by this layout."""
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

    Nothing is looked at in a model that is compiled, or that will be.
    """

    def __init__(self, module: nn.Module) -> None:
        self._given: set[tuple[int, ...]] = set()
        self._embedded: set[tuple[int, ...]] = set()
        self._layered: set[tuple[int, ...]] = set()
        self._places: list[tuple[ref[nn.Module], Any]] = []
        parts = list(module.modules())
        layers = [one for one in parts if getattr(one, "batch_first", None) is False]
        layers = [one for one in layers if isinstance(one, _SEQUENCE_FIRST)]
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

    def given(self, shape: tuple[int, ...]) -> None:
        """The model is given ids of this shape."""
        self._given.add(shape)

    def called_with(self, shapes: set[tuple[int, ...]]) -> None:
        """What outermost calls were given, where no embedding could be looked at."""
        if not self._embedded:
            self._embedded = shapes

    def layout(self) -> BatchLayout:
        """What the shapes say, as far as they agree."""
        pairs = [shape for shape in self._given if len(shape) == 2]
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
        """Look no longer."""
        for place, ours in self._places:
            module = place()
            if module is not None and module.__dict__.get(_CALL) is ours:
                module.__dict__.pop(_CALL)
        self._places = []

    def _look_at(self, module: nn.Module, shapes: set[tuple[int, ...]]) -> None:
        to = ref(module)

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            called = to()
            assert called is not None
            first = next((one for one in (*args, *kwargs.values()) if hasattr(one, "shape")), None)
            if first is not None and not _is_compiling():
                shapes.add(tuple(first.shape))
            return called._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        call.__dict__[_OURS] = None
        module.__dict__[_CALL] = call
        self._places.append((to, call))


def _looked_into(root: Root, module: nn.Module) -> Callable[..., Any]:
    """What a module calls itself by, with a look at what it is given."""
    to = ref(module)  # or a model would hold itself, and its memory, until it is collected
    compiled = root.compiled = module.__dict__.get(_CALL)

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        called, is_aside = to(), False
        assert called is not None
        if root.active and not _is_compiling():
            try:
                is_aside = root.called(called, args, kwargs)
            except Exception as error:  # noqa: BLE001  never break training
                root._loop.fail(error)
        if is_aside:
            found = (compiled or called._call_impl)(*args, **kwargs)
            root._loop.evaluated(root)
            return found
        if compiled is not None:
            return compiled(*args, **kwargs)
        return called._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__dict__[_OURS] = compiled
    return call


class _NoLoop:
    """For a root whose steps a framework tells."""

    eval_ns: int | None = None
    optimizers_made = 2

    def trains(self, root: Root, now_ns: int) -> None: ...

    def evaluates(self, root: Root, now_ns: int) -> None: ...

    def evaluated(self, root: Root) -> None: ...

    def evaluated_nothing(self) -> None: ...

    def fail(self, error: Exception) -> None: ...


def tokens_of_calls(model: nn.Module) -> Root:
    """Counts the tokens of a model's calls with gradients, where batches do not show them.

    As in reinforcement learning, where a batch is prompts, and what is trained on is generated.
    """
    root = Root(model, _NoLoop())  # type: ignore[arg-type]
    root.attach()
    return root


def alone(replica: nn.Module) -> nn.Module:
    """A copy that DataParallel made, attributes and all: without our look at the original."""
    ours = getattr(replica.__dict__.get(_CALL), "__dict__", {})
    if _OURS in ours:
        replica.__dict__.pop(_CALL)
        if ours[_OURS] is not None:
            replica.__dict__[_CALL] = ours[_OURS]
    return replica


class Discovery:
    """Looks at every outermost call, until the optimizers that were made have found their roots."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._seen: WeakKeyDictionary[nn.Module, Root | None] = WeakKeyDictionary()
        self._wrappers = 0  # that the present call is inside of
        self.armed = False  # calls are looked at

    def arm(self) -> None:
        """Look at the calls from now on."""
        self.armed = True
        outermost.add(self)

    def disarm(self) -> None:
        """Leave no trace."""
        self.armed = False
        outermost.remove(self)
        self._wrappers = 0
        self._seen = WeakKeyDictionary()

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_wrapper: bool
    ) -> Any:  # noqa: ANN401
        """An outermost call is about to be made; what a wrapper calls is the same call."""
        self._wrappers += is_wrapper
        aside = self.see(module, args, kwargs) if self._wrappers <= is_wrapper else None
        return (is_wrapper, aside) if is_wrapper or aside is not None else None

    def after(self, token: Any, result: Any) -> None:  # noqa: ANN401, ARG002
        """A call of a wrapper, or one that is no training, is over."""
        is_wrapper, aside = token
        if aside is not None:
            self._loop.evaluated(aside)
        self._wrappers = max(0, self._wrappers - is_wrapper)

    def fail(self, error: Exception) -> None:
        """Our own fault."""
        self._loop.fail(error)

    def know(self, root: Root) -> None:
        """This module's calls are seen by a hook of its own."""
        module = root.module()
        if module is not None:
            self._seen[module] = None

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Root | None:
        """An outermost call is about to be made. Returns the root of one that is no training."""
        if module not in self._seen:
            has_parameters = next(module.parameters(), None) is not None
            self._seen[module] = Root(module, self._loop) if has_parameters else None
        root = self._seen[module]
        return root if root is not None and root.called(module, args, kwargs) else None

    def forget(self) -> None:
        """A step is over: what was called in it is not called for the next."""
        for root in self._seen.values():
            if root is not None:
                root.taken()

    def root_of(self, optimizer: torch.optim.Optimizer) -> Root | None:
        """The module that owns what this optimizer trains, of those that were called.

        Optimizers with copies of their own (ZeRO, Megatron) own nothing of any module: then it is
        the largest that was called in training mode.
        """
        parameters = parameters_of(optimizer)
        called = [one for one in self._seen.values() if one is not None and one.was_called]
        if not called:
            return None
        best = max(called, key=lambda one: one.owned(parameters))
        if best.owned(parameters):
            return best
        return max(called, key=lambda one: one.trainable)


def parameters_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """What an optimizer trains: how many numbers each has, by their ids."""
    return {id(one): one.numel() for group in optimizer.param_groups for one in group["params"]}


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """A module, and what it was wrapped around."""
    found = [module]
    while True:
        inner = (found[-1]._modules.get(name) for name in _WRAPPED_IN)
        inside = next((one for one in inner if one is not None), None)
        if inside is None:
            return found
        found.append(inside)


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # a scripted module
        return ()


def _is_one_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor)


def is_captured() -> bool:
    """Whether a CUDA graph is being recorded: nothing of ours may get into it."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
