"""Exact quantiles of very many values, with few of them in memory at a time.

A median of the ranks' medians is not the median over all steps, and a histogram is only as good as
its bins. Here a random sample gives two bounds, and a second pass counts the values below them and
collects those between (Floyd and Rivest, Expected time bounds for selection, 1975). If the value is
not between the bounds, wider ones are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Blocks: TypeAlias = Callable[[], Iterable[Values]]  # all values, anew at each call

IN_MEMORY = 400_000  # up to so many values are sorted in memory
_SAMPLE = 2**17
_DEVIATIONS = (4.0, 40.0, math.inf)  # standard deviations of a sample rank; tried in turn


def percentile(blocks: Blocks, q: float) -> float:
    """The q-th percentile (0 to 100), interpolated between the two nearest values as in numpy."""
    count = sum(len(block) for block in blocks())
    position = (count - 1) * (q / 100)
    first = min(math.floor(position), count - 1)
    low, high = (
        float(value) for value in values_at(blocks, [first, min(first + 1, count - 1)], count)
    )
    share = position - first
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def values_at(blocks: Blocks, places: Sequence[int], count: int) -> Values:
    """The values at these indices of the sorted order, which has `count` values."""
    if count <= IN_MEMORY:
        return np.asarray(np.sort(np.concatenate(list(blocks())))[places])
    sample = _sample(blocks, count)
    values: dict[int, Any] = {}
    for deviations in _DEVIATIONS:
        left = [rank for rank in dict.fromkeys(places) if rank not in values]
        if left:
            values |= _between(blocks, left, *_bounds(sample, left, count, deviations))
    return np.array([values[rank] for rank in places])


def _sample(blocks: Blocks, count: int) -> Values:
    """A sorted random sample that includes the lowest and the highest value."""
    dice = np.random.default_rng(0)  # a fixed seed keeps reports reproducible
    taken: list[Values] = []
    edges: list[Values] = []
    for block in blocks():
        taken.append(block[dice.random(len(block)) < _SAMPLE / count])
        edges = [np.sort(np.concatenate([*edges, block]))[[0, -1]]] if len(block) else edges
    return np.sort(np.concatenate([*taken, *edges]))


def _bounds(
    sample: Values, places: Sequence[int], count: int, deviations: float
) -> tuple[Values, Values]:
    """Lower and upper bounds of the values at these indices."""
    share = np.array(places) / (count - 1)
    last = len(sample) - 1
    if math.isinf(deviations):
        off = np.full(len(places), last)
    else:
        off = 2 + np.ceil(deviations * np.sqrt(len(sample) * share * (1 - share))).astype(int)
    near = np.rint(share * last).astype(int)
    return sample[np.clip(near - off, 0, last)], sample[np.clip(near + off, 0, last)]


def _between(blocks: Blocks, places: Sequence[int], lows: Values, highs: Values) -> dict[int, Any]:
    """The values by index, for those that lie between their bounds."""
    below = np.zeros(len(places), dtype=np.int64)
    inside: list[list[tuple[Values, Values]]] = [[] for _ in places]
    for block in blocks():
        values = np.sort(block)
        first, last = np.searchsorted(values, lows), np.searchsorted(values, highs, side="right")
        below += first
        for pieces, a, b in zip(inside, first.tolist(), last.tolist(), strict=True):
            if b > a:
                # Equal values are stored once with their count: they may be most of all.
                pieces.append(np.unique(values[a:b], return_counts=True))
    values_at = {}
    for rank, pieces, before in zip(places, inside, below.tolist(), strict=True):
        if not pieces:
            continue
        values, counts = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        order = np.argsort(values, kind="stable")
        upto = before + np.cumsum(counts[order])
        if before <= rank < upto[-1]:
            values_at[rank] = values[order][np.searchsorted(upto, rank, side="right")]
    return values_at
