"""Records a loop's outermost module calls by shape, step by step.

A global module hook makes torch.compile warn and recompile. So `Module.__call__` itself is
replaced. The original is restored while an outermost call runs, so no code inside sees the
replacement. A record must not keep data alive: arguments become shapes at once, and calls are found
again in the autograd graph by sequence numbers, never by outputs. An output head may be multiplied
outside of any module: matrix products between the recorded calls and the loss are read from the
sizes in the graph when backward is called.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from enum import Enum
from math import prod
from threading import get_ident
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from ergmeter.flops.counted.meta_model import ModuleCall, TensorSpec, ids_shape
from ergmeter.flops.counted.op_costs import PRODUCT_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ergmeter.integrations.torch.roots import Discovery, LossLabels

    CallListener: TypeAlias = "StepRecorder | Discovery"

_Module: Any = nn.Module
is_grad_enabled = torch.is_grad_enabled
is_compiling = torch.compiler.is_compiling
backward_task = torch._C._current_graph_task_id  # -1 outside of a backward pass
_sequence_nr = torch._C._autograd._get_sequence_nr
_saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
# Wrappers: they call the module inside with the same arguments.
_TRANSPARENT = frozenset(
    {"DistributedDataParallel", "DeepSpeedEngine", "FullyShardedDataParallel", "_FabricModule"}
)
_REDIRECTED = ("_ForwardRedirection", "_redirection_through_forward")  # Lightning's and Fabric's


# -- outermost calls -------------------------------------------------------------------------------


class OutermostCalls:
    """Informs listeners of outermost module calls, and of the calls inside wrappers.

    Only calls on the thread that last called `add` count. A listener's `before` gets a call that is
    about to be made. Its result, unless None, is passed to `after` once the call has returned.
    `fail` gets an exception of either.
    """

    def __init__(self) -> None:
        self._listeners: tuple[CallListener, ...] = ()
        self._original: Any = None
        self._ours: Any = None
        self._inside = False  # an outermost call is under way
        self._thread = 0

    def add(self, listener: CallListener) -> None:
        """Report calls on the present thread to this listener."""
        self._thread = get_ident()
        if listener not in self._listeners:
            self._listeners = (*self._listeners, listener)
        if self._original is None:
            self._original = _Module.__call__
            _Module.__call__ = self._ours = self._replacement(self._original)

    def remove(self, listener: CallListener) -> None:
        """Stop reporting to this listener; removing the last one restores `Module.__call__`."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        if not self._listeners and self._original is not None:
            # If other code wrapped our replacement, it stays and only passes calls on.
            if _Module.__call__ is self._ours:
                _Module.__call__ = self._original
            self._original = self._ours = None
            self._thread = 0
            self._inside = False

    def _replacement(self, original: Any) -> Any:  # noqa: ANN401
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N807
            if is_compiling() or self._thread != get_ident() or self._inside:
                return original(module, *args, **kwargs)
            is_wrapper = _is_transparent(module)
            self._inside = not is_wrapper
            # False if other code wrapped our replacement, which then stays.
            is_first = _Module.__call__ is ours and not is_wrapper
            if is_first:
                _Module.__call__ = original
                _keep_from_dynamo(original)
            tokens = list(self._before(module, args, kwargs, is_wrapper=is_wrapper))
            try:
                return original(module, *args, **kwargs)
            finally:
                self._inside = False
                self._after(tokens)
                if is_first and self._ours is ours and _Module.__call__ is original:
                    _Module.__call__ = ours

        ours = __call__
        return ours

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_wrapper: bool
    ) -> Iterator[tuple[CallListener, Any]]:
        for listener in self._listeners:
            try:
                yield listener, listener.before(module, args, kwargs, is_wrapper=is_wrapper)
            except Exception as error:  # noqa: BLE001  never break training
                listener.fail(error)

    def _after(self, tokens: list[tuple[CallListener, Any]]) -> None:
        for listener, token in tokens:
            if token is not None:
                try:
                    listener.after(token)
                except Exception as error:  # noqa: BLE001  never break training
                    listener.fail(error)


outermost = OutermostCalls()


def _is_transparent(module: nn.Module) -> bool:
    if type(module).__name__ in _TRANSPARENT:
        return True
    forward = module.__dict__.get("forward")
    return forward is not None and any(
        name in getattr(forward, "__qualname__", "") for name in _REDIRECTED
    )


def _keep_from_dynamo(original: Any) -> None:  # noqa: ANN401
    """Give dynamo the original `Module.__call__`: it may have stored ours when it was imported."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and hasattr(dynamo, "unpatched_nn_module_call"):
        dynamo.unpatched_nn_module_call = original


# -- the calls of a step ---------------------------------------------------------------------------

_FSDP = "FullyShardedDataParallel"
_WRAPPER = object()  # what `before` returns for a wrapper's call
_NO_BACKWARD = "no call of backward was seen: it is assumed to reach every call of a trained module"
_MOST_CALLS = 4096  # different ones in a step
_MOST_NOTED = 50_000  # calls without a step; more are inference, say, and dropped
_CACHES = ("past_key_values", "past_key_value", "cache_params")


class StepCalls:
    """One step's module calls by shape, and its matrix products outside of modules."""

    def __init__(self, nodes: CallNodes) -> None:
        self.calls: dict[Any, ModuleCall] = {}
        self.outside = OutsideProducts(nodes)
        self.generated: dict[int, tuple[nn.Module, int]] = {}  # generated positions, by module id
        self.outer: dict[int, nn.Module] = {}  # by module id: the FSDP wrapper, with the parameters
        self.backwards = 0  # calls of backward that were seen
        self.not_recorded: Counter[str] = Counter()  # calls beyond _MOST_CALLS, by class

    def labelled_flops(self, loss: nn.Module | None) -> float:
        """Forward FLOPs that may depend on labels: those of `loss`, and those outside modules.

        They are read from the autograd graph; 0 if it lacks those of a call of `loss`.
        """
        own = [call for call in self.calls.values() if loss is not None and call.module is loss]
        if any(call.graph_flops is None for call in own):
            return 0.0
        flops = sum(call.times * call.graph_flops[0] for call in own if call.graph_flops)
        return self.outside.forward + flops

    @property
    def trained(self) -> list[ModuleCall]:
        """Calls that a backward pass went through."""
        is_walked = self.backwards and self.outside.is_complete
        return [
            call
            for call in self.calls.values()
            if call.has_grad and (call.is_walked_back or (not is_walked and any(call.trained)))
        ]

    @property
    def others(self) -> list[ModuleCall]:
        """Calls without a backward pass: of frozen models, or without gradients."""
        trained = {id(call) for call in self.trained}
        return [call for call in self.calls.values() if id(call) not in trained]


class StepRecorder:
    """Records the module calls of a training's first steps, until `stop`."""

    def __init__(self, labels: LossLabels | None = None) -> None:
        """`labels`, if given, counts the labels of the loss module, to be added to the steps."""
        self.labels = labels
        self.failure = ""  # why nothing is recorded any more
        self.is_evaluating: Callable[[], bool] = lambda: False
        self.is_paused = False  # between the steps of a framework that reports their beginning
        self.steps: list[StepCalls] = []
        self._nodes = CallNodes()
        self._now = StepCalls(self._nodes)
        self._parameters: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        self._wrappers: list[nn.Module] = []  # that the present call is inside of
        self._backward: Any = None
        self._ours: Any = None

    @property
    def ids_shapes(self) -> set[tuple[int, ...]]:
        """Shapes of the token ids that modules were called with in this step."""
        shapes = (ids_shape(call) for call in self._now.calls.values())
        return {shape for shape in shapes if shape is not None}

    def arm(self) -> None:
        """Start recording."""
        if self._backward is None:
            _armed.add(self)
            outermost.add(self)
            self._backward = torch.autograd.backward
            self._ours = torch.autograd.backward = self._walking_backward(self._backward)

    def stop(self) -> None:
        """Stop recording, and remove all patches."""
        _armed.discard(self)
        outermost.remove(self)
        if self._backward is not None and torch.autograd.backward is self._ours:
            torch.autograd.backward = self._backward
        self._backward = self._ours = None
        self._parameters = WeakKeyDictionary()
        self._nodes = CallNodes()  # which hold the program's modules
        self._now = StepCalls(self._nodes)

    def step_over(self) -> int:
        """End the step in progress; return how many steps are recorded."""
        is_unseen = not self._now.backwards and any(
            call.has_grad for call in self._now.calls.values()
        )
        if is_unseen:  # torch.autograd.grad, or an engine of the program's own
            self._now.outside.assumptions.append(_NO_BACKWARD)
        for key, call in tuple(self._now.calls.items()):
            walked = min(call.times, len(self._now.outside.reached.get(key, ())))
            if is_unseen and call.has_grad and any(call.trained):
                walked = call.times
            call.is_walked_back = walked > 0
            if 0 < walked < call.times:  # as a GAN's generator, called for the critic alone too
                rest = replace(call, times=call.times - walked, is_walked_back=False)
                self._now.calls[key, "forward alone"] = rest
                call.times = walked
            if _is_whole_in_graph(call):
                call.graph_flops = self._now.outside.inside_flops(key)
        self.steps.append(self._now)
        self._now = StepCalls(self._nodes)
        return len(self.steps)

    def fail(self, error: Exception) -> None:
        """Store an exception of the recorder itself, and stop recording."""
        self.stop()
        self.failure = f"{type(error).__name__}: {error}"[:300]

    # -- as a listener ----------------------------------------------------------------------------

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_wrapper: bool
    ) -> Any:  # noqa: ANN401
        """Return a call's key and shapes, for `after`; None if the call is not to be recorded."""
        if is_wrapper:
            self._wrappers.append(module)
            return _WRAPPER
        if self.is_paused or backward_task() != -1:
            return None
        has_grad = is_grad_enabled()
        if not has_grad and not self.steps and not _is_in_reentrant_checkpoint():
            return None  # before the first step: it may be evaluation, and gone by then
        if has_grad and self.labels is not None and not self.is_evaluating():
            self.labels.look_at(module, args, kwargs)
        parameters = self._parameters_of(module)
        if not parameters and not _gives_parameters(args, kwargs):
            return None  # what it multiplies is found in the graph, as if it were no module
        if not has_grad and any(kwargs.get(name) is not None for name in _CACHES):
            self._generates(module, args, kwargs)
            return None
        for tensor in _tensors((args, kwargs)):
            if tensor.grad_fn is not None:
                self._now.outside.walk(tensor.grad_fn)
        key: list[Any] = []
        specs = _spec(args, key), _spec(kwargs, key)
        trained = tuple([parameter.requires_grad for parameter in parameters])
        is_recomputed = _is_checkpointed()
        whole_key = (id(module), has_grad, module.training, trained, is_recomputed, tuple(key))
        call = self._now.calls.get(whole_key)
        if call is None:
            call = ModuleCall(
                module, *specs, has_grad, module.training, trained, 0, is_walked_back=False
            )
            call.is_recomputed = is_recomputed
        return whole_key, call, _sequence_nr()

    def after(self, token: Any) -> None:  # noqa: ANN401
        """Record a call that has returned, and which autograd nodes it made."""
        if token is _WRAPPER:
            self._wrappers.pop()
            return
        key, call, start_nr = token
        if self.is_evaluating():
            return
        now = self._now
        if key not in now.calls:
            if len(now.calls) >= _MOST_CALLS:
                now.not_recorded[type(call.module).__name__] += 1
                return
            now.calls[key] = call
        call.times += 1
        if len(self._nodes) > _MOST_NOTED:  # an hour of inference, say, before the first step
            self._nodes = CallNodes()
            self._now = StepCalls(self._nodes)
            return
        sharded = (wrapper for wrapper in self._wrappers if type(wrapper).__name__ == _FSDP)
        now.outer.update({id(call.module): wrapper for wrapper in sharded})
        self._nodes.add(start_nr, _sequence_nr(), key, call)

    def _parameters_of(self, module: nn.Module) -> list[nn.Parameter]:
        if module not in self._parameters:
            self._parameters[module] = list(module.parameters())
        return self._parameters[module]

    def _generates(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = next((t for t in _tensors((args, kwargs)) if t.dim() >= 2), None)
        if tensor is not None:
            _, before = self._now.generated.get(id(module), (module, 0))
            positions = tensor.shape[0] * tensor.shape[1]
            self._now.generated[id(module)] = (module, before + positions)

    def _walking_backward(self, backward: Any) -> Any:  # noqa: ANN401
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                is_inner = backward_task() != -1  # of a re-entrant checkpoint
                if not (self.is_paused or is_inner or self.is_evaluating()):
                    self._now.backwards += 1
                    nodes = [
                        tensor.grad_fn for tensor in _tensors(tensors) if tensor.grad_fn is not None
                    ]
                    self._now.outside.walk_back(nodes)
                    if self.labels is not None:
                        self.labels.decide(has_products=self._now.outside.forward > 0)
            except Exception as error:  # noqa: BLE001  never break training
                self.fail(error)
            return backward(tensors, *args, **kwargs)

        return call


_armed: WeakSet[StepRecorder] = WeakSet()


def stop_recording() -> None:
    """Stop all recorders in a forked child: their records belong to the parent."""
    for recorder in tuple(_armed):
        recorder.stop()


def _is_whole_in_graph(call: ModuleCall) -> bool:
    """True if all products of a call are in the autograd graph; a frozen first layer's are not."""
    values = (*call.args, *call.kwargs.values())
    return all(call.trained) or any(
        isinstance(value, TensorSpec) and value.requires_grad for value in values
    )


def _is_in_reentrant_checkpoint() -> bool:
    """True inside the forward of a re-entrant checkpoint, which runs without gradients."""
    forward: Any = torch.utils.checkpoint.CheckpointFunction.forward  # a library may replace it
    return any(frame.f_code is forward.__code__ for frame, _ in walk_stack(sys._getframe(1)))


def _is_checkpointed() -> bool:
    """True inside a torch.utils.checkpoint that is not re-entrant."""
    hooks: Any = _saved_hooks(True)
    return bool(hooks) and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", "")


def _gives_parameters(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    return any(
        isinstance(value, nn.Parameter)
        or (isinstance(value, nn.Module) and next(value.parameters(), None) is not None)
        for value in values
    )


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and depth < 4:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth + 1)


# -- arguments as shapes ---------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, slice)
_DEEPEST = 6


class _ObjectSpec:
    """An object with shapes in place of tensors; unpickling makes an object of its class."""

    def __init__(self, kind: type, state: Any, items: Any) -> None:  # noqa: ANN401
        self.kind, self.state, self.items = kind, state, items

    def __reduce__(self) -> tuple[Any, ...]:
        items = None if self.items is None else iter(self.items.items())
        return _new, (self.kind,), self.state, None, items, _set_state


def _new(kind: Any) -> Any:  # noqa: ANN401  a class, made without its constructor
    return kind.__new__(kind)


def _set_state(made: Any, state: dict[str, Any]) -> None:  # noqa: ANN401
    for name, value in state.items():
        object.__setattr__(made, name, value)


def _state_of(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """The attributes of an object, from its dictionary and slots."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [n for own in slots for n in ((own,) if isinstance(own, str) else own)]
    attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {
        name: attribute for name, attribute in attributes.items() if not name.startswith("__")
    } | getattr(value, "__dict__", {})


def _spec(value: Any, key: list[Any], depth: int = 0) -> Any:  # noqa: ANN401, C901  one case a line
    """Return the value with shapes in place of tensors; append what identifies it to `key`."""
    if isinstance(value, nn.Parameter | nn.Module):
        key.append(id(value))
        return value
    if isinstance(value, torch.Tensor):
        key.append((value.shape, value.dtype, value.requires_grad))
        return TensorSpec.of(value)
    if isinstance(value, (*_PLAIN, Enum)):
        key.append(value if not isinstance(value, slice) else repr(value))
        return value
    if isinstance(value, np.ndarray):
        key.append((value.shape, value.dtype.str))
        return np.zeros(value.shape, value.dtype)
    if depth > _DEEPEST:
        key.append(type(value))
        return None
    key.append(type(value))
    if isinstance(value, dict):
        items = {name: _spec(item, key, depth + 1) for name, item in value.items()}
        key.extend(map(str, items))
        if type(value) is dict:
            return items
        own = {name: _spec(item, key, depth + 1) for name, item in _state_of(value).items()}
        return _ObjectSpec(type(value), own, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # Not by its own constructor, which may want tensors.
        return tuple.__new__(type(value), [_spec(item, key, depth + 1) for item in value])
    if isinstance(value, list | tuple | set | frozenset):
        kind = torch.Size if isinstance(value, torch.Size) else type(value)
        return kind(_spec(item, key, depth + 1) for item in value)
    if callable(value):
        return value
    state = _state_of(value)
    if not state:
        key.append(id(value))  # no state to identify it by
        return value
    specs = {name: _spec(item, key, depth + 1) for name, item in state.items()}
    return _ObjectSpec(type(value), specs, None)


# -- matrix products outside of modules ------------------------------------------------------------

_MOST_NODES = 20_000
_MOST_INSIDE = 5_000  # of all calls of a step together
_LEAF_NR = 2**64 - 1
_VIEWS = ("View", "UnsafeView", "T", "Transpose", "Permute", "ToCopy", "Alias", "Expand", "Clone")
_FUSED_HEAD = ("crossentropy", "linear_cross", "lmhead")


class CallNodes:
    """Maps autograd nodes to the calls that made them, by sequence numbers, over all steps.

    A call and its backward pass may lie in different steps: in a GAN both optimizers use the
    generator's batch.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._calls: list[tuple[int, Any, ModuleCall]] = []  # the number after its last, its key
        self.visited: set[int] = set()

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start_nr: int, end_nr: int, key: Any, call: ModuleCall) -> None:  # noqa: ANN401
        """Assign the nodes from `start_nr` to `end_nr` (exclusive) to this call."""
        self._starts.append(start_nr)
        self._calls.append((end_nr, key, call))

    def call_of(self, number: int) -> tuple[Any, int, int] | None:
        """The call that made node `number`: its key, first number and the one after its last."""
        index = bisect_right(self._starts, number) - 1
        if index < 0:
            return None
        end_nr, key, _ = self._calls[index]
        return (key, self._starts[index], end_nr) if number < end_nr else None

    def without_nodes_at(self, number: int) -> list[tuple[Any, ModuleCall]]:
        """Calls that made no nodes, and began when `number` was the next sequence number."""
        calls = zip(self._starts, self._calls, strict=True)
        return [(key, call) for start, (end, key, call) in calls if start == end == number]


class Products:
    """FLOPs of the matrix products in some nodes of the autograd graph."""

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0
        self.unknown: Counter[str] = Counter()  # functions that may multiply, by name
        self.assumptions: list[str] = []

    def add(self, node: Any, name: str) -> None:  # noqa: ANN401  a node of the autograd graph
        """Add the FLOPs of the matrix products of this node."""
        if name in _RULES:
            forward, backward = _RULES[name](node)
            if forward is None:
                self.unknown[name] += 1
                return
            self.forward += forward
            self.backward += backward
        elif isinstance(node, torch._C._FunctionBase):
            self._add_function(node, name)
        elif PRODUCT_NAME.search(_snake(name)):
            self.unknown[name] += 1

    def _add_function(self, node: Any, name: str) -> None:  # noqa: ANN401
        """Add a custom autograd function, which may multiply if an input is a weight matrix."""
        weights = [
            edge
            for edge in node.next_functions
            if (leaf := _leaf(edge[0])) is not None and leaf.variable.dim() >= 2
        ]
        if not weights:
            return
        if len(weights) == 1 and any(word in name.lower() for word in _FUSED_HEAD):
            shape = _edge_shape(weights[0])
            inputs = [_edge_shape(e) for e in node.next_functions if e[0] and e != weights[0]]
            rows = [
                size
                for size in inputs
                if size and shape and size[-1] == shape[-1] and len(size) > 1
            ]
            if len(rows) == 1 and shape is not None:
                once = 2 * prod(rows[0]) * shape[0]
                self.forward += once
                self.backward += 2 * once
                assumption = f"{name} is counted as one product of its input and its weights"
                if assumption not in self.assumptions:
                    self.assumptions.append(assumption)
                return
        self.unknown[name] += 1


class OutsideProducts(Products):
    """Products outside of recorded calls, and inside small calls, in case those can't be run."""

    def __init__(self, nodes: CallNodes) -> None:
        super().__init__()
        self._nodes = nodes
        # Calls that a backward pass goes through: by key, the first number of each.
        self.reached: dict[Any, set[int]] = {}
        self._inside: dict[Any, dict[int, Products]] = {}  # by key and first number
        self._left, self._left_inside = _MOST_NODES, _MOST_INSIDE
        self._walked_back: set[int] = set()
        self.is_complete = True

    def inside_flops(self, key: Any) -> tuple[float, float] | None:  # noqa: ANN401
        """A call's forward and backward FLOPs, averaged over its repeats; None if unknown."""
        walked = list(self._inside.get(key, {}).values())
        if not walked or any(products.unknown for products in walked):
            return None
        forward, backward = sum(p.forward for p in walked), sum(p.backward for p in walked)
        return forward / len(walked), backward / len(walked)

    def walk_back(self, nodes: Sequence[Any]) -> None:
        """Walk a backward pass from these nodes. A second pass over a graph is not counted."""
        met: set[int] = set()
        for node in nodes:
            self.walk(node, met)
        if met & self._walked_back:
            self.unknown["a second backward pass over one graph"] += 1
        self._walked_back |= met

    def walk(self, node: Any, met: set[int] | None = None) -> None:  # noqa: ANN401
        """Walk from this node of the autograd graph back to recorded calls, or to the leaves.

        Add to `met` the sequence number of each node, or the first number of the node's call.
        """
        waiting = [node]
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if number == _LEAF_NR:
                continue
            call = self._nodes.call_of(number)
            if met is not None:
                met.add(number if call is None else call[1])
            products: Products | None = self
            if call is not None:
                self._reach(*call[:2])
                products = self._inside_of(*call)
            if products is None or number in self._nodes.visited:
                continue
            self._nodes.visited.add(number)
            self._left -= call is None
            if self._left < 0:
                self.is_complete = False
                self.unknown[f"more than {_MOST_NODES} operations outside of modules"] = 1
                return
            self._look_at(node, products)
            waiting += [before for before, _ in node.next_functions if before is not None]

    def _inside_of(self, key: Any, start_nr: int, end_nr: int) -> Products | None:  # noqa: ANN401
        """The `Products` to fill for a call; None if that would exceed _MOST_INSIDE nodes."""
        calls = self._inside.setdefault(key, {})
        if start_nr not in calls and end_nr - start_nr <= self._left_inside:
            self._left_inside -= end_nr - start_nr
            calls[start_nr] = Products()
        return calls.get(start_nr)

    def _look_at(self, node: Any, products: Products) -> None:  # noqa: ANN401
        name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
        if name != "CheckpointFunction":
            products.add(node, name)
        elif products is self:
            self._checkpointed(node._sequence_nr())
        else:
            products.unknown[name] += 1

    def _checkpointed(self, number: int) -> None:
        """Mark the calls of a re-entrant checkpoint, which have gradients only in backward."""
        for key, call in self._nodes.without_nodes_at(number + 1):
            call.has_grad = call.is_recomputed = True
            self._reach(key, number)

    def _reach(self, key: Any, start_nr: int) -> None:  # noqa: ANN401
        self.reached.setdefault(key, set()).add(start_nr)


def _leaf(node: Any) -> Any:  # noqa: ANN401
    """The leaf (AccumulateGrad) behind nodes that only reshape or convert it, or None."""
    for _ in range(4):
        if node is None:
            return None
        if hasattr(node, "variable"):
            return node
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if name not in _VIEWS or not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None


def _edge_shape(edge: tuple[Any, int]) -> tuple[int, ...] | None:
    node, output = edge
    if node is None or not hasattr(node, "_input_metadata"):
        return None
    return tuple(int(size) for size in node._input_metadata[output].shape)


def _out(node: Any) -> tuple[int, ...]:  # noqa: ANN401
    return tuple(int(size) for size in node._input_metadata[0].shape)


_Cost = tuple[int | None, int]


def _summed(sizes: str, *, first: int) -> Callable[[Any], _Cost]:
    """Return the cost rule of mm. The node's attribute `sizes` ends in the inner dimension."""

    def rule(node: Any) -> _Cost:  # noqa: ANN401
        once = 2 * prod(_out(node)) * int(getattr(node, sizes)[-1])
        return once, once * _wanted(node, first, first + 2)

    return rule


def _batched(first: int) -> Callable[[Any], _Cost]:
    def rule(node: Any) -> _Cost:  # noqa: ANN401
        left, right = (_edge_shape(edge) for edge in node.next_functions[first : first + 2])
        inner = left[-1] if left else right[-2:][0] if right else None  # the right may be a vector
        if inner is None:
            return None, 0
        once = 2 * prod(_out(node)) * inner
        return once, once * _wanted(node, first, first + 2)

    return rule


def _convolution(node: Any) -> _Cost:  # noqa: ANN401
    image, weight = (_edge_shape(edge) for edge in node.next_functions[:2])
    met = image if node._saved_transposed else _out(node)
    if weight is None or met is None:
        return None, 0
    once = 2 * prod(met) * prod(weight[1:])
    return once, once * _wanted(node, 0, 2)


def _attention(node: Any) -> _Cost:  # noqa: ANN401
    query, key, value = (_edge_shape(edge) for edge in node.next_functions[:3])
    out = _out(node)
    key = key or value
    if key is None or len(out) != 4:
        return None, 0
    batch, heads, queries, v_dim = out
    qk_dim = (query or key)[-1]
    pairs = batch * heads * queries * key[-2]
    if getattr(node, "_saved_is_causal", False) and queries == key[-2]:
        pairs = batch * heads * queries * (queries + 1) // 2
    return 2 * pairs * (qk_dim + v_dim), 4 * pairs * (qk_dim + v_dim)


def _wanted(node: Any, start: int, end: int) -> int:  # noqa: ANN401
    return sum(edge[0] is not None for edge in node.next_functions[start:end])


_SDPA = "ScaledDotProduct{}Attention{}"
_RULES: dict[str, Callable[[Any], _Cost]] = {
    "Mm": _summed("_saved_self_sym_sizes", first=0),
    "Addmm": _summed("_saved_mat1_sym_sizes", first=1),
    "Bmm": _batched(0),
    "Baddbmm": _batched(1),
    "Mv": _batched(0),
    "Convolution": _convolution,
    _SDPA.format("Flash", ""): _attention,
    _SDPA.format("Flash", "ForCpu"): _attention,
    _SDPA.format("Efficient", ""): _attention,
    _SDPA.format("Cudnn", ""): _attention,
}


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
