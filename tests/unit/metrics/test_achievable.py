"""A run held against what its device was seen to hold: by hand, and what can't be said."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.hardware.calibration import CalibratedRate, Calibration
from ergmeter.metrics.definitions.achievable import (
    ACHIEVABLE,
    BANDWIDTH_OF_ACHIEVABLE,
    OF_ACHIEVABLE,
    OF_PEAK,
)
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.records import Device, Flops
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, even_steps, make_run, reading, reason

# 20 TFLOP and 6 GB a token; 100 tokens a second make 2 PFLOP/s and 600 GB/s of all devices.
STEP = Flops(2e15, "exact", "analytic", tokens_per_step=100, bytes_per_step=6e11)
RATE = CalibratedRate(
    value=800e12, unit="FLOP/s", median=800e12, low=790e12, high=810e12, blocks=30, window_s=1.5,
    warmup_s=1.0, drift_frac=0.0, of="8192x8192x8192", burst=900e12, burst_s=0.02,
    burst_of="8192x8192x8192",
)  # fmt: skip
READ = replace(RATE, value=4e12, unit="B/s", low=3.9e12, high=4.1e12)
CONDITIONS = {"torch": "2.11", "driver": "580.159", "power_limit_w": 700.0}


def calibrated(name: str, value: float = 800e12, **changes: Any) -> Device:
    """An H200 whose calibration has this rate in bf16."""
    whole = Calibration(
        name,
        "gpu",
        "NVIDIA H200",
        "2026-11-15T12:00:00+00:00",
        dict(CONDITIONS),
        matmul={"bf16": replace(RATE, value=value)},
        bandwidth={"read": READ},
        absent={"matmul fp8": "torch refuses: no fp8 here"},
    )
    for field, changed in changes.items():
        setattr(whole, field, changed)
    facts = {
        "calibration": whole.as_json(with_sweep=False),
        "power_limit_w": 700.0,
        "driver": "580.159",
    }
    return Device(name, "gpu", "NVIDIA H200", "nvml", facts)


def run_on(path: Path, *devices: Device, flops: Flops = STEP, **settings: Any) -> Run:
    """Twenty steps of a second with 100 tokens each."""
    make_run(path)
    add_writer(
        path,
        steps=even_steps(20, tokens_computed=100),
        devices=devices,
        settings={"dtype": "bf16", **settings},
        header={"flops": [asdict(flops)]},
    )
    return Run.open(path)


def test_mfu_of_the_achievable_is_flops_per_second_over_the_rate_that_was_held(
    tmp_path: Path,
) -> None:
    run = run_on(tmp_path / "run", *(calibrated(f"GPU-{n}") for n in range(4)))
    found = reading(run, OF_ACHIEVABLE)
    # 2e15 FLOP/s over 4 devices of 800e12.
    assert found.value == pytest.approx(0.625)
    assert found.basis == "derived"
    for said in ("calibrated 2026-11-15", "torch 2.11", "power limit 700 W", "bf16", "1.5 s"):
        assert said in found.note
    # Against the datasheet's 989.5 TFLOP/s the same run has 0.505.
    assert reading(run, MFU).value == pytest.approx(500 / 989.5, rel=1e-3)
    assert reading(run, OF_PEAK).value == pytest.approx(800 / 989.5, rel=1e-3)


def test_devices_that_differ_are_held_against_their_sum(tmp_path: Path) -> None:
    devices = [calibrated("GPU-0", 900e12), calibrated("GPU-1", 700e12)]
    run = run_on(tmp_path / "run", *devices, flops=replace(STEP, model_per_step=8e14 * 1.0))
    # 8e14 FLOP/s, of 1600e12 together.
    assert reading(run, OF_ACHIEVABLE).value == pytest.approx(0.5)
    assert reading(run, ACHIEVABLE).value == pytest.approx(800e12)


def test_bytes_of_decoding_are_held_against_the_memory_that_was_read(tmp_path: Path) -> None:
    run = run_on(tmp_path / "run", calibrated("GPU-0"))
    # 600 GB/s of 4 TB/s.
    assert reading(run, BANDWIDTH_OF_ACHIEVABLE).value == pytest.approx(0.15)
    bare = run_on(tmp_path / "bare", calibrated("GPU-0"), flops=replace(STEP, bytes_per_step=None))
    assert "inference" in reason(bare, BANDWIDTH_OF_ACHIEVABLE)


def test_a_cpu_is_held_against_the_calibration_of_its_node(tmp_path: Path) -> None:
    facts = {"calibration": calibrated("node:a", 4e15).facts["calibration"]}
    facts["calibration"]["matmul"]["fp32"] = facts["calibration"]["matmul"]["bf16"]
    node = Device("node:a", "node", "a", "node", facts)
    run = run_on(tmp_path / "run", node, dtype=None)
    found = reading(run, OF_ACHIEVABLE)
    assert found.value == pytest.approx(0.5)
    assert "fp32 products" in found.note


def test_a_calibration_that_can_not_be_read_is_absent_with_its_file(tmp_path: Path) -> None:
    broken = Device("GPU-1", "gpu", "NVIDIA H200", "nvml", {"no_calibration": "x.json: not JSON"})
    assert "x.json" in reason(run_on(tmp_path / "broken", broken), OF_ACHIEVABLE)


def test_a_type_that_was_not_calibrated_has_the_reason_of_the_day(tmp_path: Path) -> None:
    run = run_on(tmp_path / "run", calibrated("GPU-0"), dtype="fp8")
    assert "no fp8 here" in reason(run, OF_ACHIEVABLE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"conditions": {**CONDITIONS, "power_limit_w": 500.0}}, "power limit 500.0 W, and this"),
        ({"conditions": {**CONDITIONS, "driver": "570"}}, "driver 570, and this ran at 580.159"),
        ({"remarks": ["not alone: process 7 was on the device"]}, "not alone: process 7"),
        ({"matmul": {"bf16": replace(RATE, drift_frac=-0.06)}}, "moved by -6.0 %"),
    ],
)
def test_what_was_otherwise_when_it_was_calibrated_is_said_first(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    run = run_on(tmp_path / "run", calibrated("GPU-0", **changes), num_devices=4)
    note = reading(run, OF_ACHIEVABLE).note
    assert said in note
    assert note.index(said) < note.index("held in")


def test_faster_than_calibrated_is_not_clamped_and_says_what_to_do(tmp_path: Path) -> None:
    # 2e15 FLOP/s on 4 devices are 0.505 of the datasheet's peak, and 2.5 of 200e12 held.
    run = run_on(tmp_path / "run", *(calibrated(f"GPU-{n}", 200e12) for n in range(4)))
    found = reading(run, OF_ACHIEVABLE)
    assert found.value == pytest.approx(2.5)
    assert found.impossible.startswith("above 100 %: faster than in the calibration")


def test_nothing_is_computed_from_an_impossible_mfu(tmp_path: Path) -> None:
    # 2e15 FLOP/s on one device whose peak is 989.5e12.
    run = run_on(tmp_path / "run", calibrated("GPU-0"))
    assert reading(run, MFU).value == pytest.approx(2000 / 989.5, rel=1e-3)
    for key in (OF_ACHIEVABLE, OF_PEAK):
        assert reason(run, key).startswith("MFU 202 % is impossible: above 100 %: an input is")
    assert reading(run, ACHIEVABLE).value == pytest.approx(800e12)
