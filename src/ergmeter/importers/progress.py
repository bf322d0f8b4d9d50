"""Which step was that log about? Only the progress bar beside it knows.

The Trainer redraws its bar right after each log, so the first bar after a log has its step. The
trap: the bar goes to another stream and has no line end until it is drawn again, so it may be seen
one log late, or an older one may be seen first. Logs therefore wait in a queue for their bar, and a
number is believed only if it is in proportion to the epochs: steps and epochs grow together. A log
whose bar was missed gets the number that this proportion gives it, where that is plainly one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ergmeter.importers.bars import Bar

T = TypeVar("T")
_LONGEST_WAIT = 3  # logs; a bar that is later than this is not coming
_EPOCH_ROUNDING = 1e-3  # two epochs printed to four digits are off by so much, compared


@dataclass(slots=True)
class _Log(Generic[T]):
    item: T
    epoch: float
    n: int | None = None
    hopeless: bool = False  # a bar beyond it was drawn: its own was missed


class Progress(Generic[T]):
    """Gives logs their step number, in order, or None where it can't be known."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._barless = False  # there is no bar: nothing to wait for
        self._queue: deque[_Log[T]] = deque()
        self._known: tuple[int, float] | None = None  # the last number that was believed

    def log(self, item: T, epoch: float | None) -> Iterator[tuple[T, int | None]]:
        """A log was printed. Yields the logs that need wait no longer."""
        if epoch is None or not math.isfinite(epoch) or epoch <= 0:
            yield from self.flush()
            yield item, None
            return
        if self._known and epoch < self._known[1]:
            yield from self.flush()
            self._known = None
        self._queue.append(_Log(item, epoch))
        if len(self._queue) > _LONGEST_WAIT:
            self._barless = self._total is None
            log = self._queue.popleft()
            yield log.item, self._by_proportion(log)
        if self._barless:
            yield from self.flush()

    def draw(self, drawn: Bar) -> Iterator[tuple[T, int | None]]:
        """A bar was drawn. Yields the logs whose number is now known."""
        if not self._is_training(drawn) or drawn.n < 1:
            return
        waiting = next((log for log in self._queue if log.n is None and not log.hopeless), None)
        if waiting is not None:
            self._offer(waiting, drawn.n)
        yield from self._settled()

    def flush(self) -> Iterator[tuple[T, int | None]]:
        """Nothing more will come for these: yield every log that waits."""
        yield from self._settled()
        while self._queue:
            log = self._queue.popleft()
            # The one log of a short training has nothing to be compared with but the end.
            known = self._known or log.n == self._total
            yield log.item, log.n if log.n and known else self._by_proportion(log)

    @property
    def total(self) -> int | None:
        """The steps of the training, by its bar."""
        return self._total

    def _is_training(self, drawn: Bar) -> bool:
        """Whether this is the training's bar: undescribed, and the longest since one began."""
        if drawn.described or drawn.nested:
            return False
        if self._total is None or drawn.n == 0 or drawn.total > self._total:
            if drawn.total != self._total:
                self._known = None
            self._total = drawn.total
            self._barless = False
        return drawn.total == self._total

    def _offer(self, log: _Log[T], n: int) -> None:
        verdict = "agrees" if self._known is None else _verdict(self._known, n, log.epoch)
        if verdict == "agrees":
            log.n = n
        elif verdict == "high":
            log.hopeless = True
        # A low one is an old bar, seen late: the log's own is still to come.

    def _settled(self) -> Iterator[tuple[T, int | None]]:
        while self._queue:
            first = self._queue[0]
            if first.n is None and not first.hopeless:
                return
            if self._known is None and not self._compared(first):
                return
            self._queue.popleft()
            if first.n is not None:
                self._known = (first.n, first.epoch)
            yield first.item, first.n or self._by_proportion(first)

    def _by_proportion(self, log: _Log[T]) -> int | None:
        """The step at this log's epoch, if the numbers known so far leave no doubt of it."""
        if self._known is None:
            return None
        n, epoch = self._known
        exact = n / epoch * log.epoch
        doubt = 0.1 + exact * _EPOCH_ROUNDING
        return round(exact) if exact > n and abs(exact - round(exact)) + doubt < 0.5 else None

    def _compared(self, first: _Log[T]) -> bool:
        """Hold the first number against the second. False: there is no second yet."""
        if first.n is None:
            return True
        second = next((log for log in list(self._queue)[1:] if log.n is not None), None)
        if second is None or second.n is None:
            return False
        # Strictly in proportion, since all later numbers are held against this one.
        expected = first.n * second.epoch / first.epoch
        if abs(second.n - expected) > 0.4 + expected * _EPOCH_ROUNDING:
            first.n, first.hopeless = None, True
        return True


def _verdict(known: tuple[int, float], n: int, epoch: float) -> Literal["agrees", "low", "high"]:
    """Whether step n at this epoch fits what is known.

    Epochs are printed to four digits, and the last step of an epoch may be a short one: hence the
    tolerances, which a neighbouring log is outside of.
    """
    steps_per_epoch = known[0] / known[1]
    expected = steps_per_epoch * (epoch - known[1])
    slack = 0.6 + 0.1 * expected + steps_per_epoch * epoch * 1e-3
    if n <= known[0] or n - known[0] < expected - slack:
        return "low"
    return "agrees" if n - known[0] <= expected + slack else "high"
