"""`./dev`: what it sets up, and its exit codes. Its pip and its jobs are scripts that log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("dev", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for name in ("python", "erg", "mkdocs"):
        path = tmp_path / ".venv" / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/log\n')
        path.chmod(0o755)
    return tmp_path


def dev(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "dev", *words],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def installed(clone: Path, job: str) -> list[str]:
    """The extras that a job installs."""
    (clone / "log").write_text("")
    done = dev(clone, job)
    assert done.returncode == 0, done.stderr
    lines = (clone / "log").read_text().splitlines()
    return [line.partition("-e .")[2].strip("[]") for line in lines if " -e ." in line]


def test_a_job_keeps_what_earlier_jobs_set_up(clone: Path) -> None:
    assert installed(clone, "demo") == ["torch,serve"]
    assert installed(clone, "compare") == ["torch,serve,train"]
    assert [installed(clone, job) for job in ("demo", "train", "demo")] == [[], [], []]
    with (clone / "pyproject.toml").open("a") as file:  # as after `git pull`
        file.write("\n# changed\n")
    assert installed(clone, "demo") == ["torch,serve,train"]
    assert installed(clone, "train") == []


def test_dev_has_all_other_extras(clone: Path) -> None:
    assert installed(clone, "docs") == ["dev"]
    assert [installed(clone, job) for job in ("demo", "compare", "docs")] == [[], [], []]


def test_an_unknown_job_is_misuse(clone: Path) -> None:
    done = dev(clone, "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dev: no job 'nothing'; ./dev --help lists them\n"
