"""How are the rows of millions of step lines kept, in the memory of a few hundred thousand?

Each line is a row until there are `MOST_ROWS`; then rows are made one of two, of four and so on,
the first one apart, as it starts the clock. The trap: a mean of means. So a row keeps sums and
counts, its least and its most, and the last number and time: what they come to over many rows is
what the lines themselves would have, and only the end of the warm-up is known less finely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from ergmeter.records import FloatArray

Part = Literal["last", "sum", "known", "low", "high", "inverse", "positive", "amount"]
Key = tuple[str, Part]

_PRINTED: tuple[Part, ...] = ("sum", "known", "low", "high", "inverse", "positive")
MOST_ROWS = 1 << 18
FOLD_ROWS = MOST_ROWS // 8  # at a time
FOLDED_ROWS = MOST_ROWS // 4  # once there were more


@dataclass(frozen=True, slots=True)
class Printed:
    """A printed figure, row by row: sums over the lines of a row that had it."""

    total: FloatArray
    known: FloatArray  # lines
    low: FloatArray  # NaN where no line had it
    high: FloatArray
    inverse: FloatArray  # the sum of 1 / value over those above 0
    positive: FloatArray  # lines with a value above 0

    @classmethod
    def of(cls, values: FloatArray) -> Printed:
        """A figure whose rows are single lines."""
        is_known = np.isfinite(values)
        is_positive = is_known & (values > 0)
        known = np.where(is_known, values, np.nan)
        inverse = np.zeros(len(values))
        np.divide(1.0, values, out=inverse, where=is_positive)
        return cls(
            np.where(is_known, values, 0.0),
            is_known.astype(float),
            known,
            known,
            inverse,
            is_positive.astype(float),
        )

    def after(self, first: int) -> Printed:
        """Without the rows before this one."""
        return Printed(*(part[first:] for part in self.parts))

    @property
    def parts(self) -> tuple[FloatArray, ...]:
        """Its columns, in the order in which it is made of them."""
        return self.total, self.known, self.low, self.high, self.inverse, self.positive

    @property
    def count(self) -> int:
        """The lines that had it, as a finite number."""
        return int(self.known.sum())

    @property
    def mean(self) -> float:
        """Over all lines that had it."""
        return float(self.total[self.known > 0].sum() / self.count)

    @property
    def count_positive(self) -> int:
        """The lines that had it above 0."""
        return int(self.positive.sum())

    @property
    def harmonic_mean(self) -> float:
        """Over all lines that had it above 0."""
        return float(self.count_positive / self.inverse[self.positive > 0].sum())

    @property
    def means(self) -> FloatArray:
        """Of each row; NaN where no line had it."""
        means = np.full(len(self.known), np.nan)
        np.divide(self.total, self.known, out=means, where=self.known > 0)
        return means


def parts_of(name: str, values: FloatArray) -> dict[Key, FloatArray]:
    """A column of single lines as what is kept of it."""
    parts = zip(_PRINTED, Printed.of(values).parts, strict=True)
    return {(name, part): array for part, array in parts}


class Folded:
    """Rows that stand for more and more lines, so that there are never too many."""

    def __init__(self) -> None:
        self.rows = 0
        self._width = 1  # lines of a row
        self._parts: dict[Key, FloatArray] = {}

    def append(self, more: dict[Key, FloatArray]) -> None:
        """Further lines; but for the first and the last time, as many as a power of two."""
        starts = self._starts(len(next(iter(more.values()))))
        for key in dict.fromkeys((*self._parts, *more)):  # one by one: the rest needs no room twice
            begin = self._parts.get(key, _nothing(key, self.rows))
            is_there = key in more
            end = _MERGE[key[1]](more[key], starts) if is_there else _nothing(key, len(starts))
            self._parts[key] = np.concatenate((begin, end))
        self.rows += len(starts)
        self.shrink(FOLDED_ROWS)

    def shrink(self, most: int) -> None:
        """Make rows one of two until there are no more than so many, and the first."""
        while self.rows > most + 1:
            starts = np.append(0, np.arange(1, self.rows, 2))
            for key, array in self._parts.items():
                self._parts[key] = _MERGE[key[1]](array, starts)
            self.rows, self._width = len(starts), 2 * self._width

    def last(self, name: str) -> FloatArray:
        """The last of each row."""
        return self._of(name, "last")

    def amount(self, name: str) -> FloatArray:
        """The sum of each row."""
        return self._of(name, "amount")

    def printed(self, name: str) -> Printed:
        """A figure."""
        return Printed(*(self._of(name, part) for part in _PRINTED))

    def _of(self, name: str, part: Part) -> FloatArray:
        return self._parts.get((name, part), _nothing((name, part), self.rows))

    def _starts(self, lines: int) -> npt.NDArray[np.int64]:
        """Where rows begin in these lines."""
        if self.rows:
            return np.arange(0, lines, self._width)
        return np.append(0, np.arange(1, lines, self._width))


def _last_of(array: FloatArray, starts: npt.NDArray[np.int64]) -> FloatArray:
    ends: FloatArray = array[np.append(starts[1:], len(array)) - 1]
    return ends


_MERGE: dict[Part, Callable[[FloatArray, npt.NDArray[np.int64]], FloatArray]] = {
    "last": _last_of,
    "sum": np.add.reduceat,
    "known": np.add.reduceat,
    "low": np.fmin.reduceat,
    "high": np.fmax.reduceat,
    "inverse": np.add.reduceat,
    "positive": np.add.reduceat,
    "amount": np.add.reduceat,  # not known of a row if not of each of its lines
}


def _nothing(key: Key, rows: int) -> FloatArray:
    """What a column is before its first line and after its last."""
    return np.full(rows, np.nan if key[1] in ("last", "low", "high", "amount") else 0.0)
