"""The hook of `erg record` inside a program that does not use ergmeter.

The bootstrap on the program's path calls `attach` when a known library has been imported; nothing
is imported for our sake. Frameworks get their callback, other loops are watched. Where a Meter or a
callback of the program already measures, the hook stays out; where one begins later, the hook ends.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from contextlib import suppress
from functools import wraps
from operator import itemgetter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ergmeter.integrations.training import Training
from ergmeter.meter import active_meters
from ergmeter.records import Phase, Reported
from ergmeter.runlog import format as fmt
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

    from ergmeter.integrations.torch.steps import Loop

# -- values logged to TensorBoard, W&B or MLflow ---------------------------------------------------
# At most one value a second is stored per name, so that the log stays bounded. A tensor on a device
# is left there. If something fails here, the program's own call is made all the same.

_EVERY_NS = NS_PER_S
_OURS = "ergmeter_taps"  # set on what we put in place of a tracker's function
_MOST_NAMES = 1000
_NOT_TRAINING = ("val", "eval", "test", "dev")  # folder names of a second writer, for evaluation
# Other names that loops give the loss of a step.
_LOSSES = {
    *("loss/train", "train loss", "training/loss"),
    *("training_loss", "losses/train", "loss_train"),
}


class Taps:
    """Records values that the program logs to TensorBoard, W&B or MLflow, at a bounded rate."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._last_ns: dict[str, int] = {}

    def record(self, values: Mapping[str, Any]) -> None:
        """Record values that the program has logged."""
        try:
            numbers = {str(name): _number(value) for name, value in values.items()}
            reported = {name: value for name, value in numbers.items() if value is not None}
            self.loop.logged(
                {"loss" if name.lower() in _LOSSES else name: v for name, v in reported.items()}
            )
            self._report(reported)
        except Exception as error:  # noqa: BLE001  never break training
            self.loop.fail(error)

    def _report(self, values: Mapping[str, float]) -> None:
        meters = active_meters.meters()
        if not meters or self.loop.off:
            return
        now_ns = time.monotonic_ns()
        for name, value in values.items():
            is_new = name not in self._last_ns and len(self._last_ns) < _MOST_NAMES
            if is_new or now_ns - self._last_ns.get(name, now_ns) >= _EVERY_NS:
                self._last_ns[name] = now_ns
                meters[0].record(Reported(now_ns, name, value, ""))

    def tap(self, name: str, module: ModuleType) -> None:
        """Wrap this tracker's logging functions."""
        if name == "wandb":
            run = module.sdk.wandb_run.Run
            run.log = self._tapped(run.log, ("self", "data"), itemgetter("data"))
            module.init = self._tapping_init(module, module.init)  # type: ignore[attr-defined]
        elif name == "mlflow":
            module.log_metric = self._tapped(  # type: ignore[attr-defined]
                module.log_metric, ("key", "value"), lambda call: {call["key"]: call["value"]}
            )
            module.log_metrics = self._tapped(  # type: ignore[attr-defined]
                module.log_metrics, ("metrics",), itemgetter("metrics")
            )
        else:  # TensorBoard
            writer = module.SummaryWriter
            writer.add_scalar = self._tapped(
                writer.add_scalar, ("self", "tag", "scalar_value"), _scalar
            )

    def _tapped(
        self,
        log: Callable[..., Any],
        names: tuple[str, ...],
        values: Callable[[dict[str, Any]], Any],
    ) -> Callable[..., Any]:
        """Wrap a tracker's function `log`: record what `values` reads from its arguments."""

        @wraps(log)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = log(*args, **kwargs)
            try:
                logged = values({**dict(zip(names, args, strict=False)), **kwargs})
            except (KeyError, TypeError):  # a call that we do not understand
                logged = None
            if isinstance(logged, dict):
                self.record(logged)
            return result

        setattr(call, _OURS, True)
        return call

    def _tapping_init(self, wandb: Any, init: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ANN401
        """Wrap `wandb.init`: with mode="disabled" its run has a `log` of its own to wrap."""

        @wraps(init)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            run = init(*args, **kwargs)
            try:
                log = run.log
                if not hasattr(log, _OURS):
                    run.log = self._tapped(log, ("data",), itemgetter("data"))
                    if wandb.log == log:
                        wandb.log = run.log
            except Exception as error:  # noqa: BLE001  never break training
                self.loop.fail(error)
            return run

        return call


def _scalar(call: dict[str, Any]) -> dict[str, Any]:
    """The logged scalar by its tag, prefixed with the writer's folder if that is not training."""
    folder = PurePath(str(getattr(call["self"], "log_dir", ""))).name
    prefix = f"{folder}/" if folder.lower().startswith(_NOT_TRAINING) else ""
    return {f"{prefix}{call['tag']}": call["scalar_value"]}


def _number(value: Any) -> float | None:  # noqa: ANN401
    """The value as a float if it is a number in host memory, else None."""
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else float(value)
    device = getattr(value, "device", None)
    is_here = device is None or getattr(device, "type", device) == "cpu"
    if is_here and getattr(value, "size", None) is not None and hasattr(value, "item"):
        shape = tuple(getattr(value, "shape", ()))
        return float(value.item()) if all(side == 1 for side in shape) else None
    return None


# -- attaching to libraries ------------------------------------------------------------------------

_TRACKERS = ("wandb", "mlflow", "torch.utils.tensorboard.writer")
_NEEDED = (
    "pyarrow", "ergmeter.runlog.writer", "ergmeter.runlog.arrays", "ergmeter.probes.allocator",
    "ergmeter.integrations.torch.recorded_step", "ergmeter.flops.counted.skeleton",
)  # fmt: skip
_loop: Loop | None = None
_taps: Taps | None = None
_later: dict[str, ModuleType] = {}
_attached: set[str] = set()


def attach(name: str, module: ModuleType) -> None:
    """Attach to a library that has just been imported."""
    _attached.add(name)
    if name == "torch":
        if _has_run():
            _watch_loops()
    elif name == "transformers.trainer":
        _give_callback(module.Trainer, "ergmeter.integrations.huggingface", _add_to_trainer)
        _time_outside(module.Trainer, "evaluate", "eval")
        _time_outside(module.Trainer, "save_model", "checkpoint")
    elif name.endswith("trainer.trainer"):
        _give_callback(module.Trainer, "ergmeter.integrations.lightning", _add_to_lightning)
        _time_outside(module.Trainer, "save_checkpoint", "checkpoint")
    elif name not in _TRACKERS:
        _look_at(name, module)
    elif _taps is not None:
        _taps.tap(name, module)
    else:  # before torch
        _later[name] = module
    announce(name)


def announce(name: str) -> None:
    """Write for `erg record` which library was attached, or what failed."""
    path = Path(os.environ.get(fmt.RUN_VARIABLE, "")) / ".hook" / str(os.getpid())
    with suppress(OSError), path.open("a") as file:
        file.write(f"attached\t{name}\n")


def enter_cell(names: Iterable[str]) -> None:
    """Watch a notebook's cell: the libraries of these names that are loaded, and later ones."""
    for name in names:
        if name in sys.modules and (name == "torch" or name not in _attached):
            with suppress(Exception):  # without its steps the cell runs all the same
                attach(name, sys.modules[name])
    if _loop is not None:
        _loop.look_out()


def leave_cell() -> None:
    """End what the cell has begun to measure, and watch no loop until the next cell."""
    global _loop
    active_meters.make_way()
    active_meters.end_resting()
    for meter in active_meters.meters():
        meter.close()
    if _loop is not None:
        _loop.stop()
        _loop = None


def _watch_loops() -> None:
    global _loop, _taps
    from ergmeter.integrations.torch.steps import Loop  # noqa: PLC0415

    _loop = Loop(_training, is_recorded_elsewhere=active_meters.is_training, on_made=_get_ready)
    _taps = _taps or Taps(_loop)
    _taps.loop = _loop
    while _later:
        _taps.tap(*_later.popitem())
    _loop.start()


def _training() -> Training | None:
    if active_meters.is_training() or not _has_run():
        return None
    active_meters.end_resting()
    training = Training(looks_on=True)
    if "multiprocessing.util" in sys.modules:
        # Its children leave by os._exit; before the Meter's own finalizer, which has priority 10.
        sys.modules["multiprocessing.util"].Finalize(None, training.end, exitpriority=20)
    return training


def _has_run() -> bool:
    """True if the run of the `erg record` around this program still exists."""
    run = os.environ.get(fmt.RUN_VARIABLE)
    return bool(run) and (Path(run or "") / ".hook").is_dir()


def _get_ready() -> None:
    """Import what a Meter needs, once an optimizer is made, so that no step waits for it.

    An import on another thread would hold the GIL during the first steps.
    """
    active_meters.hook()
    with suppress(Exception):  # in the user's program; the Meter will report what is wrong
        for name in _NEEDED:
            importlib.import_module(name)


def _look_at(name: str, module: ModuleType) -> None:
    if "torch" not in sys.modules:
        return
    from ergmeter.integrations.torch import patches  # noqa: PLC0415

    patches.patch_saves(name, module)


def _give_callback(trainer: Any, where: str, add: Callable[[Any, type], None]) -> None:  # noqa: ANN401
    """Add our callback to every new Trainer of this class."""
    init = trainer.__init__

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        init(self, *args, **kwargs)
        try:
            if _has_run():
                add(self, importlib.import_module(where).ErgmeterCallback)
        except Exception as error:  # noqa: BLE001  never break training
            announce(f"{where}: {type(error).__name__}: {error}"[:300])

    trainer.__init__ = call


def _time_outside(trainer: Any, method: str, phase: Phase) -> None:  # noqa: ANN401
    """Time this method where it is called before or after a training."""
    original = getattr(trainer, method)

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        start_ns = time.monotonic_ns()
        result = original(self, *args, **kwargs)
        handler = getattr(self, "callback_handler", self)
        for callback in getattr(handler, "callbacks", ()):
            if getattr(callback, "looks_on", False) is True:
                callback.outside(phase, start_ns)
        return result

    setattr(trainer, method, call)


def _add_to_trainer(trainer: Any, callback: type) -> None:  # noqa: ANN401
    if not any(isinstance(other, callback) for other in trainer.callback_handler.callbacks):
        # A class of its own: transformers warns if the program later adds one of the same class.
        unasked = type("ErgmeterLooksOn", (callback,), {"__doc__": callback.__doc__})
        trainer.add_callback(unasked(looks_on=True))


def _add_to_lightning(trainer: Any, callback: type) -> None:  # noqa: ANN401
    if not any(isinstance(other, callback) for other in trainer.callbacks):
        trainer.callbacks.append(callback(looks_on=True))
