"""A directory of results that is taken up: what is added to it, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ergmeter.atomic_write import write_json
from ergmeter.bench.execute import results_directory, state
from ergmeter.bench.execute.outcome import CellOutcome
from ergmeter.bench.plan.cells import BenchPlan, Cell
from ergmeter.errors import UsageError

HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
input()
"""


def cell(index: int, x: int = 1, *, repeat: int = 1, **more: Any) -> Cell:
    made = Cell(
        index=index,
        id="",
        scenario="s",
        settings={"x": x},
        num_gpus=1,
        repeat=repeat,
        command=("true", str(x), *more.pop("words", ())),
        **more,
    )
    return dataclasses.replace(made, id=made.digest(repeat))


def plan(*cells: Cell) -> BenchPlan:
    return BenchPlan("scenarios.yaml", cells)


def ended(out: Path, *indices: int) -> None:
    for index in indices:
        directory = out / f"exp_{index}"
        directory.mkdir(exist_ok=True)
        state.write(directory, state.CellState().ended(CellOutcome("ok")))


def numbered(found: BenchPlan) -> list[tuple[int, object, int]]:
    return [(one.index, one.settings["x"], one.repeat) for one in found.cells]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two cells, both done."""
    path = tmp_path / "results"
    results_directory.opened(path, plan(cell(0, 1), cell(1, 2)))
    ended(path, 0, 1)
    return path


def test_more_repeats_and_more_values_come_after_what_is_there(out: Path) -> None:
    # As a plan of three values in two repeats numbers them: x=3 would take the place of nothing.
    wanted = plan(*(cell(n + 3 * r, n + 1, repeat=r + 1) for r in (0, 1) for n in (0, 1, 2)))
    taken = results_directory.opened(out, wanted, resume=True)
    assert numbered(taken) == [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 1, 2), (4, 2, 2), (5, 3, 2)]
    assert taken.warnings == (f"4 cells added to {out}: exp_2 to exp_5",)
    assert numbered(BenchPlan.read(out / "plan.json")) == numbered(taken)
    # A value in front of the others takes no number away.
    first = results_directory.opened(out, plan(cell(0, 0), cell(1, 1), cell(2, 2)), resume=True)
    assert numbered(first) == [(6, 0, 1), (0, 1, 1), (1, 2, 1)]
    assert len(BenchPlan.read(out / "plan.json").cells) == 7


def test_what_is_not_asked_for_is_counted_and_stays(out: Path) -> None:
    results_directory.opened(out, plan(cell(0, 1), cell(1, 2), cell(2, 3), cell(3, 4)), resume=True)
    before = (out / "plan.json").read_bytes()
    some = results_directory.opened(out, plan(cell(0, 1)), resume=True)
    said = f"3 further cells of {out} were not requested and stay as they are (2 not ended)"
    assert some.warnings == (said,)
    ended(out, 2, 3)
    one = results_directory.opened(out, plan(cell(0, 1), cell(1, 2), cell(2, 3)), resume=True)
    assert one.warnings == (f"1 further cell of {out} was not requested and stays as it is",)
    assert (out / "plan.json").read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        {"words": ("--skip_memory_metrics", "False")},
        {"files": {"train.yaml": "metrics:\n  hf_memory: true\nseed: 43\n"}},
        {"environment": {"NCCL_DEBUG": "INFO"}},
        {"launch": "torchrun"},
    ],
)
def test_cells_that_differ_in_what_they_run_are_added(out: Path, other: dict[str, Any]) -> None:
    taken = results_directory.opened(
        out, plan(cell(0, 1, **other), cell(1, 2, **other)), resume=True
    )
    assert taken.warnings == (
        f"2 cells added to {out}: exp_2 to exp_3",
        f"2 further cells of {out} were not requested and stay as they are",
    )


def test_a_directory_that_is_in_no_plan_is_not_written_into(out: Path) -> None:
    (out / "exp_7").mkdir()
    assert numbered(results_directory.opened(out, plan(cell(0, 3)), resume=True)) == [(8, 3, 1)]


def test_nothing_is_added_while_another_drives_it(out: Path) -> None:
    before = (out / "plan.json").read_bytes()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        driver = dataclasses.asdict(state.Process.of(other.pid))
        write_json(out / state.DRIVER, driver)
        with pytest.raises(UsageError, match=f"process {other.pid} is running"):
            results_directory.opened(out, plan(cell(0, 3)), resume=True)
    finally:
        other.kill()
        other.wait()
    assert (out / "plan.json").read_bytes() == before
    words = [sys.executable, "-c", HOLD, str(out / state.CLAIM)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taking:
        assert taking.stdout is not None
        taking.stdout.readline()
        with pytest.raises(UsageError, match="another process is opening"):
            results_directory.opened(out, plan(cell(0, 3)), resume=True)
        taking.communicate(b"\n")
    assert (out / "plan.json").read_bytes() == before


def test_cut_off_before_or_after_the_plan_is_written_nothing_is_lost(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (out / "plan.json").read_bytes()
    wanted = plan(cell(0, 1), cell(1, 2), cell(2, 3))
    with monkeypatch.context() as patched:
        replaced = Path.replace

        def killed(path: Path, target: Path) -> Path:
            if target.name == "plan.json":
                raise KeyboardInterrupt
            return replaced(path, target)

        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            results_directory.opened(out, wanted, resume=True)
    assert (out / "plan.json").read_bytes() == before
    first = results_directory.opened(
        out, wanted, resume=True
    )  # and is gone before a cell has its directory
    again = results_directory.opened(out, wanted, resume=True)
    assert numbered(again) == numbered(first) == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    assert again.warnings == ()
    assert state.read(out / "exp_2").status == "pending"


def test_a_new_directory_that_was_cut_off_before_its_plan_is_begun_anew(tmp_path: Path) -> None:
    out = tmp_path / "results"
    out.mkdir()
    results_directory.claim_driver(out)
    assert numbered(results_directory.opened(out, plan(cell(0, 1)), resume=True)) == [(0, 1, 1)]
    (out / "plan.json").unlink()
    (out / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"has no plan\.json, so it can't be resumed"):
        results_directory.opened(out, plan(cell(0, 1)), resume=True)
