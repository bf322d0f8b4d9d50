"""What is the clock of a log file: its stamps, its step times, or its progress bar?

The trap: two of them in one figure. They do not count from the same zero, nor the same things: a
sum of step times has no evaluations in it, a bar's own time is in whole seconds. Whichever the
first step line has is kept for all, and a mark says which it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ergmeter.importers.seen import Seen
from ergmeter.importers.stamps import S_PER_DAY, is_dateless, stamp_ns
from ergmeter.records import Mark
from ergmeter.units import NS_PER_S

Clock = Literal["stamps", "step times", "bar"]
_EARLIEST_S, _LATEST_S = 946_684_800, 4_102_444_800  # 2000 and 2100: outside, it is no date
_DAY_NS = S_PER_DAY * NS_PER_S
_TOLD: dict[Clock, str] = {
    "stamps": "times are the log's own timestamps",
    "step times": "the log has no timestamps: times are its step times added up, each taken "
    "times the steps its line covers",
    "bar": "the log has no timestamps: times are its progress bar's own, in whole seconds",
}
_NOT_BY_STAMPS = (
    "nothing says how many steps lie between two of the log's timestamps: times are its step times "
    "added up"
)
_DATELESS = "times are the log's own timestamps, which have no date"


def epoch_ns(value: float) -> int | None:
    """A number under a name such as `timestamp`: seconds or milliseconds since 1970."""
    seconds = value / 1000 if value >= _LATEST_S else value
    return round(seconds * NS_PER_S) if _EARLIEST_S <= seconds <= _LATEST_S else None


class BarClock:
    """The time that progress bars took: one that begins again goes on where the last one was."""

    def __init__(self) -> None:
        self._before_ns = 0  # by the bars before this one
        self._last_ns = 0

    def time(self, elapsed_s: float) -> int:
        """When a bar was drawn that says this of itself."""
        elapsed_ns = round(elapsed_s * NS_PER_S)
        if self._before_ns + elapsed_ns < self._last_ns:
            self._before_ns = self._last_ns
        self._last_ns = self._before_ns + elapsed_ns
        return self._last_ns


class FileClock:
    """The time of a step line in a file."""

    def __init__(self) -> None:
        self.kind: Clock | None = None
        self.is_dated = True  # its stamps say which day it was
        self._ns = 0  # the sum so far, or the days
        self._last_ns = 0
        self._bars = BarClock()
        self._number: int | None = None
        self.is_untold = True  # where the times come from
        self.leaves_stamps = False  # there are some, and step times are the clock

    def time(self, text: str, seen: Seen, *, sums_step_times: bool = False) -> int | None:
        """When this line was written, or None if it does not say."""
        if sums_step_times and self.kind is None:
            self.leaves_stamps = stamp_ns(text) is not None
        if sums_step_times:
            text = ""
        stamp = seen.stamp_ns
        if stamp is None and self.kind in (None, "stamps"):
            stamp = stamp_ns(text)
        if self.kind is None:
            self.kind = _kind(stamp, seen)
        if self.kind == "stamps":
            return None if stamp is None else self._stamped(stamp)
        if self.kind == "bar":
            return self._by_bar(seen)
        return self._sum(seen) if self.kind == "step times" else None

    def begin_again(self) -> None:
        """Another run begins: its step numbers say nothing about how far the last one was."""
        self._number = None

    def told(self, t_ns: int | None) -> Iterator[Mark]:
        """Say once, with the first time there is, where the times come from."""
        if t_ns is not None and self.is_untold:
            yield from self.told_again(t_ns)

    def told_again(self, t_ns: int) -> Iterator[Mark]:
        """Say it of a further run."""
        if self.kind is not None:
            self.is_untold = False
            told = _TOLD[self.kind] if self.is_dated else _DATELESS
            yield Mark(t_ns, "assumed", _NOT_BY_STAMPS if self.leaves_stamps else told)

    def _stamped(self, stamp_ns: int) -> int:
        """The stamp; of a log that has only times of day, midnight begins another day."""
        if is_dateless(stamp_ns):
            self.is_dated = False
            stamp_ns += self._ns
            if stamp_ns < self._last_ns - _DAY_NS // 2:
                stamp_ns += _DAY_NS
                self._ns += _DAY_NS
            self._last_ns = stamp_ns
        return stamp_ns

    def _by_bar(self, seen: Seen) -> int | None:
        return None if seen.elapsed_s is None else self._bars.time(seen.elapsed_s)

    def _sum(self, seen: Seen) -> int | None:
        if seen.own_s is None:
            return None
        last, self._number = self._number, seen.number
        steps = None if last is None else 0 if seen.number == last else seen.steps_since(last)
        self._ns += round(seen.own_s * NS_PER_S) * (1 if steps is None else steps)
        return self._ns


def _kind(stamp: int | None, seen: Seen) -> Clock | None:
    if stamp is not None:
        return "stamps"
    if seen.own_s:
        return "step times"
    return "bar" if seen.elapsed_s is not None else None
