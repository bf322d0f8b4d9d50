"""Rows of steps as columns, told apart by rank.

The trap: a writer is not a rank. Two Meters one after the other in one program are one rank that
went on; two processes at the same time that both call themselves rank 0 are two. Rows of one rank
are a lane here, and what is counted "per rank" is counted per lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.records import FloatArray, TimeArray

Mask: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # a choice of rows: booleans or positions


@dataclass(frozen=True)
class Steps:
    """Rows of steps. In a lane they are in order of their start."""

    columns: dict[str, FloatArray | TimeArray]

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def __getitem__(self, name: str) -> FloatArray:
        return cast("FloatArray", self.columns[name])  # times are used as numbers too

    def where(self, mask: Mask) -> Steps:
        """The rows for which the mask holds."""
        return Steps({name: column[mask] for name, column in self.columns.items()})

    @cached_property
    def lanes(self) -> list[Steps]:
        """The rows of each rank by itself."""
        if "lane" not in self.columns:
            return with_lanes(self).lanes
        return [self.where(self["lane"] == lane) for lane in np.unique(self["lane"])]

    @cached_property
    def duration_s(self) -> FloatArray:
        """How long each row lasted."""
        return (self["end_ns"] - self["start_ns"]) / NS_PER_S

    @cached_property
    def period_s(self) -> FloatArray:
        """From each row's start to the next one's; for the last, its own length. Adds up to all."""
        starts = self["start_ns"]
        following = np.append(starts[1:], self["end_ns"].max(initial=0))
        return (following - starts) / NS_PER_S

    @cached_property
    def line_period_s(self) -> FloatArray:
        """From each row's end to the next one's; for the first, its own length. Adds up to all.

        Of printed lines: a line ends its steps, and what lies before it is all in the interval.
        """
        ends = self["end_ns"]
        return np.diff(np.append(self["start_ns"][:1], ends)) / NS_PER_S

    @property
    def busy_s(self) -> float:
        """Time in which a row was open. Rows that overlap, of several threads, count once."""
        if not len(self):
            return 0.0
        order = np.argsort(self["start_ns"], kind="stable")
        starts, ends = self["start_ns"][order], self["end_ns"][order]
        reached = np.maximum.accumulate(ends)
        fresh = np.maximum(starts[1:], reached[:-1])
        covered = float(ends[0] - starts[0]) + float(np.maximum(0, ends[1:] - fresh).sum())
        return covered / NS_PER_S


def with_lanes(rows: Steps) -> Steps:
    """The rows in order of rank and start, with a column that tells the ranks apart."""
    writers = rows["writer"]
    spans = []
    for writer in np.unique(writers):
        own = writers == writer
        start_ns, end_ns = rows["start_ns"][own].min(), rows["end_ns"][own].max()
        spans.append((float(start_ns), float(end_ns), float(rows["rank"][own][0]), float(writer)))
    ends: list[tuple[float, float]] = []  # of each lane: its rank, and where it ends so far
    lane_of: dict[float, int] = {}
    for start_ns, end_ns, rank, writer in sorted(spans):
        free = [n for n, lane in enumerate(ends) if lane[0] == rank and lane[1] <= start_ns]
        if free:
            ends[free[0]] = (rank, end_ns)
        else:
            ends.append((rank, end_ns))
        lane_of[writer] = free[0] if free else len(ends) - 1
    lanes = np.array([lane_of[writer] for writer in writers.tolist()], dtype=np.int64)
    order = np.lexsort((rows["start_ns"], lanes))
    return Steps({**rows.columns, "lane": lanes}).where(order)
