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


def allocated(
    path: Path, readings: Iterable[tuple[float, int, int]], *, spans: list[Step] = SPANS
) -> Run:
    """A run whose allocator said at so many seconds: GB in tensors, and its mark."""
    samples = [
        Sample(round(t * S), TORCH.id, allocated_bytes=now * GB, allocated_peak_bytes=mark * GB)
        for t, now, mark in readings
    ]
    return run_of(path, steps=spans, samples=samples, devices=[TORCH])


def test_a_reading_belongs_to_the_phase_it_was_taken_in(tmp_path: Path) -> None:
    said = [(0.5, 40), (5.5, 41), (10.5, 20), (11.5, 22), (12.5, 60), (13.5, 21), (20, 99)]
    run = held(tmp_path / "run", said)
    assert reading(run, "memory.device_train_peak_bytes").value == 41 * GB
    assert reading(run, "memory.device_eval_peak_bytes").value == 22 * GB
    checkpoint = reading(run, "memory.device_checkpoint_peak_bytes")
    assert checkpoint.value == 60 * GB
    assert "the highest of 1 reading in checkpoints" in checkpoint.note
    assert reading(run, "memory.device_peak_bytes").value == 99 * GB  # in none of them


def test_a_phase_that_never_was_and_one_too_short_to_be_read_say_so(tmp_path: Path) -> None:
    run = held(tmp_path / "run", [(0.5, 40), (10.5, 20)])
    assert "no reading was taken during checkpoints" in reason(
        run, "memory.device_checkpoint_peak_bytes"
    )
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
    assert "which another phase may have set" in found.note


def test_a_mark_that_rose_across_two_phases_is_neithers(tmp_path: Path) -> None:
    """Between the readings at 9.9 s and 10.5 s a step ended and an evaluation began."""
    run = allocated(tmp_path / "run", [(1, 8, 8), (9.9, 8, 8), (10.5, 7, 50), (11.5, 7, 50)])
    assert reading(run, "memory.allocator_train_peak_bytes").value == 8 * GB
    evaluation = reading(run, "memory.allocator_eval_peak_bytes")
    assert (evaluation.value, evaluation.high) == (7 * GB, 50 * GB)


def test_a_mark_from_before_the_first_reading_rose_in_no_phase(tmp_path: Path) -> None:
    """Something held 60 GB before anything was measured; steps hold 5 whenever they are read."""
    run = allocated(tmp_path / "run", [(t + 0.5, 5, 60) for t in range(10)])
    found = reading(run, "memory.allocator_train_peak_bytes")
    assert (found.value, found.low, found.high) == (5 * GB, 5 * GB, 60 * GB)
    assert "rose to it" not in found.note


def test_a_mark_that_rose_in_a_phase_bounds_it_from_below_once_another_has_set_it_higher(
    tmp_path: Path,
) -> None:
    """An evaluation raises it to 6, steps to 40; a second evaluation may have held up to that."""
    spans = [
        Step(0, 2 * S, phase="eval"),
        *(Step((3 + i) * S, (4 + i) * S, index=i) for i in range(5)),
        Step(10 * S, 20 * S, phase="eval"),
    ]
    said = [
        (0.2, 1, 1),
        (1, 2, 2),
        (1.8, 2, 6),
        (3.5, 5, 40),
        (5.5, 5, 40),
        (11, 5, 40),
        (19, 5, 40),
    ]
    run = allocated(tmp_path / "run", said, spans=spans)
    found = reading(run, "memory.allocator_eval_peak_bytes")
    assert (found.value, found.low, found.high) == (6 * GB, 6 * GB, 40 * GB)
    assert "rose to it in evaluation; between two readings it may have been more" in found.note


def test_a_mark_that_rose_just_after_the_last_reading_of_a_phase_bounds_it(tmp_path: Path) -> None:
    """The last step ends at 10 s: read at 9.9 s, and at 10.5 s with a mark of 50."""
    run = allocated(tmp_path / "run", [(1, 8, 8), (9.9, 8, 8), (10.5, 7, 50)])
    found = reading(run, "memory.allocator_train_peak_bytes")
    assert (found.value, found.low, found.high) == (8 * GB, 8 * GB, 50 * GB)


def test_the_fullest_device_is_no_fuller_than_another_may_have_been(tmp_path: Path) -> None:
    other = Device("torch:h:1:cuda:1", "allocator", "torch allocator on Test GPU", "allocator")
    said = [(TORCH, 1, 5, 5), (TORCH, 2, 9, 10), (other, 1, 4, 30), (other, 2, 4, 30)]
    samples = [
        Sample(t * S, device.id, allocated_bytes=now * GB, allocated_peak_bytes=mark * GB)
        for device, t, now, mark in said
    ]
    run = run_of(tmp_path / "run", steps=SPANS, samples=samples, devices=[TORCH, other])
    found = reading(run, "memory.allocator_train_peak_bytes")
    assert (found.value, found.low, found.high) == (10 * GB, 10 * GB, 30 * GB)


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
    assert (
        reason(run, f"memory.{key}") == "printed lines do not show when a phase began; a Meter does"
    )
