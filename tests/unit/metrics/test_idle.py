"""Idle power as a calibration has it, and what is left of the energy without it: by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ergmeter.hardware.calibration import Calibration, Idle
from ergmeter.records import Device, Sample
from ergmeter.runlog.reader import Run
from tests.runs import even_steps, reading, reason, run_of

S = 10**9
CONDITIONS = {"torch": "2.11", "driver": "580.159", "power_limit_w": 700.0}
FACTS = {"power_field": "instant", "driver": "580.159", "power_limit_w": 700.0}


def calibrated(**changes: Any) -> Device:
    """A GPU that drew 121.5 W at rest by its counter, 120 W by its sensor."""
    whole = Calibration(
        "GPU-0", "gpu", "NVIDIA H200", "2026-11-15T12:00:00+00:00", dict(CONDITIONS),
        idle=Idle(120.0, 119.0, 121.0, 3.0, counter_w=121.5),
    )  # fmt: skip
    for field, changed in changes.items():
        setattr(whole, field, changed)
    facts = {**FACTS, "calibration": whole.as_json(with_sweep=False)}
    return Device("GPU-0", "gpu", "NVIDIA H200", "nvml", facts)


def run_on(path: Path, *devices: Device, watts: float = 350.0) -> Run:
    """Twenty steps of a second with a token each, at so many watts."""
    samples = [
        Sample(round(t * S / 10), devices[0].id, power_w=watts, energy_j=1e4 + watts * t / 10)
        for t in range(-10, 220)
    ]
    steps = even_steps(20, tokens_computed=1)
    return run_of(path, steps=steps, samples=samples, devices=devices)


def test_a_calibration_says_what_idle_is_where_the_run_does_not(tmp_path: Path) -> None:
    run = run_on(tmp_path / "a", calibrated())
    found = reading(run, "energy.idle_w")
    assert (found.value, found.basis) == (121.5, "measured")
    said = "as calibrated 2026-11-15, torch 2.11, driver 580.159, power limit 700 W"
    assert found.note == said
    net = reading(run, "energy.net_j", warmup_steps=0)
    assert net.value == pytest.approx(20 * (350 - 121.5))
    bare = run_on(tmp_path / "b", Device("GPU-0", "gpu", "NVIDIA H200", "nvml", FACTS))
    without = reason(bare, "energy.net_j")
    assert "no idle span" in without
    assert "erg calibrate" in without


def test_other_conditions_are_said_first_and_a_quick_one_says_so(tmp_path: Path) -> None:
    device = calibrated(conditions={**CONDITIONS, "driver": "550.54", "power_limit_w": 300.0})
    found = reading(run_on(tmp_path / "a", device), "energy.idle_w")
    assert found.note.startswith(
        "calibrated at power limit 300.0 W, and this ran at 700.0 W;"
        " calibrated at driver 550.54, and this ran at 580.159; as calibrated"
    )
    quick = reading(run_on(tmp_path / "b", calibrated(quick=True)), "energy.idle_w")
    assert quick.note.endswith(", quick")


def test_where_a_calibration_measures_no_idle_power_it_is_no_cure(tmp_path: Path) -> None:
    amd = Device("ff-1", "gpu", "AMD Instinct MI300X", "amd", FACTS)
    said = reason(run_on(tmp_path / "run", amd), "energy.idle_w")
    assert "`erg calibrate` measures idle power of NVIDIA GPUs only" in said
    assert "meter.phase('idle')" in said
    assert "run `erg calibrate`" not in said


def test_a_run_that_drew_less_than_idle_is_a_contradiction(tmp_path: Path) -> None:
    run = run_on(tmp_path / "run", calibrated(), watts=100.0)
    for key in ("energy.net_j", "energy.net_joules_per_token"):
        said = reason(run, key, warmup_steps=0)
        assert "the run drew 2 kJ, less than the 2.43 kJ that idle devices would have drawn" in said
        assert "121.5 W, as calibrated 2026-11-15" in said


def test_the_second_die_of_a_board_is_in_the_idle_watts_of_the_first(tmp_path: Path) -> None:
    second = Device("GPU-1", "gpu", "NVIDIA H200", "nvml", {**FACTS, "energy_counted_in": "GPU-0"})
    run = run_on(tmp_path / "run", calibrated(), second)
    assert reading(run, "energy.idle_w").value == 121.5
