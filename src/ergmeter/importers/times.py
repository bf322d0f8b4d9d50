"""When was this line of a log file written, by its own account?

The trap: a file's date or the reader's clock in place of the missing time. A line without a
timestamp has none here. Values count from 1970, so they are wall-clock, not monotonic time; within
one log only differences are used, and a stamp without a zone is read as UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Literal

from ergmeter.importers.seen import Seen
from ergmeter.records import Mark
from ergmeter.units import NS_PER_S

_STAMP = re.compile(
    r"(?<!\d)(\d{4}[-/]\d\d[-/]\d\d)[ T_](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(?!\d)"
    r"(Z|[+-]\d\d:?\d\d(?!\d))?"
)
_STAMP_REACH = 200  # a log's stamp stands near the start of its line
_EARLIEST_S, _LATEST_S = 946_684_800, 4_102_444_800  # 2000 and 2100: outside, it is no date


def stamp_ns(text: str) -> int | None:
    """The timestamp in a line: `2026-11-15 10:00:00,123`, with T, a fraction or a zone."""
    match = _STAMP.search(text[:_STAMP_REACH])
    if not match:
        return None
    day, clock, fraction, zone = match.groups()
    second = _epoch_s(day.replace("/", "-"), clock, zone or "Z")
    return None if second is None else second * NS_PER_S + int((fraction or "0").ljust(9, "0"))


def epoch_ns(value: float) -> int | None:
    """A number under a name such as `timestamp`: seconds or milliseconds since 1970."""
    seconds = value / 1000 if value >= _LATEST_S else value
    return round(seconds * NS_PER_S) if _EARLIEST_S <= seconds <= _LATEST_S else None


class FileClock:
    """The time of a step line in a file: its stamp or, in a log without stamps, its step times
    added up. Whichever comes first is kept: the two do not count from the same zero.
    """

    def __init__(self) -> None:
        self._kind: Literal["stamps", "sums"] | None = None
        self._sum_ns = 0
        self._number: int | None = None
        self._untold = True

    def time(self, text: str, stamp: int | None, seen: Seen) -> int | None:
        """When this line was written, or None if it does not say."""
        stamp = stamp_ns(text) if stamp is None else stamp
        if self._kind is None:
            self._kind = "stamps" if stamp is not None else "sums" if seen.own_s else None
        if self._kind == "stamps":
            return stamp
        return self._sum(seen) if self._kind == "sums" else None

    def told(self, t_ns: int | None) -> Iterator[Mark]:
        """Say once, with the first time there is, where the times come from."""
        if self._kind is not None and t_ns is not None and self._untold:
            self._untold = False
            told = {
                "stamps": "times are the log's own timestamps",
                "sums": "the log has no timestamps: times are its step times added up, each taken "
                "times the steps its line covers",
            }[self._kind]
            yield Mark(t_ns, "assumed", told)

    def _sum(self, seen: Seen) -> int | None:
        if seen.own_s is None:
            return None
        last, self._number = self._number, seen.number
        steps = 1 if last is None or seen.number is None else seen.number - last
        self._sum_ns += round(seen.own_s * NS_PER_S) * (1 if steps < 0 else steps)
        return self._sum_ns


@lru_cache(maxsize=64)
def _epoch_s(day: str, clock: str, zone: str) -> int | None:
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    offset = timedelta()
    if zone != "Z":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
        offset = -offset if zone[0] == "-" else offset
    whole = moment - datetime(1970, 1, 1, tzinfo=timezone.utc) - offset
    return whole.days * 86_400 + whole.seconds
