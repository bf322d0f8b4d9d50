"""What the launcher for SLURM makes of what the commands of a cluster answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ergmeter.bench.execute import state
from ergmeter.bench.execute.launching import LaunchOptions
from ergmeter.bench.plan.cells import Cell
from ergmeter.errors import PluginError

slurm = pytest.importorskip("ergmeter.bench.launchers.slurm", exc_type=ImportError)


class Commands:
    """SLURM's commands, as scripts that say what a test has them say."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def say(self, name: str, script: str) -> None:
        made = self.path / name
        made.write_text(f'#!/bin/sh\necho "$0 $*" >>{self.path}/asked\ncd {self.path}\n{script}\n')
        made.chmod(0o755)

    def asked(self, name: str) -> int:
        lines = (self.path / "asked").read_text().splitlines()
        return sum(line.startswith(f"{self.path}/{name} ") for line in lines)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return Commands(tmp_path / "bin")


def cell(index: int, *, num_gpus: int = 1, timeout_s: float | None = None) -> Cell:
    return Cell(
        index=index, id=str(index), scenario="s", settings={}, num_gpus=num_gpus, repeat=1,
        command=("true", "{run}"), timeout_s=timeout_s,
    )  # fmt: skip


def placed(out: Path, *cells: Cell) -> list[tuple[Cell, Path]]:
    found = []
    for one in cells:
        directory = out / "results" / f"exp_{one.index}"
        directory.mkdir(parents=True)
        found.append((one, directory))
    return found


def test_a_controller_that_does_not_answer_at_once_is_waited_for(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_LOOK_S", 0.0)
    commands.say("squeue", "")
    launcher = slurm.SlurmLauncher(LaunchOptions())
    launcher.take_over(placed(tmp_path, cell(0)))
    commands.say("squeue", "echo slurm_load_jobs error >&2; exit 1")
    assert launcher.poll().running == set()
    monkeypatch.setattr(slurm, "_SILENT_S", 0.0)
    with pytest.raises(PluginError, match="slurm_load_jobs error"):
        launcher.poll()


def test_what_is_to_be_cancelled_is_asked_for_until_the_controller_answers(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((one, directory),) = placed(tmp_path, cell(0))
    (directory / state.JOB).write_text("7_0")
    commands.say("squeue", "echo 7_0 RUNNING erg")
    launcher = slurm.SlurmLauncher(LaunchOptions())
    launcher.take_over([(one, directory)])
    # At first it does not answer; and the job ends a while after it was told to.
    commands.say(
        "squeue",
        "test -f once || { touch once; exit 1; }; test -f ended && exit;"
        " test -f gone && touch ended; echo 7_0 R e",
    )
    commands.say("scancel", "test -f twice || { touch twice; exit 1; }; touch gone")
    launcher.cancel()
    assert (commands.asked("scancel"), (commands.path / "gone").exists()) == (2, True)
    monkeypatch.setattr(slurm, "_END_S", 1.0)
    commands.say("squeue", "exit 1")
    with pytest.raises(PluginError, match="SLURM did not cancel 7_0: scancel them"):
        launcher.cancel()


def test_a_command_that_hangs_is_no_answer_and_ctrl_c_is_not_for_it(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.say("squeue", "ps -o sid= -p $$ >session")
    slurm._asked("squeue", "--me")
    assert int((commands.path / "session").read_text()) != os.getsid(0)
    commands.say("squeue", "exec sleep 600")
    monkeypatch.setattr(slurm, "_ASK_S", 0.2)
    began_s = time.monotonic()
    with pytest.raises(PluginError, match="squeue did not answer within"):
        slurm._asked("squeue", "--me")
    assert time.monotonic() - began_s < 300


def test_an_array_that_is_refused_leaves_word_of_those_that_were_taken(
    tmp_path: Path, commands: Commands
) -> None:
    commands.say("squeue", "")
    commands.say(
        "sbatch",
        'test -f once && exit 1; touch once; echo "Submitted batch job 12"; cp "$1" script',
    )
    launcher = slurm.SlurmLauncher(LaunchOptions())
    cells = placed(tmp_path, cell(0), cell(1), cell(2, num_gpus=2))
    with pytest.raises(
        PluginError, match=r"SLURM did not take the cells: .*2 cells are in the queue and run on:"
    ):
        launcher.submit(cells)
    assert (cells[1][1] / state.JOB).read_text() == "12_1"
    assert "#SBATCH --requeue\n" in (commands.path / "script").read_text()


def test_a_cell_that_ended_while_the_driver_started_is_not_submitted_again(
    tmp_path: Path, commands: Commands
) -> None:
    commands.say("squeue", "")
    commands.say("sbatch", 'echo "Submitted batch job 12"')
    cells = placed(tmp_path, cell(0), cell(1))
    state.write(cells[0][1], state.CellState(status="ok"))
    state.write(cells[1][1], state.CellState(status="cancelled"))
    (cells[0][1] / state.JOB).write_text("7_0")
    slurm.SlurmLauncher(LaunchOptions()).submit(cells)
    assert [(directory / state.JOB).read_text() for _, directory in cells] == ["7_0", "12"]


def test_a_preemption_within_a_cells_time_is_not_taken_for_the_end_of_its_jobs() -> None:
    """submitit's rule: the job's time is up in its last ten minutes, or its last fifth."""
    launcher = slurm.SlurmLauncher(LaunchOptions())
    for timeout_s in (1.0, 60.0, 1800.0):
        minutes = launcher._parameters([cell(0, timeout_s=timeout_s)])["timeout_min"]
        assert minutes * 60 - 10 * 60 >= timeout_s
