"""Shares as text: percentages and ratios that are neither whole nor nothing never read so.

The trap: rounding. 99.997 % to four digits is "100 %", and one kernel that is missing from a
thousand has gone; 0.00003 to four decimals is "0.0000". Such a figure gets as many more digits as
it takes to be told from both ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.units import significant

if TYPE_CHECKING:
    from ergmeter.hlo import ModuleCount

LOWER_BOUND, UNCERTAIN = "*", "~"
LEGEND = {
    LOWER_BOUND: "a lower bound: kernels that do not state their MACs, or not readably",
    UNCERTAIN: "not certain: loops or calls whose work is not known",
}

_MOST_DIGITS = 17  # of a float: more say nothing


def mark(count: ModuleCount) -> str:
    """What stands behind a graph's NKI share that is not known whole.

    Kernels of unknown work can only add to it; other unknown work may take from it.
    """
    if count.unknown_loops or count.unknown_calls:
        return UNCERTAIN
    return LOWER_BOUND if count.nki_calls_known < count.nki_calls else ""


def percent(frac: float) -> str:
    """A share in percent, to four significant digits or as many as it needs.

    >>> percent(0.25), percent(0.99997), percent(1.0)
    ('25 %', '99.997 %', '100 %')
    """
    value, digits = 100 * frac, 4
    while value != 100 and digits < _MOST_DIGITS and significant(value, digits) == "100":
        digits += 1
    return f"{significant(value, digits)} %"


def decimals(value: float, digits: int, *, whole: float = 1.0) -> str:
    """A share of `whole` with so many decimals, or as many as it needs.

    >>> decimals(0.5, 4), decimals(0.99998, 4), decimals(0.00003, 4), decimals(1.0, 4)
    ('0.5000', '0.99998', '0.00003', '1.0000')
    """
    ends = [end for end in (0.0, whole) if value != end]
    while digits < _MOST_DIGITS and any(float(f"{value:.{digits}f}") == end for end in ends):
        digits += 1
    return f"{value:.{digits}f}"
