"""A disk that is full costs part of the record, which says so, and nothing of the training."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.conftest import ERG, script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.soak


@pytest.fixture
def small_disk(lab: Lab) -> Iterator[Path]:
    """A file system of 600 kB."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = lab.path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        lab.close()
        subprocess.run(["umount", "-l", str(path)], check=True)


def check_partial(lab: Lab, made: int, *, stream: str) -> None:
    report = lab.report("disk/run")
    table = Run.open(lab.path / "disk" / "run").steps(stream)
    steps = int(table["steps"].sum())  # lines that are read at one instant are a row of several
    # The first lines that are read start the clock.
    before = int(table["index"][0] - table["steps"][0]) + 1 if stream else 0
    # Full for 150 steps, and then 100 more. How many fall into a hand-over is the scheduler's: of
    # the first some are lost, of the last most are there.
    assert 40 < steps < made - 10
    assert [note for note in report["notes"] if "part of the record is missing" in note]
    assert report["damaged_files"] == []
    # What was done in the time of those that are lost is not known.
    for key in ("throughput.tokens_per_s", "tokens.total", "steps.count", "time.step_s"):
        assert "were not recorded: the disk refused" in report["readings"][key]["missing"]
    # Those that are there and those that are not are all that were made.
    assert steps + report["readings"]["steps.dropped"]["value"] == made - before


def test_a_recorded_training_outlives_a_full_disk(lab: Lab, small_disk: Path) -> None:
    done = lab.record(*script("fills_disk", small_disk, "print"), out="disk/run")
    made = len(done.stdout.splitlines())
    assert (done.returncode, done.stderr) == (6, b"")
    assert made >= 300
    check_partial(lab, made, stream="output")
    assert lab.report("disk/run")["status"] == "failed (exit code 6)"


def test_a_training_with_a_meter_outlives_a_full_disk(lab: Lab, small_disk: Path) -> None:
    done = lab.run(*script("fills_disk", small_disk, "meter"))
    made = len(done.stdout.splitlines())
    assert (done.returncode, done.stderr) == (6, b"")
    assert made >= 300
    check_partial(lab, made, stream="")


def test_steps_are_recorded_although_the_disk_was_full_for_the_first_of_them(
    lab: Lab, small_disk: Path
) -> None:
    # The file of steps is begun while nothing can be written to it.
    fills = f"while [ ! -e {small_disk}/run/*/samples-self* ]; do sleep 0.05; done; sleep 1"
    full = f"dd if=/dev/zero of={small_disk}/filler bs=512 2>/dev/null"
    steps = "for i in $(seq $1); do echo step=$i tokens=64; sleep 0.02; done"
    clear = f"rm {small_disk}/filler"
    again = steps.replace("step=$i", "step=$((i + 80))")
    command = "; ".join([fills, full, steps, clear, again])
    assert lab.record("sh", "-c", command, "sh", "80", out="disk/run").returncode == 0
    assert len(Run.open(lab.path / "disk" / "run").steps("output")["start_ns"]) >= 20


def test_a_disk_that_was_full_from_the_start_is_an_error_before_the_command(
    lab: Lab, small_disk: Path
) -> None:
    fill(small_disk)
    done = lab.record("touch", "started", out="disk/run")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert b"No space left" in done.stderr
    assert not (lab.path / "started").exists()


def test_a_disk_that_fills_up_at_the_start_leaves_the_command_running(
    lab: Lab, small_disk: Path
) -> None:
    command = (
        f"dd if=/dev/zero of={small_disk}/filler bs=512 2>/dev/null; sleep 2; echo done; exit 9"
    )
    done = lab.record("sh", "-c", command, out="disk/run")
    assert (done.returncode, done.stdout) == (9, b"done\n")
    assert len(done.stderr.splitlines()) <= 1
    opened = lab.run(ERG, "report", "disk/run", "--json", "--window", "unbroken")
    assert opened.returncode == 0, opened.stderr
    assert b"Traceback" not in opened.stderr


def test_a_disk_that_stays_full_is_still_told_of(lab: Lab, small_disk: Path) -> None:
    wait = f"while [ ! -e {small_disk}/run/*/samples-self* ]; do sleep 0.05; done; sleep 1"
    full = f"dd if=/dev/zero of={small_disk}/filler bs=512 2>/dev/null"
    steps = "for i in $(seq 200); do echo step=$i tokens=64; sleep 0.01; done"
    assert lab.record("sh", "-c", f"{wait}; {full}; {steps}", out="disk/run").returncode == 0
    report = lab.report("disk/run")
    assert [note for note in report["notes"] if "part of the record is missing" in note]
    assert report["damaged_files"] == []


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            pass
