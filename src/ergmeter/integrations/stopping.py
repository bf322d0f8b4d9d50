"""Ends a training when an alert asks for it, on all its ranks at the same step.

The trap: a rank that ends alone leaves the others waiting for it for ever. So ranks that train
together ask each other every few steps, and only where somebody asked for a stop. Whether a rank
takes part depends on what its callback was told, which is the same on all of them, and never on how
the measuring goes or who else measures: one that could not write its run still answers. A failed
question never breaks a training: nobody asks again, and a mark says so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ergmeter.runlog.meeting import world_size

if TYPE_CHECKING:
    from ergmeter.meter import Meter

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
