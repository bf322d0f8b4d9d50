"""The highest power of a short run, against what its energy says of the mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ergmeter.records import Sample, Step
from ergmeter.runlog.reader import Run
from tests.runs import GPU, reading, reason, run_of

S = 10**9


def short_run(path: Path, *, counted_w: float, read_w: float) -> Run:
    """1.5 s with five readings of power, and a counter that has risen by something else."""
    samples = [
        Sample(round(t_s * S), GPU.id, energy_j=1e6 + counted_w * t_s)
        for t_s in np.arange(0.0, 3.51, 0.1)
    ]
    samples += [Sample(round(t_s * S), GPU.id, power_w=read_w) for t_s in (1.1, 1.4, 1.7, 2.0, 2.3)]
    steps = [
        Step(S + i * S // 10, S + (i + 1) * S // 10, index=i, tokens_computed=10) for i in range(15)
    ]
    return run_of(path, steps=steps, samples=samples, devices=[GPU])


def test_a_peak_that_the_readings_missed_is_absent_and_not_below_the_mean(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", counted_w=500.0, read_w=200.0)
    assert reading(run, "energy.mean_w").value == pytest.approx(500, rel=0.01)
    said = reason(run, "energy.peak_w")
    assert "200 W is the highest of 5 readings, and 500 W the mean" in said


@pytest.mark.parametrize("read_w", [480.0, 499.0, 500.0])
def test_a_peak_is_no_less_than_a_mean_that_is_known_less_well(
    tmp_path: Path, read_w: float
) -> None:
    run = short_run(tmp_path / "run", counted_w=500.0, read_w=read_w)
    mean, peak = reading(run, "energy.mean_w"), reading(run, "energy.peak_w")
    assert mean.low is not None
    assert mean.low < read_w <= mean.value * (1 + 1e-9)
    assert peak.value >= mean.value
    assert peak.value == pytest.approx(500, rel=0.01)
    assert peak.basis == ("measured" if read_w == 500.0 else "derived")


def test_a_peak_above_the_mean_is_the_highest_reading(tmp_path: Path) -> None:
    peak = reading(short_run(tmp_path / "run", counted_w=500.0, read_w=700.0), "energy.peak_w")
    assert (peak.value, peak.basis) == (700.0, "measured")
