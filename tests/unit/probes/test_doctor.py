"""What the doctor says of a package's memory. The scripted GPUs have what it says of GPUs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ergmeter import doctor
from ergmeter.probes import rapl
from tests.unit.probes.test_rapl import Powercap


def test_the_memory_of_a_package_whose_counter_is_stuck_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    powercap = Powercap(tmp_path)
    powercap.zone("intel-rapl:0", "package-0", 1000)
    powercap.zone("intel-rapl:0:0", "dram", 77)
    monkeypatch.setattr(rapl, "ROOT", str(powercap.root))
    counts = threading.Timer(doctor.APART_S / 2, powercap.count, ("intel-rapl:0", 2000))
    counts.start()
    (finding,) = doctor.examine(["rapl"])
    counts.join()
    package, dram = finding.reads.values()
    assert (package, dram) == (["energy"], [])
    (warning,) = finding.warnings
    assert "dram" in warning
    assert "stood still" in warning
