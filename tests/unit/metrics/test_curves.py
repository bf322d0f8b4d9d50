"""A curve stays short, and its points are the means of what was added."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.metrics.live.frame import POINTS, Curve


def test_few_values_are_the_curve() -> None:
    curve = Curve()
    curve.add(np.array([3.0, 1.0]))
    curve.add(np.array([2.0]))
    assert curve.points == (3.0, 1.0, 2.0)


def test_of_many_values_each_point_is_the_mean_of_as_many() -> None:
    curve = Curve()
    curve.add(np.arange(4.0 * POINTS))
    assert curve.points == tuple(np.arange(4.0 * POINTS).reshape(POINTS, 4).mean(axis=1))


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8))
def test_however_it_comes_it_is_short_and_forgets_nothing(lengths: list[int]) -> None:
    values = np.arange(float(sum(lengths)))
    whole, parts = Curve(), Curve()
    whole.add(values)
    for part in np.split(values, np.cumsum(lengths)[:-1]):
        parts.add(part)
    assert len(parts.points) <= POINTS + 1
    np.testing.assert_allclose(parts.points, whole.points)
    if len(values):
        assert parts.points[0] <= parts.points[-1]
