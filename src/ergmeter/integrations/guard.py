"""Keeps errors of an integration out of the user's training: one line on stderr, then nothing more.

Drop-ins are called from code written for another module, which catches nothing.
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

# -- ending a training on an alert -----------------------------------------------------------------
# Ranks that train together must end at the same step: one that ends alone leaves the others
# waiting. So all ranks run a small collective every few steps, and only where an alert may stop the
# training. Whether a rank takes part depends on its callback's options alone, which are the same on
# all ranks, not on whether its measuring works. If the collective fails, it is not tried again: a
# mark says so.

AGREE_EVERY = 10  # steps: one small collective, and a wait for the device


class Stopping:
    """Decides after each step whether a training is to end."""

    def __init__(self, *meters: Meter | None) -> None:
        """`meters` are the Meters that the training's callback was given."""
        present = [meter for meter in meters if meter is not None]
        self._asks = any(meter.plan.alerts and meter.plan.alerts.stop_on for meter in present)

    def is_due(self, meter: Meter | None, step: int) -> bool:
        """True if the training should end after this step. `meter` measures it, if there is one."""
        wanted = meter is not None and meter.should_stop
        if world_size() == 1:
            return wanted
        if not self._asks or step % AGREE_EVERY:
            return False
        try:
            return any_rank(wanted)
        except (RuntimeError, ValueError) as error:
            self._asks = False
            if meter is not None:
                why = f"the ranks can't agree ({type(error).__name__}: {error})"
                meter.mark("stop_failed", f"{why}: no alert ends this training")
            return False


def any_rank(wanted: bool, device: Any = None) -> bool:  # noqa: ANN401  torch's
    """True if any rank wants to stop."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return False  # the ranks can't agree: ending alone is worse than going on
    on_gpu = "nccl" in str(torch.distributed.get_backend())
    vote = torch.tensor([int(wanted)], device=device or ("cuda" if on_gpu else "cpu"))
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX)
    return bool(vote.item())


# -- guarded methods -------------------------------------------------------------------------------

_Called = TypeVar("_Called", bound="Callable[..., Any]")
_warned: set[str] = set()


class Guarded:
    """Base class: guarded methods do nothing once one of them has failed, or if disabled."""

    enabled = True
    failed = ""  # why, once it has
    stops = ""  # what its failure stops, for the message

    def is_over(self) -> bool:
        """True if guarded methods do nothing any more."""
        return not self.enabled or bool(self.failed)

    def fail(self, error: Exception) -> None:
        """Print one line on stderr: a guarded method has raised this error."""
        self.failed = reason_of(error)
        warn_once(f"{self.stops or f'{type(self).__name__} stopped'}: {self.failed}")


def guarded(method: _Called) -> _Called:
    """Wrap a method of a `Guarded`: an error goes to its `fail`, and None is returned."""

    @wraps(method)
    def call(self: Guarded, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if self.is_over():
            return None
        try:
            return method(self, *arguments, **options)
        except Exception as error:  # noqa: BLE001  called in the user's training: never break it
            self.fail(error)
            return None

    return cast("_Called", call)


def reason_of(error: Exception) -> str:
    """The error in one line; our own errors without their class."""
    message = str(error) if isinstance(error, ErgmeterError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())[:500]


def warn_once(message: str, *, about: str = "") -> None:
    """Print one line on stderr, once per message, or once per `about` if that is given."""
    if (about or message) not in _warned:
        _warned.add(about or message)
        sys.stderr.write(f"ergmeter: {message}\n")


def say(text: str) -> None:
    """Print whole lines on stdout in one write: ranks share a terminal."""
    sys.stdout.write(text)
    sys.stdout.flush()
