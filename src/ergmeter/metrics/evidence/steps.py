"""Steps of a run as columns, one lane per rank; large runs are spooled to a file.

A writer is not a rank. Two Meters one after the other in one program are one rank; two simultaneous
processes that both claim rank 0 are two ranks. The rows of one rank are a lane, and counts "per
rank" are counts per lane.

The columns of a large training are not in memory. A column is read on each use, of one lane or of
all lanes, and is not cached.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from ergmeter.records import PHASES, FloatArray
from ergmeter.runlog.segments import joined_steps
from ergmeter.stats.intervals import cuts_of, interval_of
from ergmeter.units import NS_PER_S, listed_by

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.window import TrainingWindow
    from ergmeter.runlog.reader import Run


# The spool. An hour of a thousand ranks is two million rows, which every metric reads. Reading the
# run's files again for each metric takes seconds, and memory would grow with the training. So
# columns are written once to a temporary file, where a column of one writer is one read. The file
# has no name, so nothing is left behind. If it can't be written, rows stay in memory.

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class LazyColumns(Mapping[str, Array]):
    """Columns that are loaded anew on each access."""

    def __init__(self, names: Iterable[str], load: Callable[[str], Array]) -> None:
        self._names = dict.fromkeys(names)
        self._load = load

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Spool:
    """Stores columns in a temporary file, which is closed when the spool is garbage-collected."""

    def __init__(self) -> None:
        file = tempfile.TemporaryFile(prefix="ergmeter-", buffering=0)  # noqa: SIM115  kept open
        self._fd = file.fileno()
        self._end = 0
        self.close = weakref.finalize(self, file.close)

    def put(self, columns: Mapping[str, Array]) -> Mapping[str, Array]:
        """Write columns to the file; return columns that read from it, or the originals."""
        stored: dict[str, Callable[[], Array]] = {}
        for name, column in columns.items():
            if column.strides == (0,):  # one number for all rows
                stored[name] = partial(np.broadcast_to, column[:1].copy(), len(column))
                continue
            try:
                stored[name] = partial(self._read, self._end, len(column), column.dtype)
                self._append(column)
            except OSError:  # a full disk, most likely
                return columns
        return LazyColumns(stored, lambda name: stored[name]())

    def _read(self, at: int, rows: int, dtype: np.dtype[Any]) -> Array:
        data = os.pread(self._fd, rows * dtype.itemsize, at)
        return np.frombuffer(data, dtype=dtype, count=rows)

    def _append(self, column: Array) -> None:
        data = memoryview(column.tobytes())
        while data:
            written = os.pwrite(self._fd, data, self._end)
            self._end += written
            data = data[written:]


Mask: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # a choice of rows: booleans or positions

# Rows that are kept in memory, of about 100 bytes each.
MAX_ROWS = 400_000


@dataclass(frozen=True)
class Steps:
    """Rows of steps and phases as columns. Rows of a lane are ordered by start."""

    columns: Mapping[str, Array]
    spooled_lanes: tuple[Steps, ...] = ()  # for rows in a file: lanes that are read one at a time

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def _rows(self) -> int:
        lanes = self.spooled_lanes
        return sum(map(len, lanes)) if lanes else len(self.columns["start_ns"])

    def __getitem__(self, name: str) -> FloatArray:
        return cast("FloatArray", self.columns[name])  # times are used as numbers too

    def where(self, mask: Mask) -> Steps:
        """The rows that a mask selects: booleans or positions."""
        if mask.dtype == bool and mask.all():
            return self  # nothing is copied
        if self.spooled_lanes and mask.dtype == bool:
            ends = np.cumsum([len(lane) for lane in self.spooled_lanes])
            masks = zip(self.spooled_lanes, np.split(mask, ends[:-1]), strict=True)
            return _spooled(self.columns, (lane.where(own) for lane, own in masks))
        if isinstance(self.columns, LazyColumns):
            return _view(self.columns, mask)
        return Steps({name: _chosen(column, mask) for name, column in self.columns.items()})

    def of_phase(self, *phases: str) -> Steps:
        """The rows of these phases."""
        return self.where(self.is_of_phase(*phases)) if len(self) else self

    def is_of_phase(self, *phases: str) -> Mask:
        """A mask of the rows of these phases."""
        return np.isin(self["phase"], [PHASES.index(phase) for phase in phases])

    def where_each(self, choose: Callable[[Steps], Mask]) -> Steps:
        """The rows chosen by a mask that is computed lane by lane."""
        if not len(self):
            return self
        rows = with_lanes(self)
        return rows.where(np.concatenate([choose(lane) for lane in rows.lanes]))

    @cached_property
    def lanes(self) -> Sequence[Steps]:
        """The rows of each rank, as one `Steps` per rank."""
        if self.spooled_lanes:
            return self.spooled_lanes
        if "lane" not in self.columns:
            return with_lanes(self).lanes
        # Rows of a lane are adjacent, so each lane is a slice without a copy.
        edges = np.flatnonzero(np.diff(self["lane"], prepend=-1, append=-1))
        return [_view(self.columns, slice(*rows)) for rows in pairwise(edges.tolist())]

    @cached_property
    def longest(self) -> Steps:
        """The lane with the most rows; among equals, that of the lowest rank."""
        if not len(self):
            return self
        return max(self.lanes, key=lambda lane: (len(lane), -_rank(lane)))

    def lowest(self, name: str) -> int:
        """The lowest value of a column of times."""
        return int(self[name].min())

    def highest(self, name: str) -> int:
        """The highest value of a column of times."""
        return int(self[name].max())

    @property
    def step_counts(self) -> FloatArray:
        """The number of optimizer steps of each row; 1 where it is unknown."""
        return np.nan_to_num(self["steps"], nan=1.0)

    @property
    def steps_before(self) -> FloatArray:
        """The number of optimizer steps before each row."""
        return np.cumsum(self.step_counts) - self.step_counts

    @property
    def middle_ns(self) -> FloatArray:
        """The instant half way between start and end of each row."""
        return (self["start_ns"] + self["end_ns"]) / 2

    @property
    def duration_s(self) -> FloatArray:
        """The duration of each row in seconds."""
        return (self["end_ns"] - self["start_ns"]) / NS_PER_S

    @property
    def busy_s(self) -> float:
        """Seconds covered by rows. Time in several overlapping rows counts once."""
        if not len(self):
            return 0.0
        order = np.argsort(self["start_ns"], kind="stable")
        starts, ends = self["start_ns"][order], self["end_ns"][order]
        reached = np.maximum.accumulate(ends)
        fresh = np.maximum(starts[1:], reached[:-1])
        covered = float(ends[0] - starts[0]) + float(np.maximum(0, ends[1:] - fresh).sum())
        return covered / NS_PER_S


def _spooled(names: Iterable[str], lanes: Iterable[Steps]) -> Steps:
    """Rows of many ranks with columns of these names; one rank's rows are in memory at a time."""
    own = tuple(lane for lane in lanes if len(lane))

    def load(name: str) -> Array:
        return _side_by_side([lane.columns[name] for lane in own]) if own else np.empty(0)

    return Steps(LazyColumns(names, load), own)


def read_steps(run: Run, stream: str = "") -> Steps:
    """The steps of all writers, lane by lane; spooled to a file if there are many."""
    parts: list[Any] = []
    rows = 0
    spool: Spool | None = None
    for number in range(len(run.writers)):
        part = run.steps_by(number, stream)
        if not len(part["start_ns"]):
            continue
        rows += len(part["start_ns"])
        if spool is None and rows > MAX_ROWS:
            spool = _opened()
            parts = parts if spool is None else [spool.put(stored) for stored in parts]
        parts.append(part if spool is None else spool.put(part))
    if spool is None:
        return with_lanes(Steps(joined_steps(parts)))
    lanes = listed_by(zip(_lanes_of(map(_span, parts)).tolist(), parts, strict=True))
    every = (_lane(number, own) for number, own in sorted(lanes.items()))
    return _spooled((*parts[0], "lane"), every)


def _lane(number: int, parts: Sequence[Mapping[str, Array]]) -> Steps:
    """The rows of one rank ordered by start, joined from the columns of its writers."""
    starts = _side_by_side([part["start_ns"] for part in parts])
    rows, is_in_order = len(starts), not (starts[1:] < starts[:-1]).any()
    order = None if is_in_order else np.argsort(starts, kind="stable")

    def load(name: str) -> Array:
        if name == "lane":
            return np.broadcast_to(np.int64(number), rows)
        column = _side_by_side([part[name] for part in parts])
        return column if order is None else _chosen(column, order)

    return Steps(LazyColumns((*parts[0], "lane"), load))


def _opened() -> Spool | None:
    try:
        return Spool()
    except OSError:  # no temporary file: rows stay in memory
        return None


def _view(columns: Mapping[str, Array], rows: Mask | slice) -> Steps:
    """Some rows of these columns; a column is selected on access."""
    return Steps(LazyColumns(columns, lambda name: _chosen(columns[name], rows)))


def _chosen(column: Any, mask: Mask | slice) -> Any:  # noqa: ANN401  whichever array type came in
    """Some rows of a column. A column that repeats a single number stays a broadcast."""
    if isinstance(mask, slice) or column.strides != (0,):
        return column[mask]
    rows = int(mask.sum()) if mask.dtype == bool else len(mask)
    return np.broadcast_to(column[:1], rows)


def _side_by_side(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _rank(lane: Steps) -> float:
    rank = float(lane["rank"][0])
    return 0.0 if np.isnan(rank) else rank


def with_lanes(rows: Steps) -> Steps:
    """The rows ordered by lane and start, with a column `lane`: a number per rank."""
    if "lane" in rows.columns:
        return rows
    writers, inverse = np.unique(rows["writer"], return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[order], np.arange(len(writers) + 1))
    own = [order[start:end] for start, end in pairwise(edges.tolist())]
    spans = ({n: rows[n][positions] for n in ("start_ns", "end_ns", "rank")} for positions in own)
    lane = _lanes_of(map(_span, spans))[inverse]
    del inverse, order, own
    numbered = Steps({**rows.columns, "lane": lane})
    if _is_in_order(lane, rows["start_ns"]):
        return numbered
    return numbered.where(np.lexsort((rows["start_ns"], lane)))


def _span(part: Mapping[str, Array]) -> tuple[float, float, float]:
    """Return the first start, the last end and the rank of a writer's steps."""
    return float(part["start_ns"].min()), float(part["end_ns"].max()), float(part["rank"][0])


def _lanes_of(spans: Iterable[tuple[float, float, float]]) -> Mask:
    """The lane number of each writer. Writers of one rank share a lane if their spans do not
    overlap.

    Lanes are numbered in the order of writers, so that rows of a large training need no sorting.
    """
    numbered = [(*span, number) for number, span in enumerate(spans)]
    ends: dict[float, list[tuple[float, int]]] = {}  # by rank: the end so far of each of its lanes
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


def interval_in_order(top: FloatArray, bottom: FloatArray) -> tuple[float, float] | None:
    """The 95 % interval of sum(top) / sum(bottom), from blocks of rows in their order."""
    cuts = cuts_of(len(top))
    if cuts is None:
        return None
    block = np.searchsorted(cuts, np.arange(len(top)), side="right")
    return interval_of(_sums(block, top), _sums(block, bottom))


def _sums(block: Array, amounts: FloatArray) -> FloatArray:
    """The sum of `amounts` in each block; `block`: the block number of each row."""
    return np.asarray(np.bincount(block, weights=amounts), dtype=np.float64)


class Timed:
    """The rows of all ranks ordered by end and cut into equal blocks, for intervals of rates."""

    def __init__(self, rows: Steps, window: TrainingWindow) -> None:
        """`window`: the window of the rows; the first block begins with it."""
        self._block: Array = np.empty(0, dtype=np.uint8)  # of each row
        self._lasted_s: FloatArray = np.empty(0)
        cuts = cuts_of(len(rows))
        if cuts is None:
            return
        ends_ns = rows.columns["end_ns"]
        order = np.argsort(ends_ns, kind="stable")
        edges_ns = ends_ns[order[np.append(cuts, len(rows)) - 1]]
        passed = window.elapsed_ns(np.append(window.start_ns, edges_ns))
        # The window of requests goes on after the last row, until failed ones have settled.
        passed[-1] = max(passed[-1], window.elapsed_ns(np.array([window.end_ns]))[0])
        self._lasted_s = np.diff(passed) / NS_PER_S
        self._block = np.empty(len(rows), dtype=np.uint8)
        self._block[order] = np.searchsorted(cuts, np.arange(len(rows)), side="right")

    def interval(self, amounts: FloatArray) -> tuple[float, float] | None:
        """The 95 % interval of amounts over time; None if there are too few rows."""
        if not len(self._block):
            return None
        return interval_of(_sums(self._block, amounts), self._lasted_s)
