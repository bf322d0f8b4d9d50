"""The throughput of a job: as given, else of the log's steady state, else absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.importers.log import ParsedLog, read_log
from ergmeter.neuron.training_log import Throughput, throughput
from ergmeter.records import Reading
from tests.unit.neuron.test_mfu import job


def log_of(tmp_path: Path, *lines: str) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines) + "\n")
    return read_log(path)


def pace(log: ParsedLog | None, given: float | None = None) -> Throughput:
    return throughput(given, log, job(4096))


def test_what_is_given_wins(tmp_path: Path) -> None:
    lines = [line for _ in range(5) for line in ("step_time: 32.0", "throughput: 9.0")]
    found = pace(log_of(tmp_path, *lines), 2.1)
    assert (found.seq_per_s, found.is_from_log) == (2.1, False)


def test_nobody_s_word_is_no_throughput() -> None:
    found = pace(None)
    assert found.seq_per_s is None
    assert "--throughput" in found.source


def test_printed_sequences_per_second_are_taken_after_the_first(tmp_path: Path) -> None:
    rates = ("0.1", "1.0", "4.0", "4.0", "1.0")  # 4 pieces in 1 + 1/4 + 1/4 + 1 of their time
    found = pace(log_of(tmp_path, *(f"loss: 2.3 throughput: {rate}" for rate in rates)))
    assert found.seq_per_s == pytest.approx(4 / 2.5)
    assert found.is_from_log
    assert "train.log" in found.source


def test_tokens_per_second_become_sequences(tmp_path: Path) -> None:
    lines = (f"loss: 2.3 tokens/sec: {rate}" for rate in (100, 8192, 8192, 8192))
    found = pace(log_of(tmp_path, *lines))
    assert found.seq_per_s == pytest.approx(2.0)
    assert "in sequences of 4096" in found.source


def test_a_step_s_time_and_the_batch_give_sequences(tmp_path: Path) -> None:
    found = pace(log_of(tmp_path, *(f"step_time: {s}" for s in (600, 32, 32, 32, 32))))
    assert found.seq_per_s == pytest.approx(2.0)
    assert "64 sequences a step" in found.source


def test_a_pace_by_the_batch_has_the_interval_of_the_step_time_turned_round(
    tmp_path: Path,
) -> None:
    # 20 steps of 32 s: 640 s by a clock of whole seconds, so known to one in 640.
    log = log_of(tmp_path, *(f"step_time: {time_s}" for time_s in (600, *[32] * 20)))
    found = throughput(None, log, job(4096))
    assert found.seq_per_s == pytest.approx(2.0)
    assert isinstance(found.result, Reading)
    assert found.result.low == pytest.approx(2 * (1 - 1 / 640))
    assert found.result.high == pytest.approx(2 / (1 - 1 / 640))


def test_a_pace_that_was_given_or_printed_has_no_interval(tmp_path: Path) -> None:
    log = log_of(tmp_path, *(f"loss: 2.3 throughput: {rate}" for rate in (0.1, 1.0, 4.0)))
    for given in (2.1, None):
        found = throughput(given, log, job(4096)).result
        assert isinstance(found, Reading)
        assert (found.low, found.high) == (None, None)
