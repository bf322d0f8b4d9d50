"""How long something took by a program's own stamps: at least, and at most.

Two clocks that are read one after the other agree to a microsecond, until a process is
put to sleep between the two. So a program takes four stamps, two around ours (`outside_s`) and two
between ours (`inside_s`), and the time of ours lies between theirs whoever has to wait for a core.
The inner ones are taken in the middle of the first and of the last step, so that a window which
lacks either is too short, and one with a step too many is too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def bounds_s(ranks: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The shortest and the longest that a window over all ranks can be."""
    return _span_s(ranks, "inside_s"), _span_s(ranks, "outside_s")


def _span_s(ranks: Sequence[dict[str, Any]], name: str) -> float:
    first_s, last_s = min(one[name][0] for one in ranks), max(one[name][1] for one in ranks)
    return float(last_s - first_s)
