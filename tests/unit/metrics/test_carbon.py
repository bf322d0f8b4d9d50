"""Carbon by hand: what a kilowatt-hour is worth where, of what, and what stays absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics.definitions import carbon_and_cost
from ergmeter.metrics.summarize import evidence_of, settings_of
from ergmeter.records import Device, Reading, Sample
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, even_steps, make_run, run_of

S = 10**9
COMPUTED = {metric.key.partition(".")[2]: metric.compute for metric in carbon_and_cost.METRICS}


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
    """Ten seconds at 360 W with 2500 tokens: 3600 J, which are 1 Wh."""
    steps = even_steps(10, tokens_computed=250)
    return run_of(tmp_path / "run", steps=steps, samples=samples(GPU, 360, 10), devices=[GPU])


def test_a_grid_by_name_is_its_published_figure_with_its_year(run: Run) -> None:
    reading = found(run, "co2e_g", grid="France")
    assert reading.value == pytest.approx(0.04418, rel=0.01)  # 1 Wh x 44.18 g/kWh
    assert reading.basis == "assumed"
    assert "44.18 g/kWh (France, location-based, Ember" in reading.note
    assert "2024" in reading.note
    told = "); the building's overhead is not in it (no PUE was given); interval is the energy's"
    assert told in reading.note


def test_a_subregion_is_converted_from_pounds(run: Run) -> None:
    # 429.983 lb/MWh is 195.04 g/kWh.
    assert found(run, "co2e_g", grid="camx").value == pytest.approx(0.19504, rel=0.01)


def test_market_and_location_stand_beside_each_other(run: Run) -> None:
    both = {"grid": "PL", "market_g_per_kwh": 0, "market_source": "certificates", "pue": 1.5}
    assert found(run, "co2e_g", **both).value == pytest.approx(0.61498 * 1.5, rel=0.01)
    by_contract = found(run, "market_co2e_g", **both)
    assert by_contract.value == 0
    assert "certificates" in by_contract.note
    assert "Poland" not in by_contract.note


def test_neither_stands_in_for_the_other(run: Run) -> None:
    assert "--market-g-per-kwh" in why(run, "market_co2e_g", grid="PL")
    assert "--grid NAME" in why(run, "co2e_g", market_g_per_kwh=10)
    assert "--grid NAME" in why(run, "co2e_per_million_tokens_g")
    assert "--market" in why(run, "market_co2e_per_million_tokens_g", grid="PL")


def test_a_million_tokens_are_so_many_windows(run: Run) -> None:
    # 1e6 / 2500 = 400 windows of 1 Wh: 0.4 kWh.
    reading = found(run, "co2e_per_million_tokens_g", grid_g_per_kwh=500, pue=1.2)
    assert reading.value == pytest.approx(400 * 0.001 * 500 * 1.2, rel=0.01)
    assert reading.low is not None
    assert reading.high is not None
    assert reading.low <= reading.value <= reading.high
    reading = found(run, "market_co2e_per_million_tokens_g", market_g_per_kwh=50)
    assert reading.value == pytest.approx(20, rel=0.01)


def test_without_tokens_there_is_no_figure_for_a_million(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run", steps=even_steps(10), samples=samples(GPU, 360, 10), devices=[GPU]
    )
    assert "no count of tokens" in why(run, "co2e_per_million_tokens_g", grid="FR")


def test_without_energy_there_is_no_carbon_but_a_share_of_the_making(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10), unavailable={"nvml": "no driver"})
    assert "no driver" in why(run, "co2e_g", grid="FR")
    assert "--num-devices" in why(run, "embodied_g", embodied_kg=150, lifetime_h=1000)
    # 4 devices x 10 s of 1000 h x 150 kg: 4 x 10 / 3.6e6 x 150000 g.
    share = found(run, "embodied_g", embodied_kg=150, lifetime_h=1000, num_devices=4)
    assert share.value == pytest.approx(4 * 10 / 3.6e6 * 150_000)
    assert "4 devices (as given)" in share.note


def test_the_making_of_two_devices_is_twice_that_of_one(tmp_path: Path) -> None:
    other = Device("GPU-1", "gpu", "Test GPU", "nvml", {"power_field": "instant"})
    run = run_of(
        tmp_path / "run",
        steps=even_steps(10),
        samples=[*samples(GPU, 360, 10), *samples(other, 360, 10)],
        devices=[GPU, other],
    )
    made = found(run, "embodied_g", embodied_kg=164, embodied_source="a study", lifetime_h=35040)
    assert made.value == pytest.approx(2 * 10 / 3600 / 35040 * 164_000)
    assert "a study" in made.note
    both = {"grid_g_per_kwh": 100, "embodied_kg": 164, "lifetime_h": 35040}
    whole = found(run, "co2e_with_embodied_g", **both)
    assert whole.value == pytest.approx(0.2 + made.value, rel=0.01)
    share = 100 * made.value / whole.value
    assert f"{share:.3g} % of it from the making" in whole.note


def test_half_of_the_making_is_no_figure(run: Run) -> None:
    assert "--lifetime-h" in why(run, "embodied_g", embodied_kg=150)
    assert "--embodied-kg" in why(run, "embodied_g", lifetime_h=1000)
    assert "--embodied-kg" in why(run, "co2e_with_embodied_g", grid="FR")


def test_a_figure_given_anew_does_not_keep_the_source_of_the_one_before(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    declared = Settings.declared(None, {"grid": "FR"}).as_json()
    assert declared["grid_g_per_kwh"] == 44.18
    add_writer(path, steps=even_steps(10), settings=declared)
    now = Settings.declared(None, {"grid_g_per_kwh": 700})
    in_force = settings_of(Run.open(path), now)
    assert in_force.grid_g_per_kwh == 700
    assert in_force.grid_source == "source not stated"
    in_force = settings_of(Run.open(path), Settings.declared(None, {"grid": "SE"}))
    assert in_force.grid_g_per_kwh == 35.82
    assert "Sweden" in str(in_force.grid_source)
    assert "France" in str(settings_of(Run.open(path)).grid_source)


@pytest.mark.parametrize(
    "wrong",
    [
        {"grid": "Atlantis"},
        {"grid": "FR", "grid_g_per_kwh": 40},
        {"market_g_per_kwh": -1},
        {"grid_g_per_kwh": float("nan")},
        {"embodied_kg": float("inf")},
        {"lifetime_h": 0},
        {"price_per_kwh": "cheap"},
        {"price_per_gpu_hour": True},
        {"currency": ""},
        {"currency": 5},
    ],
)
def test_what_makes_no_sense_is_refused_before_the_run(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(reversed(wrong))):
        Settings.declared(None, wrong)
