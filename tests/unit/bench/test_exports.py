"""The tables of results: there after a run, fresh after another, and never written over unasked."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from ergmeter.bench import tables
from ergmeter.compat import fms
from tests.unit.bench.rows import load_table, row, write_table

Erg = Callable[..., tuple[int, str, str]]
# Fails for the second value, until a file is there.
PROGRAM = """
import pathlib, sys
if sys.argv[1] == "2" and not pathlib.Path(sys.argv[2]).exists():
    sys.exit("not yet")
rate = 100.0 * int(sys.argv[1])
print({'train_runtime': 2.0, 'train_loss': 1.5, 'train_tokens_per_second': rate, 'epoch': 1.0})
"""
TABLES = ("results.parquet", "results.csv", "benchmarks.csv", "raw_summary.csv")


@pytest.fixture
def scenarios(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    scenario = {
        "name": "two",
        "command": f"{{python}} {tmp_path}/program.py {{x}} {tmp_path}/go {{run}}",
        "arguments": {},
        "axes": {"x": [1, 2]},
    }
    path = tmp_path / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [scenario]}))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_its_tables_and_another_renews_them(erg: Erg, scenarios: Path) -> None:
    out = scenarios.parent / "results"
    words = ("bench", "run", scenarios, "--out", out, "--cool-down", 0)
    assert erg(*words)[0] == 1
    assert [(out / name).is_file() for name in TABLES] == [True] * 4
    assert [one["status"] for one in read(out / "results.csv")] == ["ok", "error"]
    assert pq.read_table(out / "results.parquet")["status"].to_pylist() == ["ok", "error"]
    # A cell that failed is a row without figures, as in FMS's published files.
    ended = [
        (one["status"], one["train_tokens_per_second"]) for one in read(out / "benchmarks.csv")
    ]
    assert ended == [("ok", "100.0"), ("error", "")]
    assert len(read(out / "raw_summary.csv")) == 2
    (scenarios.parent / "go").touch()
    code, _, said = erg(*words, "--resume", "--rerun", "error")
    assert code == 0, said
    assert pq.read_table(out / "results.parquet")["status"].to_pylist() == ["ok", "ok"]
    told = [one["train_tokens_per_second"] for one in read(out / "benchmarks.csv")]
    assert told == ["100.0", "200.0"]
    # What is written is what a report of the directory says.
    assert erg("bench", "report", out, "--export", scenarios.parent / "again.csv")[0] == 0
    assert (scenarios.parent / "again.csv").read_text() == (out / "results.csv").read_text()
    assert load_table(out / "results.parquet").equals(load_table(out))
    listed = json.loads(erg("bench", "list", out, "--json")[1])
    assert [(one["status"], one["settings"]["x"]) for one in listed] == [("ok", 1), ("ok", 2)]
    assert [one["path"] for one in listed] == [str(out / "exp_0"), str(out / "exp_1")]
    assert all(one["duration_s"] > 0 for one in listed)
    told = json.loads(erg("bench", "report", out, "--json")[1])
    assert [one["training"]["train_tokens_per_second"] for one in told] == [100.0, 200.0]
    assert [one["settings"]["x"] for one in told] == [1, 2]
    assert erg("bench", "report", out, "--json", "--memory")[0] == 2
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


# What FMS's README has as the output of a training with memory metrics.
OUTPUT_METRICS = {
    "train_runtime": 143.6704,
    "train_samples_per_second": 0.835,
    "train_steps_per_second": 0.209,
    "train_tokens_per_second": 3421.164,
    "train_loss": 1.292790667215983,
    "init_mem_cpu_alloc_delta": 8192,
    "init_mem_gpu_alloc_delta": 0,
    "init_mem_cpu_peaked_delta": 0,
    "init_mem_gpu_peaked_delta": 0,
    "train_mem_cpu_alloc_delta": 531410944,
    "train_mem_gpu_alloc_delta": 126487040,
    "train_mem_cpu_peaked_delta": 0,
    "train_mem_gpu_peaked_delta": 11016635392,
    "before_init_mem_cpu": 5831098368,
    "before_init_mem_gpu": 4747206656,
    "epoch": 0.04,
}


def test_each_documented_metric_of_a_training_is_in_fms_files(erg: Erg, tmp_path: Path) -> None:
    """Printed by a program, as the Trainer does: to its results.json, and to both tables."""
    (tmp_path / "program.py").write_text(f"print({OUTPUT_METRICS!r})\n")
    command = f"{{python}} {tmp_path}/program.py {{run}}"
    scenario = {"name": "a", "command": command, "arguments": {}}
    (tmp_path / "scenarios.yaml").write_text(yaml.safe_dump({"scenarios": [scenario]}))
    out = tmp_path / "results"
    code, _, said = erg("bench", "run", tmp_path / "scenarios.yaml", "--out", out, "--cool-down", 0)
    assert code == 0, said
    kept = json.loads((out / "exp_0" / "results.json").read_text())
    assert OUTPUT_METRICS.items() <= kept.items()
    (raw,) = read(out / "raw_summary.csv")
    assert {name: float(raw[name]) for name in OUTPUT_METRICS} == OUTPUT_METRICS
    (only,) = read(out / "benchmarks.csv")
    shown = [name for name in OUTPUT_METRICS if "_mem_" not in name]
    assert {name: float(only[name]) for name in shown} == {
        name: OUTPUT_METRICS[name] for name in shown
    }
    # The README's sum over train: 4747206656 + 0 + 126487040 + 11016635392; and without its peak.
    assert float(only["mem_peak_torch_mem_alloc_in_bytes"]) == 15_890_329_088
    assert float(only["mem_torch_mem_alloc_in_bytes"]) == 4_873_693_696


def bench(folder: Path) -> Path:
    cell = folder / "results" / "exp_0"
    cell.mkdir(parents=True)
    (cell / "status.json").write_text(json.dumps({"status": "ok"}))
    (cell / "results.json").write_text(json.dumps({"train_runtime": 2.0, "num_gpus": 1}))
    return folder / "results"


@pytest.mark.parametrize("name", ["mine.parquet", "mine.csv", "benchmarks.csv", "raw_summary.csv"])
def test_a_file_that_is_there_is_replaced_by_force_alone(
    erg: Erg, tmp_path: Path, name: str
) -> None:
    out, path = bench(tmp_path), tmp_path / name
    path.write_text("my thesis")
    way = ("--export", path) if name.startswith("mine") else ("--fms", tmp_path)
    free = tmp_path / "free.csv"
    code, printed, said = erg("bench", "report", out, "--export", free, *way)
    assert (code, printed) == (2, "")
    assert said.strip().splitlines()[-1].endswith(f"{path} is there already: --force replaces it")
    assert path.read_text() == "my thesis"
    assert not free.exists()  # nothing was begun
    assert erg("bench", "report", out, *way, "--force")[0] == 0
    assert path.read_bytes() != b"my thesis"


def test_what_is_read_is_not_replaced_even_by_force(erg: Erg, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_table(tables.as_table([row(index=3)]), path)
    before = path.read_text()
    code, _, said = erg("bench", "report", path, "--export", path, "--force")
    assert (code, path.read_text()) == (2, before)
    assert "it is the input; name another" in said
    code, _, said = erg("bench", "report", path, "--export", tmp_path)
    assert code == 2
    assert erg("bench", "report", path, "--export", tmp_path / "a.xlsx")[0] == 2


def test_a_table_that_could_not_be_finished_is_not_there(tmp_path: Path) -> None:
    def breaking() -> Any:
        yield tables.as_table([row(index=0)])
        raise OSError("no space left")

    (tmp_path / "results.csv").write_text("of before")
    with pytest.raises(OSError, match="no space left"):
        fms.collected(breaking(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    assert (tmp_path / "results.csv").read_text() == "of before"


def test_the_columns_of_fms_are_those_that_vary_over_all_batches(tmp_path: Path) -> None:
    made = [
        row(
            index=0, raw=json.dumps({"same": 1, "late": None, "differs": 1, "error_messages": "e"})
        ),
        row(index=1, raw=json.dumps({"same": 1, "late": 5, "differs": 1})),
        row(index=2, raw=json.dumps({"same": 1, "late": 6, "differs": 2})),
        row(index=3, raw=json.dumps({"same": 2, "differs": 1}), status="cancelled"),
    ]
    with fms.fms_writer(tmp_path) as add:
        for one in made:
            add(tables.as_table([one]))
    shown = read(tmp_path / "benchmarks.csv")
    assert list(shown[0]) == ["differs", "framework_config", "late", "num_gpus", "status"]
    assert [one["late"] for one in shown] == ["", "5", "6"]
    raw = read(tmp_path / "raw_summary.csv")
    assert [one["same"] for one in raw] == ["1", "1", "1", "2"]
    assert raw[3]["status"] == "cancelled"


def test_figures_stay_in_benchmarks_csv_also_where_they_are_alike(tmp_path: Path) -> None:
    told = {"train_runtime": 2.0, "train_loss": 1.5, "train_steps_per_second": 5.0, "seed": "1"}
    with fms.fms_writer(tmp_path) as add:
        add(tables.as_table([row(raw=json.dumps(told))]))
    (only,) = read(tmp_path / "benchmarks.csv")
    assert (only["train_runtime"], only["train_loss"]) == ("2.0", "1.5")
    assert only["train_steps_per_second"] == "5.0"
    assert "seed" not in only


def test_a_cell_that_failed_is_read_back_as_failed_though_it_told_figures(tmp_path: Path) -> None:
    told = {"train_runtime": 2.0, "train_tokens_per_second": 9.0, "per_device_train_batch_size": 1}
    made = [
        row(index=0, raw=json.dumps(told)),
        row(index=1, raw=json.dumps({**told, "train_loss": "nan"}), status="diverged"),
        row(index=2, raw="{}", status="error", per_device_train_batch_size="4"),
    ]
    with fms.fms_writer(tmp_path) as add:
        add(tables.as_table(made))
    found = load_table(tmp_path / "benchmarks.csv").to_pylist()
    assert [one["status"] for one in found] == ["ok", "diverged", "error"]
    assert [one["computed_tokens_per_s"] for one in found] == [9.0, None, None]
    assert found[2]["per_device_train_batch_size"] == "4"


def test_cells_that_differ_by_a_setting_of_their_own_are_told_apart(
    erg: Erg, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    own = [
        row(index=i, group=f"g{i}", scenario="s", settings={"depth": depth, "same": 1})
        for i, depth in enumerate((2, 4))
    ]
    write_table(tables.as_table(own), path)
    shown = erg("bench", "report", path)[1].splitlines()
    assert [line.split("  ")[0] for line in shown[5:7]] == ["depth 2", "depth 4"]
    # Where a framework tells them apart it is enough.
    both = [{**one, "framework_config": f} for one, f in zip(own, ("none", "bnb"), strict=True)]
    write_table(tables.as_table(both), path)
    shown = erg("bench", "report", path)[1].splitlines()
    assert [line.split("  ")[0] for line in shown[5:7]] == ["none", "bnb"]
