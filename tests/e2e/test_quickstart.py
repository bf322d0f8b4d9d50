"""The commands of docs/quickstart.md, as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import PYTHON, environment, needs, quick

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks
needs("transformers", "accelerate")

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
NOT_HERE = ("python3 -m venv", "pip install", "erg serve")  # installed already; serves for ever
STEPS = ("400", "30")  # fewer, so that the test is short
TOO_SHORT = ("erg compare", "erg compare --anyway")  # a window of 30 steps


def commands() -> str:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    lines = "".join(BLOCK.findall(page)).splitlines()
    lines = [line for line in lines if not line.startswith(NOT_HERE)]
    return "\n".join(lines).replace(*STEPS).replace(*TOO_SHORT).replace("1 2 3", "1 2")


def test_the_commands_of_the_quickstart(lab: Lab) -> None:
    (lab.path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]])
    left_out = quick("bitsandbytes", "sklearn")
    done = lab.run("bash", "-euxc", commands(), env=environment(PATH=path, **left_out))
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, err
    assert err.count("+ erg ") == commands().count("erg ") + 2  # a loop of two
    assert "╭─ hf_trainer · finished · " in err  # the card of a recording
    assert "erg explain runs/two-threads" in err
    assert "the waterfall" in out
    assert "one-thread against two-threads (1 and 1 runs)" in out
    assert "one against two (2 and 2 runs, " in out


def test_the_calculations_of_the_readme(lab: Lab) -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    (block,) = (block for block in BLOCK.findall(text) if block.startswith("CONFIG="))
    path = os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]])
    (lab.path / "tests").symlink_to(ROOT / "tests")
    done = lab.run("bash", "-euc", block, env=environment(PATH=path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"MFU ")
