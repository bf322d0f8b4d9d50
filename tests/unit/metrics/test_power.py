"""What the energy of a window promises, as a reader would check it by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.device_energy import counter_curve, power_curve
from ergmeter.records import FloatArray, TimeArray, Window
from ergmeter.units import NS_PER_S


def window_s(start: float, end: float) -> Window:
    return Window(round(start * NS_PER_S), round(end * NS_PER_S))


def readings(*points: tuple[float, float]) -> tuple[TimeArray, FloatArray]:
    t_s, values = zip(*points, strict=True)
    return (np.array(t_s) * NS_PER_S).astype(np.int64), np.array(values, dtype=float)


def counter(
    until_s: float, watts: float, *, refresh_s: float = 0.1, read_s: float = 0.012
) -> tuple[TimeArray, FloatArray]:
    """Readings of a counter that shows the joules up to its last refresh."""
    t_s = np.arange(0, until_s, read_s)
    joules = np.floor(t_s / refresh_s + 1e-9) * refresh_s * watts
    return (t_s * NS_PER_S).astype(np.int64), joules


def test_constant_power_is_exact_when_the_window_falls_between_readings() -> None:
    curve = power_curve(*readings((0, 300), (1, 300), (2, 300), (3, 300)))
    assert curve.over(window_s(0.4, 2.6)).joules == pytest.approx(300 * 2.2)


def test_power_that_rises_in_a_straight_line_is_exact() -> None:
    curve = power_curve(*readings((0, 0), (1, 100), (2, 200)))
    # From 0.5 to 1.5 s the mean is 100 W.
    assert curve.over(window_s(0.5, 1.5)).joules == pytest.approx(100)
    assert curve.over(window_s(0.0, 0.5)).joules == pytest.approx(12.5)


def test_a_window_shorter_than_the_sampling_interval_is_not_zero() -> None:
    curve = power_curve(*readings((0, 100), (1, 200)))
    assert curve.over(window_s(0.45, 0.55)).joules == pytest.approx(15)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([(0.5, 300), (4, 300)], "begin 0.50 s after"),
        ([(0, 300), (1, 300)], "end 2.00 s before"),
        ([(0, 300), (2.5, 300), (3, 300)], "no power reading for 2.5 s"),
        ([(0, 0), (1, 0), (2, 0), (3, 0)], "0 W throughout"),
    ],
    ids=["starts too late", "ends too early", "hole", "dead sensor"],
)
def test_missing_power_is_refused_not_read_as_zero(
    points: list[tuple[float, float]], reason: str
) -> None:
    with pytest.raises(NotMeasurable, match=reason):
        power_curve(*readings(*points)).over(window_s(0, 3))


@given(watts=st.lists(st.floats(1, 1500), min_size=4, max_size=40), cut=st.floats(0.01, 0.99))
def test_two_halves_add_up_to_the_whole(watts: list[float], cut: float) -> None:
    curve = power_curve(*readings(*enumerate(watts)))
    start, end = 0.25, len(watts) - 1.25
    middle = start + cut * (end - start)
    whole = curve.over(window_s(start, end)).joules
    parts = sum(
        curve.over(half).joules for half in (window_s(start, middle), window_s(middle, end))
    )
    assert parts == pytest.approx(whole, rel=1e-6, abs=1e-3)


def test_a_counter_is_exact_over_a_long_window_and_says_how_sure_it_is() -> None:
    energy = counter_curve(*counter(10, 500)).over(window_s(2.03, 8.41))
    assert energy.joules == pytest.approx(500 * 6.38, rel=0.002)
    assert energy.low_j <= 500 * 6.38 <= energy.high_j
    # One refresh at each end: 50 J, twice.
    assert energy.high_j - energy.low_j == pytest.approx(100, abs=1)


def test_a_counter_gives_a_window_between_two_refreshes_its_share() -> None:
    curve = counter_curve(*counter(5, 500))
    energy = curve.over(window_s(2.02, 2.04))
    assert energy.joules == pytest.approx(10, rel=0.1)
    assert energy.low_j == 0
    assert energy.high_j >= 50 - 1e-6


@pytest.mark.parametrize("read_s", [0.012, 0.05, 0.1])
def test_the_counter_does_not_care_how_often_it_is_read(read_s: float) -> None:
    energy = counter_curve(*counter(20, 321, read_s=read_s)).over(window_s(3.2, 17.7))
    assert energy.joules == pytest.approx(321 * 14.5, rel=0.01)


def test_a_counter_nobody_read_for_long_still_knows() -> None:
    t_ns, joules = counter(30, 400)
    looked = (t_ns < 5 * NS_PER_S) | (t_ns > 25 * NS_PER_S)
    energy = counter_curve(t_ns[looked], joules[looked]).over(window_s(2, 28))
    assert energy.joules == pytest.approx(400 * 26, rel=0.005)


def test_a_counter_that_never_moves_is_refused() -> None:
    t_ns, joules = readings(*((t / 10, 42.0) for t in range(100)))
    with pytest.raises(NotMeasurable, match=r"stood still at 42\.0 J for 9\.9 s"):
        counter_curve(t_ns, joules)


def test_a_counter_that_was_reset_is_refused_with_both_values() -> None:
    t_ns, joules = counter(10, 500)
    joules[t_ns >= 5.05 * NS_PER_S] -= 2500
    with pytest.raises(NotMeasurable, match=r"reset from 2500\.0 to 0\.0 J"):
        counter_curve(t_ns, joules)
