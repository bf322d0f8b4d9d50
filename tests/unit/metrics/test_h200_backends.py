"""Three backends on an H200, as the ledger was written there: the verdicts by hand, and once more.

`first` has three rounds, `again` four, of the same configurations. What is checked against is
worked out here from the rows: the mean of the pairs' log ratios, and Student's t from the tables.
"""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest

from ergmeter.compare.comparison import Comparison, compare
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.sources import read_entries

DATA = Path(__file__).parents[2] / "data" / "h200_backends"
T_975 = {2: 4.303, 3: 3.182}  # by degrees of freedom
KEYS = {"throughput.tokens_per_s": "tok_per_s", "energy.joules_per_token": "J_per_token"}


def rows_of(series: str) -> list[dict[str, str]]:
    folder = DATA.with_name("h200_guide") if series == "guide" else DATA
    with (folder / f"{series}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval."""
    middle = statistics.fmean(values)
    half = T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half


def by_hand(
    series: str, backend: str, column: str, *, least_s: float = 0.0
) -> tuple[float, float, float]:
    """The ratio of a backend to torch, with its 95 % interval; of rounds with such windows."""
    rows = rows_of(series)
    of = {(row["backend"], row["seed"]): float(row[column]) for row in rows}
    short = {row["seed"] for row in rows if float(row["window_s"]) < least_s}
    seeds = sorted({row["seed"] for row in rows} - short)
    logs = [math.log(of[backend, seed] / of["torch", seed]) for seed in seeds]
    middle, low, high = interval(logs)
    return math.exp(middle), math.exp(low), math.exp(high)


def compared(series: str) -> Comparison:
    return compare(read_entries([DATA / f"{series}.csv"]), CompareOptions(group_by=("backend",)))


@pytest.mark.parametrize("series", ["first", "again"])
@pytest.mark.parametrize("backend", ["bnb", "unsloth"])
@pytest.mark.parametrize("key", KEYS)
def test_the_ratio_is_the_one_by_hand(series: str, backend: str, key: str) -> None:
    found = next(one for one in compared(series).pairs if one.new.name == backend)
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
@pytest.mark.parametrize("least_s", [0.0, 30.0])
def test_done_once_more_the_intervals_of_ratios_overlap(
    backend: str, column: str, least_s: float
) -> None:
    first, low, high = by_hand("first", backend, column, least_s=least_s)
    again, lower, higher = by_hand("again", backend, column, least_s=least_s)
    assert max(low, lower) < min(high, higher)
    assert first == pytest.approx(again, rel=0.03)


@pytest.mark.parametrize("backend", ["torch", "bnb", "unsloth"])
@pytest.mark.parametrize("column", [*KEYS.values(), "mfu", "vram_peak_MB"])
def test_done_once_more_the_intervals_of_each_backend_overlap(backend: str, column: str) -> None:
    spans = []
    for series in ("first", "again"):
        values = [float(row[column]) for row in rows_of(series) if row["backend"] == backend]
        spans.append(interval(values)[1:])
    (low, high), (lower, higher) = spans
    assert max(low, lower) <= min(high, higher)


@pytest.mark.parametrize("series", ["first", "again"])
def test_three_rounds_or_more_have_windows_of_half_a_minute(series: str) -> None:
    rows = rows_of(series)
    short = {row["seed"] for row in rows if float(row["window_s"]) < 30}
    assert len({row["seed"] for row in rows} - short) >= 3
    assert {row["status"] for row in rows} == {"finished"}


def test_tokens_are_of_the_whole_training_and_rates_of_its_window() -> None:
    """With the values of SFT-Play's guide, 40 steps a training: the same tokens in each."""
    rows = rows_of("guide")
    assert {(row["tokens_processed"], row["steps"]) for row in rows} == {("295365", "40")}
    for row in rows:
        tokens, window_s = float(row["window_tokens"]), float(row["window_s"])
        assert tokens < 295_365
        assert float(row["tok_per_s"]) == pytest.approx(tokens / window_s, rel=1e-9)
        assert float(row["J_per_token"]) == pytest.approx(float(row["energy_J"]) / tokens, rel=1e-9)


@pytest.mark.parametrize("backend", ["bnb", "torch", "unsloth"])
def test_the_page_for_users_of_sft_play_has_this_ledgers_figures(backend: str) -> None:
    rows = [row for row in rows_of("guide") if row["backend"] == backend]
    assert len(rows) == 2
    rate, joules, memory = (
        statistics.geometric_mean(float(row[column]) for row in rows)
        for column in ("tok_per_s", "J_per_token", "vram_peak_MB")
    )
    page = (Path(__file__).parents[3] / "docs/from-sft-play.md").read_text()
    assert f"| {backend} | {rate:,.0f} | {joules:.5f} | {memory / 1000:.2f} GB |" in page
