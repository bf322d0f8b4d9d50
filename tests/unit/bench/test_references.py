"""Made-up files in the three shapes of FMS's published results."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.bench import tables
from ergmeter.errors import FormatError
from tests.unit.bench.rows import load_table, write_table

MIB = 2**20
LATEST = (
    "bf16,epoch,framework_config,mem_nvidia_mem_reserved,mem_peak_torch_mem_alloc_in_bytes,"
    "mem_torch_mem_alloc_in_bytes,model_name_or_path,num_gpus,per_device_train_batch_size,"
    "torch_dtype,train_loss,train_runtime,train_samples_per_second,train_steps_per_second,"
    "train_tokens_per_second\n"
    ",0.1,none,1000,3000000,2000000,some/model,1,4,bfloat16,1.5,100.0,4.0,1.0,4096\n"
    ",0.1,none,900.0,2500000,1500000,some/model,2,2,bfloat16,1.5,50.0,8.0,2.0,8192\n"
    ",,foak,81166,,,big/model,1,4,bfloat16,,,,,\n"
)
SECOND = (
    "index,framework_config,nvidia_mem_reserved,num_gpus,peak_torch_mem_alloc_in_bytes,"
    "per_device_train_batch_size,torch_mem_alloc_in_bytes,train_loss,train_runtime,"
    "train_samples_per_second,train_tokens_per_second\n"
    "7,none,1000,1,3000000,4,2000000,1.5,100.0,4.0,4096\n"
)
FIRST = (
    "alloc_gpu_memory_in_bytes,framework_config,gpu_device_name,num_gpus,"
    "per_device_train_batch_size,reserved_gpu_mem,train_loss,train_runtime,"
    "train_samples_per_second,train_tokens_per_second\n"
    "3000000.00,none,NVIDIA A100-SXM4-80GB,1,4,1000 MiB,1.5,100.0,4.0,4096\n"
)


def read(tmp_path: Path, text: str) -> list[dict[str, object]]:
    path = tmp_path / "benchmarks.csv"
    path.write_text(text)
    rows: list[dict[str, object]] = tables.read_fms_file(path).to_pylist()
    return rows


@pytest.mark.parametrize("text", [FIRST, SECOND, LATEST], ids=["first", "second", "latest"])
def test_each_generations_memory_comes_out_under_one_name(tmp_path: Path, text: str) -> None:
    row = read(tmp_path, text)[0]
    assert row["memory_nvidia_mean_bytes"] == 1000 * MIB
    assert row["computed_tokens_per_s"] == 4096
    assert row["loss"] == 1.5


def test_the_first_generations_sum_is_not_taken_for_the_later_ones_peak(tmp_path: Path) -> None:
    first, latest = read(tmp_path, FIRST)[0], read(tmp_path, LATEST)[0]
    assert (first["memory_hf_seed_bytes"], first["memory_hf_peak_bytes"]) == (3_000_000, None)
    assert (latest["memory_hf_seed_bytes"], latest["memory_hf_peak_bytes"]) == (None, 3_000_000)
    assert latest["memory_hf_alloc_bytes"] == 2_000_000
    assert first["device"] == "NVIDIA A100-SXM4-80GB"


def test_a_row_of_blanks_is_a_cell_that_failed(tmp_path: Path) -> None:
    rows = read(tmp_path, LATEST)
    assert [row["status"] for row in rows] == ["ok", "ok", "error"]
    assert "no metrics" in str(rows[2]["reason"])
    assert "81166 MiB" in str(rows[2]["reason"])


def test_tokens_are_one_devices_and_samples_are_of_all(tmp_path: Path) -> None:
    row = read(tmp_path, LATEST)[1]
    assert row["computed_tokens_per_s_per_device"] == 8192
    assert row["computed_tokens_per_s"] == 2 * 8192
    assert row["samples_per_s"] == 8.0
    assert row["real_tokens_per_s"] is None
    assert row["tokens_counted"] == "computed"


def test_load_knows_a_reference_from_a_table_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "ref.csv"
    path.write_text(LATEST)
    found = load_table(path)
    write_table(found, tmp_path / "ours.csv")
    write_table(found, tmp_path / "ours.parquet")
    assert load_table(tmp_path / "ours.csv").to_pylist() == found.to_pylist()
    assert load_table(tmp_path / "ours.parquet").equals(found)


def test_another_table_is_refused_with_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="name, age"):
        read(tmp_path, "name,age\nx,3\n")
