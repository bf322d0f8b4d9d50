"""A run of `erg record` ends with its command, whatever the recorder still has to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run

SLOW_COUNT = """
import time
from ergmeter.cli.main import main
from ergmeter.recorder.record import FlopCounts

finish = FlopCounts.finish
FlopCounts.finish = lambda counts, meter: (time.sleep(2.0), finish(counts, meter))
main(["record", "--quiet", "--out", "run", "--", "sleep", "0.5"])
"""


def test_the_time_of_counting_flops_is_not_the_commands(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SLOW_COUNT], cwd=tmp_path, check=True, timeout=120)
    run = Run.open(tmp_path / "run")
    at_s = {mark.name: mark.t_ns / 1e9 for mark in run.marks}
    assert at_s["closed"] - at_s["ended"] >= 2.0
    lasted = summarize(run).readings["time.run_s"]
    assert isinstance(lasted, Reading)
    assert 0.5 <= lasted.value <= at_s["closed"] - at_s["opened"] - 2.0
