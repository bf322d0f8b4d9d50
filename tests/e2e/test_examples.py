"""The examples run, and print what they say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import PYTHON, TIMEOUT_S, environment

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, str(example)], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert "Reading(value=" in done.stdout
    assert "erg report runs/" in done.stdout
    assert done.stderr == ""
