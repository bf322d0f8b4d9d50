"""Amounts of the rows of steps, tokens or seconds, added up lane by lane.

The trap: an array of all rows. Of a large training it takes as much memory as a column of it, and
there is one for every metric. Here an amount is a function of a lane; sums over all lanes, and over
blocks of the rows for an interval, are all that anybody wants of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.stats import streaming_quantile
from ergmeter.stats.intervals import cuts_of, interval_of
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.metrics.evidence.step_spool import Array
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.metrics.evidence.window import TrainingWindow
    from ergmeter.records import FloatArray, TimeArray


@dataclass(frozen=True, slots=True)
class RowAmounts:
    """What each row of some steps amounts to."""

    rows: Steps
    of: Callable[[Steps], FloatArray]  # one lane's

    def __iter__(self) -> Iterator[FloatArray]:
        return (self.of(lane) for lane in self.rows.lanes)

    def sum(self) -> float:
        """Of all rows."""
        return sum(float(one.sum()) for one in self)

    def any(self) -> bool:
        """Whether any row amounts to something."""
        return any(bool(one.any()) for one in self)


def interval_in_order(top: RowAmounts, bottom: RowAmounts) -> tuple[float, float] | None:
    """The 95 % interval of a ratio of sums, from blocks of rows as they lie, rank after rank."""
    cuts = cuts_of(len(top.rows))
    if cuts is None:
        return None
    sums = np.zeros((2, len(cuts) + 1))
    first = 0
    for above, below in zip(top, bottom, strict=True):
        block = np.searchsorted(cuts, np.arange(first, first + len(above)), side="right")
        for total, one in zip(sums, (above, below), strict=True):
            total += np.bincount(block, weights=one, minlength=len(total))
        first += len(above)
    return interval_of(sums[0], sums[1])


class Timed:
    """The rows of all ranks in the order in which they ended, cut into blocks of as many."""

    def __init__(self, rows: Steps, window: TrainingWindow) -> None:
        """`window`: what the rows are over, from the start of the first block on."""
        self._rows = rows
        self._window = window
        count = len(rows)
        cuts = cuts_of(count)
        self._blocks: list[Array] = []  # of each lane: the block of each row, in a byte
        self._lasted_s: FloatArray = np.empty(0)
        if cuts is not None:
            self._cut(cuts, count)

    def interval(self, amounts: RowAmounts) -> tuple[float, float] | None:
        """The 95 % interval of amounts over time; None if there are too few rows."""
        if not self._blocks:
            return None
        sums = np.zeros(len(self._lasted_s))
        for block, one in zip(self._blocks, amounts, strict=True):
            sums += np.bincount(block, weights=one, minlength=len(sums))
        return interval_of(sums, self._lasted_s)

    def _cut(self, cuts: TimeArray, count: int) -> None:
        ends = streaming_quantile.values_at(self._ends, [*(cuts - 1).tolist(), count - 1], count)
        passed = self._window.elapsed_ns(np.append(self._window.start_ns, ends))
        # The window of requests goes on after the last row, until failed ones have settled.
        passed[-1] = max(passed[-1], self._window.elapsed_ns(np.array([self._window.end_ns]))[0])
        self._lasted_s = np.diff(passed) / NS_PER_S
        ends = ends[:-1]  # of the last row before each cut
        before = np.zeros(len(cuts), dtype=np.int64)
        for own in self._ends():
            before += np.searchsorted(np.sort(own), ends)
        # Rows that end with it: so many of them, as they lie, are before the cut.
        left = cuts - before
        for own in self._ends():
            block = np.searchsorted(ends, own).astype(np.uint8)
            tied = np.flatnonzero(np.isin(own, ends))
            for row in tied.tolist():
                same = ends == own[row]
                block[row] += int((left[same] <= 0).sum())
                left[same] -= 1
            self._blocks.append(block)

    def _ends(self) -> Iterator[Array]:
        return (lane.columns["end_ns"] for lane in self._rows.lanes)
