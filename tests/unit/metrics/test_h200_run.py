"""Runs measured on a real H200, read again here: the same numbers, and true ones."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run

DATA = Path(__file__).parents[2] / "data" / "h200_run"


def unpacked(name: str, into: Path) -> Run:
    with tarfile.open(DATA / f"{name}.tar.gz") as archive:
        archive.extractall(into, filter="data")
    (run,) = into.iterdir()
    return Run.open(run)


def test_a_run_read_elsewhere_gives_the_numbers_it_gave_there(tmp_path: Path) -> None:
    summary = summarize(unpacked("demo", tmp_path))
    there = json.loads((DATA / "demo.json").read_text())["readings"]
    compared = 0
    for key, result in summary.readings.items():
        if isinstance(result, Reading) and "value" in there.get(key, {}):
            # There the window began with a step; here with the end of the warm-up, 2.3 ms before,
            # and a step's time is from end to end: 0.7 % of the median.
            assert result.value == pytest.approx(there[key]["value"], rel=0.007), key
            compared += 1
    assert compared > 35


def test_its_joules_agree_with_the_power_it_read(tmp_path: Path) -> None:
    """Counter and instant power are two sensors' ways: within 2 % over 9 s."""
    run = unpacked("record", tmp_path)
    energy = summarize(run).readings["energy.run_j"]
    assert isinstance(energy, Reading)
    assert energy.basis == "measured"
    (power,) = run.series("power_w").values()
    steps = run.steps("output")
    start_ns, end_ns = int(steps["start_ns"][0]), int(steps["end_ns"][-1])
    grid = np.linspace(start_ns, end_ns, 2000)
    by_power_j = np.interp(grid, power.t_ns, power.values).mean() * (end_ns - start_ns) / 1e9
    assert energy.value == pytest.approx(by_power_j, rel=0.02)


def test_a_card_at_its_power_limit_reads_as_such(tmp_path: Path) -> None:
    readings = summarize(unpacked("record", tmp_path)).readings
    watts, throttled = readings["energy.mean_w"], readings["utilization.throttled_frac"]
    assert isinstance(watts, Reading)
    assert isinstance(throttled, Reading)
    assert watts.value == pytest.approx(700, rel=0.02)  # an H200's limit
    assert throttled.value > 0.9


def test_tokens_per_second_is_that_of_the_printed_lines(tmp_path: Path) -> None:
    run = unpacked("record", tmp_path)
    found = summarize(run).readings["throughput.tokens_per_s"]
    steps = run.steps("output")
    seconds = (int(steps["end_ns"][-1]) - int(steps["start_ns"][0])) / 1e9
    assert isinstance(found, Reading)
    assert len(steps["index"]) == 59
    assert found.value == pytest.approx(59 * 8192 / seconds)


@pytest.mark.parametrize(
    ("kind", "gflop_per_token", "mfu"),
    [("full", 6.760, 0.367), ("lora", 4.708, 0.250), ("qlora", 4.708, 0.246)],
)
def test_mfu_of_a_real_llama_in_training(
    tmp_path: Path, kind: str, gflop_per_token: float, mfu: float
) -> None:
    found = summarize(unpacked(f"mfu_{kind}", tmp_path)).readings
    per_token, speed = found["compute.model_flops_per_token"], found["throughput.tokens_per_s"]
    share = found["utilization.mfu_frac"]
    assert isinstance(per_token, Reading)
    assert isinstance(speed, Reading)
    assert isinstance(share, Reading)
    assert per_token.value / 1e9 == pytest.approx(gflop_per_token, abs=0.001)
    assert share.value == pytest.approx(per_token.value * speed.value / 989.5e12)
    assert share.value == pytest.approx(mfu, abs=0.0005)
