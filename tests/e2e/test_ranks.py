"""Two ranks under the real torchrun: one run, each rank its own files, tokens added up once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import ERG, PYTHON, SCRIPTS, TIMEOUT_S, environment
from tests.ports import free_port

STEPS, TOKENS = 30, 64
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port"]


def torchrun(port: int, *arguments: str) -> list[str]:
    return [*TORCHRUN, str(port), str(SCRIPTS / "ranks.py"), str(STEPS), str(TOKENS), *arguments]


def done(command: list[str], cwd: Path) -> str:
    """What it said as errors."""
    ended = subprocess.run(
        command, cwd=cwd, env=environment(), check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return ended.stderr.decode()


def readings(run: Path) -> dict[str, Any]:
    shown = subprocess.run(
        [ERG, "report", str(run), "--json", "--window", "unbroken"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(shown.stdout)["readings"]
    return found


def check(run: Path, truth: Path) -> None:
    opened = Run.open(run)
    assert opened.status == "finished"
    steps = opened.steps()
    assert sorted(set(steps["rank"].tolist())) == [0, 1]
    assert len(steps["rank"]) == 2 * STEPS
    found = readings(run)
    assert found["tokens.total"]["value"] == 2 * STEPS * TOKENS
    assert found["tokens.per_step"]["value"] == 2 * TOKENS
    assert found["steps.count"]["value"] == STEPS
    each = [json.loads((truth / f"{rank}.json").read_text()) for rank in (0, 1)]
    least_s, most_s = bounds_s(each)
    tokens = 2 * STEPS * TOKENS
    assert tokens / most_s <= found["throughput.tokens_per_s"]["value"] <= tokens / least_s


def test_ranks_with_a_meter_each_find_the_same_run(tmp_path: Path) -> None:
    done(torchrun(free_port(), str(tmp_path)), tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    check(run, tmp_path)


def test_ranks_that_name_the_run_directory_share_it(tmp_path: Path) -> None:
    done(torchrun(free_port(), str(tmp_path), str(tmp_path / "mine")), tmp_path)
    check(tmp_path / "mine", tmp_path)


def test_ranks_under_erg_record_join_its_run(tmp_path: Path) -> None:
    run = tmp_path / "recorded"
    record = [ERG, "record", "--quiet", "--probe", "process", "--out", str(run), "--"]
    done([*record, *torchrun(free_port(), str(tmp_path))], tmp_path)
    assert not (tmp_path / "runs").exists()
    check(run, tmp_path)


def test_a_second_launch_does_not_join_the_first(tmp_path: Path) -> None:
    out, port = str(tmp_path / "mine"), free_port()
    done(torchrun(port, str(tmp_path), out), tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        done(torchrun(port, str(tmp_path), out), tmp_path)
    assert b"not empty" in refused.value.stderr
    assert Run.open(out).count("steps") == 2 * STEPS


def test_a_loss_that_all_ranks_lose_is_one_line_with_the_rank_and_a_mark_of_each(
    tmp_path: Path,
) -> None:
    """A Meter in each of them, and nobody around who sees both."""
    said = done(torchrun(29615, str(tmp_path), str(tmp_path / "mine"), "20"), tmp_path)
    lines = [line for line in said.splitlines() if line.startswith("ergmeter: alert")]
    text = "loss nan: loss nan at step 20"
    assert lines in ([f"ergmeter: alert: {text} (rank {rank})"] for rank in (0, 1))
    run = Run.open(tmp_path / "mine")
    marked = [[m.detail for m in one.marks if m.name == "alert"] for one in run.writers]
    assert [one for one in marked if one] == [[text], [text]]
