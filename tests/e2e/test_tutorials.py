"""The commands of the tutorials that train or serve, as they stand there, with fewer steps.

test_documented.py runs the others, and test_analyze.py the tutorial on Trainium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.documented import DOCS, ROOT, blocks
from tests.e2e.conftest import PYTHON, environment, eventually, needs, quick
from tests.models import models
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks
needs("transformers", "accelerate", "peft")

PATH = os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]])


def shell(name: str, language: str = "bash") -> list[str]:
    page = DOCS / f"tutorial-{name}.md"
    return [block.text for block in blocks(page) if block.language == language]


def console(name: str) -> list[str]:
    return [
        line.removeprefix("$ ")
        for text in shell(name, "console")
        for line in text.splitlines()
        if line.startswith("$ ")
    ]


def pasted(lab: Lab, text: str, **variables: str) -> str:
    """What a shell in a clone prints."""
    for name in ("configs", "examples", "tests", "scripts"):
        if not (lab.path / name).exists():
            (lab.path / name).symlink_to(ROOT / name)
    done = lab.run("bash", "-euc", text, env=environment(PATH=PATH, **variables))
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode() + done.stderr.decode()


def test_a_training_is_recorded(lab: Lab) -> None:
    (command,) = [text for text in shell("training") if text.startswith("erg record")]
    assert command == "erg record -- python examples/plain_loop.py"
    printed = pasted(lab, f"{command} 20")
    assert "╭─ plain_loop · finished · " in printed
    assert re.search(r"\d+ steps in ", printed)


@pytest.fixture
def built(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The built-in model is made once for all tests."""
    (lab.path / "outputs").mkdir()
    (lab.path / "outputs" / "models").symlink_to(models(tmp_path_factory))


@pytest.mark.usefixtures("built")
def test_two_backends_are_trained_in_turns_and_compared(lab: Lab) -> None:
    needs("bitsandbytes")
    train, compare, *_ = shell("backends")
    fewer = "--repeats 1 --set train.max_steps=6 --set metrics.warmup_s=0.01"
    assert "--repeats 3" in train
    printed = pasted(lab, train.replace("--repeats 3", fewer), **quick("sklearn"))
    assert printed.count("[train] Metrics saved to outputs/energy_results.csv") == 2
    printed = pasted(lab, f"{compare} --anyway")
    assert "bnb against torch (1 and 1 runs" in printed or "torch against bnb" in printed


@pytest.mark.usefixtures("built")
def test_a_bench_is_planned_run_and_gated(lab: Lab) -> None:
    (plan,) = shell("bench", "yaml")
    fewer = plan.replace("max_steps: 60", "max_steps: 6").replace("repeats: 3", "repeats: 1")
    assert fewer != plan
    (lab.path / "quick.yaml").write_text(fewer.replace("warmup: 1s", "warmup: 0.01s"))
    lines = [line for line in console("bench") if "recorded" not in line and line[:3] == "erg"]
    assert [line.split()[1:3] for line in lines] == [
        ["bench", "plan"], ["bench", "run"], ["bench", "report"],
        ["bench", "run"], ["gate", "after"], ["bench", "run"],
    ]  # fmt: skip
    plan_it, run_it, report_it, again_it, gate, more = lines
    pasted(lab, f"{plan_it}\n{run_it}\n{report_it}", **quick("bitsandbytes", "sklearn"))
    assert again_it == run_it.replace("before", "after")  # the same again, which takes as long
    shutil.copytree(lab.path / "before", lab.path / "after")
    assert "inconclusive: " in pasted(lab, gate)
    again = pasted(
        lab, more.replace("--repeats 5", "--repeats 2"), **quick("bitsandbytes", "sklearn")
    )
    assert "1 cell added to before: exp_1" in again
    assert "2 of 2 cells ended: 2 ok" in again


@pytest.fixture
def server(lab: Lab) -> Iterator[str]:
    """The server of the tutorial, at a free port."""
    needs("fastapi", "tokenizers")
    (make,) = [text for text in shell("inference") if "transformers serve" in text]
    made, _, serve = make.rpartition("\n")
    assert serve == "OMP_NUM_THREADS=1 transformers serve ./tiny-llama --device cpu &"
    pasted(lab, made)
    port = free_port()
    words = [*serve.removesuffix(" &").split()[1:], "--port", str(port)]
    words[0] = shutil.which(words[0], path=PATH) or words[0]
    offline = environment(PATH=PATH, HF_HUB_OFFLINE="1", HF_HOME=str(lab.path / "home"))
    with (lab.path / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=lab.path, env=offline, stdout=log, stderr=log)
    try:
        eventually(lambda: process.poll() is not None or is_up(port), "transformers serve")
        assert process.poll() is None, (lab.path / "log").read_text()
        yield f"http://localhost:{port}"
    finally:
        process.kill()
        process.wait()


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_server_is_measured(lab: Lab, server: str) -> None:
    loads = [line for line in console("inference") if line.startswith("erg load")]
    assert len(loads) == 2
    levels, limited = (pasted(lab, text.replace("http://localhost:8000", server)) for text in loads)
    assert re.findall(r"^(\d) at a time +(\d+) +0 ", levels, re.MULTILINE) == [
        ("1", "20"), ("2", "20"), ("4", "20"),
    ]  # fmt: skip
    assert "10/s: goodput " in limited
    assert "40/s: SLO attainment " in limited
