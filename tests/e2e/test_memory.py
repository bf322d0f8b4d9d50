"""The peak of a program's memory is the kernel's, also where no reading fell into it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import PYTHON, TIMEOUT_S, eventually

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1 << 20
# Holds 300 MiB for a moment; prints its own high-water mark.
HOLD = """
import re
from pathlib import Path
{before}
block = b"x" * (300 << 20)
del block
{after}
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak_bytes(lab: Lab, run: str = "run") -> float:
    found = lab.report(run)["readings"]["memory.process_peak_bytes"]
    assert found["basis"] == "measured", found
    return float(found["value"])


def test_a_command_that_held_much_for_a_moment_and_ended_has_its_peak(lab: Lab) -> None:
    done = lab.record(PYTHON, "-c", HOLD.format(before="", after=""))
    truth = int(done.stdout) * 1024
    assert truth > 300 * MIB
    assert peak_bytes(lab) == pytest.approx(truth, rel=0.01)


def test_so_has_one_whose_child_held_it(lab: Lab) -> None:
    hold = HOLD.format(before="", after="")
    outer = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    done = lab.record(PYTHON, "-c", outer, hold)
    assert peak_bytes(lab) == pytest.approx(int(done.stdout) * 1024, rel=0.01)


def test_a_small_command_is_not_as_large_as_the_recorder(lab: Lab) -> None:
    wait = "while [ ! -e go ]; do sleep 0.05; done"
    recorder = lab.start_recording("sh", "-c", wait)
    eventually(lambda: list(lab.path.glob("run/[!.]*/samples-process-*")), "a reading of the shell")
    (lab.path / "go").touch()
    assert recorder.wait(TIMEOUT_S) == 0
    assert 0 < peak_bytes(lab) < 20 * MIB


def test_a_meter_reads_the_mark_at_its_end(lab: Lab) -> None:
    before = "from ergmeter import Meter\nmeter = Meter('run', probes=['process']).start()"
    done = lab.run(PYTHON, "-c", HOLD.format(before=before, after="meter.close()"))
    assert peak_bytes(lab) == pytest.approx(int(done.stdout) * 1024, rel=0.01)
