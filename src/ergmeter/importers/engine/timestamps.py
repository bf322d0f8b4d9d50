"""The clock of a log file: its timestamps, its step times, or its progress bar.

The three never mix. They count from different zeros; summed step times leave out evaluations, and a
bar's time is in whole seconds. The clock of the first step line is used for all, and a mark says
which it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Literal

from ergmeter.importers.engine.pairs import plain
from ergmeter.importers.engine.parsed_line import ParsedLine
from ergmeter.records import Mark
from ergmeter.units import NS_PER_S

# Timestamps of lines. A line without one has no time: a file's date or the reader's clock never
# stands in. Values count from 1970, so they are wall-clock time; only differences within one log
# are used. A stamp without a zone is read as UTC, one without a year as of 2000, one without a
# date as of 2000-01-01.


_REACH = 200  # a log's stamp stands near the start of its line
_CLOCK = r"(\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(?!\d)"
_ISO = re.compile(rf"(?<!\d)(\d{{4}}[-/]\d\d[-/]\d\d)[ T_]{_CLOCK}(Z|[+-]\d\d:?\d\d(?!\d))?")
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_NO_YEAR = "2000"  # a leap year: the 29th of February has its place
# Above this and below a day later, a stamp had no date.
_DATELESS_S = 946_684_800
_S_PER_DAY = 86_400


def _slashed(match: re.Match[str]) -> str:
    """Rewrite `06/10/2025` (month first) or `25/06/10` (year first: above 12) as an ISO date."""
    first, second, third = match[1], match[2], match[3]
    if len(third) == 4:
        month, day, year = first, second, third
    elif int(first) > 12:
        year, month, day = f"20{first}", second, third
    else:
        month, day, year = first, second, f"20{third}"
    if int(month) > 12:
        month, day = day, month
    return f"{year}-{month}-{day}"


def _named_month(match: re.Match[str]) -> str:
    month = _MONTHS.index(match[1]) // 3 + 1
    return f"{match[5] or _NO_YEAR}-{month:02d}-{int(match[2]):02d}"


# Each with the groups of its clock and fraction, and how its date is spelt.
_OTHERS: tuple[tuple[re.Pattern[str], int, Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"(?<![\d/])(\d\d)/(\d\d)/(\d{{4}}|\d\d)[ ,]{{1,2}}{_CLOCK}"), 4, _slashed),
    (re.compile(rf"(?<!\w)[IWEF](\d\d)(\d\d) {_CLOCK}"), 3, lambda m: f"{_NO_YEAR}-{m[1]}-{m[2]}"),
    (
        re.compile(
            r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s{1,2}(\d{1,2}) "
            rf"{_CLOCK}(?: (\d{{4}})\b)?"
        ),
        3,
        _named_month,
    ),
    (re.compile(rf"^[\[(]?{_CLOCK}(?=[\]):,\s])"), 1, lambda _: f"{_NO_YEAR}-01-01"),
)
_COMPACT = re.compile(r"(?<!\d)(\d{4}-\d\d-\d\d)[-_](\d\d)(\d\d)(\d\d)(?!\d)")


def stamp_ns(text: str) -> int | None:
    """The timestamp in a line: `2026-11-15 10:00:00,123` with T, a fraction or a zone,
    `11/15/2026 10:00:00`, `I1115 10:00:00.123456`, `Nov 15 10:00:00`, `[10:00:00]`."""
    text = text[:_REACH]
    match = _ISO.search(text)
    if match:
        day, clock, fraction, zone = match.groups()
        return _ns(day.replace("/", "-"), clock, fraction, zone or "Z")
    if ":" not in text and "-" not in text:
        return None
    text = plain(text).lstrip()
    for pattern, at, date in _OTHERS:
        if match := pattern.search(text):
            return _ns(date(match), match[at], match[at + 1], "Z")
    if match := _COMPACT.search(text):
        return _ns(match[1], f"{match[2]}:{match[3]}:{match[4]}", None, "Z")
    return None


def _ns(day: str, clock: str, fraction: str | None, zone: str) -> int | None:
    second = _epoch_s(day, clock, zone)
    return None if second is None else second * NS_PER_S + int((fraction or "0").ljust(9, "0"))


@lru_cache(maxsize=64)
def _epoch_s(day: str, clock: str, zone: str) -> int | None:
    try:
        return int(datetime.strptime(f"{day} {clock}{zone}", "%Y-%m-%d %H:%M:%S%z").timestamp())
    except ValueError:
        return None


Clock = Literal["stamps", "step times", "bar"]
_EARLIEST_S, _LATEST_S = 946_684_800, 4_102_444_800  # 2000 and 2100: outside, it is no date
_DAY_NS = _S_PER_DAY * NS_PER_S
_CLOCK_NOTES: dict[Clock, str] = {
    "stamps": "times are the log's own timestamps",
    "step times": "the log has no timestamps: times are its step times added up, each multiplied "
    "by the steps its line covers",
    "bar": "the log has no timestamps: times are its progress bar's own, in whole seconds",
}
_NOT_BY_STAMPS = (
    "nothing says how many steps lie between two of the log's timestamps: times are its step times "
    "added up"
)
_DATELESS = "times are the log's own timestamps, which have no date"


def epoch_ns(value: float) -> int | None:
    """Return a printed `timestamp` (seconds or milliseconds since 1970) in ns; None if absurd."""
    seconds = value / 1000 if value >= _LATEST_S else value
    return round(seconds * NS_PER_S) if _EARLIEST_S <= seconds <= _LATEST_S else None


class BarClock:
    """A clock made of progress bars: a bar that begins again continues the time of the last one."""

    def __init__(self) -> None:
        self._before_ns = 0  # by the bars before this one
        self._last_ns = 0

    def time(self, elapsed_s: float) -> int:
        """Return the clock's time for a bar with this elapsed time."""
        elapsed_ns = round(elapsed_s * NS_PER_S)
        if self._before_ns + elapsed_ns < self._last_ns:
            self._before_ns = self._last_ns
        self._last_ns = self._before_ns + elapsed_ns
        return self._last_ns


class FileClock:
    """Finds the time of each step line in a file."""

    def __init__(self) -> None:
        self.kind: Clock | None = None
        self.is_dated = True  # its stamps say which day it was
        self._ns = 0  # the sum so far, or the days
        self._last_ns = 0
        self._bars = BarClock()
        self._number: int | None = None
        self.is_untold = True  # the mark with the source of the times is not yet made
        self.leaves_stamps = False  # the log has timestamps, but step times are the clock

    def time(
        self, text: str, parsed: ParsedLine, printed_ns: int | None, *, sums_step_times: bool
    ) -> int | None:
        """When this line was written, or None if that is unknown.

        `printed_ns`: a time that the line prints under a name such as `timestamp`."""
        if sums_step_times and self.kind is None:
            self.leaves_stamps = stamp_ns(text) is not None
        if sums_step_times:
            text = ""
        stamp = printed_ns
        if stamp is None and self.kind in (None, "stamps"):
            stamp = stamp_ns(text)
        if self.kind is None:
            self.kind = _kind(stamp, parsed)
        if self.kind == "stamps":
            return None if stamp is None else self._stamped(stamp)
        if self.kind == "bar":
            return None if parsed.elapsed_s is None else self._bars.time(parsed.elapsed_s)
        return self._sum(parsed) if self.kind == "step times" else None

    def begin_again(self) -> None:
        """Call when another run begins: its step numbers do not continue those of the last."""
        self._number = None

    def assumed_again(self, t_ns: int) -> Iterator[Mark]:
        """Yields a mark with the source of the times, for the first run or a further one."""
        if self.kind is not None:
            self.is_untold = False
            note = _CLOCK_NOTES[self.kind] if self.is_dated else _DATELESS
            yield Mark(t_ns, "assumed", _NOT_BY_STAMPS if self.leaves_stamps else note)

    def _stamped(self, stamp_ns: int) -> int:
        """Return the timestamp; in a log with times of day only, add a day at each midnight."""
        if _DATELESS_S <= stamp_ns / NS_PER_S < _DATELESS_S + _S_PER_DAY:
            self.is_dated = False
            stamp_ns += self._ns
            if stamp_ns < self._last_ns - _DAY_NS // 2:
                stamp_ns += _DAY_NS
                self._ns += _DAY_NS
            self._last_ns = stamp_ns
        return stamp_ns

    def _sum(self, parsed: ParsedLine) -> int | None:
        if parsed.own_s is None:
            return None
        last, self._number = self._number, parsed.number
        steps = None if last is None else 0 if parsed.number == last else parsed.steps_since(last)
        self._ns += round(parsed.own_s * NS_PER_S) * (1 if steps is None else steps)
        return self._ns


def _kind(stamp: int | None, parsed: ParsedLine) -> Clock | None:
    if stamp is not None:
        return "stamps"
    if parsed.own_s:
        return "step times"
    return "bar" if parsed.elapsed_s is not None else None
