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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, pairwise
from operator import attrgetter
from typing import Any, TypeAlias

from ergmeter.records import COLUMN_KINDS, Mark, Step, StepValues
from ergmeter.runlog.format import DroppedSteps

Columns: TypeAlias = "dict[str, Sequence[Any]]"  # by field of Step

# More rows than this are merged into about so many. 50,000 rows take 0.1 s to write.
MAX_ROWS = 50_000
MERGED_ROWS = 10_000
# Rows that are looked at in one go: the interpreter is not held for longer than a millisecond.
CHUNK_ROWS = 4096
# A request counts by itself (its first token, its length), so it is never merged.
_MERGED_PHASES = frozenset({"train", "eval", "checkpoint", "data", "idle"})

_SUMS = ("steps", "tokens_computed", "tokens_real", "tokens_loss", "samples", "micro_steps")
_LATEST = ("loss", "learning_rate", "grad_norm")
_ALIKE = (*_SUMS, "host_start_ns")  # rows are merged if all of them have it or none

step_values: Callable[[Step], StepValues] = attrgetter(*COLUMN_KINDS["steps"])

_FLOATS = {float, type(None)}
_INTS = {int, type(None)}
_TOO_MANY = 2**63


class PendingSteps:
    """The queue of rows between the thread that collects steps and the one that writes them."""

    def __init__(self, mark: Callable[[Mark], None]) -> None:
        self._mark = mark
        self._rows: deque[StepValues] = deque()
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

    def add(self, rows: list[StepValues], *, waiting: int) -> None:
        """Append rows. `waiting` is the number of rows in all, those still to be added included."""
        if not rows:
            return
        self.spans += len(rows)
        columns = self._checked(rows)
        self._tally(columns)
        if waiting > MAX_ROWS:
            columns = self._merged(columns, waiting)
        with self._lock:
            self._rows.extend(_rows_of(columns))
            if len(self._rows) > MAX_ROWS:
                self._make_room()

    def take(self, most: int) -> dict[str, Sequence[Any]]:
        """Remove the oldest rows and return them as columns; empty if there are none."""
        with self._lock:
            rows = [self._rows.popleft() for _ in range(min(most, len(self._rows)))]
        self.taken += len(rows)
        return _columns_of(rows) if rows else {}

    def drop(self, rows: list[StepValues], why: str) -> None:
        """Count rows that could not be added."""
        start_ns, end_ns = int(Step(*rows[0]).start_ns), int(Step(*rows[-1]).end_ns)
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
        """The value as a whole number below 2**63; None, with a mark, if it is not one."""
        number = value if isinstance(value, int) else self._number(value)
        if number is None:
            return None
        if not abs(number) < _TOO_MANY:
            self._refuse("a count was not a whole number below 2**63, and is left out")
            return None
        return int(number)

    def _checked(self, rows: list[StepValues]) -> Columns:
        """The rows as columns, in which every value that is not a number has become None."""
        columns = _columns_of(rows)
        for name, kind in COLUMN_KINDS["steps"].items():
            # Most columns have the right types, and looking costs a hundredth of converting.
            if kind == "float" and not set(map(type, columns[name])) <= _FLOATS:
                columns[name] = [self._number(value) for value in columns[name]]
            elif kind == "count" and not set(map(type, columns[name])) <= _INTS:
                columns[name] = [self.count(value) for value in columns[name]]
        return columns

    def _tally(self, columns: Columns) -> None:
        """Add to the totals that progress is computed from."""
        names = ("phase", "steps", "tokens_computed", "tokens_real")
        phases, steps, computed, real = (columns[name] for name in names)
        if real.count(None) < len(real):  # as `metrics.live.rows.real_tokens`
            both = zip(real, computed, strict=True)
            computed = [other if own is None else own for own, other in both]
        if phases.count("train") < len(phases):
            train = [phase == "train" for phase in phases]
            steps, computed = list(compress(steps, train)), list(compress(computed, train))
        self.train_steps += sum(filter(None, steps))
        self.tokens += sum(filter(None, computed))
        self.first_ns = self.first_ns or columns["start_ns"][0]
        self.last_ns = columns["end_ns"][-1]

    def _merged(self, columns: Columns, waiting: int) -> Columns:
        merged = merge(columns, -(-waiting // MERGED_ROWS))
        if len(merged["steps"]) < len(columns["steps"]):
            self.most_steps = max(self.most_steps, *(steps or 0 for steps in merged["steps"]))
        return merged

    def _make_room(self) -> None:
        """Merge the rows that wait; drop the oldest if there are still too many."""
        rows, waiting = list(self._rows), len(self._rows)
        self._rows.clear()
        for first in range(0, waiting, CHUNK_ROWS):
            columns = _columns_of(rows[first : first + CHUNK_ROWS])
            self._rows.extend(_rows_of(self._merged(columns, waiting)))
        if len(self._rows) > 2 * MAX_ROWS:
            oldest = [self._rows.popleft() for _ in range(len(self._rows) - MAX_ROWS)]
            self._drop(DroppedSteps.of(_columns_of(oldest), "the disk took them too slowly"))

    def _drop(self, dropped: DroppedSteps) -> None:
        self._dropped = dropped if self._dropped is None else self._dropped + dropped

    def _number(self, value: Any) -> float | None:  # noqa: ANN401  a number, or what a user gave
        """The value as a float; None, with a mark, if it is not a number or on a device."""
        if value is None or isinstance(value, float):
            return value
        is_here = getattr(getattr(value, "device", None), "type", "cpu") == "cpu"
        if is_here and not isinstance(value, str | bytes | bytearray):
            try:
                return float(value)
            except (TypeError, ValueError, ArithmeticError, RuntimeError):
                pass
        kind = type(value).__name__
        self._refuse(f"a {kind} was given for a number, and is left out; pass loss.item()")
        return None

    def _refuse(self, why: str) -> None:
        if why not in self._refused:
            self._refused.add(why)
            self._mark(Mark(time.monotonic_ns(), "value_refused", why))


def _columns_of(rows: Iterable[StepValues]) -> Columns:
    return dict(zip(COLUMN_KINDS["steps"], zip(*rows, strict=True), strict=True))


def _rows_of(columns: Columns) -> Iterator[StepValues]:
    return zip(*columns.values(), strict=True)


def merge(columns: Columns, into_one: int) -> Columns:
    """Merge steps into fewer rows, each of `into_one` consecutive steps of a kind."""
    phases = columns["phase"]
    length = len(phases)
    is_one_kind = phases.count(phases[0]) == length and phases[0] in _MERGED_PHASES
    if is_one_kind and all(columns[name].count(None) in (0, length) for name in _ALIKE):
        return _sums(columns, into_one)
    alike = ([value is None for value in columns[name]] for name in _ALIKE)
    kinds = list(zip(phases, *alike, strict=True))
    size = into_one * len(set(kinds))
    merged = []
    for first in range(0, length, size):
        group = {name: column[first : first + size] for name, column in columns.items()}
        merged += _sums_by_kind(group, kinds[first : first + size])
    return _columns_of(map(step_values, merged))


def _sums_by_kind(columns: Columns, kinds: Sequence[tuple[Any, ...]]) -> list[Step]:
    """Merge the rows into one for each kind; requests are not merged."""
    rows = [Step(*row) for row in _rows_of(columns)]
    requests = [row for row in rows if row.phase not in _MERGED_PHASES]
    merged: list[Step] = []
    for kind in dict.fromkeys(kinds):
        if kind[0] in _MERGED_PHASES:
            pairs = zip(_rows_of(columns), kinds, strict=True)
            own = [row for row, other in pairs if other == kind]
            merged += [Step(*row) for row in _rows_of(_sums(_columns_of(own), len(own)))]
    merged.sort(key=lambda row: row.end_ns, reverse=True)
    if all(later.start_ns >= row.end_ns for row, later in pairwise(rows)):
        merged = _one_after_the_other(merged)
    return sorted([*merged, *requests], key=lambda row: row.start_ns)


def _one_after_the_other(latest_first: list[Step]) -> list[Step]:
    """Move rows so that they do not overlap, as the spans merged in them did not."""
    moved: list[Step] = []
    for row in latest_first:
        end_ns = min(row.end_ns, moved[-1].start_ns) if moved else row.end_ns
        start_ns = end_ns - (row.end_ns - row.start_ns)
        moved.append(replace(row, start_ns=start_ns, end_ns=end_ns))
    return moved


def _sums(columns: Columns, into_one: int) -> Columns:
    """Merge every `into_one` rows into one. All rows are of one kind."""
    starts, ends = columns["start_ns"], columns["end_ns"]
    length = len(starts)
    slices = [slice(first, first + into_one) for first in range(0, length, into_one)]
    tail = slice(length - 1, length if length % into_one else 0)
    merged: Columns = {
        name: [*column[into_one - 1 :: into_one], *column[tail]] for name, column in columns.items()
    }
    for name in _SUMS:
        if columns[name][0] is not None:
            totals = [sum(columns[name][rows]) for rows in slices]
            merged[name] = [total if abs(total) < _TOO_MANY else None for total in totals]
    lasts = merged["end_ns"] = [max(ends[rows]) for rows in slices]
    firsts = [min(starts[rows]) for rows in slices]
    lengths = (sum(ends[rows]) - sum(starts[rows]) for rows in slices)
    # Spans of several threads overlap; then the row holds all of them.
    together = zip(firsts, lasts, lengths, strict=True)
    merged["start_ns"] = [max(first, last - lasted) for first, last, lasted in together]
    for name, edge in (("host_start_ns", min), ("host_end_ns", max)):
        if columns[name][0] is not None:
            merged[name] = [edge(columns[name][rows]) for rows in slices]
    for name in _LATEST:
        if columns[name].count(None) < length:
            merged[name] = [_latest(columns[name][rows]) for rows in slices]
    return merged


def _latest(values: Sequence[float | None]) -> float | None:
    """The last number, or the first that is not finite: a loss that diverged stays visible."""
    numbers = [value for value in values if value is not None]
    last = numbers[-1] if numbers else None
    return next((value for value in numbers if not math.isfinite(value)), last)
