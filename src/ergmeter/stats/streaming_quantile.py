"""The value at a place in the order of very many, of which few are in memory at a time.

The trap: a median of medians. The median over all steps of a thousand ranks is not the median of
the ranks' own, and a histogram's is as good as its bins. Here the value is the exact one: a sample
says between which two values it must lie, and going through all of them once more counts those
below and keeps those between (Floyd and Rivest, Expected time bounds for selection, 1975). Where
the sample misled, a wider pair of values is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Blocks: TypeAlias = Callable[[], Iterable[Values]]  # all values, anew at each call

HELD = 400_000  # values that are sorted as they are
_SAMPLE = 2**17
_DEVIATIONS = (4.0, 40.0, math.inf)  # of a place in the sample, that the true one may be off


def percentile(blocks: Blocks, q: float) -> float:
    """The q-th percentile (0 to 100) of all values, between the two nearest, as numpy has it."""
    count = sum(len(block) for block in blocks())
    place = (count - 1) * (q / 100)
    first = min(math.floor(place), count - 1)
    low, high = (float(one) for one in at(blocks, [first, min(first + 1, count - 1)], count))
    share = place - first
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def at(blocks: Blocks, places: Sequence[int], count: int) -> Values:
    """The values at these places, from 0, of all `count` of them in order."""
    if count <= HELD:
        return np.asarray(np.sort(np.concatenate(list(blocks())))[places])
    sample = _sample(blocks, count)
    found: dict[int, Any] = {}
    for deviations in _DEVIATIONS:
        left = [place for place in dict.fromkeys(places) if place not in found]
        if left:
            found |= _between(blocks, left, *_bounds(sample, left, count, deviations))
    return np.array([found[place] for place in places])


def _sample(blocks: Blocks, count: int) -> Values:
    """Some of the values in order, the least and the most of all at its ends."""
    dice = np.random.default_rng(0)  # the same each time, so that a report is
    taken: list[Values] = []
    edges: list[Values] = []
    for block in blocks():
        taken.append(block[dice.random(len(block)) < _SAMPLE / count])
        edges = [np.sort(np.concatenate([*edges, block]))[[0, -1]]] if len(block) else edges
    return np.sort(np.concatenate([*taken, *edges]))


def _bounds(
    sample: Values, places: Sequence[int], count: int, deviations: float
) -> tuple[Values, Values]:
    """Between which values those at these places are expected."""
    share = np.array(places) / (count - 1)
    last = len(sample) - 1
    if math.isinf(deviations):
        off = np.full(len(places), last)
    else:
        off = 2 + np.ceil(deviations * np.sqrt(len(sample) * share * (1 - share))).astype(int)
    near = np.rint(share * last).astype(int)
    return sample[np.clip(near - off, 0, last)], sample[np.clip(near + off, 0, last)]


def _between(blocks: Blocks, places: Sequence[int], lows: Values, highs: Values) -> dict[int, Any]:
    """The values at those of the places that lie between their bounds."""
    below = np.zeros(len(places), dtype=np.int64)
    inside: list[list[tuple[Values, Values]]] = [[] for _ in places]
    for block in blocks():
        values = np.sort(block)
        first, last = np.searchsorted(values, lows), np.searchsorted(values, highs, side="right")
        below += first
        for kept, a, b in zip(inside, first.tolist(), last.tolist(), strict=True):
            if b > a:
                # Equal ones by their number: they may be most of all.
                kept.append(np.unique(values[a:b], return_counts=True))
    found = {}
    for place, kept, before in zip(places, inside, below.tolist(), strict=True):
        if not kept:
            continue
        values, counts = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        order = np.argsort(values, kind="stable")
        upto = before + np.cumsum(counts[order])
        if before <= place < upto[-1]:
            found[place] = values[order][np.searchsorted(upto, place, side="right")]
    return found
