"""A curve of bounded length, of numbers without end: for the sparkline of a run of any length.

The trap: the last hundred points. A curve of those forgets how it was, and says that a run which
has been slow for an hour is as fast as ever. Here each point is the mean of as many numbers, and as
many more as the run grows: when there are too many points, two become one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ergmeter.records import FloatArray

POINTS = 256


class Curve:
    """The means of equal numbers of values, from the first on."""

    def __init__(self) -> None:
        self._each = 1  # values in a point
        self._means = np.empty(0)
        self._rest = np.empty(0)  # that make no whole point yet

    def add(self, values: FloatArray) -> None:
        """Some more, in order."""
        values = np.concatenate([self._rest, values])
        whole = len(values) // self._each
        cut = whole * self._each
        means = values[:cut].reshape(whole, self._each).mean(axis=1) if whole else np.empty(0)
        self._means, self._rest = np.concatenate([self._means, means]), values[cut:]
        while len(self._means) > POINTS:
            self._halve()

    def _halve(self) -> None:
        pairs = len(self._means) // 2
        odd = self._means[2 * pairs :]
        # What makes no pair goes back among the values, as many times as it stands for.
        self._rest = np.concatenate([np.repeat(odd, self._each), self._rest])
        self._means = self._means[: 2 * pairs].reshape(pairs, 2).mean(axis=1)
        self._each *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """The curve; its last point may be of fewer values."""
        last = [self._rest.mean()] if len(self._rest) else []
        return tuple(float(point) for point in (*self._means, *last))
