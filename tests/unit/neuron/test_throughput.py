"""The throughput of a job: as given, else of the log's steady state, else absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.importers.log import ParsedLog, read_log
from ergmeter.neuron.training_log import Throughput, about_log, rate_unit, throughput
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


@pytest.mark.parametrize(
    "form",
    [
        "step_time: 1.2\nthroughput: 2.1\nloss: 2.3",
        "step_time: 1.2, throughput: 2.1, loss: 2.3",
        "step {step} loss: 2.3 throughput: 2.1",
        "step: {step}, throughput: 2.1, loss: 2.3",
        "step: {step}, step_time: 1.2, throughput: 2.1",
        '{{"step": {step}, "loss": 2.3, "step_time": 1.2, "throughput": 2.1}}',
    ],
)
def test_a_printed_throughput_is_read_in_every_layout(tmp_path: Path, form: str) -> None:
    """A step time that contradicts it, by the batch, is a note."""
    log = log_of(tmp_path, *(form.format(step=step) for step in range(1, 13)))
    found = pace(log)
    assert found.seq_per_s == pytest.approx(2.1)
    assert "throughput read as sequences/s" in " ".join((found.source, *log.notes))
    assert rate_unit(log.last) is not None
    notes = list(about_log(log, job(4096), found))
    assert len(notes) == ("step_time" in form)
    for note in notes:  # 64 sequences in 1.2 s
        assert note.startswith("the log prints 2.1 sequences/s, while 64 sequences (")
        assert "in its 1.2 s a step make 53.33: what it prints is taken" in note


def test_a_throughput_without_a_unit_is_not_taken_where_tokens_are_counted(tmp_path: Path) -> None:
    """It may be of tokens: 64 x 4096 of them in 32 s."""
    line = "step={} loss=2.3 tokens=262144 step_time=32 throughput=8192"
    found = pace(log_of(tmp_path, *(line.format(step) for step in range(1, 13))))
    assert found.seq_per_s == pytest.approx(2.0)
    assert "in sequences of 4096" in found.source


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
