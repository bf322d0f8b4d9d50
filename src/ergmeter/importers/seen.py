"""What does one line say about training? The common language of the importers.

The trap: a count without what it counts over. A number of tokens is kept with its mode, and turned
into the tokens of a span only by `spans`, which knows the line before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["step", "line", "total"]


@dataclass(frozen=True, slots=True)
class Count:
    """A printed count: which field of Step, the number, and what it counts over."""

    field: str
    value: int
    mode: Mode


@dataclass(slots=True)
class Seen:
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
