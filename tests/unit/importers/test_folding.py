"""A log of millions of step lines: its rows are folded, its figures are those of the lines."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ergmeter.importers import log, logfile
from ergmeter.importers.engine import columns
from ergmeter.importers.engine import columns as folding
from ergmeter.importers.log import LogRun, read_log
from ergmeter.records import FloatArray, Reading

ROWS = 1 << 6  # in place of so many as a test has no time for


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (columns, folding, log):
        monkeypatch.setattr(module, "MOST_ROWS", ROWS)
    monkeypatch.setattr(columns, "FOLD_ROWS", ROWS // 2)
    monkeypatch.setattr(folding, "FOLDED_ROWS", ROWS // 2)


def durations(lines: int) -> FloatArray:
    """A first step of a minute, then a slow stretch, then one to one and a half seconds."""
    took_s = 1 + np.arange(lines) % 7 / 12
    took_s[0], took_s[1:40] = 60.0, 4.0
    rounded: FloatArray = took_s.round(3)
    return rounded


def written(path: Path, lines: int) -> LogRun:
    """Each step is of two sequences; its printed rate is 2 over its time."""
    with path.open("w") as log_file:
        for step, took_s in enumerate(durations(lines), start=1):
            rate, loss = 2 / took_s, "nan" if step == 500 else f"{4 - step / lines:.4f}"
            log_file.write(
                f"step: {step} step_time: {took_s} samples/sec: {rate:.6f} batch_size: 2 "
                f"loss: {loss}\n"
            )
    return read_log(path).last


def test_rows_stand_for_more_lines_the_more_there_are(few_rows: None, tmp_path: Path) -> None:
    run = written(tmp_path / "train.log", 1000)
    assert run.lines[0] == 1  # it starts the clock
    # 999 lines behind it, in at most 32 rows: 32 each, but for the last.
    assert (run.lines_per_row, len(run), run.lines.sum()) == (32, 33, 1000)
    assert run.lines[-1] == 999 - 31 * 32
    note = read_log(tmp_path / "train.log").notes[-1]
    assert note.startswith("1000 step lines: 32 to a row")


def test_folded_figures_are_those_of_the_lines(few_rows: None, tmp_path: Path) -> None:
    run = written(tmp_path / "train.log", 1000)
    took_s = durations(1000)
    steady = run.steady(skip_rows=2)  # of 1 and of 32 lines
    after = took_s[33:]
    assert isinstance(steady.step_s, Reading)
    assert isinstance(steady.sequences_per_s, Reading)
    assert steady.step_s.value == pytest.approx(after.mean(), rel=1e-12)
    assert steady.sequences_per_s.value == pytest.approx(2 * len(after) / after.sum(), rel=1e-12)
    printed = run.printed["step_time_s"].after(2)
    assert printed.count == 967
    assert printed.mean == pytest.approx(after.mean(), rel=1e-12)
    assert (np.nanmin(printed.low), np.nanmax(printed.high)) == (after.min(), after.max())
    rates = run.printed["samples/s"].after(2)
    assert rates.mean == pytest.approx((2 / after).mean(), rel=1e-6)
    assert rates.harmonic_mean == pytest.approx(2 / after.mean(), rel=1e-6)


def test_warmup_ends_with_the_row_that_holds_its_end(few_rows: None, tmp_path: Path) -> None:
    steady = written(tmp_path / "train.log", 1000).steady()
    # The slow stretch is lines 2 to 40, and rows end at line 33 and line 65.
    assert (steady.first, "the first 65 rows left out" in steady.rule) == (3, True)


def test_steps_and_losses_are_counted_line_by_line(few_rows: None, tmp_path: Path) -> None:
    tally = written(tmp_path / "train.log", 1000).tally
    assert (tally.steps, tally.first_step, tally.last_step) == (1000, 1, 1000)
    assert (tally.first_loss, tally.last_loss) == (3.999, 3.0)
    assert (tally.losses_not_finite, tally.first_not_finite_step) == (1, 500)
    assert tally.losses_not_printed == 0


def test_earlier_runs_of_a_log_are_kept_in_few_rows(
    few_rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_FEW_ROWS", 8)
    path = tmp_path / "train.log"
    runs = [f"step: {n} epoch: 0 loss: 2 step_time: 1.5\n" for _ in range(9) for n in range(1, 51)]
    path.write_text("".join(runs))
    parsed = read_log(path)
    assert len(parsed.runs) == 9
    assert sum(len(run) for run in parsed.runs[:-1]) < 2 * ROWS
    assert len(parsed.last) == 50
    assert all(run.lines.sum() == 50 for run in parsed.runs)


def test_memory_does_not_grow_with_the_lines(
    few_rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfile, "_BLOCK_BYTES", 1 << 14)
    peaks = []
    for lines in (2_000, 8_000):
        path = tmp_path / f"{lines}.log"
        written(path, lines)
        tracemalloc.start()
        read_log(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Unfolded, 6,000 more rows of 9 columns of doubles are 430 kB.
    assert peaks[1] - peaks[0] < 100_000
