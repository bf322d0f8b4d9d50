"""A few profiled steps of a real data-parallel training of two ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import UsageError
from ergmeter.integrations.training import Training
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import Run
from tests.e2e.conftest import SCRIPTS, Program, warmed

pytestmark = pytest.mark.frameworks


def trained(tmp_path: Path, *profiled: int) -> list[dict[str, Any]]:
    """Of trainings with so many profiled steps each."""
    program, loads = SCRIPTS / "profiled_ranks.py", ("torch._dynamo", "torch.profiler")
    runs = [tmp_path / f"run{steps}" for steps in profiled]
    done = warmed(
        *(
            Program([program, run, steps], tmp_path, loads, ranks=2)
            for run, steps in zip(runs, profiled, strict=True)
        )
    )
    for one in done:
        assert one.returncode == 0, one.stderr
    return [dict(summarize(Run.open(run)).readings) for run in runs]


def test_two_ranks_have_their_communication_apart_and_train_as_before(tmp_path: Path) -> None:
    found, without = trained(tmp_path, 3, 0)
    parts = [
        found[f"profile.{name}_frac"]
        for name in ("compute", "communication_alone", "copy_alone", "idle")
    ]
    assert all(isinstance(one, Reading) for one in parts), parts
    assert sum(one.value for one in parts) == pytest.approx(1)
    communication = found["profile.communication_frac"]
    assert "3 steps of 2 ranks under torch's profiler" in communication.note
    assert "delayed training by" in communication.note
    # gloo's own spans, in the trace that lies beside the run.
    shares = []
    for rank in (0, 1):
        with gzip.open(tmp_path / "run3" / "profile" / f"rank{rank}.json.gz", "rt") as packed:
            events = json.load(packed)["traceEvents"]
        gloo = [one for one in events if str(one.get("name")).startswith("gloo:")]
        steps = [one for one in events if str(one.get("name")).startswith("ProfilerStep")]
        assert len(steps) == 3
        assert gloo
        whole = max(s["ts"] + s["dur"] for s in steps) - min(s["ts"] for s in steps)
        shares.append(sum(one["dur"] for one in gloo) / whole)
    assert 0 < communication.value <= max(shares) * 1.01
    al, computing = found["time.in_step_s"], found["profile.computation_s"]
    assert 0 < computing.value <= al.value
    assert isinstance(without["profile.compute_frac"], Missing)
    assert "profile_steps" in without["profile.compute_frac"].reason
    for rank in (0, 1):
        losses = [(tmp_path / f"losses{rank}-{steps}").read_text() for steps in (3, 0)]
        assert losses[0] == losses[1]


def test_a_training_that_ends_before_its_profile_says_so(tmp_path: Path) -> None:
    training = Training(out=tmp_path / "run", probes=(), profile_steps=2)
    training.begin()
    for _ in range(5):
        training.step_begin()
        training.step_end()
    training.end()
    found = summarize(Run.open(tmp_path / "run")).readings["profile.idle_frac"]
    assert found == Missing("5 steps were run, and 2 are profiled after the first 11")
    with pytest.raises(UsageError, match="profile_steps must be an integer"):
        Training(profile_steps="three")
