"""A peak as people write it, and what is no peak."""

from __future__ import annotations

import pytest

from ergmeter.errors import UsageError
from ergmeter.hardware.table import parse_peak


@pytest.mark.parametrize(
    ("text", "flops_per_s"),
    [
        ("989.5e12", 989.5e12),
        ("989.5T", 989.5e12),
        ("989.5 TFLOP/s", 989.5e12),
        ("989.5 tflops", 989.5e12),
        ("2.25 PFLOP/s", 2.25e15),
        ("800G", 800e9),
        (" 312 TFLOPs ", 312e12),
        ("624 TOPS", 624e12),
        (".5P", 0.5e15),
    ],
)
def test_a_peak_is_read_as_people_write_it(text: str, flops_per_s: float) -> None:
    assert parse_peak(text) == pytest.approx(flops_per_s)


@pytest.mark.parametrize("text", ["", "fast", "-3T", "nan", "inf", "1e", "12 TB/s", "3 T T", "12M"])
def test_what_is_no_peak_is_misuse(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a peak; write 989\.5e12"):
        parse_peak(text)


@pytest.mark.parametrize("text", ["989.5", "0", "0T", "989.5e27", "1e400"])
def test_a_peak_in_the_wrong_unit_is_asked_about(text: str) -> None:
    with pytest.raises(UsageError, match=r"no device has .*; is the unit missing"):
        parse_peak(text)
