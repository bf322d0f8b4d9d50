"""Serialises torch modules without their weights, so that their FLOPs can be counted on a copy.

Counting must not run the live model itself: hooks would fire, random generators advance, gradients
change and compiled code be lost. So a copy is built, here or in another process, with tensors that
have shapes and no memory.

Tensors become shapes. Classes and functions of installed packages are stored by reference, those of
the user's own files by value, so that no user file is imported or run again. Objects that can't be
serialised (locks, streams, trainers, datasets) are replaced by a `NotSent`, which raises an error
with its name when it is used. Nothing is read from a device, and no tensor is copied.

Serialising runs beside a training that may be pure Python. So it works 0.2 ms and then sleeps 5 ms:
a step loses at most 4 % of its time to it.
"""

from __future__ import annotations

import io
import pickle
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import _lru_cache_wrapper, cache, partial
from pathlib import Path
from threading import Event, Lock
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn, TypeVar
from weakref import ReferenceType

import cloudpickle
import numpy as np
import torch
from cloudpickle import cloudpickle as by_value
from torch import nn

from ergmeter.errors import NotMeasurable
from ergmeter.flops.counted.meta_model import HOOKS, ModuleCall, TensorSpec, needed_hooks, unwrapped
from ergmeter.flops.counted.remote import CountRequest

_MOST_BYTES = 64 * 2**20
_MOST_S = 10.0  # of work, pauses not counted
_MOST_VALUES = 4096  # of a numpy array; of a larger one only the shape is sent
_WORK_S, _PAUSE_S = 0.0002, 0.005
# Objects of these packages hold trainers, process groups and data, never what a forward computes.
_NOT_SENT = frozenset(
    {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed", "wandb"}
    | {"tensorboard", "tensorboardX", "datasets", "mlflow", "trl"}
)
_NOT_SENT_TYPES = (
    *(torch.optim.Optimizer, torch.utils.data.DataLoader, torch.utils.data.Dataset),
    *(torch.cuda.Stream, torch.cuda.Event, torch.Generator, torch.jit.ScriptModule),
)


_MADE_ANEW: dict[type, Any] = {torch.device: (torch.device, ("cpu",)), type(Lock()): (Lock, ())}


class NotSent:
    """Placeholder for an object that could not be serialised; using it raises AttributeError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise AttributeError, as any use does."""
        self._refuse()

    def __or__(self, _: object) -> NotSent:
        """Allows an annotation such as `Dataset | None`: naming a class is not using it."""
        return self

    __ror__ = __or__

    def _refuse(self) -> NoReturn:
        # An AttributeError, so that hasattr() is False.
        raise AttributeError(f"its forward uses a {self._name}, which can't be sent elsewhere")


def serialised(
    groups: Sequence[Sequence[ModuleCall]],
    outer: Mapping[int, nn.Module] | None = None,
    training_over: Event | None = None,
) -> CountRequest:
    """Return a request with these calls, without weights or data; each group has one module.

    `outer`: FSDP's wrappers by the ids of the modules inside, because they have the parameters.
    When `training_over` is set, serialising no longer pauses.
    """
    parts: list[bytes] = []
    errors: dict[int, str] = {}
    for number, calls in enumerate(groups):
        try:
            module = calls[0].module
            outermost = (outer or {}).get(id(module), module)
            parts.append(dumps(list(calls), modules=[outermost], training_over=training_over))
        except NotMeasurable as error:
            parts.append(b"")
            errors[number] = str(error)
    return CountRequest(tuple(parts), errors, tuple(len(calls) for calls in groups), _search_path())


def _search_path() -> tuple[str, ...]:
    """Return the import path of installed packages, without the user's own folders."""
    installed = installed_folders()
    own = str(installed[-1]).rpartition("/")[0]
    return tuple(p for p in (*sys.path, own) if p.startswith(installed[:-1]) or p == own)


def dumps(
    value: object, *, modules: Iterable[nn.Module] = (), training_over: Event | None = None
) -> bytes:
    """Serialise `value`, with modules in it without weights; NotMeasurable if it is impossible.

    `modules`: modules in `value`, to find parameters that FSDP has merged into one vector. Without
    `training_over` there are no pauses and no time limit.
    """
    for is_last in (False, False, True):
        file = _LimitedFile()
        try:
            # The last try makes no pauses, so that the training changes less beside it.
            pickler = _Pickler(file, None if is_last else training_over)
            pickler.flat = _flat_parameters(modules)
            pickler.dump(value)
            break
        except NotMeasurable:
            raise
        except Exception as error:  # pickling runs the user's own code
            if isinstance(error, RuntimeError) and not is_last:
                continue  # the training beside us has put something into a dictionary
            what = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:200]
            why = f"the model can't be serialised without its weights: {what}"
            raise NotMeasurable(why) from error
    return file.getvalue()


def loads(data: bytes) -> Any:  # noqa: ANN401
    """Return the object that `dumps` serialised, with empty tensors. Needs a FakeTensorMode."""
    return pickle.loads(data)


class _LimitedFile(io.BytesIO):
    def write(self, data: Any) -> int:  # noqa: ANN401  a buffer
        if self.tell() > _MOST_BYTES:
            raise NotMeasurable(
                f"without its weights the model is still larger than {_MOST_BYTES >> 20} MiB"
            )
        return super().write(data)


class _Pickler(cloudpickle.Pickler):
    flat: dict[int, dict[str, TensorSpec]]

    def __init__(self, file: io.BytesIO, training_over: Event | None) -> None:
        super().__init__(file, protocol=5)
        self._training_over = training_over
        self._resumed_s = time.perf_counter()
        self._worked_s = 0.0

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401
        """Serialise one object; pickle calls it for all but numbers, strings, plain containers."""
        self._pause()
        if isinstance(obj, torch.Tensor):
            return _reduced_tensor(obj)
        if isinstance(obj, nn.Module):
            return self._reduced_module(obj)
        if isinstance(obj, type):
            if not _is_users(obj.__module__):
                return _untracked(self._by_default(obj), obj)
            # Through its hooks an optimizer's class would bring objects that watch the training.
            if issubclass(obj, _NOT_SENT_TYPES) and not issubclass(obj, nn.Module):
                return NotSent, (obj.__name__,)
            return _untracked(by_value._dynamic_class_reduce(obj), obj)
        if isinstance(obj, FunctionType):
            inner = getattr(obj, "_torchdynamo_orig_callable", None)
            if inner is not None:
                return _same, (inner,)
            is_users = _is_users(obj.__module__)
            return self._dynamic_function_reduce(obj) if is_users else self._by_default(obj)
        if isinstance(obj, ModuleType):
            return _reduced_python_module(obj)
        if isinstance(obj, TypeVar):  # else its whole module would go with it
            return by_value._make_typevar, by_value._decompose_typevar(obj)
        return NotImplemented if type(obj) in self.dispatch_table else _reduced_object(obj)

    def _by_default(self, obj: Any) -> Any:  # noqa: ANN401
        return super().reducer_override(obj)

    def _reduced_module(self, module: nn.Module) -> tuple[Any, ...]:
        inner = unwrapped(module)
        inner = getattr(inner, "_fsdp_wrapped_module", inner)
        if inner is not module:
            return _same, (inner,)
        if isinstance(module, torch.jit.ScriptModule):
            return NotSent, (f"scripted module ({type(module).__name__})",)
        state = dict(module.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            state[name] = dict(state[name])
        flat = self.flat.get(id(module), {})
        state["_parameters"].update(flat)
        for name in flat:  # FSDP leaves a view in the parameter's place
            state.pop(name, None)
        for name in HOOKS:
            if isinstance(state.get(name), dict):
                state[name] = needed_hooks(state[name])
        state["_compiled_call_impl"] = None
        if "_old_forward" in state:  # what accelerate puts aside when it moves a layer's inputs
            state["forward"] = state["_old_forward"]
        if "_original_forward" in state:  # Accelerate's autocast around it
            del state["_original_forward"]
            state.pop("forward", None)
        return _made, (_own_class(module),), state, None, None, _set_state

    def _pause(self) -> None:
        now_s = time.perf_counter()
        if self._training_over is None or now_s - self._resumed_s < _WORK_S:
            return
        self._worked_s += now_s - self._resumed_s
        if self._worked_s > _MOST_S:
            raise NotMeasurable(f"serialising the model took longer than {_MOST_S:g} s")
        self._training_over.wait(_PAUSE_S)  # returns at once when the training is over
        self._resumed_s = time.perf_counter()


def _untracked(reduced: Any, kind: type) -> Any:  # noqa: ANN401
    """Remove cloudpickle's id of a class from its serialised form.

    With the id, loading in the program's own process would overwrite the original class's methods.
    """
    if not isinstance(reduced, tuple):
        return reduced
    tracked = by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(kind)
    make, arguments, *rest = reduced
    return make, tuple(None if argument is tracked else argument for argument in arguments), *rest


def _reduced_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        return TensorSpec.of(tensor).__reduce__()
    except Exception:  # noqa: BLE001  a lazy parameter, or somebody's own kind of tensor
        return NotSent, (type(tensor).__name__,)


def _reduced_python_module(module: ModuleType) -> tuple[Any, ...]:
    if not _is_users(module.__name__):
        return by_value.subimport, (module.__name__,)
    state = {k: v for k, v in module.__dict__.items() if k not in ("__builtins__", "__loader__")}
    state.pop("__spec__", None)
    # Filled afterwards: what is in it may refer to it.
    return by_value.dynamic_subimport, (module.__name__, {}), state, None, None, _set_state


def _reduced_object(obj: Any) -> Any:  # noqa: ANN401
    kind = type(obj)
    if kind in _MADE_ANEW:
        return _MADE_ANEW[kind]
    if isinstance(obj, np.ndarray):
        if obj.dtype.hasobject:
            return NotSent, ("numpy array of objects",)
        if obj.size > _MOST_VALUES:
            return np.zeros, (obj.shape, obj.dtype.str)
        return NotImplemented
    if isinstance(obj, ReferenceType):
        target = obj()  # kept alive in the copy
        return (partial, (_same, target)) if target is not None else (NotSent, ("dead reference",))
    if isinstance(obj, MethodType | BuiltinMethodType):
        return _reduced_method(obj)
    if isinstance(obj, _lru_cache_wrapper):
        return (cache, (obj.__wrapped__,)) if _is_users(obj.__module__) else NotImplemented
    package = kind.__module__.partition(".")[0]
    if isinstance(obj, _NOT_SENT_TYPES) or (package in _NOT_SENT and not isinstance(obj, dict)):
        return NotSent, (kind.__name__,)
    try:
        obj.__reduce_ex__(5)
    except Exception:  # noqa: BLE001  whatever it says: it can't be sent
        return NotSent, (kind.__name__,)
    return NotImplemented


def _reduced_method(method: MethodType | BuiltinMethodType) -> Any:  # noqa: ANN401
    owner = method.__self__
    if isinstance(method, MethodType):
        return MethodType, (method.__func__, owner)
    if owner is None or isinstance(owner, ModuleType | type | torch.Tensor):
        return NotImplemented
    reduced = _reduced_object(owner)  # where a lock can't be sent, `lock.acquire` can't either
    return reduced if isinstance(reduced, tuple) and reduced[0] is NotSent else NotImplemented


def _own_class(module: nn.Module) -> type:
    """Return a module's class, without the subclass that `fully_shard` makes of it."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


def _flat_parameters(modules: Iterable[nn.Module]) -> dict[int, dict[str, TensorSpec]]:
    """Return by module id the parameters that FSDP merged into a vector, with their own shapes."""
    specs: dict[int, dict[str, TensorSpec]] = {}
    for outer in modules:
        for module in outer.modules():
            vector: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
            if vector is None or not hasattr(vector, "_param_infos"):
                continue
            for info, shape in zip(vector._param_infos, vector._shapes, strict=True):
                spec = TensorSpec(
                    tuple(shape), vector.dtype, vector.requires_grad, is_parameter=True
                )
                specs.setdefault(id(info.module), {})[info.param_name] = spec
            for info in getattr(vector, "_shared_param_infos", ()):
                first = specs[id(info.prim_module)][info.prim_param_name]
                specs.setdefault(id(info.module), {})[info.param_name] = first
    return specs


@cache
def _is_users(name: str | None) -> bool:
    """True if a module is a file of the user's own, not of an installed package."""
    if not name or name in ("__main__", "__mp_main__"):
        return True
    root = sys.modules.get(name.partition(".")[0])
    path = getattr(root, "__file__", None)
    if path is None:  # built in, or a package of several folders
        folders = list(getattr(root, "__path__", ()))
        if root is None or not folders:
            return root is None
        path = folders[0]
    return not any(Path(path).is_relative_to(folder) for folder in installed_folders())


@cache
def installed_folders() -> tuple[str, ...]:
    """Return the folders of the standard library, of installed packages and of ergmeter."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = str(Path(__file__).parents[3])
    more = [path for path in sys.path if _is_installed(Path(path))]
    return tuple(dict.fromkeys([*(paths[name] for name in names), *more, f"{own}/ergmeter"]))


def _is_installed(folder: Path) -> bool:
    """True if pip installed packages here, and it is not the program's own folder."""
    if folder.name in ("site-packages", "dist-packages"):
        return True
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    own = {Path.cwd(), Path(program).resolve().parent if program else Path.cwd()}
    return folder.resolve() not in own and any(folder.glob("*.dist-info"))  # pip install --target


def _same(value: Any) -> Any:  # noqa: ANN401
    return value


def _made(kind: type) -> Any:  # noqa: ANN401
    return object.__new__(kind)


def _set_state(module: nn.Module | ModuleType, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
