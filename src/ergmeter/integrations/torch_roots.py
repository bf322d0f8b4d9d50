"""The model that an optimizer trains: which of the modules that a loop calls it is, and its calls.

Three traps shaped it. The first module called in training mode may be a frozen teacher: so the root
is the outermost called module that owns the optimizer's parameters. A global hook is seen by
torch.compile, which warns and compiles anew when it goes: so until the root is known the call of
Module itself is replaced, and put back for as long as an outermost call lasts; nothing inside ever
sees it. And a hook on a module is copied, pickled and scripted with the module: so it is looked at
where module.compile() puts what it made, which none of these takes along.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from ergmeter.integrations.batches import Counts, counted, is_ids
from ergmeter.integrations.fetching import now_on
from ergmeter.integrations.precision import of_call
from ergmeter.integrations.training import shifts_labels
from ergmeter.meter.clock import moment

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ergmeter.integrations.torch_steps import Loop

_CALL = "_compiled_call_impl"  # where torch looks first when a module is called, since 2.2
_OURS = "ergmeter_stands_before"  # of what we put there: what was there
_NAMED = "input_ids"
_WRAPPED_IN = ("module", "_orig_mod")
_KEPT_COUNTS = 4096  # of a module that nobody trains, as far as is known
_MOST_OF_IT = 0.95
_Module: Any = torch.nn.Module
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
        self.is_whole = True  # it owns all that its optimizer trains
        self.start_ns: int | None = None
        self.counts: list[Counts] = []
        self.on_device: list[Any] | None = None  # the last numbers that are not in host memory
        self.unknown = 0  # batches without tokens: their sum can't be told, then
        self.trains_in_eval = False  # fine-tuned in eval mode, as some do for frozen statistics
        self.aside: tuple[int, list[Counts]] | None = None  # of forwards that may be evaluation
        self._loop = loop
        self._thread = 0  # that calls it first; another one is ours, counting its FLOPs
        self._call: Any = None
        self.compiled: Any = None  # what module.compile() had made of it
        self._names = _argument_names(unwrapped(module)[-1])
        self._shifts = shifts_labels(module)
        self._alike: dict[Any, Counts] = {}

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to compute this. Few lines: they are paid for each time."""
        if self._thread != get_ident() and self._thread:
            return
        if not _is_grad_enabled() or not (module.training or self.trains_in_eval):
            self._called_aside(args, kwargs)
            return
        if _backward_task() != -1:
            return  # computed again for the backward pass
        if self.start_ns is None:
            self.start_ns = moment()
            if self._loop.eval_ns is not None:
                self._loop.trains(self, self.start_ns)
        found = None
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            found = self._alike.get((args[0].shape, args[0].dtype))
        if found is None:
            found = self._tokens(args, kwargs)
            self._thread = get_ident()
            self._is_called(module)
        if found is None:
            self.unknown += 1
        elif self._call is not None or len(self.counts) < _KEPT_COUNTS:
            self.counts.append(found)

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
        found = counted(self._batch(args, kwargs), shifts=self._shifts)
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


def _looked_into(root: Root, module: nn.Module) -> Callable[..., Any]:
    """What a module calls itself by, with a look at what it is given."""
    to = ref(module)  # or a model would hold itself, and its memory, until it is collected
    compiled = root.compiled = module.__dict__.get(_CALL)

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        called = to()
        assert called is not None
        if root.active and not _is_compiling():
            try:
                root.called(called, args, kwargs)
            except Exception as error:  # noqa: BLE001  never break training
                root._loop.fail(error)
        if compiled is not None:
            return compiled(*args, **kwargs)
        return called._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__dict__[_OURS] = compiled
    return call


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
        self._original: Any = None
        self._ours: Any = None
        self.inside = False  # an outermost call is under way
        self.thread = 0

    def arm(self) -> None:
        """Look at the calls from now on."""
        self.thread = get_ident()  # in another one we may count FLOPs
        if self._original is None:
            self._original = _Module.__call__
            _Module.__call__ = self._ours = _looked_at(self, self._original)

    def disarm(self) -> None:
        """Leave no trace."""
        if self._original is not None:
            if _Module.__call__ is self._ours:  # else somebody stands before us: we only pass on
                _Module.__call__ = self._original
            self._original = self._ours = None
            self.thread = 0
        self._seen = WeakKeyDictionary()

    @property
    def armed(self) -> bool:
        """Whether calls are looked at."""
        return self._original is not None

    def know(self, root: Root) -> None:
        """This module's calls are seen by a hook of its own."""
        module = root.module()
        if module is not None:
            self._seen[module] = None

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost call is about to be made."""
        if module not in self._seen:
            has_parameters = next(module.parameters(), None) is not None
            self._seen[module] = Root(module, self._loop) if has_parameters else None
        root = self._seen[module]
        if root is not None and _is_grad_enabled():
            root.called(module, args, kwargs)

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
        owned = best.owned(parameters)
        if not owned:
            return max(called, key=lambda one: one.trainable)
        best.is_whole = owned >= _MOST_OF_IT * sum(parameters.values())
        return best


def parameters_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """What an optimizer trains: how many numbers each has, by their ids."""
    return {id(one): one.numel() for group in optimizer.param_groups for one in group["params"]}


def _looked_at(discovery: Discovery, original: Any) -> Any:  # noqa: ANN401
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N807
        if _is_compiling() or discovery.thread != get_ident() or discovery.inside:
            return original(self, *args, **kwargs)
        discovery.inside = True
        is_first = _Module.__call__ is looked_at  # else somebody stands before us, and stays there
        if is_first:
            _Module.__call__ = original
            _keep_from_dynamo(original)
        try:
            discovery.see(self, args, kwargs)
        except Exception as error:  # noqa: BLE001  never break training
            discovery._loop.fail(error)
        try:
            return original(self, *args, **kwargs)
        finally:
            discovery.inside = False
            if is_first and discovery.armed and _Module.__call__ is original:
                _Module.__call__ = looked_at

    looked_at = __call__
    return looked_at


def _keep_from_dynamo(original: Any) -> None:  # noqa: ANN401
    """It remembers the call that it found when it was imported, to know one that was changed."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and hasattr(dynamo, "unpatched_nn_module_call"):
        dynamo.unpatched_nn_module_call = original


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
