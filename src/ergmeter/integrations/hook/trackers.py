"""What a program logs about itself to TensorBoard, W&B or MLflow, as it goes by.

The trap: a log without an end, and a number that is not here yet. Of each name one figure a second
is kept, and a tensor on a device is left where it is. Whatever goes wrong here, the program's own
call is made as it would have been.
"""

from __future__ import annotations

import time
from functools import wraps
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ergmeter.meter import active_meters
from ergmeter.records import Reported
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from ergmeter.integrations.torch.steps import Loop

_EVERY_NS = NS_PER_S
_OURS = "ergmeter_taps"  # set on what we put in place of a tracker's function
_MOST_NAMES = 1000
_NOT_TRAINING = ("val", "eval", "test", "dev")  # how folders of a second writer are called
# What loops call the loss of a step, where they do not call it that.
_LOSSES = {
    "loss/train",
    "train loss",
    "training/loss",
    "training_loss",
    "losses/train",
    "loss_train",
}


class Taps:
    """Passes on what trackers are told, at a bounded rate."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._last_ns: dict[str, int] = {}

    def told(self, values: Mapping[str, Any]) -> None:
        """The program has logged these."""
        try:
            numbers = {str(name): _number(value) for name, value in values.items()}
            known = {name: value for name, value in numbers.items() if value is not None}
            self._loop.logged(
                {"loss" if name.lower() in _LOSSES else name: v for name, v in known.items()}
            )
            self._report(known)
        except Exception as error:  # noqa: BLE001  never break training
            self._loop.fail(error)

    def _report(self, known: Mapping[str, float]) -> None:
        meters = active_meters.meters()
        if not meters or self._loop.off:
            return
        now_ns = time.monotonic_ns()
        for name, value in known.items():
            is_new = name not in self._last_ns and len(self._last_ns) < _MOST_NAMES
            if is_new or now_ns - self._last_ns.get(name, now_ns) >= _EVERY_NS:
                self._last_ns[name] = now_ns
                meters[0].record(Reported(now_ns, name, value, ""))

    def tap(self, name: str, module: ModuleType) -> None:
        """Look at what this tracker is told from now on."""
        if name == "wandb":
            run = module.sdk.wandb_run.Run
            run.log = _then(run.log, lambda args, kwargs: _first(args[1:], kwargs, "data"), self)
            module.init = self._tapping_init(module, module.init)  # type: ignore[attr-defined]
        elif name == "mlflow":
            module.log_metric = _then(module.log_metric, _pair_of("key", "value", 0), self)  # type: ignore[attr-defined]
            module.log_metrics = _then(  # type: ignore[attr-defined]
                module.log_metrics, lambda args, kwargs: _first(args, kwargs, "metrics"), self
            )
        else:  # TensorBoard
            writer = module.SummaryWriter
            writer.add_scalar = _then(writer.add_scalar, _scalar, self)

    def _tapping_init(self, wandb: Any, init: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ANN401
        """`wandb.init` under mode="disabled" returns a run with a `log` of its own."""

        @wraps(init)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            run = init(*args, **kwargs)
            try:
                log = run.log
                if not hasattr(log, _OURS):
                    run.log = _then(log, lambda args, kwargs: _first(args, kwargs, "data"), self)
                    if wandb.log == log:
                        wandb.log = run.log
            except Exception as error:  # noqa: BLE001  never break training
                self._loop.fail(error)
            return run

        return call


def _then(
    log: Callable[..., Any], values: Callable[[Any, Any], Any], taps: Taps
) -> Callable[..., Any]:
    @wraps(log)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = log(*args, **kwargs)
        try:
            told = values(args, kwargs)
        except Exception:  # noqa: BLE001  a call that we do not understand
            told = None
        if isinstance(told, dict):
            taps.told(told)
        return found

    setattr(call, _OURS, True)
    return call


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:  # noqa: ANN401
    return args[0] if args else kwargs.get(name)


def _pair_of(key: str, value: str, skip: int) -> Callable[[Any, Any], dict[str, Any]]:
    def pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        rest = args[skip:]
        name = rest[0] if rest else kwargs[key]
        return {name: rest[1] if len(rest) > 1 else kwargs[value]}

    return pair


def _scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By its tag; under a writer's folder if that is one of several: "loss" is not val/"loss"."""
    told = _pair_of("tag", "scalar_value", 1)(args, kwargs)
    folder = PurePath(str(getattr(args[0], "log_dir", ""))).name
    if folder.lower().startswith(_NOT_TRAINING):
        return {f"{folder}/{tag}": value for tag, value in told.items()}
    return told


def _number(value: Any) -> float | None:  # noqa: ANN401
    """A number that is here; nobody waits for one on a device."""
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else float(value)
    place = getattr(value, "device", None)
    is_here = place is None or getattr(place, "type", place) == "cpu"
    if is_here and getattr(value, "size", None) is not None and hasattr(value, "item"):
        shape = tuple(getattr(value, "shape", ()))
        return float(value.item()) if all(side == 1 for side in shape) else None
    return None
