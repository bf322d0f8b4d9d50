"""The peak of a program: the kernel's mark where it is higher than any reading, and said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.records import Device, Sample
from ergmeter.runlog.reader import Run
from tests.runs import even_steps, reading, reason, run_of

S = 10**9
MB = 10**6
PROGRAM = Device("process:h:1", "process", "train.py", "process")


def program(path: Path, *held: tuple[int | None, int | None]) -> Run:
    """A run whose program was read every second: resident memory and high-water mark, in MB."""
    samples = [
        Sample(
            t * S,
            PROGRAM.id,
            memory_bytes=resident and resident * MB,
            memory_peak_bytes=mark and mark * MB,
            cpu_s=float(t),
        )
        for t, (resident, mark) in enumerate(held)
    ]
    return run_of(path, steps=even_steps(len(held)), samples=samples, devices=[PROGRAM])


def test_what_was_held_between_two_readings_is_in_the_peak(tmp_path: Path) -> None:
    found = reading(program(tmp_path / "run", (9, 9), (9, 609)), "memory.process_peak_bytes")
    assert (found.value, found.basis) == (609 * MB, "measured")
    for said in ("high-water mark", "over the life of the program", "a lower bound where several"):
        assert said in found.note
    assert "at the first reading already" not in found.note


def test_the_mark_at_the_end_counts_where_the_program_was_never_read(tmp_path: Path) -> None:
    run = program(tmp_path / "run", (None, 300))
    assert reading(run, "memory.process_peak_bytes").value == 300 * MB


def test_a_mark_from_before_the_first_reading_says_so(tmp_path: Path) -> None:
    found = reading(program(tmp_path / "run", (50, 700), (60, 700)), "memory.process_peak_bytes")
    assert found.value == 700 * MB
    assert "it was already this high at the first reading" in found.note


def test_several_processes_together_may_hold_more_than_any_one_ever_did(tmp_path: Path) -> None:
    found = reading(program(tmp_path / "run", (400, 150), (900, 160)), "memory.process_peak_bytes")
    assert found.value == 900 * MB
    assert "more than the high-water mark of any one process" in found.note
    assert "a lower bound" in found.note


def test_a_run_without_marks_says_that_its_readings_may_have_missed_the_peak(
    tmp_path: Path,
) -> None:
    found = reading(program(tmp_path / "run", (9, None), (12, None)), "memory.process_peak_bytes")
    assert found.value == 12 * MB
    assert "peaks between readings are missed" in found.note


def test_of_several_programs_the_fullest_is_named(tmp_path: Path) -> None:
    other = Device("process:h:2", "process", "train.py", "process")
    samples = [
        Sample(S, PROGRAM.id, memory_bytes=500 * MB, memory_peak_bytes=500 * MB),
        Sample(S, other.id, memory_bytes=20 * MB, memory_peak_bytes=800 * MB),
    ]
    run = run_of(tmp_path / "run", steps=even_steps(3), samples=samples, devices=[PROGRAM, other])
    found = reading(run, "memory.process_peak_bytes")
    assert found.value == pytest.approx(800 * MB)
    assert found.note.startswith("of process:h:2, the fullest of 2; ")


TORCH = Device("torch:h:1:cuda:0", "allocator", "torch allocator on Test GPU", "allocator")


def test_what_was_taken_and_never_needed_is_a_share_of_what_was_taken(tmp_path: Path) -> None:
    """At its peaks torch had 30 MB in tensors of 40 MB taken, and 4 MB in pieces: 25 % unused."""
    samples = [
        Sample(S, TORCH.id, allocated_bytes=10 * MB, allocated_peak_bytes=12 * MB,
               reserved_bytes=20 * MB, split_bytes=4 * MB),
        Sample(2 * S, TORCH.id, allocated_bytes=11 * MB, allocated_peak_bytes=30 * MB,
               reserved_bytes=40 * MB, split_bytes=4 * MB),
    ]  # fmt: skip
    run = run_of(tmp_path / "run", steps=even_steps(3), samples=samples, devices=[TORCH])
    found = reading(run, "memory.allocator_unused_frac")
    assert found.value == pytest.approx(0.25)
    assert "30 MB needed of 40 MB taken" in found.note
    assert reading(run, "memory.allocator_split_bytes").value == 4 * MB
    assert reading(run, "memory.allocator_peak_bytes").value == 30 * MB


def test_a_device_that_a_rank_sees_and_puts_nothing_on_takes_no_figure_away(
    tmp_path: Path,
) -> None:
    """Under torchrun every rank sees all GPUs of its node, and has tensors on one."""
    other = Device("torch:h:1:cuda:1", "allocator", "torch allocator on Test GPU", "allocator")
    samples = [
        Sample(S * n, other.id, allocated_bytes=MB, allocated_peak_bytes=3 * MB,
               reserved_bytes=4 * MB)
        for n in (1, 2)
    ]  # fmt: skip
    run = run_of(tmp_path / "run", steps=even_steps(3), samples=samples, devices=[TORCH, other])
    assert reading(run, "memory.allocator_peak_bytes").value == 3 * MB
    assert reading(run, "memory.allocator_reserved_bytes").value == 4 * MB
    assert reading(run, "memory.allocator_train_peak_bytes").high == 3 * MB
    silent = run_of(tmp_path / "silent", steps=even_steps(3), devices=[TORCH, other])
    assert "no reading has allocated_peak_bytes" in reason(silent, "memory.allocator_peak_bytes")


def gpu(index: int, total_mb: int) -> Device:
    facts = {"memory_total_bytes": total_mb * MB}
    return Device(f"GPU-{index}", "gpu", "Test GPU", "nvml", facts)


def test_the_fullest_device_is_the_one_with_the_least_room_left(tmp_path: Path) -> None:
    small, large = gpu(0, 100), gpu(1, 1000)
    samples = [
        Sample(S, small.id, memory_bytes=80 * MB),
        Sample(S, large.id, memory_bytes=500 * MB),
    ]
    run = run_of(tmp_path / "run", steps=even_steps(3), samples=samples, devices=[small, large])
    found = reading(run, "memory.device_peak_frac")
    assert found.value == pytest.approx(0.8)
    assert "of GPU-0, the fullest of 2: 80 MB of 100 MB" in found.note


def test_the_programs_own_part_of_a_device_is_told_where_the_driver_tells_it(
    tmp_path: Path,
) -> None:
    one = gpu(0, 1000)
    samples = [
        Sample(t * S, one.id, memory_bytes=900 * MB, process_bytes=own * MB)
        for t, own in ((1, 300), (2, 700), (3, 600))
    ]
    run = run_of(tmp_path / "run", steps=even_steps(3), samples=samples, devices=[one])
    assert reading(run, "memory.device_program_peak_bytes").value == 700 * MB
    unknown = run_of(
        tmp_path / "unknown", steps=even_steps(3), devices=[one],
        samples=[Sample(S, one.id, memory_bytes=900 * MB)],
    )  # fmt: skip
    assert "containers" in reason(unknown, "memory.device_program_peak_bytes")
