"""How many repeats: the power that is claimed is the power that is had."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ergmeter.errors import UsageError
from ergmeter.stats.ratio import contrast, needed, power, relative, shows


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize(
    ("share", "noise", "repeats"),
    [(0.03, 0.01, 5), (0.03, 0.02, 5), (0.03, 0.03, 5), (0.03, 0.02, 3), (0.05, 0.02, 4)],
)
def test_claimed_power_is_what_simulated_experiments_have(
    share: float, noise: float, repeats: int, is_paired: bool
) -> None:
    rng = np.random.default_rng([repeats, round(share * 100), round(noise * 100)])
    trials = 1000
    a = np.exp(rng.normal(math.log1p(share), noise, (trials, repeats)))
    b = np.exp(rng.normal(0.0, noise, (trials, repeats)))
    shown = sum(contrast(x, y, is_paired=is_paired).is_shown for x, y in zip(a, b, strict=True))
    # Of a pair the noise is that of its difference.
    own = noise * math.sqrt(2) if is_paired else noise
    claimed = power(relative(share), own, repeats, is_paired=is_paired)
    off = 4 * math.sqrt(claimed * (1 - claimed) / trials) + 0.005
    assert shown / trials == pytest.approx(claimed, abs=off)


def test_a_published_sample_size() -> None:
    """Tables after Cohen 1988: d = 0.8, two-sided 5 %, power 0.80 takes 26 of each."""
    found = needed(0.8, 1.0, dof=50)
    assert found.repeats == 26
    # And d = 0.5 takes 64.
    assert power(0.5, 1.0, 63) < 0.8 <= power(0.5, 1.0, 64)


def test_what_is_needed_suffices_and_one_less_does_not() -> None:
    for noise in (0.005, 0.012):
        for is_paired in (False, True):
            found = needed(relative(0.02), noise, dof=4, is_paired=is_paired)
            assert found.repeats is not None
            assert power(relative(0.02), noise, found.repeats, is_paired=is_paired) >= 0.8
            assert power(relative(0.02), noise, found.repeats - 1, is_paired=is_paired) < 0.8


def test_a_scatter_that_is_known_from_few_gives_a_range() -> None:
    few = needed(relative(0.02), 0.012, dof=2)
    many = needed(relative(0.02), 0.012, dof=100)
    assert few.repeats == many.repeats
    assert few.fewest is not None
    assert few.most is not None
    assert many.fewest is not None
    assert many.most is not None
    assert few.repeats is not None
    assert few.fewest < many.fewest <= few.repeats <= many.most < few.most


def test_what_a_thousand_repeats_would_not_show_is_said() -> None:
    assert needed(relative(0.0001), 0.05, dof=4).repeats is None


def test_ends() -> None:
    assert power(0.1, 0.01, 1) == 0.0
    assert power(0.1, 0.0, 3) == 1.0
    with pytest.raises(UsageError, match="not 0"):
        relative(0.0)


@pytest.mark.parametrize("is_paired", [False, True])
def test_without_scatter_any_effect_shows_and_none_does_not(is_paired: bool) -> None:
    assert shows(-0.5, 0.0, 3, is_paired=is_paired, confidence=0.95)
    assert not shows(0.0, 0.0, 3, is_paired=is_paired, confidence=0.95)
