"""`erg calibrate` on this machine's CPU, and a training that is held against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ERG, Lab, environment, erg, quick

pytestmark = pytest.mark.soak

CALIBRATE = (ERG, "calibrate", "--quick", "--device", "cpu", "--quiet")


def kept(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    found: dict[str, Any] = json.loads(file.read_bytes())
    return found


def test_a_later_run_is_held_against_what_was_kept(lab: Lab) -> None:
    variables = environment(ERGMETER_CALIBRATION=str(lab.path / "kept"), **quick())
    done = lab.run(*CALIBRATE, "--json", env=variables)
    assert done.returncode == 0, done.stderr.decode()
    (found,) = json.loads(done.stdout)
    assert kept(lab.path / "kept") == found
    held = found["matmul"]["fp32"]
    assert held["window_s"] >= 0.5
    assert held["low"] <= held["median"] <= held["high"] <= held["burst"]
    assert found["conditions"]["threads"] == 1
    assert "read" in found["bandwidth"] or "free" in found["absent"]["memory read"]

    demo = (ERG, "demo", "--device", "cpu", "--json", "--quiet")
    for seconds in (2, 5, 40):  # longer where a busy machine makes too few steps in two
        run = f"run{seconds}"
        done = lab.run(*demo, "--seconds", seconds, "--out", run, env=variables)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr == b""
        report = json.loads(done.stdout)  # the report and nothing else
        assert report["path"] == run
        readings = report["readings"]
        of_achievable = readings["utilization.mfu_of_achievable_frac"]
        if "value" in of_achievable:
            break
    # The run's own FLOP/s over the rate that calibrating printed.
    each = readings["compute.model_flops_per_s_per_device"]["value"]
    assert of_achievable["value"] == each / held["value"]
    assert f"calibrated {found['measured'][:10]}" in of_achievable["note"]

    # A run holds what it was made with: calibrating is no part of reading it.
    for file in (lab.path / "kept").iterdir():
        file.unlink()
    read = json.loads(erg("report", lab.path / run, "--json")[1])
    again = read["readings"]["utilization.mfu_of_achievable_frac"]
    assert again["value"] == of_achievable["value"]


def test_an_interrupt_keeps_what_was_measured(lab: Lab) -> None:
    folder = lab.path / "kept"
    terminal = lab.terminal(ERG, "calibrate", "--quick", "--device", "cpu", "--out", folder)
    terminal.read_until(b"matmul bf16")
    terminal.type(b"\x03")
    shown = terminal.read_all().decode()
    assert terminal.process.wait() == 130, shown
    assert "interrupted after" in shown
    found = kept(folder)
    assert found["interrupted"]
    assert "fp32" in found["matmul"]  # and bf16 where it was done before the key was heard
    assert found["bandwidth"] == {}


def test_without_torch_it_says_what_to_install(lab: Lab) -> None:
    (lab.path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    done = lab.run(*CALIBRATE, env=environment(PYTHONPATH=str(lab.path)))
    assert done.returncode == 1
    assert done.stderr.decode() == "erg: erg calibrate needs torch: pip install 'ergmeter[torch]'\n"


def test_a_device_that_is_not_there_is_a_usage_error(lab: Lab) -> None:
    code, _, said = erg("calibrate", "--device", "cuda:99", "--out", lab.path)
    assert code == 2
    assert "no device 'cuda:99' here; it has cpu" in said
