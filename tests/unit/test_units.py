"""How amounts are said."""

from __future__ import annotations

import pytest

from ergmeter.units import duration, number_of


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 devices"), (1, "1 device"), (2, "2 devices"), (1200, "1200 devices")]
)
def test_one_thing_is_in_the_singular(count: int, said: str) -> None:
    assert number_of(count, "device") == said


@pytest.mark.parametrize(("seconds", "said"), [(-0.0163, "-16.3 ms"), (-90.0, "-90 s")])
def test_a_time_before_the_beginning_is_in_the_unit_of_one_after_it(
    seconds: float, said: str
) -> None:
    assert duration(seconds) == said
