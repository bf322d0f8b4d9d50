"""What does one line say about training? The common language of the importers.

The trap: a count without what it counts over. A number of tokens is kept with its mode, and turned
into the tokens of a span only by `spans`, which knows the line before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ergmeter.records import Mark

# -- losses ----------------------------------------------------------------------------------------
# Has the loss stopped being a number?
#
# The trap: a column of floats keeps no difference between a loss that was not printed and one that
# was `nan`, and of the two the second is what a reader must hear of.


class Losses:
    """Watches the losses of steps, and says once that they are no numbers."""

    def __init__(self) -> None:
        self._since = ""  # where it began
        self._told = 0  # marks

    def is_news(self, loss: float | None) -> bool:
        """Whether there is something to say about it."""
        if loss is None or self._told > 1:
            return False
        return math.isfinite(loss) == bool(self._since)

    def watch(self, t_ns: int, loss: float | None, where: str) -> Iterator[Mark]:
        """Take the loss of the next line, and where in the training that is."""
        if not self.is_news(loss):
            return
        self._told += 1
        if self._since:
            said = f"loss is a number again from {where} on; it was none from {self._since} on"
        else:
            said, self._since = f"loss is not a number ({loss}) from {where} on", where
        yield Mark(t_ns, "value_refused", said)


# -- seen ------------------------------------------------------------------------------------------


Mode = Literal["step", "line", "total"]


@dataclass(frozen=True, slots=True)
class Count:
    """A printed count: which field of Step, the number, and what it counts over."""

    field: str
    value: int
    mode: Mode


@dataclass(slots=True)
class StepLine:
    """What one line says about training, and when it was seen."""

    t_ns: int
    number: int | None = None  # the step it ends
    counts: tuple[Count, ...] = ()
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    epoch_steps: int | None = None  # that an epoch has, where its number counts within one
    own_s: float | None = None  # how long its work took, where the line itself says
    iterations: int = 1  # of a step, where the line counts both and own_s was that of one
    own_from_start: bool = False  # own_s is the time since the training started, not one step's
    redrawn: bool = False  # a progress bar: of one drawn again, the last loss counts
    number_done: bool = False  # its number counts the steps done since an epoch began, as a bar's
    totals_from_zero: bool = False  # its totals were zero before the work it speaks of
    goes_on: bool = False  # it is no restart though its number falls: the epoch rose, say
    evaluated_ns: int | None = None  # when the last line of an evaluation before it was seen
    stamped: bool = False  # its time was printed, and is not when it arrived
    elapsed_s: float | None = None  # since its progress bar began, by the bar itself
    stamp_ns: int | None = None  # the time that it gives under a name such as `timestamp`

    def steps_since(self, last: int) -> int | None:
        """The steps after the last number; None if that is higher and nothing says how many."""
        if self.number is None:
            return None
        if self.number > last:
            return self.number - last
        if self.epoch_steps is not None and self.epoch_steps >= last:
            return self.epoch_steps - last + self.number  # an epoch ended in between
        return None
