from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ergmeter.bench import results, tables
from ergmeter.bench.execute import state
from ergmeter.bench.overview import overview
from ergmeter.bench.plan.cells import BenchPlan, Cell, Value
from ergmeter.bench.tables import schema
from ergmeter.compat import fms
from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.catalog import bench_columns
from ergmeter.records import Device, Reading, Sample
from ergmeter.views.bench import report_document
from ergmeter.views.render.markdown import markdown
from ergmeter.views.render.terminal import show
from tests.runs import GPU, add_writer, even_steps, make_run
from tests.unit.bench.rows import load_table, write_table

Erg = Callable[..., tuple[int, str, str]]
S100 = 100 * 10**9
TRAINED = {
    "train_loss": 1.5,
    "train_runtime": 100.0,
    "train_samples_per_second": 4.0,
    "train_steps_per_second": 1.0,
    "train_tokens_per_second": 2048.0,
}


def add_cell(
    directory: Path, index: int, *, results_: dict[str, Any] | None = None, **status: Any
) -> Path:
    path = directory / f"exp_{index}"
    path.mkdir(parents=True)
    settings: dict[str, Value] = {"framework_config": "foak", "max_seq_len": 512, "beta": index}
    cell = Cell(index, f"id{index}", "small", settings, num_gpus=2, repeat=1, command=("x",))
    (path / "cell.json").write_text(json.dumps(cell.to_json()))
    (path / "status.json").write_text(json.dumps({"status": "ok", "attempts": [{}], **status}))
    if results_ is not None:
        (path / "results.json").write_text(json.dumps(results_))
    return path


def rows(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results.table(directory).to_pylist()
    return found


def test_every_table_has_the_one_schema_whatever_its_cells_left(tmp_path: Path) -> None:
    add_cell(tmp_path / "a", 0)
    add_cell(tmp_path / "b", 0, results_=TRAINED)
    assert results.table(tmp_path / "a").schema == results.table(tmp_path / "b").schema == schema()


@pytest.mark.parametrize(
    ("column", "source", "basis", "note"),
    [
        ("memory_nvidia_mean_bytes", "nvml", "measured", "NVML"),
        ("memory_nvidia_peak_bytes", "nvidia-smi", "measured", "nvidia-smi"),
        ("memory_nvidia_mean_bytes", "reference", "reported", "published"),
        ("memory_hf_peak_bytes", "nvml", "reported", "Trainer"),
        ("epoch", "nvml", "reported", ""),
    ],
)
def test_memory_of_a_row_has_the_basis_and_the_name_of_its_source(
    column: str, source: str, basis: str, note: str
) -> None:
    key = bench_columns()[column].key
    reading = tables.RowReadings({column: 5.0, "memory_nvidia_from": source})[key]
    assert isinstance(reading, Reading)
    assert reading.basis == basis
    assert note in reading.note
    assert bool(reading.note) == bool(note)


def test_what_the_trainer_printed_is_per_device_and_global(tmp_path: Path) -> None:
    add_cell(tmp_path, 0, results_=TRAINED)
    (row,) = rows(tmp_path)
    assert row["computed_tokens_per_s_per_device"] == 2048.0
    assert row["computed_tokens_per_s"] == 4096.0
    assert row["samples_per_s"] == 4.0
    assert row["rates_from"] == "trainer"
    assert json.loads(row["missing"])["real_tokens_per_s"] == "the cell left no run"


def test_a_cells_run_gives_real_and_computed_tokens_of_one_window(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, results_=TRAINED)
    steps = even_steps(20, seconds=2.0, tokens_computed=1000, tokens_real=600, samples=8)
    add_writer(make_run(path / "run"), steps=steps, settings={"warmup_steps": 0}, devices=[GPU])
    (row,) = rows(tmp_path)
    # 20 steps of 2 s one after the other: 500 and 300 tokens a second, on 2 devices.
    assert row["computed_tokens_per_s"] == pytest.approx(500)
    assert row["real_tokens_per_s"] == pytest.approx(300)
    assert row["tokens_per_s_per_device"] == pytest.approx(150)
    assert row["tokens_counted"] == "real"
    assert row["padding_frac"] == pytest.approx(0.4)
    assert row["samples_per_s"] == pytest.approx(4)
    assert row["rates_from"] == "run"
    assert (row["loss"], row["runtime_s"]) == (1.5, 100.0)


def test_without_an_accelerator_there_is_no_rate_of_each(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, results_={})
    steps = even_steps(20, seconds=2.0, tokens_computed=1000)
    add_writer(make_run(path / "run"), steps=steps, settings={"warmup_steps": 0})
    (row,) = rows(tmp_path)
    assert (row["tokens_per_s"], row["tokens_per_s_per_device"]) == (pytest.approx(500), None)
    assert "no accelerator" in json.loads(row["missing"])["tokens_per_s_per_device"]


def test_a_figure_that_is_not_there_is_in_the_report_with_its_reason(tmp_path: Path) -> None:
    for index in (0, 1):
        path = add_cell(tmp_path, index, results_={"num_gpus": 1})
        steps = even_steps(4 + index, seconds=2.0, tokens_computed=1000, samples=8)
        add_writer(make_run(path / "run"), steps=steps, settings={"warmup_s": 60.0})
    add_cell(tmp_path, 2, status="oom", reason="CUDA out of memory")
    why = "the run is shorter than its warm-up: 4 steps in 8 s, warm-up 60 s"
    assert json.loads(rows(tmp_path)[0]["missing"])["tokens_per_s"] == why
    text = markdown(report_document(overview(results.table(tmp_path)), name="b"))
    # One line for both cells, though the second has 5 steps in 10 s.
    assert f"- no tokens/s, /device, samples/s, loss in all 2 cells that are ok: {why}\n" in text
    assert text.count("shorter than its warm-up") == 1
    assert "- no memory in all 2 cells that are ok: no process reading was sampled" in text


def slow_start(path: Path) -> None:
    """10 steps of 10 s, which are the warm-up, then 10 of 2 s."""
    slow = even_steps(10, seconds=10.0, tokens_computed=1000, tokens_real=600, samples=8)
    fast = even_steps(10, seconds=2.0, tokens_computed=1000, tokens_real=600, samples=8)
    moved = [
        replace(one, start_ns=one.start_ns + S100, end_ns=one.end_ns + S100, index=i)
        for i, one in enumerate(fast, 10)
    ]
    add_writer(make_run(path / "run"), steps=[*slow, *moved], settings={"warmup_steps": 10})


def test_fms_files_are_of_the_whole_training_and_ours_of_what_follows_the_warmup(
    tmp_path: Path,
) -> None:
    slow_start(add_cell(tmp_path, 0, results_={"num_gpus": 2}))
    (row,) = rows(tmp_path)
    # By hand: 10 steps in 20 s after the warm-up; in all 20 in 120 s, 20 000 tokens by 2 ranks.
    assert row["steps_per_s"] == pytest.approx(0.5)
    assert (row["timed_steps"], row["timed_s"]) == (10, pytest.approx(20))
    with fms.fms_writer(tmp_path) as add:
        add(results.table(tmp_path))
    (told,) = csv.DictReader((tmp_path / fms.BENCHMARKS).read_text().splitlines())
    assert float(told["train_runtime"]) == pytest.approx(120)
    assert float(told["train_runtime"]) * float(told["train_steps_per_second"]) == pytest.approx(20)
    assert float(told["train_samples_per_second"]) == pytest.approx(160 / 120)
    assert float(told["train_tokens_per_second"]) == pytest.approx(20_000 / 2 / 120)


def test_what_the_trainer_left_out_is_counted_over_the_trainers_time(tmp_path: Path) -> None:
    slow_start(add_cell(tmp_path, 0, results_={"train_runtime": 125.0, "train_loss": 2.0}))
    training = json.loads(rows(tmp_path)[0]["training"])
    assert training["train_runtime"] == 125.0
    assert training["train_steps_per_second"] * 125.0 == pytest.approx(20)


def test_a_cells_results_json_gets_its_final_figures_and_they_are_never_taken_for_the_trainers(
    tmp_path: Path,
) -> None:
    path = add_cell(tmp_path, 0, results_={"num_gpus": 2, "seed": "1"})
    slow_start(path)
    before = rows(tmp_path)
    results.complete(path)
    told = json.loads((path / "results.json").read_text())
    assert told["train_runtime"] == pytest.approx(120)
    assert told["train_tokens_per_second"] == pytest.approx(20_000 / 2 / 120)
    assert told["seed"] == "1"
    kept = (path / results.ROW).read_bytes()
    assert rows(tmp_path) == before
    assert (path / results.ROW).read_bytes() == kept  # the row that was kept still holds
    (path / results.ROW).unlink()  # made anew of the same files
    assert rows(tmp_path) == before
    assert before[0]["rates_from"] == "run"


def test_fms_fields_are_the_trainers_own_where_it_saved_them(tmp_path: Path) -> None:
    """As a cell of erg train leaves them: nothing printed, all_results.json in hf/."""
    path = add_cell(tmp_path, 0, results_={"num_gpus": 2})
    slow_start(path)
    saved = {"train_runtime": 125.5, "train_samples_per_second": 1.275, "train_loss": 2.25,
             "train_steps_per_second": 0.159, "epoch": 0.5, "total_flos": 1e9}  # fmt: skip
    (path / "hf").mkdir()
    (path / "hf" / "all_results.json").write_text(json.dumps(saved))
    before = rows(tmp_path)
    results.complete(path)
    told = json.loads((path / "results.json").read_text())
    with fms.fms_writer(tmp_path) as add:
        add(results.table(tmp_path))
    (exported,) = csv.DictReader((tmp_path / fms.BENCHMARKS).read_text().splitlines())
    for name in saved.keys() - {"total_flos"}:
        assert told[name] == float(exported[name]) == saved[name]
    # Tokens are ours, over the Trainer's time, and the files name what is whose.
    assert told["train_tokens_per_second"] == pytest.approx(20_000 / 2 / 125.5)
    assert told["measured_by_ergmeter"] == "train_tokens_per_second"
    assert told["saved_by_trainer"].split() == sorted(saved.keys() - {"total_flos"})
    # Our table: its time is the Trainer's too, rates and loss are the run's as before.
    (path / results.ROW).unlink()
    assert rows(tmp_path) == before
    assert (before[0]["runtime_s"], before[0]["rates_from"]) == (125.5, "run")
    assert before[0]["steps_per_s"] == pytest.approx(0.5)


def test_fms_train_loss_is_the_trainers_mean_and_ours_the_last_logged(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, results_={"num_gpus": 2})
    losses = {"train_loss": 6.4888, "mean_train_loss": 6.5736}  # as erg train leaves them
    steps = even_steps(20, seconds=2.0)
    add_writer(make_run(path / "run"), steps=steps, header={"workload": losses})
    (row,) = rows(tmp_path)
    assert json.loads(row["training"])["train_loss"] == 6.5736
    assert row["loss"] == 6.4888
    results.complete(path)
    assert json.loads((path / "results.json").read_text())["train_loss"] == 6.5736
    with fms.fms_writer(tmp_path) as add:
        add(results.table(tmp_path))
    (exported,) = csv.DictReader((tmp_path / fms.BENCHMARKS).read_text().splitlines())
    assert exported["train_loss"] == "6.5736"


def test_a_run_that_knows_steps_alone_takes_no_tokens_away(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, results_=TRAINED)
    steps = even_steps(20, seconds=2.0)
    add_writer(make_run(path / "run"), steps=steps, settings={"warmup_steps": 0})
    (row,) = rows(tmp_path)
    assert row["steps_per_s"] == pytest.approx(0.5)
    assert row["computed_tokens_per_s"] == 4096.0
    assert row["rates_from"] == "trainer"


def test_cells_stand_in_the_order_of_their_numbers_with_their_status(tmp_path: Path) -> None:
    add_cell(tmp_path, 10, results_=TRAINED)
    add_cell(tmp_path, 2, status="oom", reason="CUDA out of memory", exit_code=1)
    claims = [{"name": "attention", "held": False, "seen": "sdpa"}, {"name": "x", "held": True}]
    add_cell(tmp_path, 1, results_=TRAINED, claims=claims)
    found = rows(tmp_path)
    assert [(row["index"], row["status"]) for row in found] == [(1, "ok"), (2, "oom"), (10, "ok")]
    assert found[0]["claims_broken"] == "attention: sdpa"
    assert found[0]["claims_held"] == 1
    assert found[1]["reason"] == "CUDA out of memory"
    assert len({row["group"] for row in found}) == 3
    assert found[0]["max_seq_length"] == "512"


def test_a_row_is_made_anew_when_the_cell_has_changed(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, results_=TRAINED)
    assert rows(tmp_path)[0]["loss"] == 1.5
    assert (path / results.ROW).exists()
    (path / "results.json").write_text(json.dumps({**TRAINED, "train_loss": 9.0}))
    assert rows(tmp_path)[0]["loss"] == 9.0


def test_a_cell_that_runs_is_looked_at_each_time(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, status="running")
    rows(tmp_path)
    assert not (path / results.ROW).exists()


def test_a_directory_of_the_original_is_read_and_its_blank_cell_failed(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = [
        {**TRAINED, "num_gpus": 1, "framework_config": "x", "r": "16"},
        {"num_gpus": 1},
        {"num_gpus": 1, "error_messages": ["Traceback\nValueError: no"]},
        {"dry_run": True},
    ]
    for index, one in enumerate(said):
        path = tmp_path / f"exp_{index}"
        path.mkdir()
        (path / "results.json").write_text(json.dumps(one))
    found = rows(tmp_path)
    assert [row["status"] for row in found] == ["ok", "error", "error", "skipped"]
    assert found[0]["r"] == "16"
    assert found[2]["reason"] == "ValueError: no"


def test_memory_of_both_ways_is_in_the_row(tmp_path: Path) -> None:
    said = {
        "before_init_mem_gpu": 100,
        "init_mem_gpu_alloc_delta": 10,
        "init_mem_gpu_peaked_delta": 7,
        "train_mem_gpu_alloc_delta": 5,
        "train_mem_gpu_peaked_delta": 50,
    }
    path = add_cell(tmp_path, 0, results_={**TRAINED, **said})
    log = "index, memory.used [MiB]\n0, 1 MiB\n1, 1 MiB\n0, 3 MiB\n1, 5 MiB\n"
    (path / state.SMI_LOG).write_text(log)
    (row,) = rows(tmp_path)
    assert row["memory_hf_alloc_bytes"] == 115
    assert row["memory_hf_peak_bytes"] == 165
    assert row["memory_hf_peak_prose_bytes"] == 172
    assert row["memory_nvidia_devices_bytes"] == [2 * 2**20, 4 * 2**20]
    assert row["memory_nvidia_mean_bytes"] == 3 * 2**20
    assert row["memory_nvidia_from"] == "nvidia-smi"


def test_benchmarks_csv_keeps_figures_and_fms_columns_and_drops_constants(tmp_path: Path) -> None:
    plain = {"torch_dtype": "float16", "seed": "42", "num_gpus": 2}
    add_cell(tmp_path, 0, results_={**plain, **TRAINED, "learning_rate": "1e-5"})
    add_cell(tmp_path, 1, results_={**plain, **TRAINED, "learning_rate": "2e-5"})
    add_cell(tmp_path, 2, status="oom", results_={**plain, "error_messages": ["x"]})
    with fms.fms_writer(tmp_path) as add:
        add(results.table(tmp_path))
    benchmarks, raw = tmp_path / fms.BENCHMARKS, tmp_path / fms.RAW
    head, *lines = list(csv.reader(benchmarks.read_text().splitlines()))
    # By hand: what varies (learning_rate) and what FMS always keeps, in alphabetical order.
    kept = ["framework_config", "learning_rate", "num_gpus", "status", "torch_dtype"]
    assert head == [*kept, *sorted(TRAINED)]
    assert lines[0] == [
        "foak",
        "1e-5",
        "2",
        "ok",
        "float16",
        "1.5",
        "100.0",
        "4.0",
        "1.0",
        "2048.0",
    ]
    assert lines[2] == ["foak", "", "2", "oom", "float16", "", "", "", "", ""]
    whole = list(csv.DictReader(raw.read_text().splitlines()))
    assert len(whole) == 3
    assert whole[0]["seed"] == "42"
    assert whole[2]["error_messages"] == "['x']"


def test_cells_that_all_fail_alike_have_their_status_and_are_read_back(tmp_path: Path) -> None:
    for index in (0, 1):
        add_cell(tmp_path, index, status="oom", results_={"num_gpus": 2})
    with fms.fms_writer(tmp_path) as add:
        add(results.table(tmp_path))
    path = tmp_path / fms.BENCHMARKS
    assert (
        path.read_text().splitlines() == ["framework_config,num_gpus,status"] + ["foak,2,oom"] * 2
    )
    assert [row["status"] for row in load_table(path).to_pylist()] == ["oom", "oom"]
    assert results.CellSource().recognises(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gpu_memory_logs.csv", "\x00\x01", "gpu_memory_logs.csv: no column memory.used in its"),
        ("gpu_memory_logs.csv", "index, memory.used [MiB]\n0, [N/A]\n", "holds no reading of mem"),
        ("gpu_memory_logs.json", '{"problem"', "gpu_memory_logs.json can't be read: Expecting"),
        ("results.json", '{"train_loss": 1', "results.json can't be read: Expecting"),
        ("results.json", "[]", "results.json holds no JSON object"),
        ("status.json", '{"status": "ok"', "status.json can't be read: Expecting"),
        ("cell.json", "", "cell.json can't be read: Expecting"),
        ("cell.json", '{"num_gpus": 2}', "cell.json describes no cell: KeyError: 'command'"),
        ("hf/all_results.json", "\x00", "hf/all_results.json can't be read"),
        ("run/run.json", "{", "exp_0/run/run.json: not JSON"),
    ],
)
def test_a_damaged_file_of_a_cell_is_named_in_the_report(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """And the host's memory, which the run has, is no substitute without a word."""
    path = add_cell(tmp_path, 0, results_=TRAINED)
    host = [Sample(n * 10**9, "p", memory_bytes=5 * 2**30) for n in range(3)]
    device = Device("p", "process", "training", "process")
    add_writer(make_run(path / "run"), steps=even_steps(3), devices=[device], samples=host)
    (path / "hf").mkdir()
    (path / name).write_text(text)
    (row,) = rows(tmp_path)
    assert message in row["damaged"]
    shown = markdown(report_document(overview(results.table(tmp_path)), name="b"))
    assert f"cell 0: damaged, left out: {row['damaged'][:40]}" in shown
    if name == "status.json":
        assert row["status"] == "error"
        assert row["reason"] == "status.json is damaged, so the cell's outcome is unknown"
    else:
        assert row["status"] == "ok"


def test_an_empty_log_of_a_killed_cell_is_a_reason_and_no_damage(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, results_=None, status="cancelled")
    (path / "gpu_memory_logs.csv").write_text("")
    (row,) = rows(tmp_path)
    assert not row["damaged"]
    why = json.loads(row["missing"])["memory_nvidia_peak_bytes"]
    assert why == "gpu_memory_logs.csv has no reading: none was logged before the cell ended"


@pytest.mark.parametrize("text", ['{"version": 1, "cells": [{"index"', "[]", ""])
def test_a_damaged_plan_is_named_in_the_report(erg: Erg, tmp_path: Path, text: str) -> None:
    add_cell(tmp_path, 0, results_=TRAINED)
    plan = tmp_path / state.PLAN
    plan.write_text(json.dumps(BenchPlan("s.yaml", ()).to_json()))
    assert "plan.json" not in erg("bench", "report", tmp_path)[1]
    plan.write_text(text)
    code, shown, _ = erg("bench", "report", tmp_path)
    assert code == 0
    assert "plan.json " in shown
    assert "plan.json " in erg("bench", "report", tmp_path, "--export", tmp_path / "a.csv")[1]


def test_whole_files_are_not_called_damaged(tmp_path: Path) -> None:
    path = add_cell(tmp_path, 0, results_=TRAINED)
    add_writer(make_run(path / "run"), steps=even_steps(3))
    add_cell(tmp_path, 1, status="error", reason="it could not be started")
    assert [row["damaged"] for row in rows(tmp_path)] == [None, None]


def test_a_table_of_ours_keeps_its_constants(tmp_path: Path) -> None:
    add_cell(tmp_path, 0, results_=TRAINED)
    found = results.table(tmp_path)
    write_table(found, tmp_path / "t.csv")
    assert load_table(tmp_path / "t.csv").equals(found)
    with pytest.raises(UsageError, match=r"\.parquet nor \.csv"):
        write_table(found, tmp_path / "t.xlsx")


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("num_gpus", b"2.5", r"t\.csv: line 2: num_gpus can't be '2\.5'"),
        ("loss", b"low", r"t\.csv: line 2: loss can't be 'low'"),
        ("scenario", b"sm\xe9ll", r"t\.csv: line \d: .*can't decode"),
    ],
)
def test_a_table_that_was_spoilt_is_refused_with_its_line(
    tmp_path: Path, column: str, cell: bytes, said: str
) -> None:
    add_cell(tmp_path, 0, results_=TRAINED)
    path = tmp_path / "t.csv"
    write_table(results.table(tmp_path).drop_columns(["raw", "settings", "missing"]), path)
    header, row = path.read_bytes().splitlines()
    cells = row.split(b",")
    cells[header.decode().split(",").index(column)] = cell
    path.write_bytes(header + b"\n" + b",".join(cells) + b"\n")
    with pytest.raises(FormatError, match=said):
        load_table(path)


def test_a_cell_of_a_table_may_be_long(tmp_path: Path) -> None:
    add_cell(tmp_path, 0, results_={**TRAINED, "error_messages": ["x" * 200_000]})
    found = results.table(tmp_path)
    write_table(found, tmp_path / "t.csv")
    assert load_table(tmp_path / "t.csv").equals(found)


def test_a_parquet_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    with pytest.raises(FormatError, match="not a table of results: no columns id and status"):
        load_table(path)
    pq.write_table(pa.table({"id": ["x"], "status": ["ok"], "num_gpus": ["two"]}), path)
    with pytest.raises(FormatError, match="not a Parquet file of results"):
        load_table(path)


def test_a_report_tells_cells_on_one_node_from_those_on_two(tmp_path: Path) -> None:
    for index, nodes in enumerate((1, 2)):
        path = add_cell(tmp_path, index, results_=TRAINED)
        said = json.loads((path / "cell.json").read_text())
        (path / "cell.json").write_text(json.dumps({**said, "nodes": nodes}))
    text = markdown(report_document(overview(results.table(tmp_path)), name="b"))
    assert "| nodes 1 | ok | 4096\\* |" in text
    assert "| nodes 2 | ok | 8192\\* |" in text


def test_a_directory_without_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no cells"):
        results.table(tmp_path)


def test_a_report_averages_repeats_marks_padding_and_names_what_failed(tmp_path: Path) -> None:
    add_cell(tmp_path, 0, results_=TRAINED)
    add_cell(tmp_path, 1, status="oom", reason="CUDA out of memory")
    claims = [{"name": "attention", "held": False, "seen": "sdpa"}]
    add_cell(tmp_path, 2, results_=TRAINED, claims=claims)
    found = results.table(tmp_path)
    text = markdown(report_document(overview(found), name="b"))
    assert "| ok | 4096\\* | - | 2048\\* | 4 | 1.5 | - | 100 s |" in text
    assert "cell 1: oom: CUDA out of memory" in text
    assert "cell 2: unmet expectation: attention: sdpa" in text
    console = Console(width=120, record=True, file=io.StringIO())
    show(report_document(overview(found), name="b"), console)
    assert "3 cells: 2 ok, 1 oom" in console.export_text()


def test_rates_of_some_ranks_are_not_those_of_all(tmp_path: Path) -> None:
    steps = even_steps(20, seconds=2.0, tokens_computed=1000, tokens_real=600, samples=8)
    known: dict[str, Any] = {"steps": steps, "settings": {"warmup_steps": 0}}
    one = add_cell(tmp_path, 0, results_=TRAINED)
    add_writer(make_run(one / "run"), header={"rank": 0, "world": 2}, **known)
    both = make_run(add_cell(tmp_path, 1, results_=TRAINED) / "run")
    for rank in (0, 1):
        add_writer(both, header={"rank": rank, "world": 2}, **known)
    partly, wholly = rows(tmp_path)
    assert partly["real_tokens_per_s"] is None
    assert partly["real_tokens_per_s_per_device"] is None
    why = json.loads(partly["missing"])["real_tokens_per_s"]
    assert "1 of the 2 ranks recorded no steps" in why
    assert partly["computed_tokens_per_s"] == 4096.0  # the Trainer's, of both
    assert partly["rates_from"] == "trainer"
    assert wholly["real_tokens_per_s"] == pytest.approx(600)  # 300 of each
