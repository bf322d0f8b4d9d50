"""Whether the intervals hold what they promise, and the steady state is found."""

from __future__ import annotations

import numpy as np
import pytest

from ergmeter.stats.intervals import blocks_of, ratio_interval, settled_after, slope_interval, t95


def coverage(steps: int, *, correlated: bool) -> float:
    """The share of 400 simulated runs whose interval holds the true rate of 100 a second."""
    generator = np.random.default_rng(11)
    held = 0
    for _ in range(400):
        noise = generator.normal(0, 0.1, steps)
        if correlated:  # a slow stretch: each step is like the last one
            for i in range(1, steps):
                noise[i] += 0.6 * noise[i - 1]
        seconds = 1.0 + noise
        interval = ratio_interval(np.full(steps, 100.0), seconds)
        assert interval is not None
        held += interval[0] <= 100 <= interval[1]
    return held / 400


def test_the_interval_holds_the_truth_in_about_95_of_100_runs() -> None:
    assert 0.92 <= coverage(200, correlated=False) <= 0.98


def test_blocks_keep_the_promise_when_steps_depend_on_each_other() -> None:
    assert coverage(2000, correlated=True) >= 0.92


def test_treating_every_step_as_independent_would_break_it() -> None:
    """The reason for blocks: with steps as the unit the same runs are held far less often."""
    generator = np.random.default_rng(11)
    held = 0
    for _ in range(200):
        noise = generator.normal(0, 0.1, 2000)
        for i in range(1, 2000):
            noise[i] += 0.6 * noise[i - 1]
        error = noise.std() / np.sqrt(2000)
        held += abs(noise.mean()) <= 1.96 * error
    assert held / 200 < 0.85


def test_too_few_steps_have_no_interval() -> None:
    assert ratio_interval(np.ones(9), np.ones(9)) is None
    assert blocks_of(9) == 0
    assert blocks_of(10) == 5
    assert blocks_of(10_000) == 20


def test_students_t_is_the_tables() -> None:
    # Two-sided 95 % for 3, 4, 9 and 19 degrees of freedom, from a printed table.
    assert (t95(3), t95(4), t95(9), t95(19)) == (3.182, 2.776, 2.262, 2.093)


def test_steady_from_the_start_leaves_nothing_out() -> None:
    assert settled_after(np.array([1.0, 1.1, 0.9] * 20)) == 0


def test_a_start_that_is_slow_is_left_out_and_no_more() -> None:
    assert settled_after(np.array([9.0, 5.0] + [1.0, 1.1, 0.9] * 20)) == 2


@pytest.mark.parametrize(
    ("start", "steady", "n"),
    [
        ([300.0, 200.0], 20.0, 20),
        ([300.0], 0.1, 30),
        ([1e4, 3e3, 1e3], 0.3, 200),
        ([60.0], 1e-3, 9),
    ],
)
def test_a_start_of_minutes_leaves_no_rounding_in_the_rest(
    start: list[float], steady: float, n: int
) -> None:
    assert settled_after(np.array(start + [steady] * n)) == len(start)


@pytest.mark.parametrize("n", [10, 100, 1000, 5000])
@pytest.mark.parametrize("seconds", [0.1, 0.7, 1e-4])
def test_steps_that_do_not_differ_are_steady_from_the_start(n: int, seconds: float) -> None:
    assert settled_after(np.full(n, seconds)) == 0


def test_a_slope_through_five_blocks_uses_three_degrees_of_freedom() -> None:
    """The textbook's interval of a regression through five points, worked out by hand."""
    t_s, values = np.arange(10.0), np.array([1.0, 2, 2, 3, 5, 4, 6, 8, 7, 9])
    found = slope_interval(t_s, values)
    assert found is not None
    # Block means at t = 0.5, 2.5, ...: 1.5, 2.5, 4.5, 7, 8; slope 35/40; the squared residuals
    # add up to 0.675, so the slope's error is sqrt(0.675 / 3 / 40) = 0.075.
    assert found[0] == pytest.approx(0.875)
    assert found[2] - found[0] == pytest.approx(3.182 * 0.075)


def test_regular_stalls_are_part_of_the_steady_state() -> None:
    durations = np.array(([0.06] * 9 + [1.2]) * 10)
    settled = settled_after(durations)
    assert settled is not None
    assert settled < 10


def test_a_slope_is_found_with_its_interval() -> None:
    generator = np.random.default_rng(3)
    t_s = np.linspace(0, 100, 500)
    found = slope_interval(t_s, 5.0 * t_s + generator.normal(0, 20, 500))
    assert found is not None
    value, low, high = found
    assert low < 5.0 < high
    assert value == pytest.approx(5.0, abs=0.2)
