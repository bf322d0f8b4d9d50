"""Rows of steps as columns, told apart by rank.

The trap: a writer is not a rank. Two Meters one after the other in one program are one rank that
went on; two processes at the same time that both call themselves rank 0 are two. Rows of one rank
are a lane here, and what is counted "per rank" is counted per lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
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
        if mask.dtype == bool and mask.all():
            return self  # nothing is copied: the ranks of a large training have millions of rows
        return Steps({name: _chosen(column, mask) for name, column in self.columns.items()})

    @cached_property
    def lanes(self) -> list[Steps]:
        """The rows of each rank by itself."""
        if "lane" not in self.columns:
            return with_lanes(self).lanes
        # They lie together, so that each is a slice, and no copy.
        edges = np.flatnonzero(np.diff(self["lane"], prepend=-1, append=-1))
        return [
            Steps({name: column[start:end] for name, column in self.columns.items()})
            for start, end in pairwise(edges.tolist())
        ]

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


def _chosen(column: Any, mask: Mask) -> Any:  # noqa: ANN401  whichever array type came in
    """Some rows of a column. One that is a single number throughout stays one."""
    if column.strides != (0,):
        return column[mask]
    rows = int(mask.sum()) if mask.dtype == bool else len(mask)
    return np.broadcast_to(column[:1], rows)


def with_lanes(rows: Steps) -> Steps:
    """The rows in order of rank and start, with a column that tells the ranks apart."""
    if "lane" in rows.columns:
        return rows
    writers, inverse = np.unique(rows["writer"], return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[order], np.arange(len(writers) + 1))
    spans = []
    for number, (start, end) in enumerate(pairwise(edges.tolist())):
        own = order[start:end]
        start_ns, end_ns = rows["start_ns"][own].min(), rows["end_ns"][own].max()
        spans.append((float(start_ns), float(end_ns), float(rows["rank"][own[0]]), number))
    ends: dict[float, list[tuple[float, int]]] = {}  # by rank: where its lanes end so far
    lane_of = np.zeros(len(writers), dtype=np.int64)
    lanes = 0
    for start_ns, end_ns, rank, number in sorted(spans):
        own_lanes = ends.setdefault(rank, [])
        free = [n for n, (ended_ns, _) in enumerate(own_lanes) if ended_ns <= start_ns]
        if free:
            lane_of[number] = own_lanes[free[0]][1]
            own_lanes[free[0]] = (end_ns, own_lanes[free[0]][1])
        else:
            lane_of[number] = lanes
            own_lanes.append((end_ns, lanes))
            lanes += 1
    # In the order in which they are written: a large training's rows then stay where they are.
    _, first = np.unique(lane_of, return_index=True)
    lane = np.argsort(np.argsort(first))[lane_of][inverse]
    del inverse, order
    told = Steps({**rows.columns, "lane": lane})
    if _is_in_order(lane, rows["start_ns"]):
        return told
    return told.where(np.lexsort((rows["start_ns"], lane)))


def _is_in_order(lane: Mask, start_ns: FloatArray) -> bool:
    same = lane[1:] == lane[:-1]
    return bool((lane[1:] >= lane[:-1]).all() and (~same | (start_ns[1:] >= start_ns[:-1])).all())
