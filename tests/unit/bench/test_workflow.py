"""docs/gate-github-actions.yml: its shell steps, run as GitHub runs them, on a bench of moments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import quick

pytestmark = pytest.mark.soak

WORKFLOW = Path(__file__).parents[3] / "docs" / "gate-github-actions.yml"
# What a Trainer prints at its end; tokens a second by the repeat, so that there is some noise.
PROGRAM = """
import sys
speed, noise = float(sys.argv[1]), int(sys.argv[2])
if speed == 0:
    sys.exit("broken")
rate = speed + noise
print({'train_runtime': 10000 / rate, 'train_samples_per_second': rate / 250,
       'train_steps_per_second': rate / 1000, 'train_tokens_per_second': rate,
       'train_loss': 2.0, 'epoch': 1.0, 'before_init_mem_gpu': 1000,
       'train_mem_gpu_alloc_delta': 500, 'train_mem_gpu_peaked_delta': 50})
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    scenario = {
        "name": "quick",
        "command": "{python} program.py {speed} {repeat} {run}",
        "arguments": {"speed": 1000},
    }
    (tmp_path / "scenarios.yaml").write_text(yaml.safe_dump({"scenarios": [scenario]}))
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def steps(job: str = "bench") -> list[dict[str, Any]]:
    return list(yaml.safe_load(WORKFLOW.read_text())["jobs"][job]["steps"])


def is_wanted(step: dict[str, Any], *, event: str, folder: Path) -> bool:
    """The conditions that the file has, and no others."""
    there = "x" if (folder / "reference.parquet").exists() else ""
    facts = {
        f"github.event_name == '{event}'": True,
        "hashFiles('reference.parquet') != ''": there != "",
        "hashFiles('reference.parquet') == ''": there == "",
        f"steps.run.outputs.code {'==' if _code(folder) == '0' else '!='} '0'": True,
        "always()": True,
    }
    asked = [one.strip() for one in str(step.get("if", "always()")).split("&&")]
    known = [*facts, "github.event_name == 'push'", "github.event_name == 'pull_request'"]
    known += ["steps.run.outputs.code != '0'"]
    assert set(asked) <= set(known)
    return all(facts.get(one, False) for one in asked)


def _code(folder: Path) -> str:
    """What the step `run` put out."""
    said = (folder / "output").read_text() if (folder / "output").exists() else ""
    return dict(line.split("=", 1) for line in said.splitlines()).get("code", "")


def run(folder: Path, event: str, *, repeats: int = 3) -> tuple[list[str], int, str]:
    """The names of the shell steps that ran, the last one's exit code, and the step summary.

    `repeats`: fewer than the file has, where no noise is looked at.
    """
    summary = folder / "summary.md"
    summary.write_text("")
    (folder / "output").write_text("")
    around = {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(folder / "output")}
    ran = []
    for step in steps():
        wanted = "run" in step and step["name"] != "install"
        if not wanted or not is_wanted(step, event=event, folder=folder):
            continue
        ran.append(step["name"])
        # There is no GPU to rest between cells.
        text = step["run"].replace("erg bench run", "erg bench run --cool-down 0")
        assert "erg bench run" not in text or "--repeats 3 " in text
        text = text.replace("--repeats 3 ", f"--repeats {repeats} ")
        done = shell(text, folder, **around)
        if done.returncode:
            return ran, done.returncode, summary.read_text() + done.stderr
    return ran, 0, summary.read_text()


def shell(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A step, as GitHub runs it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text],
        cwd=folder, env={**os.environ, "PATH": path, **variables, **quick("pandas")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def checked_out(folder: Path, speed: int) -> None:
    """actions/checkout leaves no files of before; the cache brings the reference."""
    if (folder / "results").exists():
        (folder / "results").rename(folder / f"gone-{speed}-{len(list(folder.iterdir()))}")
    # Slower by the program and not by a setting, as a change in the code would have it.
    text = PROGRAM.replace("speed + noise", f"{speed} + noise")
    (folder / "program.py").write_text(text.replace("speed == 0", f"{speed} == 0"))


def test_the_steps_are_what_they_say(clone: Path) -> None:
    assert run(clone, "pull_request", repeats=1)[0] == ["run", "no reference yet"]
    checked_out(clone, 1000)
    assert run(clone, "push") == (["run", "make the reference"], 0, "")
    assert (clone / "reference.parquet").is_file()
    checked_out(clone, 1000)
    ran, code, summary = run(clone, "pull_request")
    assert (ran, code) == (["run", "gate"], 0), summary
    assert "tokens_per_s" in summary
    checked_out(clone, 900)  # slower by a tenth
    ran, code, summary = run(clone, "pull_request")
    assert (ran, code) == (["run", "gate"], 1), summary
    assert "worse than is allowed" in summary
    checked_out(clone, 0)  # fails: the run goes on to the gate, and that is red
    ran, code, summary = run(clone, "pull_request", repeats=1)
    assert (ran, code) == (["run", "gate"], 1), summary
    assert "failed in NEW" in summary
    before = (clone / "reference.parquet").read_bytes()
    checked_out(clone, 0)  # nor does a main branch that fails become the reference
    ran, code, summary = run(clone, "push", repeats=1)
    assert (ran, code) == (["run", "keep the reference of before"], 1), summary
    assert "the reference stays as it was" in summary
    assert (clone / "reference.parquet").read_bytes() == before
    (clone / "results").rename(clone / "gone")
    (clone / "scenarios.yaml").write_text("scenarios: []")
    assert run(clone, "pull_request")[:2] == (["run"], 1)


TRAINING = """
import time
from ergmeter import Meter
with Meter(probes=["process"]) as meter:
    for _ in range(12):
        with meter.step(tokens=1000):
            time.sleep(SECONDS)
"""


def test_the_runs_of_two_branches_are_recorded_in_turns_and_judged(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for branch, seconds in (("main", "0.45"), ("slower", "0.65")):
        (tmp_path / "train.py").write_text(TRAINING.replace("SECONDS", seconds))
        git("add", "train.py")
        git("commit", "-qm", branch)
        if branch == "main":
            git("update-ref", "refs/remotes/origin/main", "HEAD")
    by_name = {step["name"]: step["run"] for step in steps("runs") if "run" in step}
    record = by_name["record"].replace("for repeat in 1 2 3", "for repeat in 1 2")
    done = shell(record, tmp_path, GITHUB_BASE_REF="main")
    assert done.returncode == 0, done.stderr
    report = tmp_path / "summary.md"
    done = shell(by_name["gate"], tmp_path, GITHUB_STEP_SUMMARY=str(report))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("::error title=erg gate::worse than is allowed (1 worse)")
    assert "tokens_per_s -3%" in report.read_text()
