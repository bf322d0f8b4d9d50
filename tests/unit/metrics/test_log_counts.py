"""Counts from a program's output: no figure claims more of them than the output said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Mark, Reported, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.views import documents
from tests.runs import GPU, even_steps, reading, reason, run_of
from tests.unit.metrics.test_summary import gpu_samples

S = 10**9
READ = "tokens= read as the count of one step (times the steps a line covers), from its first"
GUESS = Mark(S, "assumed", f"{READ} values 64, 64, 64; if it is not: --tokens-are line or total")
SAMPLES = Mark(S, "assumed", "samples= read as the count since the line before, from 8, 8, 8")


def log(path: Path, steps: list[Step], *marks: Mark, **more: Any) -> Run:
    return run_of(path, steps=steps, stream="output", marks=marks, **more)


def strided(*strides: int | None) -> list[Step]:
    """A printed line each second, of so many steps."""
    return [
        Step(i * S, (i + 1) * S, steps=n, tokens_computed=640, samples=80)
        for i, n in enumerate(strides)
    ]


@pytest.mark.parametrize(
    ("strides", "basis"),
    [
        ([1] * 20, "derived"),
        ([10] * 20, "assumed"),
        ([9, *[10] * 18, 3], "assumed"),  # the first step is printed too, and the last
        ([1, *[10] * 18, 3], "assumed"),
        ([97, 101, 99, 98, 103], "assumed"),  # a line every so many seconds
        ([1, 2, 1, 1, 3, 5, 2, 1, 4, 1], "derived"),  # lines of one step, some in one read
        ([None] * 5, "assumed"),
    ],
)
def test_tokens_per_second_is_assumed_where_a_line_is_of_several_steps_and_its_count_was_guessed(
    tmp_path: Path, strides: list[int | None], basis: str
) -> None:
    run = log(tmp_path / "run", strided(*strides), GUESS)
    for key in ("throughput.tokens_per_s", "throughput.computed_tokens_per_s", "tokens.total"):
        found = reading(run, key)
        assert found.basis == basis
        assert (READ in found.note) == (basis == "assumed")
    (line,) = documents.metric_lines(summarize(run), ["tok_per_s"])
    assert f"({basis}; tokens as printed" in line


def test_a_count_whose_name_says_what_it_counts_is_derived(tmp_path: Path) -> None:
    run = log(tmp_path / "run", strided(*[10] * 20))
    assert reading(run, "throughput.tokens_per_s").basis == "derived"
    assert reading(run, "throughput.samples_per_s").basis == "derived"


def test_a_guess_about_samples_is_no_guess_about_tokens(tmp_path: Path) -> None:
    run = log(tmp_path / "run", strided(*[10] * 20), SAMPLES)
    assert reading(run, "throughput.tokens_per_s").basis == "derived"
    found = reading(run, "throughput.samples_per_s")
    assert found.basis == "assumed"
    assert SAMPLES.detail in found.note


def test_a_count_that_was_taken_back_is_assumed_whatever_its_lines_stand_for(
    tmp_path: Path,
) -> None:
    said = "tokens= fell from 900 to 100 while the steps went on, so it is no running total"
    run = log(tmp_path / "run", strided(*[1] * 20), Mark(S, "assumed", said))
    assert reading(run, "throughput.tokens_per_s").basis == "assumed"


def test_energy_per_token_is_as_weak_as_its_tokens(tmp_path: Path) -> None:
    steps = strided(*[10] * 10)
    samples = gpu_samples(GPU, 100, 10)
    run = log(tmp_path / "run", steps, GUESS, samples=samples, devices=[GPU])
    found = reading(run, "energy.joules_per_token")
    assert found.basis == "assumed"
    assert "tokens as printed" in found.note


def test_printed_tokens_are_not_said_to_include_padding(tmp_path: Path) -> None:
    run = log(tmp_path / "log", even_steps(20, tokens_computed=5))
    for key in ("throughput.tokens_per_s", "tokens.total", "tokens.per_step"):
        assert reading(run, key).note.startswith("tokens as printed")
    assert "padding included" not in reading(run, "throughput.computed_tokens_per_s").note
    told = run_of(tmp_path / "told", steps=even_steps(20, tokens_computed=5))
    assert "computed tokens (padding included)" in reading(told, "throughput.tokens_per_s").note


def test_a_declared_count_that_the_program_gives_itself_is_said_not_to_be_used(
    tmp_path: Path,
) -> None:
    declared = Settings(tokens_per_step=7, samples_per_step=9)
    own = run_of(tmp_path / "own", steps=even_steps(20, tokens_computed=5, samples=2))
    summary = summarize(own, declared)
    assert "--tokens-per-step 7 is not used: the program reports its own tokens" in summary.notes
    assert "--samples-per-step 9 is not used: the program reports its own samples" in summary.notes
    assert not any("not used" in note for note in summarize(own).notes)
    silent = run_of(tmp_path / "silent", steps=even_steps(20))
    assert not any("not used" in note for note in summarize(silent, declared).notes)
    assert reading(silent, "throughput.samples_per_s", samples_per_step=9).value == pytest.approx(9)


def test_a_log_without_samples_is_told_both_ways_to_give_them(tmp_path: Path) -> None:
    said = reason(log(tmp_path / "log", even_steps(20)), "throughput.samples_per_s")
    assert "print samples=" in said
    assert "--samples-per-step" in said
    assert "meter.step" not in said
    told = reason(run_of(tmp_path / "told", steps=even_steps(20)), "throughput.samples_per_s")
    assert "pass samples= to meter.step, or give --samples-per-step" in told


SILENT = Mark(S, "output_unrecognised", "no steps: no output, so nothing that ergmeter recognises")


@pytest.mark.parametrize(
    "key",
    [
        *("throughput.steps_per_s", "throughput.samples_per_s", "throughput.tokens_per_s"),
        *("time.step_s", "time.step_median_s", "time.outside_steps_frac"),
        *("time.before_first_step_s", "steps.count", "tokens.per_step"),
    ],
)
def test_a_silent_program_has_no_figures_of_steps_for_that_reason(tmp_path: Path, key: str) -> None:
    assert reason(log(tmp_path / "run", [], SILENT), key) == SILENT.detail


def test_an_evaluation_as_long_as_the_program_said_is_the_programs_own_word(
    tmp_path: Path,
) -> None:
    steps = [*even_steps(5), Step(5 * S, 8 * S, steps=None, phase="eval")]
    own = [Reported(8 * S, "eval_runtime", 3.0, "s")]
    found = reading(log(tmp_path / "log", steps, reported=own), "time.eval_s")
    assert (found.value, found.basis) == (3, "reported")
    timed = [Reported(8 * S, "eval_loss", 3.0, "")]
    assert reading(log(tmp_path / "timed", steps, reported=timed), "time.eval_s").basis == "derived"
    assert reading(run_of(tmp_path / "told", steps=steps), "time.eval_s").basis == "measured"
