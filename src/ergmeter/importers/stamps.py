"""When was this line of a log written, by its own account?

The trap: a file's date or the reader's clock in place of the missing time. A line without a
timestamp has none here. Values count from 1970, so they are wall-clock, not monotonic time; within
one log only differences are used. A stamp without a zone is read as UTC, one without a year as of
2000, and one without a date as of that year's first day.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import lru_cache

from ergmeter.importers.labels import plain
from ergmeter.units import NS_PER_S

_REACH = 200  # a log's stamp stands near the start of its line
_CLOCK = r"(\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(?!\d)"
_ISO = re.compile(rf"(?<!\d)(\d{{4}}[-/]\d\d[-/]\d\d)[ T_]{_CLOCK}(Z|[+-]\d\d:?\d\d(?!\d))?")
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_NO_YEAR = "2000"  # a leap year: the 29th of February has its place
# Above this and below a day later, a stamp had no date.
DATELESS_S = 946_684_800
S_PER_DAY = 86_400


def _slashed(match: re.Match[str]) -> str:
    """`06/10/2025`, month first; `25/06/10`, year first, as a month is none above 12."""
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


def is_dateless(t_ns: int) -> bool:
    """Whether a stamp had a time of day and no date."""
    return DATELESS_S <= t_ns / NS_PER_S < DATELESS_S + S_PER_DAY


def _ns(day: str, clock: str, fraction: str | None, zone: str) -> int | None:
    second = _epoch_s(day, clock, zone)
    return None if second is None else second * NS_PER_S + int((fraction or "0").ljust(9, "0"))


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
    return whole.days * S_PER_DAY + whole.seconds
