"""Where a run stands under its roof: the ladder of an H200, recorded there."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from ergmeter.metrics.explain.flops import roofline
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run

DATA = Path(__file__).parents[2] / "data" / "h200_run"


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("h200")
    with tarfile.open(DATA / "bench.tar.gz") as packed:
        packed.extractall(path, filter="data")
    return Run.open(path / "ladder")


def test_the_point_is_mfu_times_the_peak_over_the_bytes_that_were_counted(ladder: Run) -> None:
    found = roofline(evidence_of(ladder))
    readings = summarize(ladder).readings
    mfu, dram = readings["utilization.mfu_frac"], readings["activity.dram_frac"]
    assert isinstance(mfu, Reading)
    assert isinstance(dram, Reading)
    # NVIDIA's datasheet: 989.5 TFLOP/s dense bf16, 4.8 TB/s.
    assert found.flops_per_s == pytest.approx(mfu.value * 989.5e12)
    assert found.bytes_per_s == pytest.approx(dram.value * 4.8e12)
    assert found.flops_per_byte == pytest.approx(mfu.value * 989.5 / (dram.value * 4.8))
    assert found.ridge_flops_per_byte == pytest.approx(206.1, abs=0.1)
    assert found.flops_per_byte == pytest.approx(221, abs=1)
    assert found.bound_by == "arithmetic"
    assert found.roof_frac == pytest.approx(mfu.value)  # right of the ridge the roof is the peak
