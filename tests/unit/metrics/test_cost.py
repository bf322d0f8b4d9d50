"""Money by hand: hours of devices, kilowatt-hours, and that the two are never one figure."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions import carbon_and_cost
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Device, Reading, Sample
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, even_steps, run_of

S = 10**9
COMPUTED = {metric.key.partition(".")[2]: metric.compute for metric in carbon_and_cost.COST_METRICS}
OTHER = Device("GPU-1", "gpu", "Test GPU", "nvml", {"power_field": "instant"})


def samples(device: Device, watts: float, seconds: int) -> list[Sample]:
    return [
        Sample(t * S // 10, device.id, power_w=watts, energy_j=watts * (t + 10) / 10)
        for t in range(-10, 10 * seconds + 11)
    ]


def found(run: Run, key: str, **declared: Any) -> Reading:
    return COMPUTED[key](evidence_of(run, Settings.declared(None, declared)))


def why(run: Run, key: str, **declared: Any) -> str:
    with pytest.raises(NotMeasurable) as raised:
        found(run, key, **declared)
    return str(raised.value)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """36 seconds of two GPUs at 100 W each: 0.02 GPU-hours, 7200 J, 36000 tokens."""
    return run_of(
        tmp_path / "run",
        steps=even_steps(36, tokens_computed=1000),
        samples=[*samples(GPU, 100, 36), *samples(OTHER, 100, 36)],
        devices=[GPU, OTHER],
    )


def test_rent_is_the_devices_times_the_hours_times_the_price(run: Run) -> None:
    reading = found(run, "gpu", price_per_gpu_hour=2.5, currency="USD")
    assert reading.value == pytest.approx(2 * 0.01 * 2.5)
    assert reading.unit == "USD"
    assert reading.basis == "assumed"
    assert "2 devices (seen in use) x 36 s x 2.5 an hour each" in reading.note


def test_rent_for_a_million_tokens_is_of_the_window(run: Run) -> None:
    # 36000 tokens for 0.05: a million for 0.05 / 0.036.
    reading = found(run, "gpu_per_million_tokens", price_per_gpu_hour=2.5, currency="EUR")
    assert reading.value == pytest.approx(0.05 / 0.036)
    assert reading.unit == "EUR"
    # Half of the steps left out halves tokens and time alike.
    later = found(run, "gpu_per_million_tokens", price_per_gpu_hour=2.5, warmup_steps=18)
    assert later.value == pytest.approx(reading.value)
    assert later.unit == "price units"
    assert found(run, "gpu", price_per_gpu_hour=2.5, warmup_steps=18).value == pytest.approx(0.025)


def test_the_whole_run_is_paid_for_also_where_the_window_is_a_part(tmp_path: Path) -> None:
    began_ns = time.monotonic_ns()
    steps = [
        replace(step, start_ns=step.start_ns + began_ns, end_ns=step.end_ns + began_ns)
        for step in even_steps(36, tokens_computed=1000)
    ]
    run = run_of(
        tmp_path / "run",
        steps=steps,
        header={"clock": {"monotonic_ns": began_ns, "wall_ns": 1_800_000_000 * S}},
        closed=False,  # so that its life ends with its last step
    )
    priced = {"price_per_gpu_hour": 50, "warmup_steps": 18, "num_devices": 2}
    assert found(run, "gpu", **priced).value == pytest.approx(2 * 18 / 3600 * 50)
    assert found(run, "gpu_whole_run", **priced).value == pytest.approx(2 * 36 / 3600 * 50)


def test_the_bill_is_kilowatt_hours_times_pue_times_the_price(run: Run) -> None:
    reading = found(run, "energy", price_per_kwh=0.3, pue=1.25, currency="EUR")
    assert reading.value == pytest.approx(0.002 * 1.25 * 0.3, rel=0.01)  # 7200 J are 2 Wh
    assert "J x 0.3 a kWh x PUE 1.25 (source not stated); interval" in reading.note
    reading = found(run, "energy_per_million_tokens", price_per_kwh=0.3)
    assert reading.value == pytest.approx(0.002 * 0.3 / 0.036, rel=0.01)


def test_a_price_nobody_gave_is_no_price(run: Run) -> None:
    for key in ("gpu", "gpu_whole_run", "gpu_per_million_tokens"):
        assert "--price-per-gpu-hour" in why(run, key, price_per_kwh=0.3)
    for key in ("energy", "energy_per_million_tokens"):
        assert "--price-per-kwh" in why(run, key, price_per_gpu_hour=3)


def test_a_price_of_nothing_is_a_price(run: Run) -> None:
    assert found(run, "gpu", price_per_gpu_hour=0).value == 0
    assert found(run, "energy", price_per_kwh=0).value == 0


def test_the_electricity_is_in_no_rent(run: Run) -> None:
    rent = found(run, "gpu", price_per_gpu_hour=2.5)
    assert found(run, "gpu", price_per_gpu_hour=2.5, price_per_kwh=1000, pue=2) == rent


def test_devices_nobody_saw_are_not_taken_for_one(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(36, tokens_computed=1000))
    assert "--num-devices" in why(run, "gpu", price_per_gpu_hour=2)
    reading = found(run, "gpu", price_per_gpu_hour=2, num_devices=8)
    assert reading.value == pytest.approx(8 * 0.01 * 2)
    assert "8 devices (as given)" in reading.note


def test_ranks_that_told_nothing_have_devices_that_nobody_counted(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        steps=even_steps(36, tokens_computed=1000),
        samples=samples(GPU, 100, 36),
        devices=[GPU],
        header={"host": "h", "world": 4},
    )
    assert "3 of which recorded no steps" in why(run, "gpu", price_per_gpu_hour=2)
    assert found(run, "gpu", price_per_gpu_hour=2, num_devices=4).value == pytest.approx(0.08)
    assert "recorded no steps" in why(
        run, "gpu_per_million_tokens", price_per_gpu_hour=2, num_devices=4
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(price=st.floats(0, 1e6), devices=st.integers(1, 10_000))
def test_twice_the_price_or_the_devices_is_twice_the_rent(
    run: Run, price: float, devices: int
) -> None:
    once = found(run, "gpu", price_per_gpu_hour=price, num_devices=devices).value
    assert found(run, "gpu", price_per_gpu_hour=2 * price, num_devices=devices).value == (
        pytest.approx(2 * once)
    )
    assert found(run, "gpu", price_per_gpu_hour=price, num_devices=2 * devices).value == (
        pytest.approx(2 * once)
    )
