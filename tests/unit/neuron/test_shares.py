"""Shares near their ends are printed as what they are."""

from __future__ import annotations

import pytest

from ergmeter.neuron.kernels import decimals, percent


@pytest.mark.parametrize(
    ("frac", "said"),
    [
        (1.0, "100 %"), (0.99997, "99.997 %"), (1.00004, "100.004 %"), (0.9999999, "99.99999 %"),
        (0.0, "0 %"), (0.00003, "0.003 %"), (0.5, "50 %"), (0.123456, "12.35 %"),
    ],
)  # fmt: skip
def test_a_percentage_that_is_not_100_or_0_does_not_print_so(frac: float, said: str) -> None:
    assert percent(frac) == said


@pytest.mark.parametrize(
    ("value", "digits", "whole", "said"),
    [
        (0.25, 4, 1.0, "0.2500"), (1.0, 4, 1.0, "1.0000"), (0.0, 4, 1.0, "0.0000"),
        (0.99998, 4, 1.0, "0.99998"), (0.00003, 4, 1.0, "0.00003"),
        (99.997, 2, 100.0, "99.997"), (0.003, 2, 100.0, "0.003"), (15.477, 2, 100.0, "15.48"),
    ],
)  # fmt: skip
def test_a_ratio_keeps_its_decimals_unless_it_would_read_as_an_end(
    value: float, digits: int, whole: float, said: str
) -> None:
    assert decimals(value, digits, full=whole) == said
