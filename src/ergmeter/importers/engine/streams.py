"""Detects step lines of several programs, or of several ranks, in one output.

Read as one sequence, 5, 1005, 6, 1006 has a step of a thousand in every other line, and 5, 5, 6, 6
has half the tokens. So the numbers are watched. Epochs that begin again at 1 are no mixture: they
fall once for each restart, while mixed numbers fall far more often. A program with two log handlers
prints each line twice and is still one program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol, TypeVar

from ergmeter.units import NS_PER_S

# Runs of step numbers. Two programs with buffered output print in blocks: 1 to 80, the other's 1
# to 80, then 81 to 160. So does a loop whose evaluation counts its own steps. Within a block
# numbers rise and between blocks they fall to 1, as with epochs. But epochs never go on where an
# earlier run of numbers stopped.


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
        resumed = even and number - self._stride in self._stopped
        if even and stride < 0:
            self._stopped.append(last)
        return resumed


_WATCHED = 24  # numbers looked at together; two programs show within 7, sixteen ranks within 19
_EXCESS = 2  # falls and repeats beyond those of as many restarts: out of order once is no proof
_FIRST = 6  # the first lines wait, since a wrong Step can't be taken back,
_FIRST_WAIT_NS = NS_PER_S  # but no longer than this, unless
_DOUBTED = 20  # one of them fell or came again: then until so many were seen, or
_MOST = 100  # lines wait at all: those that name no number could be without end
_CLEAN = 4  # so many rose one after the other, as the numbers of four programs in turn do not

SEVERAL = (
    "step lines of several programs, ranks or loops are mixed in this output ({}): "
    "ergmeter can't tell their steps apart; record them one by one, or use ergmeter.Meter in each"
)
TWICE = (
    "step lines came twice with the same figures: each counts once, as of one program that prints "
    "it twice; if they are of two ranks, the tokens are those of one"
)


class Numbered(Protocol):
    """The facts about a step line that are needed here."""

    @property
    def t_ns(self) -> int:
        """When it was seen."""

    @property
    def number(self) -> int | None:
        """The step it names."""

    @property
    def epoch(self) -> float | None:
        """The epoch it names."""

    @property
    def is_bar(self) -> bool:
        """Whether it is a progress bar, which comes again and again."""

    @property
    def says(self) -> frozenset[str]:
        """The names of its figures: two lines about one step say different things."""

    @property
    def figures(self) -> tuple[str, ...]:
        """All its figures but the number: names and values."""


T = TypeVar("T", bound=Numbered)


class StepStreams:
    """Judges step lines in order, until they are found to be of several programs."""

    def __init__(self) -> None:
        self.mixed = False
        self._runs = Runs()
        self._last: Numbered | None = None
        self._before: Numbered | None = None  # the last line of the number before
        self._doubled = False  # the last line has come twice
        self._watched: deque[tuple[float, int]] = deque(maxlen=_WATCHED)
        self._epoch = 0.0
        self._step_names: set[frozenset[str]] = (
            set()
        )  # what its lines said, where the last number has several
        self._lines = 0
        self._rose = 0  # lines since one fell or came again
        self._suspect = False

    def mixes(self, line: Numbered) -> bool:
        """Take the next line. True once the lines can't be those of one program."""
        if line.number is None or self.mixed:
            return self.mixed
        self._epoch = self._epoch if line.epoch is None else line.epoch
        at = (self._epoch, line.number)
        again = bool(self._watched) and at == self._watched[-1]
        if again:
            self._step_names = self._step_names or {_says(self._last)}
        else:
            self._before, self._step_names = self._last, set()
        self._last, self._doubled = line, False
        if again and (line.is_bar or line.says not in self._step_names):
            self._step_names.add(line.says)
            return False  # more about the same step
        self._lines += 1
        fell = bool(self._watched) and at <= self._watched[-1]
        self._watched.append(at)
        self._rose = 0 if fell else self._rose + 1
        self._suspect |= fell and self._lines <= _FIRST
        self._suspect &= self._rose < _CLEAN and self._lines < _DOUBTED
        resumed = not line.is_bar and self._runs.resumes(line.number)
        self.mixed = resumed or (fell and _excess(list(self._watched)) >= _EXCESS)
        return self.mixed

    def doubles(self, line: Numbered) -> bool:
        """Whether the line is the one before it, printed a second time.

        Ranks may say the same too, where nothing they say changes; and a third is a rank's.
        """
        if not self._watched or line.is_bar or self._doubled:
            return False
        epoch = self._epoch if line.epoch is None else line.epoch
        if (epoch, line.number) != self._watched[-1]:
            return False
        figures, before = line.figures, _figures(self._before)
        self._doubled = bool(figures) and figures == _figures(self._last) and figures != before
        self._suspect |= self._doubled and self._lines == 1
        return self._doubled

    @property
    def numbers(self) -> str:
        """The last numbers, for a message."""
        last = ", ".join(str(number) for _, number in list(self._watched)[-4:])
        return f"numbers such as {last}"

    @property
    def began(self) -> bool:
        """Whether a line was seen."""
        return self._lines > 0

    @property
    def doubted(self) -> bool:
        """Whether one of the first lines fell or came again, and too few came since to judge."""
        return self._suspect

    @property
    def judged(self) -> bool:
        """Whether enough lines were seen to hand on the next as they come."""
        return self._lines >= _FIRST


class Waiting(deque[T]):
    """The lines that wait to be judged. A leap among them waits for the next line."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = StepStreams()
        self.twice = False  # lines came twice, and were dropped once
        self._strides: deque[int] = deque(maxlen=8)
        self._last: int | None = None
        self._leap: tuple[T, int] | None = None  # the line, and the number before it

    def take(self, line: T) -> Iterator[T]:
        """A line came. Yields those that need wait no longer; none once they are mixed."""
        if self.streams.doubles(line):
            self.twice = True
            return
        if self.streams.mixes(line):
            self.clear()
            return
        if line.number is not None:
            self._judge_leap(line.number)
        self.append(line)
        if line.number is not None:
            self._follow(line, line.number)
        yield from self.tick(line.t_ns)

    def tick(self, t_ns: int) -> Iterator[T]:
        """Time went on."""
        while self:
            young = t_ns - self[0].t_ns < _FIRST_WAIT_NS and not self.streams.judged
            leapt = self._leap is not None and self._leap[0] is self[0]
            if (self.streams.doubted or young or leapt) and len(self) <= _MOST:
                return
            yield self.popleft()

    def finish(self) -> Iterator[T]:
        """Nothing more will come: yield all that wait."""
        while self:
            yield self.popleft()

    def _judge_leap(self, number: int) -> None:
        """The number after a leap tells whether it was one: 5, 1005, 6 is another's line."""
        if self._leap is None or number == self._last:
            return
        (line, before), self._leap = self._leap, None
        if self._last is not None and before < number < self._last:
            leapt = self._last
            others = [
                pending for pending in self if pending.number != leapt or pending.t_ns < line.t_ns
            ]
            self.clear()
            self.extend(others)
            self._last = before
        elif self._last is not None:
            self._strides.append(self._last - before)

    def _follow(self, line: T, number: int) -> None:
        last, self._last = self._last, number
        if last is None or number <= last:
            return
        if number - last > LEAP * max(self._strides, default=1):
            self._leap = self._leap or (line, last)
        else:
            self._strides.append(number - last)


def _says(line: Numbered | None) -> frozenset[str]:
    return frozenset() if line is None else line.says


def _figures(line: Numbered | None) -> tuple[str, ...]:
    return () if line is None else line.figures


def _excess(numbers: list[tuple[float, int]]) -> int:
    """How many falls and repeats there are beyond what restarts of one sequence explain.

    Sequences that each begin again fall once for each further one. As few as cover the numbers,
    taken in any order, is the length of the longest part that never rises.
    """
    falls = sum(later <= earlier for earlier, later in pairwise(numbers))
    ends: list[tuple[float, int]] = []  # negated, so that never rising is never falling
    for epoch, number in numbers:
        at = (-epoch, -number)
        position = bisect_right(ends, at)
        ends[position : position + 1] = [at]
    return falls - (len(ends) - 1)
