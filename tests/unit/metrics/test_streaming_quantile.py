"""Places in the order of very many values: numpy's answer to all of them at once is the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.stats import intervals

SPREADS: dict[str, Callable[[Any, int], Any]] = {
    "even": lambda dice, n: dice.normal(2.0, 0.002, n),
    "one far off": lambda dice, n: np.append(dice.normal(2.0, 0.002, n - 1), 600.0),
    "all the same": lambda _, n: np.full(n, 2.0),
    "few values": lambda dice, n: dice.integers(0, 4, n).astype(float),
    "rising": lambda _, n: np.arange(n, dtype=float),
    "whole numbers": lambda dice, n: dice.integers(10**17, 10**17 + 1000, n),
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("sample", [50, 5_000])
def test_values_are_those_of_the_whole_in_order(
    spread: str, sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intervals, "IN_MEMORY", 100)
    monkeypatch.setattr(intervals, "_SAMPLE", sample)
    values = SPREADS[spread](np.random.default_rng(1), 20_000)
    blocks = np.array_split(values, 37)
    places = [0, 1, 999, 10_000, 19_000, 19_999, 10_000]
    found = intervals.values_at(lambda: blocks, places, len(values))
    assert found.tolist() == np.sort(values)[places].tolist()
    for q in (0, 50, 95, 99.9, 100):
        assert intervals.percentile_of_blocks(lambda: blocks, q) == np.percentile(values, q)


def test_few_of_the_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 000 values, 1 % or so around each place; all of them only where a sample misleads."""
    kept = []
    monkeypatch.setattr(intervals, "IN_MEMORY", 1_000)
    monkeypatch.setattr(intervals, "_SAMPLE", 40_000)
    unique = np.unique

    def watched(values: Any, **options: Any) -> Any:
        kept.append(len(values))
        return unique(values, **options)

    monkeypatch.setattr("ergmeter.stats.intervals.np.unique", watched)
    values = np.random.default_rng(2).normal(size=400_000)
    median = intervals.percentile_of_blocks(lambda: np.array_split(values, 100), 50)
    assert median == np.percentile(values, 50)
    # Four deviations either way of 200 in 40 000: 2 % of all, for each of two places.
    assert 0 < sum(kept) < 2 * 0.03 * len(values)


@given(
    st.lists(st.lists(st.floats(-1e9, 1e9), max_size=8), min_size=1, max_size=6).filter(any),
    st.floats(0, 100),
)
def test_a_percentile_is_numpys(parts: list[list[float]], q: float) -> None:
    blocks = [np.array(part, dtype=float) for part in parts]
    whole = np.concatenate(blocks)
    scale = float(np.abs(whole).max()) + 1
    truth = float(np.percentile(whole, q))
    assert intervals.percentile_of_blocks(lambda: blocks, q) == pytest.approx(
        truth, abs=1e-12 * scale
    )
