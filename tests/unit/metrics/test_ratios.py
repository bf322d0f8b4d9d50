"""Ratios of repeated runs: Student's t against its tables, intervals by hand, false alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.stats.intervals import cdf, factor, quantile, spread_bounds, tail_probability
from ergmeter.stats.ratio import PAIRED, WELCH, contrast, mean

AMOUNTS = st.lists(st.floats(0.01, 1e6), min_size=2, max_size=6)


@pytest.mark.parametrize(
    ("probability", "freedom", "tabled"),
    [
        # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: upper critical values.
        (0.90, 1, 3.078),
        (0.95, 2, 2.920),
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.975, 8, 2.306),
        (0.99, 5, 3.365),
        (0.995, 3, 5.841),
        # Federighi 1959 (JASA 54); the e-Handbook cuts 4.1437 to 4.143 where others are rounded.
        (0.999, 10, 4.144),
        (0.975, 30, 2.042),
        (0.975, 100, 1.984),
    ],
)
def test_the_quantile_is_the_tabled_one(probability: float, freedom: float, tabled: float) -> None:
    assert quantile(probability, freedom) == pytest.approx(tabled, abs=6e-4)


def test_one_and_two_degrees_of_freedom_have_closed_forms() -> None:
    for t in (-3.0, -0.2, 0.0, 0.7, 40.0):
        assert cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


@given(st.floats(0.01, 0.99), st.floats(0.7, 300))
def test_a_quantile_is_where_the_distribution_has_that_share(share: float, freedom: float) -> None:
    assert cdf(quantile(share, freedom), freedom) == pytest.approx(share, abs=1e-9)


def test_a_confidence_outside_0_and_1_is_refused() -> None:
    with pytest.raises(UsageError, match="the confidence is 95; must be between 0 and 1"):
        factor(95, 3)


def test_with_no_shift_the_tails_are_what_the_interval_leaves_out() -> None:
    for freedom in (1, 2, 4, 8, 40):
        assert tail_probability(0.0, freedom, critical=factor(0.95, freedom)) == pytest.approx(
            0.05, abs=2e-4
        )


def test_the_bounds_of_a_scatter_are_those_of_chi_squared() -> None:
    # Tables of chi-squared, 4 degrees of freedom: 10 % lie below 1.064, 90 % below 7.779.
    low, high = spread_bounds(4, confidence=0.8)
    assert low == pytest.approx(math.sqrt(4 / 7.779), rel=2e-3)
    assert high == pytest.approx(math.sqrt(4 / 1.064), rel=2e-3)


def test_pairs_by_hand() -> None:
    """Ratios 1.10, 1.21, 1.10: logs L, 2L, L with L = ln 1.1; s = L/sqrt(3), error = L/3."""
    found = contrast([110.0, 242.0, 330.0], [100.0, 200.0, 300.0], is_paired=True)
    unit = math.log(1.1)
    margin = 4.302653 * unit / 3
    assert found.value == pytest.approx(math.exp(4 * unit / 3))
    assert found.low == pytest.approx(math.exp(4 * unit / 3 - margin), rel=1e-6)
    assert found.high == pytest.approx(math.exp(4 * unit / 3 + margin), rel=1e-6)
    assert (found.method, found.dof) == (PAIRED, 2)
    assert not found.is_shown


def test_welch_by_hand() -> None:
    """Logs 0, 2 against 10, 11, 12: variances 2 and 1, so 1 + 1/3 and 16/9 / (1 + 1/18)."""
    found = contrast(np.exp([0.0, 2.0]), np.exp([10.0, 11.0, 12.0]))  # type: ignore[arg-type]
    assert found.dof == pytest.approx((16 / 9) / (1 + 1 / 18))
    assert found.low is not None
    half = -10 - math.log(found.low)
    assert half == pytest.approx(quantile(0.975, 32 / 19) * math.sqrt(4 / 3))
    assert found.method == WELCH
    assert found.is_shown


def test_one_run_of_each_has_a_ratio_and_no_interval() -> None:
    found = contrast([131.0], [100.0])
    assert found.value == pytest.approx(1.31)
    assert (found.low, found.high, found.is_shown) == (None, None, False)
    assert "one run of each: no interval" in found.why
    assert "one run on a side" in contrast([131.0], [100.0, 101.0]).why


def test_runs_that_do_not_scatter_are_exact() -> None:
    found = contrast([3e9, 3e9], [2e9, 2e9, 2e9])
    assert found.is_exact
    assert found.is_shown
    assert found.low == pytest.approx(1.5)


def test_what_is_the_same_is_no_rounding_apart() -> None:
    """Three logarithms of 2e10 have a mean that is not quite the logarithm of 2e10."""
    assert contrast([2e10, 2e10, 2e10], [2e10]).value == 1.0
    assert contrast([2e10], [2e10, 2e10, 2e10]).value == 1.0
    assert contrast([2e10 * (1 + 1e-9)], [2e10]).value > 1.0


def test_no_ratio_of_what_is_not_above_nothing() -> None:
    with pytest.raises(NotMeasurable, match="a ratio needs values above 0"):
        contrast([0.0, 1.0], [1.0, 1.0])
    assert contrast([0.0, 1.0], [1.0, 2.0], scale="difference").value == -1


@given(AMOUNTS, AMOUNTS)
def test_the_other_way_round_is_the_inverse(a: list[float], b: list[float]) -> None:
    there, back = contrast(a, b), contrast(b, a).inverse
    assert there.value == pytest.approx(back.value, rel=1e-9)
    assert (there.low or 0) == pytest.approx(back.low or 0, rel=1e-6)
    assert (there.high or 0) == pytest.approx(back.high or 0, rel=1e-6)
    assert there.is_shown == back.is_shown


@given(AMOUNTS, AMOUNTS, st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(a: list[float], b: list[float], unit: float) -> None:
    plain, scaled = contrast(a, b), contrast([x * unit for x in a], [x * unit for x in b])
    assert scaled.value == pytest.approx(plain.value, rel=1e-6)


def test_a_mean_and_its_interval_by_hand() -> None:
    """Logs -1, 0, 1: mean 0, standard deviation 1, error 1/sqrt(3)."""
    found = mean([math.exp(-1), 1.0, math.e])
    assert found.value == pytest.approx(1.0)
    assert found.noise == pytest.approx(1.0)
    assert found.high == pytest.approx(math.exp(4.302653 / math.sqrt(3)), rel=1e-6)
    assert mean([2.0]).low is None


@pytest.mark.parametrize("repeats", [3, 4, 5])
@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_where_nothing_differs_about_one_in_twenty_is_claimed(
    repeats: int, is_paired: bool, noise: float
) -> None:
    """Of 1 500 comparisons 5 % are 75, give or take 8: four times that is never seen.

    Welch's is known to claim a little less at so few repeats (3.5 % at 3): it has room below.
    """
    rng = np.random.default_rng([repeats, is_paired, round(noise * 100)])
    trials = 1500
    draws = np.exp(rng.normal(math.log(4000), noise, (trials, 2, repeats)))
    claimed = sum(contrast(a, b, is_paired=is_paired).is_shown for a, b in draws)
    off = 4 * math.sqrt(trials * 0.05 * 0.95)
    expected_least = trials * (0.05 if is_paired else 0.035)
    assert expected_least - off <= claimed <= trials * 0.05 + off


def test_what_pairs_share_does_not_hide_a_difference() -> None:
    """Seeds that scatter by 10 %, a backend that is 3 % faster on each: pairs show it."""
    rng = np.random.default_rng(5)
    seeds = np.exp(rng.normal(0, 0.1, 5))
    ours = seeds * 1.03 * np.exp(rng.normal(0, 0.003, 5))
    assert contrast(ours, seeds, is_paired=True).is_shown  # type: ignore[arg-type]
    assert not contrast(ours, seeds).is_shown  # type: ignore[arg-type]
