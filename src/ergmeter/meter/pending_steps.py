"""Steps that wait for the disk: checked, counted, and merged where there are too many.

A loop of microseconds makes 300,000 steps a second, and a disk may hang for minutes. Beyond a
limit, consecutive steps of one phase are merged into rows of several steps, like a log line printed
every ten steps. Number, tokens, samples and time are sums, so totals stay exact.

A merged row ends where its last step ended and is as long as its steps together; the pauses between
them lie before it. So the time inside and outside of steps stays exact too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias

from ergmeter.records import COLUMN_KINDS, Mark
from ergmeter.runlog.dropped import DroppedSteps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row: TypeAlias = "tuple[Any, ...]"
Columns: TypeAlias = "list[Sequence[Any]]"  # in the order of STEP_COLUMNS

# The columns of a row here. Its rank is filled in when it is written.
STEP_COLUMNS = tuple(name for name in COLUMN_KINDS["steps"] if name != "rank")
# More rows than this are merged into about so many. 50,000 rows take 0.1 s to write.
MAX_ROWS = 50_000
MERGED_ROWS = 10_000
# Rows that are looked at in one go: the interpreter is not held for longer than a millisecond.
CHUNK_ROWS = 4096
# A request counts by itself (its first token, its length), so it is never merged.
_MERGED_PHASES = frozenset({"train", "eval", "checkpoint", "data", "idle"})

_KINDS = tuple(COLUMN_KINDS["steps"][name] for name in STEP_COLUMNS)
_AT = {name: number for number, name in enumerate(STEP_COLUMNS)}
_START, _END, _STEPS, _PHASE = (_AT[name] for name in ("start_ns", "end_ns", "steps", "phase"))
_HOST_START, _HOST_END = _AT["host_start_ns"], _AT["host_end_ns"]
_TOKENS = ("tokens_computed", "tokens_real", "tokens_loss")
_SUMS = tuple(_AT[name] for name in ("steps", *_TOKENS, "samples", "micro_steps"))
_LATEST = tuple(_AT[name] for name in ("loss", "learning_rate", "grad_norm"))
_COUNTED = (_AT["tokens_computed"], _AT["tokens_real"])
_ALIKE = (*_SUMS, _HOST_START)  # rows are merged if all of them have it or none

_FLOATS = {float, type(None)}
_INTS = {int, type(None)}
_TOO_MANY = 2**63


class PendingSteps:
    """The queue of rows between the thread that collects steps and the one that writes them."""

    def __init__(self, mark: Callable[[Mark], None]) -> None:
        self._mark = mark
        self._rows: deque[Row] = deque()
        self._lock = threading.Lock()  # held for moments, and never by the training thread
        self._refused: set[str] = set()
        self._dropped: DroppedSteps | None = None
        self.spans = 0  # rows that were added
        self.taken = 0  # rows that were taken to be written
        self.most_steps = 0  # in a merged row; 0: none was merged
        # Training steps so far and their tokens, for progress.
        self.train_steps = 0
        self.tokens = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: list[Row], *, waiting: int) -> None:
        """Append rows. `waiting` is how many there are in all, with those still to be added."""
        if not rows:
            return
        self.spans += len(rows)
        columns = self._checked(rows)
        self._tally(columns)
        if waiting > MAX_ROWS:
            columns = self._merged(columns, waiting)
        with self._lock:
            self._rows.extend(zip(*columns, strict=True))
            if len(self._rows) > MAX_ROWS:
                self._make_room()

    def take(self, most: int) -> dict[str, Sequence[Any]]:
        """Remove the oldest rows and return them as columns; empty if there are none."""
        with self._lock:
            rows = [self._rows.popleft() for _ in range(min(most, len(self._rows)))]
        self.taken += len(rows)
        return dict(zip(STEP_COLUMNS, zip(*rows, strict=True), strict=True)) if rows else {}

    def drop(self, rows: list[Row], why: str) -> None:
        """Count rows that could not be added."""
        start_ns, end_ns = int(rows[0][_START]), int(rows[-1][_END])
        with self._lock:
            self._drop(DroppedSteps(len(rows), None, 0, start_ns, end_ns, why))

    def take_dropped(self) -> DroppedSteps | None:
        """The steps dropped since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, None
        return dropped

    @property
    def merged(self) -> str:
        """A text about the merged steps; empty if there are none."""
        if not self.most_steps:
            return ""
        return (
            f"{self.spans} steps and other spans are in {self.taken} rows, up to"
            f" {self.most_steps} to a row: they came faster than rows can be written"
        )

    def count(self, value: Any) -> int | None:  # noqa: ANN401  a number, or what a user gave
        """A whole number below 2**63; None, with a mark, if this is none."""
        number = value if isinstance(value, int) else self._number(value)
        if number is None:
            return None
        if not abs(number) < _TOO_MANY:
            self._refuse("a count was given that is no whole number below 2**63")
            return None
        return int(number)

    def _checked(self, rows: list[Row]) -> Columns:
        """The rows as columns that hold numbers alone."""
        columns: Columns = list(zip(*rows, strict=True))
        for number, kind in enumerate(_KINDS):
            # Most columns hold what they should, and looking costs a hundredth of converting.
            if kind == "float" and not set(map(type, columns[number])) <= _FLOATS:
                columns[number] = [self._number(value) for value in columns[number]]
            elif kind == "count" and not set(map(type, columns[number])) <= _INTS:
                columns[number] = [self.count(value) for value in columns[number]]
        return columns

    def _tally(self, columns: Columns) -> None:
        """Add to the totals that progress is computed from."""
        phases, steps, computed, real = (columns[at] for at in (_PHASE, _STEPS, *_COUNTED))
        if real.count(None) < len(real):  # as in `metrics.ahead`: the real tokens, where known
            both = zip(real, computed, strict=True)
            computed = [other if own is None else own for own, other in both]
        if phases.count("train") < len(phases):
            train = [phase == "train" for phase in phases]
            steps, computed = list(compress(steps, train)), list(compress(computed, train))
        self.train_steps += sum(filter(None, steps))
        self.tokens += sum(filter(None, computed))
        self.first_ns = self.first_ns or columns[_START][0]
        self.last_ns = columns[_END][-1]

    def _merged(self, columns: Columns, waiting: int) -> Columns:
        merged = merge(columns, -(-waiting // MERGED_ROWS))
        if len(merged[_STEPS]) < len(columns[_STEPS]):
            self.most_steps = max(self.most_steps, *(steps or 0 for steps in merged[_STEPS]))
        return merged

    def _make_room(self) -> None:
        """Merge what waits; drop the oldest if it is still too much."""
        rows, waiting = list(self._rows), len(self._rows)
        self._rows.clear()
        for first in range(0, waiting, CHUNK_ROWS):
            columns: Columns = list(zip(*rows[first : first + CHUNK_ROWS], strict=True))
            self._rows.extend(zip(*self._merged(columns, waiting), strict=True))
        if len(self._rows) > 2 * MAX_ROWS:
            oldest = [self._rows.popleft() for _ in range(len(self._rows) - MAX_ROWS)]
            dropped = dict(zip(STEP_COLUMNS, zip(*oldest, strict=True), strict=True))
            self._drop(DroppedSteps.of(dropped, "the disk took them too slowly"))

    def _drop(self, dropped: DroppedSteps) -> None:
        self._dropped = dropped if self._dropped is None else self._dropped + dropped

    def _number(self, value: Any) -> float | None:  # noqa: ANN401  a number, or what a user gave
        """A float, unless reading it would make a device synchronise with us."""
        if value is None or isinstance(value, float):
            return value
        is_here = getattr(getattr(value, "device", None), "type", "cpu") == "cpu"
        if is_here and not isinstance(value, str | bytes | bytearray):
            try:
                return float(value)
            except (TypeError, ValueError, ArithmeticError, RuntimeError):
                pass
        kind = type(value).__name__
        self._refuse(f"a {kind} was given as a number; pass loss.item() where you have it")
        return None

    def _refuse(self, why: str) -> None:
        if why not in self._refused:
            self._refused.add(why)
            self._mark(Mark(time.monotonic_ns(), "value_refused", why))


def merge(columns: Columns, into_one: int) -> Columns:
    """The same steps in fewer rows, `into_one` consecutive ones of a kind in each."""
    length = len(columns[_PHASE])
    phase = columns[_PHASE][0]
    is_one_kind = columns[_PHASE].count(phase) == length and phase in _MERGED_PHASES
    if is_one_kind and all(columns[at].count(None) in (0, length) for at in _ALIKE):
        return _sums(columns, into_one)
    rows = list(zip(*columns, strict=True))
    size = into_one * len(set(map(_kind, rows)))
    groups = (rows[first : first + size] for first in range(0, length, size))
    return list(zip(*(row for group in groups for row in _sums_by_kind(group)), strict=True))


def _kind(row: Row) -> Row:
    return (row[_PHASE], *(row[at] is None for at in _ALIKE))


def _sums_by_kind(rows: list[Row]) -> list[Row]:
    """One row for each kind; requests as they are."""
    by_kind: dict[Row, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(_kind(row), []).append(row)
    merged = [
        tuple(column[0] for column in _sums(list(zip(*own, strict=True)), len(own)))
        for kind, own in by_kind.items()
        if kind[0] in _MERGED_PHASES
    ]
    requests = [row for row in rows if row[_PHASE] not in _MERGED_PHASES]
    ends, starts = [row[_END] for row in rows], [row[_START] for row in rows]
    merged.sort(key=lambda row: row[_END], reverse=True)
    if all(start >= end for end, start in zip(ends, starts[1:], strict=False)):
        merged = _one_after_the_other(merged)
    return sorted([*merged, *requests], key=lambda row: row[_START])


def _one_after_the_other(latest_first: list[Row]) -> list[Row]:
    """Rows of spans that did not overlap, moved so that they do not overlap either."""
    moved: list[Row] = []
    for row in latest_first:
        start, end, *rest = row
        end_ns = min(end, moved[-1][_START]) if moved else end
        moved.append((end_ns - (end - start), end_ns, *rest))
    return moved


def _sums(columns: Columns, into_one: int) -> Columns:
    """One row for every `into_one` rows, which are all of a kind."""
    length = len(columns[_PHASE])
    slices = [slice(first, first + into_one) for first in range(0, length, into_one)]
    tail = slice(length - 1, length if length % into_one else 0)
    merged: Columns = [[*column[into_one - 1 :: into_one], *column[tail]] for column in columns]
    for at in _SUMS:
        if columns[at][0] is not None:
            totals = [sum(columns[at][rows]) for rows in slices]
            merged[at] = [total if abs(total) < _TOO_MANY else None for total in totals]
    ends = merged[_END] = [max(columns[_END][rows]) for rows in slices]
    firsts = [min(columns[_START][rows]) for rows in slices]
    lengths = (sum(columns[_END][rows]) - sum(columns[_START][rows]) for rows in slices)
    # Spans of several threads overlap; then the row holds all of them.
    together = zip(firsts, ends, lengths, strict=True)
    merged[_START] = [max(first, end - lasted) for first, end, lasted in together]
    if columns[_HOST_START][0] is not None:
        merged[_HOST_START] = [min(columns[_HOST_START][rows]) for rows in slices]
        merged[_HOST_END] = [max(columns[_HOST_END][rows]) for rows in slices]
    for at in _LATEST:
        if columns[at].count(None) < length:
            merged[at] = [_latest(columns[at][rows]) for rows in slices]
    return merged


def _latest(values: Sequence[float | None]) -> float | None:
    """The last number, if there is one; of a loss that diverged, where it did."""
    numbers = [value for value in values if value is not None]
    last = numbers[-1] if numbers else None
    return next((value for value in numbers if not math.isfinite(value)), last)
