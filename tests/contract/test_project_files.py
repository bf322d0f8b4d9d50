"""The files that hosting, hooks and citations read are valid, and name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ergmeter import __version__

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / ".github").rglob("*.yml"),
    ROOT / "CITATION.cff",
    ROOT / ".pre-commit-config.yaml",
    ROOT / "docs" / "gate-github-actions.yml",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_yaml_and_runs_only_scripts_that_are_there(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)
    jobs = set(re.findall(r"\./dev (\w+)", text))
    assert jobs <= set(re.findall(r"#   \./dev (\w+)", (ROOT / "dev").read_text()))
    for script in re.findall(r"run: (\.\S+)", text):
        assert (ROOT / script).is_file(), script


def test_the_citation_is_of_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_the_tests_run_on_every_python_that_is_supported() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"][
        "python"
    ]
    lowest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest
    pythons = [f"3.{minor}" for minor in range(int(lowest[1]), 15)]
    assert job["strategy"]["matrix"]["python"] == pythons
