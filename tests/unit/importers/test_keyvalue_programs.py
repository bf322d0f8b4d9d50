"""Whose lines are these? Programs, ranks and loggers that print into one output."""

from __future__ import annotations

import pytest

from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.ports import Line
from ergmeter.records import Step
from tests.unit.importers.captured import marks, steps
from tests.unit.importers.printed import S, live


@pytest.mark.parametrize("gap_s", [0.001, 5])
@pytest.mark.parametrize(
    "numbers",
    [
        [n for i in range(30) for n in (i, 1000 + i)],
        [0, 1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5, 7, 6, 8],
        [n for i in range(30) for n in (10 * i, 5000 + 10 * i)],
    ],
    ids=["from 1000", "one behind", "every ten"],
)
def test_lines_of_several_programs_are_said_to_be_so_and_make_no_step(
    numbers: list[int], gap_s: float
) -> None:
    log = [(i * gap_s, f"step={n} loss=2.5 tokens=64") for i, n in enumerate(numbers)]
    records = live(*log)
    (said,) = marks(records, "several_programs")
    assert "mixed in this output" in said
    # Where lines are far apart, the first do not wait until that is known.
    assert len(steps(records)) <= (6 if gap_s > 1 else 0)


@pytest.mark.parametrize("other", [0, 1000])
def test_a_second_program_that_joins_later_ends_the_steps(other: int) -> None:
    alone = [(i / 10, i) for i in range(50)]
    mixed = [
        (5 + i / 10, n) for i, n in enumerate(m for k in range(9) for m in (other + k, 50 + k))
    ]
    log = [(t, f"step={n} batch_tokens=64") for t, n in (*alone, *mixed)]
    records = live(*log)
    assert len(marks(records, "several_programs")) == 1
    assert {(s.steps, s.tokens_computed) for s in steps(records)[:49]} == {(1, 64)}
    assert 49 <= len(steps(records)) <= 55


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_of_ranks_that_do_not_name_themselves_each_step_counts_once(ranks: int) -> None:
    log = [
        (n + r / 1000, f"step={n} loss=2.{r} batch_tokens=64")
        for n in range(20)
        for r in range(ranks)
    ]
    records = live(*log)
    assert [(s.index, s.steps, s.tokens_computed) for s in steps(records)] == [
        (n, 1, 64) for n in range(1, 20)
    ]
    (said,) = marks(records, "assumed")
    assert said.endswith("if they are of several ranks, the tokens are those of one")
    assert marks(records, "several_programs") == []


@pytest.mark.parametrize(
    "lines",
    [
        ["step={} loss=2", "step={} tokens=64"],
        ["step={} begins", "step={} loss=2 tokens=64", "step={} ends"],
        ["5%|4  | {}/99 [00:01<00:09, 9.9it/s, loss=3]", "5%|4 | {}/99 [00:01<00:09, loss=2]"],
    ],
    ids=["two lines a step", "begin and end", "a bar that is drawn, then given its loss"],
)
def test_several_lines_about_one_step_are_not_several_programs(lines: list[str]) -> None:
    texts = [line.format(n) for n in range(1, 31) for line in lines]
    records = live(*[(i / 100, text) for i, text in enumerate(texts)])
    assert marks(records, "several_programs") == []
    assert sum(s.steps or 0 for s in steps(records)) == 29


@pytest.mark.parametrize(
    "line",
    ["[rank{0}]: step={1} loss=2 batch_tokens=64", "step={1} rank={0} loss=2 batch_tokens=64",
     "[default{0}]:step={1} batch_tokens=64", '{{"rank": {0}, "step": {1}, "batch_tokens": 64}}'],
)  # fmt: skip
def test_of_lines_that_name_their_rank_those_of_the_first_are_read(line: str) -> None:
    log = [(n / 10 + r / 1000, line.format((r + 1) % 4, n)) for n in range(10) for r in range(4)]
    records = live(*log)
    found = steps(records)
    assert [(s.index, s.steps, s.tokens_computed) for s in found] == [
        (n, 1, 64) for n in range(1, 10)
    ]
    (said,) = marks(records, "assumed")
    assert "only those of rank 1 are read" in said
    assert marks(records, "several_programs") == []


def test_the_first_steps_wait_for_no_more_than_about_a_second() -> None:
    texts = ["step=1 batch_tokens=4", "step=2 batch_tokens=4", "", ""]
    lines = iter(
        [Line(text, round(t * S)) for t, text in zip((1, 1.1, 1.6, 2.2), texts, strict=True)]
    )
    assert isinstance(next(iter(KeyValueImporter().records(lines))), Step)


def blocks(*whose: tuple[float, int, int]) -> list[tuple[float, str]]:
    """At each time, the lines of the steps from one number up to another."""
    return [
        (t, f"step={n} loss={n % 7}.5 batch_tokens=64")
        for t, first, last in whose
        for n in range(first, last + 1)
    ]


@pytest.mark.parametrize("behind_s", [0.01, 4])
def test_two_programs_in_blocks_are_found_out_and_the_times_of_one_are_true(
    behind_s: float,
) -> None:
    ends = range(80, 500, 80)
    log = [
        (end / 8 + late, end - 79, end) for end in ends for late in (0, behind_s)
    ]  # each makes eight steps a second
    records = live(*blocks(*log))
    assert len(marks(records, "several_programs")) == 1
    for step in steps(records):
        assert step.steps is not None
        assert step.window.duration_s <= step.steps / 8
        assert step.window.duration_s >= step.steps / 8 - behind_s
    assert all(s.tokens_computed == 64 * (s.steps or 0) for s in steps(records))


def test_a_block_of_another_program_makes_no_leap() -> None:
    log = [(10, 1, 80), (20, 81, 160), (25, 1, 80), (30, 161, 240), (35, 81, 160), (40, 241, 320)]
    records = live(*blocks(*log))
    assert [(s.steps, s.window.duration_s) for s in steps(records)] == [(80, 10)]
    (said,) = marks(records, "several_programs")
    assert "80, 161" in said


def test_an_evaluation_that_counts_steps_of_its_own_is_found_out_when_training_goes_on() -> None:
    training = [(i / 4, i) for i in range(1, 41)]
    evaluation = [(10 + i / 4, i) for i in range(1, 9)]
    after = [(12 + i / 4, 40 + i) for i in range(1, 41)]
    lines = (*training, *evaluation, *after)
    records = live(*[(t, f"step={n} loss=2 batch_tokens=64") for t, n in lines])
    assert {s.steps for s in steps(records)} == {1}
    assert len(marks(records, "several_programs")) == 1


@pytest.mark.parametrize("other", ["{}", "2026-11-15 10:00:00,123 INFO train: {}"])
@pytest.mark.parametrize("gap_s", [0.0, 0.0004])
def test_lines_that_come_twice_count_once_and_that_is_said(other: str, gap_s: float) -> None:
    log = []
    for n in range(1, 31):
        line = f"step={n} loss={3 - n / 50:.4f} tokens=64 tok/s=128.4"
        log += [(n / 2, line), (n / 2 + gap_s, other.format(line))]
    records = live(*log)
    found = steps(records)
    assert [(s.index, s.steps, s.tokens_computed) for s in found] == [
        (n, 1, 64) for n in range(2, 31)
    ]
    assert {s.window.duration_s for s in found} == {0.5}
    assert marks(records, "several_programs") == []
    assert sum("came again" in said for said in marks(records, "assumed")) == 1
