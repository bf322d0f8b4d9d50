"""Did a sequence of step numbers stop for another one, and then go on?

Two programs with buffered output print in blocks: 1 to 80, the other's 1 to 80, then 81 to 160. So
does a loop whose evaluation counts steps of its own. The trap: within a block the numbers only rise
and between two they fall to 1, as epochs do. What epochs never do is to go on where an earlier run
of numbers stopped, after another run.
"""

from __future__ import annotations

from collections import deque

LEAP = 2  # times the usual stride: a number that is further off is no successor
_RUN = 3  # numbers; fewer in turn are judged by how often they fall


class Runs:
    """Watches where runs of evenly rising numbers stop.

    Evenly, since numbers that are printed now and then leap, and land anywhere.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._stride = 0  # of the run
        self._length = 1  # of the run; 0: it was not even
        self._stopped: deque[int] = deque(maxlen=8)

    def resumes(self, number: int) -> bool:
        """Take the next number. True if it goes on where an earlier run stopped for another."""
        last, self._last = self._last, number
        if last is None or number == last:
            return False
        stride = number - last
        if stride > 0 and self._length == 1:
            self._stride = stride
        if 0 < stride <= LEAP * self._stride:
            self._length = self._length + 1 if stride == self._stride and self._length else 0
            return False
        even, self._length = self._length >= _RUN, 1
        found = even and number - self._stride in self._stopped
        if even and stride < 0:
            self._stopped.append(last)
        return found
