"""Do these dicts come from one Trainer?

A dict names no step and no program; what it has is an epoch and perhaps a total of tokens, and
both only grow. So they are watched as step numbers are (`streams`). The trap: they are printed
rounded, to two decimals or four digits, and then stand still for many logs of one Trainer. A value
that comes again is a sign of a second Trainer only where the steps between values are far coarser
than the rounding. Trainers one after the other begin again once each, which is no mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ergmeter.importers.bars import Bar
from ergmeter.importers.streams import SEVERAL, Streams, Waiting
from ergmeter.records import Mark, Record

_PARTS = 10_000  # of an epoch: places are whole numbers
_COARSE = 3  # times the rounding
_DECIMALS = 0.01  # transformers before 5.0 rounds epochs to this,
_DIGITS = 1e-3  # and since to four significant digits


@dataclass(slots=True, eq=False)
class Due:
    """What is to be done once it is known that there is one Trainer."""

    t_ns: int
    act: Callable[[], Iterator[Record]]
    number: int | None = None  # how far the Trainer is
    epoch: float | None = None
    drawn: bool = False
    says: frozenset[str] = frozenset()
    figures: tuple[str, ...] = ()


class Trainers:
    """Hands on what Trainers printed, in order, until they are found to be several."""

    def __init__(self) -> None:
        self._waiting: Waiting[Due] = Waiting()
        self._bars = Streams()
        self._last: int | None = None
        self._coarse = False  # the last two places were further apart than rounding explains
        self._epochs: list[float] = []
        self._untold = True

    @property
    def mixed(self) -> bool:
        """Whether there are several."""
        return self._waiting.streams.mixed or self._bars.mixed

    @property
    def holds(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def log(self, due: Due, epoch: float | None, total: int | None) -> Iterator[Due]:
        """A step dict was printed. Yields what need wait no longer."""
        if epoch is not None and math.isfinite(epoch):
            self._epochs = [*self._epochs[-3:], epoch]
            due.number = self._place(epoch, total)
        return self.take(due)

    def draw(self, bar: Bar, t_ns: int) -> Iterator[Due]:
        """The training's bar was drawn. One bar never goes back; two do, in turn."""
        if not bar.described and not bar.nested:
            self._bars.mixes(Due(t_ns, lambda: iter(()), number=bar.n, drawn=True))
        return self.tick(t_ns)

    def take(self, due: Due) -> Iterator[Due]:
        """Something else was printed, that has its place in the order."""
        if not self.mixed:
            yield from self._waiting.take(due)

    def tick(self, t_ns: int) -> Iterator[Due]:
        """Time went on."""
        if not self.mixed:
            yield from self._waiting.tick(t_ns)

    def finish(self) -> Iterator[Due]:
        """Nothing more will come."""
        if not self.mixed:
            yield from self._waiting.finish()

    def told(self, t_ns: int) -> Iterator[Mark]:
        """Say once that there are several."""
        if self._untold:
            self._untold = False
            epochs = ", ".join(f"{epoch:g}" for epoch in self._epochs)
            told = SEVERAL.format(f"epochs such as {epochs}")
            yield Mark(t_ns, "several_programs", told)

    def _place(self, epoch: float, total: int | None) -> int | None:
        """How far a dict is; None where it stands still, as rounded values do."""
        exact, rounding = epoch * _PARTS, _PARTS * max(_DECIMALS, _DIGITS * abs(epoch))
        if total:
            exact, rounding = total, max(1, _DIGITS * total)
        last, place = self._last, round(exact)
        if last is not None and place == last:
            return place if self._coarse else None
        self._coarse = last is not None and abs(place - last) > _COARSE * rounding
        self._last = place
        return place
