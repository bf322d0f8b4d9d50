from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.bench.results import of_trainer, smi_peaks
from ergmeter.bench.tables import BYTES_PER_MIB, MEMORY
from ergmeter.errors import FormatError, NotMeasurable

# The example that the FMS guide prints.
GUIDE = {
    "train_runtime": 143.6704,
    "init_mem_gpu_alloc_delta": 0,
    "init_mem_gpu_peaked_delta": 0,
    "train_mem_gpu_alloc_delta": 126487040,
    "train_mem_gpu_peaked_delta": 11016635392,
    "before_init_mem_cpu": 5831098368,
    "before_init_mem_gpu": 4747206656,
}


def columns(said: Mapping[str, object]) -> dict[str, float]:
    return {name[10:-6]: value for name, value in of_trainer(said, {}).items()}


def test_the_guides_example_comes_to_the_programs_two_figures() -> None:
    found = columns(GUIDE)
    assert found["alloc"] == 4_873_693_696
    assert found["peak"] == 15_890_329_088


def test_in_the_guides_example_its_prose_and_its_program_agree_by_chance() -> None:
    found = columns(GUIDE)
    assert found["peak_prose"] == 4747206656 + 0 + 0 + 126487040 + 11016635392
    assert found["discrepancy"] == 0


def test_a_peak_during_init_tells_the_prose_from_the_program() -> None:
    found = columns({**GUIDE, "init_mem_gpu_peaked_delta": 3_000_000_000})
    assert found["peak"] == 15_890_329_088
    assert found["peak_prose"] == found["seed"] == 18_890_329_088
    assert found["discrepancy"] == 3_000_000_000


def test_a_model_that_peaks_most_in_init_has_its_peak_there() -> None:
    found = columns({**GUIDE, "init_mem_gpu_peaked_delta": 20_000_000_000})
    assert found["peak"] == 4747206656 + 20_000_000_000
    assert found["alloc"] == 4_873_693_696


def test_evaluation_is_a_stage_of_its_own_and_in_no_sum() -> None:
    said = {"eval_mem_gpu_alloc_delta": 5, "eval_mem_gpu_peaked_delta": 12_000_000_000}
    found = columns({**GUIDE, **said})
    assert found["peak"] == 15_890_329_088
    assert found["evaluate_peak"] == 4_873_693_696 + 5 + 12_000_000_000
    assert "predict_peak" not in found


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "skip_memory_metrics"),
        ({"before_init_mem_cpu": 5}, "saw no GPU"),
        ({"before_init_mem_gpu": 5}, "no memory of its init or train stage"),
    ],
)
def test_what_was_not_logged_is_absent_with_its_reason(said: dict[str, int], why: str) -> None:
    missing: dict[str, str] = {}
    assert of_trainer(said, missing) == {}
    assert why in missing["memory_hf_peak_bytes"]
    assert {name for name in MEMORY if name.startswith("memory_hf_")} == missing.keys()


def test_a_device_without_peaks_has_what_was_allocated() -> None:
    missing: dict[str, str] = {}
    said = {name: value for name, value in GUIDE.items() if "peaked" not in name}
    found = of_trainer(said, missing)
    assert found["memory_hf_alloc_bytes"] == 4_873_693_696
    assert "no peak of the stage init" in missing["memory_hf_peak_bytes"]
    assert not found.keys() & missing.keys()


@given(
    st.integers(0, 10**11),
    st.tuples(*[st.integers(0, 10**11)] * 4),
)
def test_the_prose_never_says_less_than_the_program(
    before: int, deltas: tuple[int, int, int, int]
) -> None:
    names = [f"{s}_mem_gpu_{k}_delta" for s in ("init", "train") for k in ("alloc", "peaked")]
    said = dict(zip(names, deltas, strict=True))
    found = columns({"before_init_mem_gpu": before, **said})
    assert found["alloc"] <= found["peak"] <= found["peak_prose"]


def log(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gpu_memory_logs.csv"
    path.write_text(text)
    return path


def test_a_log_of_two_devices_gives_each_ones_peak_above_its_first_reading(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        "timestamp, name, index, memory.used [MiB]\n"
        "2024/05/21 08:35:28.497, NVIDIA A100-SXM4-80GB, 0, 4 MiB\n"
        "2024/05/21 08:35:28.498, NVIDIA A100-SXM4-80GB, 1, 104 MiB\n"
        "2024/05/21 08:35:29.499, NVIDIA A100-SXM4-80GB, 0, 1004 MiB\n"
        "2024/05/21 08:35:29.500, NVIDIA A100-SXM4-80GB, 1, 604 MiB\n"
        "2024/05/21 08:35:30.501, NVIDIA A100-SXM4-80GB, 0, 504 MiB\n"
        "2024/05/21 08:35:30.502, NVIDIA A100-SXM4-80GB, 1, 6",
    )
    assert {
        device: (first / BYTES_PER_MIB, highest / BYTES_PER_MIB)
        for device, (first, highest) in smi_peaks(path).items()
    } == {"0": (4, 1004), "1": (104, 604)}


def test_any_keywords_in_any_order_are_read(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        "memory.used [MiB], uuid, power.draw [W], utilization.gpu [%]\n"
        "10, GPU-a, 70.5, 3\n[N/A], GPU-a, 71, 4\n30, GPU-a, 300, 99\n30, GPU-a\n",
    )
    assert smi_peaks(path) == {"GPU-a": (10 * BYTES_PER_MIB, 30 * BYTES_PER_MIB)}


def test_a_log_without_memory_says_what_to_log(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"memory\.used"):
        smi_peaks(log(tmp_path, "timestamp, name\n1, A100\n"))


@pytest.mark.parametrize("text", ["", "index, memory.used [MiB]\n"])
def test_a_log_without_a_reading_is_not_damaged(tmp_path: Path, text: str) -> None:
    """As of a cell that was killed before the first."""
    with pytest.raises(NotMeasurable, match="none was logged before the cell ended"):
        smi_peaks(log(tmp_path, text))


def recorded(name: str) -> list[dict[str, str]]:
    path = Path(__file__).parents[2] / "data" / "h200" / name
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def test_on_an_h200_the_two_ways_differ_by_reserve_and_context() -> None:
    """What docs/memory.md says, from the recording."""
    samples = [
        (int(s["t_ns"]), int(s["memory_used_bytes"])) for s in recorded("h200_samples.csv.gz")
    ]
    steps: dict[str, list[dict[str, str]]] = {}
    for step in recorded("h200_steps.csv.gz"):
        steps.setdefault(step["phase"], []).append(step)
    first = samples[0][1]
    for phase in ("full_bf16_1b", "lora_bf16_1b", "qlora_nf4_1b", "tiny_20ms"):
        start, end = int(steps[phase][0]["start_ns"]), int(steps[phase][-1]["end_ns"])
        peak = max(used for t, used in samples if start <= t <= end)
        reserved = max(int(step["memory_reserved_bytes"]) for step in steps[phase])
        assert peak - first - reserved == 804_061_184


def test_a_second_header_without_memory_takes_nothing_from_the_readings_before(
    tmp_path: Path,
) -> None:
    text = "index, memory.used [MiB]\n0, 10 MiB\n0, 30 MiB\nindex, power.draw [W]\n0, 70 W\n"
    assert smi_peaks(log(tmp_path, text)) == {"0": (10 * BYTES_PER_MIB, 30 * BYTES_PER_MIB)}


@pytest.mark.parametrize(
    "header",
    [
        "index, encoder.stats.sessionCount, memory.used [MiB]",
        "index, Some Title, memory.used [MiB],",
        '"index","x","memory.used [MiB]"',
    ],
)
def test_titles_that_nobody_knows_are_passed_over(tmp_path: Path, header: str) -> None:
    path = log(tmp_path, f'{header}\n0, 1, 10 MiB\n"0","1","30 MiB"\n')
    assert smi_peaks(path) == {"0": (10 * BYTES_PER_MIB, 30 * BYTES_PER_MIB)}
