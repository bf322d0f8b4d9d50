"""DeepSpeed's ZeRO-3 on two CPU ranks. Where it is installed beside the project, not in it.

In the environment of the tests it would be found and used by accelerate and transformers too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import SCRIPTS, Program, warmed
from tests.e2e.recorded_steps import steps, sums, trainings

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

BESIDE = Path(__file__).parents[2] / ".older" / "deepspeed"
STEPS, MICRO = 12, 2


def told(lab: Lab, how: str) -> list[dict[str, Any]]:
    return [json.loads((lab.path / f"{how}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.skipif(not BESIDE.is_dir(), reason=f"DeepSpeed is not in {BESIDE.name}; see ./dev")
def test_an_engine_of_zero_3_is_told_whole_and_trains_as_before(lab: Lab) -> None:
    words = [SCRIPTS / "deepspeed_loop.py", "plain", "metered"]
    loads = ("deepspeed", "light", "transformers.models.llama.modeling_llama")
    (done,) = warmed(
        Program(words, lab.path, loads, ranks=2), PYTHONPATH=str(BESIDE), DS_ACCELERATOR="cpu"
    )
    assert done.returncode == 0, done.stderr
    alone, own = told(lab, "plain"), told(lab, "metered")
    (run,) = lab.runs()
    for rank, said in enumerate(own):
        assert said["losses"] == alone[rank]["losses"]
        assert said["steps"] == STEPS
        rows = steps(run, rank=rank)
        assert rows["index"] == list(range(STEPS))
        assert rows["micro_steps"] == [MICRO] * STEPS
        assert rows["tokens_computed"] == sums(said["computed"], MICRO)
        assert rows["tokens_real"] == sums(said["real"], MICRO)
        assert said["held"] == 0  # between two uses nobody holds a parameter
    first, second = trainings(run)
    assert first["id"] == second["id"]
    assert first["parameters"] == first["parameters_trained"] == own[0]["parameters"]
    readings = lab.report(str(run))["readings"]
    tokens = sum(sum(one["real"]) for one in own)
    assert readings["tokens.total"]["value"] == tokens
    least_s, most_s = bounds_s(own)
    assert tokens / most_s <= readings["throughput.tokens_per_s"]["value"] <= tokens / least_s
    assert readings["compute.model_flops_per_token"]["value"] > 0
