"""Which steps and losses did a run print, whatever the number of its lines?

The trap: a loss that is `nan` and one that was not printed look alike in a column of means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from ergmeter.records import FloatArray


@dataclass
class Tally:
    """What is known of the lines of a run whatever their number: its steps and losses."""

    steps: int = 0  # numbers; beyond so many rows, those above all before
    first_step: int | None = None
    last_step: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    losses_not_finite: int = 0
    first_not_finite_step: int | None = None
    losses_not_printed: int = 0

    def take(self, step: FloatArray, loss: FloatArray, has_loss: npt.NDArray[np.bool_]) -> None:
        """Further lines."""
        numbers = step[~np.isnan(step)]
        if len(numbers):
            before = self.last_step
            fresh = numbers if before is None else numbers[numbers > before]
            self.steps += len(np.unique(fresh))
            least, most = int(numbers.min()), int(numbers.max())
            self.first_step = least if self.first_step is None else min(self.first_step, least)
            self.last_step = most if before is None else max(before, most)
        losses = loss[np.isfinite(loss)]
        if len(losses):
            self.first_loss = float(losses[0]) if self.first_loss is None else self.first_loss
            self.last_loss = float(losses[-1])
        is_broken = has_loss & ~np.isfinite(loss)
        if is_broken.any() and not self.losses_not_finite:
            self.first_not_finite_step = whole(float(step[is_broken][0]))
        self.losses_not_finite += int(is_broken.sum())
        self.losses_not_printed += int((~has_loss).sum())


def whole(value: float) -> int | None:
    """A step's number; None if it is NaN."""
    return int(value) if value == value else None
