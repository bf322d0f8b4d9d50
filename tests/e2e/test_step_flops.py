"""FLOPs of a step under `erg record`: counted beside the program, also of one that was killed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.flops.counted import remote
from ergmeter.runlog.reader import Run
from tests.e2e.conftest import QUICK, script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks


def truth(printed: bytes) -> dict[str, Any]:
    line = next(line for line in printed.decode().splitlines() if line.startswith("TRUTH "))
    found: dict[str, Any] = json.loads(line.removeprefix("TRUTH "))
    return found


def test_the_step_is_counted_and_the_program_stays_what_it_was(lab: Lab) -> None:
    done = lab.record(*script("recorded_step", 4), options=QUICK)
    assert done.returncode == 0, done.stderr.decode()
    told = truth(done.stdout)
    run = Run.open(lab.path / "run")
    assert [one.model_per_step for one in run.flops] == [told["by_hand"]]
    assert run.flops[0].other_work == ()
    alone = truth(lab.run(*script("recorded_step", 1)).stdout)
    before = alone["environment"]  # torch itself sets some
    changed = {name for name, value in told["environment"].items() if before.get(name) != value}
    assert changed == {"ERGMETER_FLUSH_LINES", "ERGMETER_RUN", "PYTHONPATH"}
    assert not before.keys() - told["environment"].keys()
    assert not told["children"]  # nothing of ours to wait for
    assert not (lab.path / "run" / remote.FOLDER).exists()
    # Steps are not longer while they are counted: by their 90th percentile, with room for a busy
    # machine; the old count stopped the loop.
    assert told["p90_s"] < 5 * alone["p90_s"] + 0.005


def test_a_program_that_was_killed_has_its_flops(lab: Lab) -> None:
    """By the recorder, which finishes what the program asked for."""
    done = lab.record(*script("recorded_step", 4, "kill"), options=QUICK)
    assert done.returncode == 128 + 9
    run = Run.open(lab.path / "run")
    assert run.status == "killed by SIGKILL"
    assert [one.model_per_step for one in run.flops] == [truth(done.stdout)["by_hand"]]
    assert run.flops[0].engine == "counted"


def test_each_of_several_trainings_has_its_own_flops(lab: Lab) -> None:
    """The first is not waited for when the second begins: the recorder finishes it."""
    done = lab.record(*script("several_trainings"), options=QUICK)
    assert done.returncode == 0, done.stderr.decode()
    run = Run.open(lab.path / "run")
    assert len(run.trainings) == 2
    found = [run.training(number).flops[0].model_per_step for number in (1, 2)]
    assert found == truth(done.stdout)["by_hand"]
