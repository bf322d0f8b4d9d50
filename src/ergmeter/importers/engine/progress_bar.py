"""Gives the logs of transformers' Trainer their step numbers, from the progress bar beside them.

The Trainer redraws its bar right after each log, so the first bar after a log has its step. But the
bar goes to another stream and has no line end until it is redrawn. So the bar of the step before
may come first, or the log's own bar before the log.

A log therefore keeps the bars around it and takes the one in proportion to the epochs
(`EpochPace`). Where epochs are too coarse, it takes the bar at the usual stride. A log whose bar
was missed gets the number that the epochs imply, if that is unique. A bar may also never be
redrawn. Then each log comes right behind its bar, at a multiple of the stride between logs.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from ergmeter.importers.engine.parsed_line import ParsedLine

# Steps of an epoch. Steps and epochs grow together, so an epoch implies a range of steps. Epochs
# are printed rounded to two decimals (transformers before 5.0) or four digits. The last step of
# an epoch may hold fewer micro-batches, so each epoch may hold up to one step more than the
# proportion says.


_TWO_DECIMALS = 0.005
_FOUR_DECIMALS = 5e-5
_EXACT = 1e-9  # of floats


class Epoch:
    """A printed epoch, and the range it was rounded from."""

    __slots__ = ("high", "low", "value")

    def __init__(self, value: float, *, fine: bool) -> None:
        digit = 10.0 ** (math.floor(math.log10(value)) - 3)
        rounding = max(_FOUR_DECIMALS, digit / 2) if fine else max(_TWO_DECIMALS, digit / 2)
        self.value = value
        self.low, self.high = max(0.0, value - rounding), value + rounding


class EpochPace:
    """Estimates the steps per epoch from logs whose step and epoch are known."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high
        self._strides: deque[int] = deque(maxlen=2)
        self._n: int | None = None
        self.last: Epoch | None = None

    @classmethod
    def through(cls, points: Sequence[tuple[int, Epoch]]) -> EpochPace | None:
        """Return the pace that fits all these steps and epochs; None if none does."""
        bounds = [_bounds(n, epoch) for n, epoch in points]
        low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
        return cls(low, high) if low <= high * (1 + _EXACT) else None

    def steps(self, epoch: Epoch, total: int | None) -> range:
        """The range of steps at which this epoch may be printed."""
        low, high = self._low * epoch.low, self._high * epoch.high + math.floor(epoch.high)
        if self._n is not None and self.last is not None:
            turns = math.floor(epoch.high) - math.floor(self.last.low)
            low = max(low, self._n + 1, self._n + self._low * (epoch.low - self.last.high))
            high = min(high, self._n + self._high * (epoch.high - self.last.low) + turns)
        high = high if total is None else min(high, total)
        return range(math.ceil(low - _EXACT), math.floor(high + _EXACT) + 1)

    @property
    def next_regular(self) -> int | None:
        """The next step at the usual stride; None unless the last two strides were equal."""
        if self._n is None or len(self._strides) < 2 or self._strides[0] != self._strides[1]:
            return None
        return self._n + self._strides[0]

    @property
    def next_multiple(self) -> int | None:
        """The next step, if logs come at multiples of the last stride; else None."""
        stride = self._strides[-1] if self._strides else 0
        return self._n + stride if self._n and stride and self._n % stride == 0 else None

    def believe(self, n: int, epoch: Epoch) -> None:
        """Record that step `n` was at this epoch. Only unambiguous epochs narrow the pace."""
        if len(self.steps(epoch, None)) == 1:
            low, high = _bounds(n, epoch)
            low, high = max(low, self._low), min(high, self._high)
            if low <= high:
                self._low, self._high = low, high
        if self._n is not None:
            self._strides.append(n - self._n)
        self._n, self.last = n, epoch


def _bounds(n: int, epoch: Epoch) -> tuple[float, float]:
    """The least and the most steps per epoch with which step `n` is at this epoch."""
    high = n / epoch.low if epoch.low > 0 else math.inf
    return (n - math.floor(epoch.high)) / epoch.high, high


# tqdm bars. A bar with a description ("Map:", "Loading weights:") is not the training's. One that
# ends by moving the cursor up is drawn below another bar, as evaluation's is. A bar of epochs
# counts no steps. A narrow bar has no meter and a loop without a known end no total: `7/12
# [00:01<00:02`, `7it [00:01`.


_BAR = re.compile(
    r"(?:\d{1,3}%\|[^|]{0,400}\| ?(\d{1,15})/(\d{1,15}) \["
    r"|(?<![\w./-])(\d{1,15})(?:/(\d{1,15})|it) \[(?:\d{1,4}:)?\d\d:\d\d(?:<[\d:?]{1,10})?,)"
)
_ELAPSED = re.compile(r"\[(?:(\d{1,5}):)?(\d\d):(\d\d)(?=[<,\]])")
_CURSOR_UP = "\x1b[A"
_OTHER = re.compile(
    r"\b(?:eval|valid|val\b|test|predict|infer|epochs)|\bepoch\W*$", re.IGNORECASE
)  # what a bar is about if it is not about training steps; "Epoch 3:" is
_OTHER_UNIT = re.compile(r"epochs?/s\b|s/epochs?\b")


@dataclass(frozen=True, slots=True)
class Bar:
    """A drawn progress bar: n of total. `total` is None for a loop without a known end."""

    n: int
    total: int | None
    described: bool
    nested: bool
    of_steps: bool = True  # nothing says that it counts something else
    elapsed_s: float | None = None  # since it began, in whole seconds


def bar(text: str) -> Bar | None:
    """Return the progress bar in a line, if any; bars that count a file's bytes are ignored."""
    if "%|" not in text and " [" not in text:
        return None
    match = _BAR.search(text)
    if not match:
        return None
    before, after = text[: match.start()].replace(_CURSOR_UP, ""), text[match.end() :]
    described = any(letter.isalnum() for letter in before)
    nested = text.rstrip().endswith(_CURSOR_UP)
    of_steps = not (_OTHER.search(before) or _OTHER_UNIT.search(after))
    n, total = match[1] or match[3], match[2] or match[4]
    elapsed_s = _elapsed_s(text, match.start())
    return Bar(int(n), int(total) if total else None, described, nested, of_steps, elapsed_s)


def _elapsed_s(text: str, start: int) -> float | None:
    """The elapsed time: what is before the "<" of `[02:59<58:44, ...`."""
    match = _ELAPSED.search(text, start)
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600.0 + minutes * 60 + seconds


_LONGEST_WAIT = 6  # logs; a bar that is later than this is not coming
_ENOUGH = 3  # logs that settle the pace, if bars come in turn with them
_APART = 3  # steps between a log and the bars around it, at most, if both are of one training
_MISSES = 2  # in a row: the pace is wrong
_AROUND = 2  # bars after a log of which one should be its own
_MOST_AFTER = 64  # bars after a log
# What speaks against a choice of bars for the first logs: another bar after a log than the one that
# is its own if bars and logs come in turn, the last one before it, numbers that are no multiples of
# one stride, a log whose own bar was missed.
_OTHER_BAR, _BEFORE, _UNEVEN, _MISSED = 1, 3, 10, 20


_Reading = tuple[int, tuple[int | None, ...], EpochPace]


@dataclass(slots=True)
class _Log:
    line: ParsedLine
    epoch: Epoch
    before: int | None  # the last bar seen before it
    after: list[int] = field(default_factory=list)  # those seen since
    own: int | None = None  # the first of them that is not an earlier log's
    n: int | None = None

    def choices(self) -> list[tuple[int | None, int]]:
        """The bars that may belong to this log, each with a cost."""
        costs: dict[int | None, int] = {None: _MISSED, self.before: _BEFORE}
        costs |= dict.fromkeys(self.after[:_AROUND], _OTHER_BAR)
        if self.own is not None:
            costs[self.own] = 0
        return list(costs.items())


class BarSteps:
    """Gives logs their step numbers, in order, as far as bars and epochs determine them."""

    def __init__(self) -> None:
        self.total: int | None = None  # the steps of the training, by its bar
        self._barless = False  # there is no bar: nothing to wait for
        self._queue: deque[_Log] = deque()
        self._pace: EpochPace | None = None  # once the first logs agree on one
        self._missed = 0  # logs in a row that no bar around them confirmed
        self._last_bar: int | None = None
        self._fine = False  # epochs are printed to more than two decimals

    def log(self, line: ParsedLine) -> Iterator[ParsedLine]:
        """Take a printed log; yield the logs that no longer wait for a bar."""
        epoch = line.epoch
        if epoch is None or not math.isfinite(epoch) or epoch <= 0:
            yield from self.flush()
            yield line
            return
        if self._pace and self._pace.last and epoch < self._pace.last.value:
            yield from self.flush()
            self._pace = None
        self._fine |= round(epoch, 2) != epoch
        self._queue.append(_Log(line, Epoch(epoch, fine=self._fine), self._last_bar))
        if len(self._queue) > _LONGEST_WAIT:
            self._barless = self.total is None
            if self._pace is None:
                self._compare(final=True)
            yield self._popped()
        if self._barless:
            yield from self.flush()
        yield from self._settled()

    def draw(self, progress: Bar) -> Iterator[ParsedLine]:
        """Take a drawn bar; yield the logs whose step number is now known."""
        if not self._is_training(progress) or progress.n < 1:
            return
        self._last_bar = progress.n
        for log in self._queue:
            if len(log.after) < _MOST_AFTER and progress.n not in log.after:
                log.after.append(progress.n)
        if self._pace is None:
            self._hand_out(progress.n)
        yield from self._settled()

    def flush(self) -> Iterator[ParsedLine]:
        """Yield every waiting log: no more bars will come for them."""
        if self._pace is None:
            self._compare(final=True)
        yield from self._settled()
        while self._queue:
            log = self._queue[0]
            # The one log of a short training has nothing to be compared with but the end.
            if self._pace is None and log.own == self.total:
                log.n = self.total
            yield self._popped()

    @property
    def is_waiting(self) -> bool:
        """True if a log waits for its bar."""
        return bool(self._queue)

    def is_own(self, progress: Bar) -> bool:
        """True if this bar, which `draw` has already taken, is the training's."""
        return not progress.described and not progress.nested and progress.total == self.total

    def _is_training(self, progress: Bar) -> bool:
        """True if this is the training's bar: without a description, and the longest so far."""
        if progress.described or progress.nested or progress.total is None:
            return False
        if self.total is None or progress.n == 0 or progress.total > self.total:
            if progress.total != self.total:
                self._pace = None
            self.total, self._last_bar = progress.total, None
            self._barless = False
        return progress.total == self.total

    def _hand_out(self, n: int) -> None:
        """Give the bar to the first log that has none, and compare what the logs have now."""
        taken = max((log.own or 0 for log in self._queue), default=0)
        waiting = next((log for log in self._queue if log.own is None), None)
        if waiting is not None and n > taken:
            waiting.own = n
        if self._queue and len(self._queue[-1].after) <= _AROUND:
            self._compare(final=False)

    def _settled(self) -> Iterator[ParsedLine]:
        while self._queue and self._pace is not None:
            first = self._queue[0]
            if first.n is None and not self._decide(first, self._pace):
                return
            yield self._popped()

    def _decide(self, log: _Log, pace: EpochPace) -> bool:
        """Set a log's step number; False if the bar that has it may still come."""
        likely = pace.steps(log.epoch, self.total)
        if len(likely) == 1:
            wanted: int | None = likely[0]
        else:
            wanted = pace.next_regular if pace.next_regular in likely else None
        if wanted is not None and (wanted == log.before or wanted in log.after):
            log.n = wanted
            return True
        end = likely.stop if wanted is None else wanted + 1
        log.n = next((n for n in log.after if n in likely), None) if wanted is None else None
        # With a bar beyond it, its own was missed; a low one is an old bar, seen late.
        return log.n is not None or any(n >= end for n in log.after)

    def _popped(self) -> ParsedLine:
        """Remove the first log and return its line, numbered by its bar or else by its epoch."""
        log = self._queue.popleft()
        if self._pace is not None:
            if log.n is None:
                log.n = self._by_epochs(log, self._pace)
            near = any(abs(n - (log.n or 0)) <= _APART for n in (log.before or 0, *log.after))
            self._missed = 0 if near or not log.after else self._missed + 1
            if self._missed >= _MISSES:
                log.n = self._pace = None
            elif log.n is not None:
                self._pace.believe(log.n, log.epoch)
        log.line.number = log.n
        return log.line

    def _by_epochs(self, log: _Log, pace: EpochPace) -> int | None:
        likely = pace.steps(log.epoch, self.total)
        if len(likely) == 1:
            return likely[0]
        return next((n for n in (*log.after, pace.next_multiple) if n in likely), None)

    def _compare(self, *, final: bool) -> None:
        """Find the pace that best fits the first logs and the bars around them, if possible."""
        logs = [log for log in self._queue if final or self._heard(log)]
        if len(logs) < 2:
            return
        readings = list(self._readings(logs))
        if not readings:
            return
        _, numbers, pace = min(readings, key=lambda reading: reading[0])
        if final or len(logs) >= _ENOUGH:
            self._pace, self._missed = pace, 0
            for log, n in zip(logs, numbers, strict=True):
                log.n = n

    def _heard(self, log: _Log) -> bool:
        """True if the bars around a log have been seen."""
        return log.own is not None and (len(log.after) >= _AROUND or log.own == self.total)

    def _readings(self, logs: Sequence[_Log]) -> Iterator[_Reading]:
        """The ways to give each of these logs a bar at one pace, each with its cost."""
        for choice in product(*(log.choices() for log in logs)):
            against = sum(cost for _, cost in choice)
            chosen = [(n, log.epoch) for (n, _), log in zip(choice, logs, strict=True) if n]
            missed = len(logs) - len(chosen)
            if len(chosen) < 2 or (missed and against > missed * _MISSED):
                continue
            pace = EpochPace.through(chosen)
            if pace is None or any(b[0] <= a[0] for a, b in pairwise(chosen)):
                continue
            against += 0 if _even([n for n, _ in chosen]) else _UNEVEN
            yield against, tuple(n for n, _ in choice), pace


def _even(numbers: Sequence[int]) -> bool:
    """True if the numbers are consecutive multiples of one stride, as those of logs are."""
    strides = {later - earlier for earlier, later in pairwise(numbers)}
    return len(strides) == 1 and numbers[0] % strides.pop() == 0
