"""Is this the next step, the same one again, or another run?

For programs whose step numbers count the whole training. A bar is drawn many times for one step,
and ranks that do not name themselves print each step in turn, now and then out of order. The trap:
taking such a line for a restart, or a restart for such a line. A number below the last is another
run, unless it is the one just before, not the first of the run, and comes sooner than a next step.
"""

from __future__ import annotations

from typing import Literal

from ergmeter.importers.stamps import stamp_ns
from ergmeter.ports import Line

Verdict = Literal["next", "again", "restart"]


class Numbering:
    """Judges the numbers of one output as they come."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._before: tuple[int, Line] | None = None  # the number before the last, and its line
        self._last: tuple[int, Line] | None = None

    @property
    def last(self) -> int | None:
        """The number of the last step."""
        return self._last[0] if self._last else None

    def judge(self, number: int, line: Line) -> Verdict:
        """Take the next number, and the line it stands in."""
        if self._last is None:
            self._first, self._last = number, (number, line)
            return "next"
        if number == self._last[0] or self._is_late(number, line):
            return "again"
        if number > self._last[0]:
            self._before, self._last = self._last, (number, line)
            return "next"
        self._first, self._before, self._last = number, None, (number, line)
        return "restart"

    def _is_late(self, number: int, line: Line) -> bool:
        """Whether this is the line of a rank that was slow to print the step before."""
        if self._before is None or self._last is None or number == self._first:
            return False
        if number != self._before[0]:
            return False
        times = [_t_ns(one) for one in (self._before[1], self._last[1], line)]
        before_ns, last_ns, now_ns = times
        if before_ns is None or last_ns is None or now_ns is None:
            return True
        return now_ns - last_ns < max(last_ns - before_ns, 1)


def _t_ns(line: Line) -> int | None:
    return stamp_ns(line.text) if line.t_ns is None else line.t_ns
