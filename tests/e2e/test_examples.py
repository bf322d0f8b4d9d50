"""The examples run as their first lines say, and print what they say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import ERG, PYTHON, TIMEOUT_S, Program, environment, needs, quick, warmed

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED = {"hf_trainer"}  # from outside: they know nothing of ergmeter
# They take a number of steps, so that tests are quick.
LONG = {
    *("plain_loop", "plain_torch", "fabric_loop", "fsdp2", "lightning_trainer", "hf_callback"),
}
STEPS = 10
# In processes of their own. JAX has no release for Python 3.10.
ALONE = {"plain_loop": None, "jax_loop": "jax"}
# Forked from one process, which loads more and more of what they import. TRL's sets a variable that
# `datasets` reads when it is loaded, as transformers' Trainer does: that comes after it.
OURS = ("ergmeter.metrics.summarize", "ergmeter.integrations.torch_loop")
WARM: dict[str, tuple[str, ...]] = {
    "plain_torch": ("torch", "torch._dynamo", *OURS),
    "efficientllm_loop": (),
    "fsdp2": ("transformers.models.llama.modeling_llama",),
    "generate": ("transformers.generation",),
    "profiler_mfu": (),
    "accelerate_loop": ("accelerate",),
    "trl_sft": (),
    "hf_callback": ("transformers.trainer",),
    "fabric_loop": ("lightning.fabric",),
    "lightning_trainer": ("lightning.pytorch",),
}
# Packages that frameworks load where they find them, and that no example uses.
LEFT_OUT = ("bitsandbytes", "sklearn")
# What Lightning says where SLURM is installed is not ours.
NOT_OURS = re.compile("`srun` command")


def words(name: str) -> list[object]:
    return [EXAMPLES / f"{name}.py", *([STEPS] if name in LONG else [])]


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d.*, (measured|derived|reported|assumed)$", done.stdout, re.MULTILINE)
    assert "erg report runs/" in done.stdout
    assert [line for line in done.stderr.splitlines() if not NOT_OURS.search(line)] == []


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*ALONE, *WARM, *RECORDED}


@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    needs(*filter(None, [ALONE[name]]))
    command = [PYTHON, *map(str, words(name))]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(**quick(*LEFT_OUT)), capture_output=True, text=True,
        check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    check(done)


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, subprocess.CompletedProcess[str]]:
    programs = [
        Program(words(name), tmp_path_factory.mktemp(name), imports)
        for name, imports in WARM.items()
    ]
    return dict(zip(WARM, warmed(*programs, **quick(*LEFT_OUT)), strict=True))


@pytest.mark.parametrize("name", WARM)
def test_an_example_of_a_framework_runs(
    ran: dict[str, subprocess.CompletedProcess[str]], name: str
) -> None:
    check(ran[name])


def test_the_test_of_a_profiler_mfu_shows_its_three_parts(
    ran: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    """As `python test_profiler_mfu.py` did: the function, the monitor, and what they cost."""
    out = ran["profiler_mfu"].stdout
    assert re.search(r"^MFU of a step of 0\.1 s: (nan|\d\.\d{4})", out, re.MULTILINE)
    assert re.findall(r"^🔍 步骤 (\d+): MFU = \d\.\d{4} ", out, re.MULTILINE) == ["10", "20"]
    cost = r"^a logged step costs \d+ us, a profiled one \d+ us; the model was run 20 times$"
    assert re.search(cost, out, re.MULTILINE)


def test_the_trainer_of_the_examples_is_recorded_with_its_steps_and_tokens(lab: Lab) -> None:
    needs("transformers")
    script = EXAMPLES / "hf_trainer.py"
    assert "erg record --warmup-steps 3 -- python examples/hf_trainer.py" in script.read_text()
    assert "ergmeter" not in script.read_text().split('"""')[2]
    command = (ERG, "record", "--warmup-steps", 3, "--out", "run", "--", PYTHON, script, STEPS)
    done = lab.run(*command, env=environment(**quick(*LEFT_OUT, "datasets", "peft")))
    card = done.stderr.decode().rpartition("╭─")[2]
    assert "tokens/s" in card
    assert "after 3 steps of warm-up" in card
    readings = lab.report()["readings"]
    assert readings["tokens.per_step"]["value"] == pytest.approx(4 * 256)
    assert readings["throughput.tokens_per_s"]["basis"] == "measured"
    assert readings["steps.count"]["value"] == STEPS - 3
