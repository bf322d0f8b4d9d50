"""What the hook of `erg record` does in a program that knows nothing of ergmeter.

The bootstrap on the program's path calls `attach` when one of the libraries that we know has been
imported; nothing is imported for our sake. Frameworks get their callback, other loops are watched.
The trap: saying a thing twice. Where a Meter measures already, the program's own or a callback's,
the watcher stands aside; where one begins later, it makes way.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.integrations.training import Training
from ergmeter.meter import active_meters
from ergmeter.runlog import format as fmt

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ergmeter.integrations.hook.trackers import Taps
    from ergmeter.integrations.torch.steps import Loop
    from ergmeter.records import Phase

_TRACKERS = ("wandb", "mlflow", "torch.utils.tensorboard.writer")
_NEEDED = (
    "pyarrow", "ergmeter.runlog.writer", "ergmeter.runlog.arrays", "ergmeter.probes.allocator",
    "ergmeter.integrations.torch.recorded_step", "ergmeter.flops.counted.skeleton",
)  # fmt: skip
_loop: Loop | None = None
_taps: Taps | None = None
_later: dict[str, ModuleType] = {}


def attach(name: str, module: ModuleType) -> None:
    """This library has just been imported."""
    if name == "torch":
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
    """Tell the recorder around us what was found, or what failed."""
    path = Path(os.environ.get(fmt.RUN_VARIABLE, "")) / ".hook" / str(os.getpid())
    with suppress(OSError), path.open("a") as file:
        file.write(f"attached\t{name}\n")


def _watch_loops() -> None:
    global _loop, _taps
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

    from ergmeter.integrations.hook.trackers import Taps  # noqa: PLC0415
    from ergmeter.integrations.torch import patches  # noqa: PLC0415
    from ergmeter.integrations.torch.steps import Loop  # noqa: PLC0415

    _loop = Loop(_training, is_told=active_meters.is_training, on_made=_get_ready)
    _taps = Taps(_loop)
    for name, module in _later.items():
        _taps.tap(name, module)
    patches.look_at_torch()
    patches.loops.append(_loop)
    register_optimizer_step_post_hook(_loop.stepped)


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
    """Whether the recorder around us is still there."""
    run = os.environ.get(fmt.RUN_VARIABLE)
    return bool(run) and (Path(run or "") / ".hook").is_dir()


def _get_ready() -> None:
    """An optimizer was made: load what a Meter needs now, since steps would wait for an import.

    On a thread of ours it would hold the interpreter up all the same, in the first steps.
    """
    active_meters.hook()
    with suppress(Exception):  # whoever needs it will say what is wrong
        for name in _NEEDED:
            importlib.import_module(name)


def _look_at(name: str, module: ModuleType) -> None:
    if "torch" not in sys.modules:
        return
    from ergmeter.integrations.torch import patches  # noqa: PLC0415

    patches.look_at_saves(name, module)


def _give_callback(trainer: Any, where: str, add: Callable[[Any, type], None]) -> None:  # noqa: ANN401
    """Every Trainer of this kind has our callback when it has been made."""
    init = trainer.__init__

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        init(self, *args, **kwargs)
        try:
            if _has_run():
                __import__(where)
                add(self, sys.modules[where].ErgmeterCallback)
        except Exception as error:  # noqa: BLE001  never break training
            announce(f"{where}: {type(error).__name__}: {error}"[:300])

    trainer.__init__ = call


def _time_outside(trainer: Any, method: str, phase: Phase) -> None:  # noqa: ANN401
    """Time this method where it is called before or after a training."""
    original = getattr(trainer, method)

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        start_ns = time.monotonic_ns()
        found = original(self, *args, **kwargs)
        handler = getattr(self, "callback_handler", self)
        for callback in getattr(handler, "callbacks", ()):
            if getattr(callback, "looks_on", False) is True:
                callback.outside(phase, start_ns)
        return found

    setattr(trainer, method, call)


def _add_to_trainer(trainer: Any, callback: type) -> None:  # noqa: ANN401
    if not any(isinstance(one, callback) for one in trainer.callback_handler.callbacks):
        # Of a kind of its own: a program that adds another later would be warned of two.
        unasked = type("ErgmeterLooksOn", (callback,), {"__doc__": callback.__doc__})
        trainer.add_callback(unasked(looks_on=True))


def _add_to_lightning(trainer: Any, callback: type) -> None:  # noqa: ANN401
    if not any(isinstance(one, callback) for one in trainer.callbacks):
        trainer.callbacks.append(callback(looks_on=True))
