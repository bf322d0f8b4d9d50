"""Which groups is no other better than, in speed, energy and memory at once?

The trap: a front of noise. By plain means a group falls off the front for a tenth of a percent. A
group is beaten here only by one that is shown to be better in something and is shown to be worse in
nothing; where runs are single there is nothing but their values, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.compare.verdicts import Measure
    from ergmeter.stats.ratio import Contrast


@dataclass(frozen=True, slots=True)
class Front:
    """Who is on it, who is beaten and by whom, over which figures; `remark` says what to know."""

    axes: tuple[str, ...]
    on: tuple[str, ...]
    beaten: dict[str, tuple[str, ...]]
    remark: str = ""


def front(
    names: Sequence[str],
    axes: Sequence[Measure],
    compared: Callable[[str, str, Measure], Contrast],
) -> Front | None:
    """The front; None where there are not two groups and two figures that all of them have."""
    if len(names) < 2 or len(axes) < 2:
        return None
    single = False
    beaten: dict[str, tuple[str, ...]] = {}
    for one in names:
        better = []
        for rival in names:
            if rival == one:
                continue
            found = [(axis, compared(rival, one, axis)) for axis in axes]
            single = single or any(min(one.repeats) == 1 for _, one in found)
            signs = [_sign(axis, contrast) for axis, contrast in found]
            if max(signs) > 0 and min(signs) >= 0:
                better.append(rival)
        if better:
            beaten[one] = tuple(better)
    remark = "by plain values: some have a single run" if single else ""
    on = tuple(name for name in names if name not in beaten)
    return Front(tuple(axis.key for axis in axes), on, beaten, remark)


def _sign(axis: Measure, contrast: Contrast) -> int:
    """1: shown to be better; -1: worse; 0: not shown."""
    if min(contrast.repeats) > 1 and not contrast.is_shown:
        return 0
    if contrast.value == contrast.neutral:
        return 0
    is_more = contrast.value > contrast.neutral
    return 1 if is_more == (axis.direction == "higher") else -1
