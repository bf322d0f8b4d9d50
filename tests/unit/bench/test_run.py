"""`erg bench run` on programs of a moment: what it says, what it adds, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ergmeter.atomic_write import write_json
from ergmeter.bench.execute import driver, launching, state
from ergmeter.bench.launchers.local import LocalLauncher
from ergmeter.bench.plan.cells import BenchPlan, Cell
from ergmeter.views import bench as run

Erg = Callable[..., tuple[int, str, str]]


def scenarios(folder: Path, **keys: Any) -> Path:
    made = {
        "name": "mine",
        "command": ["{python}", "-c", "print('kernels', '{x}')", "{run}"],
        "arguments": {},
        "axes": {"x": [1, 2]},
        **keys,
    }
    path = folder / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [made]}))
    return path


def attempts(out: Path) -> dict[str, int]:
    found = sorted(out.glob("exp_*/status.json"))
    return {path.parent.name: len(json.loads(path.read_text())["attempts"]) for path in found}


def test_more_repeats_and_another_value_are_added_to_what_is_done(erg: Erg, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert erg("bench", "run", scenarios(tmp_path), "--out", out)[0] == 0
    code, said, err = erg("bench", "run", scenarios(tmp_path), "--out", out, "--repeats", 2,
                          "--resume")  # fmt: skip
    assert (code, said.splitlines()[-1]) == (0, "4 of 4 cells ended: 4 ok")
    assert f"2 cells added to {out}: exp_2 to exp_3" in err
    path = scenarios(tmp_path, axes={"x": [0, 1]})
    dry = erg("bench", "run", path, "--out", out, "--resume", "--dry-run")
    assert dry[0] == 0
    assert "# exp_4: mine, repeat 1: num_gpus=1, x=0\n" in dry[1]
    assert "# exp_0: mine, repeat 1: num_gpus=1, x=1  # it is ok already\n" in dry[1]
    assert dry[1].splitlines()[-1] == "# in this order, with --seed 0: 4"
    code, said, err = erg("bench", "run", path, "--out", out, "--resume")
    assert (code, said.splitlines()[-1]) == (0, "2 of 2 cells ended: 2 ok")
    assert f"3 further cells of {out} were not requested and stay as they are" in err
    assert attempts(out) == {f"exp_{n}": 1 for n in range(5)}
    assert len(json.loads(erg("bench", "list", out, "--json")[1])) == 5


def test_a_cell_that_is_not_what_it_claims_fails_the_run(erg: Erg, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = scenarios(tmp_path, expects=[{"pattern": "kernels 2"}])
    code, said, err = erg("bench", "run", path, "--out", out)
    assert code == 1
    last = said.splitlines()[-1]
    assert last == "2 of 2 cells ended: 2 ok, 1 of them not what it claims (see report)"
    assert "not what it claims: kernels 2: no line of the output has 'kernels 2'" in err
    assert "kernels 2: no line" in " ".join(said.split())
    _, listed, _ = erg("bench", "list", out)
    assert "not what it claims: kernels 2" in " ".join(listed.split())
    assert "1 of them not what it claims" in listed
    rows = json.loads(erg("bench", "list", out, "--json")[1])
    assert [(one["status"], bool(one["claims_broken"])) for one in rows] == [
        ("ok", True), ("ok", False),
    ]  # fmt: skip
    assert erg("bench", "run", path, "--out", out, "--resume")[0] == 1  # it still is not


def test_where_a_failed_cell_says_why_is_named(erg: Erg, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["{python}", "-c", "raise SystemExit('broken {x}')", "{run}"]
    code, said, err = erg("bench", "run", scenarios(tmp_path, command=words), "--out", out)
    assert code == 1
    assert f"  see {out}/exp_1/stderr\n" in err
    assert f"see{out}/exp_1/stderr" in "".join(said.split())
    assert (out / "exp_1" / "stderr").read_text() == "broken 2\n"


def test_a_dry_run_shows_the_order_that_a_run_draws(erg: Erg, tmp_path: Path) -> None:
    path = scenarios(tmp_path, command="false {x} {run}", axes={"x": [1, 2, 3]})
    words = ("bench", "run", path, "--out", tmp_path / "out", "--seed", 5)
    _, _, err = erg(*words)
    begun = [line.split()[0] for line in err.splitlines() if line.startswith("exp_")]
    order = " ".join(one.removeprefix("exp_") for one in dict.fromkeys(begun))
    again = (*words, "--resume", "--dry-run")
    assert erg(*again)[1].splitlines()[-1] == "# nothing would start"
    said = erg(*again, "--rerun", "error")[1].splitlines()[-1]
    assert said == f"# in this order, with --seed 5: {order}"


def test_a_dry_run_is_of_the_gpus_that_it_names(
    erg: Erg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any here: what a machine with GPUs starts if they are named, else what this does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = scenarios(tmp_path, launch="accelerate", axes={"x": ["a\nb", "c"]})
    words = ("bench", "run", path, "--out", tmp_path / "out", "--dry-run")
    named, here = erg(*words, "--num-gpus", "2"), erg(*words)
    assert named[1].count("accelerate.commands.launch --num_processes=2") == 2
    note = "shown as with GPUs; this machine has none, so torchrun would start the ranks here"
    assert named[2].splitlines()[-1] == note
    assert "accelerate" not in here[1]
    assert "this machine has none" not in here[2]
    # A setting of two lines is one line of a heading.
    assert named[1].startswith("# exp_0: mine, repeat 1: num_gpus=2, x=a\\nb\n")


def test_a_directory_that_is_a_file_is_refused_by_a_dry_run_too(erg: Erg, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    words = ("bench", "run", scenarios(tmp_path), "--out", tmp_path / "out")
    for more in ((), ("--dry-run",)):
        code, _, err = erg(*words, *more)
        assert code == 2
        assert "is a file; --out names a directory" in " ".join(err.split())
    code, _, err = erg("bench", "list", tmp_path / "out")
    assert code == 2
    assert "out is a file; give the results directory" in " ".join(err.split())


@pytest.mark.parametrize(("given", "asked_s"), [("30m", 1800.0), ("90", 90.0), ("1.5h", 5400.0)])
def test_a_timeout_is_given_as_in_the_file(
    erg: Erg, tmp_path: Path, given: str, asked_s: float
) -> None:
    words = ("bench", "plan", scenarios(tmp_path), "--json", "--timeout")
    planned = json.loads(erg(*words, given)[1])
    assert {one["timeout_s"] for one in planned["cells"]} == {asked_s}
    for wrong in ("soon", "0", "-3"):
        code, _, err = erg(*words, wrong)
        assert code == 2
        assert "90s, 30m, 2h" in " ".join(err.split())


def test_nvidia_is_fms_s_word_for_nvidia_smi(erg: Erg, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert erg("bench", "run", scenarios(tmp_path), "--out", out, "--memory", "nvidia")[0] == 0
    assert json.loads((out / "nvidia_smi.json").read_text())["keywords"]


def test_devices_rest_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launching.cool_down_s(None) == 0.0
    assert launching.cool_down_s(3.0) == 3.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert launching.cool_down_s(None) == 15.0
    assert launching.cool_down_s(0.0) == 0.0


def cell(index: int) -> Cell:
    return Cell(
        index=index, id=str(index), scenario="s", settings={"x": index}, num_gpus=1, repeat=1,
        command=("true", "{run}"),
    )  # fmt: skip


def test_a_cool_down_is_told_once(tmp_path: Path) -> None:
    progress = driver.BenchProgress(BenchPlan("s", (cell(0), cell(1))), cool_down_s=15.0)
    progress.states = {0: state.CellState(status="ok"), 1: state.CellState()}
    told: dict[int, str] = {0: "ok"}

    def news() -> list[str]:
        return list(run.news(progress, told, ["x"], out=tmp_path))

    progress.rests_s = 14.2
    assert [news(), news()] == [["cooling down for 14.2 s"], []]
    shown = run.counts(progress.counts, rests_s=progress.rests_s)
    assert shown == "1 of 2 cells ended: 1 ok, 1 pending; cooling down, 14.2 s"
    progress.rests_s = 0.0
    assert news() == []
    progress.rests_s = 15.0
    assert news() == ["cooling down for 15 s"]


def test_the_launcher_says_how_long_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launcher = LocalLauncher(launching.LaunchOptions(cool_down_s=600.0))
    out = tmp_path / "out"
    placed = []
    for one in (cell(0), cell(1)):
        directory = out / f"exp_{one.index}"
        directory.mkdir(parents=True)
        write_json(directory / "cell.json", one.to_json())
        placed.append((one, directory))
    launcher.submit(placed)
    at = launcher.poll()
    assert (at.waiting, at.running, at.rests_s) == ({1}, {0}, 0.0)
    while at.running:
        at = launcher.poll()
    assert at.waiting == {1}
    assert 500.0 < at.rests_s <= 600.0


def test_the_time_that_is_left_has_the_cool_downs_in_it() -> None:
    attempt = {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:10+00:00"}
    done = state.CellState(status="ok", attempts=(attempt,))
    progress = driver.BenchProgress(BenchPlan("s", tuple(map(cell, range(3)))), cool_down_s=15.0)
    progress.states = {0: done, 1: state.CellState(), 2: state.CellState()}
    assert progress.eta_s == 2 * (10 + 15)
    progress.states[1] = state.CellState(status="running")
    assert progress.eta_s == 2 * 10 + 15


def test_a_cell_that_runs_says_for_how_long() -> None:
    running = state.CellState().begun(state.Process.of(1))
    assert running.lasts_s is not None
    assert running.lasts_s >= 0
    assert running.lasted_s is None
    began = {**running.attempts[0], "started": "2026-01-01T00:00:00+00:00"}
    long_ago = state.CellState(status="running", attempts=(began,))
    ((_, _, shown, _),) = run.cell_table([(cell(0), long_ago)], []).rows
    assert shown.endswith(" so far")
    assert (
        state.CellState(status="pending", attempts=({**began, "ended": began["started"]},)).lasted_s
        is None
    )
