"""The plain lines of nki-llama's calculator, as jobs print them: ranks, stamps, rates alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.importers.log import ParsedLog, read_log
from ergmeter.importers.nxdt import NxdtImporter
from ergmeter.neuron.training_log import summarize_log
from ergmeter.ports import Line
from ergmeter.records import Reading
from tests.unit.importers.captured import marks, steps
from tests.unit.importers.programs import from_file

NXDT = NxdtImporter()
STEPS = 12


def read(tmp_path: Path, *texts: str) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return read_log(path)


def printed(label: str, rank: int, n: int) -> list[str]:
    """A step of 64 sequences in 30 s, the first one of 180 s."""
    took_s = 180 if n == 0 else 30
    mark = label.format(rank)
    return [f"{mark}step_time: {took_s}.000", f"{mark}throughput: {64 / took_s:.3f}"]


def by_line(label: str) -> list[str]:
    both = [[printed(label, rank, n) for rank in (0, 1)] for n in range(STEPS)]
    return [one[line] for step in both for line in (0, 1) for one in step]


def by_block(label: str) -> list[str]:
    return [line for rank in (0, 1) for n in range(STEPS) for line in printed(label, rank, n)]


NAMED = ("[rank{0}]: ", "[default{0}]:", "[1,{0}]<stdout>: ")


@pytest.mark.parametrize(
    "lines",
    # srun's number by block looks as an epoch's does.
    [*map(by_line, (*NAMED, "{0}: ")), *map(by_block, NAMED)],
    ids=[*(f"{label}by line" for label in (*NAMED, "0: ")), *(f"{x}by block" for x in NAMED)],
)
def test_of_ranks_that_print_plain_lines_the_first_ones_count(
    tmp_path: Path, lines: list[str]
) -> None:
    parsed = read(tmp_path, *lines)
    (run,) = parsed.runs
    assert run.step.tolist() == list(range(1, STEPS + 1))
    assert run.step_time_s.tolist() == [180] + [30] * (STEPS - 1)
    rate = run.steady().sequences_per_s
    assert isinstance(rate, Reading)
    assert rate.value == pytest.approx(2.133)
    assert any("only those of rank 0 are read" in note for note in parsed.notes)
    records = from_file(NXDT, *lines)
    assert [s.index for s in steps(records)] == list(range(1, STEPS + 1))
    assert [s.window.duration_s for s in steps(records)] == [180] + [30] * (STEPS - 1)
    assert any("only those of rank 0 are read" in said for said in marks(records, "assumed"))


@pytest.mark.parametrize("of_epoch", [1, 4])
def test_a_number_before_plain_lines_that_never_comes_again_is_no_rank(
    tmp_path: Path, of_epoch: int
) -> None:
    lines = [line for n in range(STEPS) for line in ("saved", *printed("{0}: ", n // of_epoch, n))]
    assert read(tmp_path, *lines).last.step.tolist() == list(range(1, STEPS + 1))


def test_a_rank_of_a_loop_is_said_to_count_its_own_tokens_though_plain_lines_came_before(
    tmp_path: Path,
) -> None:
    loop = [f"[rank{r}]: step={n} loss=2.5 tokens=64" for n in range(5) for r in (0, 1)]
    assert read(tmp_path, *["step_time: 1.0"] * 3, *loop).last.of_one_rank
    assert read(tmp_path, "throughput: 9.0", *loop).last.of_one_rank


@pytest.mark.parametrize("name", ["throughput", "seq/s"])
def test_a_log_of_nothing_but_rates_has_their_mean_after_the_first(
    tmp_path: Path, name: str
) -> None:
    lines = [f"{name}: {rate}" for rate in (0.5, 1, 3, 3)]
    run = read(tmp_path, *lines).last
    assert run.rates["sequences/s"].tolist() == [0.5, 1, 3, 3]
    rate = run.steady().sequences_per_s
    assert isinstance(rate, Reading)
    assert rate.value == pytest.approx(3 / (1 + 1 / 3 + 1 / 3))


def test_a_rate_before_the_steps_of_a_loop_is_no_row(tmp_path: Path) -> None:
    loop = [f"step={n} loss=2.5 throughput=3.5" for n in range(4)]
    assert read(tmp_path, "throughput: 150.5", *loop).last.step.tolist() == [0, 1, 2, 3]
    timed = [line for _ in range(3) for line in ("step_time: 2.0", "throughput: 3.0")]
    assert read(tmp_path, "throughput: 9.0", *timed).last.step.tolist() == [1, 2, 3]


def test_rates_alone_are_rows_however_many_there_are_and_do_not_all_wait(tmp_path: Path) -> None:
    texts = [f"throughput: {n}.5" for n in range(1, 201)]
    assert read(tmp_path, *texts).last.rates["sequences/s"].tolist() == [
        n + 0.5 for n in range(1, 201)
    ]
    lines = iter([Line(text) for text in texts])
    next(NXDT.dialect().joined(lines))
    assert len(list(lines)) > 100


def test_stamps_of_plain_lines_are_when_the_run_was_and_are_not_denied(tmp_path: Path) -> None:
    lines = [
        f"2025-06-10 01:{45 + n}:0{k},100 {said}"
        for n in range(4)
        for k, said in enumerate(("step_time: 30", "throughput: 2.0", "loss: 2.5"))
    ]
    parsed = read(tmp_path, *lines)
    assert str(parsed.last.first_stamp) == "2025-06-10 01:45:00.100000+00:00"
    assert str(parsed.last.last_stamp) == "2025-06-10 01:48:00.100000+00:00"
    # A minute apart, and each says 30 s: nothing tells how many steps lie between two.
    assert parsed.last.clock == "step times"
    assert parsed.last.period_s[1:].tolist() == [30] * 3
    assert (
        "by its timestamps the log took 180 s from the first step line to the last, by its printed "
        "step times 90 s: the rest is not in the step times, or lines stand for several steps"
    ) in parsed.notes
    said = marks(from_file(NXDT, *lines), "assumed")
    assert not any("has no timestamps" in one for one in said)
    assert any("times are its step times added up" in one for one in said)


def test_a_step_that_is_numbered_without_a_colon_keeps_its_number(tmp_path: Path) -> None:
    lines = [f"step {n} step_time: 2.0 throughput: 0.6 loss: 9" for n in range(10, 60, 10)]
    parsed = read(tmp_path, *lines)
    assert parsed.last.step.tolist() == [10, 20, 30, 40, 50]
    assert parsed.last.step_time_s.tolist() == [2.0] * 5
    assert not any("no step number" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("said", "unit", "rate"),
    [
        ("throughput: 2.0 seq/s", "sequences/s", 2),
        ("throughput: 8,724 tokens/s", "tokens/s", 8724),
        ("throughput=3.5 samples/sec |", "samples/s", 3.5),
        ("throughput: 2.0 tokens/s: 9", "throughput", 2),
    ],
)
def test_the_unit_behind_a_loops_throughput_is_its_unit(
    tmp_path: Path, said: str, unit: str, rate: float
) -> None:
    run = read(tmp_path, *[f"step: {n} | loss: 3.0 | {said}" for n in range(1, 4)]).last
    assert run.step.tolist() == [1, 2, 3]
    assert run.rates[unit].tolist() == [rate] * 3


def test_plain_lines_that_name_their_units_are_recognised_by_them(tmp_path: Path) -> None:
    lines = [x for _ in range(3) for x in ("step_time: 30100 ms", "throughput: 8724 tokens/s")]
    run = read(tmp_path, *lines).last
    assert run.step_time_s.tolist() == [30.1] * 3
    assert run.rates["tokens/s"].tolist() == [8724] * 3
    assert read(tmp_path, *lines[1::2]).last.rates["tokens/s"].tolist() == [8724] * 3


def test_the_first_step_that_says_how_long_it_took_is_not_said_to_start_the_clock(
    tmp_path: Path,
) -> None:
    timed = read(tmp_path, *[f"step_time: {s}" for s in (180, 30, 30, 30)]).last.steady()
    assert (timed.first, timed.rule) == (1, "the first row left out: its steps include compilation")
    stamped = [f"2026-01-01 10:00:0{n} step={n} loss=2" for n in range(4)]
    rates = read(tmp_path, "throughput: 2.0", "throughput: 2.5").last.steady()
    assert rates.rule == timed.rule
    rule = read(tmp_path, *stamped).last.steady().rule
    assert rule.startswith(
        "the first row left out: it only starts the clock, and its steps include"
    )


def test_a_step_time_or_a_rate_of_0_is_refused_and_that_is_said(tmp_path: Path) -> None:
    figures = (("30", "2.0"), ("0", "0"), ("30", "4.0"), ("30", "-1"))
    lines = [x for s, r in figures for x in (f"step_time: {s}", f"throughput: {r}")]
    parsed = read(tmp_path, *lines)
    assert [x for x in parsed.last.step_time_s.tolist() if x == x] == [30] * 3
    found = summarize_log(parsed).throughput
    assert (found.min, found.max, found.count) == (4, 4, 1)
    notes = [note for note in parsed.notes if "left out" in note]
    assert notes == [
        "step_time=0 of step 2 can't be how long a step took: it is left out, and so are others "
        "like it",
        "throughput=0 of step 2 can't be a pace: it is left out, and so are others like it",
    ]
