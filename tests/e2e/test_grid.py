"""`erg grid`, and its names as the options of other commands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ergmeter.records import Sample
from tests.e2e.conftest import ERG, TIMEOUT_S, environment
from tests.runs import GPU, add_writer, even_steps, make_run

S = 10**9
MODEL = "hidden=256,layers=2,ffn=512,heads=4,vocab=1000"


def erg(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ERG, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(COLUMNS="120"),
        timeout=TIMEOUT_S,
        check=False,
    )


def test_one_grid_comes_with_its_year_source_and_licence() -> None:
    done = erg("grid", "germany")
    assert done.returncode == 0
    for said in ("344.1 g CO2e/kWh", "average of 2024", "Ember", "CC BY 4.0", "DE"):
        assert said in done.stdout
    done = erg("grid", "CAMX", "--json")
    row = json.loads(done.stdout)
    assert row["published_unit"] == "lb/MWh"
    assert abs(row["g_per_kwh"] - 429.983 * 0.45359237) < 0.05
    assert row["method"] == "location-based"


def test_all_grids_are_listed() -> None:
    rows = json.loads(erg("grid", "--json").stdout)
    assert len(rows) > 170
    done = erg("grid")
    assert done.returncode == 0
    assert all(row["code"] in done.stdout for row in rows)


def test_an_unknown_grid_is_one_line_and_code_2() -> None:
    for command in (("grid", "Germny"), ("record", "--grid", "Germny", "--", "true")):
        done = erg(*command)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "did you mean DEU (Germany)?" in done.stderr


def test_a_report_takes_a_grid_and_prices(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    samples = [
        Sample(t * S // 10, GPU.id, power_w=360.0, energy_j=36.0 * (t + 10))
        for t in range(-10, 111)
    ]
    steps = even_steps(10, tokens_computed=250)
    add_writer(path, steps=steps, samples=samples, devices=[GPU])
    given = ("--grid", "GB", "--price-per-gpu-hour", "3.6", "--currency", "USD")
    done = erg(
        "report", path, *given, "--metric", "carbon.co2e_g", "--metric", "cost.gpu", "--json"
    )
    readings = json.loads(done.stdout)["readings"]
    assert abs(readings["carbon.co2e_g"]["value"] / 0.21089 - 1) < 0.01  # 1 Wh
    assert "United Kingdom" in readings["carbon.co2e_g"]["note"]
    assert abs(readings["cost.gpu"]["value"] - 0.01) < 1e-9  # 10 s of 3.6 an hour
    assert readings["cost.gpu"]["unit"] == "USD"


def test_an_estimate_takes_a_grid_and_not_a_second_one() -> None:
    asked = ("estimate", MODEL, "--seq-len", "128", "--batch-size", "2", "--device", "h200-sxm5")
    stated = ("--tokens", "1e6", "--mfu", "0.4", "--watts", "500", "--json")
    done = erg(*asked, *stated, "--grid", "NO")
    readings = json.loads(done.stdout)["readings"]
    kwh = readings["estimate.energy_kwh"]["value"]
    assert abs(readings["estimate.co2e_g"]["value"] / (kwh * 30.75) - 1) < 1e-9
    assert "Norway, location-based, Ember" in readings["estimate.co2e_g"]["note"]
    done = erg(*asked, *stated, "--grid", "NO", "--grid-g-per-kwh", "5")
    assert done.returncode == 2
    assert "not both" in done.stderr
