"""Steps that come faster than a disk takes them: recorded + dropped = made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.conftest import erg, script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.soak

STALL_S = 4.0


def made_by(lab: Lab, *arguments: object) -> tuple[int, float, dict[str, Any]]:
    """Steps made, the longest time from one to the next, and the report."""
    done = lab.run(*script("stalls_disk", "run", *arguments))
    assert (done.returncode, done.stderr) == (0, b"")  # no word of a disk that does not answer
    made, longest_s, _close_s = done.stdout.split()
    return int(made), float(longest_s), lab.report()


def check_complete(lab: Lab, made: int, report: dict[str, Any]) -> None:
    steps = Run.open(lab.path / "run").steps()
    readings = report["readings"]
    assert report["status"] == "finished"
    assert int(steps["steps"].sum()) + readings["steps.dropped"]["value"] == made
    assert readings["steps.dropped"]["value"] == 0
    assert readings["tokens.total"]["value"] == 64 * made
    # The rate is that of the steps that were made, by hand: tokens over first start to last end.
    seconds = (steps["end_ns"].max() - steps["start_ns"].min()) / 1e9
    assert abs(readings["throughput.tokens_per_s"]["value"] / (64 * made / seconds) - 1) < 1e-3


def test_a_tight_loop(lab: Lab) -> None:
    made, _, report = made_by(lab, 4, 0)
    check_complete(lab, made, report)
    rows = Run.open(lab.path / "run").count("steps")
    assert rows < made / 2
    (said,) = [note for note in report["notes"] if "faster than rows can be written" in note]
    assert said.startswith(f"{made} steps and other spans are in {rows} rows, up to ")
    assert "totals and rates are exact" in said
    _, checked, _ = erg("check", lab.path / "run")
    assert f"{made} steps and other spans are in {rows} rows" in " ".join(checked.split())
    code, _, why = erg("report", lab.path / "run", "--html", lab.path / "run.html")
    assert code == 0, why
    assert said in (lab.path / "run.html").read_text()


def test_a_disk_that_stalls_loses_no_step_and_stops_no_loop(lab: Lab) -> None:
    made, longest_s, report = made_by(lab, 8, 0.001, STALL_S)
    check_complete(lab, made, report)
    assert longest_s < STALL_S / 2
    assert Run.open(lab.path / "run").workload == {"said": "while the disk stalls"}


def test_a_disk_that_stalls_under_a_tight_loop(lab: Lab) -> None:
    made, longest_s, report = made_by(lab, 6, 0, STALL_S)
    check_complete(lab, made, report)
    assert longest_s < STALL_S / 2


def test_a_disk_that_stalls_at_the_end_is_waited_for(lab: Lab) -> None:
    made, _, report = made_by(lab, 3, 0.001, STALL_S)
    check_complete(lab, made, report)
