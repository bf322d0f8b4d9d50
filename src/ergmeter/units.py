"""Scale factors for input, and formatting for output. Values in memory are in base units.

MB and GB are decimal, MiB and GiB binary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeVar

_Key = TypeVar("_Key")
_Member = TypeVar("_Member")
NS_PER_S = 1_000_000_000
W_PER_MW = 1e-3  # NVML reports milliwatts
J_PER_MJ = 1e-3  # and millijoules
J_PER_UJ = 1e-6  # RAPL reports microjoules
HZ_PER_MHZ = 1e6
J_PER_WH = 3600.0
J_PER_KWH = 3.6e6
NO_UNIT = "1"  # a loss or a ratio

BARS = "▁▂▃▄▅▆▇█"
_SI = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]


def significant(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits, without an exponent if possible.

    >>> significant(0.0123456), significant(1234567.0), significant(17.0)
    ('0.01235', '1234567', '17')
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - magnitude)
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ratio_text(value: float, *, decimals: int = 3) -> str:
    """A ratio, with more decimals where they are needed to differ from 1 or 0.

    >>> ratio_text(1.31), ratio_text(1.00004), ratio_text(0.0001234)
    ('1.310', '1.00004', '0.000123')
    """
    if not 0.1 <= value < 10:
        return significant(value, 3)
    apart = abs(value - 1.0)
    if 0.0 < apart < 0.5 * 10.0**-decimals:
        decimals = min(12, -math.floor(math.log10(apart)))
    return f"{value:.{decimals}f}"


def percent(share: float, *, decimals: int = 1) -> str:
    """A share in percent. A share that would read as 0 gets two significant digits instead.

    >>> percent(0.4207), percent(0.000123), percent(12.5)
    ('42.1 %', '0.012 %', '1,250 %')
    """
    value = 100 * share
    if value >= 1000:
        return f"{value:,.0f} %"
    text = f"{value:.{decimals}f}"
    return f"{significant(value, 2) if value and not float(text) else text} %"


def number_of(count: int, noun: str) -> str:
    """A count and its noun, plural if needed.

    >>> number_of(1, "device"), number_of(12_000, "step")
    ('1 device', '12000 steps')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def tallied(names: Iterable[str]) -> str:
    """Each name once, with its count.

    >>> tallied(["H200", "H200", "A100"])
    '2 x H200, 1 x A100'
    """
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def listed_by(pairs: Iterable[tuple[_Key, _Member]]) -> dict[_Key, list[_Member]]:
    """Collect (key, value) pairs into a list of values per key, in order."""
    lists: dict[_Key, list[_Member]] = {}
    for key, member in pairs:
        lists.setdefault(key, []).append(member)
    return lists


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Collect (key, value) pairs into a list of distinct values per key: names by shared reason.

    >>> grouped([("no GPU", "power"), ("no GPU", "memory")])
    {'no GPU': ['power', 'memory']}
    """
    return listed_by(dict.fromkeys(pairs))


def printable(text: str) -> str:
    """A text on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def si_prefix(size: float) -> tuple[float, str]:
    """Return the factor and letter of the largest SI prefix, up to tera, for a size.

    >>> si_prefix(7e6), si_prefix(0.5)
    ((1000000.0, 'M'), (1.0, ''))
    """
    return next((pair for pair in _SI if size >= pair[0]), (1.0, ""))


def scaled(value: float, unit: str, *, beside: float | None = None) -> str:
    """A value with an SI prefix that fits it; `beside`: another value whose prefix is used.

    >>> scaled(1.5e9, "B"), scaled(1.5e9, "B", beside=7e6)
    ('1.5 GB', '1500 MB')
    """
    factor, prefix = si_prefix(abs(value if beside is None else beside))
    return f"{significant(value / factor)} {prefix}{unit}".rstrip()


def duration(seconds: float) -> str:
    """A duration in its usual unit: 16.3 ms, 4.21 s, 2 h 03 min."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1e-3:
        return f"{significant(seconds * 1e6, 3)} µs"
    if seconds < 1:
        return f"{significant(seconds * 1e3, 3)} ms"
    if seconds < 120:
        return f"{significant(seconds, 3)} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


def sparkline(values: Iterable[float], cells: int) -> str:
    """A curve in at most `cells` bars, each the mean of equally many finite values.

    The lowest mean is the lowest bar, the highest the highest. "" for fewer than two values.

    >>> sparkline([0, 1, 2, 7], 10)
    '▁▂▃█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    parts = min(cells, len(finite))
    edges = [len(finite) * part // parts for part in range(parts + 1)]
    means = [math.fsum(finite[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, height = min(means), max(means) - min(means)
    levels = [(mean - low) / height if height else 0.0 for mean in means]
    return "".join(BARS[round(level * (len(BARS) - 1))] for level in levels)


def in_unit(number: float, unit: str, *, beside: float) -> str:
    """A number in a readable unit, with the SI prefix that fits the value `beside`."""
    if unit == "s":
        return duration(number)
    if unit == "frac":
        return f"{significant(number * 100, 3)} %"
    if unit in ("B", "B/s", "B/h", "Hz", "J", "g", "FLOP/s", "FLOP/token"):
        return scaled(number, unit, beside=beside)
    if unit == "cores":
        return f"{significant(number, 3)} of a core" if number < 1 else f"{number:.2f} cores"
    if unit in ("tokens", "steps"):
        return f"{number:,.0f} {unit}"
    text = f"{number:,.0f}" if abs(number) >= 10_000 else significant(number)
    return text if unit == NO_UNIT else f"{text} {unit}"
