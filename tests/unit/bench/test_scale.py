"""Thousands of cells: memory does not grow with them, and a page shows the first of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ergmeter.bench.execute import state
from ergmeter.bench.plan.cells import BenchPlan, Cell, Value
from ergmeter.bench.tables import ROWS
from ergmeter.errors import FormatError

pytestmark = pytest.mark.soak

Erg = Callable[..., tuple[int, str, str]]
FEW, MANY = 1000, 5000
# The peak of this program alone: a child's, as its parent is told it, has the parent's in it.
CALLED = """
import sys
from ergmeter.cli.main import main
try:
    main(sys.argv[2:])
finally:
    with open("/proc/self/status") as status, open(sys.argv[1], "w") as told:
        told.write(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def cells(number: int) -> Iterator[Cell]:
    for index in range(number):
        settings: dict[str, Value] = {
            "learning_rate": index // 2,
            "framework_config": "none",
            "text": "x" * 500,
        }
        command = ("run", "--rate", str(index // 2))
        made = Cell(index, "", "s", settings, num_gpus=1, repeat=index % 2 + 1, command=command)
        yield Cell(**{**vars(made), "id": made.digest(made.repeat)})


def finished(out: Path, number: int) -> Path:
    """Two repeats of each configuration; of a hundred cells one failed."""
    out.mkdir()
    plan = BenchPlan("s.yaml", tuple(cells(number)))
    (out / "plan.json").write_text(json.dumps(plan.to_json()))
    for cell in plan.cells:
        folder = out / f"exp_{cell.index}"
        folder.mkdir()
        status = {"status": "error", "reason": "no luck"} if cell.index % 100 == 99 else {}
        (folder / "cell.json").write_text(json.dumps(cell.to_json()))
        (folder / "status.json").write_text(json.dumps({"status": "ok", **status}))
        told = {
            "train_runtime": 2.0,
            "train_tokens_per_second": 100.0 + cell.repeat,
            "a": "y" * 500,
        }
        (folder / "results.json").write_text(json.dumps(told))
    return out


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("scale")
    return {number: finished(folder / str(number), number) for number in (FEW, MANY)}


def peak_kb(folder: Path, *arguments: object) -> int:
    told = folder / "peak"
    words = [sys.executable, "-c", CALLED, str(told), "bench", *map(str, arguments)]
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return int(told.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("what", ["list", "report"])
def test_memory_does_not_grow_with_the_cells(
    benches: dict[int, Path], tmp_path: Path, what: str
) -> None:
    peaks = {}
    for number, out in benches.items():
        to = tmp_path / str(number)
        files = ("--export", to / "a.parquet", "--export", to / "a.csv", "--fms", to)
        peaks[number] = peak_kb(tmp_path, what, out, *(files if what == "report" else ()))
        if what == "report":
            assert pq.ParquetFile(to / "a.parquet").metadata.num_rows == number
            assert len((to / "a.csv").read_text().splitlines()) == number + 1
            assert len((to / "raw_summary.csv").read_text().splitlines()) == number + 1
            # Cells that failed are rows there, too.
            assert len((to / "benchmarks.csv").read_text().splitlines()) == number + 1
    # Kept in memory, 4 000 cells more were half as much again for a report, twice for a list.
    assert peaks[MANY] < 1.15 * peaks[FEW]


def test_a_list_shows_the_first_and_counts_the_rest(erg: Erg, benches: dict[int, Path]) -> None:
    code, printed, _ = erg("bench", "list", benches[FEW])
    assert code == 0
    lines = printed.splitlines()
    assert len(lines) == 2 + 200 + 1 + 2  # head and line, cells, a blank line, what follows
    assert lines[-2] == "and 800 more (792 ok, 8 error): --all shows them"
    assert lines[-1] == "1000 of 1000 cells ended: 990 ok, 10 error"
    assert len(erg("bench", "list", benches[FEW], "--all")[1].splitlines()) == 2 + 1000 + 2
    failed = erg("bench", "list", benches[FEW], "--status", "error")[1].splitlines()
    assert len(failed) == 2 + 10 + 2
    assert failed[2].split()[:2] == ["99", "error"]
    told = json.loads(erg("bench", "list", benches[FEW], "--json", "--status", "error")[1])
    assert [one["cell"] for one in told] == list(range(99, 1000, 100))
    assert json.loads(erg("bench", "list", benches[FEW], "--json", "--status", "oom")[1]) == []
    code, _, said = erg("bench", "list", benches[FEW], "--status", "good")
    assert (code, "--status takes pending, running, ok" in said) == (2, True)


def test_a_report_shows_the_first_configurations(erg: Erg, benches: dict[int, Path]) -> None:
    code, printed, _ = erg("bench", "report", benches[FEW])
    assert code == 0
    assert "1000 cells: 990 ok, 10 error" in printed
    assert "and 300 more configurations: --all shows them" in printed
    # Each configuration has repeats of 101 and 102; of the first 200, four have one that failed.
    assert printed.count("101.5*") == 2 * (200 - 4)
    assert printed.count(": error: no luck") == 10
    every = erg("bench", "report", benches[FEW], "--all")[1]
    assert "more configurations" not in every
    assert every.count("101.5*") == 2 * (500 - 10)
    pasted = erg("bench", "report", benches[FEW], "--format", "md")[1]
    assert "- and 300 more configurations: --all shows them" in pasted
    listed = erg("bench", "report", benches[FEW], "--format", "csv")[1].splitlines()
    assert len(listed) == 1001
    assert [line.partition(",")[0] for line in listed] == ["index", *map(str, range(1000))]


def test_cells_are_read_with_their_states_one_at_a_time(tmp_path: Path) -> None:
    out = finished(tmp_path / "out", 12)
    (out / "exp_99").mkdir()  # no cell of ours
    found = state.states(out)
    assert next(found)[0] == next(cells(1))
    assert [cell.index for cell, _ in found] == list(range(1, 12))
    (out / "exp_3" / "cell.json").write_text("{}")
    with pytest.raises(FormatError, match=r"exp_3/cell\.json describes no cell"):
        list(state.states(out))
    assert list(state.states(tmp_path / "none")) == []


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"version": 9, "cells": []}', '{"cells": []}'])
def test_what_is_no_plan_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"plan"):
        BenchPlan.read(path)
    whole = json.dumps(BenchPlan("s", tuple(cells(3))).to_json())
    path.write_text(whole[:-20])
    with pytest.raises(FormatError, match="is not a plan"):
        BenchPlan.read(path)
    with pytest.raises(FormatError, match="no plan was made here"):
        BenchPlan.read(tmp_path / "none.json")


def test_batches_are_smaller_than_what_the_ratio_is_measured_on() -> None:
    assert ROWS < FEW / 2
