"""How many steps make an epoch, and which step is this epoch's?

Steps and epochs grow together, so an epoch tells its step. Two traps. Epochs are printed rounded,
to two decimals (transformers before 5.0) or four digits, so they tell a range of steps. And the
last step of an epoch may be a short one, of fewer micro-batches: each turn of an epoch may hold up
to one step more than the proportion says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

_TWO_DECIMALS = 0.005
_FOUR_DECIMALS = 5e-5
_EXACT = 1e-9  # of floats


class Epoch:
    """A printed epoch, and the range it was rounded from."""

    __slots__ = ("high", "low", "value")

    def __init__(self, value: float, *, fine: bool) -> None:
        digit = 10.0 ** (math.floor(math.log10(value)) - 3)
        rounding = max(_FOUR_DECIMALS, digit / 2) if fine else max(_TWO_DECIMALS, digit / 2)
        self.value = value
        self.low, self.high = max(0.0, value - rounding), value + rounding


class Pace:
    """The steps of an epoch, as far as known, and the last step that was believed."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high
        self._strides: deque[int] = deque(maxlen=2)
        self._n: int | None = None
        self.last: Epoch | None = None

    @classmethod
    def through(cls, points: Sequence[tuple[int, Epoch]]) -> Pace | None:
        """The pace at which each of these steps is at its epoch, if there is one."""
        bounds = [_bounds(n, epoch) for n, epoch in points]
        low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
        return cls(low, high) if low <= high * (1 + _EXACT) else None

    def steps(self, epoch: Epoch, total: int | None) -> range:
        """The steps that this epoch may be of."""
        low, high = self._low * epoch.low, self._high * epoch.high + math.floor(epoch.high)
        if self._n is not None and self.last is not None:
            turns = math.floor(epoch.high) - math.floor(self.last.low)
            low = max(low, self._n + 1, self._n + self._low * (epoch.low - self.last.high))
            high = min(high, self._n + self._high * (epoch.high - self.last.low) + turns)
        high = high if total is None else min(high, total)
        return range(math.ceil(low - _EXACT), math.floor(high + _EXACT) + 1)

    @property
    def next_regular(self) -> int | None:
        """The next step at the usual stride, where two strides in a row were the same."""
        if self._n is None or len(self._strides) < 2 or self._strides[0] != self._strides[1]:
            return None
        return self._n + self._strides[0]

    @property
    def next_multiple(self) -> int | None:
        """The next step, if logs are at the multiples of the last stride; no bar has to say so."""
        stride = self._strides[-1] if self._strides else 0
        return self._n + stride if self._n and stride and self._n % stride == 0 else None

    def believe(self, n: int, epoch: Epoch) -> None:
        """This step was at this epoch. Only what left no choice makes the pace more exact."""
        if len(self.steps(epoch, None)) == 1:
            low, high = _bounds(n, epoch)
            low, high = max(low, self._low), min(high, self._high)
            if low <= high:
                self._low, self._high = low, high
        if self._n is not None:
            self._strides.append(n - self._n)
        self._n, self.last = n, epoch


def _bounds(n: int, epoch: Epoch) -> tuple[float, float]:
    """The least and most steps of an epoch that put step n here."""
    high = n / epoch.low if epoch.low > 0 else math.inf
    return (n - math.floor(epoch.high)) / epoch.high, high
