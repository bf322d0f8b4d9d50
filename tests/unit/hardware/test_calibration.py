"""Where a calibration is kept, who finds it again, and who does not."""

from __future__ import annotations

import json
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from ergmeter.cli.measure.calibrate import stored_line
from ergmeter.errors import FormatError, UsageError
from ergmeter.hardware.calibration import (
    CalibratedRate,
    Calibration,
    Idle,
    Refresh,
    attach,
    calibration_path,
    default_folder,
    load_calibration,
    save_calibration,
)
from ergmeter.ports import ProbeRequest
from ergmeter.records import Device
from ergmeter.sampler import open_probes

RATE = CalibratedRate(
    value=700e12, unit="FLOP/s", median=701e12, low=690e12, high=710e12, blocks=30, window_s=1.5,
    warmup_s=1.0, drift_frac=-0.01, of="8192x8192x8192", burst=800e12, burst_s=0.02,
    burst_of="8192x8192x8192", clock_hz=1.6e9, clock_low_hz=1.5e9, power_w=690.0,
    temperature_c=61.0, limited={"power": 0.9},
)  # fmt: skip


def calibration(device: str = "GPU-1", kind: str = "gpu") -> Calibration:
    return Calibration(
        device,
        kind,
        "NVIDIA H200",
        "2026-11-15T12:00:00+00:00",
        {"torch": "2.11", "driver": "580.159", "power_limit_w": 700.0},
        matmul={"bf16": RATE},
        bandwidth={"copy": replace(RATE, unit="B/s")},
        idle=Idle(121.0, 120.0, 122.0, 3.0, counter_w=119.0),
        refresh={"power": Refresh(0.1, 0.099, 0.101, 14, 0.0006)},
        sweep={"bf16": {"8192x8192x8192": 790e12}},
        absent={"matmul fp8": "torch refuses"},
    )


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ERGMETER_CALIBRATION", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_is_kept_is_found_again_by_the_devices_identity(folder: Path) -> None:
    path = save_calibration(calibration("GPU-1"))
    assert path.parent == folder
    assert load_calibration("GPU-1") == calibration("GPU-1")
    assert load_calibration("GPU-2") is None


def test_a_later_one_takes_the_place_of_an_earlier_and_leaves_nothing_beside_it(
    folder: Path,
) -> None:
    save_calibration(calibration())
    later = calibration()
    later.measured = "2026-11-16T12:00:00+00:00"
    save_calibration(later)
    assert load_calibration("GPU-1") == later
    assert [path.name for path in folder.iterdir()] == ["GPU-1.json"]


def test_names_that_share_a_file_are_not_taken_for_each_other() -> None:
    save_calibration(calibration("node:a"))
    assert calibration_path("node:a", Path()) == calibration_path("node_a", Path())
    assert load_calibration("node_a") is None


def test_the_folder_is_the_variables_or_the_users_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    assert default_folder() == folder
    monkeypatch.delenv("ERGMETER_CALIBRATION")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_folder() == tmp_path / "data" / "ergmeter" / "calibration"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".local" / "share" / "ergmeter" / "calibration"


def test_a_user_without_a_home_directory_has_no_calibration_and_is_told_where_to_keep_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("ERGMETER_CALIBRATION", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert default_folder() is None
    assert load_calibration("GPU-1") is None
    with pytest.raises(UsageError, match=r"no home directory .* pass --out FOLDER"):
        save_calibration(calibration())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is no calibration"),
        ('{"format": "ergmeter-calibration", "version": 9}', "version 9"),
        ('{"format": "ergmeter-calibration", "version": 1, "colour": 1}', "colour"),
    ],
)
def test_a_file_that_can_not_be_read_is_named_with_the_cure(
    folder: Path, text: str, said: str
) -> None:
    folder.mkdir()
    calibration_path("GPU-1", folder).write_text(text)
    with pytest.raises(FormatError, match=said) as raised:
        load_calibration("GPU-1")
    assert "erg calibrate" in str(raised.value)
    assert "GPU-1.json" in str(raised.value)


def test_a_device_gets_its_own_among_its_facts_and_a_broken_one_only_its_reason(
    folder: Path,
) -> None:
    save_calibration(calibration("GPU-1"))
    calibration_path("GPU-2", folder).write_text("{")
    gpus = [Device(f"GPU-{n}", "gpu", "NVIDIA H200", "nvml", {}) for n in (1, 2, 3)]
    attach(gpus)
    assert gpus[0].facts["calibration"]["matmul"]["bf16"]["value"] == 700e12
    assert "sweep" not in gpus[0].facts["calibration"]
    assert "is not JSON" in gpus[1].facts["no_calibration"]
    assert gpus[2].facts == {}


def test_a_run_takes_what_is_kept_when_its_probes_open(tmp_path: Path) -> None:
    request = ProbeRequest(1, str(tmp_path))
    node = open_probes(request, ["node"]).probes[0].devices[0]
    assert "calibration" not in node.facts
    save_calibration(calibration(node.id, "node"))
    node = open_probes(request, ["node"]).probes[0].devices[0]
    assert node.facts["calibration"]["measured"] == "2026-11-15T12:00:00+00:00"
    json.dumps(node.facts["calibration"], allow_nan=False)


def test_half_a_calibration_does_not_take_the_place_of_a_whole_one() -> None:
    half = calibration()
    half.interrupted, half.measured = True, "2026-11-16T12:00:00+00:00"
    assert "kept in" in stored_line(half, None)
    assert "kept in" in stored_line(calibration(), None)
    assert "the full one of 2026-11-15 stays" in stored_line(half, None)
    found = load_calibration("GPU-1")
    assert found is not None
    assert not found.interrupted


def test_an_interrupt_before_the_first_rate_keeps_nothing(folder: Path) -> None:
    nothing = Calibration("GPU-1", "gpu", "H200", "2026-11-15", {}, interrupted=True)
    assert "not kept" in stored_line(nothing, None)
    assert not folder.exists()
