"""A log as columns, and what it came to once it had settled. Figures worked out by hand."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from ergmeter.importers.log import ParsedLog, read_log
from ergmeter.neuron.training_log import LossStatistics, summarize_log
from ergmeter.records import Missing, Reading
from tests.unit.importers.captured import capture
from tests.unit.importers.programs import TITAN_STARTS, megatron, nxdt, titan


def read(tmp_path: Path, *texts: str, end: str = "\n") -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text(end.join(texts) + end, encoding="utf-8")
    return read_log(path)


def test_bars_give_columns(tmp_path: Path) -> None:
    bars = [nxdt(n, 100 + 20 * n + k, loss=f"{7 - n / 10}") for n in range(1, 6) for k in range(3)]
    parsed = read(tmp_path, *bars, end="\r")
    (run,) = parsed.runs
    assert parsed.format == "nxdt"
    assert parsed.lines == 15
    assert run.step.tolist() == [1, 2, 3, 4, 5]
    assert run.loss.tolist() == [6.9, 6.8, 6.7, 6.6, 6.5]
    assert run.learning_rate.tolist() == [2.73e-5] * 5
    assert run.grad_norm.tolist() == [8.6] * 5
    assert run.t_s.tolist() == [120, 140, 160, 180, 200]
    assert run.clock == "bar"
    assert run.samples[1:].tolist() == [32] * 4
    assert np.isnan(run.samples[0])
    assert run.rates["sequences/s"].tolist() == [0.108] * 5
    assert np.isnan(run.step_time_s).all()


def test_the_rate_is_samples_over_time_and_not_the_mean_of_the_printed_rates(
    tmp_path: Path,
) -> None:
    # Four of 20 s and one of 100 s: 160 samples in 180 s. The bars say 0.108 each.
    times = [600, 620, 640, 660, 680, 780]
    run = read(tmp_path, *[nxdt(n, t) for n, t in enumerate(times, 1)]).last
    found = run.steady()
    assert (found.first, found.last) == (1, 6)
    rate = found.sequences_per_s
    assert isinstance(rate, Reading)
    assert (rate.value, rate.unit, rate.basis) == (160 / 180, "sequences/s", "derived")
    assert "160 sequences in 180 s by the progress bar" in rate.note
    # Whole seconds: the window is 179 to 181 s.
    assert (rate.low, rate.high) == pytest.approx((160 / 181, 160 / 179), rel=1e-4)
    assert isinstance(found.step_s, Reading)
    assert found.step_s.value == 36
    assert "the first row left out" in found.rule
    assert isinstance(found.tokens_per_s, Missing)


def test_rows_are_left_out_until_the_step_time_settles(tmp_path: Path) -> None:
    # Two slow steps, then 18 and 22 s in turn.
    times = [1000, 1300, 1500, *(1500 + 20 * n - n % 2 * 2 for n in range(1, 21))]
    found = read(tmp_path, *[nxdt(n, t) for n, t in enumerate(times, 1)]).last.steady()
    assert found.first == 3
    assert "until the step time settled (MSER)" in found.rule
    assert isinstance(found.sequences_per_s, Reading)
    assert found.sequences_per_s.value == 32 / 20


def test_without_times_it_is_the_mean_of_what_was_printed_and_says_so(tmp_path: Path) -> None:
    lines = [f"throughput: {rate}\nloss: 2.5" for rate in (0.5, *[1, 3] * 8)]
    found = read(tmp_path, *lines).last.steady()
    rate = found.sequences_per_s
    assert isinstance(rate, Reading)
    assert rate.value == pytest.approx(16 / (8 + 8 / 3))  # as much work at each
    assert rate.basis == "reported"
    assert "harmonic mean of 16 printed figures, not samples over time" in rate.note
    assert isinstance(found.step_s, Missing)


def test_printed_rates_count_from_where_their_average_has_no_compile_in_it(tmp_path: Path) -> None:
    """Those of NXDT's bar are means over ten steps: those of steps 1 to 10 hold the first."""
    bars = [nxdt(n, 10 * n) for n in range(1, 31)]
    bars = [re.sub("consumed_samples=[^,]*, ", "", bar) for bar in bars]
    bars = [bar.replace("0.108", "1.0" if n <= 10 else "2.0") for n, bar in enumerate(bars, 1)]
    rate = read(tmp_path, *bars).last.steady().sequences_per_s
    assert isinstance(rate, Reading)
    assert rate.value == 2
    assert "as each is a mean over 10 steps" in rate.note


def test_what_rests_on_printed_step_times_is_reported(tmp_path: Path) -> None:
    lines = [megatron(n, 0, ms=500.0).partition("] ")[2] for n in range(10, 60, 10)]
    run = read(tmp_path, *lines).last
    found = run.steady()
    assert run.clock == "step times"
    assert isinstance(found.sequences_per_s, Reading)
    assert (found.sequences_per_s.value, found.sequences_per_s.basis) == (256, "reported")
    assert isinstance(found.step_s, Reading)
    assert (found.step_s.value, found.step_s.basis) == (0.5, "reported")


def test_each_run_of_a_log_has_its_own_columns(tmp_path: Path) -> None:
    lines = [TITAN_STARTS, *(titan(n, n) for n in range(10, 60, 10))]
    parsed = read(tmp_path, *lines, *(titan(n, 1000 + n) for n in range(30, 60, 10)))
    assert [run.step.tolist() for run in parsed.runs] == [[10, 20, 30, 40, 50], [30, 40, 50]]
    assert [len(run) for run in parsed.runs] == [5, 3]
    for run in parsed.runs:
        rate = run.steady().tokens_per_s
        assert isinstance(rate, Reading)
        assert rate.value == 64 * 8192
    assert any("2 runs in one log" in note for note in parsed.notes)
    # Of each run its own: 10 to 50 s, and those that were 1000 s later.
    day = datetime(2025, 6, 16, tzinfo=timezone.utc)
    times_s = [(10, 50), (1030, 1050)]
    assert [(run.first_stamp, run.last_stamp) for run in parsed.runs] == [
        (day + timedelta(seconds=first_s), day + timedelta(seconds=last_s))
        for first_s, last_s in times_s
    ]
    stamps = summarize_log(parsed).timestamps
    assert (stamps.first, stamps.last) == ("2025-06-16 00:17:10", "2025-06-16 00:17:30")


@pytest.mark.parametrize(
    ("lines", "lengths"),
    [
        ([f"epoch={e} step={n} loss=2" for e in (0, 1) for n in range(5)], [10]),
        ([f"epoch=0 step={n} loss=2" for _ in (0, 1) for n in range(5)], [5, 5]),
        ([f"step={n} loss=2" for _ in (0, 1) for n in range(5)], [5, 5]),
        ([f"[10:00:{r * 5 + n:02d}] step={n} loss=2" for r in (0, 1) for n in range(5)], [10]),
        ([f"[1{r}:00:{n:02d}] step={n} loss=2" for r in (0, 1) for n in range(5)], [5, 5]),
    ],
    ids=["epochs", "the same epoch", "nothing told", "at the usual pace", "an hour later"],
)
def test_a_loops_numbers_that_begin_again_are_an_epoch_or_another_run(
    tmp_path: Path, lines: list[str], lengths: list[int]
) -> None:
    assert [len(run) for run in read(tmp_path, *lines).runs] == lengths


@pytest.mark.parametrize(
    ("texts", "done"),
    [
        (["step={0} loss=2 total_tokens={1}"], [64, 64, 64, 64]),
        (["step={0} loss=2 tokens_per_step=64"], [64, 64, 64, 64]),
        (["step={0} loss=2 tokens={1}"], [64, 64, 64, 64]),
        (["step={0} loss=2", "step={0} tokens_per_step=64"], [64, 64, 64, 64]),
    ],
)
def test_counts_are_what_was_done_since_the_row_before(
    tmp_path: Path, texts: list[str], done: list[int]
) -> None:
    lines = [text.format(n, 64 * n) for n in range(1, 6) for text in texts]
    run = read(tmp_path, *lines).last
    assert run.loss.tolist() == [2.0] * 5
    assert run.tokens[1:].tolist() == done


def test_a_trainers_output_in_a_file_has_its_steps_losses_and_the_bars_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tee.log"
    path.write_text("".join(text for _, _, text in capture("hf_pipe_bar_no_5").chunks))
    parsed = read_log(path)
    assert parsed.format == "hf_trainer"
    assert parsed.last.step.tolist() == [5, 10, 15, 20, 25, 30]
    assert parsed.last.clock == "bar"
    path.write_text("".join(text for _, _, text in capture("hf_pty_bar_all_1").chunks))
    captured = capture("hf_pty_bar_all_1")
    run = read_log(path).last
    assert run.step.tolist() == list(range(1, 21))
    assert run.tokens[1:].tolist() == [captured.computed(n, n) for n in range(2, 21)]
    assert run.clock == "train_runtime"


def test_a_clock_that_falls_back_begins_another_run_and_that_is_said(tmp_path: Path) -> None:
    hours = [10] * 3 + [9] * 3
    lines = [f"2026-01-01 {h:02d}:{n:02d}:00 step={n} loss=2" for n, h in enumerate(hours, 1)]
    parsed = read(tmp_path, *lines)
    assert [run.step.tolist() for run in parsed.runs] == [[1, 2, 3], [4, 5, 6]]
    assert "2 runs in one log: the time went back" in parsed.notes


def test_a_loss_that_is_nan_is_told_from_one_that_was_not_printed(tmp_path: Path) -> None:
    losses = ("loss=2.5 ", "loss=nan ", "", "loss=inf ", "")
    lines = [f"step={n} {said}tokens=8" for n, said in enumerate(losses, 1)]
    run = read(tmp_path, *lines).last
    assert run.has_loss.tolist() == [True, True, False, True, False]
    assert run.loss[0] == 2.5
    assert np.isnan(run.loss[[1, 2, 4]]).all()
    assert np.isinf(run.loss[3])
    assert summarize_log(read(tmp_path, *lines)).losses == LossStatistics(
        2.5, 2.5, 2.5, 1, first=2.5, last=2.5,
        not_finite=2, first_not_finite_step=2, not_printed=2,
    )  # fmt: skip


def test_a_nan_that_was_printed_stands_though_the_step_is_told_of_again(tmp_path: Path) -> None:
    run = read(tmp_path, "step=1 loss=nan tokens=8", "step=1 loss=2.0 tokens=8").last
    assert (len(run), bool(np.isnan(run.loss[0])), run.has_loss.tolist()) == (1, True, [True])


def test_one_printed_figure_is_no_mean(tmp_path: Path) -> None:
    found = read(tmp_path, "step_time: 2.0", "throughput: 3.0", "loss: 2.5").last.steady()
    assert isinstance(found.sequences_per_s, Reading)
    assert found.sequences_per_s.note.startswith("the one printed figure, not samples over time;")
    assert isinstance(found.step_s, Reading)
    assert found.step_s.note.startswith("the one printed step time;")
