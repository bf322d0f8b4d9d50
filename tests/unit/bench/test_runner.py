"""Cells that run: real processes, each of a line or two, and what is written down of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.atomic_write import write_json
from ergmeter.bench.execute import driver, launching, results_directory, state
from ergmeter.bench.execute.launching import LaunchOptions
from ergmeter.bench.execute.outcome import CellOutcome
from ergmeter.bench.execute.process import kernel_kills
from ergmeter.bench.launchers.local import LocalLauncher
from ergmeter.bench.plan.cells import BenchPlan, Cell, Expectation, Launch
from ergmeter.bench.plan.scenarios import PRESETS
from ergmeter.cli.compare.bench import command
from ergmeter.errors import UsageError

WAIT_S = 60.0
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RAISED = "Traceback (most recent call last):\\n  File 'a.py', line 1, in f\\n"
# `{run}` among the words: the program is on its own, and no recorder is put around it.
PROGRAMS = {
    "ok": "print({'train_runtime': 2.0, 'train_loss': 1.5, 'epoch': 1.0})",
    "oom": f"import sys; sys.stderr.write('[rank1]: {OOM}\\n'); sys.exit(1)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "137": "raise SystemExit(137)",
    "hang": "import time; time.sleep(600)",
    "nan": "print({'train_runtime': 2.0, 'train_loss': float('nan'), 'epoch': 1.0})",
    "import": "import no_such_module",
}
# By somebody, and not by the kernel; where that does not say so, it may have been the kernel.
KILLED = (
    ("oom", "OOM killer")
    if kernel_kills() is None
    else ("error", "the kernel's count of OOM kills did not rise")
)


def cell(index: int, code: str, *, repeat: int = 1, **more: Any) -> Cell:
    settings = {"code": index if repeat == 1 else code}
    command = ("{python}", "-c", code, "{run}")
    made = Cell(
        index=index,
        id="",
        scenario=more.pop("scenario", "s"),
        settings=settings,
        num_gpus=more.pop("num_gpus", 1),
        repeat=repeat,
        command=command,
        **more,
    )
    return dataclasses.replace(made, id=made.digest(repeat))


def opened(out: Path, plan: BenchPlan, *, resume: bool = False) -> driver.BenchProgress:
    kept = results_directory.opened(out, plan, resume=resume)
    return driver.prepare(out, kept)


def driven(out: Path, plan: BenchPlan, *, resume: bool = False, jobs: int = 3) -> list[int]:
    """Run what is left of a plan; which cells that was."""
    progress = opened(out, plan, resume=resume)
    cells = driver.remaining(out, progress, seed=0)
    assert driver.drive(
        out, progress, cells, LocalLauncher(LaunchOptions(jobs=jobs)), lambda _: None
    )
    return [one.index for one, _ in cells]


def read(out: Path, index: int, name: str) -> Any:
    return json.loads((out / f"exp_{index}" / name).read_text())


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BenchPlan]:
    """A bench in which everything goes wrong that can."""
    out = tmp_path_factory.mktemp("bench") / "results"
    limits = {"hang": 2.0}
    cells = [
        cell(n, code, scenario=name, timeout_s=limits.get(name, WAIT_S))
        for n, (name, code) in enumerate(PROGRAMS.items())
    ]
    cells.append(cell(len(cells), "print()", scenario="left out", skip="2 GPUs are too few"))
    plan = BenchPlan("scenarios.yaml", tuple(cells))
    assert sorted(driven(out, plan)) == list(range(len(PROGRAMS)))
    return out, plan


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("ok", "ok", ""),
        ("oom", "oom", "rank 1: torch.OutOfMemoryError: CUDA out of memory."),
        ("killed", *KILLED),
        ("137", "oom", "OOM killer"),
        ("hang", "timeout", "after 2 s"),
        ("nan", "diverged", "nan"),
        ("import", "error", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("left out", "skipped", "2 GPUs are too few"),
    ],
)
def test_each_way_to_end_has_its_status(
    injected: tuple[Path, BenchPlan], name: str, status: str, reason: str
) -> None:
    out, plan = injected
    (index,) = (one.index for one in plan.cells if one.scenario == name)
    said = read(out, index, "status.json")
    assert (said["status"], reason in said["reason"]) == (status, True), said
    assert [one["status"] for one in said["attempts"]] == ([status] if status != "skipped" else [])


def test_a_kill_that_the_recorder_saw_is_judged_as_one_that_we_saw(tmp_path: Path) -> None:
    recorded = dataclasses.replace(
        cell(0, ""), command=("{python}", "-c", "import os; os.kill(os.getpid(), 9)")
    )
    driven(tmp_path / "out", BenchPlan("s", (recorded,)))
    ended = read(tmp_path / "out", 0, "status.json")
    assert ended["exit_code"] == 137
    assert (ended["status"], KILLED[1] in ended["reason"]) == (KILLED[0], True)


def test_what_was_done_is_not_done_again(injected: tuple[Path, BenchPlan]) -> None:
    out, plan = injected

    def written() -> dict[Path, int]:
        files = [path for path in out.rglob("*") if path.is_file() and path.name != state.DRIVER]
        return {path: path.stat().st_mtime_ns for path in files}

    before = written()
    assert driven(out, plan, resume=True) == []
    assert written() == before


def test_beside_each_cell_is_what_it_said_and_how_to_run_it(
    injected: tuple[Path, BenchPlan],
) -> None:
    out, plan = injected
    index = next(one.index for one in plan.cells if one.scenario == "nan")
    results = read(out, index, "results.json")
    assert list(results) == sorted(results)
    assert (results["train_loss"], results["train_runtime"]) == ("nan", 2.0)
    assert (results["code"], results["num_gpus"]) == (str(index), 1)
    folder = out / f"exp_{index}"
    assert "train_loss" in (folder / "stdout").read_text()
    assert (folder / "stderr").exists()
    by_hand = subprocess.run(["sh", folder / "command.sh"], capture_output=True, check=True)
    assert by_hand.stdout == (folder / "stdout").read_bytes()
    assert "PATH" in read(out, index, "environment.json")


TRAINED = """
import sys
from ergmeter import Meter
with Meter(sys.argv[1], probes=["process"]) as meter:
    for loss, norm in {told}:
        with meter.step(tokens=1) as step:
            step.loss, step.grad_norm = loss, norm
"""


def test_the_last_loss_of_a_run_tells_divergence(tmp_path: Path) -> None:
    ends = {
        "[(2.0, 1.0), (1.0, 1.0), (None, None)]": "ok",
        "[(2.0, None), (float('nan'), None), (None, None)]": "diverged",
        "[(float('inf'), 1.0), (2.0, 1.0)]": "ok",  # it came back
        # As transformers logs a loss that is nan: left out of a mean that is then of nothing.
        "[(2.0, 1.0), (0.0, float('nan'))]": "diverged",
        "[(2.0, 1.0), (0.0, 0.0)]": "ok",
    }
    out = tmp_path / "out"
    cells = [cell(n, TRAINED.replace("{told}", told)) for n, told in enumerate(ends)]
    driven(out, BenchPlan("s", tuple(cells)))
    found = {told: read(out, n, "status.json")["status"] for n, told in enumerate(ends)}
    assert found == ends


def test_claims_are_held_against_the_output(tmp_path: Path) -> None:
    claims = (Expectation("pattern", "says it", "fla+sh"), Expectation("fact", "attention", "sdpa"))
    out = tmp_path / "out"
    driven(out, BenchPlan("s", (cell(0, "print('flash')", expects=claims),)))
    said = read(out, 0, "status.json")["claims"]
    assert [(one["name"], one["held"]) for one in said] == [("says it", True), ("attention", False)]


def test_of_a_cell_that_failed_nothing_is_claimed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claims = (Expectation("fact", "attention", "sdpa"),)
    driven(out, BenchPlan("s", (cell(0, PROGRAMS["oom"], expects=claims),)))
    said = read(out, 0, "status.json")
    assert (said["status"], said["claims"]) == ("oom", [])


def test_failed_cells_run_again_if_asked_and_what_they_left_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # It fails as long as its directory has no earlier attempt.
    code = (
        "import pathlib, sys; folder = pathlib.Path(sys.argv[1]).parent;"
        " sys.exit(not (folder / 'attempt_1').exists())"
    )
    plan = BenchPlan("s", (cell(0, code), cell(1, PROGRAMS["oom"]), cell(2, "print()")))
    driven(out, plan)
    progress = opened(out, plan, resume=True)
    driver.reopened(out, progress, ("error", "timeout"))
    cells = driver.remaining(out, progress, seed=0)
    assert [one.index for one, _ in cells] == [0]
    assert driver.drive(out, progress, cells, LocalLauncher(LaunchOptions()), lambda _: None)
    said = read(out, 0, "status.json")
    assert [one["status"] for one in said["attempts"]] == ["error", "ok"]
    assert (out / "exp_0" / "attempt_1" / "results.json").exists()
    assert read(out, 1, "status.json")["status"] == "oom"


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--rerun", "error"], "--resume too"), (["--resume", "--rerun", "ok"], "--rerun takes oom")],
)
def test_rerun_is_of_failed_cells_of_a_resumed_bench(
    tmp_path: Path, options: list[str], said: str
) -> None:
    told = CliRunner().invoke(command, ["run", "none.yaml", "--out", str(tmp_path), *options])
    assert told.exit_code == 2
    assert said in told.output


def test_two_runners_do_not_work_on_one_cell(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = "import time; print('here', flush=True); time.sleep(600)"
    opened(out, BenchPlan("s", (cell(0, code),)))
    folder = out / "exp_0"
    first = runner(folder)
    try:
        eventually(lambda: state.read(folder).child is not None)
        before = (folder / "status.json").read_bytes()
        assert runner(folder).wait(WAIT_S) == 0
        assert (folder / "status.json").read_bytes() == before
        assert not (folder / "attempt_1").exists()
    finally:
        first.terminate()
        first.wait(WAIT_S)
    state.write(folder, state.CellState())
    with state.claimed(folder) as is_ours:  # it went with its process
        assert is_ours
        with state.claimed(folder) as is_ours_too:
            assert not is_ours_too
        assert not driver._write_off(folder)  # a runner that has just begun
        assert state.read(folder).status == "pending"
    assert driver._write_off(folder)
    assert state.read(folder).status == "cancelled"


def test_keys_are_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sesame")
    own = {"HF_TOKEN": "sesame", "PLAIN": "kept"}
    driven(tmp_path / "out", BenchPlan("s", (cell(0, "print()", environment=own),)))
    written = [p.read_text() for p in (tmp_path / "out").rglob("*") if p.is_file()]
    held = [text for text in written if "sesame" in text]
    plan_and_cell = 2  # what was asked for, by the user's own file
    assert len(held) == plan_and_cell
    assert any("PLAIN=kept" in text for text in written)


def runner(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "ergmeter.bench.execute.runner", str(folder)])


def eventually(condition: Any) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.01)


# It starts a process that leaves its group, as torchrun's ranks do, and says both numbers.
FAMILY = """
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                        start_new_session=True)
print(os.getpid(), rank.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_of_a_cell_outlives_it(tmp_path: Path, how: signal.Signals) -> None:
    """A runner that was asked to end ends its cell; of one that was killed, the next does."""
    out = tmp_path / "out"
    plan = BenchPlan("s", (cell(0, FAMILY),))
    opened(out, plan)
    folder = out / "exp_0"
    first = runner(folder)
    eventually(lambda: (folder / "stdout").exists() and (folder / "stdout").read_text().split()[1:])
    started = [int(word) for word in (folder / "stdout").read_text().split()]
    eventually(lambda: state.read(folder).child is not None)
    first.send_signal(how)
    first.wait(WAIT_S)
    if how == signal.SIGKILL:
        assert read(out, 0, "status.json")["status"] == "running"
        assert all(psutil.pid_exists(pid) for pid in started)
        # The next attempt does something shorter, so that the test ends.
        shorter = dataclasses.replace(plan.cells[0], command=("{python}", "-c", "", "{run}"))
        write_json(folder / state.CELL, shorter.to_json())
        assert driven(out, plan, resume=True) == [0]
        said = read(out, 0, "status.json")
        assert [one["status"] for one in said["attempts"]] == ["cancelled", "ok"]
        aside = (folder / "attempt_1" / "stdout").read_text()
        assert aside.split() == [str(pid) for pid in started]
    else:
        said = read(out, 0, "status.json")
        assert (said["status"], how.name in said["reason"]) == ("cancelled", True)
    eventually(lambda: not any(_is_alive(pid) for pid in started))


def test_what_a_killed_launcher_leaves_is_ended_with_the_cell(tmp_path: Path) -> None:
    """As when the kernel kills torchrun: its ranks are in sessions of their own, and nobody's."""
    out = tmp_path / "out"
    opened(out, BenchPlan("s", (cell(0, FAMILY),)))
    folder = out / "exp_0"
    first = runner(folder)
    eventually(lambda: (folder / "stdout").exists() and (folder / "stdout").read_text().split()[1:])
    launcher, rank = (int(word) for word in (folder / "stdout").read_text().split())
    os.kill(launcher, signal.SIGKILL)
    first.wait(WAIT_S)
    try:
        assert not _is_alive(rank)
    finally:
        if _is_alive(rank):
            os.kill(rank, signal.SIGKILL)
    assert read(out, 0, "status.json")["exit_code"] == -signal.SIGKILL


def test_what_slurm_never_started_is_said_where_to_look_for(tmp_path: Path) -> None:
    opened(tmp_path / "out", BenchPlan("s", (cell(0, ""),)))
    (tmp_path / "out" / "slurm").mkdir()
    (tmp_path / "out" / "exp_0" / "job").write_text("12_0")
    assert driver._write_off(tmp_path / "out" / "exp_0")
    said = read(tmp_path / "out", 0, "status.json")["reason"]
    assert said == (
        f"it was not started (see the job's log in {tmp_path / 'out' / 'slurm'}); --resume runs it"
    )


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_another_process_with_the_number_is_not_taken_for_the_runner(tmp_path: Path) -> None:
    """After a restart of the machine, numbers are given anew."""
    out = tmp_path / "out"
    plan = BenchPlan("s", (cell(0, "print()"),))
    opened(out, plan)
    alive = state.Process.of(os.getpid())
    assert alive.started_s is not None
    for gone in (
        dataclasses.replace(alive, started_s=alive.started_s - 1000.0),
        dataclasses.replace(alive, boot_id="another"),
    ):
        state.write(out / "exp_0", state.CellState().begun(gone))
        progress = opened(out, plan, resume=True)
        assert [c.index for c, _ in driver.remaining(out, progress, seed=0)] == [0]
    state.write(out / "exp_0", state.CellState().begun(alive))
    assert driver.remaining(out, opened(out, plan, resume=True), seed=0) == []


def test_a_runner_on_another_machine_is_known_by_its_beat(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = BenchPlan("s", (cell(0, "print()"),))
    opened(out, plan)
    far = dataclasses.replace(state.Process.of(os.getpid()), host="node-17")
    state.write(out / "exp_0", state.CellState().begun(far))
    state.beat(out / "exp_0")
    assert state.is_worked_on(out / "exp_0", state.read(out / "exp_0"))
    long_ago_s = time.time() - 2 * state.SILENT_S
    os.utime(out / "exp_0" / state.ALIVE, (long_ago_s, long_ago_s))
    assert not state.is_worked_on(out / "exp_0", state.read(out / "exp_0"))


def test_results_are_refused_resumed_or_moved_and_never_deleted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = BenchPlan("s", (cell(0, "print()"),))
    driven(out, plan)
    with pytest.raises(UsageError, match="--resume"):
        results_directory.opened(out, plan)
    results_directory.opened(out, plan, move_aside=True)
    (aside,) = [path for path in tmp_path.iterdir() if path != out]
    assert {path.name for path in aside.glob("exp_*")} == {"exp_0"}
    assert list(out.glob("exp_*")) == []


def test_a_directory_is_not_moved_from_under_its_driver(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = BenchPlan("s", (cell(0, "print()"),))
    opened(out, plan)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        claimed = dataclasses.asdict(state.Process.of(other.pid))
        write_json(out / state.DRIVER, claimed)
        with pytest.raises(UsageError, match=f"process {other.pid} is running"):
            results_directory.opened(out, plan, move_aside=True)
    finally:
        other.kill()
        other.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    results_directory.opened(out, plan, move_aside=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cell_whose_directory_is_deleted_ends_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    opened(out, BenchPlan("s", (cell(0, PROGRAMS["hang"]),)))
    first = subprocess.Popen(
        [sys.executable, "-m", "ergmeter.bench.execute.runner", str(out / "exp_0")],
        stderr=subprocess.PIPE,
    )
    eventually(lambda: state.read(out / "exp_0").child is not None)
    child = state.read(out / "exp_0").child
    while out.exists():  # again where the runner has just written into what was emptied
        shutil.rmtree(out, ignore_errors=True)
    _, said = first.communicate(timeout=WAIT_S)
    assert first.returncode == 1
    assert said.decode().splitlines() == [
        f"{out / 'exp_0'} was moved or deleted; nothing more is written for it"
    ]
    assert not out.exists()
    assert child is not None
    assert not _is_alive(child.pid)


@pytest.mark.parametrize("job", ["123_3", "erg-bench-ab12 3"])
def test_a_directory_is_not_moved_from_under_jobs_that_may_be_queued(
    tmp_path: Path, job: str
) -> None:
    out = tmp_path / "out"
    plan = BenchPlan("s", (cell(0, "print()"), cell(1, "print(1)")))
    opened(out, plan)
    ended = state.CellState().begun(state.Process.of(os.getpid())).ended(CellOutcome("ok"))
    state.write(out / "exp_0", ended)
    for index, name in enumerate(("122_0", job)):
        (out / f"exp_{index}" / "job").write_text(name)
    with pytest.raises(UsageError, match=f"exp_1's job {job} may be queued: --resume"):
        results_directory.opened(out, plan, move_aside=True)
    (out / "exp_1" / "job").unlink()
    results_directory.opened(out, plan, move_aside=True)
    assert not (out / "exp_1").exists()


def test_cells_that_differ_in_a_key_alone_are_both_resumed(tmp_path: Path) -> None:
    one = cell(0, "print()")
    other = dataclasses.replace(one, index=1, scenario="other")
    plan = BenchPlan("s", (one, other))
    assert one.id == other.id
    opened(tmp_path / "out", plan)
    taken = results_directory.opened(tmp_path / "out", plan, resume=True)
    assert [(made.index, made.scenario) for made in taken.cells] == [
        (0, one.scenario),
        (1, "other"),
    ]


def test_two_drivers_do_not_run_one_directory(tmp_path: Path) -> None:
    results_directory.claim_driver(tmp_path)
    results_directory.claim_driver(tmp_path)  # ourselves
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        claimed = dataclasses.asdict(state.Process.of(other.pid))
        write_json(tmp_path / state.DRIVER, claimed)
        with pytest.raises(UsageError, match=f"process {other.pid} is running"):
            results_directory.claim_driver(tmp_path)
    finally:
        other.kill()
        other.wait()
    results_directory.claim_driver(tmp_path)


@given(st.integers(1, 30), st.integers(1, 4), st.integers())
def test_every_round_has_each_cell_once(configurations: int, repeats: int, seed: int) -> None:
    cells = [
        dataclasses.replace(cell(n, f"{n}"), repeat=repeat, id=f"{n}-{repeat}")
        for n in range(configurations)
        for repeat in range(1, repeats + 1)
    ]
    drawn = list(driver.order(cells, seed=seed))
    assert drawn == list(driver.order(reversed(cells), seed=seed))
    for number in range(repeats):
        part = drawn[number * configurations : (number + 1) * configurations]
        assert {one.repeat for one in part} == {number + 1}
        assert Counter(one.index for one in part) == Counter(range(configurations))


def test_ranks_are_started_as_the_machine_allows(tmp_path: Path) -> None:
    two = dataclasses.replace(
        cell(0, "x", num_gpus=2), launch="accelerate", launch_options=("--m",)
    )
    with_gpus = launching.start(two, tmp_path, has_gpus=True).words
    assert "accelerate.commands.launch" in with_gpus
    assert {"--num_processes=2", "--m"} <= set(with_gpus)
    # accelerate without GPUs silently starts one rank.
    without = launching.start(two, tmp_path, has_gpus=False).words
    assert "torch.distributed.run" in without
    assert "--nproc-per-node=2" in without
    assert "--m" not in without
    recorded = dataclasses.replace(cell(0, "x"), command=("python", "train.py"))
    words = launching.start(recorded, tmp_path, has_gpus=False).words
    assert words[1:4] == ("-m", "ergmeter", "record")
    assert words[-2:] == ("python", "train.py")


OF_FMS = ("--model_name_or_path", "m", "--r", "4", "--m", "x", "--no-python", "--", "--nnodes", "9")


@pytest.mark.parametrize("launch", ["torchrun", "accelerate"])
@pytest.mark.parametrize("has_gpus", [True, False])
def test_arguments_of_a_rank_are_no_options_of_its_launcher(
    tmp_path: Path, launch: Launch, has_gpus: bool
) -> None:
    """By the launchers' own parsers. `--r` might be short for six options of torchrun."""
    command = ("/opt/python", "-m", "tuning.sft_trainer", *OF_FMS)
    two = dataclasses.replace(cell(0, "x", num_gpus=2), launch=launch, command=command)
    words = launching.start(two, tmp_path, has_gpus=has_gpus).words
    launcher = next(
        w for w in words if w in ("torch.distributed.run", "accelerate.commands.launch")
    )
    parser: Any = importlib.import_module(launcher)
    parser = getattr(parser, "get_args_parser", None) or parser.launch_command_parser
    parsed = parser().parse_args(words[words.index(launcher) + 1 :])
    assert (parsed.training_script, parsed.no_python) == ("/opt/python", True)
    assert tuple(parsed.training_script_args) == command[1:]
    assert str(getattr(parsed, "num_processes", None) or parsed.nproc_per_node) == "2"


def test_cells_train_anyway_under_the_id_that_they_had(tmp_path: Path) -> None:
    """A cell that lacks memory is tried: it is a result, and so is a cell that takes its time."""
    trained = dataclasses.replace(cell(0, "x"), command=PRESETS["erg train"][1])
    assert "--anyway" not in trained.command  # of which its id is made
    assert launching.start(trained, tmp_path, has_gpus=False).words[-1] == "--anyway"
    other = dataclasses.replace(cell(0, "x"), command=PRESETS["sft_trainer"][1])
    assert "--anyway" not in launching.start(other, tmp_path, has_gpus=False).words


class TestOnGpus:
    """GPUs by number, without any: what counts is who gets which."""

    @pytest.fixture(autouse=True)
    def _four(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")

    def test_cells_at_once_have_gpus_of_their_own(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.5)"
        sizes = (2, 1, 1, 2, 4)
        cells = [cell(n, code + f" #{n}", num_gpus=size) for n, size in enumerate(sizes)]
        driven(out, BenchPlan("s", tuple(cells)), jobs=4)
        held = []
        for n, size in enumerate(sizes):
            own = (out / f"exp_{n}" / "stdout").read_text().strip().split(",")
            assert len(set(own)) == size
            (attempt,) = read(out, n, "status.json")["attempts"]
            held.append((attempt["started"], attempt["ended"], set(own)))
        for n, (start, end, mine) in enumerate(held):
            for other_start, other_end, others in held[n + 1 :]:
                overlap = start < other_end and other_start < end
                assert not (overlap and mine & others)

    def test_a_cell_with_more_gpus_than_there_are_is_refused(self) -> None:
        launcher = LocalLauncher(LaunchOptions())
        with pytest.raises(UsageError, match="needs 8 GPUs, but this machine shows 4"):
            launcher.check([cell(0, "", num_gpus=8)])
