"""What number does this text hold?

The trap: a pattern such as `[\\d.]+` stops at the "e" and reads a learning rate of 2.73e-5 as 2.73,
drops a minus sign, and loses a loss that became nan, which is the one a reader must see.
"""

from __future__ import annotations

import math
import re

# The one spelling of a number used by every importer. Thousands: 1,024 but not 1,02.
NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3}){1,6}(?!\d)(?:\.\d{0,20})?|\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})"
    r"(?:[eE][-+]?\d{1,4})?|(?:[nN]a[nN]|NAN|[iI]nf(?:inity)?|INF))"
)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3}){1,6}(?:\.\d*)?")
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MAX_COUNT = 2**53


def number(text: str) -> float | None:
    """Read a number: signs, exponents, nan and inf, but no thousands separators."""
    if "_" in text:  # float() takes 1_000, which no program prints
        return None
    try:
        return float(text)
    except ValueError:
        return None


def count(text: str, suffix: str = "") -> int | None:
    """Read a count: 2048, 2048.0, 1,024, 1.2k, 3.4M. None if it is no whole, sane number."""
    if not suffix and len(text) < 16 and text.isdecimal():
        return int(text)
    figure = number(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    if figure is None or suffix not in _SCALE:
        return None
    value = figure * _SCALE[suffix]
    if not math.isfinite(value) or not 0 <= value <= _MAX_COUNT:
        return None
    whole = round(value)
    # A fraction of a token is a rate or a mean under a count's name.
    return whole if abs(value - whole) <= 1e-6 * max(1.0, value) else None
