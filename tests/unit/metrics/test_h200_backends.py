"""Three backends on an H200, as the ledger was written there: the verdicts by hand, and once more.

`first` has two rounds, `second` three, of the same configurations. What is checked against is
worked out here from the rows: the mean of the pairs' log ratios, and Student's t from the tables.
"""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest

from ergmeter.metrics.comparison import Comparison, Options, compare
from ergmeter.metrics.sources import found_in

DATA = Path(__file__).parents[2] / "data" / "h200_backends"
T_975 = {1: 12.706, 2: 4.303}  # by degrees of freedom
KEYS = {"throughput.tokens_per_s": "tok_per_s", "energy.joules_per_token": "J_per_token"}


def by_hand(series: str, backend: str, column: str) -> tuple[float, float, float]:
    """The ratio of a backend to torch, with its 95 % interval."""
    with (DATA / f"{series}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    of = {(row["backend"], row["seed"]): float(row[column]) for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    logs = [math.log(of[backend, seed] / of["torch", seed]) for seed in seeds]
    half = T_975[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def compared(series: str) -> Comparison:
    return compare(found_in([DATA / f"{series}.csv"]), Options(group_by=("backend",)))


@pytest.mark.parametrize("series", ["first", "second"])
@pytest.mark.parametrize("backend", ["bnb", "unsloth"])
@pytest.mark.parametrize("key", KEYS)
def test_the_ratio_is_the_one_by_hand(series: str, backend: str, key: str) -> None:
    found = next(one for one in compared(series).pairs if one.other == backend)
    contrast = next(one.contrast for one in found.verdicts if one.measure.key == key)
    assert contrast is not None
    assert contrast.low is not None
    assert contrast.high is not None
    ratio, low, high = by_hand(series, backend, KEYS[key])
    assert contrast.value == pytest.approx(ratio, rel=1e-6)
    assert contrast.low == pytest.approx(low, rel=1e-3)
    assert contrast.high == pytest.approx(high, rel=1e-3)


@pytest.mark.parametrize("backend", ["bnb", "unsloth"])
@pytest.mark.parametrize("column", KEYS.values())
def test_done_once_more_the_intervals_overlap(backend: str, column: str) -> None:
    _, low, high = by_hand("first", backend, column)
    ratio, lower, higher = by_hand("second", backend, column)
    assert max(low, lower) < min(high, higher)
    assert low < ratio < high
