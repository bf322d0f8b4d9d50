"""Rows of steps as columns, told apart by rank.

The trap: a writer is not a rank. Two Meters one after the other in one program are one rank that
went on; two processes at the same time that both call themselves rank 0 are two. Rows of one rank
are a lane here, and what is counted "per rank" is counted per lane.

Of a large training not all rows are in memory (`spool`). Whoever goes through them goes lane by
lane, and holds on to none; a column of all of them can be had, and is as large as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

import numpy as np

from ergmeter.metrics.evidence.step_spool import LazyColumns, Spool
from ergmeter.runlog.segments import joined_steps
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ergmeter.metrics.evidence.step_spool import Array
    from ergmeter.records import FloatArray
    from ergmeter.runlog.reader import Run

Mask: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # a choice of rows: booleans or positions

# Rows that are kept in memory, of about 100 bytes each.
HELD = 400_000


@dataclass(frozen=True)
class Steps:
    """Rows of steps. In a lane they are in order of their start."""

    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def __getitem__(self, name: str) -> FloatArray:
        return cast("FloatArray", self.columns[name])  # times are used as numbers too

    def where(self, mask: Mask) -> Steps:
        """The rows for which the mask holds."""
        if mask.dtype == bool and mask.all():
            return self  # nothing is copied
        if isinstance(self.columns, LazyColumns):
            columns = self.columns
            return Steps(LazyColumns(tuple(columns), lambda name: _chosen(columns[name], mask)))
        return Steps({name: _chosen(column, mask) for name, column in self.columns.items()})

    def where_each(self, choose: Callable[[Steps], Mask]) -> Steps:
        """The rows for which a mask holds that is made of each lane by itself."""
        if not len(self):
            return self
        whole = with_lanes(self)
        return whole.where(np.concatenate([choose(lane) for lane in whole.lanes]))

    @property
    def lanes(self) -> Sequence[Steps]:
        """The rows of each rank by itself."""
        return self._slices

    @cached_property
    def _slices(self) -> Sequence[Steps]:
        if "lane" not in self.columns:
            return with_lanes(self).lanes
        # They lie together, so that each is a slice, and no copy.
        edges = np.flatnonzero(np.diff(self["lane"], prepend=-1, append=-1))
        return [
            Steps({name: column[start:end] for name, column in self.columns.items()})
            for start, end in pairwise(edges.tolist())
        ]

    @cached_property
    def longest(self) -> Steps:
        """The lane with the most rows; of several the lowest rank's."""
        if not len(self):
            return self
        return max(self.lanes, key=lambda lane: (len(lane), -_rank(lane)))

    def lowest(self, name: str) -> int:
        """The least of a column of times."""
        return int(self[name].min())

    def highest(self, name: str) -> int:
        """The most of a column of times."""
        return int(self[name].max())

    @cached_property
    def duration_s(self) -> FloatArray:
        """How long each row lasted."""
        return (self["end_ns"] - self["start_ns"]) / NS_PER_S

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


@dataclass(frozen=True, slots=True)
class _Lane:
    """Where the rows of one rank are: with each of its writers, in the order of these."""

    number: int
    parts: tuple[Mapping[str, Array], ...]
    rows: int
    is_in_order: bool  # as they lie there
    mask: Mask | None = None  # of all rows that are there, which are in it

    def steps(self) -> Steps:
        """The rows. Columns are loaded as they are asked for."""
        return Steps(LazyColumns((*self.parts[0], "lane"), self._loader()))

    def _loader(self) -> Callable[[str], Array]:
        order = None if self.is_in_order else np.argsort(_starts(self.parts), kind="stable")

        def load(name: str) -> Array:
            if name == "lane":
                return np.broadcast_to(np.int64(self.number), self.rows)
            column = _side_by_side([part[name] for part in self.parts])
            for mask in (order, self.mask):
                column = column if mask is None else _chosen(column, mask)
            return column

        return load

    def where(self, mask: Mask) -> _Lane:
        """The rows for which the mask holds, of those that are in it."""
        if mask.all():
            return self
        whole = mask.copy()
        if self.mask is not None:
            whole = self.mask.copy()
            whole[self.mask] = mask
        return replace(self, rows=int(mask.sum()), mask=whole)


class _OneByOne(Sequence[Steps]):
    """Lanes that are loaded as they are looked at."""

    def __init__(self, lanes: tuple[_Lane, ...]) -> None:
        self._lanes = lanes

    @overload
    def __getitem__(self, place: int) -> Steps: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Steps]: ...
    def __getitem__(self, place: int | slice) -> Steps | Sequence[Steps]:
        if isinstance(place, slice):
            return _OneByOne(self._lanes[place])
        return self._lanes[place].steps()

    def __len__(self) -> int:
        return len(self._lanes)


@dataclass(frozen=True)
class Spooled(Steps):
    """Rows of many ranks, of which one's at a time are in memory."""

    at: tuple[_Lane, ...]

    @classmethod
    def of(cls, at: Iterable[_Lane]) -> Spooled:
        """These lanes, without those that have no rows."""
        kept = tuple(lane for lane in at if lane.rows)
        return cls(_JoinedColumns(kept), kept)

    def __len__(self) -> int:
        return sum(lane.rows for lane in self.at)

    @property
    def lanes(self) -> Sequence[Steps]:
        """The rows of each rank by itself, loaded as they are looked at."""
        return _OneByOne(self.at)

    def where(self, mask: Mask) -> Steps:
        """The rows for which the mask holds."""
        if mask.dtype != bool:
            return Steps({name: column[mask] for name, column in self.columns.items()})
        edges = pairwise(accumulate((lane.rows for lane in self.at), initial=0))
        own = [lane.where(mask[a:b]) for lane, (a, b) in zip(self.at, edges, strict=True)]
        return Spooled.of(own)

    def where_each(self, choose: Callable[[Steps], Mask]) -> Steps:
        """The rows for which a mask holds that is made of each lane by itself."""
        return Spooled.of(lane.where(choose(lane.steps())) for lane in self.at)

    def lowest(self, name: str) -> int:
        """The least of a column of times."""
        return min(lane.lowest(name) for lane in self.lanes)

    def highest(self, name: str) -> int:
        """The most of a column of times."""
        return max(lane.highest(name) for lane in self.lanes)


class _JoinedColumns(Mapping[str, "Array"]):
    """The columns of all lanes. None is kept."""

    def __init__(self, lanes: tuple[_Lane, ...]) -> None:
        self._lanes = lanes

    def __getitem__(self, name: str) -> Array:
        if not self._lanes:
            return np.empty(0)
        return _side_by_side([lane.steps().columns[name] for lane in self._lanes])

    def __iter__(self) -> Iterator[str]:
        return iter((*self._lanes[0].parts[0], "lane") if self._lanes else ("start_ns",))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_steps(run: Run, stream: str = "") -> Steps:
    """The steps of all writers, lane by lane; in a file where there are many of them."""
    parts: list[Any] = []
    rows = 0
    spool: Spool | None = None
    for number in range(len(run.writers)):
        part = run.steps_by(number, stream)
        if not len(part["start_ns"]):
            continue
        rows += len(part["start_ns"])
        if spool is None and rows > HELD:
            spool = _opened()
            parts = parts if spool is None else [spool.put(one) for one in parts]
        parts.append(part if spool is None else spool.put(part))
    if spool is None:
        return with_lanes(Steps(joined_steps(parts)))
    lanes: dict[int, list[Mapping[str, Array]]] = {}
    for part, lane in zip(parts, _lanes_of(map(_span, parts)).tolist(), strict=True):
        lanes.setdefault(lane, []).append(part)
    return Spooled.of(_lane(number, own) for number, own in sorted(lanes.items()))


def _lane(number: int, parts: Sequence[Mapping[str, Array]]) -> _Lane:
    starts = _starts(parts)
    return _Lane(number, tuple(parts), len(starts), not (starts[1:] < starts[:-1]).any())


def _starts(parts: Sequence[Mapping[str, Array]]) -> Array:
    return _side_by_side([part["start_ns"] for part in parts])


def _opened() -> Spool | None:
    try:
        return Spool()
    except OSError:  # nowhere to write: they stay in memory
        return None


def _chosen(column: Any, mask: Mask) -> Any:  # noqa: ANN401  whichever array type came in
    """Some rows of a column. One that is a single number throughout stays one."""
    if column.strides != (0,):
        return column[mask]
    rows = int(mask.sum()) if mask.dtype == bool else len(mask)
    return np.broadcast_to(column[:1], rows)


def _side_by_side(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _rank(lane: Steps) -> float:
    rank = float(lane["rank"][0])
    return 0.0 if np.isnan(rank) else rank


def with_lanes(rows: Steps) -> Steps:
    """The rows in order of rank and start, with a column that tells the ranks apart."""
    if "lane" in rows.columns:
        return rows
    writers, inverse = np.unique(rows["writer"], return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[order], np.arange(len(writers) + 1))
    own = [order[start:end] for start, end in pairwise(edges.tolist())]
    spans = ({n: rows[n][one] for n in ("start_ns", "end_ns", "rank")} for one in own)
    lane = _lanes_of(map(_span, spans))[inverse]
    del inverse, order, own
    told = Steps({**rows.columns, "lane": lane})
    if _is_in_order(lane, rows["start_ns"]):
        return told
    return told.where(np.lexsort((rows["start_ns"], lane)))


def _span(part: Mapping[str, Array]) -> tuple[float, float, float]:
    """From when to when a writer told steps, and of which rank."""
    return float(part["start_ns"].min()), float(part["end_ns"].max()), float(part["rank"][0])


def _lanes_of(spans: Iterable[tuple[float, float, float]]) -> Mask:
    """The lane of each writer, by its span. Writers of one rank share one if they do not overlap.

    Lanes are in the order in which they are written: a large training's rows then stay where they
    are.
    """
    numbered = [(*span, number) for number, span in enumerate(spans)]
    ends: dict[float, list[tuple[float, int]]] = {}  # by rank: where its lanes end so far
    lane_of = np.zeros(len(numbered), dtype=np.int64)
    lanes = 0
    for start_ns, end_ns, rank, number in sorted(numbered):
        own_lanes = ends.setdefault(rank, [])
        free = [n for n, (ended_ns, _) in enumerate(own_lanes) if ended_ns <= start_ns]
        if free:
            lane_of[number] = own_lanes[free[0]][1]
            own_lanes[free[0]] = (end_ns, own_lanes[free[0]][1])
        else:
            lane_of[number] = lanes
            own_lanes.append((end_ns, lanes))
            lanes += 1
    _, first = np.unique(lane_of, return_index=True)
    return np.asarray(np.argsort(np.argsort(first))[lane_of])


def _is_in_order(lane: Mask, start_ns: FloatArray) -> bool:
    same = lane[1:] == lane[:-1]
    return bool((lane[1:] >= lane[:-1]).all() and (~same | (start_ns[1:] >= start_ns[:-1])).all())
