"""Two ranks under the real torchrun: one run, each rank its own files, tokens added up once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import ERG, PYTHON, SCRIPTS, TIMEOUT_S, environment, quick, reported
from tests.ports import free_port

pytestmark = pytest.mark.frameworks

STEPS, TOKENS = 30, 64
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port"]


def torchrun(port: int, *arguments: str) -> list[str]:
    return [*TORCHRUN, str(port), str(SCRIPTS / "ranks.py"), str(STEPS), str(TOKENS), *arguments]


def done(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment(**quick()), check=False, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip


def check(run: Path, truths: Path) -> None:
    """Against what the ranks wrote to TRUTHS-RANK.json."""
    opened = Run.open(run)
    assert opened.status == "finished"
    steps = opened.steps()
    assert sorted(set(steps["rank"].tolist())) == [0, 1]
    assert len(steps["rank"]) == 2 * STEPS
    found = reported(run)["readings"]
    assert found["tokens.total"]["value"] == 2 * STEPS * TOKENS
    assert found["tokens.per_step"]["value"] == 2 * TOKENS
    assert found["steps.count"]["value"] == STEPS
    each = [
        json.loads(truths.with_name(f"{truths.name}-{rank}.json").read_text()) for rank in (0, 1)
    ]
    least_s, most_s = bounds_s(each)
    tokens = 2 * STEPS * TOKENS
    assert tokens / most_s <= found["throughput.tokens_per_s"]["value"] <= tokens / least_s


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Two loops of a Meter each, the second in a run of a name that loses its loss: the folder, the
    launcher's port, and what was said as errors."""
    folder, port = tmp_path_factory.mktemp("launched"), free_port()
    ended = done(torchrun(port, str(folder), "-", "mine=20"), folder)
    assert ended.returncode == 0, ended.stderr
    return folder, port, ended.stderr


def test_ranks_with_a_meter_each_find_the_same_run(launched: tuple[Path, int, str]) -> None:
    folder, _, _ = launched
    (run,) = (folder / "runs").iterdir()
    check(run, folder / "-")


def test_ranks_that_name_the_run_directory_share_it(launched: tuple[Path, int, str]) -> None:
    folder, _, _ = launched
    check(folder / "mine", folder / "mine")


def test_a_loss_that_all_ranks_lose_is_one_line_with_the_rank_and_a_mark_of_each(
    launched: tuple[Path, int, str],
) -> None:
    """A Meter in each of them, and nobody around who sees both."""
    folder, _, said = launched
    lines = [line for line in said.splitlines() if line.startswith("ergmeter: alert")]
    text = "loss nan: loss nan at step 20"
    assert lines in ([f"ergmeter: alert: {text} (rank {rank})"] for rank in (0, 1))
    run = Run.open(folder / "mine")
    marked = [[m.detail for m in one.marks if m.name == "alert"] for one in run.writers]
    assert [one for one in marked if one] == [[text], [text]]


def test_a_second_launch_does_not_join_the_first(launched: tuple[Path, int, str]) -> None:
    folder, port, _ = launched
    refused = done(torchrun(port, str(folder), "mine"), folder)
    assert refused.returncode != 0
    assert "not empty" in refused.stderr
    assert Run.open(folder / "mine").count("steps") == 2 * STEPS


def test_ranks_under_erg_record_join_its_run(tmp_path: Path) -> None:
    run = tmp_path / "recorded"
    record = [ERG, "record", "--quiet", "--probe", "process", "--out", str(run), "--"]
    ended = done([*record, *torchrun(free_port(), str(tmp_path), "-")], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "runs").exists()
    check(run, tmp_path / "-")
