"""The peak of a program: the kernel's mark where it is higher than any reading, and said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.records import Device, Sample
from ergmeter.runlog.reader import Run
from tests.runs import even_steps, reading, run_of

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
    assert "it stood so high at the first reading already" in found.note


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
    assert "what was held between readings is not in it" in found.note


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
