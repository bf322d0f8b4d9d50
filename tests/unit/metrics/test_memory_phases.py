"""Which phase needed the memory: by the readings in it, and by a mark that rose while it was on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ergmeter.records import Device, Sample, Step
from ergmeter.runlog.reader import Run
from tests.runs import GPU, even_steps, reading, reason, run_of

S = 10**9
GB = 10**9
TORCH = Device("torch:h:1:cuda:0", "allocator", "torch allocator on Test GPU", "allocator")

# Ten steps of a second, an evaluation from 10 s to 14 s, a checkpoint from 12 s to 13 s within it.
SPANS = [
    *even_steps(10),
    Step(10 * S, 14 * S, phase="eval"),
    Step(12 * S, 13 * S, phase="checkpoint"),
]


def held(path: Path, readings: Iterable[tuple[float, float]], *, spans: list[Step] = SPANS) -> Run:
    """A run with device memory of so many GB at so many seconds."""
    samples = [Sample(round(t * S), GPU.id, memory_bytes=round(gb * GB)) for t, gb in readings]
    return run_of(path, steps=spans, samples=samples, devices=[GPU])


def allocated(path: Path, readings: Iterable[tuple[float, int, int]]) -> Run:
    """A run whose allocator said at so many seconds: GB in tensors, and its mark."""
    samples = [
        Sample(round(t * S), TORCH.id, allocated_bytes=now * GB, allocated_peak_bytes=mark * GB)
        for t, now, mark in readings
    ]
    return run_of(path, steps=SPANS, samples=samples, devices=[TORCH])


def test_a_reading_belongs_to_the_phase_it_was_taken_in(tmp_path: Path) -> None:
    said = [(0.5, 40), (5.5, 41), (10.5, 20), (11.5, 22), (12.5, 60), (13.5, 21), (20, 99)]
    run = held(tmp_path / "run", said)
    assert reading(run, "memory.device_train_peak_bytes").value == 41 * GB
    assert reading(run, "memory.device_eval_peak_bytes").value == 22 * GB
    checkpoint = reading(run, "memory.device_checkpoint_peak_bytes")
    assert checkpoint.value == 60 * GB
    assert "the highest of 1 readings in checkpoints" in checkpoint.note
    assert reading(run, "memory.device_peak_bytes").value == 99 * GB  # in none of them


def test_a_phase_that_never_was_and_one_too_short_to_be_read_say_so(tmp_path: Path) -> None:
    run = held(tmp_path / "run", [(0.5, 40), (10.5, 20)])
    assert "no reading fell into checkpoints" in reason(run, "memory.device_checkpoint_peak_bytes")
    plain = held(tmp_path / "plain", [(0.5, 40)], spans=even_steps(10))
    assert reason(plain, "memory.device_eval_peak_bytes") == "no eval span was recorded"


def test_of_several_devices_the_fullest_is_named(tmp_path: Path) -> None:
    other = Device("GPU-1", "gpu", "Test GPU", "nvml")
    samples = [Sample(S, GPU.id, memory_bytes=3 * GB), Sample(S, other.id, memory_bytes=5 * GB)]
    run = run_of(tmp_path / "run", steps=SPANS, samples=samples, devices=[GPU, other])
    found = reading(run, "memory.device_train_peak_bytes")
    assert found.value == 5 * GB
    assert found.note.startswith("of GPU-1, the fullest of 2; ")


def test_a_mark_that_rose_in_a_phase_is_its_peak_though_no_reading_saw_it(tmp_path: Path) -> None:
    """Tensors are 8 GB whenever they are read; the mark went to 40 in a step, to 45 in eval."""
    run = allocated(
        tmp_path / "run", [(1, 8, 8), (2, 8, 40), (9, 8, 40), (10.5, 8, 40), (11.5, 9, 45)]
    )
    train = reading(run, "memory.allocator_train_peak_bytes")
    assert (train.value, train.low, train.high) == (40 * GB, None, None)
    assert "rose to it in training steps" in train.note
    assert reading(run, "memory.allocator_eval_peak_bytes").value == 45 * GB


def test_a_mark_that_something_else_set_is_a_bound_and_not_the_peak(tmp_path: Path) -> None:
    run = allocated(tmp_path / "run", [(1, 8, 40), (9, 8, 40), (10.5, 5, 40), (11.5, 6, 40)])
    found = reading(run, "memory.allocator_eval_peak_bytes")
    assert (found.value, found.low, found.high) == (6 * GB, 6 * GB, 40 * GB)
    assert "which something else had set" in found.note


def test_a_mark_that_rose_across_two_phases_is_neithers(tmp_path: Path) -> None:
    """Between the readings at 9.9 s and 10.5 s a step ended and an evaluation began."""
    run = allocated(tmp_path / "run", [(1, 8, 8), (9.9, 8, 8), (10.5, 7, 50), (11.5, 7, 50)])
    assert reading(run, "memory.allocator_train_peak_bytes").value == 8 * GB
    evaluation = reading(run, "memory.allocator_eval_peak_bytes")
    assert (evaluation.value, evaluation.high) == (7 * GB, 50 * GB)


@pytest.mark.parametrize("key", ["device_train_peak_bytes", "allocator_train_peak_bytes"])
def test_printed_lines_do_not_say_when_a_phase_began(tmp_path: Path, key: str) -> None:
    samples = [
        Sample(S, GPU.id, memory_bytes=1),
        Sample(S, TORCH.id, allocated_bytes=1, allocated_peak_bytes=1),
    ]
    run = run_of(
        tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU, TORCH],
        stream="output",
    )  # fmt: skip
    assert reason(run, f"memory.{key}") == "printed lines do not say when a phase began"
