"""The promise of a drop-in: what goes wrong in it ends its own telling, never the training.

A drop-in is called from code that was written for another module and catches nothing.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ergmeter.errors import ErgmeterError
from ergmeter.runlog.process_group import world_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.meter import Meter

# -- stopping --------------------------------------------------------------------------------------
# Ends a training when an alert asks for it, on all its ranks at the same step.
#
# The trap: a rank that ends alone leaves the others waiting for it for ever. So ranks that train
# together ask each other every few steps, and only where somebody asked for a stop. Whether a rank
# takes part depends on what its callback was told, which is the same on all of them, and never on
# how the measuring goes or who else measures: one that could not write its run still answers. A
# failed question never breaks a training: nobody asks again, and a mark says so.


AGREE_EVERY = 10  # steps: one small collective, and a wait for the device


class Stopping:
    """Asks, step by step, whether a training is to end."""

    def __init__(self, *meters: Meter | None) -> None:
        """Made where the training begins, of those that its callback was given."""
        known = [one for one in meters if one is not None]
        self._asks = any(one.plan.alerts and one.plan.alerts.stop_on for one in known)

    def is_due(self, meter: Meter | None, step: int) -> bool:
        """Whether the training should end after this step. `meter`: who measures it, if anyone."""
        wanted = meter is not None and meter.should_stop
        if world_size() == 1:
            return wanted
        if not self._asks or step % AGREE_EVERY:
            return False
        try:
            return _any_rank(wanted)
        except Exception as error:  # noqa: BLE001  never break training
            self._asks = False
            if meter is not None:
                why = f"ranks can't be asked ({type(error).__name__}: {error})"
                meter.mark("stop_failed", f"{why}: no alert ends this training")
            return False


def _any_rank(wanted: bool) -> bool:
    """Whether one of the ranks wants it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return False  # ranks that can't be asked: to end alone is worse than to go on
    on_gpu = "nccl" in str(torch.distributed.get_backend())
    said = torch.tensor([int(wanted)], device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX)
    return bool(said.item())


# -- guard -----------------------------------------------------------------------------------------


_Called = TypeVar("_Called", bound="Callable[..., Any]")
_warned: set[str] = set()


class Guarded:
    """Something whose guarded methods do nothing once one of them has failed, or if it is off."""

    enabled = True
    failed = ""  # why, once it has


def guarded(method: _Called) -> _Called:
    """Wrap a method of a `Guarded`: its failure is one line on stderr, and None is returned."""

    @wraps(method)
    def call(self: Guarded, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if not self.enabled or self.failed:
            return None
        try:
            return method(self, *arguments, **options)
        except Exception as error:  # noqa: BLE001  never break training
            self.failed = reason_of(error)
            warn_once(f"{type(self).__name__} stopped: {self.failed}")
            return None

    return cast("_Called", call)


def reason_of(error: Exception) -> str:
    """What went wrong, in one line; ours speak for themselves."""
    said = str(error) if isinstance(error, ErgmeterError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:500]


def warn_once(said: str) -> None:
    """One line on stderr, the first time."""
    if said not in _warned:
        _warned.add(said)
        sys.stderr.write(f"ergmeter: {said}\n")


def say(text: str) -> None:
    """Whole lines on stdout in one piece: ranks share a terminal."""
    sys.stdout.write(text)
    sys.stdout.flush()
