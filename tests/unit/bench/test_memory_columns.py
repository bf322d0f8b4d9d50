"""Memory in the rows of results: the Trainer's stages and sums, the allocator of each rank."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.bench import results
from ergmeter.bench.results import SAVED
from ergmeter.bench.tables import MEMORY, STAGES
from ergmeter.records import Device, Sample
from tests.runs import add_writer, even_steps, make_run
from tests.unit.bench.rows import load_table
from tests.unit.bench.test_memory import GUIDE

Erg = Callable[..., tuple[int, str, str]]

GB = 10**9
EVALUATED = {
    "eval_mem_gpu_alloc_delta": 1_000_000,
    "eval_mem_gpu_peaked_delta": 2_000_000_000,
    "test_mem_gpu_alloc_delta": -500_000,
    "test_mem_gpu_peaked_delta": 3_000_000_000,
}


def add_cell(directory: Path, said: dict[str, Any], *, index: int = 0) -> Path:
    path = directory / f"exp_{index}"
    (path / "hf").mkdir(parents=True)
    (path / "status.json").write_text(json.dumps({"status": "ok", "attempts": [{}]}))
    (path / "results.json").write_text(json.dumps({"num_gpus": 1, **said}))
    return path


def row(directory: Path) -> dict[str, Any]:
    (found,) = results.table(directory).to_pylist()
    return dict(found)


def test_the_stages_are_those_that_transformers_tells_apart() -> None:
    tracker = pytest.importorskip("transformers.trainer_utils").TrainerMemoryTracker
    assert set(STAGES) == set(tracker.stages.values())


def test_the_guides_example_has_both_sums_side_by_side(tmp_path: Path) -> None:
    add_cell(tmp_path, GUIDE)
    found = row(tmp_path)
    assert found["memory_hf_before_bytes"] == 4_747_206_656
    assert found["memory_hf_alloc_bytes"] == 4_873_693_696
    assert found["memory_hf_peak_bytes"] == 15_890_329_088
    assert found["memory_hf_peak_prose_bytes"] == 15_890_329_088
    assert found["memory_hf_discrepancy_bytes"] == 0


def test_where_something_peaks_in_init_the_guide_says_more_than_the_program(
    tmp_path: Path,
) -> None:
    add_cell(tmp_path, {**GUIDE, "init_mem_gpu_peaked_delta": 3_000_000_000})
    found = row(tmp_path)
    assert found["memory_hf_init_peak_bytes"] == 4_747_206_656 + 3_000_000_000
    assert found["memory_hf_peak_bytes"] == 15_890_329_088
    assert found["memory_hf_peak_prose_bytes"] == 18_890_329_088
    assert found["memory_hf_discrepancy_bytes"] == 3_000_000_000


def test_evaluate_and_predict_are_read_from_what_the_trainer_saved(tmp_path: Path) -> None:
    path = add_cell(tmp_path, {"train_runtime": 9.0})
    saved = {**GUIDE, **EVALUATED, "train_runtime": 143.6704}
    (path / "hf" / SAVED).write_text(json.dumps(saved))
    found = row(tmp_path)
    # 4 873 693 696 after train; then + 1 000 000, and - 500 000.
    assert found["memory_hf_evaluate_alloc_bytes"] == 4_874_693_696
    assert found["memory_hf_evaluate_peak_bytes"] == 6_874_693_696
    assert found["memory_hf_predict_alloc_bytes"] == 4_874_193_696
    assert found["memory_hf_predict_peak_bytes"] == 7_874_193_696
    assert found["memory_hf_peak_bytes"] == 15_890_329_088
    assert found["runtime_s"] == 9.0  # of memory alone is what was saved the source


def test_a_stage_that_was_not_called_is_absent_with_its_reason(tmp_path: Path) -> None:
    add_cell(tmp_path, GUIDE)
    found = row(tmp_path)
    assert found["memory_hf_evaluate_peak_bytes"] is None
    why = json.loads(found["missing"])["memory_hf_evaluate_peak_bytes"]
    assert why.startswith("the Trainer logged no memory of evaluate: it was not called")


def test_a_device_that_keeps_no_peak_has_none_in_any_sum(tmp_path: Path) -> None:
    """As transformers says it of Apple's."""
    unknown = dict.fromkeys(
        ("init_mem_gpu_peaked_delta", "train_mem_gpu_peaked_delta"), "Not available"
    )
    add_cell(tmp_path, {**GUIDE, **unknown})
    found = row(tmp_path)
    assert found["memory_hf_alloc_bytes"] == 4_873_693_696
    missing = json.loads(found["missing"])
    for column in ("peak_bytes", "peak_prose_bytes", "discrepancy_bytes", "train_peak_bytes"):
        assert found[f"memory_hf_{column}"] is None
        assert "has no peak of the stage" in missing[f"memory_hf_{column}"]


def test_every_column_of_memory_that_is_empty_says_why(tmp_path: Path) -> None:
    path = add_cell(tmp_path, {"before_init_mem_cpu": 1})
    add_writer(make_run(path / "run"), steps=even_steps(3), unavailable={"allocator": "no CUDA"})
    found = row(tmp_path)
    missing = json.loads(found["missing"])
    assert "no CUDA" in missing["memory_allocator_devices_bytes"]
    assert missing["memory_hf_peak_bytes"] == "the Trainer's memory tracker saw no GPU"
    empty = {name for name in MEMORY if found[name] is None}
    assert empty - set(missing) == set()


def two_ranks(path: Path) -> None:
    """Each rank sees both GPUs of its node and has tensors on one."""
    run = make_run(path / "run")
    for rank, most in ((1, 7 * GB), (0, 5 * GB)):
        devices = [
            Device(f"torch:h:{100 + rank}:cuda:{n}", "allocator", "torch allocator", "allocator")
            for n in (0, 1)
        ]
        held = [
            Sample(n * 10**9, devices[rank].id, allocated_bytes=GB, allocated_peak_bytes=peak,
                   reserved_bytes=9 * GB)
            for n, peak in enumerate((GB, most))
        ]  # fmt: skip
        known = {"rank": rank, "world": 2}
        add_writer(run, devices=devices, samples=held, steps=even_steps(3), header=known)


def test_the_allocator_has_a_peak_for_each_rank_on_its_own_device(tmp_path: Path) -> None:
    two_ranks(add_cell(tmp_path, {}))
    found = row(tmp_path)
    assert found["memory_allocator_ids"] == "rank0/cuda:0 rank1/cuda:1"
    assert found["memory_allocator_devices_bytes"] == [5 * GB, 7 * GB]
    assert found["memory_allocator_peak_bytes"] == 7 * GB


def test_a_report_of_memory_shows_each_device_each_stage_and_both_sums(
    erg: Erg, tmp_path: Path
) -> None:
    path = add_cell(tmp_path, {**GUIDE, "init_mem_gpu_peaked_delta": 3_000_000_000})
    two_ranks(path)
    log = "index, memory.used [MiB]\n0, 1 MiB\n1, 1 MiB\n0, 3 MiB\n1, 5 MiB\n"
    (path / "gpu_memory_logs.csv").write_text(log)
    code, out, err = erg("bench", "report", tmp_path, "--memory", "--format", "md")
    assert code == 0, err
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in out.splitlines()
        if line.startswith("| ")
    ]
    told = {(by, of): exact for _, by, of, exact, *_ in lines}
    assert told["nvidia-smi", "0"] == "2 097 152"
    assert told["nvidia-smi", "1"] == "4 194 304"
    assert told["nvidia-smi", "mean"] == "3 145 728"
    assert told["huggingface", "peak in init"] == "7 747 206 656"
    assert told["huggingface", "allocated"] == "4 873 693 696"
    assert told["huggingface", "peak"] == "15 890 329 088"
    assert told["huggingface", "peak, summed"] == "18 890 329 088"
    assert told["huggingface", "guide - program"] == "3 000 000 000"
    assert told["torch allocator", "rank1/cuda:1"] == "7 000 000 000"
    assert erg("bench", "report", tmp_path, "--memory", "--md")[1] == out
    assert erg("bench", "report", tmp_path, "--md", "--format", "csv")[0] == 2
    page = tmp_path / "page.html"
    asked = ("bench", "report", tmp_path, "--memory", "--format", "csv")
    plain = erg(*asked)[1]
    assert erg(*asked, "--html", page)[1] == plain  # the page beside it, and nothing else
    assert '<td class="number">15 890 329 088</td>' in page.read_text()


def test_an_export_has_the_lists_and_both_sums(erg: Erg, tmp_path: Path) -> None:
    path = add_cell(tmp_path / "results", GUIDE)
    log = "index, memory.used [MiB]\n0, 1 MiB\n1, 1 MiB\n0, 3 MiB\n1, 5 MiB\n"
    (path / "gpu_memory_logs.csv").write_text(log)
    for name in ("all.csv", "all.parquet"):
        code, _, err = erg("bench", "report", path.parent, "--export", tmp_path / name)
        assert code == 0, err
        (found,) = load_table(tmp_path / name).to_pylist()
        assert found["memory_nvidia_devices_bytes"] == [2 * 2**20, 4 * 2**20]
        assert found["memory_nvidia_first_bytes"] == [2**20, 2**20]
        assert found["memory_nvidia_ids"] == "0 1"
        assert found["memory_hf_peak_bytes"] == found["memory_hf_peak_prose_bytes"] == 15890329088
    # In FMS's own table: MiB, of each device less its first reading, the mean over devices.
    assert erg("bench", "report", path.parent, "--fms", tmp_path / "fms")[0] == 0
    with (tmp_path / "fms" / "benchmarks.csv").open(newline="") as file:
        (theirs,) = csv.DictReader(file)
    assert float(theirs["mem_nvidia_mem_reserved"]) == 3
    assert float(theirs["mem_peak_torch_mem_alloc_in_bytes"]) == 15890329088
    _, out, _ = erg("bench", "report", path.parent, "--memory", "--format", "csv")
    (alone,) = csv.DictReader(out.splitlines())
    assert alone["memory_hf_alloc_bytes"] == "4873693696"
    assert "loss" not in alone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--smi-interval", "2"], "--smi-keywords and --smi-interval need --memory nvidia-smi"),
        (["--memory", "nvidia-smi", "--smi-interval", "0"], "0.001 to 86400 s; got 0"),
        (["--memory", "all", "--smi-keywords", "a b,$(c)"], "nvidia-smi has no keyword '$(c)'"),
        (["--memory", "smi"], "'smi' is not one of"),
    ],
)
def test_what_can_not_be_logged_is_refused_before_anything_is_made(
    erg: Erg, tmp_path: Path, options: list[str], said: str
) -> None:
    (tmp_path / "s.yaml").write_text("scenarios: [{name: a, command: 'true', arguments: {}}]\n")
    code, _, err = erg("bench", "run", tmp_path / "s.yaml", "--out", tmp_path / "out", *options)
    assert code == 2
    assert said in " ".join(err.split())
    assert not (tmp_path / "out").exists()
