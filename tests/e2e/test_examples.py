"""The examples run as their first lines say, and print what they say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import ERG, PYTHON, TIMEOUT_S, environment, needs

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED = {"hf_trainer"}  # from outside: they know nothing of ergmeter
METERED = sorted(path for path in EXAMPLES.glob("*.py") if path.stem not in RECORDED)
# They take a number of steps, so that tests are quick.
LONG = {
    *("plain_loop", "plain_torch", "fabric_loop", "fsdp2", "lightning_trainer", "hf_callback"),
}
STEPS = 30
NEEDS = {"jax_loop": "jax"}  # which has no release for Python 3.10


@pytest.mark.parametrize("example", METERED, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    if example.stem in NEEDS:
        needs(NEEDS[example.stem])
    steps = [str(STEPS)] if example.stem in LONG else []
    done = subprocess.run(
        [PYTHON, str(example), *steps], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert "Reading(value=" in done.stdout
    assert "erg report runs/" in done.stdout
    # What bitsandbytes says when it is imported without a GPU is not ours, nor what Lightning says
    # where SLURM is installed.
    not_ours = re.compile("gemm_4bit|`srun` command")
    said = [line for line in done.stderr.splitlines() if not not_ours.search(line)]
    assert said == []


def test_the_trainer_of_the_examples_is_recorded_with_its_steps_and_tokens(lab: Lab) -> None:
    needs("transformers")
    script = EXAMPLES / "hf_trainer.py"
    assert "erg record --warmup-steps 3 -- python examples/hf_trainer.py" in script.read_text()
    assert "ergmeter" not in script.read_text().split('"""')[2]
    done = lab.run(ERG, "record", "--warmup-steps", 3, "--out", "run", "--", PYTHON, script, STEPS)
    card = done.stderr.decode().rpartition("╭─")[2]
    assert "tokens/s" in card
    assert "after 3 steps of warm-up" in card
    readings = lab.report()["readings"]
    assert readings["tokens.per_step"]["value"] == pytest.approx(4 * 256)
    assert readings["throughput.tokens_per_s"]["basis"] == "measured"
    assert readings["steps.count"]["value"] == STEPS - 3
